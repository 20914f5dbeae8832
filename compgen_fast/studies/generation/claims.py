"""What was claimed beforehand, and whether it holds. Shares of images with all three factors right, at the last step
where nothing else is said.
"""

from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any

from compgen_fast.report.generation_numbers import LEVEL_2, OBJECTIVES, SEEN, Run, best, chosen, last, level, spread
from compgen_fast.studies.generation.plan import PAPERS_LAYERS

CONTINUOUS = ("dit-vae", "dit-vq", "mar", "givt")
LEAST_SEEN = 0.95
Claim = tuple[str, bool, str]


def claims(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Those that the runs can speak to: the claim, whether it holds, and the numbers that say so."""
    found = [*_all_reach(runs), *_continuous(runs), *_conditioning(runs), *_jepa(runs), *_circuits(runs)]
    return [{"claim": claim, "holds": holds, "evidence": evidence} for claim, holds, evidence in found]


def _all_reach(runs: Sequence[Run]) -> list[Claim]:
    shares = {
        name: fmean(level(last(run), SEEN) for run in chosen(runs, name)) for name in OBJECTIVES if chosen(runs, name)
    }
    if not shares:
        return []
    told = ", ".join(f"{OBJECTIVES[name]} {share:.1%}" for name, share in shares.items())
    return [("every generator makes at least 95 % of seen compositions", min(shares.values()) >= LEAST_SEEN, told)]


def _continuous(runs: Sequence[Run]) -> list[Claim]:
    discrete = _level_2(chosen(runs, "maskgit"))
    found = []
    for name in CONTINUOUS:
        ours = _level_2(chosen(runs, name))
        if ours and discrete:
            claim = f"{OBJECTIVES[name]} beats MaskGIT on level 2 by more than the spread"
            found.append((claim, _beats(ours, discrete), f"{spread(ours)} against {spread(discrete)}"))
    return found


def _conditioning(runs: Sequence[Run]) -> list[Claim]:
    full, both = (_level_2(chosen(runs, "dit-vae", told)) for told in ("full", "both"))
    if not full or not both:
        return []
    claim = "DiT that is told everything beats one with quantised factors and concept dropout on level 2"
    return [(claim, _beats(full, both), f"{spread(full)} against {spread(both)}")]


def _jepa(runs: Sequence[Run]) -> list[Claim]:
    without, with_jepa = chosen(runs, "maskgit"), chosen(runs, "maskgit", jepa=PAPERS_LAYERS)
    if not without or not with_jepa:
        return []
    plain, ours = ([level(best(run), LEVEL_2) for run in some] for some in (without, with_jepa))
    claim = "MaskGIT with JEPA beats MaskGIT on level 2, each at the step that is best on level 1"
    return [(claim, fmean(ours) > fmean(plain), f"{spread(ours)} against {spread(plain)}")]


def _circuits(runs: Sequence[Run]) -> list[Claim]:
    without, with_jepa = (
        [run["circuits"] for run in chosen(runs, "maskgit", jepa=layers) if "circuits" in run]
        for layers in ((), PAPERS_LAYERS)
    )
    if not without or not with_jepa:
        return []
    found = []
    for claim, measure in (
        ("circuits of factors overlap less with JEPA", lambda each: each["overlap"]),
        ("of the units that matter, fewer matter to several factors with JEPA", _several),
    ):
        plain, ours = (fmean(map(measure, some)) for some in (without, with_jepa))
        found.append((claim, ours < plain, f"{ours:.2f} against {plain:.2f}"))
    return found


def _several(circuits: dict[str, Any]) -> float:
    """The share of units that matter to several factors, of those that matter."""
    return float(sum(circuits["polysemantic"]) / max(1, sum(circuits["mattering"])))


def _level_2(runs: Sequence[Run]) -> list[float]:
    return [level(last(run), LEVEL_2) for run in runs]


def _beats(ours: Sequence[float], theirs: Sequence[float]) -> bool:
    """By more than the spread: the means differ by more than both standard deviations together."""
    return fmean(ours) - fmean(theirs) > sum(stdev(some) for some in (ours, theirs) if len(some) > 1)
