"""Pencils: pixel coordinates, colours, smooth edges, tables of noise, and windows of an image. All fp32, all batched.

Every step is a sum, product, quotient, root or table, which all processors round alike.

The image plane is [−1, 1]², x to the right and y down; colours are planar, [n, 3, height, width], from 0 to 1.
NumPy's ``where``, ``mod``, ``hypot`` and ``arctan2`` cost 5 to 100 times a product in fp32: nothing here uses them.
"""

from functools import cache
from typing import Any, TypeAlias

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from compgen_fast.worlds.chance import Chance

Array: TypeAlias = NDArray[np.float32]

TAU = np.float32(2 * np.pi)
NOISE_SIZE = 512  # texels of a noise table, which repeats
NOISE_SPAN = 128  # texels per unit of the plane: an image of 256 pixels has one texel per pixel


def column(per_sample: Array) -> Array:
    """[n] → [n, 1, 1], to meet pixels."""
    return per_sample[:, None, None]


def axis(resolution: int) -> Array:
    """The centres of a row's pixels."""
    return ((np.arange(resolution, dtype=np.float32) + np.float32(0.5)) * np.float32(2 / resolution)) - np.float32(1)


def clipped(x: Array) -> Array:
    """x between 0 and 1, in place."""
    return np.clip(x, 0, 1, out=x)


def smooth(x: Array) -> Array:
    """The smooth step from 0 at 0 to 1 at 1, in place."""
    clipped(x)
    x *= x * (np.float32(3) - x * np.float32(2))
    return x


def fraction(x: Array) -> Array:
    """x modulo 1."""
    return x - np.floor(x)


def tent(x: Array) -> Array:
    """A wave of period 1 between 0 (at whole numbers) and 1 (half-way)."""
    bent: Array = np.abs(fraction(x) * np.float32(2) - np.float32(1))
    return np.float32(1) - bent


def wave(x: Array) -> Array:
    """A wave of period 1 between −1 and 1, rounder than a tent and cheaper than a sine: parabolas, 0 at 0."""
    x = fraction(x) - np.float32(0.5)
    return x * (np.abs(x) * np.float32(16) - np.float32(8))


def cos_sin(angle: Array) -> tuple[Array, Array]:
    """By way of fp64: NumPy's fp32 cosine depends on the processor in its last bit."""
    wide = angle.astype(np.float64)
    return np.cos(wide).astype(np.float32), np.sin(wide).astype(np.float32)


def hue_to_rgb(hue: Array, chroma: float = 0.42) -> Array:
    """[n] hues of period 1 → [n, 3] colours of equal strength."""
    turned = hue[:, None] + np.array([0, -1 / 3, -2 / 3], dtype=np.float32)
    return clipped(np.float32(0.5) + np.float32(chroma) * cos_sin(TAU * turned)[0])


def turn_hue(colours: Array, turn: Array) -> Array:
    """[n, k, 3] colours, turned about the grey axis by turn [n], a share of a full turn."""
    c, s = cos_sin(TAU * turn)
    grey, side = (np.float32(1) - c) / np.float32(3), s * np.float32(3**-0.5)
    rows = [np.stack([(c + grey), (grey - side), (grey + side)], -1)]
    rows += [np.stack([(grey + side), (c + grey), (grey - side)], -1)]
    rows += [np.stack([(grey - side), (grey + side), (c + grey)], -1)]
    matrix = np.stack(rows, 1)
    return clipped((colours[:, :, None, :] * matrix[:, None]).sum(-1))


def to_bytes(planar: Array) -> NDArray[np.uint8]:
    """[n, 3, h, w] colours → uint8 [n, h, w, 3]. The argument is used up."""
    planar *= np.float32(255)
    planar += np.float32(0.5)
    np.clip(planar, 0, 255, out=planar)
    n, channels, height, width = planar.shape
    images = np.empty((n, height, width, channels), dtype=np.uint8)
    for channel in range(channels):
        images[..., channel] = planar[:, channel]
    return images


@cache
def noise(kind: str, octaves: int, coarsest: int) -> Array:
    """A repeating table of clouds, flat, [NOISE_SIZE²]: octaves of smooth noise, the coarsest of that many texels."""
    table, weight = np.zeros((NOISE_SIZE, NOISE_SIZE), dtype=np.float32), 1.0
    for octave in range(octaves):
        cells = NOISE_SIZE * 2**octave // coarsest
        grid = Chance(0).uniform(f"noise {kind} {octave}", np.arange(cells * cells)).reshape(cells, cells)
        table += np.float32(weight) * _enlarged(_enlarged(grid).T).T
        weight *= 0.5
    table -= table.min()
    table /= table.max()
    return table.ravel()


def _enlarged(grid: Array) -> Array:
    """Rows interpolated smoothly to NOISE_SIZE, wrapping round."""
    cells = len(grid)
    place = np.arange(NOISE_SIZE, dtype=np.float32) * np.float32(cells / NOISE_SIZE)
    low = place.astype(np.int64)
    share = smooth(place - low)[:, None]
    enlarged: Array = grid[low] * (np.float32(1) - share) + grid[(low + 1) % cells] * share
    return enlarged


def noise_at(table: Array, x: Array, y: Array) -> Array:
    """The noise at points given in units of the plane: x and y broadcast against each other."""
    texel_x = np.floor(x * np.float32(NOISE_SPAN)).astype(np.int64) & (NOISE_SIZE - 1)
    texel_y = np.floor(y * np.float32(NOISE_SPAN)).astype(np.int64) & (NOISE_SIZE - 1)
    found: Array = table.take(texel_y * NOISE_SIZE + texel_x)
    return found


class Windows:
    """A square window of ``side`` pixels in each of n images, placed round a centre as far as the frame lets it."""

    def __init__(self, x: Array, y: Array, side: int, resolution: int) -> None:
        self.side, self.resolution = side, resolution
        self.left, self.top = self._start(x), self._start(y)
        self.x, self.y = self._from(x, self.left)[:, None, :], self._from(y, self.top)[:, :, None]

    def _start(self, centre: Array) -> NDArray[np.int64]:
        middle = np.floor((centre + np.float32(1)) * np.float32(self.resolution / 2)).astype(np.int64)
        start: NDArray[np.int64] = np.clip(middle - self.side // 2, 0, self.resolution - self.side)
        return start

    def _from(self, centre: Array, start: NDArray[np.int64]) -> Array:
        """The pixels' coordinates as seen from the centre, [n, side]."""
        seen: Array = axis(self.resolution)[start[:, None] + np.arange(self.side)] - centre[:, None]
        return seen

    def cut(self, images: NDArray[Any], which: slice) -> NDArray[Any]:
        """The pixels [n, …, side, side] of the windows ``which``, one per image of [n, …, height, width]."""
        return self._all(images)[self._at(images, which)]

    def paste(self, images: NDArray[Any], which: slice, pixels: NDArray[Any]) -> None:
        self._all(images)[self._at(images, which)] = pixels

    def _all(self, images: NDArray[Any]) -> NDArray[Any]:
        return sliding_window_view(images, (self.side, self.side), axis=(-2, -1), writeable=True)

    def _at(self, images: NDArray[Any], which: slice) -> tuple[NDArray[np.int64], ...]:
        number, top, left = np.arange(len(images)), self.top[which], self.left[which]
        if images.ndim == 3:
            return number, top, left
        return number[:, None], np.arange(images.shape[1]), top[:, None], left[:, None]
