"""The Fréchet distance against closed forms, and on images of a fixed network."""

import numpy as np
import pytest
import scipy.linalg
import torch

from compgen_fast.measure.frechet import FEATURES, frechet_distance, gaussian_frechet, random_net, random_net_frechet
from compgen_fast.worlds import Shapes2D


def random_gaussian(seed: int, size: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn(size, rank, generator=generator, dtype=torch.float64)
    return torch.randn(size, generator=generator, dtype=torch.float64), root @ root.T / rank


def images(part: str = "train", first: int = 0, count: int = 200) -> torch.Tensor:
    return torch.from_numpy(Shapes2D(16).split("composition", part).samples(np.arange(first, first + count)).images)


def test_gaussians_that_share_axes_have_a_closed_form() -> None:
    mean, variances = torch.tensor([1.0, 2.0, 0.0]).double(), torch.tensor([4.0, 9.0, 0.0]).double()
    other_mean, other = torch.tensor([0.0, 2.0, 2.0]).double(), torch.tensor([1.0, 16.0, 25.0]).double()
    turn = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))[0]
    found = gaussian_frechet(turn @ mean, turn * variances @ turn.T, turn @ other_mean, turn * other @ turn.T)
    assert found == pytest.approx(5 + (2 - 1) ** 2 + (3 - 4) ** 2 + (0 - 5) ** 2)


@pytest.mark.parametrize("rank", [3, 6, 20])
def test_any_gaussians_are_as_far_as_the_matrix_root_says(rank: int) -> None:
    (mean, covariance), (other_mean, other) = random_gaussian(0, 6, 20), random_gaussian(1, 6, rank)
    root = scipy.linalg.sqrtm((covariance @ other).numpy()).real
    expected = (mean - other_mean).square().sum() + covariance.trace() + other.trace() - 2 * np.trace(root)
    assert gaussian_frechet(mean, covariance, other_mean, other) == pytest.approx(expected.item(), rel=1e-5)
    assert gaussian_frechet(other_mean, other, mean, covariance) == pytest.approx(expected.item(), rel=1e-5)


def test_samples_are_judged_by_their_own_mean_and_covariance() -> None:
    features = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
    assert frechet_distance(features, features) == pytest.approx(0, abs=1e-10)
    assert frechet_distance(features, features + 3) == pytest.approx(4 * 9, rel=1e-5)
    spread = features.double().var(0).sum().item()
    assert frechet_distance(features, 3 * (features - features.mean(0)) + features.mean(0)) == pytest.approx(4 * spread)


def test_unlike_images_are_further_apart_than_like_ones() -> None:
    like = random_net_frechet(images(), images(first=200))
    assert 0 <= like < 0.2 * random_net_frechet(images(), images("level2"))
    noisy = (images().float() + 60 * torch.randn(images().shape)).clamp(0, 255).to(torch.uint8)
    assert random_net_frechet(images(), noisy) > 2 * like


def test_the_network_is_fixed_for_good() -> None:
    """Weights are a formula: these numbers may only change with it, and then all distances change too."""
    found = random_net(images(count=3))
    assert found.shape == (3, FEATURES)
    torch.manual_seed(7)
    assert torch.equal(random_net(images(count=3)), found)
    ramp = torch.arange(16 * 16 * 3).remainder(256).to(torch.uint8).view(1, 16, 16, 3)
    assert random_net(ramp).mean().item() == pytest.approx(0.25174978, rel=1e-4)


def test_wrong_shapes_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"features have shapes \[1, 4\] and \[5, 4\]; expected \[n, f\] and \[m, f\]"):
        frechet_distance(torch.zeros(1, 4), torch.zeros(5, 4))
    with pytest.raises(ValueError, match=r"\[16, 16, 3\] and \[32, 32, 3\]; expected one size"):
        random_net_frechet(images(count=2), torch.zeros(2, 32, 32, 3, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"images are torch.float32 .*; expected torch.uint8"):
        random_net(torch.zeros(2, 16, 16, 3))
