"""Flow matching: exact velocities lead to the right distribution."""

import pytest
import torch
from torch import Tensor

from compgen_fast.generate.flow import Method, TimeEmbedding, integrate, interpolated

MEAN, DEVIATION = 1.5, 0.4


def exact(x: Tensor, t: float) -> Tensor:
    """E[data − noise | x_t] where data are N(MEAN, DEVIATION²)."""
    variance = (1 - t) ** 2 + (t * DEVIATION) ** 2
    return MEAN + (t * DEVIATION**2 - (1 - t)) / variance * (x - t * MEAN)


@pytest.mark.parametrize(("method", "steps", "near"), [("euler", 200, 0.01), ("heun", 25, 0.005)])
def test_the_exact_velocity_of_a_gaussian_leads_to_it(method: Method, steps: int, near: float) -> None:
    noise = torch.randn(20_000, dtype=torch.float64)
    noise = (noise - noise.mean()) / noise.std()
    found = integrate(exact, noise, steps, method)
    assert abs(found.mean() - MEAN) < near and abs(found.std() - DEVIATION) < near


def test_a_straight_flow_arrives_in_one_step() -> None:
    x, noise = torch.randn(5, 3), torch.randn(5, 3)
    torch.testing.assert_close(integrate(lambda _, t: x - noise, noise, 1, "euler"), x)


def test_lines_run_from_noise_to_data() -> None:
    x, noise = torch.randn(5), torch.randn(5)
    assert torch.equal(interpolated(x, noise, torch.zeros(1)), noise)
    torch.testing.assert_close(interpolated(x, noise, torch.ones(1)), x)
    torch.testing.assert_close(interpolated(x, noise, torch.tensor(0.25)), 0.75 * noise + 0.25 * x)


def test_no_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="steps is 0; expected at least 1"):
        integrate(exact, torch.zeros(1), 0)


def test_times_are_told_apart() -> None:
    told = TimeEmbedding(8)(torch.linspace(0, 1, 50))
    assert told.shape == (50, 8) and torch.pdist(told).min() > 1e-3
