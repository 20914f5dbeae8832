"""Tiny generators of each kind, and latents and factors for them."""

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from compgen_fast.generate.build import build
from compgen_fast.generate.config import (
    ConditioningConfig,
    DiTConfig,
    GIVTConfig,
    JepaConfig,
    MARConfig,
    MaskGITConfig,
    ObjectiveConfig,
    TrunkConfig,
)
from compgen_fast.generate.generator import Generator
from compgen_fast.worlds.source import Factor

SIDE, TOKENS, CHANNELS, CODES, WIDTH, LAYERS, HEADS = 3, 9, 2, 11, 16, 3, 2
FACTORS = (Factor("shape", ("disc", "triangle", "ring")), Factor("x", low=-2.0, high=2.0), Factor("size"))
TRUNK = TrunkConfig(WIDTH, LAYERS, HEADS)
TOLD = ConditioningConfig(octaves=2, hidden=8)
JEPA = JepaConfig(layers=(1, 3), rate_steps=10)
KINDS: dict[str, ObjectiveConfig] = {
    "dit": DiTConfig(SIDE, TRUNK, TOLD, channels=CHANNELS),
    "maskgit": MaskGITConfig(SIDE, TRUNK, TOLD, codes=CODES),
    "mar": MARConfig(SIDE, TRUNK, TOLD, channels=CHANNELS, head_width=16, head_layers=2),
    "masked givt": GIVTConfig(SIDE, TRUNK, TOLD, channels=CHANNELS, components=3),
    "causal givt": GIVTConfig(SIDE, TRUNK, TOLD, channels=CHANNELS, components=3, order="causal"),
}
MASKED = ("maskgit", "mar", "masked givt")
WITH_JEPA = ("dit", *MASKED)


def generator(kind: str, *, awake: bool = True, **changes: Any) -> Any:
    """One in double precision; ``awake``: with weights everywhere, where a new one has zeros."""
    made: Generator = build(cast(ObjectiveConfig, replace(KINDS[kind], **changes)), FACTORS)
    return (woken(made) if awake else made).double()


def woken(made: Generator) -> Generator:
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return made


def latents(kind: str, batch: int = 4) -> Tensor:
    if kind == "maskgit":
        return torch.randint(0, CODES, (batch, TOKENS))
    return torch.randn(batch, TOKENS, CHANNELS, dtype=torch.float64)


def labels(batch: int = 4) -> dict[str, Tensor]:
    return {"shape": torch.arange(batch) % 3, "x": 4 * torch.rand(batch) - 2, "size": torch.rand(batch)}


def rows(of: dict[str, Tensor], first: int, last: int) -> dict[str, Tensor]:
    return {name: value[first:last] for name, value in of.items()}
