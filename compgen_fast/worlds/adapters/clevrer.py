"""CLEVRER (Yi et al., 2020): videos of colliding objects, read as frames.

CLEVRER comes as mp4 videos and one annotation file for each. Unpack the videos to images first, all 128 frames of each:
``ffmpeg -i video_00000.mp4 frames/video_00000/%03d.png``. The k-th image of a folder is frame k, whatever the numbers
start from. How the folders above nest does not matter. The parts go by the video's number, as published: train below
10000, validation below 15000; the test videos have no annotations. There are no masks.

Opening reads every annotation once, and at stride 1 the factors of the 1.28 million training frames fill about 280 MB;
neighbouring frames hardly differ, so a stride of 8 or 16 loses little.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np

from compgen_fast.worlds.adapters.clevr import CATEGORIES as CLEVR_CATEGORIES
from compgen_fast.worlds.adapters.clips import Clip, clip_columns
from compgen_fast.worlds.adapters.folder_source import FolderSource
from compgen_fast.worlds.adapters.layout import Layout, files_below

LAYOUT = Layout(
    "CLEVRER",
    """
    FOLDER/
      …/annotation_00000.json       object_property, motion_trajectory
      …/video_00000/000.png …       the video's frames, all of them, as images
    """,
)
PARTS = {"all": range(20000), "train": range(10000), "validation": range(10000, 15000)}
CATEGORIES = {name: CLEVR_CATEGORIES[name] for name in ("shape", "material", "color")}
_ANNOTATION = re.compile(r"(?:.*/)?annotation_([0-9]+)\.json")
_VIDEO = re.compile(r"(?:.*/)?video_([0-9]+)/[^/]+")


def clevrer(
    folder: str | Path, *, resolution: int = 64, part: str = "all", stride: int = 1, max_objects: int = 6
) -> FolderSource:
    """CLEVRER's frames.

    Args:
        folder: holds the annotations and the folders of frames, at any depth.
        resolution: side of the square images given out.
        part: ``train``, ``validation`` or ``all``.
        stride: take every n-th frame of a video.
        max_objects: videos of more objects are left out.
    """
    LAYOUT.choice("part", part, PARTS)
    if stride < 1:
        raise ValueError(f"clevrer: stride is {stride}; expected at least 1")
    root = LAYOUT.folder(folder)
    annotations, videos = _annotations(root), _videos(root)
    if missing := min(annotations.keys() - videos.keys(), default=None):
        raise LAYOUT.odd(root / f"video_{missing}", "there is no folder of frames for this video, which is annotated")
    if missing := min(videos.keys() - annotations.keys(), default=None):
        raise LAYOUT.odd(root / f"annotation_{missing}.json", "there is no such file, though the frames are there")
    chosen = [number for number in sorted(annotations) if int(number) in PARTS[part]]
    clips = [_clip(root / annotations[number], videos[number], stride) for number in chosen]
    clips = [clip for clip in clips if len(clip.objects) <= max_objects]
    if not clips:
        raise LAYOUT.odd(root, f"part {part!r} has no video of at most {max_objects} objects")
    factors, columns = clip_columns(clips, CATEGORIES, max_objects)
    images = tuple(image for clip in clips for image in clip.images)
    return FolderSource(f"clevrer-{part}", root, factors, columns, images, resolution)


def _annotations(root: Path) -> dict[str, str]:
    """Annotation files by the video's number."""
    found = {match[1]: name for name in files_below(root, (".json",)) if (match := _ANNOTATION.fullmatch(name))}
    if not found:
        raise LAYOUT.odd(root, "no annotation_NNNNN.json was found")
    return found


def _videos(root: Path) -> dict[str, list[str]]:
    """Images in order by the video's number; a shorter name comes first, so that 9 comes before 10."""
    found: dict[str, list[str]] = {}
    for name in sorted(files_below(root), key=lambda name: (len(name), name)):
        if match := _VIDEO.fullmatch(name):
            found.setdefault(match[1], []).append(name)
    return found


def _clip(path: Path, images: list[str], stride: int) -> Clip:
    record = LAYOUT.json(path)
    things = LAYOUT.entry(path, record, "object_property", list)
    frames = LAYOUT.entry(path, record, "motion_trajectory", list)
    if len(images) != len(frames):
        parent = images[0].rpartition("/")[0]
        raise LAYOUT.odd(path, f"it describes {len(frames)} frames, but {parent} holds {len(images)} images")
    places = {LAYOUT.entry(path, thing, "object_id", int): place for place, thing in enumerate(things)}
    objects = [{name: _value(path, thing, name) for name in CATEGORIES} for thing in things]
    chosen = frames[::stride]
    positions = np.zeros((len(chosen), len(things), 3), np.float32)
    shown = np.zeros((len(chosen), len(things)), bool)
    for index, frame in enumerate(chosen):
        for thing in LAYOUT.entry(path, frame, "objects", list):
            place = places.get(LAYOUT.entry(path, thing, "object_id", int))
            if place is None:
                raise LAYOUT.odd(path, f"motion_trajectory moves object {thing['object_id']}, which has no properties")
            positions[index, place] = LAYOUT.numbers(path, thing, "location", 3)
            shown[index, place] = LAYOUT.entry(path, thing, "inside_camera_view", bool)
    return Clip(images[::stride], list(objects), positions, shown)


def _value(path: Path, thing: Any, name: str) -> str:
    value = LAYOUT.entry(path, thing, name, str)
    if value not in CATEGORIES[name]:
        raise LAYOUT.odd(path, f"an object's {name} is {value!r}; it should be one of {', '.join(CATEGORIES[name])}")
    return value
