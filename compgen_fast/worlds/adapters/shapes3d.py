"""Shapes3D (Burgess and Kim, 2018): one object in a room, every combination of six factors once, in one HDF5 file.

The labels are read on opening, images only when asked for and only the rows asked for. The file is opened for each
call, so that the source can be sent to another process. Hues, scale and orientation are numbers (10, 10, 10, 8 and 15
distinct ones); the shapes' names are not in the file, they are how the four look.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compgen_fast.worlds.adapters.columns import Column, Columns
from compgen_fast.worlds.adapters.columns import number as number_column
from compgen_fast.worlds.adapters.folder_source import check_indices, check_resolution, rows
from compgen_fast.worlds.adapters.layout import Layout
from compgen_fast.worlds.adapters.pixels import resized
from compgen_fast.worlds.source import Factor, Samples

LAYOUT = Layout(
    "Shapes3D",
    """
    FOLDER/
      3dshapes.h5      images: uint8 [480000, 64, 64, 3]
                       labels: float [480000, 6], floor_hue, wall_hue, object_hue, scale, shape, orientation
    """,
)
NAMES = ("floor_hue", "wall_hue", "object_hue", "scale", "shape", "orientation")
SHAPES = ("cube", "cylinder", "sphere", "capsule")


@dataclass(frozen=True, eq=False)
class Shapes3D:
    """The rows of the HDF5 file."""

    path: Path
    factors: tuple[Factor, ...]
    table: Columns
    resolution: int
    name: str = "shapes3d"
    slots: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.table["shape"])

    def samples(self, indices: NDArray[np.int64]) -> Samples:
        check_indices(self, indices)
        distinct, back = np.unique(indices, return_inverse=True)  # HDF5 reads rows in increasing order, once each
        with _opened(self.path) as file:
            stored = file["images"][distinct]
        images = np.empty((len(distinct), self.resolution, self.resolution, 3), np.uint8)
        for row, image in enumerate(stored):
            images[row] = resized(image, self.resolution)
        return Samples(images[back], rows(self.table, indices))


def shapes3d(folder: str | Path, *, resolution: int = 64) -> Shapes3D:
    """Shapes3D from the folder that holds 3dshapes.h5, or from the file itself."""
    check_resolution("shapes3d", resolution)
    path = Path(folder)
    if not path.is_file():
        path = LAYOUT.first(LAYOUT.folder(folder), "3dshapes.h5")
    with _opened(path) as file:
        labels = _labels(path, file)
    factors: list[Factor] = []
    table: dict[str, Column] = {}
    for name, cells in zip(NAMES, labels.T, strict=True):
        if name == "shape":
            factors.append(Factor(name, SHAPES))
            table[name] = cells.astype(np.int64)
        else:
            factor, table[name] = number_column(name, cells)
            factors.append(factor)
    return Shapes3D(path, tuple(factors), table, resolution)


def _labels(path: Path, file: Any) -> NDArray[np.float32]:
    for name, ndim, last in (("images", 4, 3), ("labels", 2, len(NAMES))):
        found = file.get(name)
        shape = list(getattr(found, "shape", ()))
        if len(shape) != ndim or shape[-1] != last or shape[0] == 0:
            keys = ", ".join(f"{key} {list(getattr(file[key], 'shape', ()))}" for key in file) or "nothing"
            raise LAYOUT.odd(path, f"there is no {name!r} of the right shape; the file holds {keys}")
    images, labels = file["images"], np.asarray(file["labels"], np.float32)
    if images.dtype != np.uint8 or len(images) != len(labels):
        raise LAYOUT.odd(path, f"there are {len(images)} images of type {images.dtype} and {len(labels)} labels")
    if not set(np.unique(labels[:, NAMES.index("shape")])) <= set(range(len(SHAPES))):
        raise LAYOUT.odd(path, "a shape's label is not one of 0, 1, 2, 3")
    return labels


def _opened(path: Path) -> Any:
    try:
        import h5py  # type: ignore[import-untyped]
    except ImportError:
        raise ImportError("shapes3d: reading 3dshapes.h5 needs h5py; pip install h5py") from None
    try:
        return h5py.File(path, "r")
    except OSError as error:
        raise LAYOUT.odd(path, f"this is not a readable HDF5 file ({error})") from None
