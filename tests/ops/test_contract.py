"""The contract of the slot ops (DESIGN.md), checked on whichever backend serves the CPU in this process."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from compgen_fast.ops.backends import interpreting, requested, serving
from tests.ops.contract import OPS, Op, Shape, assert_as_exact_as_eager, error, run

DTYPES = [torch.float32, torch.float16, torch.bfloat16] + ([] if serving("cpu") == "triton" else [torch.float64])
SHAPES = st.builds(
    Shape,
    B=st.integers(3, 4),  # errors are relative to the largest value: there must be a few of them
    N=st.integers(2, 130),  # none and one: test_edges_of_the_shape_range
    H=st.integers(1, 4),
    S=st.integers(1, 64),
    D=st.sampled_from([1, 7, 32, 43, 64, 128]),
)
every_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
needs_fp64 = pytest.mark.skipif(serving("cpu") == "triton", reason="Triton kernels take no fp64; gradcheck needs it")


def some_mask(B: int, S: int) -> Tensor:
    """A random mask whose first image keeps one slot only and whose other images keep at least one."""
    mask = torch.rand(B, S) > 0.4
    mask[:, torch.randint(S, ())] = True
    mask[:1] = torch.arange(S) == S // 2
    return mask


def test_the_backend_that_was_asked_for_is_the_one_tested() -> None:
    assert requested() is None or serving("cpu") == requested()
    assert (serving("cpu") == "triton") == interpreting()


@every_op
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_outputs_and_gradients_are_as_exact_as_eager(op: Op, dtype: torch.dtype, masked: bool) -> None:
    mask = some_mask(2, 7) if masked else None
    assert_as_exact_as_eager(op, op.inputs(Shape(), dtype), mask)


@every_op
@given(shape=SHAPES, masked=st.booleans())
def test_any_shape_is_as_exact_as_eager(op: Op, shape: Shape, masked: bool) -> None:
    torch.manual_seed(0)
    mask = some_mask(shape.B, shape.S) if masked else None
    assert_as_exact_as_eager(op, op.inputs(shape), mask)


@every_op
@pytest.mark.parametrize(
    "shape", [Shape(B=0), Shape(N=0), Shape(N=1), Shape(S=1), Shape(S=64, D=128), Shape(D=1)], ids=str
)
def test_edges_of_the_shape_range(op: Op, shape: Shape) -> None:
    assert_as_exact_as_eager(op, op.inputs(shape)) if shape.B and shape.N else _assert_empty(op, shape)


def _assert_empty(op: Op, shape: Shape) -> None:
    """Without pixels nothing was seen: slot-shaped results are zero, pixel-shaped ones empty."""
    for result in run(op.call, op.inputs(shape), None, 0.3):
        assert result.numel() == 0 or (result == 0).all()


@every_op
def test_many_pixels_are_summed_exactly(op: Op) -> None:
    """Several tiles, several tasks, and a ragged end."""
    assert_as_exact_as_eager(op, op.inputs(Shape(B=1, N=500 if interpreting() else 2000, H=1, D=32)))


@every_op
def test_strided_and_expanded_inputs_need_no_copy_by_the_caller(op: Op) -> None:
    inputs = op.inputs(Shape(B=1))
    wide = [torch.cat([x, x.flip(-1)], -1)[..., ::2] for x in inputs]
    swapped = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    expanded = [x.expand(3, -1, -1, -1) for x in inputs]
    for strided in (wide, swapped, expanded):
        assert not all(x.is_contiguous() for x in strided)
        assert_as_exact_as_eager(op, strided)


@every_op
def test_slot_weights_sum_to_one_over_the_live_slots(op: Op) -> None:
    mask = some_mask(2, 7)
    for slot_mask in (None, mask):
        _, weights = op.call(*op.inputs(Shape()), slot_mask)
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 37))


@every_op
def test_permuting_slots_permutes_what_belongs_to_them(op: Op) -> None:
    inputs, order = op.inputs(Shape()), torch.randperm(7)
    permuted = [x if i in op.pixels else x[:, order] for i, x in enumerate(inputs)]
    values, weights = op.call(*inputs)
    permuted_values, permuted_weights = op.call(*permuted)
    torch.testing.assert_close(permuted_weights, weights[..., order])
    torch.testing.assert_close(permuted_values, values if op.pixels == (0,) else values[:, order])


@every_op
def test_a_masked_slot_receives_no_weight_and_no_gradient_whatever_it_holds(op: Op) -> None:
    inputs, mask = op.inputs(Shape()), some_mask(2, 7)
    for slots in op.slots(inputs):
        slots[~mask] = float("nan")
    values, weights, *grads = run(op.call, inputs, mask, 0.3)
    assert (weights.transpose(1, 2)[~mask] == 0).all()
    for grad in op.slots(grads):
        assert (grad[~mask] == 0).all()
    assert all(x.isfinite().all() for x in (values, weights, *grads))


@every_op
def test_masking_a_slot_is_the_same_as_leaving_it_out(op: Op) -> None:
    inputs, mask = op.inputs(Shape()), torch.tensor([[True] * 5 + [False] * 2] * 2)
    _, weights = op.call(*inputs, mask)
    _, fewer = op.call(*[x if i in op.pixels else x[:, :5] for i, x in enumerate(inputs)])
    torch.testing.assert_close(weights[..., :5], fewer)


@every_op
def test_an_image_without_any_live_slot_gets_zeros(op: Op) -> None:
    mask = torch.tensor([[False] * 7, [True] * 7])
    values, weights, *grads = run(op.call, op.inputs(Shape()), mask, 0.3)
    assert (values[0] == 0).all() and (weights[0] == 0).all()
    assert all((grad[0] == 0).all() and grad.isfinite().all() for grad in grads)


@every_op
def test_extreme_logits_neither_overflow_nor_lose_mass(op: Op) -> None:
    inputs = [x * 100 for x in op.inputs(Shape())]
    values, weights, *grads = run(op.call, inputs, None, 1.0)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 37))
    assert all(x.isfinite().all() for x in (values, *grads))


@every_op
def test_every_element_of_every_result_is_written(op: Op) -> None:
    """Deterministic mode fills fresh memory with NaN: an element that no kernel wrote would show."""
    inputs, mask = op.inputs(Shape(N=61)), some_mask(2, 7)
    plain = run(op.call, inputs, mask, 0.3)
    torch.use_deterministic_algorithms(True)
    try:
        poisoned = run(op.call, inputs, mask, 0.3)
    finally:
        torch.use_deterministic_algorithms(False)
    for a, b in zip(plain, poisoned, strict=True):
        assert torch.equal(a, b)


@every_op
def test_results_do_not_depend_on_the_number_of_threads(op: Op) -> None:
    if serving("cpu") == "torch":
        pytest.skip("plain torch sums in an order of its own")
    inputs, threads = op.inputs(Shape(N=300 if interpreting() else 3000)), torch.get_num_threads()
    results = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        results.append(run(op.call, inputs, None, 0.3))
    torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


@every_op
@needs_fp64
@pytest.mark.parametrize("masked", [False, True])
def test_first_and_second_derivatives_pass_gradcheck(op: Op, masked: bool) -> None:
    inputs = [x.requires_grad_() for x in op.inputs(Shape(B=2, N=5, H=2, S=3, D=2), torch.float64)]
    mask = some_mask(2, 3) if masked else None
    assert torch.autograd.gradcheck(lambda *x: op.call(*x, mask), inputs)
    assert torch.autograd.gradgradcheck(lambda *x: op.call(*x, mask), inputs)


@every_op
@needs_fp64
@pytest.mark.parametrize("used", [0, 1])
def test_derivatives_through_one_output_alone_pass_gradcheck(op: Op, used: int) -> None:
    inputs = [x.requires_grad_() for x in op.inputs(Shape(B=1, N=5, H=2, S=3, D=2), torch.float64)]
    assert torch.autograd.gradcheck(lambda *x: op.call(*x)[used], inputs)
    assert torch.autograd.gradgradcheck(lambda *x: op.call(*x)[used], inputs)


@every_op
def test_second_derivatives_are_right_in_the_precision_of_training(op: Op) -> None:
    def norm_of_gradient(function, inputs):  # type: ignore[no-untyped-def]
        leaves = [x.detach().requires_grad_() for x in inputs]
        values, weights = function(*leaves)
        grads = torch.autograd.grad(values.square().sum() + weights.square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in grads), leaves)

    inputs = op.inputs(Shape(N=11, D=8))
    exact = norm_of_gradient(op.oracle, [x.double() for x in inputs])
    for found, true in zip(norm_of_gradient(op.call, inputs), exact, strict=True):
        assert error(found, true) < 1e-5


@every_op
def test_forward_mode_is_refused_rather_than_silently_dropped(op: Op) -> None:
    inputs = op.inputs(Shape(N=3))
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.func.jvp(op.call, tuple(inputs), tuple(torch.ones_like(x) for x in inputs))


@every_op
def test_opcheck_finds_nothing(op: Op) -> None:
    mask = some_mask(2, 7)
    dense = [x.requires_grad_() for x in op.inputs(Shape(N=9, D=8))]
    permuted = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in dense]
    for inputs, slot_mask in ((dense, None), (dense, mask), (permuted, mask)):
        torch.library.opcheck(op.raw, (*inputs, slot_mask, 0.3, *op.arguments))


@every_op
@pytest.mark.parametrize("compiler", ["inductor", "aot_eager"])
def test_compiles_as_one_graph_for_any_number_of_pixels(op: Op, compiler: str) -> None:
    if compiler == "inductor" and serving("cpu") != "cpp":
        pytest.skip("one backend is enough: inductor sees the same op on each")
    torch.compiler.reset()
    counter = CompileCounterWithBackend(compiler)
    compiled = torch.compile(op.call, fullgraph=True, dynamic=True, backend=counter)
    compilations = []
    for N in (12, 29, 64):
        inputs = op.inputs(Shape(N=N, D=8))
        for a, b in zip(run(compiled, inputs, None, None), run(op.call, inputs, None, None), strict=True):
            torch.testing.assert_close(a, b)
        compilations.append(counter.frame_count)
    assert len(set(compilations)) == 1
