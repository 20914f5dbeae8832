"""Scenes of several objects as flat factors: ``count``, then ``object0_shape``, ``object0_x``, … for each place.

Objects keep the order of the scene file. Places beyond the objects of a scene are coded as absent: every category has
``none`` as its value 0, and numbers are 0. (Not NaN: factors are written to JSON, and a NaN poisons a mean silently.)
"""

from collections.abc import Mapping, Sequence

import numpy as np

from compgen_fast.worlds.adapters.columns import Column
from compgen_fast.worlds.source import Factor

ABSENT = "none"
Thing = Mapping[str, str | float]


def object_slots(places: int) -> tuple[str, ...]:
    """What the numbers in an object mask stand for."""
    return ("background", *(f"object{place}" for place in range(places)))


def object_factors(
    categories: Mapping[str, Sequence[str]], numbers: Mapping[str, tuple[float, float]], places: int
) -> tuple[Factor, ...]:
    """``count`` and every property of every place; numbers are given with their bounds."""
    of_one = [
        [
            *(Factor(f"object{place}_{name}", (ABSENT, *values)) for name, values in categories.items()),
            *(Factor(f"object{place}_{name}", low=low, high=high) for name, (low, high) in numbers.items()),
        ]
        for place in range(places)
    ]
    return (Factor("count", low=0.0, high=float(places)), *(factor for one in of_one for factor in one))


def object_columns(scenes: Sequence[Sequence[Thing]], factors: Sequence[Factor], places: int) -> dict[str, Column]:
    """The columns of ``object_factors`` for scenes given as lists of objects."""
    counts = np.array([len(scene) for scene in scenes], np.int64)
    where = np.concatenate([np.arange(count) for count in counts]), np.repeat(np.arange(len(scenes)), counts)
    columns: dict[str, Column] = {"count": counts.astype(np.float32)}
    grids: dict[str, Column] = {}
    for factor in factors[1:]:
        place, _, name = factor.name.removeprefix("object").partition("_")
        if name not in grids:
            grid = np.zeros((places, len(scenes)), np.int64 if factor.categorical else np.float32)
            grid[where] = _codes(factor, [thing[name] for scene in scenes for thing in scene])
            grids[name] = grid
        columns[factor.name] = grids[name][int(place)]
    return columns


def _codes(factor: Factor, cells: Sequence[str | float]) -> Sequence[float]:
    if factor.values is None:
        return [float(cell) for cell in cells]
    index = {value: position for position, value in enumerate(factor.values)}
    return [index[str(cell)] for cell in cells]
