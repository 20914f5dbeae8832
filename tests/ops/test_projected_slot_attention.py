"""Attention with its projections folded into the slots, against the three parts it replaces."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import linear

from compgen_fast.ops import projected_slot_attention
from compgen_fast.ops.backends import serving
from compgen_fast.ops.projected_slot_attention import Projections, folded, folding_pays, unfolded
from tests.ops.contract import error, upstream
from tests.ops.test_contract import some_mask

DTYPES = [torch.float32, torch.float16, torch.bfloat16] + ([] if serving("cpu") == "triton" else [torch.float64])
NAMES = ("x", "k", "v", "w_q", "b_q", "w_out", "b_out")
needs_fp64 = pytest.mark.skipif(serving("cpu") == "triton", reason="Triton kernels take no fp64; gradcheck needs it")


@dataclass(frozen=True)
class Shape:
    B: int = 2
    N: int = 37
    S: int = 7
    H: int = 3
    D: int = 43
    Q: int = 20
    Q_out: int = 24
    X: int | None = None  # different pixel sets; B when None

    def inputs(self, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """x, k, v, w_q, b_q, w_out, b_out; weights as nn.Linear scales them."""
        slots, width = (self.B, self.S, self.H, self.D), self.H * self.D
        x = torch.randn(self.B if self.X is None else self.X, self.N, self.Q)
        w_q, w_out = torch.randn(width, self.Q) / self.Q**0.5, torch.randn(self.Q_out, width) / width**0.5
        tensors = x, torch.randn(slots), torch.randn(slots), w_q, torch.randn(width), w_out, torch.randn(self.Q_out)
        return [tensor.to(dtype) for tensor in tensors]


SHAPES = st.builds(
    Shape,
    B=st.integers(2, 3),
    N=st.integers(2, 130),
    S=st.integers(1, 64),
    H=st.integers(1, 4),
    D=st.sampled_from([1, 7, 32, 43]),
    Q=st.integers(1, 40),
    X=st.sampled_from([None, 1]),
)
FEW, MANY = Shape(), Shape(S=50, D=7)  # folded, and not


def eager(
    x: Tensor,
    k: Tensor,
    v: Tensor,
    w_q: Tensor,
    b_q: Tensor,
    w_out: Tensor,
    b_out: Tensor,
    slot_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """What a user would write."""
    q = linear(x, w_q, b_q).unflatten(-1, k.shape[2:]).expand(len(k), -1, -1, -1)
    logits = torch.einsum("bnhd,bshd->bhns", q, k) * k.shape[-1] ** -0.5
    if slot_mask is not None:
        logits = logits.masked_fill(~slot_mask[:, None, None], float("-inf"))
    p = logits.softmax(-1)
    return linear(torch.einsum("bhns,bshd->bnhd", p, v).flatten(-2), w_out, b_out), p.mean(1)


def run(
    function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor], slot_mask: Tensor | None
) -> list[Tensor]:
    """Both outputs and the gradients of all inputs."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    outputs = function(*leaves, slot_mask)
    return [*outputs, *torch.autograd.grad(outputs, leaves, upstream(outputs))]


def assert_as_exact_as_eager(inputs: Sequence[Tensor], slot_mask: Tensor | None = None) -> None:
    """At most 4 times as far from fp64 as eager torch, plus 16 roundings of the largest value.

    In half precision a, u and the logits are rounded once each, where eager rounds q, the logits and heads' outputs:
    as many roundings at other places. A score's gradient is a difference, which is where the factor goes.
    """
    dtype = inputs[0].dtype
    exact = run(eager, [x.double() for x in inputs], slot_mask)
    results = zip(
        ("out", "weights", *NAMES),
        run(projected_slot_attention, inputs, slot_mask),
        run(eager, inputs, slot_mask),
        exact,
        strict=True,
    )
    for name, found, peer, true in results:
        bound = 4 * error(peer, true) + 16 * torch.finfo(dtype).eps
        assert found.dtype == dtype and found.shape == true.shape
        assert error(found, true) <= bound, f"{name}: error {error(found, true):.2e}, bound {bound:.2e}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shape", [FEW, Shape(X=1), MANY], ids=["folded", "one set of pixels", "unfolded"])
def test_outputs_and_gradients_are_as_exact_as_eager(shape: Shape, dtype: torch.dtype, masked: bool) -> None:
    assert_as_exact_as_eager(shape.inputs(dtype), some_mask(shape.B, shape.S) if masked else None)


@given(shape=SHAPES, masked=st.booleans())
def test_any_shape_is_as_exact_as_eager(shape: Shape, masked: bool) -> None:
    torch.manual_seed(0)
    assert_as_exact_as_eager(shape.inputs(), some_mask(shape.B, shape.S) if masked else None)


