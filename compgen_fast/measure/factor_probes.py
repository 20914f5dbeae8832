"""Probes of generated images: a small network that was taught, on real images of all compositions, on which side each
factor of an image is; then, of a generated image, whether each factor is on the side that was asked for.

A factor has two sides, 0 and 1: the two values of a category, or the halves of a number's range. A composition is its
sides in order, such as ``"011"``. A probe that errs on real images says nothing of generated ones, so `fit_probes`
refuses to return one that is wrong too often on real images that it was not taught on. What it is not for: latents,
which `probes` reads linearly.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from compgen_fast.worlds.source import Factor, Source

Values = Mapping[str, Tensor | NDArray[np.int64] | NDArray[np.float32]]

BATCH = 64
RATE = 2e-3
BLUR, NOISE = 0.5, 12.0  # at most: the share of a 3×3 mean, and a deviation in steps of colour
HELD = 5  # every fifth image of a source judges what the others taught
SCORED_AT_ONCE = 500


@dataclass(frozen=True)
class Judgement:
    """Of n generated images: which factors are as asked for.

    factors: their names.
    wanted: bool [n, factors], the sides asked for.
    right: bool [n, factors].
    """

    factors: tuple[str, ...]
    wanted: Tensor
    right: Tensor

    @property
    def accuracy(self) -> float:
        """The share of images of which all factors are right."""
        return self.right.all(1).double().mean().item()

    def per_factor(self) -> dict[str, float]:
        """The share of images of which each factor is right."""
        return dict(zip(self.factors, self.right.double().mean(0).tolist(), strict=True))

    def per_composition(self) -> dict[str, float]:
        """`accuracy` of each composition that was asked for."""
        scores = {}
        for sides in product((False, True), repeat=len(self.factors)):
            asked = (self.wanted == torch.tensor(sides)).all(1)
            if asked.any():
                scores["".join(str(int(side)) for side in sides)] = self.right[asked].all(1).double().mean().item()
        return scores


class FactorProbes(nn.Module):
    """Images uint8 [n, H, W, 3] → for each factor, how much speaks for its high side [n, factors]. By `fit_probes`.

    Args:
        factors: the factors to judge, each with two sides.
        image_size: H and W, a multiple of 8.
        width: channels of the first convolution.
    """

    def __init__(self, factors: Sequence[Factor], image_size: int, width: int = 16) -> None:
        super().__init__()
        if image_size % 8:
            raise ValueError(f"FactorProbes: images are {image_size}×{image_size}; expected a multiple of 8")
        self.factors, self.image_size = tuple(_two_sided(factor) for factor in factors), image_size
        widths = (3, width, 2 * width, 4 * width)
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            layers += [nn.Conv2d(before, after, 4, stride=2, padding=1), nn.ReLU()]
        hidden = [nn.Flatten(), nn.Linear(4 * width * (image_size // 8) ** 2, 128), nn.ReLU()]
        self.layers = nn.Sequential(*layers, *hidden, nn.Linear(128, len(factors)))

    def forward(self, images: Tensor) -> Tensor:
        if images.dtype != torch.uint8 or images.shape[1:] != (self.image_size, self.image_size, 3):
            raise ValueError(
                f"FactorProbes: images are {images.dtype} {list(images.shape)}; expected torch.uint8 "
                f"[n, {self.image_size}, {self.image_size}, 3]"
            )
        scores: Tensor = self.layers(images.movedim(-1, 1).float() / 127.5 - 1)
        return scores

    def sides(self, values: Values) -> Tensor:
        """The sides of factor values, bool [n, factors]."""
        return torch.stack([side(factor, values) for factor in self.factors], 1)

    @torch.no_grad()
    def judge(self, images: Tensor, wanted: Values) -> Judgement:
        """Generated images uint8 [n, H, W, 3] against the factor values [n], by name, that were asked for."""
        asked = self.sides(wanted)
        if len(asked) != len(images):
            raise ValueError(f"FactorProbes: {len(images)} images and {len(asked)} values; expected one for each")
        found = torch.cat([self(some) > 0 for some in images.split(SCORED_AT_ONCE)]).cpu()
        return Judgement(tuple(factor.name for factor in self.factors), asked, found == asked)


def fit_probes(
    sources: Sequence[Source],
    factors: Sequence[str],
    *,
    images: int = 8_000,
    steps: int = 1_500,
    least: float = 0.99,
    seed: int = 0,
) -> FactorProbes:
    """Probes of these factors, taught on real images; a minute on a core for 32×32 Shapes2D.

    Args:
        sources: real images with their factors, which together have all compositions: a world's train, level1 and
            level2, say.
        factors: which factors to judge, by name; each has two sides.
        images: how many to use, the same number of each source's compositions; one in five only to judge the probes.
        steps: of training.
        least: the share of held-back images whose every factor must be told right.
        seed: of weights and batches.

    Raises a ValueError if the probes are not good enough to judge others.
    """
    shown, values = _real_images(sources, images)
    probes = FactorProbes(_named(sources[0], factors), shown.shape[1])
    held = torch.arange(len(shown)) % HELD == 0
    sides = probes.sides(values)
    _check_all_compositions(sides[~held], factors)
    _teach(probes, shown[~held], sides[~held].float(), steps, seed)
    found = probes.judge(shown[held], {name: column[held] for name, column in values.items()})
    worst = min(found.per_composition().items(), key=lambda item: item[1])
    if found.accuracy < least:
        raise ValueError(
            f"fit_probes: of {len(found.right)} real images {found.accuracy:.2%} are told right ("
            + ", ".join(f"{name} {share:.2%}" for name, share in found.per_factor().items())
            + f"; worst is composition {worst[0]}, {worst[1]:.2%}); expected {least:.2%}: give more images or steps"
        )
    return probes


def side(factor: Factor, values: Values) -> Tensor:
    """Whether each value [n] of a two-sided factor is on its high side, bool [n]."""
    if factor.name not in values:
        raise ValueError(f"there are no values of the factor {factor.name!r}; expected it among {', '.join(values)}")
    column = torch.as_tensor(values[factor.name]).cpu()
    return column >= (1 if factor.categorical else (factor.low + factor.high) / 2)


def _two_sided(factor: Factor) -> Factor:
    if factor.values is not None and len(factor.values) != 2:
        raise ValueError(
            f"FactorProbes: {factor.name} has {len(factor.values)} values; expected two, or a number (see "
            "adapters.compositions, which makes two of many)"
        )
    return factor


def _named(source: Source, names: Sequence[str]) -> list[Factor]:
    known = {factor.name: factor for factor in source.factors}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"fit_probes: {source.name} has no factor {unknown[0]!r}; it has {', '.join(known)}")
    return [known[name] for name in names]


def _real_images(sources: Sequence[Source], count: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Images uint8 [n, H, W, 3] and factors [n] of all sources, mixed; of each source equally many."""
    share = count // len(sources)
    samples = [source.samples(np.arange(min(share, len(source)))) for source in sources]
    order = np.random.default_rng(0).permutation(sum(len(some.images) for some in samples))
    images = np.concatenate([some.images for some in samples])[order]
    names = samples[0].factors
    factors = {name: np.concatenate([some.factors[name] for some in samples])[order] for name in names}
    return torch.from_numpy(images), {name: torch.from_numpy(column) for name, column in factors.items()}


