"""What a procedural world is: factors in, images and masks out; and a part of its split, which is a ``Source``.

A world draws nothing at random by itself. A part turns sample numbers into factor values by hashing, so it needs no
storage and any sample can be had at once.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from compgen_fast.nearest import instead_of
from compgen_fast.worlds.chance import Chance
from compgen_fast.worlds.source import Factor, Samples

Values: TypeAlias = Mapping[str, NDArray[np.int64] | NDArray[np.float32]]

LOWEST, HIGHEST = 16, 256
PARTS = ("train", "validation", "test", "ood")
SIZES = {"train": 20_000}
_SIZE = 2_000  # of a part not named above
_RANGE = 2**40  # counters per part: parts never share one


@dataclass(frozen=True)
class Matrix:
    """Which combinations of two factors are seen: level [rows, columns] is 0 where seen, 1 and more where not.

    −1 marks what cannot occur, such as an object beside itself.
    """

    row: str
    rows: tuple[str, ...]
    column: str
    columns: tuple[str, ...]
    level: NDArray[np.int64]


class World(ABC):
    """Renders factor values. Subclasses say which factors, which slots and which splits there are."""

    name: str
    splits: tuple[str, ...]
    parts: tuple[str, ...] = PARTS
    unseen_parts: tuple[str, ...] = ("ood",)

    def __init__(self, resolution: int, seed: int) -> None:
        if not LOWEST <= resolution <= HIGHEST:
            raise ValueError(f"{self.name}: resolution is {resolution}; expected {LOWEST} to {HIGHEST} pixels")
        if seed < 0:
            raise ValueError(f"{self.name}: seed is {seed}; expected 0 or more")
        self.resolution, self.seed = resolution, seed

    @property
    @abstractmethod
    def factors(self) -> tuple[Factor, ...]: ...

    @property
    @abstractmethod
    def slots(self) -> tuple[str, ...]: ...

    @abstractmethod
    def render(self, values: Values) -> Samples:
        """Images and masks of these factor values, given as arrays of equal length, one per factor."""

    @abstractmethod
    def split(
        self, split: str, part: str = "train", *, seen_pairs: int | None = None, size: int | None = None
    ) -> "Part":
        """One part of a split: ``train``, ``validation`` and ``test`` hold seen combinations, ``ood`` unseen ones."""

    @abstractmethod
    def matrix(self, split: str, seen_pairs: int | None = None) -> Matrix:
        """Which combinations the split's training part shows."""

    def check(self, split: str, part: str = "train") -> None:
        if split not in self.splits:
            raise ValueError(f"{self.name}: there is no split {split!r}; {instead_of(split, self.splits)}")
        if part not in self.parts:
            raise ValueError(f"{self.name}: there is no part {part!r}; {instead_of(part, self.parts)}")

    def refuse_pairs(self, seen_pairs: int | None) -> None:
        """For worlds whose splits are fixed."""
        if seen_pairs is not None:
            raise ValueError(f"{self.name}: seen_pairs is {seen_pairs}, but its splits are fixed; leave it out")

    def complete(self, values: Values) -> dict[str, NDArray[np.float32]]:
        """The values of all factors as fp32, after a check that they are all there, equally many and in range."""
        count = len(next(iter(values.values()), ()))
        return {factor.name: self._checked(factor, values.get(factor.name), count) for factor in self.factors}

    def _checked(
        self, factor: Factor, given: NDArray[np.int64] | NDArray[np.float32] | None, count: int
    ) -> NDArray[np.float32]:
        if given is None:
            raise ValueError(f"{self.name}: the factor {factor.name!r} is missing; give one value per image")
        array = np.asarray(given, dtype=np.float32)
        if array.shape != (count,):
            raise ValueError(f"{self.name}: {factor.name!r} has shape {list(array.shape)}; expected [{count}]")
        if factor.values is not None and not ((array >= 0) & (array < len(factor.values)) & (array % 1 == 0)).all():
            raise ValueError(
                f"{self.name}: {factor.name!r} holds something other than numbers of its {len(factor.values)} values "
                f"({', '.join(factor.values)}); expected whole numbers from 0 to {len(factor.values) - 1}"
            )
        if factor.values is None and not ((array >= factor.low - 1e-5) & (array <= factor.high + 1e-5)).all():
            raise ValueError(
                f"{self.name}: {factor.name!r} leaves its range; expected {factor.low:g} to {factor.high:g}"
            )
        return array


@dataclass(frozen=True)
class Part:
    """A ``Source``: part of a split of a world. ``draw`` gives the factor values of (numbers, counters).

    A number counts the part's own samples from 0; its counter is unique among all parts of the world.
    """

    world: World
    split: str
    part: str
    size: int
    draw: Callable[[NDArray[np.int64], NDArray[np.int64]], Values]

    @property
    def name(self) -> str:
        return f"{self.world.name}-{self.split}-{self.part}"

    @property
    def unseen(self) -> bool:
        """Whether its combinations are ones that training never shows."""
        return self.part in self.world.unseen_parts

    @property
    def factors(self) -> tuple[Factor, ...]:
        return self.world.factors

    @property
    def slots(self) -> tuple[str, ...]:
        return self.world.slots

    def __len__(self) -> int:
        return self.size

    def values(self, indices: NDArray[np.int64]) -> Values:
        """The factors of these samples, without drawing them."""
        numbers = np.asarray(indices)
        if numbers.ndim != 1 or not np.issubdtype(numbers.dtype, np.integer):
            raise ValueError(
                f"{self.name}: indices are {numbers.dtype} of shape {list(numbers.shape)}; expected one row of integers"
            )
        if len(numbers) and not (numbers.min() >= 0 and numbers.max() < self.size):
            raise IndexError(
                f"{self.name}: indices run from {numbers.min()} to {numbers.max()}; expected 0 to {self.size - 1}"
            )
        numbers = numbers.astype(np.int64)
        return self.draw(numbers, numbers + self.world.parts.index(self.part) * _RANGE)

    def samples(self, indices: NDArray[np.int64]) -> Samples:
        values = self.values(indices)
        drawn = self.world.render(values)
        return Samples(drawn.images, {factor.name: values[factor.name] for factor in self.factors}, drawn.masks)


def by_chance(factors: Sequence[Factor], chance: Chance, counters: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    """Values of all factors, each drawn evenly and on its own."""
    return {
        factor.name: chance.uniform(factor.name, counters, factor.low, factor.high)
        if factor.values is None
        else chance.below(len(factor.values), factor.name, counters)
        for factor in factors
    }


def part_size(world: str, part: str, size: int | None) -> int:
    """How many samples a part has: as many as asked for, or the usual number."""
    if size is None:
        return SIZES.get(part, _SIZE)
    if not 1 <= size <= _RANGE:
        raise ValueError(f"{world}: size is {size}; expected 1 to 2⁴⁰ samples")
    return size
