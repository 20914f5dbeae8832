"""The objects of Scenes: twenty silhouettes, as tables of the distance to their outline.

Outline, shading and shadow all come from the same distances. Some objects have dark details (eyes, windows), which help
people and are no part of the outline.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np

from compgen_fast.worlds.drawing import Array
from compgen_fast.worlds.outlines import TEXELS, Grid, box, disc, flat, grid, polygon, stroke, turned, union, without

BEVEL = 0.45  # how far from its outline an object is round


class Tables(NamedTuple):
    """Flat tables [categories · SIDE · SIDE]: distance to the outline, the surface's slope in x and y, dark details."""

    distance: Array
    slope_x: Array
    slope_y: Array
    ink: Array


def _ball(x: Grid, y: Grid) -> tuple[Grid, ...]:
    return (disc(x, y, (0, 0), 0.8),)


def _crate(x: Grid, y: Grid) -> tuple[Grid, ...]:
    braces = union(stroke(x, y, (-0.5, -0.5), (0.5, 0.5), 0.06), stroke(x, y, (-0.5, 0.5), (0.5, -0.5), 0.06))
    return box(x, y, (0, 0), (0.7, 0.7), 0.06), braces


def _star(x: Grid, y: Grid) -> tuple[Grid, ...]:
    return (polygon(x, y, [turned(36 * i, 1.0 if i % 2 == 0 else 0.42) for i in range(10)]),)


def _heart(x: Grid, y: Grid) -> tuple[Grid, ...]:
    lobes = union(disc(x, y, (-0.42, 0.33), 0.46), disc(x, y, (0.42, 0.33), 0.46))
    return (union(lobes, polygon(x, y, [(-0.78, 0.04), (0, -0.92), (0.78, 0.04), (0, 0.55)])),)


def _cross(x: Grid, y: Grid) -> tuple[Grid, ...]:
    return (union(box(x, y, (0, 0), (0.9, 0.27), 0.05), box(x, y, (0, 0), (0.27, 0.9), 0.05)),)


def _ring(x: Grid, y: Grid) -> tuple[Grid, ...]:
    return (np.abs(disc(x, y, (0, 0), 0.66)) - 0.22,)


def _moon(x: Grid, y: Grid) -> tuple[Grid, ...]:
    return without(disc(x, y, (0.05, 0), 0.92), disc(x, y, (0.5, 0.18), 0.74)), disc(x, y, (-0.48, 0.25), 0.09)


def _arrow(x: Grid, y: Grid) -> tuple[Grid, ...]:
    head = polygon(x, y, [(0.98, 0), (0.2, 0.72), (0.2, -0.72)])
    return (union(head, box(x, y, (-0.35, 0), (0.6, 0.26), 0.04)),)


def _fish(x: Grid, y: Grid) -> tuple[Grid, ...]:
    body = np.maximum(disc(x, y, (0.2, -0.45), 0.85), disc(x, y, (0.2, 0.45), 0.85))
    tail = polygon(x, y, [(-0.3, 0), (-0.95, 0.52), (-0.78, 0), (-0.95, -0.52)])
    fin = polygon(x, y, [(0.4, 0.3), (-0.15, 0.66), (-0.1, 0.25)])
    return union(body, tail, fin), disc(x, y, (0.6, 0.1), 0.085)


def _house(x: Grid, y: Grid) -> tuple[Grid, ...]:
    walls, roof = box(x, y, (0, -0.32), (0.62, 0.48)), polygon(x, y, [(-0.88, 0.1), (0, 0.88), (0.88, 0.1)])
    openings = union(box(x, y, (0.25, -0.52), (0.15, 0.28)), box(x, y, (-0.27, -0.2), (0.17, 0.15)))
    return union(walls, roof, box(x, y, (0.52, 0.55), (0.12, 0.28))), openings


def _tree(x: Grid, y: Grid) -> tuple[Grid, ...]:
    tiers = [
        polygon(x, y, [(-w, low), (0, high), (w, low)])
        for w, low, high in ((0.72, -0.6, 0.15), (0.56, -0.12, 0.6), (0.4, 0.3, 1))
    ]
    return (union(*tiers, box(x, y, (0, -0.8), (0.14, 0.22))),)


def _mushroom(x: Grid, y: Grid) -> tuple[Grid, ...]:
    cap = np.maximum(disc(x, y, (0, 0.02), 0.88), -(y - 0.02))
    spots = union(disc(x, y, (-0.35, 0.35), 0.13), disc(x, y, (0.2, 0.55), 0.12), disc(x, y, (0.48, 0.22), 0.1))
    return union(cap, box(x, y, (0, -0.42), (0.26, 0.5), 0.12)), spots


def _mug(x: Grid, y: Grid) -> tuple[Grid, ...]:
    handle = np.abs(disc(x, y, (0.48, 0.02), 0.36)) - 0.11
    return union(box(x, y, (-0.2, 0), (0.58, 0.74), 0.1), handle), box(x, y, (-0.2, 0.6), (0.46, 0.05), 0.04)


