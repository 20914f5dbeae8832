"""CLEVRTex (Karazija et al., 2021) and its variants: textured objects on a textured ground, with masks.

Each scene has a png, a json and a ``_flat.png`` whose palette numbers are the objects, from 1 in the order of the json,
with 0 as background. Materials and shapes differ between the variants (full, outd, camo, pbg, vbg, grassbg), so values
are those found in the folder, over all parts. An object's colour is read in vbg only: elsewhere it is in the file but
not in the image. Opening reads every json once.

As in the authors' loader the parts are the first tenth of the scenes by number (test), the second (validation) and the
rest (train). Their loader also zooms in by 0.8 before resizing; here the whole middle square is kept.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from compgen_fast.worlds.adapters.columns import Column, category
from compgen_fast.worlds.adapters.folder_source import FolderSource
from compgen_fast.worlds.adapters.layout import Layout, files_below
from compgen_fast.worlds.adapters.objects import Thing, object_columns, object_factors, object_slots
from compgen_fast.worlds.source import Factor

LAYOUT = Layout(
    "CLEVRTex",
    """
    clevrtex_full/
      0/CLEVRTEX_full_000000.png           the image
      0/CLEVRTEX_full_000000.json          ground_material, objects
      0/CLEVRTEX_full_000000_flat.png      which object each pixel shows
      …                                    the folders 0, 1, … are optional
    """,
)
PARTS = {"all": (0.0, 1.0), "test": (0.0, 0.1), "validation": (0.1, 0.2), "train": (0.2, 1.0)}
NUMBERS = {"x": (-3.0, 3.0), "y": (-3.0, 3.0), "rotation": (0.0, 360.0)}


_IMAGE = re.compile(r"(.*/)?CLEVRTEX_[a-z]+_[0-9]+\.png", re.IGNORECASE)


class _Scene(NamedTuple):
    ground: str
    objects: list[Thing]


def clevrtex(folder: str | Path, *, resolution: int = 64, part: str = "all", max_objects: int = 10) -> FolderSource:
    """CLEVRTex or one of its variants. Scenes of more than ``max_objects`` objects are left out."""
    LAYOUT.choice("part", part, PARTS)
    root = LAYOUT.folder(folder)
    stems = _stems(root)
    properties = ("shape", "size", "material", *(("color",) if "_vbg_" in stems[0] else ()))
    scenes = [_scene(root / f"{stem}.json", properties) for stem in stems]
    low, high = (int(share * len(stems)) for share in PARTS[part])
    kept = [index for index in range(low, high) if len(scenes[index].objects) <= max_objects]
    if not kept:
        raise LAYOUT.odd(root, f"part {part!r} has no scene of at most {max_objects} objects")
    factors, columns = _columns(scenes, kept, properties, max_objects)
    return FolderSource(
        f"clevrtex-{part}",
        root,
        factors,
        columns,
        tuple(f"{stems[index]}.png" for index in kept),
        resolution,
        tuple(f"{stems[index]}_flat.png" for index in kept),
        object_slots(max_objects),
    )


def _stems(root: Path) -> list[str]:
    """Scenes by number, as paths without ending; each must have its image, json and mask."""
    files = files_below(root, (".png", ".json"))
    stems = [name.removesuffix(".png") for name in files if _IMAGE.fullmatch(name)]
    if not stems:
        raise LAYOUT.odd(root, "no image CLEVRTEX_*_NNNNNN.png was found")
    for stem in stems:
        for ending in (".json", "_flat.png"):
            if f"{stem}{ending}" not in files:
                raise LAYOUT.odd(root / f"{stem}{ending}", "there is no such file, though the scene's image is there")
    if alone := min((name for name in files if _alone(name, files)), default=None):
        raise LAYOUT.odd(root / alone, "the scene's image is not there")
    return sorted(stems, key=lambda stem: stem.rpartition("/")[2])


def _alone(name: str, files: set[str]) -> bool:
    image = name.removesuffix(".json") + ".png"
    return name.endswith(".json") and image not in files and _IMAGE.fullmatch(image) is not None


def _scene(path: Path, properties: Sequence[str]) -> _Scene:
    record = LAYOUT.json(path)
    objects = [_object(path, thing, properties) for thing in LAYOUT.entry(path, record, "objects", list)]
    return _Scene(LAYOUT.entry(path, record, "ground_material", str), objects)


def _object(path: Path, thing: Any, properties: Sequence[str]) -> Thing:
    found: dict[str, str | float] = {name: LAYOUT.entry(path, thing, name, str) for name in properties}
    found["x"], found["y"] = LAYOUT.numbers(path, thing, "3d_coords", 2)
    found["rotation"] = LAYOUT.entry(path, thing, "rotation", float)
    return found


def _columns(
    scenes: Sequence[_Scene], kept: Sequence[int], properties: Sequence[str], places: int
) -> tuple[tuple[Factor, ...], dict[str, Column]]:
    """Values are those of all scenes, so that they are the same in every part."""
    values = {name: sorted({str(thing[name]) for scene in scenes for thing in scene.objects}) for name in properties}
    grounds = tuple(sorted({scene.ground for scene in scenes}))
    ground, of_ground = category("ground_material", grounds, [scenes[index].ground for index in kept])
    factors = object_factors(values, NUMBERS, places)
    columns = object_columns([scenes[index].objects for index in kept], factors, places)
    return (ground, *factors), {ground.name: of_ground, **columns}
