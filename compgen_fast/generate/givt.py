"""GIVT: continuous tokens, each told by a mixture of Gaussians with diagonal covariance.

Either tokens are hidden at random and decoded many at once, as MAR does, or they come row by row, each told from those
before it.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compgen_fast.draws import Draws
from compgen_fast.generate.config import GIVTConfig
from compgen_fast.generate.generator import Corrupted, Generator, Guide, check_continuous
from compgen_fast.generate.masked import MaskedTokens
from compgen_fast.generate.maskgit import gumbel
from compgen_fast.generate.trunk import STD
from compgen_fast.models.slot_vae import UNSEEDED, in_full
from compgen_fast.worlds.source import Factor

SMALLEST = 0.01
"""Deviation of a Gaussian, where latents have 1: narrower ones would only tell which image it was."""
CANDIDATES = 32
"""Drawn for each token where guidance is not 1."""


class Mixture(NamedTuple):
    """One mixture of k Gaussians for each token […]."""

    logits: Tensor
    """[…, k]."""
    means: Tensor
    """[…, k, C]."""
    deviations: Tensor
    """[…, k, C]."""

    def log_density(self, x: Tensor) -> Tensor:
        """[…], of tokens x […, C]."""
        z = (x.unsqueeze(-2) - self.means) / self.deviations
        each = -(z.square() / 2 + self.deviations.log()).sum(-1) - x.shape[-1] / 2 * math.log(2 * math.pi)
        return (self.logits.log_softmax(-1) + each).logsumexp(-1)

    def draw(self, draws: Draws) -> Tensor:
        """A token [B, …, C] for each mixture [B, …]."""
        which = (self.logits + gumbel(self.logits, draws)).argmax(-1)[..., None, None]
        mean, deviation = (x.take_along_dim(which, -2).squeeze(-2) for x in (self.means, self.deviations))
        return mean + deviation * draws.normal(mean)

    def repeated(self, count: int) -> "Mixture":
        """Each mixture so many times, [B, …, count]."""
        return Mixture(
            *(x.unsqueeze(dim).repeat_interleave(count, dim) for x, dim in zip(self, (-2, -3, -3), strict=True))
        )


class MixtureHead(nn.Module):
    """The trunk's output […, width] → mixtures."""

    def __init__(self, width: int, channels: int, components: int) -> None:
        super().__init__()
        self.sizes = (components, 1 + 2 * channels)
        self.to_mixture = nn.Linear(width, components * (1 + 2 * channels))
        nn.init.trunc_normal_(self.to_mixture.weight, std=STD)

    def mixture(self, output: Tensor, temperature: float = 1.0) -> Mixture:
        logits, means, deviations = (
            in_full(self.to_mixture(output)).unflatten(-1, self.sizes).split([1, *[self.sizes[1] // 2] * 2], -1)
        )
        return Mixture(logits.squeeze(-1), means, temperature * (F.softplus(deviations) + SMALLEST))

    def draw(self, output: Tensor, guide: Guide, draws: Draws, temperature: float) -> Tensor:
        """Tokens [B, …, C] of the trunk's output [B, …, W], or [2B, …, W] where the guide compares two conditions.

        Then the density is told^g · untold^(1 − g), which is no mixture: of `CANDIDATES` drawn as told, one is chosen
        by (told / untold)^(g − 1).
        """
        if guide.guidance == 1:
            return self.mixture(output, temperature).draw(draws)
        told, untold = (self.mixture(each, temperature).repeated(CANDIDATES) for each in output.chunk(2))
        candidates = told.draw(draws)
        weights = (guide.guidance - 1) * (told.log_density(candidates) - untold.log_density(candidates))
        which = (weights + gumbel(weights, draws)).argmax(-1)[..., None, None]
        return candidates.take_along_dim(which, -2).squeeze(-2)


class MaskedGIVT(MaskedTokens):
    """Continuous tokens [B, T, C], hidden at random."""

    measure = "nll"

    def __init__(self, config: GIVTConfig, factors: Sequence[Factor]) -> None:
        super().__init__(config, factors)
        self.config = config
        self.head = MixtureHead(config.trunk.width, config.channels, config.components)

    def score(self, output: Tensor, seen: Corrupted, draws: Draws) -> Tensor:
        return nll(self.head, output, seen)

    def draw(self, output: Tensor, guide: Guide, draws: Draws, temperature: float) -> Tensor:
        return self.head.draw(output, guide, draws, temperature)


class CausalGIVT(Generator):
    """Continuous tokens [B, T, C], row by row."""

    measure = "nll"
    causal = True

    def __init__(self, config: GIVTConfig, factors: Sequence[Factor]) -> None:
        super().__init__(config, factors, nn.Linear(config.channels, config.trunk.width))
        self.config = config
        self.start = nn.Parameter(STD * torch.randn(config.trunk.width))
        self.head = MixtureHead(config.trunk.width, config.channels, config.components)

    def check(self, latents: Tensor) -> None:
        check_continuous("GIVT", latents, self.tokens, self.config.channels)

    def blank(self, batch: int) -> Tensor:
        return self.start.new_zeros(batch, self.tokens, self.config.channels)

    def corrupt(self, latents: Tensor, condition: Tensor, draws: Draws) -> Corrupted:
        before = self.embedding(latents[:, :-1])
        tokens = torch.cat([self.start.to(before.dtype).expand(len(latents), 1, -1), before], 1)
        every = torch.ones_like(latents[..., 0], dtype=torch.bool)
        return Corrupted(tokens, condition, every, self.tokens, latents)

    def score(self, output: Tensor, seen: Corrupted, draws: Draws) -> Tensor:
        return nll(self.head, output, seen)

    @torch.no_grad()
    def sample(
        self,
        factors: Mapping[str, Tensor],
        *,
        draws: Draws = UNSEEDED,
        guidance: float = 1.0,
        temperature: float = 1.0,
    ) -> Tensor:
        """Latents [B, T, C], one token after the other; ``temperature`` is a factor on all deviations."""
        guide = self.guide(factors, guidance)
        read = self.trunk.reader(guide.condition)
        token, latents = self.start.expand(guide.batch, -1), []
        for _ in range(self.tokens):
            latents.append(self.head.draw(read(guide.both(token)), guide, draws, temperature))
            token = self.embedding(latents[-1])
        return torch.stack(latents, 1)


def nll(head: MixtureHead, output: Tensor, seen: Corrupted) -> Tensor:
    """In nats per number, of the scored tokens."""
    density = head.mixture(seen.scored(output)).log_density(seen.scored(seen.target))
    return -seen.mean(density) / seen.target.shape[-1]
