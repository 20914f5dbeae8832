"""Which images of a folder can be read. All are decoded once, before anything is made of them."""

from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
from numpy.typing import NDArray

from compgen_fast.progress import following
from compgen_fast.worlds.adapters.folder_source import FolderSource, Tabled, View
from compgen_fast.worlds.adapters.pixels import BadImage

_CHUNK = 16


def unreadable(source: Tabled, *, workers: int = 1, progress: bool = False) -> dict[str, str]:
    """What is wrong with each image that cannot be read, by its path from the folder.

    ``workers`` are threads: PIL decodes without the interpreter's lock.
    """
    files, chosen = _files(source)
    if not isinstance(files, FolderSource):
        return {}
    chunks = [chosen[start : start + _CHUNK] for start in range(0, len(chosen), _CHUNK)]
    found: dict[str, str] = {}
    with (
        ThreadPoolExecutor(workers) as pool,
        following(f"check {source.name}", len(chosen), "images", show=progress) as advance,
    ):
        for chunk, faults in zip(chunks, pool.map(partial(_faults, files), chunks), strict=True):
            found |= faults
            advance(len(chunk))
    return found


def without(source: Tabled, images: Collection[str]) -> Tabled:
    """The source without these images, given by their paths from the folder."""
    files, chosen = _files(source)
    if not images or not isinstance(files, FolderSource):
        return source
    kept = [position for position, index in enumerate(chosen) if files.images[index] not in images]
    return View(source.name, source, np.array(kept, np.int64))


def _files(source: Tabled) -> tuple[Tabled, NDArray[np.int64]]:
    """What the views of a source are on in the end, and its numbers for the source's samples."""
    chosen = np.arange(len(source))
    while isinstance(source, View):
        chosen, source = source.chosen[chosen], source.source
    return source, chosen


def _faults(files: FolderSource, indices: NDArray[np.int64]) -> dict[str, str]:
    found = {}
    for index in indices.tolist():
        try:
            files.check(index)
        except BadImage as bad:
            image = files.images[index]
            found[image] = bad.what if bad.path == files.folder / image else f"{bad.path.name}: {bad.what}"
    return found
