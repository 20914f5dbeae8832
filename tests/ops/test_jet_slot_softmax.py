"""The softmax over slots of jets and the products around it, on whichever backend serves the CPU.

The oracle knows nothing of jets: it runs ordinary attention at x + a x_u + b x_v + ab x_uv, with slots at value + a or
b times their tangent, and differentiates by a and b, reverse mode over reverse mode.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from compgen_fast.ops import jet_slot_softmax
from compgen_fast.ops.backends import interpreting, serving
from compgen_fast.ops.jet_slot_products import (
    jet_slot_mix,
    jet_slot_products,
    mix_reference,
    products_reference,
    sums_reference,
)
from compgen_fast.ops.jet_slot_softmax import reference
from tests.ops.contract import error
from tests.ops.test_jet_ops import along, run

DTYPES = [torch.float32, torch.float16, torch.bfloat16] + ([] if serving("cpu") == "triton" else [torch.float64])
OPS = torch.ops.compgen
needs_fp64 = pytest.mark.skipif(serving("cpu") == "triton", reason="Triton kernels take no fp64; the oracle needs it")


@dataclass(frozen=True)
class Shape:
    B: int = 2
    H: int = 2
    S: int = 7
    N: int = 37
    Q: int = 5
    channels: int = 4
    images: int | None = None  # of pixels; B when None

    def side(self) -> Tensor:
        return torch.rand(self.B, self.S, generator=torch.Generator().manual_seed(self.S)) > 0.5

    def softmax_inputs(self, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """products and offsets."""
        blocks = 7 if self.channels == 4 else 2
        return random((blocks, self.B, self.H, self.S, self.N), (2, self.B, self.H, self.S), dtype=dtype)

    def whole_inputs(self, dtype: torch.dtype = torch.float64) -> list[Tensor]:
        """pixels, keys, offsets, values."""
        pixels = (self.channels, self.images or self.B, self.N, self.Q)
        slots = (2, self.B, self.H * self.S, self.Q)
        return random(pixels, slots, (2, self.B, self.H, self.S), slots, dtype=dtype)


def random(*shapes: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]


SHAPES = st.builds(
    Shape,
    B=st.integers(2, 3),
    H=st.integers(1, 3),
    S=st.integers(1, 64),
    N=st.integers(2, 300),
    channels=st.sampled_from([1, 4]),
)
EDGES = [Shape(), Shape(channels=1), Shape(S=1), Shape(S=64, N=17), Shape(N=1), Shape(N=129, H=1), Shape(B=1, S=2)]
SMALL = [Shape(B=2, H=2, S=3, N=2, Q=2), Shape(B=2, H=1, S=2, N=3, Q=2, channels=1)]
SHARED = Shape(B=2, H=2, S=3, N=3, Q=2, channels=1, images=1)


def attend(shape: Shape, side: Tensor) -> Callable[..., Tensor]:
    """Scores, softmax and mixture of jets by the three ops."""

    def whole(pixels: Tensor, keys: Tensor, offsets: Tensor, values: Tensor) -> Tensor:
        products = jet_slot_products(pixels, keys).unflatten(2, (shape.H, shape.S))
        return jet_slot_mix(jet_slot_softmax(products, offsets, side).flatten(2, 3), values)

    return whole


def oracle(shape: Shape, side: Tensor, pixels: Tensor, keys: Tensor, offsets: Tensor, values: Tensor) -> Tensor:
    a, b = (torch.zeros((), dtype=torch.float64, requires_grad=True) for _ in range(2))
    factors = (torch.ones_like(a), a, b, a * b)
    x = sum(factor * channel for factor, channel in zip(factors, pixels, strict=False))
    step = torch.where(side, a, b)[:, None]

    def moved(slots: Tensor) -> Tensor:
        value, tangent = slots.unflatten(2, (shape.H, shape.S))
        return value + step.unsqueeze(-1) * tangent

    logits = torch.einsum("bhsq,bnq->bhsn", moved(keys), x.expand(shape.B, -1, -1))
    logits = logits + (offsets[0] + step * offsets[1]).unsqueeze(-1)
    y = torch.einsum("bhsn,bhsq->bnq", logits.softmax(2), moved(values))
    y_u = along(y, a)
    return torch.stack([y, y_u, along(y, b), along(y_u, b)])


@needs_fp64
@pytest.mark.parametrize("shape", [*EDGES, Shape(channels=1, images=1)], ids=str)
def test_scores_softmax_and_mixture_are_the_derivatives_of_attention(shape: Shape) -> None:
    inputs, side = shape.whole_inputs(), shape.side()
    found = attend(shape, side)(*inputs)
    torch.testing.assert_close(found, oracle(shape, side, *inputs).detach(), rtol=1e-9, atol=1e-11)


@needs_fp64
@pytest.mark.parametrize("shape", [*SMALL, SHARED], ids=str)
def test_first_and_second_derivatives_pass_gradcheck(shape: Shape) -> None:
    inputs = [x.requires_grad_() for x in shape.whole_inputs()]
    assert torch.autograd.gradcheck(attend(shape, shape.side()), inputs)
    assert torch.autograd.gradgradcheck(attend(shape, shape.side()), inputs, fast_mode=True)


def assert_as_exact_as_the_reference(shape: Shape, inputs: Sequence[Tensor]) -> None:
    """At most twice the error of plain torch with fp32 sums in this dtype, plus 16 roundings."""
    side, dtype = shape.side(), inputs[0].dtype

    def formula(*x: Tensor) -> Tensor:
        return reference(*x, side)

    exact = run(formula, [x.double() for x in inputs])
    results = zip(run(lambda *x: jet_slot_softmax(*x, side), inputs), run(formula, inputs), exact, strict=True)
    for index, (found, peer, true) in enumerate(results):
        bound = 2 * error(peer, true) + 16 * torch.finfo(dtype).eps
        assert found.dtype == dtype and found.shape == true.shape
        assert error(found, true) <= bound, f"result {index}: {error(found, true):.2e}, bound {bound:.2e}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("channels", [1, 4])
def test_outputs_and_gradients_are_as_exact_as_plain_torch(dtype: torch.dtype, channels: int) -> None:
    shape = Shape(channels=channels)
    assert_as_exact_as_the_reference(shape, shape.softmax_inputs(dtype))


@given(shape=SHAPES)
def test_any_shape_is_as_exact_as_plain_torch(shape: Shape) -> None:
    torch.manual_seed(0)
    assert_as_exact_as_the_reference(shape, shape.softmax_inputs())


@pytest.mark.parametrize("shape", EDGES, ids=str)
def test_edges_of_the_shape_range(shape: Shape) -> None:
    assert_as_exact_as_the_reference(shape, shape.softmax_inputs())


def test_strided_inputs_need_no_copy_by_the_caller() -> None:
    shape = Shape()
    products, offsets = (x.transpose(0, -1).contiguous().transpose(0, -1) for x in shape.softmax_inputs())
    assert not products.is_contiguous()
    assert_as_exact_as_the_reference(shape, [products, offsets])


@pytest.mark.parametrize("shape", [Shape(B=0), Shape(N=0)], ids=str)
def test_empty_inputs_give_empty_outputs_and_zero_gradients(shape: Shape) -> None:
    out, *grads = run(lambda *x: jet_slot_softmax(*x, shape.side()), shape.softmax_inputs())
    assert out.numel() == 0 and all((grad == 0).all() for grad in grads)
    pixels, keys, _, _ = shape.whole_inputs(torch.float32)
    weights = jet_slot_products(pixels, keys)
    assert jet_slot_mix(weights, keys).shape == pixels.shape
    assert (OPS.jet_slot_sums(weights, pixels, 0) == 0).all()


@pytest.mark.parametrize("channels", [1, 4])
def test_a_slot_with_the_lowest_score_takes_no_part(channels: int) -> None:
    """And where all have it, all share alike and nothing moves: the caller gives them nothing to share."""
    shape = Shape(channels=channels)
    products, offsets = shape.softmax_inputs()
    products[:, :, :, 2] = 0
    products[:, 0] = 0
    offsets[:, :, :, 2] = 0
    offsets[1, 0] = 0
    offsets[0, :, :, 2] = offsets[0, 0] = torch.finfo(torch.float32).min
    weights, *grads = run(lambda *x: jet_slot_softmax(*x, shape.side()), [products, offsets])
    assert (weights[:, 1, :, 2] == 0).all()
    torch.testing.assert_close(weights[0, 0], torch.full_like(weights[0, 0], 1 / 7))
    assert all(x.isfinite().all() for x in (weights, *grads)) and (grads[0][:, 1, :, 2] == 0).all()


def test_swapping_the_sides_swaps_u_and_v() -> None:
    shape = Shape()
    products, offsets = shape.softmax_inputs()
    plain = jet_slot_softmax(products, offsets, shape.side())
    order = [0, 2, 1, 3, 4, 6, 5]  # of products: u and v of pixels; of weights below: what lies along u and v
    swapped = jet_slot_softmax(products[order], offsets, ~shape.side())
    torch.testing.assert_close(swapped[[0, 2, 1, 3, 5, 4, 6]], plain, rtol=1e-4, atol=1e-5)


def test_pixels_without_tangents_are_pixels_with_zero_tangents() -> None:
    shape = Shape(channels=1)
    (value, tangent), offsets = shape.softmax_inputs()
    zero = torch.zeros_like(value)
    full = torch.stack([value, zero, zero, zero, tangent, zero, zero])
    few = torch.stack([value, tangent])
    torch.testing.assert_close(
        jet_slot_softmax(few, offsets, shape.side()), jet_slot_softmax(full, offsets, shape.side())
    )


def test_every_element_of_every_result_is_written() -> None:
    """Deterministic mode fills fresh memory with NaN: an element that no kernel wrote would show."""
    for shape in (Shape(N=61), Shape(channels=1, images=1)):
        inputs, side = shape.whole_inputs(torch.float32), shape.side()
        plain = run(attend(shape, side), inputs)
        torch.use_deterministic_algorithms(True)
        try:
            poisoned = run(attend(shape, side), inputs)
        finally:
            torch.use_deterministic_algorithms(False)
        assert all(torch.equal(a, b) for a, b in zip(plain, poisoned, strict=True))


@pytest.mark.skipif(serving("cpu") == "torch", reason="plain torch rounds the ends of a thread's share differently")
def test_results_do_not_depend_on_the_number_of_threads() -> None:
    shape, threads = Shape(N=300 if interpreting() else 3000), torch.get_num_threads()
    inputs, results = shape.softmax_inputs(), []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        results.append(OPS.jet_slot_softmax(*inputs, shape.side()))
    torch.set_num_threads(threads)
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("shape", [Shape(Q=43), Shape(channels=1), Shape(channels=1, images=1)], ids=str)
@pytest.mark.parametrize("first", [0, 1])
def test_products_are_those_of_plain_torch(shape: Shape, first: int) -> None:
    if shape.channels == 1 and first:
        pytest.skip("one channel has no other to begin with")
    pixels, keys, _, _ = shape.whole_inputs(torch.float32)
    weights = OPS.jet_slot_products(pixels, keys, first)
    images = pixels.shape[1]
    for found, expected in (
        (weights, products_reference(pixels, keys, first)),
        (OPS.jet_slot_mix(weights, keys, first, images), mix_reference(weights, keys, first, images)),
        (OPS.jet_slot_sums(weights, pixels, first), sums_reference(weights, pixels, first)),
    ):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("shape", [*SMALL, SHARED], ids=str)
def test_opcheck_finds_nothing(shape: Shape) -> None:
    pixels, keys, offsets, _ = (x.requires_grad_() for x in shape.whole_inputs(torch.float32))
    side, images = shape.side(), pixels.shape[1]
    products = OPS.jet_slot_products(pixels, keys, 0).detach().requires_grad_()
    for op, arguments in (
        (OPS.jet_slot_products, (pixels, keys, 0)),
        (OPS.jet_slot_mix, (products, keys, 0, images)),
        (OPS.jet_slot_sums, (products, pixels, 0)),
        (OPS.jet_slot_softmax, (products.unflatten(2, (shape.H, shape.S)), offsets, side)),
    ):
        torch.library.opcheck(op.default, arguments)


def test_compiles_as_one_graph() -> None:
    torch.compiler.reset()
    shape = Shape()
    inputs, call = shape.whole_inputs(torch.float32), attend(shape, shape.side())
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    torch.testing.assert_close(run(compiled, inputs), run(call, inputs))


def test_forward_mode_is_refused_rather_than_silently_dropped() -> None:
    shape = SMALL[0]
    products, offsets = shape.softmax_inputs()
    pixels, keys, _, _ = shape.whole_inputs(torch.float32)
    for call, x in (
        (lambda x: jet_slot_softmax(x, offsets, shape.side()), products),
        (lambda x: jet_slot_products(x, keys), pixels),
        (lambda x: jet_slot_mix(x, keys), products.flatten(2, 3)),
    ):
        with pytest.raises((RuntimeError, NotImplementedError)):
            torch.func.jvp(call, (x,), (torch.ones_like(x),))


@pytest.mark.skipif(serving("cpu") != "cpp", reason="plain torch spreads single rows over all images, within bounds")
def test_the_raw_op_reads_nothing_beyond_its_rows() -> None:
    shape = Shape()
    products, offsets = shape.softmax_inputs()
    with pytest.raises((RuntimeError, ValueError, IndexError)):
        OPS.jet_slot_softmax(products, offsets[:, :1], shape.side()[:1])
    with pytest.raises((RuntimeError, ValueError, IndexError)):
        OPS.jet_slot_softmax_backward(products, products[:3], shape.side(), 7)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            lambda p, c, s: jet_slot_softmax(p[:4], c, s),
            r"products has shape \[4, 2, 2, 7, 37\]; expected \[2 or 7, B, H, S, N\]",
        ),
        (lambda p, c, s: jet_slot_softmax(p[:, 0], c, s), r"products has shape \[7, 2, 7, 37\]; expected \[2 or 7"),
        (lambda p, c, s: jet_slot_softmax(p, c[:1], s), r"offsets is torch.float32 \[1, 2, 2, 7\] on cpu; expected"),
        (lambda p, c, s: jet_slot_softmax(p, c, s.float()), r"side is torch.float32 \[2, 7\] on cpu; expected torch.b"),
        (
            lambda p, c, s: jet_slot_products(p.flatten(2, 3), p.flatten(2, 3)),
            r"pixels has shape \[7, 2, 14, 37\] and slots \[7, 2, 14, 37\]; expected \[4, B, N, Q\]",
        ),
        (lambda p, c, s: jet_slot_mix(p[0], p[0]), r"weights has shape \[2, 2, 7, 37\] and slots .* \[7, B, M, N\]"),
    ],
)
def test_refusals_say_what_was_given_and_what_was_expected(call: Callable[..., Tensor], sentence: str) -> None:
    shape = Shape()
    with pytest.raises((TypeError, ValueError), match=sentence):
        call(*shape.softmax_inputs(), shape.side())
