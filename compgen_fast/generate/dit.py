"""DiT: flow matching on all tokens of an image at once. The time is part of the condition."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from compgen_fast.draws import Draws
from compgen_fast.generate.config import DiTConfig
from compgen_fast.generate.flow import Method, TimeEmbedding, integrate, interpolated
from compgen_fast.generate.generator import Corrupted, Generator, check_continuous
from compgen_fast.models.slot_vae import UNSEEDED, in_full
from compgen_fast.worlds.source import Factor


class DiT(Generator):
    """Continuous tokens [B, T, C]; the output is the velocity, 0 at first."""

    measure = "velocity"

    def __init__(self, config: DiTConfig, factors: Sequence[Factor]) -> None:
        super().__init__(config, factors, nn.Linear(config.channels, config.trunk.width))
        self.config = config
        self.time = TimeEmbedding(config.trunk.width)
        self.to_velocity = nn.Linear(config.trunk.width, config.channels)
        nn.init.zeros_(self.to_velocity.weight)
        nn.init.zeros_(self.to_velocity.bias)

    def check(self, latents: Tensor) -> None:
        check_continuous("DiT", latents, self.tokens, self.config.channels)

    def blank(self, batch: int) -> Tensor:
        return self.to_velocity.bias.new_zeros(batch, self.tokens, self.config.channels)

    def corrupt(self, latents: Tensor, condition: Tensor, draws: Draws) -> Corrupted:
        t, noise = draws.uniform(latents[:, 0, 0]), draws.normal(latents)
        tokens = self.embedding(interpolated(latents, noise, t[:, None, None]))
        every = torch.ones_like(latents[..., 0], dtype=torch.bool)
        return Corrupted(tokens, condition + self.time(t), every, self.tokens, latents - noise)

    def score(self, output: Tensor, seen: Corrupted, draws: Draws) -> Tensor:
        error: Tensor = in_full(self.to_velocity(output)) - seen.target
        return error.square().mean()

    def whole(self, condition: Tensor) -> Tensor:
        told: Tensor = condition + self.time(condition.new_ones(1))
        return told

    @torch.no_grad()
    def sample(
        self,
        factors: Mapping[str, Tensor],
        *,
        draws: Draws = UNSEEDED,
        steps: int = 25,
        guidance: float = 1.0,
        method: Method = "heun",
    ) -> Tensor:
        """Latents [B, T, C]; ``steps`` and ``method`` are those of the integration."""
        guide = self.guide(factors, guidance)

        def velocity(x: Tensor, t: float) -> Tensor:
            condition = guide.condition + self.time(x.new_full((1,), t))
            output = self.trunk(guide.both(self.embedding(x)), condition).tokens
            return in_full(guide.mixed(self.to_velocity(output)))

        noise = draws.normal(guide.condition.new_empty(guide.batch, self.tokens, self.config.channels))
        return integrate(velocity, noise, steps, method)
