"""Flow matching: from noise at t = 0 to data at t = 1 along straight lines.

x_t = (1 − t) · noise + t · x        velocity v = x − noise        dx = v(x_t, t) dt
"""

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

Method = Literal["euler", "heun"]
Velocity = Callable[[Tensor, float], Tensor]

FEATURES = 64
FASTEST = 1000.0


def interpolated(x: Tensor, noise: Tensor, t: Tensor) -> Tensor:
    """x_t, of times that broadcast."""
    return torch.lerp(noise, x, t)


def integrate(velocity: Velocity, noise: Tensor, steps: int, method: Method = "heun") -> Tensor:
    """Data, from noise at t = 0. Heun's method asks twice for the velocity in a step, and errs far less."""
    if steps < 1:
        raise ValueError(f"steps is {steps}; expected at least 1")
    x = noise
    for step in range(steps):
        now, then = step / steps, (step + 1) / steps
        v = velocity(x, now)
        ahead = torch.add(x, v, alpha=1 / steps)
        x = ahead if method == "euler" else torch.add(x, v + velocity(ahead, then), alpha=0.5 / steps)
    return x


class TimeEmbedding(nn.Module):
    """Times [n] from 0 to 1 → [n, width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        frequencies = torch.exp(torch.linspace(0, math.log(FASTEST), FEATURES))
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.mlp = nn.Sequential(nn.Linear(2 * FEATURES, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, t: Tensor) -> Tensor:
        waves = t.unsqueeze(-1) * self.get_buffer("frequencies")
        out: Tensor = self.mlp(torch.cat([waves.sin(), waves.cos()], -1))
        return out
