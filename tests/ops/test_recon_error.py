"""recon_error on whichever backend serves the CPU: values, gradients of every order, shapes, dtypes, indices, refusals.

The oracle is a loop over candidates and pixels' indices, in fp64, that shares nothing with the reference.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from compgen_fast.ops import recon_error
from compgen_fast.ops.backends import serving
from compgen_fast.ops.recon_error import reference
from tests.ops.contract import error
from tests.ops.test_latent_adam import mutated

TRITON = serving("cpu") == "triton"
DTYPES = [torch.float32, torch.float16, torch.bfloat16] + ([] if TRITON else [torch.float64])
TARGETS = [torch.uint8, torch.float32, torch.float16, torch.bfloat16, torch.float64]
needs_fp64 = pytest.mark.skipif(TRITON, reason="Triton kernels take no fp64; gradcheck needs it")


@dataclass(frozen=True)
class Case:
    C: int = 5
    N: int = 37
    F: int = 3
    images: int | None = 3  # None: one for each candidate
    pixels: int | None = 50  # of an image; None: y has them all
    weighted: bool = True
    dtype: torch.dtype = torch.float32
    target: torch.dtype = torch.uint8

    def y(self) -> Tensor:
        return torch.rand(self.C, self.N, self.F, dtype=torch.float64).to(self.dtype)

    def rest(self) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """x, weights, images, pixels."""
        count, P = self.images or self.C, self.N if self.pixels is None else self.pixels
        bytes_or_not = 255 if self.target == torch.uint8 else 1
        x = (torch.rand(count, P, self.F, dtype=torch.float64) * bytes_or_not).to(self.target)
        weights = torch.rand(count, P).mul(2).round(decimals=1) if self.weighted else None
        images = None if self.images is None else torch.randint(count, (self.C,))
        pixels = None if self.pixels is None else torch.randint(P, (self.N,))
        return x, weights, images, pixels


def call(y: Tensor, x: Tensor, weights: Tensor | None, images: Tensor | None, pixels: Tensor | None) -> list[Tensor]:
    return list(recon_error(y, x, weights, images=images, pixels=pixels))


def oracle(y: Tensor, x: Tensor, weights: Tensor | None, images: Tensor | None, pixels: Tensor | None) -> list[Tensor]:
    scale = 255 if x.dtype == torch.uint8 else 1
    losses, leaf = [], y.double().requires_grad_()
    for c in range(len(y)):
        image = c if images is None else int(images[c])
        chosen = list(range(y.shape[1])) if pixels is None else pixels.tolist()
        w = torch.ones(len(chosen)) if weights is None else weights[image, chosen]
        losses.append(((leaf[c] - x[image, chosen].double() / scale) ** 2 * w[:, None].double()).sum())
    loss = torch.stack(losses)
    return [loss.detach(), torch.autograd.grad(loss.sum(), leaf)[0]]


def assert_exact(case: Case, y: Tensor | None = None) -> None:
    """The difference of two rounded numbers is rounded once more, and so is the result in its dtype."""
    y, rest = case.y() if y is None else y, case.rest()
    (loss, grad), (true_loss, true_grad) = call(y, *rest), oracle(y, *rest)
    exact = torch.float64 if case.dtype == torch.float64 else torch.float32
    assert loss.dtype == exact and grad.dtype == case.dtype and grad.shape == y.shape and grad.is_contiguous()
    assert error(loss, true_loss) <= 16 * torch.finfo(exact).eps
    assert error(grad, true_grad) <= 2 * torch.finfo(case.dtype).eps


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_pair_of_dtypes_is_as_exact_as_its_rounding(dtype: torch.dtype, target: torch.dtype) -> None:
    assert_exact(Case(dtype=dtype, target=target))


@given(
    case=st.builds(
        Case,
        C=st.integers(1, 6),
        N=st.integers(1, 300),
        F=st.integers(1, 16),
        images=st.sampled_from([None, 1, 4]),
        pixels=st.sampled_from([None, 1, 70]),
        weighted=st.booleans(),
        target=st.sampled_from([torch.uint8, torch.float32]),
    )
)
def test_any_shape_follows_the_formula(case: Case) -> None:
    torch.manual_seed(0)
    assert_exact(case)


@pytest.mark.parametrize("weighted", [False, True])
def test_the_largest_images_sum_without_losing_digits(weighted: bool) -> None:
    assert_exact(Case(C=2, N=16384, images=None, pixels=None, weighted=weighted))


def test_bytes_that_are_met_exactly_cost_nothing() -> None:
    x = torch.arange(256, dtype=torch.uint8).view(1, 256, 1)
    loss, grad = recon_error(x.float() / 255, x)
    assert loss.item() == 0 and (grad == 0).all()


def test_half_precision_sums_beyond_its_range() -> None:
    case = Case(dtype=torch.float16, target=torch.float32, weighted=False)
    y, rest = torch.full((5, 37, 3), 200.0, dtype=torch.float16), case.rest()
    loss, _ = call(y, *rest)
    assert error(loss, oracle(y, *rest)[0]) < 1e-5 and (loss > torch.finfo(torch.float16).max).all()


@pytest.mark.parametrize(
    "arrange",
    [
        lambda y: torch.cat([y, y], 2)[:, :, : y.shape[2]],  # colours of a wider tensor
        lambda y: y.transpose(0, 1).contiguous().transpose(0, 1),  # pixels first
        lambda y: y.transpose(1, 2).contiguous().transpose(1, 2),  # colours first: copied
        lambda y: y[:1].expand(y.shape),
        lambda y: y[:, :1].expand(y.shape),
    ],
)
@pytest.mark.parametrize("F", [1, 3])
def test_any_strides_of_y_give_the_same(arrange: Callable[[Tensor], Tensor], F: int) -> None:
    case = Case(F=F)
    y = arrange(case.y())
    rest = case.rest()
    torch.testing.assert_close(call(y, *rest), call(y.contiguous(), *rest))
    assert_exact(case, y)


def test_strides_of_the_targets_do_not_matter() -> None:
    y, (x, weights, images, pixels) = Case().y(), Case().rest()
    assert weights is not None and images is not None and pixels is not None
    x_strided, weights_strided = x.transpose(0, 2).contiguous().transpose(0, 2), weights.t().contiguous().t()
    every_second = [index.repeat_interleave(2)[::2] for index in (images, pixels)]
    found = call(y, x_strided, weights_strided, *every_second)
    assert all(map(torch.equal, found, call(y, x, weights, images, pixels)))


@pytest.mark.parametrize(
    "case", [Case(C=0), Case(C=0, images=None, pixels=None), Case(N=0), Case(N=0, pixels=None)], ids=str
)
def test_nothing_costs_nothing(case: Case) -> None:
    y, rest = case.y().requires_grad_(), case.rest()
    loss, grad = call(y, *rest)
    assert torch.equal(loss, torch.zeros(case.C)) and grad.shape == y.shape
    (loss.sum() + grad.sum()).backward()
    assert y.grad is not None and y.grad.shape == y.shape


def test_a_pixel_without_weight_takes_no_part() -> None:
    y, (x, weights, images, pixels) = Case(images=None, pixels=None).y(), Case(images=None, pixels=None).rest()
    assert weights is not None
    weights[:, 5] = 0
    loss, grad = call(y, x, weights, images, pixels)
    y[:, 5] += 1
    loss_moved, grad_moved = call(y, x, weights, images, pixels)
    assert torch.equal(loss, loss_moved) and torch.equal(grad, grad_moved) and (grad[:, 5] == 0).all()


def test_candidates_do_not_see_each_other() -> None:
    """In any order, and beside any others, a candidate's results have the same bits."""
    y, (x, weights, images, pixels) = Case(C=9).y(), Case(C=9).rest()
    assert images is not None
    order = torch.randperm(9)
    loss, grad = call(y, x, weights, images, pixels)
    y_few, images_few = y[order[:4]], images[order[:4]]
    y_few[3] = float("nan")
    loss_few, grad_few = call(y_few, x, weights, images_few, pixels)
    assert torch.equal(loss_few[:3], loss[order[:3]]) and torch.equal(grad_few[:3], grad[order[:3]])
    assert loss_few[3].isnan()


