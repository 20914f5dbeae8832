"""Hold out combinations of two factors of any data set with a table: the procedural worlds' splits, for real data.

Every value of either factor is seen in training, but only some of the pairs. Of the factor with more values, each value
is seen with exactly ``seen`` values of the other, chosen so that the other's values are seen equally often, or nearly
so. The seen pairs hang together: from any pair one reaches any other by changing one factor at a time, since otherwise
nothing in the data tells what belongs to which factor. The pairs of a smaller ``seen`` are among those of a larger one.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from compgen_fast.worlds.adapters.columns import Columns
from compgen_fast.worlds.adapters.folder_source import Tabled, View

_MAX_VALUES = 1024
_DRAWS = 20
_EVERY = 10


class HeldOut(NamedTuple):
    """Train, validation and test samples of seen pairs, and every sample of unseen pairs."""

    train: View
    validation: View
    test: View
    ood: View


def held_out(source: Tabled, factors: tuple[str, str], *, seen: int = 2, seed: int = 0) -> HeldOut:
    """Split a source by pairs of values of two factors.

    Args:
        source: any source with a table, such as every adapter's and every view.
        factors: the names of the two factors. Numbers count as values if they take at most 1024 distinct ones.
        seen: with how many values of the other factor each value of the larger one is seen; at least 2.
        seed: which pairs are seen, and which samples of them are held back.

    Returns:
        Views on the source. Of the samples with seen pairs, one in ten goes to validation, one in ten to test, evenly
        over the pairs, and the rest to train, which has at least one sample of every seen pair.
    """
    table = source.table
    codes = [_codes(source.name, table, name) for name in factors]
    exists = np.zeros([code.max() + 1 for code in codes], bool)
    exists[codes[0], codes[1]] = True
    generator = np.random.default_rng(seed)
    pairs = _seen_pairs(source, factors, exists, seen, generator)
    inside = pairs[codes[0], codes[1]]
    pair = codes[0] * exists.shape[1] + codes[1]
    train, validation, test = _parts(np.flatnonzero(inside), pair, generator)
    chosen = {"train": train, "validation": validation, "test": test, "ood": np.flatnonzero(~inside)}
    return HeldOut(**{part: View(f"{source.name}-{part}", source, rows) for part, rows in chosen.items()})


def _codes(source: str, table: Columns, name: str) -> NDArray[np.int64]:
    """The factor's value for each sample, numbered over the values that occur."""
    if name not in table:
        raise ValueError(f"held_out: {source} has no factor {name!r}; it has {', '.join(table) or 'none'}")
    values, codes = np.unique(table[name], return_inverse=True)
    if not 2 <= len(values) <= _MAX_VALUES:
        raise ValueError(f"held_out: {name} takes {len(values)} values in {source}; expected 2 to {_MAX_VALUES}")
    return codes.astype(np.int64)


def _seen_pairs(
    source: Tabled, factors: tuple[str, str], exists: NDArray[np.bool_], seen: int, generator: np.random.Generator
) -> NDArray[np.bool_]:
    """Which pairs of values to see, in the shape of ``exists``."""
    turned = exists.shape[0] < exists.shape[1]
    by_larger = exists.T if turned else exists
    few = int(by_larger.sum(1).min())
    if not 2 <= seen < few:
        larger, other = factors[::-1] if turned else factors
        raise ValueError(
            f"held_out: seen is {seen}; expected at least 2 and fewer than {few}, since some value of {larger} occurs "
            f"in {source.name} with only {few} values of {other}"
        )
    design = _drawn(by_larger, seen, generator)
    if len(set(design.group)) > 1:
        raise ValueError(
            f"held_out: the seen pairs of {factors[0]} and {factors[1]} in {source.name} fall into separate groups; "
            "see more of them, hold out other factors, or take a view on fewer values"
        )
    return design.pairs.T if turned else design.pairs


class _Design(NamedTuple):
    """Seen pairs [rows, columns], and a number for each row, then for each column: the same where pairs link them."""

    pairs: NDArray[np.bool_]
    group: NDArray[np.int64]

    @property
    def spread(self) -> int:
        often = self.pairs.sum(0)
        return int(often.max() - often.min())


def _drawn(exists: NDArray[np.bool_], seen: int, generator: np.random.Generator) -> _Design:
    """One more pair for every row at a time, so that the pairs of a smaller ``seen`` are among those of a larger."""
    design = _Design(np.zeros_like(exists), np.arange(sum(exists.shape)))
    for _ in range(seen):
        design = min((_one_more(design, exists, generator) for _ in range(_DRAWS)), key=lambda drawn: drawn.spread)
    return design


def _one_more(design: _Design, exists: NDArray[np.bool_], generator: np.random.Generator) -> _Design:
    """Each row, in random order, takes a column taken least so far, if it can one to which nothing links it yet."""
    pairs, group = design.pairs.copy(), design.group.copy()
    rows, columns = exists.shape
    often = pairs.sum(0)
    for row in generator.permutation(rows):
        cost = often + (group[rows:] == group[row]) / 2 + generator.random(columns) / 2
        column = np.argmin(np.where(exists[row] & ~pairs[row], cost, np.inf))
        pairs[row, column] = True
        often[column] += 1
        group[group == group[rows + column]] = group[row]
    return _Design(pairs, group)


def _parts(
    rows: NDArray[np.int64], pair: NDArray[np.int64], generator: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Shuffled, then sorted by pair, every tenth row is held back, twice; a pair's first row never is."""
    shuffled = generator.permutation(rows)
    ordered = shuffled[np.argsort(pair[shuffled], kind="stable")]
    first = np.diff(pair[ordered], prepend=-1) != 0
    rest = ordered[~first]
    validation, test = rest[_EVERY // 2 :: _EVERY], rest[::_EVERY]
    train = np.setdiff1d(ordered, np.concatenate([validation, test]))
    return train, np.sort(validation), np.sort(test)
