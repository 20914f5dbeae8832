"""What the compiled code moves at real shapes, against what must be moved; and the model made of it."""

from __future__ import annotations

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter is on: start pytest without TRITON_INTERPRET", allow_module_level=True)
pytest.importorskip("triton")

import triton
import triton.language as tl

from compgen_fast.prove.catalogue import BF16, FP16, FP32, REAL, Case
from compgen_fast.prove.chips import CHIPS
from compgen_fast.prove.emulate import traced
from compgen_fast.prove.roofline import MOST_MOVED, LaunchWork, Work, launch_work, necessary_bytes, predict

SAMPLE = 6  # blocks: `cgf prove` traces more, and shows them


@pytest.mark.parametrize("case", [case for case in REAL if case.dtype != FP16], ids=lambda case: case.name)
def test_what_is_moved_is_little_more_than_what_must_be(case: Case) -> None:
    needed = necessary_bytes(case, case.arguments(values=True))
    moved = sum(each.moved for each in launch_work(case, SAMPLE))
    assert 0.95 * needed <= moved <= MOST_MOVED[case.direction] * needed, (
        f"{moved / needed:.3f} times the necessary bytes"
    )


def test_necessary_is_every_input_once_and_every_result_once() -> None:
    case = Case("slot_cross_attention", "backward", "plain", BF16, (2, 64, 3, 5, 16))
    pixels, slots = 2 * 64 * 3 * 16 * 2, 2 * 5 * 3 * 16 * 2
    assert necessary_bytes(case, case.arguments(values=True)) == 3 * pixels + 4 * slots


def test_of_chosen_pixels_whole_sectors_are_necessary() -> None:
    """One pixel of one image: y and its gradient, the loss, two indices, and one sector of x and of the weights."""
    case = Case("recon_error", "forward", "chosen", FP32, (1, 1, 1024))
    *others, pixels = case.arguments(values=True)
    assert necessary_bytes(case, (*others, pixels * 0)) == 2 * 12 + 4 + 2 * 8 + 2 * 32
    assert necessary_bytes(case, (*others, pixels * 0 + 10)) == 2 * 12 + 4 + 2 * 8 + 3 * 32  # bytes 30 to 32 of x


def test_candidates_that_gave_up_need_nothing_moved() -> None:
    case = Case("latent_adam", "step", "", FP32, (3, 8))
    arguments = list(case.arguments(values=True))
    arguments[8] = torch.zeros(3, dtype=torch.bool)
    assert necessary_bytes(case, tuple(arguments)) == 3


@triton.jit
def _strided_kernel(x, y, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at * STRIDE))


def test_the_trace_sees_sectors_that_are_read_for_one_number() -> None:
    x, y = torch.zeros(8 * 1024), torch.zeros(1024)
    with traced(2) as launches:
        _strided_kernel[(8,)](x, y, STRIDE=1, BLOCK=128)
        _strided_kernel[(8,)](x, y, STRIDE=8, BLOCK=128)
    dense, strided = launches
    assert (dense.blocks, dense.ran) == (8, 2)
    assert dense.loads["x"].moved() == 2 * 128 * 4
    assert strided.loads["x"].moved() == 8 * 2 * 128 * 4
    assert strided.stores["y"].moved() == 2 * 128 * 4


@triton.jit
def _neighbours_kernel(x, y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y + tl.program_id(0) * BLOCK + at, tl.load(x + at) + tl.load(x + 1 + at))


def test_a_sector_that_a_block_reads_again_is_moved_once_and_one_of_another_block_again() -> None:
    """Two blocks read 32 numbers, and all but the first of them once more with one that follows: five sectors each."""
    x, y = torch.zeros(64), torch.zeros(64)
    with traced(2) as launches:
        _neighbours_kernel[(2,)](x, y, BLOCK=32, num_warps=1)
    assert launches[0].loads["x"].bytes == 2 * 2 * 32 * 4
    assert launches[0].loads["x"].moved() == 2 * 5 * 32


@pytest.mark.parametrize(
    ("work", "bound", "seconds"),
    [
        (LaunchWork("k", moved=2.039e12, requested=0, matrix_flops=0, vector_flops=19.5e11), "memory", 1.0),
        (LaunchWork("k", moved=2.039e11, requested=0, matrix_flops=624e12, vector_flops=0), "matrix units", 2.0),
        (LaunchWork("k", moved=2.039e11, requested=0, matrix_flops=0, vector_flops=58.5e12), "vector units", 3.0),
    ],
)
def test_the_slowest_of_memory_and_units_is_the_bound(work: LaunchWork, bound: str, seconds: float) -> None:
    found = predict(Work(round(2.039e11), (work,)), CHIPS["sm_80"].peak)
    assert (found.bound, found.seconds) == (bound, pytest.approx(seconds))
    assert found.bandwidth_share == pytest.approx(0.1 / seconds)
