"""The backgrounds of Scenes: ten places, each with two phases that move it, a hue and a light that colour it.

A place says where in the image its second and third colour lie (both from 0 to 1); its first colour is everywhere else.
"""

from collections.abc import Callable
from functools import cache

import numpy as np
from numpy.typing import NDArray

from compgen_fast.worlds.chance import Chance
from compgen_fast.worlds.drawing import (
    Array,
    axis,
    clipped,
    column,
    fraction,
    noise,
    noise_at,
    smooth,
    tent,
    turn_hue,
    wave,
)

ONE, HALF = np.float32(1), np.float32(0.5)
_Place = Callable[[Array, Array, Array, Array], tuple[Array, Array]]


@cache
def _shares() -> Array:
    return Chance(0).uniform("shares", np.arange(1024))


def _scattered(x: Array) -> Array:
    """Numbers in [0, 1) without pattern for whole x: of a house, a brick or a window."""
    found: Array = _shares().take(x.astype(np.int64) & 1023)
    return found


def _desert(x: Array, y: Array, a: Array, b: Array) -> tuple[Array, Array]:
    """Dunes: their lee in shade."""
    dune = y * np.float32(1.1) + wave(x * np.float32(0.4) + a) * np.float32(0.3) + b
    ripples = wave(dune * np.float32(9)) * np.float32(0.12)
    lee = fraction(dune)
    return clipped(lee * lee + ripples), clipped(HALF - np.float32(6) * lee)


def _ocean(x: Array, y: Array, a: Array, b: Array) -> tuple[Array, Array]:
    """Waves that shorten towards the horizon, with foam."""
    far = np.float32(4) / (y + np.float32(1.9))
    swell = wave(x * far * np.float32(0.35) + a) * np.float32(0.3) + far * np.float32(1.8) + b
    crest = wave(swell) * HALF + HALF
    foam = noise_at(noise("foam", 2, 32), x * np.float32(0.8) + a * np.float32(4), y + b * np.float32(4))
    return crest, clipped((crest + foam - np.float32(1.5)) * np.float32(4))


def _clouds(x: Array, y: Array, a: Array, b: Array) -> tuple[Array, Array]:
    puffs = noise_at(noise("clouds", 4, 128), x * np.float32(0.8) + a * np.float32(4), y + b * np.float32(4))
    white = smooth((puffs - np.float32(0.48)) * np.float32(4))
    return white, (ONE - white) * (y * np.float32(0.4) + np.float32(0.4))


def _meadow(x: Array, y: Array, a: Array, b: Array) -> tuple[Array, Array]:
    """Blades of grass, and flowers."""
    blades = noise_at(noise("blades", 2, 16), x + a * np.float32(4), y * np.float32(0.3) + b * np.float32(4))
    flowers = noise_at(noise("flowers", 1, 16), x + b * np.float32(4), y + a * np.float32(4))
    return blades, clipped((flowers - np.float32(0.86)) * np.float32(10))


def _bricks(x: Array, y: Array, a: Array, b: Array) -> tuple[Array, Array]:
    across = y * np.float32(3) + b * np.float32(2)
    row = np.floor(across)
    along = x * np.float32(1.5) + a * np.float32(2) + row * HALF
    joint = clipped(np.float32(1.6) - np.minimum(tent(along) * np.float32(2), tent(across)) * np.float32(5))
    shade = _scattered(row * np.float32(31) + np.floor(along))
    return shade * (ONE - joint), joint


def _tiles(x: Array, y: Array, a: Array, b: Array) -> tuple[Array, Array]:
    """A tiled floor, seen at a slant."""
    far = np.float32(1.6) / (y + np.float32(1.5))
    checks = wave(x * far + a) * wave(far * np.float32(1.6) + b)
    return clipped(HALF + checks * np.float32(4)), clipped(y * np.float32(-0.6)) + np.zeros_like(a)


def _night(x: Array, y: Array, a: Array, b: Array) -> tuple[Array, Array]:
    stars = noise_at(
        noise("stars", 1, 8), x * np.float32(0.8) + a * np.float32(4), y * np.float32(0.8) + b * np.float32(4)
    )
    milky = noise_at(noise("clouds", 4, 128), x * HALF + b * np.float32(4), y * HALF + a * np.float32(4))
    return milky * (y * np.float32(0.35) + np.float32(0.65)), clipped((stars - np.float32(0.93)) * np.float32(14))


