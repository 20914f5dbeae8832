"""Which slot stands for which, against every assignment there is."""

from itertools import permutations

import pytest
import torch
from torch import Tensor

from compgen_fast.models.matching import match_latents, match_slots, take_slots


def least_cost(cost: Tensor) -> float:
    """Of one image [K, M], by trying everything."""
    slots, targets = cost.shape
    return min(sum(cost[k, m].item() for m, k in enumerate(order)) for order in permutations(range(slots), targets))


@pytest.mark.parametrize(("slots", "targets"), [(1, 1), (2, 2), (3, 3), (5, 5), (4, 2), (5, 3), (3, 1)])
def test_no_assignment_costs_less(slots: int, targets: int) -> None:
    cost = torch.randn(20, slots, targets)
    matched = match_slots(cost)
    assert matched.shape == (20, targets) and matched.dtype == torch.int64
    for of_image, chosen in zip(cost, matched, strict=True):
        assert len(set(chosen.tolist())) == targets
        assert of_image[chosen, torch.arange(targets)].sum().item() == pytest.approx(least_cost(of_image), abs=1e-5)


def test_the_best_total_may_need_a_second_choice() -> None:
    cost = torch.tensor([[[0.0, 1.0], [1.0, 9.0]]])  # both targets like slot 0; greedily, target 1 pays 9
    assert match_slots(cost).tolist() == [[1, 0]]


def test_no_images_make_no_matches() -> None:
    assert match_slots(torch.empty(0, 3, 2)).shape == (0, 2)


@pytest.mark.parametrize("cost", [torch.zeros(1, 2, 3), torch.zeros(2, 2), torch.full((1, 2, 2), torch.nan)])
def test_costs_that_cannot_be_matched_are_refused(cost: Tensor) -> None:
    with pytest.raises(ValueError, match="match_slots"):
        match_slots(cost)


def test_shuffled_latents_are_put_back_in_order() -> None:
    b = torch.randn(8, 5, 3)
    order = torch.rand(8, 5).argsort(1)
    a = take_slots(b, order) + 1e-3 * torch.randn(8, 5, 3)
    torch.testing.assert_close(take_slots(a, match_latents(a, b)), b, atol=1e-2, rtol=0)


def test_latents_are_matched_by_squared_distance() -> None:
    a, b = torch.randn(10, 4, 2), torch.randn(10, 4, 2)
    matched = match_latents(a, b)
    for one, other, chosen in zip(a, b, matched, strict=True):
        total = (one[chosen] - other).square().sum().item()
        assert total == pytest.approx(least_cost(torch.cdist(one, other).square()), rel=1e-4)


def test_gradients_pass_through_taken_slots() -> None:
    a, b = torch.randn(2, 3, 4, requires_grad=True), torch.randn(2, 3, 4)
    (take_slots(a, match_latents(a, b)) - b).square().sum().backward()
    assert a.grad is not None and (a.grad != 0).all()


def test_latents_of_different_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="match_latents"):
        match_latents(torch.zeros(1, 3, 2), torch.zeros(1, 2, 2))
