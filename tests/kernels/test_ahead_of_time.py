"""Every kernel, as its launcher launches it, compiled for GPUs that are not here: no spills, wide loads, tensor cores.

The launchers run on meta tensors of real shapes and their launches are recorded, so what is compiled is what ships: the
tuned configuration, the specialisation, the arguments left out. Needs TRITON_INTERPRET unset (see test_launchers.py).
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
from collections.abc import Iterator

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter is on: start pytest without TRITON_INTERPRET", allow_module_level=True)
if importlib.util.find_spec("triton") is None:
    pytest.skip("no triton", allow_module_level=True)

from compgen_fast.kernels import (
    jet_cross_attention,
    jet_norm,
    jet_pointwise,
    jet_slot_softmax,
    latent_adam,
    recon_error,
    slot_competition,
    slot_cross_attention,
)
from compgen_fast.prove.ahead_of_time import (
    SHARED_MEMORY,
    TARGETS,
    Figures,
    Launch,
    compile_launch,
    figures,
    recorded_launches,
)

BF16, FP32 = torch.bfloat16, torch.float32

# (op, dtype, (B, N, H, S, D)). Aligned widths with one head and with several, a narrow head, the odd width, and the
# most slots with the widest head.
ALIGNED = [
    ("slot_cross_attention", BF16, (4, 4096, 4, 7, 64)),
    ("slot_cross_attention", FP32, (4, 4096, 4, 7, 64)),
    ("slot_competition", BF16, (8, 4096, 1, 7, 64)),
    ("slot_competition", FP32, (8, 4096, 2, 7, 64)),
]
NARROW = [
    ("slot_cross_attention", BF16, (4, 4096, 4, 7, 32)),
    ("slot_competition", BF16, (8, 4096, 1, 7, 32)),
]
ODD = [
    ("slot_cross_attention", BF16, (1, 16384, 12, 7, 43)),
    ("slot_cross_attention", FP32, (1, 16384, 12, 7, 43)),
    ("slot_competition", BF16, (8, 4096, 2, 7, 43)),
    ("slot_competition", FP32, (8, 4096, 1, 7, 43)),
]
WIDEST = [
    ("slot_cross_attention", FP32, (1, 4096, 2, 64, 256)),
    ("slot_competition", BF16, (1, 4096, 1, 64, 256)),
]
Case = tuple[str, torch.dtype, tuple[int, int, int, int, int]]


@functools.cache
def launches(case: Case, weights: bool) -> list[Launch]:
    """What one forward and backward pass launches."""
    op, dtype, (B, N, H, S, D) = case
    pixels, slots = (torch.empty(B, rows, H, D, dtype=dtype, device="meta") for rows in (N, S))
    w = torch.empty(B, N, S, dtype=dtype, device="meta") if weights else None
    with recorded_launches() as recorded:
        if op == "slot_cross_attention":
            slot_cross_attention.forward(pixels, slots, slots, None, 0.1, weights)
            slot_cross_attention.backward(pixels, w, pixels, slots, slots, None, 0.1)
        else:
            u, _, mass = slot_competition.forward(slots, pixels, pixels, None, 0.1, 1e-8, weights)
            slot_competition.backward(u, w, slots, pixels, pixels, None, None, u, mass, 0.1, 1e-8)
    return recorded


def compiled(case: Case, target: str, weights: bool) -> Iterator[tuple[Launch, Figures]]:
    for launch in launches(case, weights):
        yield launch, figures(compile_launch(launch, TARGETS[target]), TARGETS[target])


def name(case: Case) -> str:
    op, dtype, (_, _, H, S, D) = case
    return f"{op} {str(dtype).removeprefix('torch.')} H{H} S{S} D{D}"


# How many pixel tensors [B,N,H,D] each kernel reads and writes. All that belongs to slots is small beside them.
PIXEL_TENSORS = {
    ("slot_cross_attention", "_forward_kernel"): (1, 1),
    ("slot_cross_attention", "_backward_kernel"): (2, 1),
    ("slot_competition", "_rows_kernel"): (1, 0),
    ("slot_competition", "_forward_kernel"): (2, 0),
    ("slot_competition", "_backward_kernel"): (2, 2),
}


def carried(instructions: dict[int, int], bits: int, threads: int) -> int:
    """Bytes that the instructions at least this wide move, each executed once by all threads."""
    return threads * sum(count * width // 8 for width, count in instructions.items() if width >= bits)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", ALIGNED + ODD, ids=name)
def test_no_kernel_spills_or_outgrows_shared_memory(case: Case, target: str) -> None:
    for launch, cost in compiled(case, target, weights=True):
        assert cost.spills == 0, f"{launch.name} spills: {cost}"
        assert cost.shared <= SHARED_MEMORY[target] // 2, f"{launch.name}: two programs do not fit side by side: {cost}"


@pytest.mark.parametrize("target", ["sm_80", "gfx942"])
@pytest.mark.parametrize("case", WIDEST, ids=name)
def test_the_largest_tiles_do_not_spill(case: Case, target: str) -> None:
    for launch, cost in compiled(case, target, weights=True):
        assert cost.spills == 0, f"{launch.name} spills: {cost}"
        assert cost.shared <= SHARED_MEMORY[target]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", ALIGNED + NARROW, ids=name)
def test_aligned_pixels_are_moved_128_bits_at_a_time(case: Case, target: str) -> None:
    """The 128-bit instructions are enough to carry every pixel tensor's tile: nothing of it goes another way."""
    op, dtype, _ = case
    for launch, cost in compiled(case, target, weights=False):
        if (op, launch.name) in PIXEL_TENSORS:
            read, written = PIXEL_TENSORS[op, launch.name]
            tile = launch.options["BLOCK_N"] * launch.options["BLOCK_D"] * dtype.itemsize
            threads = launch.options["num_warps"] * TARGETS[target].warp_size
            # A program on gfx942 has twice the threads, and 8 bytes of a small tile are all that a thread gets of it.
            # Its matrix units leave four neighbouring columns in a thread, which is 64 bits of bf16 to store.
            load = min(128, 8 * tile // threads) if target == "gfx942" else 128
            store = 64 if target == "gfx942" else 128
            assert carried(cost.loads, load, threads) >= read * tile, f"{launch.name} loads narrowly: {cost}"
            assert carried(cost.stores, store, threads) >= written * tile, f"{launch.name} stores narrowly: {cost}"


@pytest.mark.parametrize("target", TARGETS)
def test_bf16_runs_on_the_matrix_units(target: str) -> None:
    for case in ALIGNED:
        if case[1] == BF16:
            for launch, cost in compiled(case, target, weights=True):
                if launch.name in ("_forward_kernel", "_backward_kernel"):
                    assert cost.matrix_instructions, f"{launch.name} multiplies without the matrix units: {cost}"


def test_every_kernel_is_compiled_somewhere() -> None:
    seen = {launch.name for case in ALIGNED + ODD for launch in launches(case, True)}
    assert seen == {"_forward_kernel", "_backward_kernel", "_sum_kernel", "_rows_kernel", "_normalise_kernel"}


# Jets. Pixels move in four channels, so registers are what a kernel runs out of first.

JetCase = tuple[str, torch.dtype, tuple[int, ...]]
JET_CASES: list[JetCase] = [
    *(("jet_cross_attention", dtype, (4, 4096, 4, 7, 64)) for dtype in (BF16, FP32)),  # B, N, H, S, D
    *(("jet_pointwise", dtype, (8192, 360)) for dtype in (BF16, FP32)),
    *(("jet_norm", dtype, (8192, 180)) for dtype in (BF16, FP32)),
    *(("jet_slot_softmax", dtype, (4, 12, 7, 4096)) for dtype in (BF16, FP32)),  # B, H, S, N
]
# How many tiles of pixels each kernel reads and writes.
JET_TILES = {
    "_jet_forward_kernel": (4, 4),
    "_jet_backward_kernel": (8, 4),
    "_pointwise_forward_kernel": (4, 4),
    "_pointwise_backward_kernel": (8, 4),
    "_norm_forward_kernel": (4, 4),
    "_norm_backward_kernel": (8, 4),
    "_slot_softmax_forward_kernel": (7, 7),
    "_slot_softmax_backward_kernel": (11, 7),
}


@functools.cache
def jet_launches(case: JetCase) -> list[Launch]:
    """What one forward and backward pass launches; the sum of the partial sums is compiled above."""
    op, dtype, shape = case

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    with recorded_launches() as recorded:
        if op == "jet_cross_attention":
            B, N, H, S, D = shape
            q, k, side = empty(4, B, N, H, D), empty(2, B, S, H, D), empty(B, S, dtype=torch.bool)
            jet_cross_attention.forward(q, k, k, side, None, 0.1)
            jet_cross_attention.backward(q, q, k, k, side, None, 0.1)
        elif op == "jet_pointwise":
            x = empty(4, *shape)
            jet_pointwise.gelu_forward(x, False)
            jet_pointwise.gelu_backward(x, x, False)
        elif op == "jet_slot_softmax":
            B, H, S, N = shape
            products, side = empty(7, *shape), empty(B, S, dtype=torch.bool)
            jet_slot_softmax.forward(products, empty(2, B, H, S), side)
            jet_slot_softmax.backward(products, products, side, 7)
        else:
            x, weight = empty(4, *shape), empty(shape[-1])
            jet_norm.layer_norm_forward(x, weight, weight, 1e-5)
            jet_norm.layer_norm_backward(x, x, weight, 1e-5)
    return [launch for launch in recorded if launch.name != "_sum_kernel"]


@functools.cache
def jet_figures(case: JetCase, target: str) -> list[tuple[Launch, Figures]]:
    chip = TARGETS[target]
    return [(launch, figures(compile_launch(launch, chip), chip)) for launch in jet_launches(case)]


def jet_name(case: JetCase) -> str:
    return f"{case[0]} {str(case[1]).removeprefix('torch.')}"


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", JET_CASES, ids=jet_name)
def test_no_jet_kernel_spills_or_outgrows_shared_memory(case: JetCase, target: str) -> None:
    for launch, cost in jet_figures(case, target):
        assert cost.spills == 0, f"{launch.name} spills: {cost}"
        assert cost.shared <= SHARED_MEMORY[target] // 2, f"{launch.name}: two programs do not fit side by side: {cost}"
        if case[:2] == ("jet_cross_attention", BF16):
            assert cost.matrix_instructions, f"{launch.name} multiplies without the matrix units: {cost}"


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", JET_CASES, ids=jet_name)
def test_jets_are_moved_as_wide_as_they_are_aligned(case: JetCase, target: str) -> None:
    """128 bits at a time where a row is whole 16 bytes; a bf16 row of 180 is whole 8 bytes, which allows 64."""
    op, dtype, shape = case
    for launch, cost in jet_figures(case, target):
        read, written = JET_TILES[launch.name]
        of_tile = ("BLOCK_N", "BLOCK_S") if op == "jet_slot_softmax" else ("BLOCK", "BLOCK_N", "BLOCK_R", "BLOCK_D")
        blocks = [size for block, size in launch.options.items() if block in of_tile]
        tile = math.prod(blocks) * dtype.itemsize
        threads = launch.options["num_warps"] * TARGETS[target].warp_size
        aligned = 8 * math.gcd(16, shape[-1] * dtype.itemsize)
        load = min(aligned, 8 * tile // threads)
        # On gfx942 the matrix units leave four neighbouring columns in a thread: 64 bits of bf16 to store.
        store = min(64, load) if target == "gfx942" and op == "jet_cross_attention" else load
        if target != "gfx942":
            assert load == aligned, f"{launch.name}: the tile is too small for its {threads} threads"
        assert carried(cost.loads, load, threads) >= read * tile, f"{launch.name} loads narrowly: {cost}"
        assert carried(cost.stores, store, threads) >= written * tile, f"{launch.name} stores narrowly: {cost}"


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])  # of NVIDIA's compilers, that for sm_90 spills first
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_jet_attention_of_the_odd_width_does_not_spill(dtype: torch.dtype, target: str) -> None:
    for launch, cost in jet_figures(("jet_cross_attention", dtype, (1, 16384, 12, 7, 43)), target):
        assert cost.spills == 0, f"{launch.name} spills: {cost}"


