"""Masked continuous tokens: what MAR and masked GIVT share. They differ in how a hidden token is told and drawn."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from compgen_fast.draws import Draws
from compgen_fast.generate.config import GIVTConfig, MARConfig
from compgen_fast.generate.generator import Corrupted, Generator, Guide, check_continuous
from compgen_fast.generate.masking import at, decoded_per_round, expected_hidden, hide, random_order, rounds
from compgen_fast.generate.trunk import STD
from compgen_fast.models.slot_vae import UNSEEDED
from compgen_fast.worlds.source import Factor


class MaskedTokens(Generator):
    """Continuous tokens [B, T, C]; a learned vector stands for a hidden one."""

    def __init__(self, config: MARConfig | GIVTConfig, factors: Sequence[Factor]) -> None:
        super().__init__(config, factors, nn.Linear(config.channels, config.trunk.width))
        self.channels = config.channels
        self.mask = nn.Parameter(STD * torch.randn(config.trunk.width))

    @abstractmethod
    def draw(self, output: Tensor, guide: Guide, draws: Draws, temperature: float) -> Tensor:
        """Tokens [B, n, C] of the trunk's output [B, n, W], or [2B, n, W] where the guide compares two conditions."""

    def check(self, latents: Tensor) -> None:
        check_continuous(type(self).__name__, latents, self.tokens, self.channels)

    def blank(self, batch: int) -> Tensor:
        return self.mask.new_zeros(batch, self.tokens, self.channels)

    def corrupt(self, latents: Tensor, condition: Tensor, draws: Draws) -> Corrupted:
        hidden = hide(self.tokens, latents, draws)
        return Corrupted(self.embed(latents, hidden), condition, hidden, expected_hidden(self.tokens), latents)

    def embed(self, latents: Tensor, hidden: Tensor) -> Tensor:
        """Tokens [B, T, W], without what is hidden."""
        tokens: Tensor = self.embedding(latents)
        return torch.where(hidden.unsqueeze(-1), self.mask.to(tokens.dtype), tokens)

    @torch.no_grad()
    def sample(
        self,
        factors: Mapping[str, Tensor],
        *,
        draws: Draws = UNSEEDED,
        steps: int | None = None,
        guidance: float = 1.0,
        temperature: float = 1.0,
    ) -> Tensor:
        """Latents [B, T, C], in a random order of tokens.

        ``steps`` are rounds, at most T; if not given, 8 or T. ``temperature`` is a factor on the noise that a token is
        drawn with.
        """
        guide = self.guide(factors, guidance)
        latents = self.mask.new_zeros(guide.batch, self.tokens, self.channels)
        order = random_order(self.tokens, latents, draws)
        hidden = torch.ones_like(order, dtype=torch.bool)
        for places in order.split(decoded_per_round(self.tokens, rounds(self.tokens, steps)), 1):
            output = self.trunk(guide.both(self.embed(latents, hidden)), guide.condition).tokens
            drawn = self.draw(at(output, guide.both(places)), guide, draws, temperature)
            latents = latents.scatter(1, places.unsqueeze(-1).expand_as(drawn), drawn)
            hidden = hidden.scatter(1, places, False)
        return latents
