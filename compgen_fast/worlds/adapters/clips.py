"""Videos of moving objects as single frames with flat factors, for the data sets that are folders of frames.

An object keeps its place through its video, and is coded as absent (see ``objects``) in frames that do not show it.
Positions are world coordinates, whose bounds are the extremes found in the folder.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from compgen_fast.worlds.adapters.columns import Column
from compgen_fast.worlds.adapters.objects import object_factors
from compgen_fast.worlds.source import Factor

AXES = ("x", "y", "z")


@dataclass(frozen=True, eq=False)
class Clip:
    """One video: its images, the lasting properties of its objects, and for each frame where they are and if shown.

    positions: [frames, objects, 3]; shown: [frames, objects].
    """

    images: list[str]
    objects: list[Mapping[str, str]]
    positions: NDArray[np.float32]
    shown: NDArray[np.bool_]


def clip_columns(
    clips: Sequence[Clip], categories: Mapping[str, Sequence[str]], places: int
) -> tuple[tuple[Factor, ...], dict[str, Column]]:
    """Factors and columns for every frame of every clip, in order."""
    factors = object_factors(categories, _bounds(clips), places)
    frames = sum(len(clip.images) for clip in clips)
    columns: dict[str, Column] = {
        factor.name: np.zeros(frames, np.int64) if factor.categorical else np.zeros(frames, np.float32)
        for factor in factors
    }
    codes = {name: {value: code for code, value in enumerate(values, start=1)} for name, values in categories.items()}
    end = 0
    for clip in clips:
        start, end = end, end + len(clip.images)
        span = slice(start, end)
        columns["count"][span] = clip.shown.sum(1)
        for place, thing in enumerate(clip.objects):
            for name, code in codes.items():
                columns[f"object{place}_{name}"][span] = clip.shown[:, place] * code.get(thing[name], 0)
            for axis, name in enumerate(AXES):
                columns[f"object{place}_{name}"][span] = clip.shown[:, place] * clip.positions[:, place, axis]
    return factors, columns


def _bounds(clips: Sequence[Clip]) -> dict[str, tuple[float, float]]:
    low, high = np.zeros(3), np.zeros(3)
    for clip in clips:
        if clip.positions.size:
            low = np.minimum(low, clip.positions.min((0, 1)))
            high = np.maximum(high, clip.positions.max((0, 1)))
    return {name: (float(low[axis]), float(high[axis])) for axis, name in enumerate(AXES)}
