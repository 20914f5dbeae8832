"""A Vision Transformer: images to patch tokens.

Parameters carry timm's names, so that `vit_weights` can fill it from a file; `ViTVariant` holds what sets the families
apart (DINOv2, CLIP, SigLIP, …). What it is not for: classification. Class and register tokens take part in attention
and are dropped at the end.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recomputed

from compgen_fast.models.transformer import Activation, TransformerBlock


@dataclass(frozen=True)
class ViTVariant:
    """What differs between families of ViTs; the defaults are a plain one to train from scratch."""

    class_token: bool = False
    registers: int = 0
    """Further tokens that belong to no patch."""
    prefix_positions: bool = False
    """Whether class and register tokens have position embeddings too."""
    patch_bias: bool = True
    """A bias of the patch embedding."""
    norm_pre: bool = False
    """A norm before the first block, as CLIP has."""
    layer_scale: float | None = None
    """Start of a learned factor per channel on each branch, as DINOv2 has."""
    ratio: float = 4
    """Hidden width of the MLPs, in units of the width."""
    activation: Activation = "gelu"
    eps: float = 1e-6
    """Of the norms."""

    @property
    def prefix(self) -> int:
        """Tokens in front of the patches."""
        return self.class_token + self.registers


PLAIN = ViTVariant()


class ViT(nn.Module):
    """Images [B, 3, image_size, image_size] → patch tokens [B, (image_size / patch)², width], row by row, normed.

    Args:
        image_size: height and width of an image; a multiple of ``patch``.
        width: width of a token.
        patch: pixels of a patch along a side.
        layers: Transformer blocks.
        heads: attention heads; a divisor of ``width``.
        variant: tokens, norms and activation.
        checkpoint: recompute each block in the backward pass; memory then holds one block's activations.
    """

    def __init__(
        self,
        image_size: int,
        width: int = 384,
        patch: int = 16,
        layers: int = 12,
        heads: int = 6,
        variant: ViTVariant = PLAIN,
        *,
        checkpoint: bool = False,
    ) -> None:
        super().__init__()
        if layers < 1:
            raise ValueError(f"ViT: layers is {layers}; expected at least 1 block")
        grid = checked_grid(image_size, patch)
        self.image_size, self.width, self.variant, self.checkpoint = image_size, width, variant, checkpoint
        self.downsample = image_size // grid
        self.normalise: nn.Module = nn.Identity()  # weights trained on other pixels put theirs here
        self.patch_embed = PatchEmbed(width, patch, variant.patch_bias)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width)) if variant.class_token else None
        self.reg_token = nn.Parameter(torch.zeros(1, variant.registers, width)) if variant.registers else None
        self.pos_embed = nn.Parameter(torch.zeros(1, grid**2 + variant.prefix * variant.prefix_positions, width))
        self.norm_pre = nn.LayerNorm(width, variant.eps) if variant.norm_pre else nn.Identity()
        self.blocks = nn.ModuleList(
            TransformerBlock(
                width,
                heads,
                variant.ratio,
                activation=variant.activation,
                eps=variant.eps,
                layer_scale=variant.layer_scale,
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width, variant.eps)
        self._start()

    def _start(self) -> None:
        """Normal numbers of deviation 0.02 for weights, positions and tokens, as is usual for ViTs; biases zero."""
        for parameter in (self.pos_embed, self.cls_token, self.reg_token):
            if parameter is not None:
                nn.init.trunc_normal_(parameter, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> Tensor:
        x = self.norm_pre(self.embed(images))
        for block in self.blocks:
            # Blocks draw no random numbers: there is no generator to rewind.
            x = recomputed(block, x, use_reentrant=False, preserve_rng_state=False) if self.checkpoint else block(x)
        tokens: Tensor = self.norm(x[:, self.variant.prefix :])
        return tokens

    def embed(self, images: Tensor) -> Tensor:
        """Tokens before the first block, [B, prefix + patches, width]; each patch by itself."""
        if images.shape[1:] != (3, self.image_size, self.image_size):
            raise ValueError(
                f"ViT: images have shape {list(images.shape)}; expected [B, 3, {self.image_size}, {self.image_size}]: "
                "resize them or build the ViT for their size"
            )
        patches = self.patch_embed(self.normalise(images))
        prefix = [token.expand(len(images), -1, -1) for token in (self.cls_token, self.reg_token) if token is not None]
        if self.variant.prefix_positions:
            return torch.cat([*prefix, patches], 1) + self.pos_embed
        return torch.cat([*prefix, patches + self.pos_embed], 1)


class Normalise(nn.Module):
    """Images in [−1, 1] → (x − mean) / std of their pixels in [0, 1], per colour. The state_dict does not hold them."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        centre, spread = (torch.tensor(x).view(3, 1, 1) for x in (mean, std))
        self.register_buffer("scale", 0.5 / spread, persistent=False)
        self.register_buffer("shift", (0.5 - centre) / spread, persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        return images * self.get_buffer("scale") + self.get_buffer("shift")


class PatchEmbed(nn.Module):
    """Images [B, 3, H, W] → one token per patch [B, N, width]."""

    def __init__(self, width: int, patch: int, bias: bool) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, width, patch, stride=patch, bias=bias)

    def forward(self, images: Tensor) -> Tensor:
        tokens: Tensor = self.proj(images).flatten(2).transpose(1, 2)
        return tokens


def checked_grid(image_size: int, patch: int) -> int:
    """Patches along a side."""
    if patch < 1 or image_size < patch or image_size % patch:
        below = image_size // patch * patch if patch > 0 else 0
        nearest = f": {below} or {below + patch} would do" if below else ""
        raise ValueError(
            f"ViT: image_size {image_size} is not a multiple of the patch, {patch} pixels; resize the images{nearest}"
        )
    return image_size // patch
