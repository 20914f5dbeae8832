"""How far two sets of images are from each other as wholes: the Fréchet distance of their features' Gaussians.

    d² = ‖μ₁ − μ₂‖² + tr(Σ₁ + Σ₂ − 2 (Σ₁ Σ₂)^½)

This is not FID. FID takes its features from an Inception network trained on ImageNet; here they are those of a small
network with random weights, which are written down by a formula and never trained. So values compare only with each
other, for images of one size and sets of one length: a finite sample is at a distance from another of the same kind.
"""

import math
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from compgen_fast.worlds.chance import Chance

WIDTHS = (3, 24, 48, 64)
CELLS = 2  # the last layer is averaged over cells of a 2×2 grid, the others over the image
FEATURES = WIDTHS[1] + WIDTHS[2] + CELLS**2 * WIDTHS[3]
AT_ONCE = 500


def random_net_frechet(images: Tensor, others: Tensor) -> float:
    """d² between two sets of images uint8 [n, H, W, 3] and [m, H, W, 3] on the features of `random_net`."""
    if images.shape[1:] != others.shape[1:]:
        raise ValueError(
            f"random_net_frechet: images are {list(images.shape[1:])} and {list(others.shape[1:])}; expected one size"
        )
    return frechet_distance(random_net(images), random_net(others))


def frechet_distance(features: Tensor, others: Tensor) -> float:
    """d² between the Gaussians of mean and covariance of features [n, f] and [m, f]; in fp64."""
    for given in (features, others):
        if given.dim() != 2 or len(given) < 2 or given.shape[1] != features.shape[1]:
            raise ValueError(
                f"frechet_distance: features have shapes {list(features.shape)} and {list(others.shape)}; expected "
                "[n, f] and [m, f], at least two of each"
            )
    one, two = features.double().cpu(), others.double().cpu()
    return gaussian_frechet(one.mean(0), one.T.cov(), two.mean(0), two.T.cov())


def gaussian_frechet(mean: Tensor, covariance: Tensor, other_mean: Tensor, other_covariance: Tensor) -> float:
    """d² between two Gaussians: means [f], covariances [f, f], all fp64.

    tr (Σ₁ Σ₂)^½ is the sum of the roots of the eigenvalues of Σ₁^½ Σ₂ Σ₁^½, which is symmetric, so nothing complex
    comes up where covariances have no full rank.
    """
    covariance, other_covariance = torch.atleast_2d(covariance), torch.atleast_2d(other_covariance)
    values, vectors = torch.linalg.eigh(covariance)
    root = vectors * values.clamp_min(0).sqrt() @ vectors.T
    shared = torch.linalg.eigvalsh(root @ other_covariance @ root).clamp_min(0).sqrt().sum()
    traces = covariance.trace() + other_covariance.trace()
    squared = (mean - other_mean).square().sum() + traces - 2 * shared
    return max(0.0, float(squared))


@torch.no_grad()
def random_net(images: Tensor) -> Tensor:
    """Features [n, FEATURES] of images uint8 [n, H, W, 3]: three convolutions of fixed random weights, averaged."""
    if images.dtype != torch.uint8 or images.dim() != 4 or images.shape[-1] != 3 or min(images.shape[1:3]) < 16:
        raise ValueError(
            f"random_net: images are {images.dtype} {list(images.shape)}; expected torch.uint8 [n, H, W, 3] of at "
            "least 16×16"
        )
    return torch.cat([_features(some) for some in images.split(AT_ONCE)])


def _features(images: Tensor) -> Tensor:
    x = images.movedim(-1, 1).float() / 127.5 - 1
    found = []
    for layer, (before, after) in enumerate(pairwise(WIDTHS)):
        x = F.relu(F.conv2d(x, _weight(layer, before, after).to(x.device), stride=2, padding=1))
        found.append(F.adaptive_avg_pool2d(x, CELLS if after == WIDTHS[-1] else 1).flatten(1))
    return torch.cat(found, 1)


def _weight(layer: int, before: int, after: int) -> Tensor:
    """[after, before, 4, 4], uniform with the variance that keeps signals as large as they are."""
    numbers = Chance(0).uniform(f"random_net/{layer}", np.arange(after * before * 16), -1.0, 1.0)
    return torch.from_numpy(numbers).view(after, before, 4, 4) * math.sqrt(6 / (before * 16))
