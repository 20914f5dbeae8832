"""The launchers, run by Triton's interpreter on the CPU, against the formula in fp64.

Not here: speed, and anything about a compiled kernel (tests/prove). Runs only in a process started with
TRITON_INTERPRET=1, because one process cannot both interpret and compile.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("start pytest with TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")

from compgen_fast.kernels import launch, slot_competition, slot_cross_attention

EPS = 1e-8
# Largest error allowed, relative to the largest value of the tensor: a few roundings of the
# products that enter the sums.
TOLERANCE = {torch.float32: 4e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}

# (B, N, H, S, D): one slot and 64, ragged N, the narrow and the odd widths, widths wider than one chunk of columns
SHAPES = [
    (2, 37, 3, 7, 43),
    (1, 70, 1, 5, 32),
    (2, 33, 1, 11, 7),
    (1, 19, 2, 1, 64),
    (1, 20, 2, 64, 43),
    (3, 1, 1, 7, 1),
    (1, 65, 1, 11, 128),
    (1, 17, 1, 20, 200),
    (1, 300, 1, 7, 16),
]

Tensors = tuple[torch.Tensor, ...]


def scale(x: torch.Tensor) -> float:
    return float(x.shape[-1] ** -0.5)


def cross_attention_formula(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> Tensors:
    s = scale(q) * torch.einsum("bnhd,bshd->bnhs", q, k)
    if mask is not None:
        s = s.masked_fill(~mask[:, None, None], float("-inf"))
    p = s.softmax(-1).nan_to_num(0.0)
    return torch.einsum("bnhs,bshd->bnhd", p, v), p.mean(2)


def competition_formula(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> Tensors:
    logits = scale(q) * torch.einsum("bshd,bnhd->bnsh", q, k)
    alive = torch.ones_like(logits) if mask is None else mask[:, None, :, None].expand_as(logits).double()
    a = logits.masked_fill(alive == 0, float("-inf")).flatten(2).softmax(-1).nan_to_num(0.0).view_as(logits)
    kept = (a + EPS) * alive
    mass = kept.sum(1)
    u = torch.einsum("bnsh,bnhd->bshd", kept, v) / torch.where(mass > 0, mass, 1.0)[..., None]
    return u, a.sum(3), mass


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def one_slot_left(B: int, S: int) -> torch.Tensor:
    """Image 0 keeps its last slot only; the others lose their first slot, if they have another."""
    mask = torch.ones(B, S, dtype=torch.bool)
    mask[0, :-1] = False
    mask[1:, 0] = S == 1
    return mask


def assert_close(name: str, got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert got.shape == expected.shape, f"{name}: {tuple(got.shape)} instead of {tuple(expected.shape)}"
    assert not got.isnan().any(), f"{name} has NaN: an element was not written"
    error = (got.double() - expected).abs().max().item()
    allowed = TOLERANCE[dtype] * max(expected.abs().max().item(), 1e-2)
    assert error <= allowed, f"{name}: error {error:.2e}, allowed {allowed:.2e}"


def check_cross_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, with_weights: bool
) -> None:
    dtype = q.dtype
    inputs = [x.detach().double().requires_grad_() for x in (q, k, v)]
    o, w = cross_attention_formula(*inputs, mask)
    do, dw = normal(*o.shape, dtype=dtype), normal(*w.shape, dtype=dtype) if with_weights else None
    loss = (o * do).sum() + (0.0 if dw is None else (w * dw).sum())
    expected = (o.detach(), *torch.autograd.grad(loss, inputs))
    got_o, got_w = slot_cross_attention.forward(q, k, v, mask, scale(q), with_weights)
    got = (got_o, *slot_cross_attention.backward(do, dw, q, k, v, mask, scale(q)))
    for name, x, y in zip(("out", "grad_q", "grad_k", "grad_v"), got, expected, strict=True):
        assert x.dtype == dtype
        assert x.is_contiguous()
        assert_close(name, x, y, dtype)
    if with_weights:
        assert got_w.dtype == dtype
        assert_close("weights", got_w, w.detach(), dtype)
    else:
        assert got_w.shape == (0,)


def check_competition(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, with_weights: bool
) -> None:
    dtype = q.dtype
    inputs = [x.detach().double().requires_grad_() for x in (q, k, v)]
    u, w, mass = competition_formula(*inputs, mask)
    du, dw = normal(*u.shape, dtype=dtype), normal(*w.shape, dtype=dtype) if with_weights else None
    loss = (u * du).sum() + (0.0 if dw is None else (w * dw).sum())
    expected = (u.detach(), *torch.autograd.grad(loss, inputs))
    got_u, got_w, got_mass = slot_competition.forward(q, k, v, mask, scale(q), EPS, with_weights)
    gradients = slot_competition.backward(du, dw, q, k, v, mask, None, got_u, got_mass, scale(q), EPS)
    for name, x, y in zip(("updates", "grad_q", "grad_k", "grad_v"), (got_u, *gradients), expected, strict=True):
        assert x.dtype == dtype
        assert x.is_contiguous()
        assert_close(name, x, y, dtype)
    assert got_mass.dtype == torch.float32
    assert_close("mass", got_mass, mass.detach(), torch.float32 if dtype == torch.float32 else dtype)
    if with_weights:
        assert got_w.dtype == dtype
        assert_close("weights", got_w, w.detach(), dtype)
    else:
        assert got_w.shape == (0,)


@pytest.fixture(autouse=True)
def poisoned_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory holds NaN, so that an element no program writes shows."""
    plain = torch.Tensor.new_empty

    def poisoned(self: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        return plain(self, *arguments, **options).fill_(float("nan"))

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)


