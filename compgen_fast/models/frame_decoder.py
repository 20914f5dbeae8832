"""Slots to pixels in frames of their own: what a slot looks like, and where it is, are told apart.

A slot has a painter, who paints its picture by a Fourier series in the slot's own frame. Moving the frame by c turns
each wave's phase,

    cos(k·(p − c)) = cos(k·c) cos(k·p) + sin(k·c) sin(k·p),

so a picture and its place are a product of few numbers, and a pixel is one row of a fixed table of waves.

    FrameDecoder           a pixel looks at painters by a softmax over what they painted for it, and a small network
                           turns the mixture into colour: slots may interact there, unless a penalty forbids it
    AdditiveFrameDecoder   painters paint colour, which is summed: slots cannot interact

The first slot's frame does not move: it is the scene. The others start as soft discs that move: they are things. Pixels
decode by themselves, so any subset can be decoded alone. It learns to tell objects from a background in minutes on a
CPU, where `CrossAttentionDecoder`, which must find out what a place is, takes hours. What it is not for: exchangeable
slots, whose order says nothing, or things that leave the image, since waves come back on its other side.
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compgen_fast.jets.penalty import note_weights

Reads = Literal["own", "all"]
STEEPNESS, HEIGHT = 8.0, 2.0  # of the discs that things start as, in logits: HEIGHT − STEEPNESS · distance²
SMOOTH = 3.0  # size of the pictures at the start


class Painters(nn.Module):
    """Slots [B, K, slot_dim] → what each painter paints at each pixel [B, K, channels, N], and where it is [B, K, 2].

    Args:
        slot_dim: width of a slot.
        image_size: height and width of the image.
        slots: how many; each has a role of its own, the first is the scene.
        channels: numbers that are painted at a pixel.
        hidden: width of the network that a slot goes through, which all painters share.
        frequencies: waves along a side at most; up to half of image_size.
        reads: a painter reads its ``own`` slot, or ``all`` of them.
    """

    def __init__(
        self, slot_dim: int, image_size: int, slots: int, channels: int, hidden: int, frequencies: int, reads: Reads
    ) -> None:
        super().__init__()
        if slots < 1:
            raise ValueError(f"frame decoder: slots is {slots}; expected at least 1")
        check_frequencies(frequencies, image_size)
        self.shape, self.channels, self.reads = (slots, slot_dim), channels, reads
        positions, waves = _positions(image_size), _waves(frequencies)
        phases = positions @ waves.T
        falling = 1 / (1 + waves.norm(dim=1) / math.pi)
        self.register_buffer("positions", positions, persistent=False)
        self.register_buffer("waves", waves, persistent=False)
        self.register_buffer("table", torch.cat([phases.cos(), phases.sin()], 1), persistent=False)
        self.register_buffer("falling", SMOOTH * falling / falling.norm(), persistent=False)
        self.register_buffer("moves", torch.tensor([0.0] + [1.0] * (slots - 1)).view(-1, 1), persistent=False)
        self.role = nn.Parameter(torch.randn(slots, hidden) / 2)
        self.embed = nn.Linear(slot_dim if reads == "own" else slots * slot_dim, hidden)
        self.inner = nn.Sequential(nn.GELU(), nn.Linear(hidden, hidden), nn.GELU())
        self.to_series = nn.Linear(hidden, channels * 2 * len(waves))
        self.to_place = nn.Linear(hidden, 2)
        nn.init.normal_(self.to_place.weight, std=0.01)
        nn.init.zeros_(self.to_place.bias)

    def forward(self, z: Tensor, pixels: Tensor | None) -> tuple[Tensor, Tensor]:
        if z.shape[1:] != self.shape:
            slots, slot_dim = self.shape
            raise ValueError(
                f"frame decoder: z has shape {list(z.shape)}; expected [B, {slots}, {slot_dim}], a slot for each role"
            )
        read = self.embed(z) if self.reads == "own" else self.embed(z.flatten(1)).unsqueeze(1)
        code = self.inner(read + self.role)
        place = self.to_place(code) * self.get_buffer("moves")
        return F.linear(self._series(code, place), self.chosen("table", pixels)), place

    def chosen(self, name: str, pixels: Tensor | None) -> Tensor:
        """The rows of a table that belong to these pixels."""
        table = self.get_buffer(name)
        return table if pixels is None else table[pixels]

    def _series(self, code: Tensor, place: Tensor) -> Tensor:
        """The coefficients [B, K, channels, 2 · waves] of a slot's picture, moved to its place [B, K, 2]."""
        series = self.to_series(code).unflatten(-1, (self.channels, 2, -1)) * self.get_buffer("falling")
        even, odd = series[..., 0, :], series[..., 1, :]
        turn = F.linear(place, self.get_buffer("waves")).unsqueeze(2)
        cos, sin = turn.cos(), turn.sin()
        return torch.cat([even * cos - odd * sin, even * sin + odd * cos], -1)


