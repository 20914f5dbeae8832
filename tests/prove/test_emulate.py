"""Every kernel as it is compiled for sm_80, executed here, against the formula in fp64; kernels broken on purpose."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter is on: start pytest without TRITON_INTERPRET", allow_module_level=True)
pytest.importorskip("triton")

import triton
import triton.language as tl

from compgen_fast.prove.emulate import Emulation, emulated
from compgen_fast.prove.emulator import Fault

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
# Largest error allowed, relative to the largest value of the tensor, as for the interpreter: a few roundings of what
# enters the sums. Second-order channels of jets partly cancel.
TOLERANCE = {FP32: 4e-6, FP16: 3e-3, BF16: 2e-2}
JETS = 5  # times that
B, N, H, S, D = 2, 37, 2, 7, 43  # ragged pixels, the usual odd slots and head width
SCALE, EPS = D**-0.5, 1e-8


def kernel(op: str) -> Any:
    return importlib.import_module(f"compgen_fast.kernels.{op}")


def formula(op: str) -> Any:
    return importlib.import_module(f"compgen_fast.ops.{op}")


def normal(*shape: int) -> torch.Tensor:
    seed = sum(place * size for place, size in enumerate(shape, start=1))
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def as_tuple(value: Any) -> tuple[torch.Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def converted(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def check(
    launcher: Callable[..., Any],
    reference: Callable[..., Any],
    arguments: tuple[Any, ...],
    dtype: torch.dtype,
    slack: float = 1,
) -> list[Emulation]:
    """The launcher, emulated, on arguments in dtype against the reference in fp64 on the same numbers."""
    given = tuple(converted(each, dtype) for each in arguments)
    expected = as_tuple(reference(*(converted(each, torch.float64) for each in given)))
    with emulated([each for each in given if isinstance(each, torch.Tensor)]) as found:
        results = as_tuple(launcher(*given))
    for place, (got, value) in enumerate(zip(results, expected, strict=True)):
        allowed = slack * TOLERANCE[dtype] * max(value.abs().max().item(), 1e-2)
        assert (got.double() - value).abs().max().item() <= allowed, f"result {place}"
    return found


SIDE, MASK = (
    torch.tensor([[True, False] * 3 + [True], [False] * 3 + [True] * 4]),
    torch.tensor([[True] * 6 + [False]] * B),
)
PIXELS, SLOTS = normal(B, N, H, D), normal(B, S, H, D)
VALUES = SLOTS.flip(1)
JET_PIXELS, JET_SLOTS, JET_VALUES = normal(4, B, N, H, D), normal(2, B, S, H, D), normal(2, B, S, H, D).flip(2)
ROWS, WEIGHT = normal(4, 11, 180), normal(180)
Case = tuple[str, str, str, tuple[Any, ...]]
CASES: list[Case] = [
    ("slot_cross_attention", "forward", "reference", (PIXELS, SLOTS, VALUES, MASK, SCALE, True)),
    (
        "slot_cross_attention", "backward", "reference_backward",
        (PIXELS.flip(1), normal(B, N, S), PIXELS, SLOTS, VALUES, MASK, SCALE),
    ),
    ("slot_competition", "forward", "reference", (SLOTS, PIXELS, PIXELS.flip(1), MASK, SCALE, EPS, True)),
    ("jet_cross_attention", "forward", "reference", (JET_PIXELS, JET_SLOTS, JET_VALUES, SIDE, MASK, SCALE)),
    (
        "jet_cross_attention", "backward", "reference_backward",
        (JET_PIXELS.flip(2), JET_PIXELS, JET_SLOTS, JET_VALUES, SIDE, MASK, SCALE),
    ),
    ("jet_pointwise", "gelu_forward", "gelu_reference", (ROWS, False)),
    ("jet_pointwise", "gelu_backward", "gelu_reference_backward", (ROWS.flip(1), ROWS, False)),
    ("jet_pointwise", "silu_forward", "silu_reference", (ROWS,)),
    ("jet_pointwise", "silu_backward", "silu_reference_backward", (ROWS.flip(1), ROWS)),
    ("jet_norm", "layer_norm_forward", "layer_norm_reference", (ROWS, WEIGHT, WEIGHT.flip(0), 1e-5)),
    ("jet_norm", "layer_norm_backward", "layer_norm_reference_backward", (ROWS.flip(1), ROWS, WEIGHT, 1e-5)),
    ("jet_norm", "rms_norm_forward", "rms_norm_reference", (ROWS, WEIGHT, 1e-5)),
    ("jet_norm", "rms_norm_backward", "rms_norm_reference_backward", (ROWS.flip(1), ROWS, WEIGHT, 1e-5)),
    ("jet_slot_softmax", "forward", "reference", (normal(7, B, H, S, N), normal(2, B, H, S), SIDE)),
    (
        "jet_slot_softmax", "backward", "reference_backward",
        (normal(7, B, H, S, N), normal(7, B, H, S, N).abs() / 5, SIDE, 7),
    ),
    (
        "recon_error", "forward", "reference",
        (
            normal(5, N, 3), torch.arange(3 * 64 * 3).remainder(256).to(torch.uint8).view(3, 64, 3), None,
            torch.tensor([2, 0, 1, 1, 2]), torch.arange(N) * 5 % 64,
        ),
    ),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]} {case[1]}")
def test_compiled_kernels_agree_with_the_formula(case: Case, dtype: torch.dtype) -> None:
    op, launcher, reference, arguments = case
    slack = JETS if op.startswith("jet") else 1
    check(getattr(kernel(op), launcher), getattr(formula(op), reference), arguments, dtype, slack)


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=str)
def test_the_backward_pass_of_competition_agrees_with_the_formula(dtype: torch.dtype, heads: int) -> None:
    """Threads that should hold the same sum do: in fp32 they once differed in the last bit, and all stored it."""
    q, k, v = normal(B, S, heads, D), normal(B, N, heads, D), normal(B, N, heads, D).flip(1)
    grads = normal(B, S, heads, D).flip(1), normal(B, N, S)

    def launched(du: torch.Tensor, dw: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        updates, _, mass = formula("slot_competition").reference(*inputs, None, SCALE, EPS, False)
        mass = mass.to(FP32)
        with emulated([du, dw, *inputs, updates, mass]):
            return kernel("slot_competition").backward(du, dw, *inputs, None, None, updates, mass, SCALE, EPS)

    def exact(*arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return formula("slot_competition").reference_backward(*arguments, None, SCALE, EPS)

    check(launched, exact, (*grads, q, k, v), dtype, slack=4)


def test_a_step_of_the_search_agrees_with_the_formula() -> None:
    C, L = 9, 50
    rows, numbers = [normal(C, L).roll(place, 0).abs() for place in range(4)], [normal(C).abs(), normal(C).abs() / 9]
    counts, active = [torch.arange(C, dtype=torch.int32) for _ in range(2)], torch.arange(C) % 4 != 3
    rest = (normal(C, L).flip(0), normal(C).abs().flip(0), 0.9, 0.99, 1e-8, 5, 0.01, 0.5, 1e-3)
    mine = [each.clone() for each in (*rows, *numbers, *counts, active)]
    theirs = [converted(each.clone(), torch.float64) for each in (*rows, *numbers, *counts, active)]
    formula("latent_adam").reference(*theirs, *(converted(each, torch.float64) for each in rest))
    with emulated([*mine, *rest[:2]]) as found:
        kernel("latent_adam").step(*mine, *rest)
    assert len(found) == 1
    for got, expected in zip(mine, theirs, strict=True):
        torch.testing.assert_close(got.double(), expected.double(), rtol=1e-5, atol=1e-6)


def test_pixels_are_read_once_and_in_whole_sectors() -> None:
    """Of an aligned width: what the kernel moves is what it must."""
    q, k = normal(1, 64, 2, 64).to(BF16), normal(1, S, 2, 64).to(BF16)
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