@needs_fp64
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("X", [None, 1])
def test_both_ways_are_the_same_op(masked: bool, X: int | None) -> None:
    x, k, v, *weights = Shape(X=X).inputs(torch.float64)
    mask = some_mask(2, 7) if masked else None
    arguments = (x, k, v, Projections(*weights), mask, 0.2, True)
    torch.testing.assert_close(folded(*arguments), unfolded(*arguments))


def test_folding_is_chosen_by_the_count_of_multiplications() -> None:
    """The reference decoder, per head: 2·7·360·(4096 + 43) folded, 4096·43·(2·180 + 2·(14 + 180)) unfolded."""

    def pays(B: int, X: int, N: int, S: int, D: int, Q: int) -> bool:
        x, k, w_out = torch.empty(X, N, Q), torch.empty(B, S, 1, D), torch.empty(Q, D)
        return folding_pays(x, k, w_out)

    assert pays(2, 2, 4096, 7, 43, 180)
    assert not pays(2, 2, 3, 7, 43, 180)  # so few pixels do not pay for folding
    assert not pays(2, 2, 4096, 60, 43, 180)  # nor with so many slots
    assert pays(4, 4, 4096, 24, 43, 180)
    assert not pays(4, 1, 4096, 24, 43, 180)  # the queries of one set of pixels are computed once for four images


@pytest.mark.parametrize(("shape", "calls"), [(FEW, 0), (MANY, 1)], ids=["folded", "unfolded"])
def test_the_cheaper_way_is_taken(shape: Shape, calls: int) -> None:
    module = "compgen_fast.ops.projected_slot_attention"
    with patch(f"{module}.slot_cross_attention", wraps=unfolded.__globals__["slot_cross_attention"]) as attention:
        projected_slot_attention(*shape.inputs())
    assert attention.call_count == calls


@pytest.mark.parametrize("shape", [FEW, Shape(X=1), MANY], ids=["folded", "one set of pixels", "unfolded"])
def test_a_masked_slot_receives_no_weight_and_no_gradient_whatever_it_holds(shape: Shape) -> None:
    inputs, mask = shape.inputs(), some_mask(shape.B, shape.S)
    for slots in inputs[1:3]:
        slots[~mask] = float("nan")
    out, weights, *grads = run(projected_slot_attention, inputs, mask)
    assert (weights.mT[~mask] == 0).all()
    assert all((grad[~mask] == 0).all() for grad in grads[1:3])
    assert all(x.isfinite().all() for x in (out, weights, *grads))


@pytest.mark.parametrize("shape", [FEW, MANY], ids=["folded", "unfolded"])
def test_an_image_without_any_live_slot_gets_the_bias_alone(shape: Shape) -> None:
    inputs, mask = shape.inputs(), torch.tensor([[False] * shape.S, [True] * shape.S])
    out, weights, *grads = run(projected_slot_attention, inputs, mask)
    torch.testing.assert_close(out[0], inputs[-1].expand_as(out[0]))
    assert (weights[0] == 0).all() and (weights[1] > 0).all()
    assert all((grad[0] == 0).all() and grad.isfinite().all() for grad in grads[:3])


def test_slot_weights_sum_to_one_over_the_live_slots() -> None:
    for mask in (None, some_mask(2, 7)):
        _, weights = projected_slot_attention(*FEW.inputs(), mask)
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 37))


def test_the_order_of_slots_does_not_matter() -> None:
    x, k, v, *weights = FEW.inputs()
    order = torch.randperm(7)
    out, w = projected_slot_attention(x, k, v, *weights)
    permuted, permuted_w = projected_slot_attention(x, k[:, order], v[:, order], *weights)
    torch.testing.assert_close(permuted, out)
    torch.testing.assert_close(permuted_w, w[..., order])


def test_one_set_of_pixels_is_the_same_pixels_for_every_image() -> None:
    x, *others = Shape(X=1).inputs()
    shared = run(projected_slot_attention, [x, *others], None)
    repeated = run(projected_slot_attention, [x.expand(2, -1, -1), *others], None)
    repeated[2] = repeated[2].sum(0, keepdim=True)
    torch.testing.assert_close(shared, repeated, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [FEW, MANY], ids=["folded", "unfolded"])
def test_biases_may_be_missing(shape: Shape) -> None:
    x, k, v, w_q, b_q, w_out, b_out = shape.inputs()
    mask = some_mask(shape.B, shape.S)
    for slot_mask in (None, mask):
        bare = projected_slot_attention(x, k, v, w_q, None, w_out, None, slot_mask)
        zero = projected_slot_attention(x, k, v, w_q, torch.zeros_like(b_q), w_out, torch.zeros_like(b_out), slot_mask)
        torch.testing.assert_close(bare, zero)


