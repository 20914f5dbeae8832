"""Which pairs of values are seen: designs in which every value is seen equally often, permuted by the seed.

Were one object seen more often than another, a single factor could tell seen from unseen. Here each value of either
factor has the same share of the seen pairs, and so of the unseen ones. The pairs of k are among the pairs of k + 1.
"""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from compgen_fast.worlds.chance import Chance

Design: TypeAlias = NDArray[np.bool_]  # [rows, columns], True where the pair is seen


def crossed(rows: int, columns: int, seen_pairs: int, chance: Chance, stream: str) -> Design:
    """Each row sees ``seen_pairs`` columns, each column seen_pairs · rows / columns rows. ``columns`` divides ``rows``.

    Each block of ``columns`` rows is a circulant with its own shuffle of the columns, so that rows of different blocks
    are no twins; from two pairs on, the pairs of a block form one cycle, so that everything is linked to everything.
    """
    seen = np.zeros((rows, columns), dtype=np.bool_)
    for block in range(rows // columns):
        number = np.arange(columns)
        shuffled = chance.order(columns, f"{stream} columns {block}")
        seen[block * columns : (block + 1) * columns, shuffled] = (number - number[:, None]) % columns < seen_pairs
    return seen[chance.order(rows, f"{stream} rows")]


def paired(count: int, seen_pairs: int, chance: Chance, stream: str) -> Design:
    """Symmetric pairs of different values; each value has ``seen_pairs`` partners. ``count`` is even.

    The rounds of a tournament in which everyone meets everyone once, as many as asked for.
    """
    seen = np.zeros((count, count), dtype=np.bool_)
    number = np.arange(count - 1)
    for turn in range(seen_pairs):
        opponent = (turn - number) % (count - 1)
        opponent[opponent == number] = count - 1  # the one who would meet himself meets the last
        seen[number, opponent] = seen[opponent, number] = True
    shuffled = chance.order(count, stream)
    return seen[shuffled][:, shuffled]


def check_seen_pairs(world: str, seen_pairs: int | None, partners: int) -> int:
    """The number of partners seen, 2 if not given. One partner would leave nothing to tell the two factors apart."""
    if seen_pairs is None:
        return 2
    if not 2 <= seen_pairs < partners:
        raise ValueError(
            f"{world}: seen_pairs is {seen_pairs}; expected 2 to {partners - 1}, so that values differ from their "
            f"partner and at least one of the {partners} partners stays unseen"
        )
    return seen_pairs


def listed_pairs(design: Design, chance: Chance, stream: str) -> NDArray[np.int64]:
    """The True pairs [count, 2], shuffled: sample i takes pair i modulo count, so every full round is balanced."""
    pairs = np.argwhere(design)
    return pairs[chance.order(len(pairs), stream)]


def partners(design: Design) -> NDArray[np.int64]:
    """For each row of a design with equally full rows, its columns: [rows, partners]."""
    return np.nonzero(design)[1].reshape(len(design), -1)
