"""The jet launchers, run by Triton's interpreter on the CPU, against derivatives that autograd takes in fp64.

The reference knows nothing of jets: each channel is a derivative of the plain function along the curve
x + a x_u + b x_v + ab x_uv at a = b = 0, taken in reverse mode, and gradients go backwards through that. Not here:
speed, and anything about a compiled kernel (tests/prove). Runs only in a process started with
TRITON_INTERPRET=1.
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

from compgen_fast.kernels import jet_cross_attention, jet_norm, jet_pointwise, jet_slot_softmax

# Largest error allowed, relative to the largest value of the channel: a few roundings of what enters the sums. Of fp32
# the second-order channels need the most: they add up many products that partly cancel.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 6e-3, torch.bfloat16: 4e-2}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EPS = 1e-5

Tensors = tuple[torch.Tensor, ...]


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    seed = sum(place * size for place, size in enumerate(shape, start=1))  # another shape, other numbers
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def along(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The curve whose derivatives at a = b = 0 are x's channels; those that x does not have are zero."""
    return sum((t * c for t, c in zip((torch.ones_like(a), a, b, a * b), x, strict=False)), torch.zeros_like(x[0]))


def derivatives(f: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """(f, ∂f/∂a, ∂f/∂b, ∂²f/∂a∂b) at a = b = 0: the gradient with respect to c of what c·f has for gradients."""
    a, b = (torch.zeros((), dtype=torch.float64, requires_grad=True) for _ in "ab")
    y = f(a, b)
    c = torch.zeros_like(y, requires_grad=True)

    def gradient(of: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(of, by, create_graph=True)[0]

    by_a, by_b = gradient((c * y).sum(), a), gradient((c * y).sum(), b)
    return torch.stack([y, gradient(by_a, c), gradient(by_b, c), gradient(gradient(by_a, b), c)])


def assert_close(name: str, got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert got.shape == expected.shape, f"{name}: {tuple(got.shape)} instead of {tuple(expected.shape)}"
    assert got.dtype == dtype
    assert got.is_contiguous()
    assert not got.isnan().any(), f"{name} has NaN: an element was not written"
    by_channel = got.dim() > 1
    for c, (x, y) in enumerate(zip(got, expected, strict=True)) if by_channel else [(0, (got, expected))]:
        error = (x.double() - y).abs().max().item()
        allowed = TOLERANCE[dtype] * max(y.abs().max().item(), 1e-2)
        assert error <= allowed, f"{name}, channel {c}: error {error:.2e}, allowed {allowed:.2e}"


def check(
    formula: Callable[..., torch.Tensor],
    forward: Callable[..., torch.Tensor],
    backward: Callable[..., Any],
    *inputs: torch.Tensor | None,
) -> None:
    """formula(*inputs in fp64) → the jet of the output; forward(*inputs) and backward(grad, *inputs) → gradients."""
    given = [x for x in inputs if x is not None]
    dtype = given[0].dtype
    exact = [None if x is None else x.detach().double().requires_grad_() for x in inputs]
    y = formula(*exact)
    grad = normal(*y.shape, dtype=dtype)
    assert_close("out", forward(*inputs), y.detach(), dtype)
    expected = torch.autograd.grad((y * grad).sum(), [x for x in exact if x is not None])
    gradients = backward(grad, *inputs)
    gradients = gradients if isinstance(gradients, tuple) else (gradients,)
    kept = [g for g, x in zip(gradients, inputs, strict=True) if x is not None]
    for i, (got, value) in enumerate(zip(kept, expected, strict=True)):
        assert_close(f"gradient {i}", got, value, dtype)


@pytest.fixture(autouse=True)
def poisoned_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory holds NaN, so that an element no program writes shows."""
    plain = torch.Tensor.new_empty

    def poisoned(self: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        return plain(self, *arguments, **options).fill_(float("nan"))

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)


# Pointwise

FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]] = {
    "gelu": (
        lambda x: 0.5 * x * (1 + torch.erf(x / 2**0.5)),
        lambda x: jet_pointwise.gelu_forward(x, False),
        lambda g, x: jet_pointwise.gelu_backward(g, x, False),
    ),
    "gelu tanh": (
        lambda x: 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x * x * x))),
        lambda x: jet_pointwise.gelu_forward(x, True),
        lambda g, x: jet_pointwise.gelu_backward(g, x, True),
    ),
    "silu": (lambda x: x / (1 + torch.exp(-x)), jet_pointwise.silu_forward, jet_pointwise.silu_backward),
}


def check_pointwise(function: str, x: torch.Tensor) -> None:
    f, forward, backward = FUNCTIONS[function]
    check(lambda x: derivatives(lambda a, b: f(along(x, a, b))), forward, backward, x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(4, 3, 7, 43), (3, 2, 500), (4, 1025), (3, 1)], ids=str)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_pointwise_follows_the_derivatives(function: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check_pointwise(function, 1.5 * normal(*shape, dtype=dtype))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_pointwise_is_a_line_far_from_zero(function: str) -> None:
    """Zero to the left, the identity to the right, however far, with nothing infinite in between; NaN stays NaN."""
    _, forward, backward = FUNCTIONS[function]
    far = torch.tensor([-3e38, -1e20, -1e7, -700.0, -150.0, 150.0, 700.0, 1e7, 1e20, 3e38])
    x = torch.stack([far, torch.full_like(far, 2.0), torch.full_like(far, 3.0), torch.full_like(far, 5.0)])
    slope = (far > 0).float()
    assert torch.equal(forward(x), x * slope)
    assert torch.equal(backward(x, x), x * slope)
    x[0] = float("nan")
    assert forward(x).isnan().all()
    assert backward(torch.ones_like(x), x).isnan().all()


# Norms


def layer_norm(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    z = x - x.mean(-1, keepdim=True)
    return affine(z * ((z * z).mean(-1, keepdim=True) + EPS) ** -0.5, weight, bias)


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    return affine(x * ((x * x).mean(-1, keepdim=True) + EPS) ** -0.5, weight, None)


def affine(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def check_layer_norm(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> None:
    check(
        lambda x, weight, bias: derivatives(lambda a, b: layer_norm(along(x, a, b), weight, bias)),
        lambda x, weight, bias: jet_norm.layer_norm_forward(x, weight, bias, EPS),
        lambda g, x, weight, bias: jet_norm.layer_norm_backward(g, x, weight, EPS),
        x,
        weight,
        bias,
    )


def check_rms_norm(x: torch.Tensor, weight: torch.Tensor | None) -> None:
    check(
        lambda x, weight: derivatives(lambda a, b: rms_norm(along(x, a, b), weight)),
        lambda x, weight: jet_norm.rms_norm_forward(x, weight, EPS),
        lambda g, x, weight: jet_norm.rms_norm_backward(g, x, weight, EPS),
        x,
        weight,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(4, 2, 5, 43), (3, 9, 180), (4, 3, 700), (3, 2, 4096), (4, 70, 5), (4, 9)], ids=str)
def test_norms_follow_the_derivatives(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight, bias = normal(*shape, dtype=dtype) + 0.5, normal(shape[-1], dtype=dtype) + 1, normal(shape[-1])
    check_layer_norm(x, weight, bias.to(dtype))
    check_rms_norm(x, weight)


def test_norms_without_weight_or_bias() -> None:
    x, weight = normal(4, 6, 43), normal(43)
    check_layer_norm(x, None, None)
    check_layer_norm(x, None, weight)
    check_layer_norm(x, weight, None)
    check_rms_norm(x, None)
    # the sums are there all the same: an op's backward returns them whether or not someone takes them
    _, grad_weight, grad_bias = jet_norm.layer_norm_backward(x, x, None, EPS)
    _, with_ones, bias_with_ones = jet_norm.layer_norm_backward(x, x, torch.ones(43), EPS)
    assert torch.equal(grad_weight, with_ones)
    assert torch.equal(grad_bias, bias_with_ones)


def test_a_constant_row_is_not_infinite() -> None:
    """Its variance is zero, so the derivatives are large, up to eps^−1.5, and finite."""
    x = normal(4, 2, 8)
    x[0] = 3.0
    y = jet_norm.layer_norm_forward(x, None, None, EPS)
    assert (y[0] == 0).all()
    assert y.isfinite().all()
    assert all(g.isfinite().all() for g in jet_norm.layer_norm_backward(x, x, None, EPS))


def test_rows_that_are_too_wide_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 4096"):
        jet_norm.rms_norm_forward(normal(3, 1, 4097), None, EPS)


# Attention

# (B, N, H, S, D): one slot and 64, ragged N, the odd widths, widths wider than one chunk of columns
SHAPES = [
    (2, 17, 1, 7, 43),
    (1, 17, 3, 11, 7),
    (1, 19, 1, 1, 64),
    (1, 5, 1, 64, 43),
    (3, 1, 1, 7, 1),
    (1, 17, 1, 11, 70),
    (1, 5, 1, 20, 40),
    (1, 3, 1, 5, 256),
]
Shape = tuple[int, int, int, int, int]


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    s = scale * torch.einsum("bnhd,bshd->bnhs", q, k)
    alive = torch.ones_like(s) if mask is None else mask[:, None, None].expand_as(s).double()
    e = torch.exp(s - s.detach().amax(-1, keepdim=True)) * alive
    total = e.sum(-1, keepdim=True)
    return torch.einsum("bnhs,bshd->bnhd", e / torch.where(total > 0, total, 1.0), v)


def check_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, side: torch.Tensor, mask: torch.Tensor | None
) -> None:
    scale = q.shape[-1] ** -0.5

    def formula(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        def at(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            step = torch.where(side, a, b)[..., None, None]
            return attention(along(q, a, b), k[0] + step * k[1], v[0] + step * v[1], mask, scale)

        return derivatives(at)

    check(
        formula,
        lambda q, k, v: jet_cross_attention.forward(q, k, v, side, mask, scale),
        lambda g, q, k, v: jet_cross_attention.backward(g, q, k, v, side, mask, scale),
        q,
        k,
        v,
    )


def attention_inputs(shape: Shape, channels: int, dtype: torch.dtype = torch.float32) -> Tensors:
    B, N, H, S, D = shape
    k = normal(2, B, S, H, D, dtype=dtype)
    return normal(channels, B, N, H, D, dtype=dtype), k, k.flip(2) + 0.5, alternating(B, S)


def alternating(B: int, S: int) -> torch.Tensor:
    return (torch.arange(B)[:, None] + torch.arange(S)) % 3 != 1


def one_slot_left(B: int, S: int) -> torch.Tensor:
    """Image 0 keeps its last slot only; the others lose their first slot, if they have another."""
    mask = torch.ones(B, S, dtype=torch.bool)
    mask[0, :-1] = False
    mask[1:, 0] = S == 1
    return mask


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_follows_the_derivatives(shape: Shape) -> None:
    check_attention(*attention_inputs(shape, 4), None)


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[1], SHAPES[4], SHAPES[5]], ids=str)
def test_attention_of_queries_that_do_not_move(shape: Shape) -> None:
    check_attention(*attention_inputs(shape, 1), None)


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[4]], ids=str)
def test_attention_with_masked_slots(shape: Shape) -> None:
    check_attention(*attention_inputs(shape, 4), one_slot_left(shape[0], shape[3]))


@pytest.mark.parametrize("channels", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[5]], ids=str)
def test_attention_in_half_precision(shape: Shape, dtype: torch.dtype, channels: int) -> None:
    check_attention(*attention_inputs(shape, channels, dtype), None)


@pytest.mark.parametrize("side", [True, False], ids=["all along u", "all along v"])
def test_slots_that_all_move_together(side: bool) -> None:
    q, k, v, sides = attention_inputs((2, 5, 1, 6, 8), 4)
    check_attention(q, k, v, torch.full_like(sides, side), None)
    still = jet_cross_attention.forward(q[:1], k, v, torch.full_like(sides, side), None, 0.3)
    assert (still[3] == 0).all()
    assert (still[2 if side else 1] == 0).all()


def test_u_and_v_are_exchangeable() -> None:
    q, k, v, side = attention_inputs((1, 18, 2, 7, 16), 4)
    order = [0, 2, 1, 3]
    plain = jet_cross_attention.forward(q, k, v, side, None, 0.3)
    swapped = jet_cross_attention.forward(q[order], k, v, ~side, None, 0.3)
    assert torch.allclose(plain, swapped[order], atol=1e-5)


def test_an_image_without_slots_gives_zeros() -> None:
    q, k, v, side = attention_inputs((2, 9, 1, 5, 7), 4)
    check_attention(q, k, v, side, torch.tensor([[False] * 5, [True] * 5]))


@pytest.mark.parametrize("channels", [1, 4])
def test_what_lies_in_a_masked_slot_never_leaks(channels: int) -> None:
    q, k, v, side = attention_inputs((1, 9, 2, 5, 7), channels)
    mask = torch.tensor([[True, True, False, True, True]])
    k[:, :, 2] = v[:, :, 2] = float("nan")
    o = jet_cross_attention.forward(q, k, v, side, mask, 0.3)
    grad_q, grad_k, grad_v = jet_cross_attention.backward(o, q, k, v, side, mask, 0.3)
    assert not any(x.isnan().any() for x in (o, grad_q, grad_k, grad_v))
    assert (grad_k[:, :, 2] == 0).all() and (grad_v[:, :, 2] == 0).all()


# Softmax over slots


def check_slot_softmax(products: torch.Tensor, offsets: torch.Tensor, side: torch.Tensor) -> None:
    blocks, by_u = len(products), side[:, None, :, None]

    def formula(products: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        zero = torch.zeros_like(products[0])
        channels, tangents = (products[:4], products[4:]) if blocks == 7 else (products[:1], [products[1], zero, zero])

        def at(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            step = torch.where(by_u, a, b)
            moved = offsets[0, ..., None] + step * offsets[1, ..., None] + step * along(torch.stack([*tangents]), a, b)
            return (along(channels, a, b) + moved).softmax(2)

        p, p_u, p_v, p_uv = derivatives(at)
        return torch.stack(
            [p, p_u, p_v, p_uv, torch.where(by_u, p, 0.0), torch.where(by_u, 0.0, p), torch.where(by_u, p_v, p_u)]
        )

    def backward(grad: torch.Tensor, products: torch.Tensor, offsets: torch.Tensor) -> Tensors:
        weights = jet_slot_softmax.forward(products, offsets, side)
        of_products = jet_slot_softmax.backward(grad, weights, side, blocks)
        by_offsets = of_products[[0, 4 if blocks == 7 else 1]]
        return of_products, by_offsets.double().sum(-1).to(offsets.dtype)

    check(formula, lambda p, c: jet_slot_softmax.forward(p, c, side), backward, products, offsets)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("blocks", [7, 2])
def test_softmax_over_slots_follows_the_derivatives(blocks: int, dtype: torch.dtype) -> None:
    for B, H, S, N in ((2, 2, 7, 37), (1, 1, 1, 3), (1, 1, 64, 19), (1, 2, 5, 300)):
        products, offsets = normal(blocks, B, H, S, N, dtype=dtype), normal(2, B, H, S, dtype=dtype)
        check_slot_softmax(products, offsets, alternating(B, S))


# All of them


def test_strided_inputs_are_read_as_they_are() -> None:
    B, N, H, S, D = 2, 17, 2, 5, 11
    packed = normal(4, B, N, 3, H, D)  # a fused projection
    by_head = normal(2, 1, H, S, D).transpose(2, 3).expand(2, B, S, H, D)  # heads before slots, one set for all images
    strided_last = normal(2, B, S, D, H).transpose(3, 4)
    side = alternating(S, B).T
    check_attention(packed[:, :, :, 1], by_head, strided_last, side, one_slot_left(S, B).T)
    check_attention(packed[:1, :, :, 1], strided_last, by_head, side, None)
    x = normal(6, 3, 43)
    check_pointwise("silu", x[1:4])
    check_pointwise("gelu", x[::2])
    check_pointwise("gelu", normal(43, 3, 4).permute(2, 1, 0))
    check_layer_norm(x[::2], normal(86)[::2], normal(43))
    check_rms_norm(normal(43, 3, 4).permute(2, 1, 0), None)


def test_expanded_gradients_are_taken() -> None:
    q, k, v, side = attention_inputs((2, 9, 1, 5, 7), 4)
    x = normal(4, 5, 43)

    def run(g: torch.Tensor) -> Tensors:
        return (
            *jet_cross_attention.backward(g.expand_as(q), q, k, v, side, None, 0.3),
            *jet_norm.layer_norm_backward(g.expand_as(x), x, None, EPS),
            jet_pointwise.gelu_backward(g.expand_as(x), x, False),
        )

    dense = (
        *jet_cross_attention.backward(torch.ones_like(q), q, k, v, side, None, 0.3),
        *jet_norm.layer_norm_backward(torch.ones_like(x), x, None, EPS),
        jet_pointwise.gelu_backward(torch.ones_like(x), x, False),
    )
    assert all(map(torch.equal, run(torch.ones(())), dense))


def test_reruns_agree_bit_for_bit() -> None:
    q, k, v, side = attention_inputs((1, 50, 1, 7, 16), 4)  # four partial sums
    x = normal(4, 20, 180)  # five

    def run() -> Tensors:
        return (
            jet_cross_attention.forward(q, k, v, side, None, 0.3),
            *jet_cross_attention.backward(q, q, k, v, side, None, 0.3),
            jet_norm.layer_norm_forward(x, None, None, EPS),
            *jet_norm.layer_norm_backward(x, x, None, EPS),
            jet_pointwise.gelu_backward(x, x, True),
        )

    assert all(map(torch.equal, run(), run()))


@pytest.mark.parametrize("channels", [3, 4])
@pytest.mark.parametrize("rest", [(0, 5), (2, 0)], ids=["no rows", "no columns"])
def test_nothing_in_gives_nothing_out(rest: tuple[int, int], channels: int) -> None:
    x, g = normal(channels, *rest), normal(4, *rest)
    assert jet_pointwise.gelu_forward(x, True).shape == g.shape
    assert jet_pointwise.silu_backward(g, x).shape == x.shape
    assert jet_norm.layer_norm_forward(x, None, None, EPS).shape == g.shape
    grad_x, *sums = (*jet_norm.layer_norm_backward(g, x, None, EPS), *jet_norm.rms_norm_backward(g, x, None, EPS)[1:])
    assert grad_x.shape == x.shape
    assert all(torch.equal(s, torch.zeros(rest[1])) for s in sums)


@pytest.mark.parametrize("shape", [(0, 9, 2, 5, 7), (2, 0, 2, 5, 7)], ids=["no images", "no pixels"])
def test_no_pixels_give_the_slots_no_gradient(shape: Shape) -> None:
    q, k, v, side = attention_inputs(shape, 4)
    assert jet_cross_attention.forward(q, k, v, side, None, 0.3).shape == q.shape
    grad_q, grad_k, grad_v = jet_cross_attention.backward(q, q, k, v, side, None, 0.3)
    assert grad_q.shape == q.shape
    assert torch.equal(grad_k, torch.zeros_like(k)) and torch.equal(grad_v, torch.zeros_like(v))