@pytest.mark.parametrize("S", [1, 64])
def test_the_softmax_of_few_and_of_many_slots_does_not_spill(S: int) -> None:
    for dtype in (BF16, FP32):
        for launch, cost in jet_figures(("jet_slot_softmax", dtype, (4, 12, S, 4096)), "sm_90"):
            assert cost.spills == 0, f"{launch.name} spills: {cost}"


def test_every_jet_kernel_is_compiled_somewhere() -> None:
    assert {launch.name for case in JET_CASES for launch in jet_launches(case)} == set(JET_TILES)


# Search. Everything is pointwise in rows, so what counts is that rows are moved as wide as they are aligned.

# (name, dtype of y or of the gradient, C, N·3 or L). Narrow rows share a program, the widest has it alone.
SearchCase = tuple[str, torch.dtype, int, int]
SEARCH_CASES: list[SearchCase] = [
    *(("recon_error", dtype, 4096, 1024) for dtype in (BF16, FP32)),
    *(("latent_adam", dtype, 4096, width) for dtype in (BF16, FP32) for width in (64, 4096)),
]
# How many rows each kernel reads and writes in fp32 or in the case's dtype; the bytes of x come 32 bits at a time.
SEARCH_ROWS = {"_recon_error_kernel": (1, 1), "_latent_adam_kernel": (4, 4)}


