"""The suite `generate`: a training step of each generator beside the same step written straightforwardly, once on
latents that are there already, and once from images, which a tokenizer encodes in every step.
"""

from dataclasses import replace
from typing import Any

from compgen_fast.bench.generate_peers import StepSize, case
from compgen_fast.bench.harness import Case
from compgen_fast.bench.suite import run_suite
from compgen_fast.generate.config import (
    DiTConfig,
    GIVTConfig,
    JepaConfig,
    MARConfig,
    MaskGITConfig,
    ObjectiveConfig,
    TrunkConfig,
)

OBJECTIVES: tuple[tuple[str, ObjectiveConfig], ...] = (
    ("DiT", DiTConfig()),
    ("MaskGIT", MaskGITConfig()),
    ("MaskGIT", MaskGITConfig(jepa=JepaConfig(layers=(3, 5)))),
    ("MAR", MARConfig()),
    ("masked GIVT", GIVTConfig()),
    ("causal GIVT", GIVTConfig(order="causal")),
)
SHAPES: tuple[tuple[dict[str, Any], int], ...] = (
    ({"side": 4, "trunk": TrunkConfig(width=64, layers=12, heads=4)}, 64),  # the generation study's
    ({"side": 8, "trunk": TrunkConfig(width=128, layers=6, heads=4)}, 16),  # 64 px and a tokenizer of 8 px to a token
    ({"side": 16, "trunk": TrunkConfig(width=128, layers=6, heads=4)}, 4),  # four times as many tokens
)


def cases(device: str) -> list[Case]:
    return [
        case(StepSize(name, replace(config, **shape), batch), device)
        for shape, batch in SHAPES
        for name, config in OBJECTIVES
    ]


def run(quick: bool = False, threads: int = 1, json: str | None = None, device: str = "cpu") -> int:
    return run_suite(cases, quick, threads, json, device)
