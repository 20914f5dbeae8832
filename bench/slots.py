"""The suite `slots`: slot attention in both directions, at the shapes of object-centric models.

A suite is a file like this: a function that lists the cases for a device, and `run`, which the command
`cgf bench slots` calls. To add one, write ``bench/ops/<op>.py`` with a function that returns a `Case` (inputs,
oracle, us, peers), list its shapes in such a file, and add the file's name to `Bench.suite` in ``compgen_fast/cli.py``.
Gate, memory, timing, CSV, table and chart come with it.
"""

import torch

from compgen_fast.bench.harness import Case
from compgen_fast.bench.ops import slot_competition, slot_cross_attention
from compgen_fast.bench.ops.common import Shape
from compgen_fast.bench.suite import run_suite

CROSS_ATTENTION = (
    Shape(B=4, N=4096, H=4, S=7, D=32),  # 64 × 64 pixels, a small decoder
    Shape(B=1, N=16384, H=12, S=7, D=43),  # 128 × 128 pixels, and a head width that is no power of two
    Shape(B=16, N=1024, H=8, S=11, D=64),  # features of a ViT, many images
)
COMPETITION = (
    Shape(B=8, N=4096, H=1, S=7, D=64),  # Slot Attention on CLEVR: one head, 7 slots
    Shape(B=8, N=1024, H=1, S=11, D=128),  # the same on ViT features, more slots
)


def cases(device: str) -> list[Case]:
    dtypes = (torch.float32, torch.bfloat16) if device == "cuda" else (torch.float32,)
    return [
        make(shape, dtype, device)
        for make, shapes in ((slot_cross_attention.case, CROSS_ATTENTION), (slot_competition.case, COMPETITION))
        for shape in shapes
        for dtype in dtypes
    ]


def run(quick: bool = False, threads: int = 1, json: str | None = None, device: str = "cpu") -> int:
    return run_suite(cases, quick, threads, json, device)