@functools.cache
def search_launches(case: SearchCase, everything: bool) -> list[Launch]:
    """What one call launches; with everything, weights, images and some of the pixels are given."""
    op, dtype, C, size = case

    def empty(*shape: int, dtype: torch.dtype = FP32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    with recorded_launches() as recorded:
        if op == "recon_error":
            x, y = empty(64 if everything else C, 4096, 3, dtype=torch.uint8), empty(C, size, 3, dtype=dtype)
            if everything:
                images, pixels = empty(C, dtype=torch.int64), empty(size, dtype=torch.int64)
                recon_error.forward(y, x, empty(64, 4096), images, pixels)
            else:
                recon_error.forward(y, x[:, :size], None, None, None)
        else:
            rows, numbers = [empty(C, size) for _ in range(4)], [empty(C) for _ in range(2)]
            counts, active = [empty(C, dtype=torch.int32) for _ in range(2)], empty(C, dtype=torch.bool)
            settings = (0.9, 0.999, 1e-8, 10, 0.01, 0.5, 1e-4)
            grad = empty(C, size, dtype=dtype)
            latent_adam.step(*rows, *numbers, *counts, active, grad, empty(C), *settings)
    return [launch for launch in recorded if launch.name != "_sum_kernel"]


def search_name(case: SearchCase) -> str:
    return f"{case[0]} {str(case[1]).removeprefix('torch.')} {case[3]}"


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", SEARCH_CASES, ids=search_name)
def test_no_kernel_of_the_search_spills_or_moves_its_rows_narrowly(case: SearchCase, target: str) -> None:
    chip = TARGETS[target]
    for everything in (False, True) if case[0] == "recon_error" else (False,):
        (launch,) = search_launches(case, everything)
        cost = figures(compile_launch(launch, chip), chip)
        assert cost.spills == 0, f"{launch.name} spills: {cost}"
        assert cost.shared <= SHARED_MEMORY[target] // 2, f"{launch.name}: two programs do not fit side by side: {cost}"
        read, written = SEARCH_ROWS[launch.name]
        itemsize = case[1].itemsize if case[0] == "recon_error" else FP32.itemsize
        tile = math.prod(size for block, size in launch.options.items() if block.startswith("BLOCK")) * itemsize
        threads = launch.options["num_warps"] * chip.warp_size
        wide = min(128, 8 * tile // threads)  # a program on gfx942 has twice the threads
        rows_of_grad = 1 if case[:2] == ("latent_adam", BF16) else 0  # narrower than the state, and read beside it
        assert carried(cost.loads, wide, threads) >= (read - rows_of_grad) * tile, (
            f"{launch.name} loads narrowly: {cost}"
        )
        assert carried(cost.stores, wide, threads) >= written * tile, f"{launch.name} stores narrowly: {cost}"


def test_every_kernel_of_the_search_is_compiled_somewhere() -> None:
    assert {launch.name for case in SEARCH_CASES for launch in search_launches(case, True)} == set(SEARCH_ROWS)