def test_results_do_not_depend_on_the_number_of_threads_or_the_run() -> None:
    case, threads = Case(C=7, N=500, pixels=600), torch.get_num_threads()
    y, rest, results = case.y(), case.rest(), []
    for count in (1, 1, 2, 3):
        torch.set_num_threads(count)
        results.append(call(y, *rest))
    torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def test_every_element_of_every_result_is_written() -> None:
    """Deterministic mode fills fresh memory with NaN: an element that no kernel wrote would show."""
    y, rest = Case(N=61).y(), Case(N=61).rest()
    torch.use_deterministic_algorithms(True)
    try:
        assert all(x.isfinite().all() for x in call(y, *rest))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_both_results_carry_gradient_to_y(dtype: torch.dtype, weighted: bool) -> None:
    """dy = g grad + 2 w h, against autograd through the plain formula."""
    case = Case(dtype=dtype, weighted=weighted)
    y, (x, weights, images, pixels) = case.y().requires_grad_(), case.rest()
    g, h = torch.rand(case.C), torch.rand(y.shape)
    loss, grad = call(y, x, weights, images, pixels)
    (found,) = torch.autograd.grad([loss, grad], y, [g.to(loss.dtype), h.to(dtype)])
    assert images is not None and pixels is not None
    w = torch.ones(()) if weights is None else weights[images][:, pixels].unsqueeze(-1)
    expected = g[:, None, None] * grad.detach().double() + 2 * w * h.to(dtype)
    assert found.dtype == dtype and error(found, expected) <= 2 * torch.finfo(dtype).eps


