"""Shapes2D: one shape on grey. It has three factors, and training shows half of their combinations.

Shape, colour and size have a low and a high side each, written 0 and 1. Training shows 000, 001, 010 and 100: each
factor high, but never two together. Level 1 has two high factors, level 2 all three. Where the shape stands is left to
chance. The split ``all`` holds nothing out of training: it is for what is to know all images and no compositions, such
as tokenizers and probes.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from compgen_fast.worlds.chance import Chance
from compgen_fast.worlds.drawing import Array, axis, clipped, column, to_bytes
from compgen_fast.worlds.source import Factor, Samples
from compgen_fast.worlds.world import PARTS, Matrix, Part, Values, World, by_chance, part_size

SIDES = {"shape": ("disc", "triangle"), "colour": ("red", "blue"), "size": ("small", "large")}
COMPOSITIONS = tuple(f"{number:03b}" for number in range(8))
_HIGH = np.array([code.count("1") for code in COMPOSITIONS])
# By part; of the split ``composition`` the others show at most one high, of ``all`` everything.
_SHOWN = {"ood": _HIGH >= 2, "level1": _HIGH == 2, "level2": _HIGH == 3}
_ENDS = np.array([[0.85, 0.15, 0.15], [0.15, 0.25, 0.9]], dtype=np.float32)
_RADIUS = 0.18, 0.5
_SPREAD = 0.45
_FLOOR = np.float32(0.75)
_GAP = 0.4  # a continuous factor lies in [0, 0.4] on its low side and in [0.6, 1] on its high side


class Shapes2D(World):
    """The world. Factors are categories, or with ``continuous=True`` numbers from 0 to 1 between the same two ends."""

    name = "shapes2d"
    splits = ("composition", "all")
    parts = (*PARTS, "level1", "level2")
    unseen_parts = ("ood", "level1", "level2")

    def __init__(self, resolution: int = 64, seed: int = 0, continuous: bool = False) -> None:
        super().__init__(resolution, seed)
        self.continuous = continuous

    @property
    def factors(self) -> tuple[Factor, ...]:
        ours = (Factor(name) if self.continuous else Factor(name, sides) for name, sides in SIDES.items())
        return (*ours, Factor("x", low=-_SPREAD, high=_SPREAD), Factor("y", low=-_SPREAD, high=_SPREAD))

    @property
    def slots(self) -> tuple[str, ...]:
        return "background", "shape"

    def split(self, split: str, part: str = "train", *, seen_pairs: int | None = None, size: int | None = None) -> Part:
        """One part. ``ood`` is ``level1`` (two factors high) and ``level2`` (all three) together, in either split."""
        self.check(split, part)
        self.refuse_pairs(seen_pairs)
        most = 1 if split == "composition" else 3
        codes = np.flatnonzero(_SHOWN.get(part, most >= _HIGH))
        return Part(self, split, part, part_size(self.name, part, size), _Draw(self, codes))

    def matrix(self, split: str, seen_pairs: int | None = None) -> Matrix:
        self.check(split)
        self.refuse_pairs(seen_pairs)
        level = (np.maximum(_HIGH - 1, 0) * (split == "composition")).reshape(4, 2)
        rows = tuple(f"{colour} {shape}" for shape in SIDES["shape"] for colour in SIDES["colour"])
        return Matrix("shape and colour", rows, "size", SIDES["size"], level)

    def composition(self, values: Values) -> NDArray[np.int64]:
        """The number of each sample's composition, an index into COMPOSITIONS."""
        shape, colour, size = ((values[name] > 0.5).astype(np.int64) for name in SIDES)
        return 4 * shape + 2 * colour + size

    def render(self, values: Values) -> Samples:
        given = self.complete(values)
        line = axis(self.resolution)
        x, y = line - column(given["x"]), line[:, None] - column(given["y"])
        radius = np.float32(_RADIUS[0]) + given["size"] * np.float32(_RADIUS[1] - _RADIUS[0])
        inside = clipped(np.float32(0.5) - _distance(x, y, given["shape"], radius) * np.float32(self.resolution / 2))
        share = given["colour"][:, None]
        colour = _ENDS[0] * (np.float32(1) - share) + _ENDS[1] * share
        image: Array = inside[:, None] * (colour - _FLOOR)[:, :, None, None]
        image += _FLOOR
        return Samples(to_bytes(image), values, (inside > 0.5).astype(np.uint8))


def _distance(x: Array, y: Array, shape: Array, radius: Array) -> Array:
    """From the outline of a disc turning into a triangle of about its area; negative inside."""
    disc = np.sqrt(x * x + y * y) - column(radius)
    sides = [np.float32(c) * x + np.float32(s) * y for c, s in ((0, 1), (0.75**0.5, -0.5), (-(0.75**0.5), -0.5))]
    triangle = np.maximum(np.maximum(sides[0], sides[1]), sides[2]) - column(radius * np.float32(0.72))
    return disc + column(shape) * (triangle - disc)


@dataclass(frozen=True)
class _Draw:
    """The compositions in turn; continuous factors anywhere on their side."""

    world: Shapes2D
    codes: NDArray[np.int64]

    def __call__(self, numbers: NDArray[np.int64], counters: NDArray[np.int64]) -> Values:
        chance = Chance(self.world.seed)
        values = by_chance(self.world.factors, chance, counters)
        code = self.codes[numbers % len(self.codes)]
        for place, name in enumerate(SIDES):
            high = (code >> (2 - place)) & 1
            inside = values[name] * np.float32(_GAP)
            values[name] = (inside + high * (1 - _GAP)).astype(np.float32) if self.world.continuous else high
        return values