def _key(x: Grid, y: Grid) -> tuple[Grid, ...]:
    bow = np.abs(disc(x, y, (-0.55, 0), 0.3)) - 0.13
    teeth = union(box(x, y, (0.84, -0.22), (0.1, 0.24)), box(x, y, (0.5, -0.2), (0.1, 0.2)))
    return (union(bow, box(x, y, (0.34, 0), (0.6, 0.11)), teeth),)


def _butterfly(x: Grid, y: Grid) -> tuple[Grid, ...]:
    side = np.abs(x)
    wings = union(disc(side, y, (0.52, 0.36), 0.42), disc(side, y, (0.4, -0.42), 0.32))
    body = stroke(x, y, (0, 0.5), (0, -0.62), 0.1)
    feelers = stroke(side, y, (0.02, 0.5), (0.22, 0.92), 0.045)
    return union(wings, body, feelers), union(
        disc(side, y, (0.56, 0.4), 0.14), stroke(x, y, (0, 0.45), (0, -0.55), 0.05)
    )


def _cat(x: Grid, y: Grid) -> tuple[Grid, ...]:
    side = np.abs(x)
    head = np.hypot(x / 1.12, y + 0.15) - 0.68
    ear = polygon(side, y, [(0.1, 0.4), (0.6, 0.84), (0.74, 0.0)])
    face = union(disc(side, y, (0.3, 0.0), 0.1), polygon(x, y, [(-0.1, -0.26), (0.1, -0.26), (0, -0.38)]))
    return union(head, ear), face


def _car(x: Grid, y: Grid) -> tuple[Grid, ...]:
    body = box(x, y, (0, -0.12), (0.95, 0.24), 0.1)
    cabin = polygon(x, y, [(-0.62, 0.05), (-0.4, 0.52), (0.3, 0.52), (0.58, 0.05)])
    wheels = disc(np.abs(x), y, (0.52, -0.36), 0.24)
    windows = union(
        polygon(x, y, [(-0.46, 0.12), (-0.32, 0.42), (-0.08, 0.42), (-0.08, 0.12)]),
        polygon(x, y, [(0.02, 0.12), (0.02, 0.42), (0.24, 0.42), (0.42, 0.12)]),
    )
    return union(body, cabin, wheels), union(windows, disc(np.abs(x), y, (0.52, -0.36), 0.13))


def _boat(x: Grid, y: Grid) -> tuple[Grid, ...]:
    hull = polygon(x, y, [(-0.92, -0.35), (0.92, -0.35), (0.55, -0.82), (-0.55, -0.82)])
    sails = union(
        polygon(x, y, [(0.08, 0.95), (0.08, -0.2), (0.78, -0.2)]),
        polygon(x, y, [(-0.1, 0.7), (-0.1, -0.2), (-0.64, -0.2)]),
    )
    return (union(hull, sails, box(x, y, (0, 0.2), (0.05, 0.74))),)


def _bolt(x: Grid, y: Grid) -> tuple[Grid, ...]:
    corners = [(0.1, 0.98), (-0.64, -0.14), (-0.1, -0.14), (-0.36, -0.94), (0.64, 0.26), (0.1, 0.26), (0.46, 0.92)]
    return (polygon(x, y, corners),)


def _flower(x: Grid, y: Grid) -> tuple[Grid, ...]:
    petals = [disc(x, y, turned(72 * i, 0.6), 0.33) for i in range(5)]
    return union(*petals, disc(x, y, (0, 0), 0.36)), disc(x, y, (0, 0), 0.2)


_SHAPES: dict[str, Callable[[Grid, Grid], tuple[Grid, ...]]] = {
    shape.__name__[1:]: shape
    for shape in (
        _ball, _crate, _star, _heart, _cross, _ring, _moon, _arrow, _fish, _house,
        _tree, _mushroom, _mug, _key, _butterfly, _cat, _car, _boat, _bolt, _flower,
    )
}  # fmt: skip
CATEGORIES = tuple(_SHAPES)


@cache
def tables() -> Tables:
    """The tables of all categories, made on first use."""
    x, y = grid()
    made = [_tables_of(*shape(x, y)) for shape in _SHAPES.values()]
    return Tables(*(flat(channel) for channel in zip(*made, strict=True)))


def _tables_of(outline: Grid, details: Grid | None = None) -> tuple[Grid, Grid, Grid, Grid]:
    texel = 1 / float(TEXELS)
    depth = np.clip(-outline / BEVEL, 0, 1)
    height = _blurred(np.sqrt(1 - (1 - depth) ** 2)) * BEVEL
    slope_y, slope_x = np.gradient(height, texel)
    steepness = np.sqrt(1 + slope_x**2 + slope_y**2)
    ink = np.zeros_like(outline) if details is None else np.clip(0.5 - details / (2 * texel), 0, 1)
    return outline, -slope_x / steepness, -slope_y / steepness, ink


def _blurred(height: Grid, times: int = 3) -> Grid:
    """Neighbours averaged: ridges of the distance become round backs."""
    for _ in range(times):
        for dimension in (0, 1):
            height = np.mean([np.roll(height, shift, dimension) for shift in (-2, -1, 0, 1, 2)], axis=0)
    return height
