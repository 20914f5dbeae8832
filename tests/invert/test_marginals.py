"""Marginals of slots, on latents whose distribution is known."""

import pytest
import torch
from torch import Tensor

from compgen_fast.invert import SlotMarginals


def correlated(n: int = 4000) -> Tensor:
    """Slots [n, 2, 3]: the first around 5 with correlated numbers, the second around −2 and twice as wide."""
    z = torch.randn(n, 2, 3, generator=torch.Generator().manual_seed(0))
    mixed = z[:, 0] @ torch.tensor([[1.0, 0.9, 0.0], [0.0, 0.5, 0.0], [0.0, 0.0, 0.1]])
    return torch.stack([mixed + 5, 2 * z[:, 1] - 2], 1)


def distance(marginals: SlotMarginals, z: Tensor) -> Tensor:
    """Mahalanobis distances [C, K], from the covariance of the fitted latents itself."""
    slots = []
    for slot in range(z.shape[1]):
        fitted = marginals.latents.flatten(0, 1) if marginals.exchangeable else marginals.latents[:, slot]
        away = z[:, slot].double() - fitted.double().mean(0)
        slots.append((away @ torch.linalg.inv(fitted.double().T.cov()) * away).sum(1).sqrt())
    return torch.stack(slots, 1)


@pytest.mark.parametrize("exchangeable", [False, True])
def test_the_pull_is_half_the_squared_mahalanobis_distance(exchangeable: bool) -> None:
    marginals = SlotMarginals.fit(correlated(), exchangeable=exchangeable)
    z = torch.randn(7, 2, 3)
    value, _ = marginals.pull(z, 0.4)
    expected = 0.2 * distance(marginals, z).square().sum(1)
    torch.testing.assert_close(value.double(), expected, rtol=0.05, atol=0)  # the covariance is shrunk a little


def test_the_gradient_of_the_pull_is_that_of_autograd() -> None:
    marginals = SlotMarginals.fit(correlated().double())
    z = torch.randn(7, 2, 3, dtype=torch.float64, requires_grad=True)
    value, gradient = marginals.pull(z, 0.4)
    (by_autograd,) = torch.autograd.grad(value.sum(), z)
    torch.testing.assert_close(gradient.detach(), by_autograd)


def test_the_precision_is_the_second_derivative_of_the_pull() -> None:
    marginals = SlotMarginals.fit(correlated().double())
    z = torch.randn(6, dtype=torch.float64)
    hessian = torch.autograd.functional.hessian(lambda z: marginals.pull(z.view(1, 2, 3), 1.0)[0].sum(), z)
    torch.testing.assert_close(marginals.precision, hessian)
    assert not marginals.precision[:3, 3:].any()  # slots do not pull at each other


def test_confined_slots_lie_within_the_radius_and_others_stay() -> None:
    marginals = SlotMarginals.fit(correlated())
    z = marginals.mean + 40 * torch.randn(50, 2, 3)
    z[:, 1] = marginals.mean[1] + 0.1
    confined = marginals.confine(z)
    white = torch.einsum("kij,ckj->cki", marginals.whitening, confined - marginals.mean).norm(dim=-1)
    assert (white <= marginals.radius * (1 + 1e-5)).all()
    torch.testing.assert_close(white[:, 0], marginals.radius[0].expand(50))
    assert torch.equal(confined[:, 1], z[:, 1])
    straight = torch.nn.functional.cosine_similarity(z - marginals.mean, confined - marginals.mean, dim=-1)
    torch.testing.assert_close(straight, torch.ones_like(straight))


def test_almost_all_that_was_fitted_lies_within_the_radius() -> None:
    z = correlated()
    marginals = SlotMarginals.fit(z)
    moved = (marginals.confine(z) != z).any(-1).double().mean(0)
    assert (moved <= 0.001).all() and moved.any()


