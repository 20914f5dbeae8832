"""Random numbers by address: the number at (seed, stream, counter) is a hash of the three, not the next of a sequence.

So sample i costs the same whatever i is, and a batch holds the same numbers in any order and of any size.
"""

from functools import cache
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

_GOLDEN, _FIRST, _SECOND = (np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


class Chance:
    """The random numbers of one seed. A stream is a name: what the numbers are for."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def bits(self, stream: str, counters: NDArray[np.int64]) -> NDArray[np.uint64]:
        """64 random bits for each counter."""
        return _mixed(counters.astype(np.uint64) * _GOLDEN + _start(self.seed, stream))

    def uniform(
        self, stream: str, counters: NDArray[np.int64], low: float = 0.0, high: float = 1.0
    ) -> NDArray[np.float32]:
        """Numbers in [low, high), as fine as fp32 holds them."""
        unit = (self.bits(stream, counters) >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)
        return np.float32(low) + unit * np.float32(high - low)

    def below(self, n: int, stream: str, counters: NDArray[np.int64]) -> NDArray[np.int64]:
        """Whole numbers from 0 to n − 1; for n far below 2³² the bias of the remainder is nothing."""
        return ((self.bits(stream, counters) >> np.uint64(32)) % np.uint64(n)).astype(np.int64)

    def order(self, n: int, stream: str) -> NDArray[np.int64]:
        """0 to n − 1, shuffled."""
        return np.argsort(self.bits(stream, np.arange(n)), kind="stable")


@cache
def _start(seed: int, stream: str) -> np.uint64:
    return np.uint64(int.from_bytes(blake2b(f"{seed}/{stream}".encode(), digest_size=8).digest(), "little"))


def _mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser, twice: once leaves neighbouring counters of related streams correlated."""
    for _ in range(2):
        x = (x ^ (x >> np.uint64(30))) * _FIRST
        x = (x ^ (x >> np.uint64(27))) * _SECOND
        x = x ^ (x >> np.uint64(31))
    return x
