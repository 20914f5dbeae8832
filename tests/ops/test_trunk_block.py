"""trunk_block, fused or not: values and gradients of all inputs, shapes, strides, causality, and what is refused.

The oracle is the layer with attention by hand, in fp64, which shares nothing with the op.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import forward_ad

from compgen_fast.ops.trunk_block import EPS, FUSED, HIDDEN, PARTS, BlockWeights, formula, trunk_block
from tests.ops.contract import error

fused_only = pytest.mark.skipif(not FUSED, reason="plain torch serves the layer")


@dataclass(frozen=True)
class Case:
    B: int = 3
    T: int = 16
    H: int = 4
    D: int = 16
    causal: bool = False

    def inputs(self, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """x, modulation and the eight weights, in numbers that fp32 holds."""
        W = self.H * self.D
        shapes = ((3 * W, W), (3 * W,), (W, W), (W,), (HIDDEN * W, W), (HIDDEN * W,), (W, HIDDEN * W), (W,))
        weights = [torch.randn(shape) * (W**-0.5 if len(shape) == 2 else 0.5) for shape in shapes]
        every = [torch.randn(self.B, self.T, W), torch.randn(self.B, PARTS, W), *weights]
        return [each.to(dtype).requires_grad_() for each in every]

    def call(self, x: Tensor, modulation: Tensor, *weights: Tensor) -> Tensor:
        return trunk_block(x, modulation, BlockWeights(*weights), self.H, causal=self.causal)

    def oracle(self, x: Tensor, modulation: Tensor, *weights: Tensor) -> Tensor:
        def attend(qkv: Tensor) -> Tensor:
            q, k, v = qkv.view(self.B, self.T, 3, self.H, self.D).permute(2, 0, 3, 1, 4)
            scores = q @ k.mT / self.D**0.5
            if self.causal:
                scores = scores.masked_fill(torch.ones(self.T, self.T).triu(1).bool(), -torch.inf)
            return (scores.softmax(-1) @ v).transpose(1, 2).reshape(x.shape)

        def normed(x: Tensor) -> Tensor:
            centred = x - x.mean(-1, keepdim=True)
            return centred / (centred.square().mean(-1, keepdim=True) + EPS).sqrt()

        of = BlockWeights(*weights)
        a, b, c, d, e, f = (modulation[:, part, None] for part in range(PARTS))
        x = x + c * (attend((normed(x) * b + a) @ of.qkv.mT + of.qkv_bias) @ of.proj.mT + of.proj_bias)
        hidden = (normed(x) * e + d) @ of.fc1.mT + of.fc1_bias
        return x + f * (hidden * (1 + torch.erf(hidden / 2**0.5)) / 2 @ of.fc2.mT + of.fc2_bias)


def with_gradients(call: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    out = call(*inputs)
    return [out, *torch.autograd.grad(out, inputs, grad.to(out.dtype))]


def assert_exact(case: Case) -> None:
    """As the same in fp32 by hand, within a factor: norms of few numbers have errors of their own."""
    inputs = case.inputs()
    exact = [each.detach().double().requires_grad_() for each in inputs]
    grad = torch.randn(inputs[0].shape)
    expected, eager = (with_gradients(case.oracle, some, grad) for some in (exact, inputs))
    for ours, plain, true in zip(with_gradients(case.call, inputs, grad), eager, expected, strict=True):
        assert ours.dtype == torch.float32 and ours.shape == true.shape
        assert (ours - true).abs().max() <= 8 * (plain - true).abs().max() + 1e-6 * true.abs().max() + 1e-6


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "case",
    [Case(), Case(2, 64, 4, 32), Case(1, 256, 2, 16), Case(2, 49, 3, 43), Case(1, 1, 1, 5), Case(2, 9, 8, 1)],
    ids=str,
)
def test_values_and_gradients_are_the_oracle_s(case: Case, causal: bool) -> None:
    assert_exact(Case(case.B, case.T, case.H, case.D, causal))


@given(B=st.integers(1, 3), T=st.integers(1, 70), H=st.integers(1, 3), D=st.integers(5, 20), causal=st.booleans())
def test_random_shapes(B: int, T: int, H: int, D: int, causal: bool) -> None:
    assert_exact(Case(B, T, H, D, causal))


@pytest.mark.parametrize("causal", [False, True])
def test_gradients_are_those_of_finite_differences(causal: bool) -> None:
    case = Case(2, 3, 2, 3, causal)
    assert torch.autograd.gradcheck(case.call, case.inputs(torch.float64), fast_mode=True)


def test_fp64_is_exact() -> None:
    case = Case(2, 50, 2, 7)
    inputs = case.inputs(torch.float64)
    grad = torch.randn(inputs[0].shape, dtype=torch.float64)
    pairs = zip(with_gradients(case.call, inputs, grad), with_gradients(case.oracle, inputs, grad), strict=True)
    for ours, true in pairs:
        torch.testing.assert_close(ours, true, rtol=1e-11, atol=1e-12)


def test_what_is_strided_is_read_by_its_strides() -> None:
    case = Case(2, 5, 2, 6)
    inputs = case.inputs()
    expected = with_gradients(case.call, inputs, torch.ones(()).expand(2, 5, 12))
    wide = torch.randn(2, 3 * PARTS, 12)
    wide[:, PARTS : 2 * PARTS] = inputs[1].detach()
    strided = [each.detach().mT.contiguous().mT if each.dim() > 1 else each.detach() for each in inputs]
    strided[1] = wide[:, PARTS : 2 * PARTS]
    found = with_gradients(case.call, [each.requires_grad_() for each in strided], torch.ones(()).expand(2, 5, 12))
    for ours, same in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, same)


def test_a_causal_layer_takes_nothing_from_later_tokens() -> None:
    case = Case(1, 60, 2, 8, causal=True)
    x, *rest = case.inputs()
    (grad,) = torch.autograd.grad(case.call(x, *rest)[:, :20].sum(), x)
    assert (grad[:, 20:] == 0).all() and (grad[:, :20] != 0).any()


def test_images_do_not_meet() -> None:
    case = Case(3, 7, 2, 4)
    x, *rest = (each.detach() for each in case.inputs())
    x[1] = torch.nan
    found = case.call(x, *rest)
    assert found[1].isnan().all() and found[[0, 2]].isfinite().all()


def test_large_scores_do_not_overflow() -> None:
    case = Case()
    x, modulation, *weights = case.inputs()
    found = with_gradients(case.call, [x, modulation, weights[0] * 1e3, *weights[1:]], torch.ones_like(x))
    assert all(each.isfinite().all() for each in found)


def test_closed_gates_leave_the_tokens_as_they_are() -> None:
    case = Case()
    x, modulation, *weights = (each.detach() for each in case.inputs())
    modulation[:, [2, 5]] = 0
    assert torch.equal(case.call(x, modulation, *weights), x)


@pytest.mark.parametrize("wanted", [0, 1, 5])
def test_one_gradient_can_be_asked_for(wanted: int) -> None:
    case = Case(2, 4, 2, 4)
    inputs = case.inputs()
    alone = [each.detach().requires_grad_(number == wanted) for number, each in enumerate(inputs)]
    whole = torch.autograd.grad(case.call(*inputs).sum(), inputs[wanted])
    torch.testing.assert_close(torch.autograd.grad(case.call(*alone).sum(), alone[wanted]), whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_plain_torch(dtype: torch.dtype) -> None:
    case = Case()
    inputs = [each.detach() for each in case.inputs(dtype)]
    expected = case.oracle(*(each.double() for each in inputs))
    assert error(case.call(*inputs), expected) <= 20 * torch.finfo(dtype).eps


def test_autocast_is_obeyed() -> None:
    case = Case()
    inputs = case.inputs()
    with torch.autocast("cpu", torch.bfloat16):
        found = case.call(*inputs)
    rounded = error(found, case.oracle(*(each.double() for each in inputs)))
    assert 1e-4 < rounded < 0.05  # its products are rounded to bf16


@fused_only
def test_the_op_keeps_its_promises_to_torch() -> None:
    case = Case(2, 5, 2, 4)
    torch.library.opcheck(
        torch.ops.compgen.trunk_block, (*case.inputs(), case.H, False), test_utils=("test_schema", "test_faketensor")
    )
    x, modulation, *weights = (each.detach() for each in case.inputs())
    kept = torch.ops.compgen.trunk_block(x, modulation, *weights, case.H, False)[1]
    arguments = (torch.ones_like(x), kept, x, modulation, *weights, case.H, False)
    torch.library.opcheck(
        torch.ops.compgen.trunk_block_backward, arguments, test_utils=("test_schema", "test_faketensor")
    )


@fused_only
def test_a_gradient_of_the_gradient_is_refused() -> None:
    case = Case()
    inputs = case.inputs()
    with pytest.raises(NotImplementedError, match="cannot be differentiated again; leave create_graph out"):
        torch.autograd.grad(case.call(*inputs).sum(), inputs[0], create_graph=True)


def test_a_forward_tangent_is_refused() -> None:
    case = Case()
    x, *rest = (each.detach() for each in case.inputs())
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="x carries a forward-mode tangent"):
        case.call(forward_ad.make_dual(x, torch.ones_like(x)), *rest)


def test_what_does_not_fit_is_refused() -> None:
    case = Case(2, 4, 2, 4)
    x, modulation, *weights = (each.detach() for each in case.inputs())
    with pytest.raises(ValueError, match=r"modulation \[2, 5, 8\]; expected \[B, T, W\] and \[B, 6, W\]"):
        case.call(x, modulation[:, 1:], *weights)
    with pytest.raises(ValueError, match="3 heads do not divide a width of 8"):
        trunk_block(x, modulation, BlockWeights(*weights), 3)
    with pytest.raises(ValueError, match=r"fc1 is \[31, 8\]; expected \[32, 8\] for a width of 8"):
        case.call(x, modulation, *weights[:4], weights[4][1:], *weights[5:])


@fused_only
@pytest.mark.parametrize("number", range(10))
def test_the_raw_op_refuses_a_tensor_that_is_short(number: int) -> None:
    case = Case(2, 4, 2, 4)
    inputs = [each.detach() for each in case.inputs()]
    for axis in range(inputs[number].dim()):
        if (number, axis) == (0, 1):
            continue  # fewer tokens are as good
        short = [each.narrow(axis, 1, each.shape[axis] - 1) if i == number else each for i, each in enumerate(inputs)]
        with pytest.raises(RuntimeError, match=r"expected|do not divide"):
            torch.ops.compgen.trunk_block(*short, case.H, False)


@fused_only
def test_the_raw_backward_refuses_what_the_forward_did_not_keep() -> None:
    case = Case(2, 4, 2, 4)
    inputs = [each.detach() for each in case.inputs()]
    _, kept = torch.ops.compgen.trunk_block(*inputs, case.H, False)
    with pytest.raises(RuntimeError, match="kept has shape"):
        torch.ops.compgen.trunk_block_backward(torch.ones_like(inputs[0]), kept[1:], *inputs, case.H, False)
    with pytest.raises(RuntimeError, match="grad has shape"):
        torch.ops.compgen.trunk_block_backward(torch.ones(2, 3, 8), kept, *inputs, case.H, False)
    with pytest.raises(RuntimeError, match="expected one type"):
        torch.ops.compgen.trunk_block(inputs[0], inputs[1].double(), *inputs[2:], case.H, False)


def test_two_threads_find_what_one_finds() -> None:
    case = Case(5, 16, 4, 16)
    inputs, before = case.inputs(), torch.get_num_threads()
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(with_gradients(case.call, inputs, torch.ones_like(inputs[0])))
    torch.set_num_threads(before)
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)


def test_the_formula_takes_any_attention() -> None:
    case = Case(2, 4, 2, 4)
    x, modulation, *weights = case.inputs()
    by_hand = formula(x, modulation, BlockWeights(*weights), lambda qkv: F.silu(qkv[..., :8]))
    assert by_hand.shape == x.shape and not torch.equal(by_hand, case.call(x, modulation, *weights))
