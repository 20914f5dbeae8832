"""Which sample comes at which position: a pure function of (seed, manifests, window), computed anywhere in no time.

Positions count samples over all epochs: epoch e of n samples is positions e·n … e·n + n − 1. In each epoch

1. the shards are put in a random order and cut into groups of ``window`` (without a window, all are one group);
2. the samples of each group are put in a random order.

Both are keyed permutations of range(n) that give any element without making the others (a Feistel network on a
rectangle that just holds n): no buffer to fill, nothing to replay on resume, and a few hundred bytes of memory where a
shuffle buffer holds samples. A window bounds how many shards are in use at a time; it is for storage that is slow to
seek or far away.

A mixture deals positions out in rounds of `ROUND`, in each of which a data set gets its exact share, in a random order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
_Words = NDArray[np.uint64]

ROUND = 1000
_FEISTEL_ROUNDS = 8  # with 6, which samples follow each other is visibly not random
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_SHARDS, _SAMPLES, _MIXTURE, _SUBSTITUTE = range(4)  # what a key is for


def _mix(x: _Words) -> _Words:
    """A 64-bit finaliser: every bit of the result depends on every bit of x."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def key(*parts: int | Integers) -> _Words:
    """One 64-bit key out of several integers, elementwise where some of them are arrays."""
    found = np.zeros(1, np.uint64)
    for part in parts:
        word = np.asarray(part, np.int64).astype(np.uint64)
        found = _mix((found ^ word) + _GOLDEN)
    return found


def shuffled(x: Integers, size: Integers | int, keys: _Words) -> Integers:
    """x under a random permutation of range(size), elementwise; which permutation is told by the key.

    x = (l, r) on a rectangle of a × b ≥ size points; rounds move l by a hash of r, then r by a hash of l. Each is
    undone by subtracting, so the whole is a permutation of the rectangle. A point that lands beyond size goes round
    again until it does not, which keeps it one of range(size).
    """
    size = np.broadcast_to(np.asarray(size, np.uint64), x.shape)
    keys = np.broadcast_to(keys, x.shape)
    a = np.ceil(np.sqrt(size)).astype(np.uint64)
    b = -(-size.astype(np.int64) // a.astype(np.int64)).astype(np.uint64)
    found = _permuted(x.astype(np.uint64), a, b, keys)
    beyond = np.flatnonzero(found >= size)
    while len(beyond):
        found[beyond] = _permuted(found[beyond], a[beyond], b[beyond], keys[beyond])
        beyond = beyond[found[beyond] >= size[beyond]]
    return found.astype(np.int64)


def _permuted(x: _Words, a: _Words, b: _Words, keys: _Words) -> _Words:
    left, right = x // b, x % b
    for _ in range(_FEISTEL_ROUNDS // 2):
        # Far apart, or a hash in one round would be a neighbour's in the next.
        left = (left + _mix(right + keys)) % a
        right = (right + _mix(left + keys + _GOLDEN)) % b
        keys = keys + _GOLDEN + _GOLDEN
    return left * b + right


@dataclass(frozen=True)
class Part:
    """One data set of a mixture: how many samples each shard has, and its weight."""

    shards: tuple[int, ...]
    weight: float = 1.0


class Order:
    """Position → (part, sample number in that part)."""

    def __init__(self, parts: Sequence[Part], seed: int, shuffle: bool = True, window: int | None = None) -> None:
        self.seed, self.shuffle = seed, shuffle
        self.parts = tuple(parts)
        self.quotas = quotas([part.weight for part in parts])
        self.samples = sum(sum(part.shards) for part in parts)
        self._shares = np.concatenate([[0], np.cumsum(self.quotas)])
        self._within = [_Within(part, key(seed, number), shuffle, window) for number, part in enumerate(parts)]

    def __call__(self, positions: Integers) -> tuple[Integers, Integers]:
        """For each position the number of its part and of its sample there."""
        if len(self.parts) == 1:
            return np.zeros_like(positions), self._within[0](positions)
        part, turn = self._dealt(positions)
        sample = np.empty_like(positions)
        for number, within in enumerate(self._within):
            chosen = part == number
            sample[chosen] = within(turn[chosen])
        return part, sample

    def _dealt(self, positions: Integers) -> tuple[Integers, Integers]:
        """Whose turn it is, and how many turns that part has had (in a round, not necessarily in this order)."""
        dealt, place = np.divmod(positions, ROUND)
        place = shuffled(place, ROUND, key(self.seed, _MIXTURE, dealt))
        part = np.searchsorted(self._shares, place, side="right") - 1
        return part, dealt * np.asarray(self.quotas)[part] + place - self._shares[part]


class _Within:
    """Position in one data set, over all epochs → sample number."""

    def __init__(self, part: Part, keys: _Words, shuffle: bool, window: int | None) -> None:
        self.sizes = np.asarray(part.shards, np.int64)
        self.starts = np.concatenate([[0], np.cumsum(self.sizes)])
        self.samples = int(self.starts[-1])
        self.seed = int(keys[0] >> np.uint64(1))
        self.shuffle = shuffle
        self.window = None if window is None or window >= len(self.sizes) else window
        # Bound to the object and small: a batch touches one epoch, or two at a boundary.
        self._epoch = lru_cache(maxsize=4)(self._shard_order)

    def __call__(self, positions: Integers) -> Integers:
        epochs, places = np.divmod(positions, self.samples)
        if not self.shuffle:
            return places
        if self.window is None:
            return shuffled(places, self.samples, key(self.seed, _SAMPLES, epochs))
        found = np.empty_like(places)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            found[chosen] = self._windowed(int(epoch), places[chosen])
        return found

    def _windowed(self, epoch: int, places: Integers) -> Integers:
        assert self.window is not None
        shards, ends = self._epoch(epoch)
        edges = np.append(ends[: -1 : self.window], ends[-1])
        group = np.searchsorted(edges, places, side="right") - 1
        first = edges[group]
        mixed = first + shuffled(places - first, edges[group + 1] - first, key(self.seed, _SAMPLES, epoch, group))
        turn = np.searchsorted(ends, mixed, side="right") - 1
        return self.starts[shards[turn]] + mixed - ends[turn]

    def _shard_order(self, epoch: int) -> tuple[Integers, Integers]:
        """The shards in the order of this epoch, and where each begins in it (and the last one ends)."""
        count = len(self.sizes)
        shards = shuffled(np.arange(count), count, key(self.seed, _SHARDS, epoch))
        return shards, np.concatenate([[0], np.cumsum(self.sizes[shards])])


def substitute(sample: int, attempt: int, samples: int) -> int:
    """Which sample stands in for a bad one: the same for every rank, worker and epoch."""
    return int(key(_SUBSTITUTE, sample, attempt)[0] % np.uint64(samples))


def quotas(weights: Sequence[float]) -> tuple[int, ...]:
    """Turns per round of `ROUND`, by largest remainder. Every part must get at least one."""
    total = float(sum(weights))
    if not weights or any(weight <= 0 or not np.isfinite(weight) for weight in weights):
        raise ValueError(f"weights are {list(weights)}; expected one positive number per data set")
    exact = np.asarray(weights) / total * ROUND
    found = np.floor(exact).astype(np.int64)
    found[np.argsort(found - exact, kind="stable")[: ROUND - found.sum()]] += 1
    if found.min() < 1:
        raise ValueError(f"weights are {list(weights)}; the smallest must be at least {1 / ROUND:.1%} of their sum")
    return tuple(int(quota) for quota in found)
