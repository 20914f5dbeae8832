"""Images with known causes: procedural worlds, and adapters for public data. Start with docs/worlds.md.

A world is opened by name or by its class; a part of its split is a ``Source``. Classes load on first use, so that
opening one does not import torch, which only ``Additive`` needs.
"""

from importlib import import_module
from inspect import signature
from typing import TYPE_CHECKING, Any

from compgen_fast.nearest import instead_of
from compgen_fast.worlds.options import check_kinds
from compgen_fast.worlds.source import Factor, Samples, Source
from compgen_fast.worlds.world import Matrix, Part, World

if TYPE_CHECKING:
    from compgen_fast.worlds.additive import Additive
    from compgen_fast.worlds.bumps import Bumps
    from compgen_fast.worlds.picture import show
    from compgen_fast.worlds.scenes import Scenes
    from compgen_fast.worlds.shapes2d import Shapes2D
    from compgen_fast.worlds.sprites import Sprites

_CLASSES = {
    "scenes": "Scenes",
    "shapes2d": "Shapes2D",
    "bumps": "Bumps",
    "sprites": "Sprites",
    "additive": "Additive",
}
NAMES = tuple(_CLASSES)

__all__ = [
    "NAMES", "Additive", "Bumps", "Factor", "Matrix", "Part", "Samples", "Scenes", "Shapes2D", "Source", "Sprites",
    "World", "open_split", "open_world", "show",
]  # fmt: skip


def open_world(
    name: str, *, split: str | None = None, resolution: int | None = None, seed: int = 0, **options: Any
) -> World:
    """The world called ``name``, one of NAMES.

    Args:
        split: what it is for: Scenes get the two objects that the split ``object`` needs.
        resolution: pixels of a side; the world's own choice if not given.
        seed: of its samples and splits.
        options: what else the world takes, such as ``objects=2``. An option that is None counts as not given.
    """
    if name not in _CLASSES:
        raise ValueError(f"there is no world {name!r}; {instead_of(name, NAMES)}")
    world: type[World] = getattr(import_module(f"compgen_fast.worlds.{name}"), _CLASSES[name])
    given = {option: value for option, value in (options | {"resolution": resolution}).items() if value is not None}
    taken = signature(world).parameters
    for option in given:
        if option not in taken:
            raise ValueError(f"{name}: there is no option {option!r}; {instead_of(option, taken)}")
    check_kinds(name, taken, given)
    if (name, split) == ("scenes", "object"):
        given.setdefault("objects", 2)
    return world(seed=seed, **given)


def open_split(
    name: str,
    *,
    split: str | None = None,
    part: str = "train",
    resolution: int | None = None,
    seed: int = 0,
    seen_pairs: int | None = None,
    size: int | None = None,
    **options: Any,
) -> Part:
    """One part of a split of the world called ``name``, a ``Source``; the world's first split if none is named."""
    world = open_world(name, split=split, resolution=resolution, seed=seed, **options)
    return world.split(world.splits[0] if split is None else split, part, seen_pairs=seen_pairs, size=size)


def __getattr__(name: str) -> Any:
    if name == "show":
        return import_module("compgen_fast.worlds.picture").show
    for module, world in _CLASSES.items():
        if name == world:
            return getattr(import_module(f"compgen_fast.worlds.{module}"), name)
    raise AttributeError(f"module 'compgen_fast.worlds' has no attribute {name!r}; it exports {', '.join(__all__)}")
