"""The suite `jets`: a training step with the interaction penalty, at the reference decoder's sizes.

How the cost grows is a ratio too: along K against the same step on two slots, along N against a plain step on as many
pixels. The first should stay near 1, the second where it is.
"""

from dataclasses import replace

from compgen_fast.bench.harness import Case
from compgen_fast.bench.ops.interaction_penalty import Size, case, pixels_case, slots_case, subset_case
from compgen_fast.bench.suite import run_suite

TINY = Size(B=1, side=4, K=3, H=2, D=8, layers=1)
SMALL = Size(B=8, side=16, K=6, H=4, D=32, layers=3)
REFERENCE = Size(B=2, side=64, K=7, H=12, D=43, layers=2)  # 64 × 64 pixels of the paper's decoder


def quick_cases(device: str) -> list[Case]:
    """Without the reference size and without torch.compile, which take minutes."""
    return [case(TINY, device, "hessian"), case(SMALL, device), subset_case(SMALL, device)]


def cases(device: str) -> list[Case]:
    return [
        case(TINY, device, "hessian"),
        case(SMALL, device, "compiled"),
        case(REFERENCE, device, "compiled"),
        subset_case(REFERENCE, device),
        *(slots_case(replace(SMALL, K=K), device) for K in (4, 8, 16)),
        *(pixels_case(replace(SMALL, B=2, side=side), device) for side in (8, 16, 32, 64)),
    ]


def run(quick: bool = False, threads: int = 1, json: str | None = None, device: str = "cpu") -> int:
    return run_suite(quick_cases if quick else cases, quick, threads, json, device)
