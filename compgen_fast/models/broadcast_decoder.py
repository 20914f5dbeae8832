"""Slots to pixels by spatial broadcast: each slot paints the whole image by itself, and masks decide who is seen where.

A painter is one network for all slots: it takes a slot and the positions of the grid (Watters et al., 2019). There are
two, by pixel and by convolution. What slots painted is combined here by masks, which compete for each pixel, and in
additive_decoder.py by a plain sum.
"""

from typing import Literal, get_args

from torch import Tensor, nn

from compgen_fast.jets.penalty import check_slots
from compgen_fast.models.positions import fourier_features

Kind = Literal["cnn", "mlp"]
MOST_DOUBLINGS = 3


class SpatialBroadcastDecoder(nn.Module):
    """Slots [B, K, slot_dim] → pixels [B, N, 3], N = image_size²: Σ_k mask_k · colour_k, masks a softmax over slots.

    Args:
        slot_dim: width of a slot.
        image_size: height and width of the image.
        kind: ``"mlp"`` paints pixel by pixel, so a subset is decoded alone; ``"cnn"`` paints by convolutions, so the
            whole image is decoded and the subset picked.
        layers: hidden layers of the painter.
        width: their width.
        octaves: Fourier features of a position, 4 per octave.
    """

    def __init__(
        self, slot_dim: int, image_size: int, *, kind: Kind = "mlp", layers: int = 4, width: int = 64, octaves: int = 8
    ) -> None:
        super().__init__()
        self.num_pixels = image_size**2
        self.painter = painter(kind, slot_dim, image_size, 4, layers=layers, width=width, octaves=octaves)

    def forward(self, z: Tensor, pixels: Tensor | None = None) -> Tensor:
        """Decodes all pixels, or those whose flat indices are given: [B, len(pixels), 3]."""
        return self.decode_with_masks(z, pixels)[0]

    def decode_with_masks(self, z: Tensor, pixels: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The pixels, and the share that each slot has in them: [B, K, N], 1 summed over slots."""
        painted = self.painter(z, pixels)
        masks = painted[..., 3:].softmax(1)
        return (masks * painted[..., :3]).sum(1), masks.squeeze(-1)


def painter(
    kind: Kind, slot_dim: int, image_size: int, outputs: int, *, layers: int, width: int, octaves: int
) -> nn.Module:
    """The network that paints one slot: z [B, K, slot_dim], pixels → [B, K, N, outputs]."""
    if kind not in get_args(Kind):
        raise ValueError(f"painter: kind is {kind!r}; expected one of {', '.join(get_args(Kind))}")
    if layers < 1 or width < 1 or octaves < 1:
        raise ValueError(f"painter: layers={layers}, width={width}, octaves={octaves}; each must be at least 1")
    made_by = PixelPainter if kind == "mlp" else ConvolutionalPainter
    return made_by(slot_dim, image_size, outputs, layers, width, octaves)


class Broadcast(nn.Module):
    """z [B, K, slot_dim] → [B, K, n, width], a slot at every position of a grid.

    A linear map of (slot, position) is a map of the slot plus a map of the position. So the position's part is computed
    once for all slots and images, and broadcasting is an addition.
    """

    def __init__(self, slot_dim: int, grid: int, width: int, octaves: int) -> None:
        super().__init__()
        self.register_buffer("positions", fourier_features(grid, grid, octaves), persistent=False)
        self.from_slot = nn.Linear(slot_dim, width)
        self.from_position = nn.Linear(4 * octaves, width, bias=False)

    def forward(self, z: Tensor, pixels: Tensor | None = None) -> Tensor:
        check_slots("broadcast decoder", z)
        positions = self.get_buffer("positions")
        at = self.from_position(positions if pixels is None else positions[pixels])
        placed: Tensor = self.from_slot(z).unsqueeze(2) + at
        return placed


class PixelPainter(nn.Module):
    """An MLP at every pixel."""

    def __init__(self, slot_dim: int, image_size: int, outputs: int, layers: int, width: int, octaves: int) -> None:
        super().__init__()
        self.broadcast = Broadcast(slot_dim, image_size, width, octaves)
        hidden = [layer for _ in range(layers - 1) for layer in (nn.Linear(width, width), nn.GELU())]
        self.layers = nn.Sequential(nn.GELU(), *hidden, nn.Linear(width, outputs))

    def forward(self, z: Tensor, pixels: Tensor | None = None) -> Tensor:
        painted: Tensor = self.layers(self.broadcast(z, pixels))
        return painted


class ConvolutionalPainter(nn.Module):
    """5×5 convolutions from a coarse grid: the last layers, three at most, are transposed and double it.

    A layer that doubles the grid has a quarter of the products per pixel, and those before it run on the small grid.
    """

    def __init__(self, slot_dim: int, image_size: int, outputs: int, layers: int, width: int, octaves: int) -> None:
        super().__init__()
        doublings = min(layers, MOST_DOUBLINGS, factors_of_two(image_size))
        self.grid = image_size >> doublings
        self.broadcast = Broadcast(slot_dim, self.grid, width, octaves)
        convolutions = [
            *(nn.Conv2d(width, width, 5, padding=2) for _ in range(layers - doublings)),
            *(nn.ConvTranspose2d(width, width, 5, 2, 2, output_padding=1) for _ in range(doublings)),
        ]
        hidden = [layer for convolution in convolutions for layer in (convolution, nn.GELU())]
        self.layers = nn.Sequential(nn.GELU(), *hidden, nn.Conv2d(width, outputs, 3, padding=1))

    def forward(self, z: Tensor, pixels: Tensor | None = None) -> Tensor:
        maps = self.broadcast(z).mT.unflatten(-1, (self.grid, self.grid)).flatten(0, 1)
        painted: Tensor = self.layers(maps).unflatten(0, (len(z), -1)).flatten(3).mT
        return painted if pixels is None else painted[:, :, pixels]


def factors_of_two(size: int) -> int:
    return (size & -size).bit_length() - 1
