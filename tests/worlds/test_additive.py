"""Additive: where the theory says zero, the penalties say exactly zero; one order too low, and they do not."""

import numpy as np
import pytest
import torch
from torch import Tensor

from compgen_fast.jets import interaction_penalty
from compgen_fast.worlds import Additive, Bumps

ZERO = {"contrast": 0, "hessian": 1, "pairs": 1, "triple": 2}  # the highest order that a method is zero for


def codes(world: Additive, count: int = 3) -> Tensor:
    return torch.rand(count, world.slot_count, 2) * 2 - 1


@pytest.mark.parametrize("slot_count", [2, 3])
@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize("method", ZERO)
def test_penalties_are_zero_exactly_up_to_their_order(method: str, order: int, slot_count: int) -> None:
    world = Additive(16, order=order, slot_count=slot_count)
    penalty = interaction_penalty(world.generator(), codes(world), method=method).item()  # type: ignore[call-overload]
    assert penalty == 0.0 if order <= ZERO[method] else penalty > 1e-6


def test_slots_of_order_0_touch_no_pixel_together() -> None:
    world = Additive(16, order=0, slot_count=3)
    z = codes(world)
    jacobian = torch.autograd.functional.jacobian(lambda z: world.generator()(z).sum(0), z)
    touched = (jacobian != 0).any(-1).sum(-1).amax(-1)
    assert touched.max() == 1


@pytest.mark.parametrize("order", [0, 1, 2])
def test_the_generator_draws_what_the_world_draws(order: int) -> None:
    world = Additive(24, seed=4, order=order, slot_count=3)
    values = world.split("pairs").values(np.arange(10))
    drawn = world.generator().double()(torch.from_numpy(world.codes(values)))
    np.testing.assert_allclose(drawn.numpy(), world.pixels(values), atol=1e-6)


@pytest.mark.parametrize("order", [0, 1, 2])
def test_nothing_is_clipped(order: int) -> None:
    for seed in range(5):
        world = Additive(16, seed, order=order, slot_count=4)
        pixels = world.pixels(world.split("pairs", "ood").values(np.arange(500)))
        assert pixels.min() >= 0 and pixels.max() <= 1 and pixels.std() > 0.02


def test_images_of_order_1_add_up_before_rounding() -> None:
    """f(a, b) + f(c, d) = f(a, d) + f(c, b): what lets a decoder extrapolate."""
    world = Additive(16, order=1)
    one, other = world.split("pairs").values(np.arange(20)), world.split("pairs").values(np.arange(20, 40))
    swapped = {name: (one if "_1_" in name else other)[name] for name in one}
    crossed = {name: (other if "_1_" in name else one)[name] for name in one}
    left, right = world.pixels(one) + world.pixels(other), world.pixels(swapped) + world.pixels(crossed)
    np.testing.assert_allclose(left, right, atol=1e-12)


def test_a_mask_names_the_slot_that_adds_most() -> None:
    found = Additive(16, order=0).split("pairs").samples(np.arange(4))
    assert found.masks is not None
    assert (found.masks[:, :, :8] == 0).all() and (found.masks[:, :, 8:] == 1).all()


def test_stripes_multiplied_interact_and_added_do_not() -> None:
    """The two controls of the penalty that Bumps offers: slots are the codes of x and of y."""
    world = Bumps(16)
    values = world.split("square").values(np.arange(3))
    code = torch.from_numpy(world.encode(values, "bump")).view(3, 2, 16)
    assert interaction_penalty(lambda z: z[:, 0, None, :] * z[:, 1, :, None], code).item() > 1
    assert interaction_penalty(lambda z: z[:, 0, None, :] + z[:, 1, :, None], code).item() == 0.0
