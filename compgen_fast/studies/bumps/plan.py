"""The jobs of each scale.

Lengths, rates and decays were tried at N = 20, 24 and 44 with seeds from 100 up. Not all of it is blind: first trials
of naive decoders and of stripes were at N = 28 with seeds 0 to 2, and white was added to Plan B after its stripes alone
had failed at N = 48 on the study's own seeds. docs/bumps.md tells it.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from compgen_fast.studies.bumps.failure import FewShot, Naive
from compgen_fast.studies.bumps.fitting import Fit
from compgen_fast.studies.bumps.plan_a import Control, TokenRun
from compgen_fast.studies.bumps.plan_b import Threshold, Way
from compgen_fast.worlds.bumps import Encoding

ScaleName = Literal["quick", "cpu"]
PartName = Literal["all", "failure", "geometry", "plan-a", "plan-b"]
Job = Naive | FewShot | TokenRun | Control | Threshold


@dataclass(frozen=True)
class Scale:
    """How much of everything."""

    seeds: int
    encodings: tuple[Encoding, ...]
    mlps: tuple[int, ...]
    cnns: tuple[int, ...]
    shots: tuple[int, ...]
    sizes: tuple[int, ...]
    shortened: int
    """What all trainings are divided by."""


SCALES = {
    "quick": Scale(1, ("bump",), (3,), (2, 4), (0, 10, 100), (24,), 4),
    "cpu": Scale(
        3, get_args(Encoding), (3, 5, 7), (2, 4, 6, 8, 10), (0, 10, 50, 100), (24, 28, 32, 40, 48), 1
    ),
}  # fmt: skip


def plan(scale: ScaleName, part: PartName) -> list[Job]:
    """The longest first, so that no core is left with one at the end. The geometry is that of the failing decoders."""
    chosen = SCALES[scale]
    jobs = [*_plan_b(chosen), *_plan_a(chosen), *_failure(chosen)]
    wanted = "failure" if part == "geometry" else part
    return [job for job in jobs if wanted in ("all", job.part)]


def _failure(scale: Scale) -> list[Job]:
    seeds = tuple(range(scale.seeds))
    dense, convolved = Fit(6000 // scale.shortened, rate=1e-3), Fit(4000 // scale.shortened)
    return [
        *(FewShot("cnn", depth, "bump", scale.shots, seeds, convolved) for depth in scale.cnns[1:2]),
        *(FewShot("mlp", depth, "bump", scale.shots, seeds, dense) for depth in scale.mlps[:1]),
        *(Naive("cnn", depth, each, seeds, convolved) for depth in reversed(scale.cnns) for each in scale.encodings),
        *(Naive("mlp", depth, each, seeds, dense) for depth in reversed(scale.mlps) for each in scale.encodings),
    ]


def _plan_a(scale: Scale) -> list[Job]:
    seeds = tuple(range(scale.seeds))
    # After 4,000 steps tokens still learn: their OOD error is 11 to 23 times lower with both regularisers than without,
    # after 8,000 (seed 100) 190 times.
    tokens, fit = Fit(8000 // scale.shortened, batch=16), Fit(4000 // scale.shortened, batch=16)
    return [
        *(TokenRun(seed, tokens) for seed in seeds),
        *(Control(target, seeds, fit) for target in ("bump", "stripes", "log")),
    ]


def _plan_b(scale: Scale) -> list[Job]:
    seeds = tuple(range(scale.seeds))
    fit = Fit(3000 // scale.shortened, batch=8, decay=1.0)
    ways: tuple[Way, ...] = ("anywhere", "stripes", "outside", "no white")
    return [Threshold(size, way, seeds, fit) for size in sorted(scale.sizes, reverse=True) for way in ways]
