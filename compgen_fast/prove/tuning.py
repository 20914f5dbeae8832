"""Chooses how kernels are launched, for each row of kernels/configs.json: by the model, or by the clock of a real GPU.

A row serves up to so many slots and columns. Its candidates are tiles, warps and stages; where no real shape looks the
row up, what is shipped with half and twice the pixels, unless none of that fits into registers. A candidate is judged
on the real shapes that look the row up (`catalogue.REAL`), or at the row's limits, by the mean over them of

    seconds / seconds that the necessary bytes take at the memory's full bandwidth

With a GPU the seconds are measured. Without one they are modelled (see roofline.py) from the code compiled for the
architecture: kernels that break a rule, there or at the limits of their row (see budgets.py), and those that move too
much are out, and of the memory's bandwidth a launch gets the share that is left by

    balance    blocks that do not divide evenly among the multiprocessors
    latency    bytes on their way in a multiprocessor (loads in the code × threads × blocks side by side) that are fewer
               than bandwidth × latency / multiprocessors
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from compgen_fast.files import write_whole
from compgen_fast.kernels import launch as launching
from compgen_fast.kernels.launch import Config
from compgen_fast.prove.ahead_of_time import TARGETS, Figures, Launch, cost, recorded_launches
from compgen_fast.prove.budgets import broken_rules
from compgen_fast.prove.catalogue import FP16, REAL, Case, ShippedRow, shipped_rows
from compgen_fast.prove.chips import CHIPS, Chip, occupancy
from compgen_fast.prove.ladder import Row
from compgen_fast.prove.roofline import MOST_MOVED, LaunchWork, launch_work, necessary_bytes

PROCESSES = 2
FINALISTS = 4
LARGEST_TILE = 16 << 10  # bytes
ROWS = ("jet_norm", "latent_adam")  # whose tiles are whole rows
MOST_THREADS = 1024  # of a block, on all of them
SAMPLE = {True: 6, False: 2}  # blocks that are traced for each candidate, at real shapes and at limits
LATENCY = 700e-9  # seconds from a load to its value when the memory is busy, about the same on all of them
Candidate = tuple[int, int, int, int]
"""BLOCK_N, BLOCK_D, num_warps, num_stages."""
Judge = Callable[[Case, ShippedRow, Candidate, str], float]
"""Seconds of a case when a row is the candidate."""


@dataclass(frozen=True)
class Choice:
    """What was chosen for a row, and what was there before; scores are times the necessary seconds."""

    row: ShippedRow
    old: Candidate
    new: Candidate
    old_score: float
    new_score: float


def space(row: ShippedRow) -> list[Candidate]:
    """What a row could be."""
    if row.kernel.startswith(ROWS):
        tiles = [(N, row.D) for N in (1, 2, 4, 8, 16, 32, 64, 128) if 512 <= N * row.D <= 4096]
        return [(N, D, warps, 1) for N, D in tiles for warps in (4, 8, 16, 32) if 4 <= N * D // (32 * warps) <= 16]
    widest, wide = min(row.D, 128), row.bits == 32 or row.D > 64  # where registers may be short, half a row at a time
    widths = {widest, widest // 2 if wide else widest} | (set() if _real(row) else {16, 32, 64})
    tiles = [(N, D) for N in (16, 32, 64, 128) for D in sorted(widths) if N * D * row.bits // 8 <= LARGEST_TILE]
    stages = (1, 2) if row.bits == 16 and _real(row) else (1,)  # without matrix units nothing is copied ahead
    return [(N, D, warps, ahead) for N, D in tiles for warps in (4, 8) for ahead in stages]


def near(row: ShippedRow) -> list[Candidate]:
    """What is shipped, with half and twice the pixels."""
    least = 1 if row.kernel.startswith(ROWS) else 16  # what products of matrices take
    return [(N, *_shipped(row)[1:]) for N in (row.BLOCK_N // 2, row.BLOCK_N * 2) if least <= N]


def judged_on(row: ShippedRow) -> tuple[Case, ...]:
    """The real shapes that look a row up; fp16 compiles like bf16."""
    return _real(row) or row.cases()


@functools.cache
def _real(row: ShippedRow) -> tuple[Case, ...]:
    return tuple(case for case in REAL if case.dtype != FP16 and _key(row) in _looked_up(case))


def _key(row: ShippedRow) -> tuple[str, int, int, int]:
    return row.kernel, row.bits, row.S, row.D


@functools.cache
def _looked_up(case: Case) -> frozenset[tuple[str, int, int, int]]:
    """The rows that a case's launches look up; their limits are the same on all architectures."""
    keys: list[tuple[str, int, int, int]] = []

    def note(name: str, kernel: str, element_size: int, S: int, D: int) -> Config:
        config = original(name, kernel, element_size, S, D)
        limits = [(row.S, row.D) for row in shipped_rows(name) if (row.kernel, row.bits) == (kernel, 8 * element_size)]
        S, D = launching.padded(S), launching.padded(D)
        keys.append((kernel, 8 * element_size, *next((s, d) for s, d in limits if s >= S and d >= D)))
        return config

    original = launching.looked_up
    with mock.patch.object(launching, "looked_up", note):
        case.results_on_meta()
    return frozenset(keys)


