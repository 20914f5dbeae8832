"""Sprites: flat shapes on black in the manner of dSprites, several at once, white or coloured.

Objects are drawn in order, the last in front. The splits hold out pairs of shape and colour, or of shape and place (six
cells, three across and two down); every object of an image keeps to the rule.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compgen_fast.worlds.chance import Chance
from compgen_fast.worlds.drawing import Array, axis, clipped, column, cos_sin, to_bytes
from compgen_fast.worlds.outlines import box, disc, flat, grid, interpolated, polygon, turned, union
from compgen_fast.worlds.source import Factor, Samples
from compgen_fast.worlds.splits import Design, check_seen_pairs, crossed, listed_pairs
from compgen_fast.worlds.world import Matrix, Part, Values, World, by_chance, part_size

SHAPES = ("square", "ellipse", "heart", "triangle", "cross", "ring")
_RGB = {
    "red": (0.93, 0.25, 0.20),
    "yellow": (0.95, 0.85, 0.20),
    "green": (0.25, 0.75, 0.30),
    "cyan": (0.25, 0.82, 0.88),
    "blue": (0.28, 0.40, 0.95),
    "magenta": (0.85, 0.30, 0.80),
}
_PALETTE = np.array(list(_RGB.values()), dtype=np.float32)
COLOURS = tuple(_RGB)
CELLS = tuple(f"{down} {across}" for down in ("top", "bottom") for across in ("left", "middle", "right"))
MOST = 8
_SCALE = 0.18, 0.32
_EDGE = 0.75  # how far from the middle a centre may be
_CHUNK_PIXELS = 32 * 64 * 64  # of all objects together


class Sprites(World):
    """The world. ``objects`` is how many sprites each image has, 1 to 8; ``coloured=False`` draws them white."""

    name = "sprites"

    def __init__(self, resolution: int = 64, seed: int = 0, objects: int = 1, coloured: bool = True) -> None:
        super().__init__(resolution, seed)
        if not 1 <= objects <= MOST:
            raise ValueError(f"sprites: objects is {objects}; expected 1 to {MOST}")
        self.objects, self.coloured = objects, coloured
        self.splits = ("colour", "position") if coloured else ("position",)

    @property
    def factors(self) -> tuple[Factor, ...]:
        return tuple(factor for i in range(1, self.objects + 1) for factor in self._factors_of(i))

    def _factors_of(self, i: int) -> tuple[Factor, ...]:
        colour = (Factor(f"colour_{i}", COLOURS),) if self.coloured else ()
        return (
            Factor(f"shape_{i}", SHAPES),
            *colour,
            Factor(f"scale_{i}", low=_SCALE[0], high=_SCALE[1]),
            Factor(f"orientation_{i}", high=2 * np.pi),
            Factor(f"x_{i}", low=-_EDGE, high=_EDGE),
            Factor(f"y_{i}", low=-_EDGE, high=_EDGE),
        )

    @property
    def slots(self) -> tuple[str, ...]:
        return "background", *(f"object_{i}" for i in range(1, self.objects + 1))

    def split(self, split: str, part: str = "train", *, seen_pairs: int | None = None, size: int | None = None) -> Part:
        """One part of a split.

        Args:
            split: ``"colour"`` holds out pairs of shape and colour, ``"position"`` of shape and cell.
            part: ``"train"``, ``"validation"`` and ``"test"`` show seen pairs, ``"ood"`` unseen ones.
            seen_pairs: how many colours or cells each shape is seen with, 2 (the default) to 5.
            size: how many samples; 20,000 for training and 2,000 otherwise.
        """
        self.check(split, part)
        seen = self._design(split, seen_pairs)
        pairs = listed_pairs(~seen if part == "ood" else seen, Chance(self.seed), f"{split} pairs")
        return Part(self, split, part, part_size(self.name, part, size), _Draw(self, split, pairs))

    def matrix(self, split: str, seen_pairs: int | None = None) -> Matrix:
        self.check(split)
        level = (~self._design(split, seen_pairs)).astype(np.int64)
        return Matrix("shape", SHAPES, split, COLOURS if split == "colour" else CELLS, level)

    def _design(self, split: str, seen_pairs: int | None) -> Design:
        count = check_seen_pairs(self.name, seen_pairs, len(CELLS))
        return crossed(len(SHAPES), len(CELLS), count, Chance(self.seed), split)

    def render(self, values: Values) -> Samples:
        given = self.complete(values)
        count, resolution = len(given["x_1"]), self.resolution
        images = np.empty((count, resolution, resolution, 3), dtype=np.uint8)
        masks = np.empty((count, resolution, resolution), dtype=np.uint8)
        step = max(1, _CHUNK_PIXELS // (self.objects * resolution**2))
        for start in range(0, count, step):
            chunk = slice(start, start + step)
            images[chunk], masks[chunk] = self._render({name: value[chunk] for name, value in given.items()})
        return Samples(images, values, masks)

    def _render(self, values: dict[str, Array]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """All objects at once, [n · objects]; what is behind shines through where what is before does not cover."""
        cover = self._cover(values).reshape(-1, self.objects, self.resolution, self.resolution)
        visible = cover.copy()
        visible[:, :-1] *= np.cumprod(1 - cover[:, :0:-1], axis=1)[:, ::-1]
        colours = self._colours(values).reshape(-1, self.objects, 3)
        image = (visible[:, :, None] * colours[..., None, None]).sum(1)
        number = np.arange(1, self.objects + 1, dtype=np.uint8)[:, None, None]
        return to_bytes(image), ((cover > 0.5) * number).max(1)

    def _cover(self, values: dict[str, Array]) -> Array:
        shape, scale, angle, x, y = (
            self._stacked(values, name) for name in ("shape", "scale", "orientation", "x", "y")
        )
        line, (c, s) = axis(self.resolution), map(column, cos_sin(angle))
        across, down = (line - column(x)) / column(scale), (line[:, None] - column(y)) / column(scale)
        p, q = across * c + down * s, down * c - across * s
        distance = interpolated(_outlines(), column(shape), p, q)[1]
        return clipped(np.float32(0.5) - distance * column(scale * np.float32(self.resolution / 2)))

    def _colours(self, values: dict[str, Array]) -> Array:
        if not self.coloured:
            return np.ones((len(values["x_1"]) * self.objects, 3), dtype=np.float32)
        return _PALETTE[self._stacked(values, "colour").astype(np.int64)]

    def _stacked(self, values: dict[str, Array], name: str) -> Array:
        """One factor of all objects, image by image."""
        return np.stack([values[f"{name}_{i}"] for i in range(1, self.objects + 1)], -1).ravel()


@cache
def _outlines() -> Array:
    x, y = grid()
    heart = union(
        disc(x, y, (-0.42, 0.33), 0.46),
        disc(x, y, (0.42, 0.33), 0.46),
        polygon(x, y, [(-0.78, 0.04), (0, -0.92), (0.78, 0.04), (0, 0.55)]),
    )
    return flat(
        [
            box(x, y, (0, 0), (0.7, 0.7)),
            (np.hypot(x, y / 0.55) - 1) * 0.55,
            heart,
            polygon(x, y, [turned(angle, 1.0) for angle in (0, 120, 240)]),
            union(box(x, y, (0, 0), (0.95, 0.28)), box(x, y, (0, 0), (0.28, 0.95))),
            np.abs(disc(x, y, (0, 0), 0.7)) - 0.24,
        ]
    )


@dataclass(frozen=True)
class _Draw:
    """The first object's pairs in turn, the others' by chance; everything else by chance."""

    world: Sprites
    split: str
    pairs: NDArray[np.int64]

    def __call__(self, numbers: NDArray[np.int64], counters: NDArray[np.int64]) -> Values:
        chance = Chance(self.world.seed)
        values = by_chance(self.world.factors, chance, counters)
        for i in range(1, self.world.objects + 1):
            which = numbers % len(self.pairs) if i == 1 else chance.below(len(self.pairs), f"pair {i}", counters)
            values |= self._held_to_the_split(values, i, *self.pairs[which].T)
        return values

    def _held_to_the_split(
        self, values: dict[str, NDArray[Any]], i: int, shape: NDArray[np.int64], other: NDArray[np.int64]
    ) -> dict[str, NDArray[Any]]:
        if self.split == "colour":
            return {f"shape_{i}": shape, f"colour_{i}": other}
        down, across = np.divmod(other, 3)
        return {
            f"shape_{i}": shape,
            f"x_{i}": _inside(values[f"x_{i}"], across, 3),
            f"y_{i}": _inside(values[f"y_{i}"], down, 2),
        }


def _inside(place: Array, cell: NDArray[np.int64], cells: int) -> Array:
    """A place anywhere on a line, moved to the same point of one of its equal cells."""
    return ((place + (2 * cell - cells + 1) * _EDGE) / cells).astype(np.float32)


def cell_of(x: Array, y: Array) -> NDArray[np.int64]:
    """The cell of a centre, an index into CELLS."""
    across, down = (
        np.clip((place + _EDGE) / (2 * _EDGE) * n, 0, n - 1).astype(np.int64) for place, n in ((x, 3), (y, 2))
    )
    cell: NDArray[np.int64] = 3 * down + across
    return cell
