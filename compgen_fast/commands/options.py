"""How tyro reads the options of all commands, and what their help says of an option that has no value."""

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import tyro
from tyro.constructors import (
    MISSING_NONPROP,
    ConstructorRegistry,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

REGISTRY = ConstructorRegistry()
_inside = False


@REGISTRY.struct_rule
def _quiet(info: StructTypeInfo) -> StructConstructorSpec | None:
    """Settings as tyro reads them, but nothing is told of a default that is nothing: no (default: None), no
    {None}|INT. The word None still takes a recipe's value away.
    """
    global _inside
    if _inside or not dataclasses.is_dataclass(info.type):
        return None
    _inside = True
    try:
        spec = ConstructorRegistry.get_struct_spec(info)
    finally:
        _inside = False
    if not isinstance(spec, StructConstructorSpec):
        return None
    return dataclasses.replace(spec, fields=tuple(map(_told, spec.fields)))


def _told(field: StructFieldSpec) -> StructFieldSpec:
    field = dataclasses.replace(field, helptext=partial(_in_one_line, field.helptext))
    kinds = _kinds(field.type)
    names = [_name(kind) for kind in kinds if kind is not NoneType]
    if None in names:
        return field
    if field.default is True:  # --option False, where a flag would have to be called --no-option
        shown: Any = Annotated[field.type, tyro.conf.FlagConversionOff]
        return dataclasses.replace(field, type=shown)
    hint = "" if field.default is False or field.default in (None, (), MISSING_NONPROP) else None
    metavar = "|".join(filter(None, names)) if NoneType in kinds and not _has_metavar(field.type) else None
    shown = Annotated[field.type, tyro.conf.arg(help_behavior_hint=hint, metavar=metavar)]
    return dataclasses.replace(field, type=shown)


def _in_one_line(helptext: str | Callable[[], str | None] | None) -> str | None:
    """Lines of a docstring are those of the source, which are not those of a terminal."""
    told = helptext() if callable(helptext) else helptext
    return told and " ".join(told.split())


def _kinds(kind: Any) -> tuple[Any, ...]:
    """The members of a union, or the type itself."""
    bare = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    return get_args(bare) if get_origin(bare) in (Union, UnionType) else (bare,)


def _name(kind: Any) -> str | None:
    """As help calls a value of this type; None for settings that have options of their own."""
    if kind in (bool, int, float, str, Path):
        return str(kind.__name__.upper())
    if get_origin(kind) is Literal:
        return "{" + ",".join(get_args(kind)) + "}"
    if get_origin(kind) is tuple:
        parts = [_name(part) for part in get_args(kind) if part is not Ellipsis]
        return None if None in parts else " ".join(filter(None, parts))
    return None


def _has_metavar(kind: Any) -> bool:
    return get_origin(kind) is Annotated and any(getattr(each, "metavar", None) for each in kind.__metadata__)
