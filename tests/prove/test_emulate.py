"""Every kernel as it is compiled for sm_80, executed here, against the formula in fp64; kernels broken on purpose."""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter is on: start pytest without TRITON_INTERPRET", allow_module_level=True)
pytest.importorskip("triton")

import triton
import triton.language as tl

from compgen_fast.prove.catalogue import RAGGED, Case
from compgen_fast.prove.emulate import emulated
from compgen_fast.prove.emulator import Fault
from compgen_fast.prove.ladder import emulate

BF16 = torch.bfloat16


def kernel(op: str) -> Any:
    return importlib.import_module(f"compgen_fast.kernels.{op}")


def normal(*shape: int) -> torch.Tensor:
    seed = sum(place * size for place, size in enumerate(shape, start=1))
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("case", RAGGED, ids=lambda case: case.name)
def test_compiled_kernels_agree_with_the_formula(case: Case) -> None:
    found = emulate(case, "sm_80")
    assert found["why"] == "", f"{case.name}: {found['why']}"


def test_a_formula_that_differs_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(case for case in RAGGED if case.op == "jet_pointwise" and case.dtype == torch.float32)
    exact = Case.reference
    monkeypatch.setattr(Case, "reference", lambda *of: tuple(1.1 * each for each in exact(*of)))
    assert "times as far from the formula as allowed" in emulate(case, "sm_80")["why"]


def test_pixels_are_read_once_and_in_whole_sectors() -> None:
    """Of an aligned width: what the kernel moves is what it must."""
    q, k = normal(1, 64, 2, 64).to(BF16), normal(1, 7, 2, 64).to(BF16)
    with emulated([q, k]) as found:
        kernel("slot_cross_attention").forward(q, k, k, None, 0.1, False)
    (launch,) = found
    assert launch.loads["q"].bytes == q.numel() * 2 and launch.loads["q"].sectors == q.numel() * 2 // 32
    assert launch.stores["o"].bytes == q.numel() * 2 and launch.stores["o"].sectors == q.numel() * 2 // 32
    assert set(launch.loads["q"].widths) == {128}


# ------------------------------------------------------------------------------------------ broken on purpose


@triton.jit
def _scaled_kernel(x, y, size, OVER: tl.constexpr, BLOCK: tl.constexpr):
    """y = 2 x; its mask lets OVER elements too many through."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, 2 * tl.load(x + at, mask=at < size + OVER, other=0.0), mask=at < size + OVER)


@triton.jit
def _reversed_kernel(x, BARRIER: tl.constexpr, BLOCK: tl.constexpr):
    """x in reverse order, in place: all must be read before anything is written."""
    at = tl.arange(0, BLOCK)
    values = tl.load(x + BLOCK - 1 - at)
    if BARRIER:
        tl.debug_barrier()
    tl.store(x + at, values)


@triton.jit
def _crowded_kernel(x, BLOCK: tl.constexpr):
    """All programs write the same elements."""
    tl.store(x + tl.arange(0, BLOCK), (tl.program_id(0) + tl.arange(0, BLOCK)).to(tl.float32))


def test_a_mask_that_is_off_by_one_is_caught() -> None:
    x, y = normal(100), torch.empty(100)
    with emulated([x]):
        _scaled_kernel[(2,)](x, y, 100, OVER=0, BLOCK=64)
    assert torch.equal(y, 2 * x)
    with (
        emulated([x]),
        pytest.raises(Fault, match=r"test_emulate\.py:\d+, block 1: load of .* in no buffer|which has 400"),
    ):
        _scaled_kernel[(2,)](x, y, 100, OVER=1, BLOCK=64)


def test_a_missing_barrier_is_caught() -> None:
    x = normal(512)
    expected = x.flip(0)
    with emulated([x]):
        _reversed_kernel[(1,)](x, BARRIER=True, BLOCK=512)
    assert torch.equal(x, expected)
    with emulated([x]), pytest.raises(Fault, match=r"race: store of byte .* and a read of it by another warp"):
        _reversed_kernel[(1,)](x, BARRIER=False, BLOCK=512)


def test_blocks_that_write_one_place_are_caught() -> None:
    x = torch.empty(64)
    with emulated([]), pytest.raises(Fault, match=r"race: store .* by another block"):
        _crowded_kernel[(2,)](x, BLOCK=64)


def test_a_misaligned_pointer_is_caught() -> None:
    """A kernel that was compiled for pointers divisible by 16, and got another one."""
    from compgen_fast.prove import emulate

    x, y = normal(132), torch.empty(128)
    whole = emulate.compile_with_arguments
    with pytest.MonkeyPatch.context() as patch:

        def shifted(launch: Any, target: Any) -> Any:
            compiled, (first, *others) = whole(launch, target)
            return compiled, [first._replace(value=x[1:129]), *others]

        patch.setattr(emulate, "compile_with_arguments", shifted)
        with emulated([x]), pytest.raises(Fault, match="the address is not a multiple of 8"):
            _scaled_kernel[(2,)](x[:128], y, 128, OVER=0, BLOCK=64, num_warps=1)


def test_a_result_that_was_never_written_is_not_read() -> None:
    x, y = torch.empty(64), torch.empty(64)
    with emulated([]), pytest.raises(Fault, match="which nobody has written"):
        _scaled_kernel[(1,)](x, y, 64, OVER=0, BLOCK=64)
    with emulated([y]):  # and what one kernel wrote, the next may read
        _scaled_kernel[(1,)](y, x, 64, OVER=0, BLOCK=64)
        _scaled_kernel[(1,)](x, y, 64, OVER=0, BLOCK=64)