@contextlib.contextmanager
def launched_as(kernel: str, candidate: Candidate) -> Iterator[None]:
    """Within the block, this kernel is launched so, others as they are shipped."""

    def chosen(name: str, asked: str, element_size: int, S: int, D: int) -> Config:
        if asked != kernel:
            return original(name, asked, element_size, S, D)
        block_n, block_d, warps, stages = candidate
        return Config(block_n, min(block_d, launching.padded(D)), launching.padded(S), warps, stages)

    original = launching.looked_up
    with mock.patch.object(launching, "looked_up", chosen):
        yield


# --------------------------------------------------------------------------------------------------- by the model


def modelled(case: Case, row: ShippedRow, candidate: Candidate, architecture: str) -> float:
    """Seconds of a case; infinite where the candidate does not fit, there or at the limits of its row."""
    chip, threads = CHIPS[architecture], candidate[2] * CHIPS[architecture].warp_size
    if threads > MOST_THREADS or (row.kernel.startswith(ROWS) and candidate[0] * candidate[1] < 4 * threads):
        return math.inf  # of whole rows, a thread has at least four numbers: 128 bits of fp32
    if not all(_allowed(each, row.kernel, candidate, architecture) for each in (*row.cases(), case)):
        return math.inf
    launches, figures = _compiled(case, row.kernel, candidate, architecture)
    works = _works(case, row.kernel, candidate[:2])
    if case in REAL and sum(each.moved for each in works) > MOST_MOVED[case.direction] * _necessary(case):
        return math.inf
    return sum(_seconds(*each, chip) for each in zip(launches, figures, works, strict=True))


def _allowed(case: Case, kernel: str, candidate: Candidate, architecture: str) -> bool:
    """Whether no rule is broken that cannot be recorded away (see budgets.py)."""
    return not any(
        next(
            broken_rules(Row("", architecture, case, launch.name, case in REAL, launch.options, each, frozenset())),
            None,
        )
        for launch, each in zip(*_compiled(case, kernel, candidate, architecture), strict=True)
    )


@functools.cache
def _compiled(
    case: Case, kernel: str, candidate: Candidate, architecture: str
) -> tuple[tuple[Launch, ...], tuple[Figures, ...]]:
    with launching.architecture(architecture), launched_as(kernel, candidate), recorded_launches() as launches:
        case.launch(case.arguments(values=False))
    return tuple(launches), tuple(cost(launch, TARGETS[architecture]) for launch in launches)


@functools.cache
def _works(case: Case, kernel: str, tile: tuple[int, int]) -> tuple[LaunchWork, ...]:
    """What a case moves and calculates depends on the tile only: not on warps, stages and the architecture."""
    with launched_as(kernel, (*tile, 4, 1)):
        return launch_work(case, SAMPLE[case in REAL])


