"""Public data sets on a user's disk, each opened as a ``Source`` with named factors.

``open_folder("clevr", "CLEVR_v1.0", part="val", resolution=128)`` lists the files and reads the tables; images are
decoded when samples are asked for. ``held_out`` splits any of them by combinations of two factors, ``compositions`` by
three binary ones.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Any

from compgen_fast.worlds.adapters.celeba import celeba
from compgen_fast.worlds.adapters.clevr import clevr, cogent
from compgen_fast.worlds.adapters.clevrer import clevrer
from compgen_fast.worlds.adapters.clevrtex import clevrtex
from compgen_fast.worlds.adapters.compositions import Compositions, compositions
from compgen_fast.worlds.adapters.folder_source import Tabled, View
from compgen_fast.worlds.adapters.held_out import HeldOut, held_out
from compgen_fast.worlds.adapters.image_folder import image_folder
from compgen_fast.worlds.adapters.kubric import kubric
from compgen_fast.worlds.adapters.layout import FolderError
from compgen_fast.worlds.adapters.pug import pug_animals, pug_spar
from compgen_fast.worlds.adapters.shapes3d import shapes3d

__all__ = [
    "ADAPTERS", "Compositions", "FolderError", "HeldOut", "Tabled", "View", "compositions", "held_out", "open_folder",
]  # fmt: skip

ADAPTERS: dict[str, Callable[..., Tabled]] = {
    "images": image_folder,
    "pug-spar": pug_spar,
    "pug-animals": pug_animals,
    "clevr": clevr,
    "cogent": cogent,
    "clevrtex": clevrtex,
    "celeba": celeba,
    "shapes3d": shapes3d,
    "kubric": kubric,
    "clevrer": clevrer,
}


def open_folder(name: str, folder: str | Path, **options: Any) -> Tabled:
    """Open a folder by the adapter's name, with that adapter's options (all take ``resolution``).

    An option that is None counts as not given.
    """
    if name not in ADAPTERS:
        raise ValueError(f"open_folder: there is no adapter {name!r}; expected one of {', '.join(ADAPTERS)}")
    known = list(signature(ADAPTERS[name]).parameters)[1:]
    given = {option: value for option, value in options.items() if value is not None}
    if unknown := [option for option in given if option not in known]:
        raise ValueError(f"open_folder: {name} has no option {unknown[0]!r}; expected one of {', '.join(known)}")
    with _collector_paused():
        return ADAPTERS[name](folder, **given)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Tables are a great many small objects without cycles; walking them again and again doubles the time to open."""
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()
