"""Plan A, by architecture and by penalty.

Tokens: each position of x and of y owns an N × N matrix Σ_r λ_r l_r r_rᵀ, the two matrices are the two input images of
a small CNN. Two regularisers make a token a stripe: the entropy of λ² leaves one term, and the variance along l and r
leaves constant what training does not force to vary, also where it never looks.

Controls: the interaction penalty asks a decoder to be a sum of one function per factor (F_int). A sum of two stripes
and the logarithm of a bump are; a bump, the product of its stripes, is not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compgen_fast.jets import interaction_penalty
from compgen_fast.studies.bumps.decoders import combining, mlp
from compgen_fast.studies.bumps.failure import SIZE, Found
from compgen_fast.studies.bumps.fitting import ASKED_AT_ONCE, Fit, Losses, decoded, draws, optimise, squared
from compgen_fast.studies.bumps.sheet import Sheet, open_sheet

TOKEN_SIZE, SIGMA = 32, 1.5
RANK = 4
ENTROPY, VARIANCE = 0.1, 0.01
STRENGTH = 0.01  # of the interaction penalty, per pixel
REGULARISED = {"none": (0.0, 0.0), "entropy": (ENTROPY, 0.0), "variance": (0.0, VARIANCE), "both": (ENTROPY, VARIANCE)}


class Tokens(nn.Module):
    """A stack of models: positions (x, y) → images."""

    def __init__(self, seeds: Sequence[int], size: int, rank: int = RANK, channels: int = 16) -> None:
        super().__init__()
        self.weights = _normal(seeds, 1, 2, size, rank, mean=1.0, deviation=0.1)  # λ: [M, factor, token, rank]
        self.left = _normal(seeds, 2, 2, size, rank, size, deviation=0.3)  # l: [M, factor, token, rank, N]
        self.right = _normal(seeds, 3, 2, size, rank, size, deviation=0.3)
        self.combine = nn.Sequential(*combining(seeds, 2, channels))

    def matrices(self) -> Tensor:
        """[M, factor, token, N, N]."""
        weighted: Tensor = self.weights.unsqueeze(-1) * self.left
        return weighted.mT @ self.right

    def forward(self, x: Tensor, y: Tensor, matrices: Tensor) -> Tensor:
        """Positions [M, B] each → [M, B, N, N]."""
        models = torch.arange(len(self.weights))[:, None]
        images: Tensor = self.combine(torch.stack([matrices[models, 0, x], matrices[models, 1, y]], 2))
        return images

    def entropy(self) -> Tensor:
        """Of λ²/Σλ², summed over tokens, [M]."""
        share = self.weights.square() / self.weights.square().sum(-1, keepdim=True)
        found: Tensor = torch.special.entr(share)
        return found.sum((1, 2, 3))

    def variance(self) -> Tensor:
        """Along l and r, mean over the rank, summed over tokens, [M]."""
        return (self.left.var(-1) + self.right.var(-1)).mean(-1).sum((1, 2))


def _normal(seeds: Sequence[int], number: int, *shape: int, mean: float = 0.0, deviation: float = 1.0) -> nn.Parameter:
    generators = (torch.Generator().manual_seed(1_000 * seed + 100 + number) for seed in seeds)
    return nn.Parameter(torch.stack([mean + deviation * torch.randn(shape, generator=each) for each in generators]))


@dataclass(frozen=True)
class TokenRun:
    """All choices of regularisers for one seed, as one stack."""

    part: ClassVar[str] = "plan-a"
    seed: int
    fit: Fit
    size: int = TOKEN_SIZE

    @property
    def name(self) -> str:
        return f"tokens-{self.seed}"

    def run(self) -> Found:
        sheet = open_sheet(self.size, "one-hot", "corner", SIGMA)
        seeds = [self.seed] * len(REGULARISED)
        tokens = Tokens(seeds, self.size)
        optimise(tokens, _regularised(tokens, sheet), draws([[sheet.known]] * len(seeds), seeds, self.fit), self.fit)
        with torch.no_grad():
            matrices = tokens.matrices()
            made = torch.cat(
                [
                    tokens(*(each.expand(len(seeds), -1) for each in _place(rows, self.size)), matrices)
                    for rows in torch.arange(sheet.positions).split(ASKED_AT_ONCE)
                ],
                1,
            )
        found = (made - sheet.images[: sheet.positions]).square().mean((2, 3))
        outcomes = [
            {"regulariser": name, "seed": self.seed, "id": float(each[~sheet.held].mean()),
             "ood": float(each[sheet.held].mean())}
            for name, each in zip(REGULARISED, found, strict=True)
        ]  # fmt: skip
        shown = matrices[:, :, self.size * 5 // 8].numpy()  # one token of each factor that is only seen in part
        maps = found.view(-1, self.size, self.size).numpy()
        return {"blank": sheet.blank, "outcomes": outcomes}, {"errors": maps, "tokens": shown}


def _place(rows: Tensor, size: int) -> tuple[Tensor, Tensor]:
    return rows % size, rows // size


def _regularised(tokens: Tokens, sheet: Sheet) -> Losses:
    entropy, variance = torch.tensor(list(REGULARISED.values())).unbind(1)

    def losses(rows: Tensor, step: int) -> Tensor:
        made: Tensor = tokens(*_place(rows, sheet.size), tokens.matrices())
        error = (made - sheet.images[rows]).square().mean((1, 2, 3))
        return error + entropy * tokens.entropy() + variance * tokens.variance()

    return losses


# ------------------------------------------------------------------------------------------------ the penalty


@dataclass(frozen=True)
class Control:
    """An MLP on one target, without the penalty and with it: a stack of all seeds each."""

    part: ClassVar[str] = "plan-a"
    target: Literal["bump", "stripes", "log"]
    seeds: tuple[int, ...]
    fit: Fit
    size: int = SIZE

    @property
    def name(self) -> str:
        return f"penalty-{self.target}"

    def run(self) -> Found:
        sheet = open_sheet(self.size, "one-hot")
        images = target_images(sheet, self.target)
        outcomes = [outcome for strength in (0.0, STRENGTH) for outcome in self._trained(sheet, images, strength)]
        # A blank image is no yardstick for targets that are nowhere blank; the mean of the known ones is for all.
        mean = (images - images[~sheet.held].mean(0)).square().mean((1, 2))
        level = {"id": float(mean[~sheet.held].mean()), "ood": float(mean[sheet.held].mean())}
        return {"mean_image": level, "outcomes": outcomes}, {}

    def _trained(self, sheet: Sheet, images: Tensor, strength: float) -> list[dict[str, Any]]:
        models = len(self.seeds)
        decoder = mlp(self.seeds, sheet.codes.shape[1], self.size, depth=3, width=128, activation=F.gelu)
        losses = penalised(decoder, sheet, images, strength) if strength else squared(decoder, sheet.codes, images)
        optimise(decoder, losses, draws([[sheet.known]] * models, self.seeds, self.fit), self.fit)
        found = (decoded(decoder, sheet.codes[: sheet.positions], models) - images).square().mean((2, 3))
        return [
            {"penalised": strength > 0, "seed": seed, "id": float(each[~sheet.held].mean()),
             "ood": float(each[sheet.held].mean())}
            for seed, each in zip(self.seeds, found, strict=True)
        ]  # fmt: skip


def target_images(sheet: Sheet, target: str) -> Tensor:
    """[n, N, N]: bumps, sums of their stripes, or the logarithms of bumps, scaled to the order of 1."""
    bumps = sheet.images[: sheet.positions]
    if target == "bump":
        return bumps
    x, y = _place(torch.arange(sheet.positions), sheet.size)
    if target == "stripes":
        vertical, horizontal = sheet.images[sheet.stripes].view(2, sheet.size, sheet.size, sheet.size).unbind()
        return vertical[x] + horizontal[y]
    pixel = torch.arange(sheet.size)
    squares = (pixel - x[:, None]).square()[:, None, :] + (pixel - y[:, None]).square()[:, :, None]
    images: Tensor = squares / -(sheet.size**2)
    return images


def penalised(decoder: nn.Module, sheet: Sheet, images: Tensor, strength: float) -> Losses:
    """Squared error and the penalty, per pixel both. The penalty is asked at recombined codes, x of one sample and y of
    another: it needs no image there.
    """
    plain = squared(decoder, sheet.codes, images)

    def losses(rows: Tensor, step: int) -> Tensor:
        def decode(slots: Tensor) -> Tensor:
            made: Tensor = decoder(slots.reshape(len(rows), -1, sheet.codes.shape[1]))
            return made.flatten(0, 1)

        x, y = sheet.codes[rows].unflatten(2, (2, -1)).unbind(2)
        slots = torch.stack([x, y.roll(1, 1)], 2).flatten(0, 1)
        mean = interaction_penalty(decode, slots, generator=torch.Generator().manual_seed(step))
        # The mean over all models' samples, given to each: the sum over models is the sum of their means.
        return plain(rows, step) + strength * mean / sheet.positions

    return losses