def _seconds(launch: Launch, figures: Figures, work: LaunchWork, chip: Chip) -> float:
    peak, warps = chip.peak, int(launch.options.get("num_warps", 4))
    side_by_side = occupancy(chip, figures.registers, figures.shared, warps).blocks
    if not side_by_side:
        return math.inf
    per_processor = math.prod(launch.grid) / peak.multiprocessors
    balance = per_processor / math.ceil(per_processor)
    on_their_way = sum(bits // 8 * count for bits, count in figures.loads.items()) * warps * chip.warp_size
    needed = peak.bandwidth * LATENCY / peak.multiprocessors
    covered = min(side_by_side, max(per_processor, 1)) * on_their_way / needed
    return max(
        work.moved / peak.bandwidth / balance / min(1.0, covered),
        work.matrix_flops / peak.matrix / balance,
        work.vector_flops / peak.vector / balance,
    )


# --------------------------------------------------------------------------------------------------- by the clock


def measured(case: Case, row: ShippedRow, candidate: Candidate, architecture: str) -> float:
    """Seconds of a case on the GPU; infinite where the candidate does not run."""
    from triton.testing import do_bench

    arguments = tuple(each.cuda() if isinstance(each, torch.Tensor) else each for each in case.arguments(values=True))
    try:
        with launched_as(row.kernel, candidate):
            return float(do_bench(lambda: case.launch(arguments), return_mode="median")) / 1e3
    except (RuntimeError, ValueError):  # out of registers or shared memory
        return math.inf


# ------------------------------------------------------------------------------------------------------- choosing


def score(row: ShippedRow, candidate: Candidate, architecture: str, judge: Judge) -> float:
    bandwidth = CHIPS[architecture].peak.bandwidth
    total, cases = 0.0, judged_on(row)
    for case in cases:
        total += judge(case, row, candidate, architecture) * bandwidth / _necessary(case)
        if total == math.inf:  # it runs nowhere then, and the others need not be compiled
            break
    return total / len(cases)


@functools.cache
def _necessary(case: Case) -> int:
    return necessary_bytes(case, case.arguments(values=True))


def scores(row: ShippedRow, architecture: str, judge: Judge, candidates: Sequence[Candidate]) -> dict[Candidate, float]:
    """Of what is shipped and of the candidates."""
    found: dict[Candidate, float] = {}
    for each in dict.fromkeys((_shipped(row), *sorted(candidates))):
        half = (each[0] // 2, *each[1:])
        hopeless = each[0] >= 64 and found.get(half) == math.inf  # half of the tile does not fit
        found[each] = math.inf if hopeless else score(row, each, architecture, judge)
    return found


def choose(row: ShippedRow, architecture: str, judge: Judge, candidates: Sequence[Candidate] | None = None) -> Choice:
    """The best candidate of a row; what is shipped stays unless another is at least 1 % better."""
    return _best(row, scores(row, architecture, judge, space(row) if candidates is None else candidates), architecture)


def _best(row: ShippedRow, found: dict[Candidate, float], architecture: str) -> Choice:
    old = _shipped(row)
    best = min(found, key=lambda each: found[each])
    if not math.isfinite(found[best]):
        raise RuntimeError(
            f"{row.kernel} {row.bits} bit, {row.S} slots of {row.D}: no candidate runs on {architecture}"
        )
    chosen = best if found[best] < 0.99 * found[old] else old
    return Choice(row, old, chosen, found[old], found[chosen])


def _shipped(row: ShippedRow) -> Candidate:
    return row.BLOCK_N, row.BLOCK_D, row.num_warps, row.num_stages


def choices(rows: Sequence[ShippedRow], architectures: Sequence[str], device: str) -> Iterator[tuple[str, Choice]]:
    """What is chosen for each row and architecture, as it is found."""
    if device == "cuda":
        for row, architecture in itertools.product(rows, architectures):
            yield architecture, choose(row, architecture, measured)
        return
    with ProcessPoolExecutor(PROCESSES) as pool:
        for found in pool.map(functools.partial(_choose_by_model, architectures=architectures), rows):
            yield from zip(architectures, found, strict=True)


def _choose_by_model(row: ShippedRow, architectures: Sequence[str]) -> list[Choice]:
    """For all architectures in one process: they share what was traced. What a tile moves is the same on all of them,
    so the best of the first are what the others choose from, and only where none of these fits from all.
    """
    first = scores(row, architectures[0], modelled, space(row) if _real(row) else near(row))
    if not any(map(math.isfinite, first.values())):
        first = scores(row, architectures[0], modelled, space(row))
    best = sorted((each for each in first if math.isfinite(first[each])), key=lambda each: first[each])[:FINALISTS]
    chosen = [_best(row, first, architectures[0])]
    for name in architectures[1:]:
        mine = next(each for each in shipped_rows(name) if _key(each) == _key(row))
        try:
            chosen.append(choose(mine, name, modelled, best))
        except RuntimeError:
            chosen.append(choose(mine, name, modelled))
    return chosen


def write(chosen: list[tuple[str, Choice]], by: str) -> None:
    """Puts the choices into the table, with hashes of what is now in it; other rows stay."""
    path = launching.CONFIGS
    table = json.loads(path.read_text())
    for architecture, choice in chosen:
        row, kernels = choice.row, table[architecture]["kernels"]
        for line in kernels[row.kernel][f"{row.bits} bit"]:
            if line[:2] == [row.S, row.D]:
                line[2:] = choice.new
        table[architecture]["by"] = by
    for entry in table.values():
        entry["hash"] = launching.configuration_hash(entry["kernels"])
    write_whole(path, _text(table))
    launching.configurations.cache_clear()


def _text(table: dict[str, Any]) -> str:
    """JSON with one line for the rows of a kernel and dtype."""
    lines = []
    for architecture, entry in table.items():
        kernels = ",\n".join(
            f"   {json.dumps(kernel)}: {{\n"
            + ",\n".join(f"    {json.dumps(bits)}: {json.dumps(rows)}" for bits, rows in by_bits.items())
            + "\n   }"
            for kernel, by_bits in entry["kernels"].items()
        )
        head = f'  "hash": {json.dumps(entry["hash"])},\n  "by": {json.dumps(entry["by"])},\n  "kernels": {{\n'
        lines.append(f" {json.dumps(architecture)}: {{\n{head}{kernels}\n  }}\n }}")
    return "{\n" + ",\n".join(lines) + "\n}\n"
