"""Outlines: shapes put together from discs, boxes, strokes and polygons, kept as tables and looked up when drawn.

A shape is a grid of signed distances to its outline (negative inside), made by min and max of its pieces' distances.
It is evaluated once; drawing looks its pixels up, so that every shape costs the same. Shapes live in the unit disc, y
up; points of a table are asked for with y down, as pixels are.
"""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from compgen_fast.worlds.drawing import Array

SIDE = 128  # texels of a table's side
REACH = 1.3  # what of the plane a table covers: [−REACH, REACH]²
TEXELS = np.float32(SIDE / (2 * REACH))  # per unit

Grid: TypeAlias = NDArray[np.float64]
Point: TypeAlias = tuple[float, float]


def grid() -> tuple[Grid, Grid]:
    """The x and y of a table's texels, y up."""
    centres = ((np.arange(SIDE) + 0.5) / SIDE * 2 - 1) * REACH
    x, y = np.meshgrid(centres, -centres)
    return x, y


def flat(tables: Sequence[Grid]) -> Array:
    """Tables, one after the other."""
    return np.stack(tables).astype(np.float32).ravel()


def disc(x: Grid, y: Grid, at: Point, radius: float) -> Grid:
    return np.hypot(x - at[0], y - at[1]) - radius


def box(x: Grid, y: Grid, at: Point, half: Point, corner: float = 0.0) -> Grid:
    dx, dy = np.abs(x - at[0]) - half[0] + corner, np.abs(y - at[1]) - half[1] + corner
    return np.hypot(np.maximum(dx, 0), np.maximum(dy, 0)) + np.minimum(np.maximum(dx, dy), 0) - corner


def stroke(x: Grid, y: Grid, start: Point, end: Point, width: float) -> Grid:
    along = np.array(end) - np.array(start)
    share = np.clip(((x - start[0]) * along[0] + (y - start[1]) * along[1]) / (along @ along), 0, 1)
    distance: Grid = np.hypot(x - start[0] - share * along[0], y - start[1] - share * along[1]) - width
    return distance


def polygon(x: Grid, y: Grid, corners: Sequence[Point]) -> Grid:
    """Distance to the nearest edge; inside is where a ray to the right crosses the outline an odd number of times."""
    nearest, inside = np.full(x.shape, np.inf), np.zeros(x.shape, dtype=np.bool_)
    for (ax, ay), (bx, by) in zip(corners, [*corners[1:], corners[0]], strict=True):
        nearest = np.minimum(nearest, stroke(x, y, (ax, ay), (bx, by), 0.0))
        if ay != by:
            inside ^= ((ay > y) != (by > y)) & (x < (bx - ax) * (y - ay) / (by - ay) + ax)
    return np.where(inside, -nearest, nearest)


def union(*shapes: Grid) -> Grid:
    joined: Grid = np.minimum.reduce(shapes)
    return joined


def without(shape: Grid, *holes: Grid) -> Grid:
    left: Grid = np.maximum.reduce([shape, *(-hole for hole in holes)])
    return left


def turned(angle: float, radius: float = 1.0) -> Point:
    """A point on a circle, by degrees from the top, clockwise."""
    return radius * float(np.sin(np.radians(angle))), radius * float(np.cos(np.radians(angle)))


def nearest(kinds: Array, p: Array, q: Array) -> NDArray[np.int64]:
    """The table's index of the texel nearest to (p, q) [n, h, w] in the shapes ``kinds`` [n, 1, 1]."""
    return _index(kinds, *(np.floor(np.clip(w * TEXELS + np.float32(SIDE / 2), 0, SIDE - 1)) for w in (p, q)))


def interpolated(table: Array, kinds: Array, p: Array, q: Array) -> tuple[NDArray[np.int64], Array]:
    """The index of the texel above and left of (p, q), and the table between it and its three neighbours."""
    u, v = (np.clip(w * TEXELS + np.float32(SIDE / 2 - 0.5), 0, SIDE - 1.01) for w in (p, q))
    whole_u, whole_v = np.floor(u), np.floor(v)
    at = _index(kinds, whole_u, whole_v)
    u -= whole_u
    v -= whole_v
    above, below = table.take(at), table[SIDE:].take(at)
    above += u * (table[1:].take(at) - above)
    below += u * (table[SIDE + 1 :].take(at) - below)
    above += v * (below - above)
    return at, above


def _index(kinds: Array, u: Array, v: Array) -> NDArray[np.int64]:
    """Exact in fp32 up to 2²⁴ entries: a thousand shapes."""
    return (v * np.float32(SIDE) + u + kinds * np.float32(SIDE * SIDE)).astype(np.int64)
