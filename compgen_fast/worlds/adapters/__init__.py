"""Folders of images on a user's disk, their own and public data sets, each opened as a ``Source`` with named factors.

``open_folder("clevr", "CLEVR_v1.0", part="val", resolution=128)`` lists the files and reads the tables; images are
decoded when samples are asked for. ``held_out`` splits any of them by combinations of two factors, ``compositions`` by
three binary ones; ``unreadable`` finds the images that cannot be decoded, ``without`` leaves them out.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

from compgen_fast.worlds.adapters.celeba import celeba
from compgen_fast.worlds.adapters.clevr import clevr, cogent
from compgen_fast.worlds.adapters.clevrer import clevrer
from compgen_fast.worlds.adapters.clevrtex import clevrtex
from compgen_fast.worlds.adapters.compositions import Compositions, compositions
from compgen_fast.worlds.adapters.folder_source import FolderSource, Tabled, View
from compgen_fast.worlds.adapters.held_out import HeldOut, held_out
from compgen_fast.worlds.adapters.image_folder import image_folder
from compgen_fast.worlds.adapters.kubric import kubric
from compgen_fast.worlds.adapters.layout import FolderError
from compgen_fast.worlds.adapters.pixels import BadImage
from compgen_fast.worlds.adapters.pug import pug_animals, pug_spar
from compgen_fast.worlds.adapters.readable import unreadable, without
from compgen_fast.worlds.adapters.shapes3d import shapes3d
from compgen_fast.worlds.options import check_kinds

__all__ = [
    "ADAPTERS", "BadImage", "Compositions", "FolderError", "HeldOut", "Tabled", "View", "compositions", "held_out",
    "open_folder", "taken", "unreadable", "without",
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
_FIT = Parameter("fit", Parameter.KEYWORD_ONLY, annotation=str)


def taken(name: str) -> dict[str, Parameter]:
    """The options of an adapter. All that read image files take ``fit``."""
    ours = signature(ADAPTERS[name])
    known = dict(list(ours.parameters.items())[1:])
    return known | {"fit": _FIT} if ours.return_annotation is FolderSource else known


def open_folder(name: str, folder: str | Path, **options: Any) -> Tabled:
    """Open a folder by the adapter's name, with that adapter's options.

    All take ``resolution``; those that read image files take ``fit``: ``"crop"`` keeps an image's middle square,
    ``"pad"`` all of it on black. An option that is None counts as not given.
    """
    if name not in ADAPTERS:
        raise ValueError(f"open_folder: there is no adapter {name!r}; expected one of {', '.join(ADAPTERS)}")
    known = taken(name)
    given = {option: value for option, value in options.items() if value is not None}
    if unknown := [option for option in given if option not in known]:
        raise ValueError(f"open_folder: {name} has no option {unknown[0]!r}; expected one of {', '.join(known)}")
    check_kinds(name, known, given)
    fit = given.pop("fit", None)
    with _collector_paused():
        source = ADAPTERS[name](folder, **given)
    return replace(source, fit=fit) if fit and isinstance(source, FolderSource) else source


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
