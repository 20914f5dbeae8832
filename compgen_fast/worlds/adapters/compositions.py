"""Three binary factors of any data set with a table, split as Shapes2D is: real data for studies of generation.

Training shows 000, 001, 010 and 100: each factor high, but never two together. Level 1 has two high factors, level 2
all three. CelebA has such factors (``("Male", "Blond_Hair", "Smiling")``); of factors with more values two are chosen,
and samples with others are left out: ``("object0_shape", "cube", "sphere")`` of Kubric, ``("floor_hue", 0.0, 0.5)`` of
Shapes3D.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from compgen_fast.worlds.adapters.columns import Columns
from compgen_fast.worlds.adapters.folder_source import Tabled, check_indices, rows
from compgen_fast.worlds.source import Factor, Samples

Attribute: TypeAlias = str | tuple[str, str, str] | tuple[str, float, float]
"""A factor of two values by name; or a factor, its low and its high value."""

_EVERY = 10
_SHOWN = 8
_CLOSE = 1e-5  # of a number's range: as near as a value must be to the one asked for


@dataclass(frozen=True, eq=False)
class Binary:
    """A ``Source`` of some samples of another, which has only the three factors, each of two values.

    table: by name, int64 [n], 0 for the low value and 1 for the high one.
    """

    name: str
    source: Tabled
    chosen: NDArray[np.int64]
    factors: tuple[Factor, ...]
    table: Columns

    @property
    def slots(self) -> tuple[str, ...]:
        return self.source.slots

    def __len__(self) -> int:
        return len(self.chosen)

    def samples(self, indices: NDArray[np.int64]) -> Samples:
        check_indices(self, indices)
        found = self.source.samples(self.chosen[indices])
        return Samples(found.images, rows(self.table, indices), found.masks)


class Compositions(NamedTuple):
    """Training and validation samples with at most one high factor, all samples with two, all with three."""

    train: Binary
    validation: Binary
    level1: Binary
    level2: Binary


def compositions(source: Tabled, attributes: tuple[Attribute, Attribute, Attribute]) -> Compositions:
    """Split a source by three binary factors. Of each training composition, one sample in ten goes to validation.

    Args:
        source: any source with a table, such as every adapter's and every view.
        attributes: the three, in the order in which a composition such as 011 is written.
    """
    names = [attribute if isinstance(attribute, str) else attribute[0] for attribute in attributes]
    if len(set(names)) != 3:
        raise ValueError(f"compositions: the attributes are {', '.join(names)}; expected three different ones")
    pairs = [_two_values(source, attribute) for attribute in attributes]
    factors = tuple(factor for factor, _ in pairs)
    sides = np.stack([column for _, column in pairs])
    kept = np.flatnonzero((sides >= 0).all(0))
    code = sides[:, kept].T @ np.array([4, 2, 1])
    _check_all_there(source, factors, code)
    table: Columns = {factor.name: column[kept] for factor, column in zip(factors, sides, strict=True)}

    def part(name: str, places: NDArray[np.int64]) -> Binary:
        return Binary(f"{source.name}-{name}", source, kept[places], factors, rows(table, places))

    high = np.array([0, 1, 1, 2, 1, 2, 2, 3])[code]
    held = _every_tenth(code) & (high <= 1)
    return Compositions(
        part("train", np.flatnonzero((high <= 1) & ~held)),
        part("validation", np.flatnonzero(held)),
        part("level1", np.flatnonzero(high == 2)),
        part("level2", np.flatnonzero(high == 3)),
    )


def _two_values(source: Tabled, attribute: Attribute) -> tuple[Factor, NDArray[np.int64]]:
    """The factor with its low and high value, and each sample's side [n]: 0, 1, or −1 where it is neither."""
    name = attribute if isinstance(attribute, str) else attribute[0]
    factor = next((factor for factor in source.factors if factor.name == name), None)
    if factor is None:
        had = _listed([factor.name for factor in source.factors])
        raise ValueError(f"compositions: {source.name} has no factor {name!r}; it has {had}")
    column = source.table[name]
    if isinstance(attribute, str):
        low, high = _its_two(source.name, factor, column)
    else:
        low, high = attribute[1:]
    is_low, is_high = (_has(source.name, factor, column, value) for value in (low, high))
    return Factor(name, (str(low), str(high))), np.where(is_high, 1, np.where(is_low, 0, -1))


def _values(factor: Factor, column: NDArray[np.int64] | NDArray[np.float32]) -> tuple[str | float, ...]:
    """All values of a category, or those that a number takes."""
    return tuple(np.unique(column).tolist()) if factor.values is None else factor.values


def _its_two(source: str, factor: Factor, column: NDArray[np.int64] | NDArray[np.float32]) -> tuple[str | float, ...]:
    values = _values(factor, column)
    if len(values) != 2:
        raise ValueError(
            f"compositions: {factor.name} takes {len(values)} values in {source} ({_listed(values)}); expected two: "
            f"name a low and a high one, ({factor.name!r}, {values[0]!r}, {values[-1]!r})"
        )
    return values


def _has(
    source: str, factor: Factor, column: NDArray[np.int64] | NDArray[np.float32], value: str | float
) -> NDArray[np.bool_]:
    """Which samples have this value of the factor, [n]."""
    found = np.zeros(len(column), bool)
    if factor.values is not None:
        if value in factor.values:
            found = column == factor.values.index(str(value))
    elif not isinstance(value, str):
        found = np.abs(column - value) <= _CLOSE * (factor.high - factor.low)
    if not found.any():
        there = _listed(_values(factor, column))
        raise ValueError(f"compositions: no {factor.name} is {value!r} in {source}; it has {there}")
    return found


def _check_all_there(source: Tabled, factors: Sequence[Factor], code: NDArray[np.int64]) -> None:
    missing = [f"{number:03b}" for number in range(8) if not (code == number).any()]
    if missing:
        names = ", ".join(factor.name for factor in factors)
        raise ValueError(
            f"compositions: {source.name} has no sample of {', '.join(missing)} ({names}, 1 for high); expected all "
            "eight: choose other attributes or values"
        )


def _every_tenth(code: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Every tenth sample of each composition, [n]; never its first."""
    held = np.zeros(len(code), bool)
    for number in range(8):
        held[np.flatnonzero(code == number)[_EVERY - 1 :: _EVERY]] = True
    return held


def _listed(values: Sequence[object]) -> str:
    shown = ", ".join(map(str, values[:_SHOWN]))
    return shown + (f" and {len(values) - _SHOWN} more" if len(values) > _SHOWN else "")