@needs_fp64
@pytest.mark.parametrize("weighted", [False, True])
def test_first_and_second_derivatives_pass_gradcheck(weighted: bool) -> None:
    case = Case(C=3, N=4, F=2, images=2, pixels=6, weighted=weighted, dtype=torch.float64)
    y, rest = case.y().requires_grad_(), case.rest()
    assert torch.autograd.gradcheck(lambda y: tuple(call(y, *rest)), y)
    assert torch.autograd.gradgradcheck(lambda y: tuple(call(y * y, *rest)), y)  # squared: the op itself ends there


def test_one_result_alone_carries_gradient() -> None:
    y, (x, weights, images, pixels) = Case().y().requires_grad_(), Case().rest()
    loss, grad = call(y, x, weights, images, pixels)
    torch.testing.assert_close(torch.autograd.grad(loss.sum(), y, retain_graph=True)[0], grad.detach())
    assert weights is not None and images is not None and pixels is not None
    twice_w = 2 * weights[images][:, pixels].unsqueeze(-1).expand_as(y)
    torch.testing.assert_close(torch.autograd.grad(grad.sum(), y)[0], twice_w)


def test_opcheck_finds_nothing() -> None:
    for case in (Case(), Case(images=None, pixels=None, weighted=False)):
        y, rest = case.y().requires_grad_(), case.rest()
        torch.library.opcheck(torch.ops.compgen.recon_error.default, (y, *rest))


def test_compiles_as_one_graph() -> None:
    torch.compiler.reset()
    y, rest = Case().y(), Case().rest()

    def total(y: Tensor) -> tuple[Tensor, Tensor]:
        loss, grad = call(y, *rest)
        return loss.sum() + (grad * grad).sum(), grad

    compiled = torch.compile(total, fullgraph=True, dynamic=True, backend="aot_eager")
    results = []
    for function in (total, compiled):
        leaf = y.clone().requires_grad_()
        value, grad = function(leaf)
        results.append((value.detach(), grad.detach(), torch.autograd.grad(value, leaf)[0]))
    torch.testing.assert_close(results[0], results[1])


@pytest.mark.parametrize("index", [-1, 3])
def test_an_index_beyond_the_images_reads_nothing(index: int) -> None:
    y, (x, weights, images, pixels) = Case().y(), Case().rest()
    assert images is not None
    images[2] = index
    if not TRITON:
        with pytest.raises((IndexError, RuntimeError)):
            call(y, x, weights, images, pixels)
        return
    loss, grad = call(y, x, weights, images, pixels)
    assert loss.isnan().tolist() == [False, False, True, False, False] and grad[2].isnan().all()


@pytest.mark.parametrize("index", [-1, 50])
def test_an_index_beyond_the_pixels_reads_nothing(index: int) -> None:
    y, (x, weights, images, pixels) = Case().y(), Case().rest()
    assert pixels is not None
    pixels[7] = index
    if not TRITON:
        with pytest.raises((IndexError, RuntimeError)):
            call(y, x, weights, images, pixels)
        return
    loss, grad = call(y, x, weights, images, pixels)
    assert loss.isnan().all() and grad.isnan().any(2).any(0).nonzero().flatten().tolist() == [7]


def assert_the_oracle(function: Callable[..., tuple[Tensor, Tensor]]) -> None:
    case = Case(dtype=torch.float64)
    y, rest = case.y(), case.rest()
    torch.testing.assert_close(list(function(y, *rest)), oracle(y, *rest))


def test_the_reference_is_the_oracle_in_fp64() -> None:
    assert_the_oracle(reference)


