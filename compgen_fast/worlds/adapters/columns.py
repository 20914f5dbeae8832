"""Factors and their values for every sample of a data set, column by column.

Columns live in memory for the whole data set (images never do): a split is drawn from them without decoding anything.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from compgen_fast.worlds.adapters.layout import Layout
from compgen_fast.worlds.source import Factor

Column = NDArray[np.int64] | NDArray[np.float32]
Columns = Mapping[str, Column]


def category(name: str, values: tuple[str, ...], cells: Sequence[str]) -> tuple[Factor, NDArray[np.int64]]:
    """A factor with these values, and the cells as indices into them."""
    number = {value: index for index, value in enumerate(values)}
    return Factor(name, values), np.array([number[cell] for cell in cells], np.int64)


def number(name: str, cells: Sequence[float] | NDArray[np.float32]) -> tuple[Factor, NDArray[np.float32]]:
    """A factor between the smallest and the largest cell."""
    column = np.array(cells, np.float32)
    return Factor(name, low=float(column.min()), high=float(column.max())), column


def infer(
    layout: Layout, path: Path, table: Mapping[str, Sequence[str]], categories: Sequence[str] = ()
) -> tuple[tuple[Factor, ...], dict[str, Column]]:
    """Factors from the text of a csv file.

    A column whose every cell reads as a number is a number between its smallest and largest cell, unless it is named in
    ``categories``; any other column is a category whose values are its distinct cells, sorted (numbers by size).
    """
    factors, columns = [], {}
    for name, cells in table.items():
        if "" in cells:
            raise layout.odd(path, f"row {cells.index('') + 1} has nothing in column {name!r}")
        numbers = _numbers(cells)
        if numbers is not None and not all(map(math.isfinite, numbers)):
            raise layout.odd(path, f"column {name!r} holds a number that is not finite")
        column: Column
        if numbers is None or name in categories:
            factor, column = category(name, tuple(sorted(set(cells), key=float if numbers else str)), cells)
        else:
            factor, column = number(name, numbers)
        factors.append(factor)
        columns[name] = column
    return tuple(factors), columns


def _numbers(cells: Sequence[str]) -> list[float] | None:
    try:
        return [float(cell) for cell in cells]
    except ValueError:
        return None