def test_the_output_alone_is_the_same_output() -> None:
    for shape in (FEW, MANY):
        inputs = shape.inputs()
        torch.testing.assert_close(
            projected_slot_attention(*inputs, return_weights=False), projected_slot_attention(*inputs)[0]
        )


def test_strided_inputs_need_no_copy_by_the_caller() -> None:
    for shape in (FEW, Shape(X=1)):
        strided = [x.transpose(0, -1).contiguous().transpose(0, -1) for x in shape.inputs()]
        assert not strided[0].is_contiguous()
        assert_as_exact_as_eager(strided)


@pytest.mark.parametrize("shape", [Shape(B=0), Shape(B=0, X=1), Shape(N=0), Shape(B=0, S=50, D=7)], ids=str)
def test_empty_inputs_give_empty_outputs_and_zero_gradients(shape: Shape) -> None:
    out, weights, *grads = run(projected_slot_attention, shape.inputs(), None)
    assert out.numel() == weights.numel() == 0 and out.shape == (shape.B, shape.N, shape.Q_out)
    assert all((grad == 0).all() for grad in grads)


@needs_fp64
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("X", [None, 1])
def test_first_and_second_derivatives_pass_gradcheck(masked: bool, X: int | None) -> None:
    shape = Shape(B=2, N=5, S=2, H=2, D=3, Q=2, Q_out=2, X=X)
    inputs = [x.requires_grad_() for x in shape.inputs(torch.float64)]
    mask = torch.tensor([[True, False], [True, True]]) if masked else None
    assert folding_pays(inputs[0], inputs[1], inputs[5])
    assert torch.autograd.gradcheck(lambda *x: projected_slot_attention(*x, mask), inputs)
    assert torch.autograd.gradgradcheck(lambda *x: projected_slot_attention(*x, mask), inputs, fast_mode=True)


@pytest.mark.parametrize("shape", [FEW, MANY], ids=["folded", "unfolded"])
def test_compiles_as_one_graph(shape: Shape) -> None:
    torch.compiler.reset()
    compiled = torch.compile(projected_slot_attention, fullgraph=True, dynamic=True, backend="aot_eager")
    inputs, mask = shape.inputs(), some_mask(shape.B, shape.S)
    torch.testing.assert_close(run(compiled, inputs, mask), run(projected_slot_attention, inputs, mask))


def test_autocast_takes_and_gives_half_precision_and_trains_full_precision_weights() -> None:
    for shape in (FEW, MANY):
        inputs = [x.requires_grad_() for x in shape.inputs()]
        inputs[1] = inputs[1].detach().bfloat16()  # as a linear under autocast gives it, beside a norm's fp32
        with torch.autocast("cpu", torch.bfloat16):
            out, weights = projected_slot_attention(*inputs)
        assert out.dtype == weights.dtype == torch.bfloat16
        (out.float().square().sum() + weights.float().square().sum()).backward()
        assert inputs[3].grad is not None and inputs[3].grad.dtype == torch.float32
        exact, _ = eager(*(x.detach().bfloat16().double() for x in inputs))
        assert error(out, exact) < 0.02


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        (
            {"x": torch.ones(3, 37, 20)},
            r"x has shape \[3, 37, 20\]; expected \[B, N, Q\] with B = 2 images, or 1 for all",
        ),
        ({"x": torch.ones(37, 20)}, r"x has shape \[37, 20\]; expected \[B, N, Q\]"),
        ({"k": torch.ones(2, 7, 129)}, r"k has shape \[2, 7, 129\]; expected \[B, S, H, D\]"),
        ({"v": torch.ones(2, 6, 3, 43)}, r"v \[2, 6, 3, 43\] and k \[2, 7, 3, 43\] must have one shape"),
        ({"w_q": torch.ones(129, 21)}, r"w_q has shape \[129, 21\]; expected \[H·D, Q\] = \[129, 20\] for x"),
        ({"b_q": torch.ones(20)}, r"b_q has shape \[20\]; expected \[H·D\] = \[129\]"),
        ({"w_out": torch.ones(24, 128)}, r"w_out has shape \[24, 128\]; expected \[Q_out, H·D\] = \[24, 129\]"),
        ({"b_out": torch.ones(129)}, r"b_out has shape \[129\]; expected \[Q_out\] = \[24\]"),
        ({"x": torch.ones(2, 37, 20).double()}, "x is torch.float64 but k is torch.float32; cast one, or use autocast"),
        ({"slot_mask": torch.ones(2, 7)}, "slot_mask is torch.float32; expected torch.bool"),
    ],
)
def test_refusals_say_what_was_given_and_what_was_expected(changed: dict[str, Tensor], sentence: str) -> None:
    usual = dict(zip(NAMES, FEW.inputs(), strict=True))
    with pytest.raises((TypeError, ValueError), match=sentence):
        projected_slot_attention(**(usual | changed))
