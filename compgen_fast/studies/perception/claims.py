"""What the study claims before it runs, and whether its numbers bear it out. A claim is of objects read, over seeds.

The thresholds were written before any recorded run had a result, and none was moved afterwards. The unconstrained
decoder differs from the penalised ones in its architecture too, so the last claim holds them against the same
architecture without penalty.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from compgen_fast.report.perception_numbers import Row, encoder_of, percent, recovered, rows

LOWEST_SEEN = 0.97
FALL = 0.25
RECOVERED = 0.8
INVERSION = "replay+search"
CONSTRAINED = ("attention", "hessian")


def claims(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """For results.json: what is claimed, whether it holds (None where it was not tried), and the evidence."""
    among = [row for row in rows(results) if row.inference != "newton"]
    made = [_all_seen(among), _encoders_fall(among)]
    best = max((row for row in among if row.decoder in CONSTRAINED and row.inference == INVERSION),
               key=lambda row: fmean(row.unseen), default=None)  # fmt: skip
    if best is not None:
        made += [
            _wins_back(best, among),
            _beats(best, among, "unconstrained", "it reads more than the unconstrained decoder"),
            _search_adds(best, among),
            _beats(best, among, "apart", "its penalty counts: it reads more than slots painted apart without one"),
        ]
    return made


def _claim(text: str, holds: bool | None, evidence: str) -> dict[str, Any]:
    return {"claim": text, "holds": holds, "evidence": evidence}


def _all_seen(among: Sequence[Row]) -> dict[str, Any]:
    groups = {"lowest": among, "of the penalised ones": [row for row in among if row.decoder in CONSTRAINED]}
    lowest = {name: min(rows, key=lambda row: fmean(row.seen)) for name, rows in groups.items() if rows}
    return _claim(
        f"every method reads at least {percent(LOWEST_SEEN)} of objects in seen combinations",
        fmean(lowest["lowest"].seen) >= LOWEST_SEEN,
        "; ".join(f"{name}: {100 * fmean(row.seen):.1f} % ({row.name})" for name, row in lowest.items()),
    )


def _encoders_fall(among: Sequence[Row]) -> dict[str, Any]:
    encoders = [row for row in among if row.inference == "encoder"]
    least = min(encoders, key=lambda row: fmean(row.seen) - fmean(row.unseen))
    return _claim(
        f"encoders alone fall by at least {100 * FALL:.0f} points in unseen combinations",
        fmean(least.seen) - fmean(least.unseen) >= FALL,
        f"least fall: {least.name}, {100 * fmean(least.seen):.1f} → {100 * fmean(least.unseen):.1f} %",
    )


def _wins_back(best: Row, among: Sequence[Row]) -> dict[str, Any]:
    share = recovered(best, among)
    return _claim(
        f"a penalised decoder with replay and search wins back at least {percent(RECOVERED)} of the fall",
        None if share is None else share >= RECOVERED,
        f"{best.name}: {'no fall' if share is None else percent(share)}, {_spread(best)}",
    )


def _beats(best: Row, among: Sequence[Row], decoder: str, text: str) -> dict[str, Any]:
    """By more than the larger of the two spreads over seeds, with the same inversion."""
    text = f"{text} with the same inversion, by more than the spread"
    other = next((row for row in among if row.decoder == decoder and row.inference == INVERSION), None)
    if other is None:
        return _claim(text, None, "not tried")
    margin = fmean(best.unseen) - fmean(other.unseen)
    spread = max(_deviation(best.unseen), _deviation(other.unseen))
    return _claim(text, margin > spread, f"{_spread(best)} against {_spread(other)}")


def _search_adds(best: Row, among: Sequence[Row]) -> dict[str, Any]:
    encoder = encoder_of(best, among)
    alone = next(row for row in among if row.decoder == best.decoder and row.inference == "replay")
    assert encoder is not None
    return _claim(
        "search adds to replay",
        fmean(best.unseen) > fmean(alone.unseen),
        f"replay {_spread(alone)}, with search {_spread(best)}",
    )


def _deviation(values: Sequence[float]) -> float:
    return stdev(values) if len(values) > 1 else 0.0


def _spread(row: Row) -> str:
    deviation = f" ± {100 * _deviation(row.unseen):.1f}" if len(row.unseen) > 1 else ""
    return f"{100 * fmean(row.unseen):.1f}{deviation} %"
