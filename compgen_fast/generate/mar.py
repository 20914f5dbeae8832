"""MAR: hidden continuous tokens, each told by a flow of its own, which a small MLP computes from the trunk's output."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compgen_fast.draws import Draws
from compgen_fast.generate.config import MARConfig
from compgen_fast.generate.flow import TimeEmbedding, integrate, interpolated
from compgen_fast.generate.generator import Corrupted, Guide
from compgen_fast.generate.masked import MaskedTokens
from compgen_fast.models.slot_vae import in_full
from compgen_fast.ops.trunk_block import modulated
from compgen_fast.worlds.source import Factor

HEAD_STEPS = 10
"""Steps by Heun's method from noise to a token, in sampling."""


class MAR(MaskedTokens):
    """Continuous tokens [B, T, C]."""

    measure = "velocity"

    def __init__(self, config: MARConfig, factors: Sequence[Factor]) -> None:
        super().__init__(config, factors)
        self.config = config
        self.head = TokenFlow(config.channels, config.trunk.width, config.head_width, config.head_layers)

    def score(self, output: Tensor, seen: Corrupted, draws: Draws) -> Tensor:
        times, noise = draws.uniform(seen.target[..., 0]), draws.normal(seen.target)
        x, noise, t = seen.scored(seen.target), seen.scored(noise), seen.scored(times)
        told = self.head.told(seen.scored(output))
        velocity = self.head(interpolated(x, noise, t.unsqueeze(-1)), t, told)
        return seen.mean((in_full(velocity) - (x - noise)).square().mean(-1))

    def draw(self, output: Tensor, guide: Guide, draws: Draws, temperature: float) -> Tensor:
        told = self.head.told(output)

        def velocity(x: Tensor, t: float) -> Tensor:
            return in_full(guide.mixed(self.head(guide.both(x), x.new_full((1,), t), told)))

        noise = draws.normal(self.mask.new_empty(guide.batch, output.shape[1], self.channels))
        return integrate(velocity, temperature * noise, HEAD_STEPS)


class TokenFlow(nn.Module):
    """The velocity of single tokens: residual MLPs, modulated as the trunk is, but by each token's own condition.

    Args:
        channels: numbers of a token.
        told: width of the trunk's output.
        width: of the MLPs.
        layers: of them.
    """

    def __init__(self, channels: int, told: int, width: int, layers: int) -> None:
        super().__init__()
        if layers < 1:
            raise ValueError(f"head_layers is {layers}; expected at least 1")
        self.told, self.time = nn.Linear(told, width), TimeEmbedding(width)
        self.embedding = nn.Linear(channels, width)
        self.modulation = nn.Linear(width, (3 * layers + 2) * width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width)) for _ in range(layers)
        )
        self.to_velocity = nn.Linear(width, channels)
        for layer in (self.modulation, self.to_velocity):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
        with torch.no_grad():
            parts = self.modulation.bias.view(-1, width)
            parts[1::3] = 1  # shift, scale, gate of each layer; then shift and scale

    def forward(self, x: Tensor, t: Tensor, told: Tensor) -> Tensor:
        """Velocities […, C] of x […, C] at times t that broadcast; ``told`` […, width] is `self.told` of the trunk's
        output."""
        condition = F.silu(told + self.time(t))
        *modulations, shift, scale = self.modulation(condition).chunk(3 * len(self.layers) + 2, -1)
        h: Tensor = self.embedding(x)
        for layer, of_layer in zip(self.layers, zip(*[iter(modulations)] * 3, strict=True), strict=True):
            h = torch.addcmul(h, of_layer[2], layer(modulated(h, of_layer[0], of_layer[1])))
        velocity: Tensor = self.to_velocity(modulated(h, shift, scale))
        return velocity
