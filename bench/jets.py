"""The suite `jets`: a training step with the interaction penalty, at the reference decoder's sizes.

How the cost grows is read off our own times: along K it should stay flat, along N it should be a line.
"""

from compgen_fast.bench.harness import Case
from compgen_fast.bench.ops.interaction_penalty import Size, case
from compgen_fast.bench.suite import run_suite

SMALL = Size(B=8, side=16, K=6, H=4, D=32, layers=3)
REFERENCE = Size(B=2, side=64, K=7, H=12, D=43, layers=2)  # 64 × 64 pixels of the paper's decoder
TINY = Size(B=1, side=4, K=3, H=2, D=8, layers=1)


def cases(device: str) -> list[Case]:
    return [
        case(TINY, full_hessian=True),
        case(SMALL),
        case(REFERENCE),
        case(REFERENCE, subset=True),
    ]


def run(quick: bool = False, threads: int = 1, json: str | None = None, device: str = "cpu") -> int:
    return run_suite(cases, quick, threads, json, device)