MUTANTS = {
    "bytes are not scaled": ("target / 255", "target"),
    "all weights one": ("_of_candidates(weights, images, pixels, dtype).unsqueeze(-1) * difference", "difference"),
    "weights of the first pixels": ("(weights, images, pixels, dtype)", "(weights, images, pixels * 0, dtype)"),
    "images mixed up": ("_of_candidates(x, images,", "_of_candidates(x, images.flip(0),"),
    "weights squared": ("(pull * difference)", "(pull * pull)"),
    "half the gradient": ("(2 * pull)", "(pull)"),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_not_the_oracle(mutant: str) -> None:
    with pytest.raises(AssertionError):
        assert_the_oracle(mutated(reference, *MUTANTS[mutant]))


def test_forward_mode_is_refused_rather_than_silently_dropped() -> None:
    y, rest = Case().y(), Case().rest()
    with pytest.raises(NotImplementedError, match="recon_error: y carries a forward-mode tangent"):
        torch.func.jvp(lambda y: tuple(call(y, *rest)), (y,), (y,))


@pytest.mark.skipif(serving("cpu") != "cpp", reason="torch broadcasts or refuses by itself, within bounds")
def test_the_raw_op_reads_nothing_beyond_its_rows() -> None:
    y, (x, weights, images, pixels) = Case().y(), Case().rest()
    assert weights is not None and images is not None and pixels is not None
    for arguments in (
        (y, x[:, :, :2], weights, images, pixels),
        (y, x, weights[:, :9], images, pixels),
        (y, x, weights, None, pixels),
        (y, x, weights, images, None),
        (y, x, weights, images[:2], pixels),
        (y, x, weights, images, pixels.int()),
    ):
        with pytest.raises(RuntimeError, match="recon_error"):
            torch.ops.compgen.recon_error(*arguments)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (lambda y, x: (y[0], x), r"y is torch.float32 \[4, 3\]; expected floating \[C, N, F\] with F from 1 to 16"),
        (lambda y, x: (y.repeat(1, 1, 6), x), r"y is torch.float32 \[2, 4, 18\]; expected floating"),
        (lambda y, x: (y.long(), x), r"y is torch.int64 \[2, 4, 3\]"),
        (lambda y, x: (y, x[..., :2]), r"x is torch.uint8 \[2, 4, 2\]; .* with F = 3 as y has"),
        (lambda y, x: (y, x.int()), r"x is torch.int32"),
        (lambda y, x: (y, x[:1]), r"x has 1 images and y 2 candidates; pass images, int64 \[C\] = \[2\]"),
        (lambda y, x: (y[:, :3], x), r"x has 4 pixels and y 3; pass pixels, int64 \[N\] = \[3\]"),
        (
            lambda y, x: (y, x, torch.ones(2, 3)),
            r"weights is torch.float32 \[2, 3\]; expected floating \[I, P\] = \[2, 4",
        ),
        (
            lambda y, x: (y, x, torch.ones(2, 4, requires_grad=True)),
            r"weights requires grad, .* pass weights.detach\(\)",
        ),
        (lambda y, x: (y, y.clone().requires_grad_()), r"x requires grad, but only y gets a gradient here"),
        (lambda y, x: (y, x.to("meta")), r"x is on meta but y is on cpu; move one of them"),
    ],
)
def test_refusals_say_what_was_given_and_what_was_expected(
    arguments: Callable[..., tuple[Tensor, ...]], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        recon_error(*arguments(torch.rand(2, 4, 3), torch.zeros(2, 4, 3, dtype=torch.uint8)))


@pytest.mark.parametrize(
    ("indices", "sentence"),
    [
        (
            {"images": torch.zeros(3, dtype=torch.int64)},
            r"images is torch.int64 \[3\]; expected torch.int64 \[C\] = \[2\]",
        ),
        ({"pixels": torch.zeros(4)}, r"pixels is torch.float32 \[4\]; expected torch.int64 \[N\] = \[4\]"),
    ],
)
def test_refusals_of_indices_say_what_was_expected(indices: dict[str, Tensor], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        recon_error(torch.rand(2, 4, 3), torch.zeros(2, 4, 3, dtype=torch.uint8), **indices)


@pytest.mark.skipif(not TRITON, reason="the other backends take fp64")
def test_triton_refuses_fp64() -> None:
    with pytest.raises(ValueError, match=r"y is torch.float64, which is for CPU tensors"):
        recon_error(torch.rand(2, 4, 3).double(), torch.rand(2, 4, 3))
