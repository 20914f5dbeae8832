"""Training of a stack: each model by its own draws from its own images, all in one step."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from compgen_fast.studies.bumps.sheet import Sheet

WARMUP = 100
ASKED_AT_ONCE = 512  # images of one model


@dataclass(frozen=True)
class Fit:
    """How long and how fast. The rate falls to 0 along half a cosine."""

    steps: int
    batch: int = 32
    rate: float = 2e-3
    decay: float = 0.01


def draws(groups: Sequence[Sequence[Tensor]], seeds: Sequence[int], fit: Fit) -> Tensor:
    """Rows of the sheet [M, steps, batch] for each model: as many from each of its groups, with replacement."""
    return torch.stack([_of_one(each, seed, fit) for each, seed in zip(groups, seeds, strict=True)])


def _of_one(groups: Sequence[Tensor], seed: int, fit: Fit) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    share, rest = divmod(fit.batch, len(groups))
    if rest:
        raise ValueError(f"draws: a batch of {fit.batch} is not divisible among {len(groups)} groups of images")
    parts = [rows[torch.randint(len(rows), (fit.steps, share), generator=generator)] for rows in groups]
    return torch.cat(parts, 1)


Losses = Callable[[Tensor, int], Tensor]
"""(rows [M, B], step) → the loss of each model [M]."""


def optimise(models: nn.Module, losses: Losses, rows: Tensor, fit: Fit) -> None:
    """AdamW on the sum of the models' losses, which is each one on its own."""
    optimiser = torch.optim.AdamW(models.parameters(), lr=fit.rate, weight_decay=fit.decay, fused=True)
    for step in range(fit.steps):
        for group in optimiser.param_groups:
            group["lr"] = fit.rate * min(1, (step + 1) / WARMUP) * (1 + math.cos(math.pi * step / fit.steps)) / 2
        losses(rows[:, step], step).sum().backward()
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)


def squared(decoder: nn.Module, codes: Tensor, images: Tensor) -> Losses:
    """The plain loss: mean squared error over pixels."""

    def losses(rows: Tensor, step: int) -> Tensor:
        error: Tensor = decoder(codes[rows]) - images[rows]
        return error.square().mean((1, 2, 3))

    return losses


@torch.no_grad()
def decoded(decoder: nn.Module, codes: Tensor, models: int) -> Tensor:
    """What each model makes of all codes [n, w]: [M, n, N, N]."""
    return torch.cat([decoder(part.expand(models, -1, -1)) for part in codes.split(ASKED_AT_ONCE)], 1)


def errors(decoder: nn.Module, sheet: Sheet, models: int) -> Tensor:
    """Mean squared errors at all positions, [M, n]."""
    made = decoded(decoder, sheet.codes[: sheet.positions], models)
    return (made - sheet.images[: sheet.positions]).square().mean((2, 3))
