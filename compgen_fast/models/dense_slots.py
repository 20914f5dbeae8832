"""Features to slots by one network that sees all of them at once: no attention, a weight for every feature's place.

Each slot has its own outputs, so slots take fixed roles. On small images it learns several times as fast as a
Transformer with slot queries, which must first find out where to look. What it is not for: large grids, since its
weights grow with them, exchangeable slots, or a number of slots that changes.

With a pooled scene, the first slot sees only the mean of all features: it can tell what is there, but hardly where. A
decoder whose first slot paints a scene that does not move then leaves moving things to the other slots, which know
their place; without it, the scene's slot often learns to paint everything.
"""

import torch
from torch import Tensor, nn


class DenseSlots(nn.Module):
    """Features [B, N, input_dim] → slots [B, slots, dim].

    Args:
        slots: how many slots.
        dim: width of a slot.
        features: how many features there are, N.
        input_dim: width of the features.
        hidden: width of the hidden layer.
        pooled_scene: make the first slot of the mean of the features; at least two slots.
    """

    def __init__(
        self, slots: int, dim: int, features: int, input_dim: int, hidden: int = 256, pooled_scene: bool = False
    ) -> None:
        super().__init__()
        if slots < 1 + pooled_scene or hidden < 1:
            raise ValueError(
                f"DenseSlots: slots={slots}, hidden={hidden}; expected at least 1 of both, and 2 slots where the first "
                "is a pooled scene"
            )
        self.features, self.input_dim, self.dim = features, input_dim, dim
        placed = slots - 1 if pooled_scene else slots
        self.scene = _layers(input_dim, hidden, dim) if pooled_scene else None
        self.layers = nn.Sequential(nn.Flatten(), *_layers(features * input_dim, hidden, placed * dim))

    def forward(self, features: Tensor) -> Tensor:
        if features.shape[1:] != (self.features, self.input_dim):
            raise ValueError(
                f"DenseSlots: features have shape {list(features.shape)}; expected [B, {self.features}, "
                f"{self.input_dim}], those of the image size it was made for"
            )
        slots: Tensor = self.layers(features).unflatten(-1, (-1, self.dim))
        if self.scene is None:
            return slots
        return torch.cat([self.scene(features.mean(1)).unsqueeze(1), slots], 1)


def _layers(input_dim: int, hidden: int, output_dim: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(input_dim, hidden), nn.GELU(), nn.Linear(hidden, output_dim))
