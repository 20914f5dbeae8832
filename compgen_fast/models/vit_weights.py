"""A ViT filled from a local file of weights with timm's names: DINO, DINOv2, CLIP, SigLIP 2, I-JEPA, plain ViTs.

Sizes, tokens and norms are read off the tensors. What tensors do not tell — heads, activation, how pixels were
normalised — follows the family, with help from the file's name and from the hub's config.json where it lies beside the
file. The ViT then takes images in [−1, 1] and normalises them itself. What it is not for: downloads, gated MLPs, rotary
positions, other naming schemes.
"""

import json
import pickle
import re
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isqrt
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import interpolate

from compgen_fast.models.transformer import Activation
from compgen_fast.models.vit import Normalise, ViT, ViTVariant

PATCHES = "patch_embed.proj.weight"
WRAPPERS = ("state_dict", "model", "encoder")
"""Where training checkpoints keep the weights; I-JEPA's keep them in `encoder`."""
UNUSED = ("head.", "head_dist.", "attn_pool.", "fc_norm.", "pre_logits.", "mask_token")
"""Parts for classification and for pretraining, which an encoder has no use for."""
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
HALVES = ((0.5,) * 3, (0.5,) * 3)


@dataclass(frozen=True)
class WeightsInfo:
    """What a file of weights holds, or implies."""

    image_size: int
    width: int
    patch: int
    layers: int
    heads: int
    variant: ViTVariant
    mean: tuple[float, ...]
    std: tuple[float, ...]
    """Of pixels in [0, 1], as the ViT was trained with."""


def load_vit(path: str | Path, image_size: int, *, heads: int | None = None, checkpoint: bool = False) -> ViT:
    """The ViT in the file ``path`` (.safetensors, .pt, .pth), for images [B, 3, image_size, image_size] in [−1, 1].

    Args:
        path: tensors with timm's names. A config.json beside it is read too.
        image_size: positions are interpolated where the ViT was trained on another size.
        heads: when None, 64 numbers per head and at most 16 heads, as in the published ViTs of these families.
        checkpoint: recompute each block in the backward pass.
    """
    path = Path(path)
    tensors = read_tensors(path)
    info = describe(path, tensors, heads)
    with torch.device("meta"):  # no time spent on random numbers that the file replaces
        vit = ViT(image_size, info.width, info.patch, info.layers, info.heads, info.variant, checkpoint=checkpoint)
    used = {name: x for name, x in tensors.items() if not name.startswith(UNUSED)}
    weights = {name: x.to(torch.get_default_device(), torch.float32, copy=True) for name, x in used.items()}
    weights["pos_embed"] = _resized(weights["pos_embed"], vit.pos_embed.shape[1], info)
    _refuse_misfits(path, weights, vit.state_dict())
    vit.load_state_dict(weights, assign=True)
    if (info.mean, info.std) != HALVES:
        vit.normalise = Normalise(info.mean, info.std)
    return vit


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors in a file by timm's names, wrappers and prefixes of training scripts taken off."""
    if not path.is_file():
        raise ValueError(
            f"{path}: there is no such file; expected a local .safetensors, .pt or .pth file of ViT weights"
        )
    try:
        if path.suffix == ".safetensors":
            found: Any = load_file(path)
        else:
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except (SafetensorError, pickle.UnpicklingError, EOFError, RuntimeError) as error:
        raise ValueError(
            f"{path}: cannot be read as a file of tensors ({_first_line(error)}); save a state_dict"
        ) from error
    found = _unwrapped(found)
    if not isinstance(found, dict):
        raise ValueError(f"{path}: holds a {type(found).__name__}; expected a state_dict, tensors by name")
    tensors = {name.removeprefix("module."): x for name, x in found.items() if isinstance(x, Tensor)}
    for name in (PATCHES, "pos_embed", "blocks.0.mlp.fc1.weight"):
        if name not in tensors:
            raise ValueError(
                f"{path}: has no {name!r} among its {len(tensors)} tensors; expected the names of timm's "
                "vision_transformer (timm.create_model(…, pretrained=True).state_dict() has them)"
            )
    return tensors


def _unwrapped(found: Any) -> Any:
    inside = [found[key] for key in WRAPPERS if isinstance(found, dict) and key in found]
    return _unwrapped(inside[0]) if inside else found


