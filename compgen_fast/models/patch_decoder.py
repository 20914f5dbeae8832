"""Slots to patches by cross-attention: `CrossAttentionDecoder` with a patch of pixels for each query.

A patch of p×p pixels is to the cross-attention decoder a pixel with 3·p² colours. So it costs about p² times less, and
pixels of one patch decode together.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compgen_fast.models.cross_attention_decoder import CrossAttentionDecoder


class PatchDecoder(nn.Module):
    """Slots [B, K, slot_dim] → pixels [B, N, 3], N = image_size².

    Args:
        slot_dim: width of a slot.
        image_size: height and width of the image.
        patch: height and width of a patch; divides image_size.
        layers, heads, head_dim, query_dim, slot_hidden, octaves: as of `CrossAttentionDecoder`.
    """

    def __init__(
        self,
        slot_dim: int,
        image_size: int,
        *,
        patch: int = 4,
        layers: int = 2,
        heads: int = 12,
        head_dim: int = 43,
        query_dim: int = 180,
        slot_hidden: int = 2064,
        octaves: int = 8,
    ) -> None:
        super().__init__()
        if patch < 1 or image_size % patch:
            raise ValueError(
                f"PatchDecoder: image_size {image_size} cannot be cut into patches of {patch}; choose a divisor"
            )
        self.num_pixels, self.patch, self.grid = image_size**2, patch, image_size // patch
        self.patches = CrossAttentionDecoder(
            slot_dim,
            self.grid,
            channels=3 * patch**2,
            layers=layers,
            heads=heads,
            head_dim=head_dim,
            query_dim=query_dim,
            slot_hidden=slot_hidden,
            octaves=octaves,
        )
        by_row = torch.arange(self.num_pixels).view(self.grid, patch, self.grid, patch)
        self.register_buffer("patch_pixels", by_row.transpose(1, 2).reshape(-1, patch**2), persistent=False)

    def forward(self, z: Tensor, pixels: Tensor | None = None) -> Tensor:
        """Decodes all pixels, or those whose flat indices are given: [B, len(pixels), 3].

        Of the patches, those are decoded in which a given pixel lies: ``patch_pixels`` [patches, patch²] lists them.
        """
        if pixels is None:
            return self._in_rows(self.patches(z))
        patches, places = self._needed(pixels)
        return self._by_pixel(self.patches(z, patches))[:, places]

    def decode_with_masks(self, z: Tensor, pixels: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The pixels, and which slot the patch of each looked at: [B, K, N], 1 summed over slots."""
        if pixels is None:
            colours, masks = self.patches.decode_with_masks(z)
            on_grid = masks.unflatten(-1, (self.grid, self.grid))
            return self._in_rows(colours), F.interpolate(on_grid, scale_factor=self.patch).flatten(2)
        patches, places = self._needed(pixels)
        colours, masks = self.patches.decode_with_masks(z, patches)
        return self._by_pixel(colours)[:, places], masks[:, :, places // self.patch**2]

    def _needed(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """The patches these pixels lie in, and the places of the pixels among all pixels of those patches."""
        row, column = pixels // (self.grid * self.patch), pixels % (self.grid * self.patch)
        patches, which = torch.unique(row // self.patch * self.grid + column // self.patch, return_inverse=True)
        return patches, which * self.patch**2 + row % self.patch * self.patch + column % self.patch

    def _by_pixel(self, patches: Tensor) -> Tensor:
        """Some patches [B, patches, patch² · 3], patch by patch [B, patches · patch², 3]."""
        return patches.reshape(len(patches), -1, 3)

    def _in_rows(self, patches: Tensor) -> Tensor:
        """All patches [B, patches, patch² · 3] as an image, row by row [B, N, 3]."""
        blocks = patches.reshape(len(patches), self.grid, self.grid, self.patch, self.patch, 3)
        return blocks.transpose(2, 3).reshape(len(patches), -1, 3)
