"""CLEVR and CLEVR-CoGenT (Johnson et al., 2017): scenes of three to ten simple objects.

Scene files exist for the parts train and val, in CoGenT trainA, valA and valB; the test parts were published without.
Positions are the x and y of ``3d_coords``, in the scene's own units: pixel positions would move with the crop, and the
height z follows from the size. There are no masks.
"""

from pathlib import Path
from typing import Any

from compgen_fast.worlds.adapters.folder_source import FolderSource
from compgen_fast.worlds.adapters.layout import Layout, files_below
from compgen_fast.worlds.adapters.objects import Thing, object_columns, object_factors

CLEVR = Layout(
    "CLEVR",
    """
    CLEVR_v1.0/
      images/train/CLEVR_train_000000.png …        (val likewise)
      scenes/CLEVR_train_scenes.json
    """,
)
COGENT = Layout(
    "CLEVR-CoGenT",
    """
    CLEVR_CoGenT_v1.0/
      images/trainA/CLEVR_trainA_000000.png …      (valA, valB likewise)
      scenes/CLEVR_trainA_scenes.json
    """,
)
CATEGORIES = {
    "shape": ("cube", "cylinder", "sphere"),
    "size": ("small", "large"),
    "material": ("metal", "rubber"),
    "color": ("blue", "brown", "cyan", "gray", "green", "purple", "red", "yellow"),
}
NUMBERS = {"x": (-3.0, 3.0), "y": (-3.0, 3.0), "rotation": (0.0, 360.0)}


def clevr(folder: str | Path, *, resolution: int = 64, part: str = "train", max_objects: int = 10) -> FolderSource:
    """CLEVR's ``train`` or ``val``. Scenes of more than ``max_objects`` objects are left out: 6 gives CLEVR6."""
    CLEVR.choice("part", part, ("train", "val"))
    return _open(CLEVR, "clevr", folder, resolution, part, max_objects)


def cogent(folder: str | Path, *, resolution: int = 64, part: str = "trainA", max_objects: int = 10) -> FolderSource:
    """CoGenT's ``trainA`` or ``valA``, whose cubes and cylinders have colours of their own, or ``valB``, swapped."""
    COGENT.choice("part", part, ("trainA", "valA", "valB"))
    return _open(COGENT, "cogent", folder, resolution, part, max_objects)


def _open(layout: Layout, name: str, folder: str | Path, resolution: int, part: str, max_objects: int) -> FolderSource:
    root = layout.folder(folder)
    path = layout.first(root, f"scenes/CLEVR_{part}_scenes.json")
    pictures = layout.first(root, f"images/{part}")
    records = layout.entry(path, layout.json(path), "scenes", list)
    images = [layout.entry(path, record, "image_filename", str) for record in records]
    layout.match(pictures, files_below(pictures), path, images, unlisted=False)
    scenes = [
        [read_object(layout, path, thing) for thing in layout.entry(path, record, "objects", list)]
        for record in records
    ]
    kept = [index for index, scene in enumerate(scenes) if len(scene) <= max_objects]
    if not kept:
        raise layout.odd(path, f"no scene has at most {max_objects} objects")
    factors = object_factors(CATEGORIES, NUMBERS, max_objects)
    columns = object_columns([scenes[index] for index in kept], factors, max_objects)
    return FolderSource(f"{name}-{part}", pictures, factors, columns, tuple(images[i] for i in kept), resolution)


def read_object(layout: Layout, path: Path, thing: Any) -> Thing:
    """An object of a scene file with CLEVR's vocabulary."""
    found: dict[str, str | float] = {}
    for name, values in CATEGORIES.items():
        found[name] = layout.entry(path, thing, name, str)
        if found[name] not in values:
            raise layout.odd(path, f"an object's {name} is {found[name]!r}; it should be one of {', '.join(values)}")
    found["x"], found["y"] = layout.numbers(path, thing, "3d_coords", 2)
    found["rotation"] = layout.entry(path, thing, "rotation", float)
    return found