def describe(path: Path, tensors: Mapping[str, Tensor], heads: int | None = None) -> WeightsInfo:
    """Sizes and family of the ViT with these tensors."""
    said = _said_beside(path)
    name = f"{path.name} {said.get('architecture', '')} {said.get('tag', '')}".lower()
    siglip = "siglip" in name or any(key.startswith("attn_pool.") for key in tensors)
    clip = "norm_pre.weight" in tensors
    width, *sizes = tensors[PATCHES].shape
    patch = sizes[-1]
    if sizes != [3, patch, patch]:
        raise ValueError(f"{path}: its patches have sizes {sizes}; expected 3 colours of squares, [3, p, p]")
    registers = tensors["reg_token"].shape[1] if "reg_token" in tensors else 0
    prefix = ("cls_token" in tensors) + registers
    grid, prefix_positions = _grid(path, tensors["pos_embed"], prefix)
    mean, std = HALVES if siglip else CLIP if clip else IMAGENET
    return WeightsInfo(
        image_size=grid * patch,
        width=width,
        patch=patch,
        layers=1 + max(int(found[1]) for key in tensors if (found := re.match(r"blocks\.(\d+)\.", key))),
        heads=heads or _heads(path, width),
        variant=ViTVariant(
            class_token="cls_token" in tensors,
            registers=registers,
            prefix_positions=prefix_positions,
            patch_bias="patch_embed.proj.bias" in tensors,
            norm_pre=clip,
            layer_scale=1.0 if "blocks.0.ls1.gamma" in tensors else None,
            ratio=len(tensors["blocks.0.mlp.fc1.weight"]) / width,
            activation=_activation(name, siglip, clip),
            eps=1e-5 if clip else 1e-6,
        ),
        mean=tuple(said.get("mean", mean)),
        std=tuple(said.get("std", std)),
    )


def _said_beside(path: Path) -> dict[str, Any]:
    """Architecture, training set (``tag``) and pixel statistics from the hub's config.json, if it is there."""
    beside = path.with_name("config.json")
    if not beside.is_file():
        return {}
    said = json.loads(beside.read_text())
    return said | said.get("pretrained_cfg", {}) if isinstance(said, dict) else {}


def _activation(name: str, siglip: bool, clip: bool) -> Activation:
    """SigLIP was trained in JAX, whose GELU is the one by tanh; OpenAI's CLIP with the quick one, OpenCLIP not."""
    if siglip:
        return "gelu_tanh"
    return "quick_gelu" if clip and ("quickgelu" in name or "openai" in name) else "gelu"


def _heads(path: Path, width: int) -> int:
    """64 numbers per head, and 16 heads from there on: ViT-H and wider have wider heads."""
    if width < 1024 and width % 64:
        raise ValueError(
            f"{path}: its tokens are {width} wide, which does not tell the heads; give load_vit(…, heads=…)"
        )
    return min(width // 64, 16)


def _grid(path: Path, positions: Tensor, prefix: int) -> tuple[int, bool]:
    """Patches along a side, and whether the tokens before the patches have positions too."""
    count = positions.shape[1]
    for tokens, prefix_positions in ((count, False), (count - prefix, True)):
        if tokens > 0 and isqrt(tokens) ** 2 == tokens:
            return isqrt(tokens), prefix_positions and prefix > 0
    raise ValueError(
        f"{path}: has {count} position embeddings and {prefix} class and register tokens; expected a square number of "
        "patches: ViTs for oblong images cannot be loaded"
    )


def _resized(positions: Tensor, count: int, info: WeightsInfo) -> Tensor:
    """Positions [1, T, width] interpolated to ``count`` tokens; those of class and registers stay."""
    prefix = info.variant.prefix if info.variant.prefix_positions else 0
    old, new = info.image_size // info.patch, isqrt(count - prefix)
    if old == new:
        return positions
    grid = positions[:, prefix:].transpose(1, 2).unflatten(-1, (old, old))
    grid = interpolate(grid, (new, new), mode="bicubic", antialias=True)
    return torch.cat([positions[:, :prefix], grid.flatten(2).transpose(1, 2)], 1)


def _refuse_misfits(path: Path, given: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    missing = [name for name in wanted if name not in given]
    left_over = [name for name in given if name not in wanted]
    other = [
        f"{name} {list(given[name].shape)} for {list(wanted[name].shape)}"
        for name in wanted
        if name in given and given[name].shape != wanted[name].shape
    ]
    parts = (("missing", missing), ("left over", left_over), ("of another shape", other))
    problems = "; ".join(f"{what}: {_some(names)}" for what, names in parts if names)
    if problems:
        raise ValueError(f"{path}: does not fit a ViT of its sizes. {problems}. Expected one of timm's plain ViTs")


def _some(names: Iterable[str], most: int = 4) -> str:
    names = list(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(". ")