def test_what_is_not_finite_stays_so() -> None:
    assert SlotMarginals.fit(correlated()).confine(torch.full((1, 2, 3), torch.nan)).isnan().all()


def test_slots_are_drawn_independently_of_each_other() -> None:
    """Fitted slots always come in pairs i, i; drawn ones hardly ever, and each keeps its role."""
    number = torch.arange(100.0)
    z = torch.stack([number, 1000 + number], 1)[:, :, None]
    drawn = SlotMarginals.fit(z).sample(3000, torch.Generator().manual_seed(0)).squeeze(2)
    first, second = drawn[:, 0], drawn[:, 1] - 1000
    assert set(first.tolist()) == set(second.tolist()) == set(number.tolist())
    assert (first == second).float().mean() < 0.03
    assert torch.corrcoef(torch.stack([first, second]))[0, 1].abs() < 0.1


def test_exchangeable_slots_are_drawn_from_all_places() -> None:
    z = torch.stack([torch.zeros(50), torch.ones(50)], 1)[:, :, None]
    drawn = SlotMarginals.fit(z, exchangeable=True).sample(2000, torch.Generator().manual_seed(0))
    assert torch.allclose(drawn.mean((0, 2)), torch.full((2,), 0.5), atol=0.05)
    assert SlotMarginals.fit(z).sample(9)[:, 0].eq(0).all()


def test_exchangeable_slots_share_one_marginal() -> None:
    marginals = SlotMarginals.fit(correlated(), exchangeable=True)
    assert torch.equal(marginals.mean[0], marginals.mean[1]) and torch.equal(marginals.radius[0], marginals.radius[1])
    torch.testing.assert_close(marginals.mean[0], correlated().mean((0, 1)))


def test_draws_repeat_with_their_generator() -> None:
    marginals = SlotMarginals.fit(correlated(20))
    once, again, other = (marginals.sample(8, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(once, again) and not torch.equal(once, other)


def test_fewer_latents_than_numbers_and_numbers_that_never_vary_are_fine() -> None:
    few = torch.randn(3, 2, 10)
    few[:, :, 4] = 7
    marginals = SlotMarginals.fit(few)
    value, gradient = marginals.pull(torch.randn(5, 2, 10), 1.0)
    assert value.isfinite().all() and gradient.isfinite().all()
    same = SlotMarginals.fit(torch.ones(4, 2, 3))
    torch.testing.assert_close(same.confine(torch.randn(5, 2, 3)), torch.ones(5, 2, 3))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_read_as_fp32(dtype: torch.dtype) -> None:
    z = correlated().to(dtype)
    marginals = SlotMarginals.fit(z)
    assert torch.equal(marginals.whitening, SlotMarginals.fit(z.float()).whitening)


def test_they_move_to_another_dtype_whole() -> None:
    moved = SlotMarginals.fit(correlated(30), exchangeable=True).to(torch.zeros(1, dtype=torch.float64))
    assert moved.exchangeable
    assert {each.dtype for each in (moved.latents, moved.mean, moved.whitening, moved.radius)} == {torch.float64}


def test_what_makes_no_sense_is_refused_in_a_sentence() -> None:
    for bad in (torch.zeros(5, 3), torch.zeros(1, 2, 3), torch.zeros(5, 2, 3).long()):
        with pytest.raises(ValueError, match=r"expected floating \[n, K, D\] with n at least 2"):
            SlotMarginals.fit(bad)
    with pytest.raises(ValueError, match="some latents are not finite"):
        SlotMarginals.fit(torch.full((5, 2, 3), torch.inf))
    for call in (
        SlotMarginals.fit(torch.randn(5, 2, 3)).confine,
        lambda z: SlotMarginals.fit(correlated(9)).pull(z, 1.0),
    ):
        with pytest.raises(ValueError, match=r"z has shape \[4, 1, 3\]; expected \[C, K, D\] with slots \[2, 3\]"):
            call(torch.zeros(4, 1, 3))
