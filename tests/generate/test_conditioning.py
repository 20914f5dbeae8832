"""Conditions: what is told, how exactly, and what is left out."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from compgen_fast.draws import Draws
from compgen_fast.generate.conditioning import Conditioning
from compgen_fast.generate.config import ConditioningConfig
from tests.generate.cases import FACTORS, labels

CONFIG = ConditioningConfig()


def told(**changes: object) -> Conditioning:
    return Conditioning(replace(CONFIG, **changes), FACTORS, 16)  # type: ignore[arg-type]


def changed(y: dict[str, Tensor], **values: float) -> dict[str, Tensor]:
    return y | {name: torch.full_like(y[name], value) for name, value in values.items()}


@pytest.mark.parametrize("kind", ["full", "dropout"])
def test_numbers_are_told_exactly(kind: str) -> None:
    condition, y = told(kind=kind), labels()
    assert not torch.equal(condition(changed(y, x=1.0)), condition(changed(y, x=1.1)))


@pytest.mark.parametrize("kind", ["quantised", "both"])
def test_bins_tell_only_on_which_side_a_number_lies(kind: str) -> None:
    condition, y = told(kind=kind), labels()
    low, lower, high, highest = (condition(changed(y, x=x)) for x in (-0.1, -2.0, 0.1, 2.0))
    assert torch.equal(low, lower) and torch.equal(high, highest) and not torch.equal(low, high)


def test_more_bins_tell_more() -> None:
    condition, y = told(kind="quantised", bins=4), labels()
    assert len(torch.stack([condition(changed(y, x=x)) for x in (-1.5, -0.5, 0.5, 1.5)]).unique(dim=0)) == 4


@pytest.mark.parametrize("kind", ["full", "quantised"])
def test_what_a_factor_says_does_not_depend_on_the_others(kind: str) -> None:
    condition, y = told(kind=kind), labels()
    effect = [
        condition(changed(y, x=2.0, **others)) - condition(changed(y, x=-2.0, **others))
        for others in ({"shape": 0, "size": 0.0}, {"shape": 2, "size": 1.0})
    ]
    torch.testing.assert_close(*effect)


def test_numbers_alone_and_categories_alone_can_be_told() -> None:
    for names in (("x", "size"), ("shape",), ("x",)):
        assert told(factors=names)(labels()).shape == (4, 16)


def test_factors_that_are_not_told_make_no_difference() -> None:
    condition, y = told(factors=("shape",)), labels()
    assert torch.equal(condition(changed(y, x=1.0)), condition(changed(y, x=-1.0)))


@pytest.mark.parametrize("kind", ["full", "quantised", "dropout", "both"])
def test_how_often_factors_are_left_out(kind: str) -> None:
    condition = told(kind=kind, concept_dropout=0.2, all_dropout=0.1)
    known = condition._known(20_000, Draws.at(0, 0))
    every = (known.sum(1) == 0).double().mean()
    one = 1 - known.mean(0)
    single = 0.2 if kind in ("dropout", "both") else 0.0
    assert torch.allclose(one, torch.tensor(1 - 0.9 * (1 - single)), atol=0.01)
    assert abs(every - (0.1 + 0.9 * single**3)) < 0.01


def test_with_everything_left_out_nothing_is_told() -> None:
    condition, y = told(all_dropout=0.999999), labels()
    torch.testing.assert_close(condition(y, Draws.at(0, 0)), condition.nothing(4))
    assert not torch.allclose(condition(y), condition.nothing(4))


def test_only_the_dropped_concept_is_unknown() -> None:
    condition, y = told(kind="dropout", all_dropout=0.0, concept_dropout=0.5), labels(64)
    known = condition._known(64, Draws.at(0, 0)).bool()
    names = [factor.name for factor in condition.factors]
    found = condition(y, Draws.at(0, 0))
    column = names.index("x")
    assert known[:, column].any() and not known[:, column].all()
    moved = condition(changed(y, x=1.9), Draws.at(0, 0))
    assert torch.equal((found != moved).any(1), known[:, column])


def test_missing_and_mistyped_factors_are_refused() -> None:
    y = labels()
    with pytest.raises(ValueError, match="the factor 'size' is needed; the factors given are shape, x"):
        told()({name: y[name] for name in ("shape", "x")})
    with pytest.raises(ValueError, match=r"'shape' is torch.float32 \[4\]; expected whole numbers"):
        told()(y | {"shape": torch.rand(4)})
    with pytest.raises(ValueError, match="'shape' has values outside 0 to 2"):
        told()(y | {"shape": torch.full((4,), 3)})
    with pytest.raises(ValueError, match="there is no factor colour; the data set has shape, x, size"):
        told(factors=("colour",))
    with pytest.raises(ValueError, match="nothing to tell"):
        Conditioning(CONFIG, (), 16)
