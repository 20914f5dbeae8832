"""The textures of Scenes: how far each point of an object is between its dark and its light colour.

A texture takes points in the object's own frame, p to the right and q down, the outline at a radius of about 1, and
turns and grows with the object. It says nothing about hue: no texture can be told by colour.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from compgen_fast.worlds.drawing import Array, clipped, fraction, noise, noise_at, tent, wave

HALF = np.float32(0.5)


def _edge(x: Array, gain: float) -> Array:
    """0 and 1 on the two sides of x = 0, with a soft step between."""
    return clipped(HALF + x * np.float32(gain))


def _stripes(p: Array, q: Array) -> Array:
    return _edge(wave(q * np.float32(1.7)), 1.6)


def _checks(p: Array, q: Array) -> Array:
    return _edge(wave(p * np.float32(1.15)) * wave(q * np.float32(1.15)), 3.0)


def _dots(p: Array, q: Array) -> Array:
    u, v = fraction(p * np.float32(1.6)) - HALF, fraction(q * np.float32(1.6)) - HALF
    return _edge(np.float32(0.09) - u * u - v * v, 10.0)


def _rings(p: Array, q: Array) -> Array:
    return _edge(wave(np.sqrt(p * p + q * q) * np.float32(2.1)), 1.6)


def _zigzag(p: Array, q: Array) -> Array:
    return _edge(wave(q * np.float32(1.6) + tent(p * np.float32(1.6)) * np.float32(0.7)), 1.6)


def _rays(p: Array, q: Array) -> Array:
    """cos 6φ by angle addition: φ itself would need an arctangent."""
    pp, qq = p * p, q * q
    scale = np.float32(1) / (pp + qq + np.float32(1e-3))
    cosine = (pp - qq) * scale
    return _edge(cosine * (np.float32(4) * cosine * cosine - np.float32(3)), 1.8)


def _net(p: Array, q: Array) -> Array:
    u, v = p * np.float32(1.15), q * np.float32(1.15)
    return _edge(np.minimum(tent(u + v), tent(u - v)) - np.float32(0.3), 3.2)


def _marble(p: Array, q: Array) -> Array:
    veins = noise_at(noise("marble", 3, 128), p * np.float32(0.5), q * np.float32(0.5))
    return _edge(wave(p * np.float32(0.6) + veins * np.float32(2.2)), 0.8)


def _patches(p: Array, q: Array) -> Array:
    return _edge(noise_at(noise("patches", 1, 64), p * np.float32(0.8), q * np.float32(0.8)) - np.float32(0.52), 9.0)


def _grain(p: Array, q: Array) -> Array:
    return _edge(noise_at(noise("grain", 1, 16), p * np.float32(0.6), q * np.float32(0.6)) - np.float32(0.5), 2.2)


_TEXTURES: dict[str, Callable[[Array, Array], Array]] = {
    texture.__name__[1:]: texture
    for texture in (_stripes, _checks, _dots, _rings, _zigzag, _rays, _net, _marble, _patches, _grain)
}
TEXTURES = tuple(_TEXTURES)


def textured(kinds: NDArray[np.int64], p: Array, q: Array) -> Array:
    """[n, h, w] from 0 to 1 of n objects with textures ``kinds`` [n], a kind at a time."""
    tone = np.empty_like(p)
    for kind, texture in enumerate(_TEXTURES.values()):
        which = np.flatnonzero(kinds == kind)
        if len(which):
            tone[which] = texture(p[which], q[which])
    return tone
