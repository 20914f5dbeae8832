"""A ``Source`` over image files and factor columns, and a view on some of the samples of another source."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from compgen_fast.worlds.adapters.columns import Columns
from compgen_fast.worlds.adapters.pixels import MADE, Fit, decoded_image, read_image, read_mask
from compgen_fast.worlds.source import Factor, Samples, Source


class Tabled(Source, Protocol):
    """A source whose factors are all known without decoding an image."""

    @property
    def table(self) -> Columns:
        """The factors of every sample, as in ``Samples.factors``."""
        ...


@dataclass(frozen=True, eq=False)
class FolderSource:
    """Images below a folder, decoded when asked for; holds names and numbers only, so it is cheap to send to workers.

    images, masks: paths from the folder, one for each sample; no masks where the data set has none.
    fit: whether the middle square of an image is kept, or all of it on black.
    """

    name: str
    folder: Path
    factors: tuple[Factor, ...]
    table: Columns
    images: tuple[str, ...]
    resolution: int
    masks: tuple[str, ...] = ()
    slots: tuple[str, ...] = ()
    fit: Fit = "crop"

    def __post_init__(self) -> None:
        check_resolution(self.name, self.resolution)
        if self.fit not in MADE:
            raise ValueError(f"{self.name}: fit is {self.fit!r}; expected {' or '.join(MADE)}")

    def __len__(self) -> int:
        return len(self.images)

    @property
    def made(self) -> str:
        return MADE[self.fit]

    def check(self, index: int) -> None:
        """Raises `BadImage` if the image or its mask cannot be read."""
        path = self.folder / self.images[index]
        decoded_image(path)
        if self.masks:
            self._mask(index, path)

    def samples(self, indices: NDArray[np.int64]) -> Samples:
        check_indices(self, indices)
        size = (len(indices), self.resolution, self.resolution)
        images, masks = np.empty((*size, 3), np.uint8), np.empty(size, np.uint8) if self.masks else None
        for row, index in enumerate(indices):
            path = self.folder / self.images[index]
            images[row] = read_image(path, self.resolution, self.fit)
            if masks is not None:
                masks[row] = self._mask(index, path)
        return Samples(images, rows(self.table, indices), masks)

    def _mask(self, index: int, image: Path) -> NDArray[np.uint8]:
        return read_mask(self.folder / self.masks[index], image, self.resolution, len(self.slots), self.fit)


@dataclass(frozen=True, eq=False)
class View:
    """Some samples of another source, in the order given: sample i of the view is the source's ``chosen[i]``."""

    name: str
    source: Tabled
    chosen: NDArray[np.int64]

    @property
    def factors(self) -> tuple[Factor, ...]:
        return self.source.factors

    @property
    def slots(self) -> tuple[str, ...]:
        return self.source.slots

    @property
    def made(self) -> str:
        return str(getattr(self.source, "made", ""))

    @property
    def table(self) -> Columns:
        return rows(self.source.table, self.chosen)

    def __len__(self) -> int:
        return len(self.chosen)

    def samples(self, indices: NDArray[np.int64]) -> Samples:
        check_indices(self, indices)
        return self.source.samples(self.chosen[indices])


def rows(table: Columns, indices: NDArray[np.int64]) -> Columns:
    return {name: column[indices] for name, column in table.items()}


def check_resolution(name: str, resolution: int) -> None:
    if resolution < 1:
        raise ValueError(f"{name}: resolution is {resolution}; expected at least 1 pixel")


def check_indices(source: Source, indices: NDArray[np.int64]) -> None:
    if len(indices) and not 0 <= indices.min() <= indices.max() < len(source):
        raise IndexError(
            f"{source.name}: asked for samples {indices.min()} to {indices.max()}; there are {len(source)}, from 0"
        )
