"""PUG: SPAR and PUG: Animals (Bordes et al., 2023): photorealistic animals on backgrounds, with a csv of factors.

The names of the tables and columns are those the authors' loader and public users of the data read. Where an image lies
is less certain: SPAR's table gives its path from the folder, while for Animals it has been seen in a folder for each
animal. Both are looked for, as are a folder for each world and one called images. Images without a line in the
table are left out, since the authors advise dropping badly rendered ones by dropping their lines.

PUG is published under CC-BY-NC with an addendum against training generative models on it: read it before you train.
"""

from collections.abc import Sequence
from pathlib import Path

from compgen_fast.worlds.adapters.columns import infer
from compgen_fast.worlds.adapters.folder_source import FolderSource
from compgen_fast.worlds.adapters.layout import Layout, files_below

SPAR = Layout(
    "PUG: SPAR",
    """
    PUG_SPAR/
      labels.csv        filename,world_name,character_name,character2_name,character1_pos,…
      *.png             where `filename` says, or in a folder for each world or animal
    """,
)
ANIMALS = Layout(
    "PUG: Animals",
    """
    PUG_ANIMAL/
      labels_pug_animal.csv    (or labels.csv) filename,world_name,character_name,character_scale,…
      Elephant/*.png           a folder for each animal (or world), or where `filename` says
    """,
)
_SPAR_FACTORS = (
    "world_name",
    "character_name",
    "character2_name",
    "character1_pos",
    "character2_pos",
    "character_texture",
    "character2_texture",
)
_ANIMALS_FACTORS = ("world_name", "character_name", "character_scale", "character_texture", "camera_yaw")


def pug_spar(folder: str | Path, *, resolution: int = 64) -> FolderSource:
    """One or two animals on one of ten backgrounds; an animal that is not there is called ``blank``."""
    return _open(SPAR, "pug-spar", folder, ("labels.csv",), _SPAR_FACTORS, resolution)


def pug_animals(folder: str | Path, *, resolution: int = 64) -> FolderSource:
    """One of 70 animals on one of 64 backgrounds, in three sizes, four textures and four views."""
    tables = ("labels_pug_animal.csv", "labels.csv")
    return _open(ANIMALS, "pug-animals", folder, tables, _ANIMALS_FACTORS, resolution)


def _open(
    layout: Layout, name: str, folder: str | Path, tables: Sequence[str], names: Sequence[str], resolution: int
) -> FolderSource:
    root = layout.folder(folder)
    path = layout.first(root, *tables)
    text = layout.rows(path, ("filename", *names))
    there = files_below(root)
    places = zip(text.pop("filename"), text["world_name"], text["character_name"], strict=True)
    images = [_found(there, *place) for place in places]
    layout.match(root, there, path, images, unlisted=True)
    factors, columns = infer(layout, path, text)
    return FolderSource(name, root, factors, columns, tuple(images), resolution)


def _found(there: set[str], filename: str, world: str, character: str) -> str:
    """Where the image is; where the table says it should be if it is nowhere."""
    for place in (filename, f"{character}/{filename}", f"{world}/{filename}", f"images/{filename}"):
        if place in there:
            return place
    return filename