def pixels_then_slots(shape: tuple[int, int, int, int, int], dtype: torch.dtype) -> Tensors:
    B, N, H, S, D = shape
    return normal(B, N, H, D, dtype=dtype), normal(B, S, H, D, dtype=dtype), normal(B, S, H, D, dtype=dtype).flip(1)


@pytest.mark.parametrize("masked", [False, True], ids=["all slots", "one slot left"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_cross_attention_follows_the_formula(shape: tuple[int, int, int, int, int], masked: bool) -> None:
    q, k, v = pixels_then_slots(shape, torch.float32)
    check_cross_attention(q, k, v, one_slot_left(shape[0], shape[3]) if masked else None, with_weights=True)


@pytest.mark.parametrize("masked", [False, True], ids=["all slots", "one slot left"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_competition_follows_the_formula(shape: tuple[int, int, int, int, int], masked: bool) -> None:
    k, q, _ = pixels_then_slots(shape, torch.float32)
    v = k.flip(1) + 1.0
    check_competition(q, k, v, one_slot_left(shape[0], shape[3]) if masked else None, with_weights=True)


@pytest.mark.parametrize("with_weights", [False, True], ids=["no weights", "weights"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[1], SHAPES[6]], ids=str)
def test_half_precision_follows_the_formula(
    shape: tuple[int, int, int, int, int], dtype: torch.dtype, with_weights: bool
) -> None:
    pixels, slots, values = pixels_then_slots(shape, dtype)
    check_cross_attention(pixels, slots, values, None, with_weights)
    check_competition(slots, pixels, pixels.flip(1), one_slot_left(shape[0], shape[3]), with_weights)


@pytest.mark.parametrize("check", [check_cross_attention, check_competition])
def test_strided_and_expanded_inputs_need_no_copy(check: Callable[..., None]) -> None:
    B, N, H, S, D = 2, 21, 3, 7, 43
    packed = normal(B, N, 3, H, D)  # a fused projection
    by_head = normal(1, H, S, D).transpose(1, 2).expand(B, S, H, D)  # heads before slots, one set for all images
    strided_last = normal(B, S, D, H).transpose(2, 3)  # the one layout that is copied
    if check is check_cross_attention:
        check(packed[:, :, 1], by_head, strided_last, None, True)
    else:
        check(by_head, packed[:, :, 0], packed[:, :, 2], one_slot_left(B, S), True)
        check(strided_last, packed[:, :, 0], normal(1, N, H, D).expand(B, N, H, D), None, True)


def test_expanded_gradients_are_read_as_they_are() -> None:
    q, k, v = pixels_then_slots(SHAPES[0], torch.float32)
    one = torch.ones(())
    dense = slot_cross_attention.backward(torch.ones_like(q), torch.ones(2, 37, 7), q, k, v, None, scale(q))
    spread = slot_cross_attention.backward(one.expand_as(q), one.expand(2, 37, 7), q, k, v, None, scale(q))
    assert all(map(torch.equal, dense, spread))


def test_reruns_agree_bit_for_bit() -> None:
    pixels, slots, values = pixels_then_slots((1, 300, 2, 7, 43), torch.float32)  # 19 partial sums
    u, _, mass = slot_competition.forward(slots, pixels, pixels, None, scale(pixels), EPS, False)

    def run() -> Tensors:
        return (
            *slot_cross_attention.forward(pixels, slots, values, None, scale(pixels), True),
            *slot_cross_attention.backward(pixels, None, pixels, slots, values, None, scale(pixels)),
            *slot_competition.forward(slots, pixels, pixels, None, scale(pixels), EPS, True),
            *slot_competition.backward(values, None, slots, pixels, pixels, None, None, u, mass, scale(pixels), EPS),
        )

    assert all(map(torch.equal, run(), run()))


@pytest.mark.parametrize("H", [1, 3])
def test_an_image_without_slots_gives_zeros(H: int) -> None:
    pixels, slots, values = pixels_then_slots((2, 9, H, 5, 7), torch.float32)
    mask = torch.tensor([[False] * 5, [True] * 5])
    check_cross_attention(pixels, slots, values, mask, True)
    check_competition(slots, pixels, pixels, mask, True)


@pytest.mark.parametrize("H", [1, 3])
def test_what_lies_in_a_masked_slot_never_leaks(H: int) -> None:
    pixels, slots, values = pixels_then_slots((1, 9, H, 5, 7), torch.float32)
    mask = torch.tensor([[True, True, False, True, True]])
    slots[:, 2] = values[:, 2] = float("nan")
    o, w = slot_cross_attention.forward(pixels, slots, values, mask, scale(pixels), True)
    gradients = slot_cross_attention.backward(o, w, pixels, slots, values, mask, scale(pixels))
    u, _, mass = slot_competition.forward(slots, pixels, pixels, mask, scale(pixels), EPS, True)
    more = slot_competition.backward(u, w, slots, pixels, pixels, mask, None, u, mass, scale(pixels), EPS)
    assert not any(x.isnan().any() for x in (o, w, u, mass, *gradients, *more))
    of_the_slot = (w[..., 2], u[:, 2], mass[:, 2], gradients[1][:, 2], gradients[2][:, 2], more[0][:, 2])
    assert all((x == 0).all() for x in of_the_slot)


@pytest.mark.parametrize("shape", [(0, 9, 2, 5, 7), (2, 0, 2, 5, 7)], ids=["no images", "no pixels"])
def test_nothing_in_gives_nothing_out(shape: tuple[int, int, int, int, int]) -> None:
    pixels, slots, values = pixels_then_slots(shape, torch.float32)
    o, w = slot_cross_attention.forward(pixels, slots, values, None, scale(pixels), True)
    gradients = slot_cross_attention.backward(o, w, pixels, slots, values, None, scale(pixels))
    u, _, mass = slot_competition.forward(slots, pixels, pixels, None, scale(pixels), EPS, True)
    more = slot_competition.backward(u, w, slots, pixels, pixels, None, None, u, mass, scale(pixels), EPS)
    assert o.shape == pixels.shape
    assert u.shape == slots.shape
    assert all((x == 0).all() for x in (u, mass, *gradients, *more))


def test_eps_survives_half_precision() -> None:
    """A slot that wins nothing gets the mean of all values; an eps cast to fp16 would leave it nothing."""
    inputs = torch.full((1, 32, 1, 16), 4.0, dtype=torch.float16)
    slots = torch.stack([inputs[0, 0], -inputs[0, 0]])[None]
    values = normal(1, 32, 1, 16, dtype=torch.float16)
    u, _, _ = slot_competition.forward(slots, inputs, values, None, 1.0, EPS, True)
    assert_close("the loser's update", u[0, 1], values.double().mean(1)[0], torch.float16)


def test_partial_sums_stay_small() -> None:
    """On 128×128 pixels, 12 heads of 43, 7 slots: at most 1/8 of what q takes, in fp32 and in bf16."""
    N, H, S, D = 128 * 128, 12, 7, 43
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.empty(0, dtype=dtype)
        element_size, config = x.element_size(), launch.tuned_config("slot_cross_attention backward", x, S, D)
        splits, per_split = launch.split_tiles(N // config.BLOCK_N, H, 2 * S * H * D * 4, N * H * D * element_size)
        assert splits * per_split * config.BLOCK_N >= N
        assert splits * 2 * S * H * D * 4 <= N * H * D * element_size / 8
