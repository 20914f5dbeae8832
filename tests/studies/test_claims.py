"""What the study claims, judged on invented numbers."""

from typing import Any

import pytest

from compgen_fast.studies.perception.claims import claims
from tests.report.perception_results import entry


def results(*entries: dict[str, Any]) -> dict[str, Any]:
    return {"methods": list(entries), "chance": {"object_1": 0.05, "background": 0.1}}


def whole(
    best: tuple[float, ...] = (0.9, 0.92), free: tuple[float, ...] = (0.3, 0.4), seen: float = 0.98
) -> dict[str, Any]:
    made = []
    for seed, (high, low) in enumerate(zip(best, free, strict=True)):
        made += [
            entry("supervised", None, "encoder", seed, 0.05),
            entry("vae", "attention", "encoder", seed, 0.1),
            entry("vae", "attention", "replay", seed, high - 0.05),
            entry("vae", "attention", "replay+search", seed, high, seen),
            entry("vae", "unconstrained", "replay+search", seed, low),
            entry("vae", "apart", "replay+search", seed, low),
        ]
    return results(*made)


def verdicts(numbers: dict[str, Any]) -> list[bool | None]:
    return [claim["holds"] for claim in claims(numbers)]


def test_all_claims_hold_where_all_is_as_hoped():
    assert verdicts(whole()) == [True] * 6


@pytest.mark.parametrize(
    ("numbers", "broken"),
    [
        (whole(seen=0.9), 0),
        (whole(best=(0.6, 0.62)), 2),
        (whole(free=(0.9, 0.94)), 3),
        (whole(best=(0.95, 0.85), free=(0.88, 0.84)), 3),
    ],
    ids=["one method fails ID", "too little won back", "no better than unconstrained", "margin within the spread"],
)
def test_a_claim_that_fails_is_told(numbers, broken):
    penalty = 5  # what is no better than the one control is no better than the other: they have the same numbers here
    failed = [place for place, holds in enumerate(verdicts(numbers)) if not holds]
    assert failed == ([broken, penalty] if broken == 3 else [broken])


def test_a_penalty_that_adds_nothing_to_the_architecture_is_told():
    numbers = whole()
    for row in numbers["methods"]:
        if row["decoder"] == "apart":
            row["accuracy"]["object_1"]["ood"] = 0.95
    assert verdicts(numbers) == [True] * 5 + [False]


def test_an_encoder_that_does_not_fall_is_told():
    numbers = whole()
    numbers["methods"].append(entry("supervised_longer", None, "encoder", 0, 0.9))
    assert verdicts(numbers)[1] is False


def test_search_that_takes_away_from_replay_is_told():
    numbers = whole()
    for row in numbers["methods"]:
        if row["inference"] == "replay":
            row["accuracy"]["object_1"]["ood"] = 0.99
    assert verdicts(numbers)[4] is False


def test_a_control_that_was_not_run_is_neither_right_nor_wrong():
    numbers = whole()
    numbers["methods"] = [row for row in numbers["methods"] if row["decoder"] != "unconstrained"]
    assert verdicts(numbers)[3] is None


def test_newton_is_not_judged_among_the_methods():
    numbers = whole()
    numbers["methods"].append(entry("vae", "attention", "newton", 0, 0.2, 0.5))
    assert verdicts(numbers)[0] is True