class FrameDecoder(nn.Module):
    """Slots [B, K, slot_dim] → pixels [B, N, 3], N = image_size².

    Args:
        slot_dim, image_size, slots, hidden, frequencies, reads: as of `Painters`.
        features: numbers that a painter paints at a pixel.
        mixer: hidden width of the network from a pixel's features to its colour.
    """

    def __init__(
        self,
        slot_dim: int,
        image_size: int,
        slots: int,
        *,
        hidden: int = 256,
        frequencies: int = 12,
        features: int = 8,
        mixer: int = 32,
        reads: Reads = "own",
    ) -> None:
        super().__init__()
        self.num_pixels = image_size**2
        self.painters = Painters(slot_dim, image_size, slots, features + 1, hidden, frequencies, reads)
        self.height = nn.Parameter(torch.full((slots, 1), HEIGHT))
        grey = nn.Linear(mixer, 3)
        nn.init.constant_(grey.bias, 0.5)
        self.to_colour = nn.Sequential(nn.Linear(features, mixer), nn.GELU(), grey)

    def forward(self, z: Tensor, pixels: Tensor | None = None) -> Tensor:
        """Decodes all pixels, or those whose flat indices are given: [B, len(pixels), 3]."""
        return self.decode_with_masks(z, pixels)[0]

    def decode_with_masks(self, z: Tensor, pixels: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The pixels, and which painter each looked at: [B, K, N], 1 summed over painters."""
        painted, place = self.painters(z, pixels)
        masks = (painted[:, :, -1] + self._discs(place, self.painters.chosen("positions", pixels))).softmax(1)
        note_weights(masks.mT)
        mixed = (masks.unsqueeze(2) * painted[:, :, :-1]).sum(1)
        colours: Tensor = self.to_colour(mixed.mT)
        return colours, masks

    def _discs(self, place: Tensor, positions: Tensor) -> Tensor:
        """What is added to the logits [B, K, N] of things: a soft disc around their place; nothing for the scene.

        ‖p − c‖² = ‖p‖² − 2 p·c + ‖c‖², which is linear in p once c is known.
        """
        from_pixel = positions.square().sum(1)
        distance = from_pixel - 2 * F.linear(place, positions) + place.square().sum(-1, keepdim=True)
        return self.painters.get_buffer("moves") * (self.height - STEEPNESS * distance)


class AdditiveFrameDecoder(nn.Module):
    """Slots [B, K, slot_dim] → pixels [B, N, 3]: grey, and what the painters add to it. Arguments as of `Painters`."""

    def __init__(self, slot_dim: int, image_size: int, slots: int, *, hidden: int = 256, frequencies: int = 12) -> None:
        super().__init__()
        self.num_pixels = image_size**2
        self.painters = Painters(slot_dim, image_size, slots, 3, hidden, frequencies, "own")

    def forward(self, z: Tensor, pixels: Tensor | None = None) -> Tensor:
        """Decodes all pixels, or those whose flat indices are given: [B, len(pixels), 3]."""
        painted, _ = self.painters(z, pixels)
        colours: Tensor = painted.sum(1).mT + 0.5
        return colours


def check_frequencies(frequencies: int, image_size: int) -> None:
    """Refuses waves that pixels cannot tell from slower ones."""
    if not 1 <= frequencies <= image_size // 2:
        raise ValueError(
            f"frequencies is {frequencies} at {image_size} pixels; expected 1 to {image_size // 2}, half of image_size"
        )


def _positions(size: int) -> Tensor:
    """Middles of the pixels (x, y) in [−1, 1], row by row: [size², 2]."""
    middles = (torch.arange(size) + 0.5) / size * 2 - 1
    y, x = torch.meshgrid(middles, middles, indexing="ij")
    return torch.stack([x.flatten(), y.flatten()], 1)


def _waves(frequencies: int) -> Tensor:
    """Wave vectors within a disc, one of each pair ±k, whose waves repeat once they cross the image: [waves, 2]."""
    across = range(frequencies + 1)
    along = range(-frequencies, frequencies + 1)
    inside = [(a, b) for a in across for b in along if (a > 0 or b >= 0) and a * a + b * b <= frequencies**2]
    return torch.tensor(inside) * math.pi
