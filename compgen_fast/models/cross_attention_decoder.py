"""Slots to pixels by cross-attention: pixels are the queries, slots the keys and values.

The decoder of "Interaction Asymmetry" (SCIENCE.md §1 has the sizes, which are the defaults here). There is no attention
between pixels, so each pixel decodes by itself and any subset can be decoded alone.
"""

import torch
from torch import Tensor, nn

from compgen_fast.jets.penalty import RecordedWeights, check_slots
from compgen_fast.models.positions import fourier_features
from compgen_fast.ops import projected_slot_attention


class CrossAttentionDecoder(nn.Module):
    """Slots [B, K, slot_dim] → pixels [B, N, channels], N = image_size².

    Args:
        slot_dim: width of a slot.
        image_size: height and width of the image.
        channels: colours of a pixel.
        layers: cross-attention layers.
        heads, head_dim: attention; slots are projected to heads · head_dim.
        query_dim: width of a pixel's query; its feed-forward layer is twice as wide.
        slot_hidden: hidden width of the slots' own MLP.
        octaves: Fourier features of a pixel's position, 4 per octave.
    """

    def __init__(
        self,
        slot_dim: int,
        image_size: int,
        *,
        channels: int = 3,
        layers: int = 2,
        heads: int = 12,
        head_dim: int = 43,
        query_dim: int = 180,
        slot_hidden: int = 2064,
        octaves: int = 8,
    ) -> None:
        super().__init__()
        width = heads * head_dim
        self.register_buffer("positions", fourier_features(image_size, image_size, octaves), persistent=False)
        self.embed_pixels = mlp(4 * octaves, query_dim, query_dim)
        self.embed_slots = mlp(slot_dim, slot_hidden, width)
        self.layers = nn.ModuleList(CrossAttentionLayer(query_dim, width, heads) for _ in range(layers))
        self.to_colour = mlp(query_dim, query_dim, channels)

    @property
    def num_pixels(self) -> int:
        return len(self.get_buffer("positions"))

    def forward(self, z: Tensor, pixels: Tensor | None = None) -> Tensor:
        """Decodes all pixels, or those whose flat indices are given: [B, len(pixels), channels]."""
        check_slots("cross-attention decoder", z)
        positions = self.get_buffer("positions")
        x = self.embed_pixels(positions if pixels is None else positions[pixels]).unsqueeze(0)
        slots = self.embed_slots(z)
        for layer in self.layers:
            x = layer(x, slots)
        colours: Tensor = self.to_colour(x)
        return colours

    def decode_with_masks(self, z: Tensor, pixels: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The pixels, and which slot each looked at: [B, K, N], the mean over layers and heads, 1 summed over slots."""
        with RecordedWeights() as recorded:
            colours = self(z, pixels)
        return colours, torch.stack(recorded.weights).mean(0).mT


class CrossAttentionLayer(nn.Module):
    """Pre-norm cross-attention from pixels to slots, then a feed-forward layer.

    The first layer's pixels are the same for all images, [1, N, query_dim]: its norm is computed once. Queries are not
    computed at all where slots are few: ``projected_slot_attention`` folds both projections into the slots.
    """

    def __init__(self, query_dim: int, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_feed_forward = nn.LayerNorm(query_dim), nn.LayerNorm(query_dim)
        self.to_q = nn.Linear(query_dim, width)
        self.to_k = nn.Linear(width, width, bias=False)  # a bias would move all of a pixel's scores alike: no effect
        self.to_v = nn.Linear(width, width)
        self.to_out = nn.Linear(width, query_dim)
        self.feed_forward = mlp(query_dim, 2 * query_dim, query_dim)

    def forward(self, x: Tensor, slots: Tensor) -> Tensor:
        k, v = (project(slots).unflatten(-1, (self.heads, -1)) for project in (self.to_k, self.to_v))
        into, back = self.to_q, self.to_out
        x = x + projected_slot_attention(
            self.norm_attention(x), k, v, into.weight, into.bias, back.weight, back.bias, return_weights=False
        )
        out: Tensor = x + self.feed_forward(self.norm_feed_forward(x))
        return out


def mlp(width: int, hidden: int, out: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, out))