def _check_all_compositions(sides: Tensor, factors: Sequence[str]) -> None:
    found, all_of_them = len(sides.unique(dim=0)), 2 ** sides.shape[1]
    if found < all_of_them:
        raise ValueError(
            f"fit_probes: the images show {found} of the {all_of_them} compositions of {', '.join(factors)}; expected "
            "all, since probes of some would guess the others: give sources of unseen compositions too"
        )


def _worn(images: Tensor, generator: torch.Generator) -> Tensor:
    """Images as a decoder may give them back: each a little blurred, and with a little noise, more or less.

    Probes that have seen only perfect edges take a triangle with soft ones for a disc.
    """
    share, amount = torch.rand(2, len(images), 1, 1, 1, generator=generator) * torch.tensor([BLUR, NOISE]).view(
        2, 1, 1, 1, 1
    )
    pixels = images.movedim(-1, 1).float()
    pixels = pixels.lerp(F.avg_pool2d(F.pad(pixels, (1, 1, 1, 1), "replicate"), 3, 1), share)
    pixels += amount * torch.randn(pixels.shape, generator=generator)
    return pixels.clamp(0, 255).round().to(torch.uint8).movedim(1, -1)


def _teach(probes: FactorProbes, images: Tensor, sides: Tensor, steps: int, seed: int) -> None:
    """By Adam on binary cross-entropy; the rate falls to 0, along a cosine."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in probes.parameters():  # so that probes do not depend on what was drawn before
        bound = parameter[0].numel() ** -0.5 if parameter.dim() > 1 else 0.0
        nn.init.uniform_(parameter, -bound * 3**0.5, bound * 3**0.5, generator=generator)
    optimiser = torch.optim.Adam(probes.parameters(), RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for _ in range(steps):
        rows = torch.randint(len(images), (BATCH,), generator=generator)
        optimiser.zero_grad()
        F.binary_cross_entropy_with_logits(probes(_worn(images[rows], generator)), sides[rows]).backward()
        optimiser.step()
        schedule.step()
    probes.eval().requires_grad_(False)
