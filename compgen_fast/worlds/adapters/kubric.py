"""Folders written by Kubric (Greff et al., 2022), such as the MOVi data sets before they became TFRecords, with masks.

Each scene is a folder of frames. The palette number of ``segmentation_*.png`` is the instance, from 1 in the order of
metadata.json, with 0 as background. Which properties an instance has depends on the worker script that made the scene:
shape, size_label, material and color_label in MOVi-A and B, asset_id and category in MOVi-C to F; those found become
factors, with the values found. Opening reads every metadata.json once.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compgen_fast.worlds.adapters.clips import Clip, clip_columns
from compgen_fast.worlds.adapters.folder_source import FolderSource
from compgen_fast.worlds.adapters.layout import Layout
from compgen_fast.worlds.adapters.objects import ABSENT, object_slots

LAYOUT = Layout(
    "a Kubric folder",
    """
    FOLDER/
      SCENE/                          any name; or FOLDER is itself a scene
        rgba_00000.png …
        segmentation_00000.png …
        metadata.json                 instances: positions for each frame, shape or asset_id, …
    """,
)
PROPERTIES = ("shape", "asset_id", "category", "size_label", "material", "color_label")
_FRAME = re.compile(r"rgba_([0-9]+)\.png")


def kubric(
    folder: str | Path, *, resolution: int = 64, stride: int = 1, max_objects: int | None = None
) -> FolderSource:
    """Frames of Kubric scenes.

    Args:
        folder: holds a folder for each scene, or is one.
        resolution: side of the square images given out.
        stride: take every n-th frame of a scene.
        max_objects: scenes of more instances are left out; None makes room for the largest scene found.
    """
    root = LAYOUT.folder(folder)
    if stride < 1:
        raise ValueError(f"kubric: stride is {stride}; expected at least 1")
    alone = (root / "metadata.json").exists()
    scenes = [root] if alone else sorted(path for path in root.iterdir() if path.is_dir())
    clips = [_clip(root, scene, stride) for scene in scenes]
    places = max((len(clip.objects) for clip in clips), default=0) if max_objects is None else max_objects
    clips = [clip for clip in clips if len(clip.objects) <= places]
    if not clips:
        raise LAYOUT.odd(root, "no scene was found" if not scenes else f"no scene has at most {places} instances")
    found = {name: {thing[name] for clip in clips for thing in clip.objects} - {ABSENT} for name in PROPERTIES}
    factors, columns = clip_columns(clips, {name: sorted(values) for name, values in found.items() if values}, places)
    images = tuple(image for clip in clips for image in clip.images)
    masks = tuple(re.sub(r"rgba_([0-9]+\.png)$", r"segmentation_\1", image) for image in images)
    return FolderSource("kubric", root, factors, columns, images, resolution, masks, object_slots(places))


def _clip(root: Path, scene: Path, stride: int) -> Clip:
    path = scene / "metadata.json"
    instances = LAYOUT.entry(path, LAYOUT.json(path), "instances", list)
    numbers = _frames(scene)[::stride]
    prefix = "" if scene == root else f"{scene.relative_to(root).as_posix()}/"
    return Clip(
        images=[f"{prefix}rgba_{number}.png" for number in numbers],
        objects=[_properties(thing) for thing in instances],
        positions=_tracks(path, instances, "positions", numbers, 3),
        shown=_shown(path, instances, numbers),
    )


def _frames(scene: Path) -> list[str]:
    """The numbers of the frames as written in the files' names."""
    names = {path.name for path in scene.iterdir()}
    numbers = sorted((match[1] for name in names if (match := _FRAME.fullmatch(name))), key=int)
    if not numbers:
        raise LAYOUT.odd(scene, "there is no image rgba_*.png")
    for number in numbers:
        if f"segmentation_{number}.png" not in names:
            raise LAYOUT.odd(scene / f"segmentation_{number}.png", "there is no such file, though the frame's image is")
    return numbers


def _properties(thing: Any) -> Mapping[str, str]:
    found = {name: thing.get(name) for name in PROPERTIES} if isinstance(thing, dict) else {}
    return {name: value if isinstance(value := found.get(name), str) else ABSENT for name in PROPERTIES}


def _shown(path: Path, instances: list[Any], numbers: list[str]) -> NDArray[np.bool_]:
    """[frames, instances]: where at least a pixel is visible; everywhere if the file does not say."""
    if any(not isinstance(thing, dict) or "visibility" not in thing for thing in instances):
        return np.ones((len(numbers), len(instances)), bool)
    return _tracks(path, instances, "visibility", numbers, 1)[..., 0] > 0


def _tracks(path: Path, instances: list[Any], key: str, numbers: list[str], width: int) -> NDArray[np.float32]:
    """[frames, instances, width] of a property that instances have for each frame."""
    tracks = np.zeros((len(numbers), len(instances), width), np.float32)
    last = int(numbers[-1])
    for index, thing in enumerate(instances):
        listed = LAYOUT.entry(path, thing, key, list)
        try:
            track = np.array(listed, np.float32).reshape(-1, width)
        except (TypeError, ValueError):
            raise LAYOUT.odd(path, f"{key!r} of instance {index} is not {width} numbers for each frame") from None
        if len(track) <= last:
            raise LAYOUT.odd(path, f"{key!r} of instance {index} has {len(track)} frames; the images go to {last}")
        tracks[:, index] = track[[int(number) for number in numbers]]
    return tracks
