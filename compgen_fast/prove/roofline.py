"""How long a case should take on a GPU that is not here: modelled, never measured.

Bytes come from the compiled sm_80 code, of which some blocks are emulated at the real shape:

    necessary   every input once and every result once; of a gather, the sectors that hold what is gathered
    moved       the distinct sectors of 32 bytes that each block touches, scaled to the grid: a second access to a
                sector by the same block is taken to find it in the first-level cache, one by another block is not
    requested   the sectors of every warp's instruction, with no cache at all

The FLOPs are those executed, padding included. A GPU then needs at least bytes / bandwidth for the memory, and FLOPs /
peak for its matrix units and for the others; the largest of the three is the bound. Two things keep it from the bound
of the memory, and the model takes both into account: multiprocessors that idle because blocks do not divide evenly
among them, and too few bytes on their way to cover the memory's latency (Little's law).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch

from compgen_fast.prove.catalogue import Case, configured
from compgen_fast.prove.chips import CHIPS, Peak
from compgen_fast.prove.emulate import Emulation, traced
from compgen_fast.prove.emulator.memory import SECTOR

SAMPLE = 12  # blocks that are emulated: a multiple of the neighbouring heads, which start at different bytes
MOST_MOVED = {"forward": 1.15, "backward": 1.3, "step": 1.15}
"""Times the necessary bytes."""


@dataclass(frozen=True)
class LaunchWork:
    """What one launch does on its whole grid, in bytes and FLOPs."""

    kernel: str
    moved: float
    requested: float
    matrix_flops: float
    vector_flops: float


@dataclass(frozen=True)
class Work:
    """What a case must move, and what its launches do."""

    necessary: int
    launches: tuple[LaunchWork, ...]

    @classmethod
    def restored(cls, stored: dict[str, Any]) -> Work:
        """From what dataclasses.asdict made of one."""
        return cls(stored["necessary"], tuple(LaunchWork(**each) for each in stored["launches"]))

    @property
    def moved(self) -> float:
        return sum(each.moved for each in self.launches)

    @property
    def requested(self) -> float:
        return sum(each.requested for each in self.launches)

    @property
    def matrix_flops(self) -> float:
        return sum(each.matrix_flops for each in self.launches)

    @property
    def vector_flops(self) -> float:
        return sum(each.vector_flops for each in self.launches)

    @property
    def excess(self) -> float:
        """Bytes moved for each that is necessary."""
        return self.moved / self.necessary


@dataclass(frozen=True)
class Prediction:
    """Modelled seconds of a case on a GPU, what bounds it, and the share of the memory's bandwidth it would use."""

    gpu: str
    seconds: float
    bound: str
    bandwidth_share: float


def work(case: Case, architecture: str = "sm_80") -> Work:
    """Traced with the configurations of an architecture; the code is that for sm_80 in any case."""
    with configured(architecture):
        return Work(necessary_bytes(case, case.arguments(values=True)), launch_work(case))


def launch_work(case: Case, sample: int = SAMPLE) -> tuple[LaunchWork, ...]:
    """Of each launch, by the configurations in force and the trace of so many blocks."""
    arguments = case.arguments(values=True)
    with traced(sample) as emulations:
        case.launch(arguments)
    return tuple(_scaled(each) for each in emulations)


def _scaled(emulation: Emulation) -> LaunchWork:
    share = emulation.blocks / emulation.ran
    traffic = (*emulation.loads.values(), *emulation.stores.values())
    return LaunchWork(
        emulation.name,
        share * sum(each.moved() for each in traffic),
        share * SECTOR * sum(each.sectors for each in traffic),
        share * _matrix_flops(emulation),
        share * _vector_flops(emulation),
    )


def necessary_bytes(case: Case, arguments: tuple[Any, ...]) -> int:
    """Bytes that any implementation must read and write."""
    if case.op == "latent_adam":
        return _necessary_of_a_step(case, arguments)
    tensors = case.inputs(arguments)
    if case.op == "recon_error" and case.variant == "chosen":
        y, x, weights, images, pixels = tensors
        tensors = [y, images, pixels]
        gathered = _gathered(images, pixels, x.shape[1] * x.shape[2], x.shape[2])
        gathered += _gathered(images, pixels, weights.shape[1] * weights.itemsize, weights.itemsize)
    else:
        gathered = 0
    if case.op == "jet_slot_softmax" and case.direction == "backward":
        tensors[1] = tensors[1][:4]  # of the weights, p and its derivatives
    results = case.results_on_meta()
    return gathered + sum(each.numel() * each.itemsize for each in (*tensors, *results))


def _gathered(images: torch.Tensor, pixels: torch.Tensor, image_bytes: int, pixel_bytes: int) -> int:
    """Bytes of the sectors that hold the chosen pixels of the chosen images."""
    first = images.unique()[:, None] * image_bytes + pixels.unique()[None] * pixel_bytes
    return SECTOR * len(torch.cat([first, first + pixel_bytes - 1]).div(SECTOR, rounding_mode="floor").unique())


def _necessary_of_a_step(case: Case, arguments: tuple[Any, ...]) -> int:
    """Of candidates that take part: z, both moments and the gradient are read, the first three written, the best kept
    where it is better. Beside the rows, seven numbers of a candidate.
    """
    best_loss, active, grad, loss = (arguments[place] for place in (4, 8, 9, 10))
    taking_part, better = int(active.sum()), int((active & (loss < best_loss)).sum())
    C, L = case.sizes
    rows = taking_part * L * (6 * 4 + grad.element_size()) + better * L * 4
    return int(rows + C + taking_part * 6 * 4 + better * 4)


def _matrix_flops(emulation: Emulation) -> int:
    """Of mma.sync.aligned.m16n8k16…: one product of a warp each."""
    flops = 0
    for opcode, count in emulation.executed.items():
        if shape := re.match(r"mma\.sync\.aligned\.m(\d+)n(\d+)k(\d+)", opcode):
            m, n, k = (int(size) for size in shape.groups())
            flops += 2 * m * n * k * count * emulation.threads // 32
    return flops


def _vector_flops(emulation: Emulation) -> int:
    """One for each thread and instruction on fp32, two for a fused one; special functions take four times as long."""
    flops = 0
    for opcode, count in emulation.executed.items():
        if re.match(r"(fma|add|sub|mul|max|min)\..*f32", opcode):
            flops += (2 if opcode.startswith("fma") else 1) * count * emulation.threads
        elif re.match(r"(ex2|rcp|rsqrt|sqrt|lg2|tanh)\.", opcode):
            flops += 4 * count * emulation.threads
    return flops


def predict(work: Work, peak: Peak) -> Prediction:
    """The bound, with perfect balance and latency covered; `tuning` adds what a configuration does to both."""
    times = {
        "memory": work.moved / peak.bandwidth,
        "matrix units": work.matrix_flops / peak.matrix,
        "vector units": work.vector_flops / peak.vector,
    }
    bound = max(times, key=lambda name: times[name])
    return Prediction(peak.name, times[bound], bound, work.necessary / peak.bandwidth / times[bound])


PEAKS = tuple(CHIPS[name].peak for name in ("sm_80", "sm_90", "gfx942"))