def _hills(x: Array, y: Array, a: Array, b: Array) -> tuple[Array, Array]:
    """Two ranges under a pale sky."""
    far = clipped((y + np.float32(0.15) + wave(x * np.float32(0.45) + a) * np.float32(0.25)) * np.float32(25))
    near = clipped((y - np.float32(0.4) + wave(x * np.float32(0.3) + b) * np.float32(0.22)) * np.float32(25))
    return far * (ONE - near) * (np.float32(0.75) - y * np.float32(0.25)), near


def _planks(x: Array, y: Array, a: Array, b: Array) -> tuple[Array, Array]:
    across = x * np.float32(1.75) + a * np.float32(2)
    board = _scattered(np.floor(across))
    fibres = noise_at(
        noise("fibres", 2, 32),
        x * np.float32(0.9) + a * np.float32(4),
        y * np.float32(0.12) + (b + board) * np.float32(4),
    )
    gap = clipped(np.float32(1.3) - tent(across) * np.float32(7))
    return (fibres * np.float32(0.8) + board * np.float32(0.3)) * (ONE - gap), gap + np.zeros_like(y)


def _city(x: Array, y: Array, a: Array, b: Array) -> tuple[Array, Array]:
    """A skyline at dusk, some windows lit."""
    street = x * np.float32(2.2) + a * np.float32(8)
    house = np.floor(street)
    roof = _scattered(house) * np.float32(0.9) - np.float32(0.7)
    wall = clipped((y - roof) * np.float32(30))
    panes_x, panes_y = street * np.float32(3), (y + b) * np.float32(5)
    pane = clipped((np.minimum(tent(panes_x), tent(panes_y)) - np.float32(0.4)) * np.float32(5))
    lit = _scattered(np.floor(panes_x) + np.floor(panes_y) * np.float32(37)) > HALF
    window = wall * pane * lit
    return wall - window, window


_PLACES: dict[str, tuple[_Place, tuple[tuple[float, float, float], ...]]] = {
    "desert": (_desert, ((0.95, 0.82, 0.56), (0.74, 0.50, 0.27), (0.60, 0.38, 0.20))),
    "ocean": (_ocean, ((0.05, 0.27, 0.48), (0.20, 0.58, 0.74), (0.95, 0.98, 1.00))),
    "clouds": (_clouds, ((0.30, 0.55, 0.88), (0.98, 0.98, 0.98), (0.72, 0.86, 0.96))),
    "meadow": (_meadow, ((0.10, 0.34, 0.10), (0.52, 0.76, 0.26), (0.98, 0.90, 0.40))),
    "bricks": (_bricks, ((0.66, 0.25, 0.18), (0.82, 0.42, 0.30), (0.84, 0.80, 0.74))),
    "tiles": (_tiles, ((0.90, 0.88, 0.84), (0.36, 0.36, 0.42), (0.74, 0.74, 0.78))),
    "night": (_night, ((0.03, 0.03, 0.12), (0.32, 0.20, 0.52), (1.00, 0.98, 0.90))),
    "hills": (_hills, ((0.88, 0.90, 0.88), (0.36, 0.56, 0.58), (0.16, 0.34, 0.28))),
    "planks": (_planks, ((0.46, 0.28, 0.14), (0.78, 0.56, 0.34), (0.18, 0.10, 0.05))),
    "city": (_city, ((0.96, 0.62, 0.46), (0.20, 0.17, 0.30), (1.00, 0.90, 0.55))),
}
BACKGROUNDS = tuple(_PLACES)
_PALETTE = np.array([colours for _, colours in _PLACES.values()], dtype=np.float32)


def paint(kinds: NDArray[np.int64], phases: tuple[Array, Array], hue: Array, light: Array, resolution: int) -> Array:
    """[n, 3, h, w] colours of n backgrounds ``kinds`` [n], a kind at a time."""
    line = axis(resolution)
    x, y = line[None, None, :], line[None, :, None]
    colours = turn_hue(_PALETTE[kinds], hue) * column(light)
    image = np.empty((len(kinds), 3, resolution, resolution), dtype=np.float32)
    for kind, (place, _) in enumerate(_PLACES.values()):
        which = np.flatnonzero(kinds == kind)
        if len(which):
            second, third = place(x, y, *(column(phase[which]) for phase in phases))
            first = colours[which, 0, :, None, None]
            mixed = second[:, None] * (colours[which, 1, :, None, None] - first)
            mixed += third[:, None] * (colours[which, 2, :, None, None] - first)
            mixed += first
            image[which] = mixed
    return image
