"""Settings as JSON and back: trees of frozen dataclasses, as recipes return them and folders keep them.

Reading is driven by the annotations and believes nothing: a field that does not exist, a value of another type and a
choice that is not offered are each refused in a sentence that says where. A field that the file lacks takes its
default, so that older files stay readable. Known types: dataclasses, tuples, Path, Literal, None, bool, int, float,
str, and unions of these. Of a union of several dataclasses, the tag ``"kind"`` says which one it is.
"""

import json
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
TAG = "kind"


def to_json(settings: Any) -> str:
    """A dataclass as JSON text."""
    return json.dumps(to_plain(settings), indent=1) + "\n"


def from_json(kind: type[T], text: str, where: str) -> T:
    """The dataclass ``kind`` from JSON text; ``where`` is what to call the text in an error."""
    try:
        plain = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON ({error}); expected settings that this program wrote") from None
    return from_plain(kind, plain, where)


def to_plain(settings: Any) -> Any:
    """A dataclass as dictionaries, lists, strings, numbers and None."""
    return _to_plain(settings, type(settings))


def from_plain(kind: type[T], plain: Any, where: str) -> T:
    """The dataclass ``kind`` from what `to_plain` made of it."""
    return _from_plain(kind, plain, where)  # type: ignore[no-any-return]


def changes(former: Any, now: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Each setting in which two configs differ: its dotted name and both values."""
    if is_dataclass(former) and type(former) is type(now):
        for field in fields(former):
            dotted = f"{name}.{field.name}" if name else field.name
            yield from changes(getattr(former, field.name), getattr(now, field.name), dotted)
    elif former != now:
        yield name, former, now


def _to_plain(value: Any, kind: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple):
        items = next((member for member in _members(kind) if get_origin(member) is tuple), tuple[Any, ...])
        return [_to_plain(item, of) for item, of in zip(value, _item_kinds(items, len(value)), strict=True)]
    if is_dataclass(value) and not isinstance(value, type):
        hints = get_type_hints(type(value))
        plain = {field.name: _to_plain(getattr(value, field.name), hints[field.name]) for field in _given(type(value))}
        return {TAG: type(value).__name__, **plain} if len(_choices(kind)) > 1 else plain
    raise ValueError(
        f"{value!r} is a {type(value).__name__}; settings hold dataclasses, tuples, paths, strings, numbers and None"
    )


def _from_plain(kind: Any, plain: Any, where: str) -> Any:
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        return _from_union(kind, plain, where)
    if origin is Literal:
        return _from_literal(get_args(kind), plain, where)
    if origin is tuple:
        return _from_list(kind, plain, where)
    if is_dataclass(kind):
        return _from_dictionary(kind, plain, where)
    if kind is float and type(plain) is int:
        return float(plain)
    if kind is Path and isinstance(plain, str):
        return Path(plain)
    if kind not in (Path, NoneType, bool, int, float, str):
        raise TypeError(f"{where} is annotated as {kind}, which settings.py does not know")
    if type(plain) is not kind:
        raise ValueError(f"{where} is {plain!r}; expected {'null' if kind is NoneType else kind.__name__}")
    return plain


def _from_union(kind: Any, plain: Any, where: str) -> Any:
    choices = _choices(kind)
    if len(choices) > 1 and isinstance(plain, dict):
        tag = plain.get(TAG)
        chosen = next((choice for choice in choices if choice.__name__ == tag), None)
        if chosen is None:
            names = ", ".join(choice.__name__ for choice in choices)
            raise ValueError(f"{where}.{TAG} is {tag!r}; expected one of {names}")
        return _from_plain(chosen, {name: value for name, value in plain.items() if name != TAG}, where)
    members = [member for member in get_args(kind) if (member is NoneType) == (plain is None)] or [*get_args(kind)]
    if len(members) == 1:
        return _from_plain(members[0], plain, where)
    for member in members:
        try:
            return _from_plain(member, plain, where)
        except ValueError:
            continue
    raise ValueError(f"{where} is {plain!r}; expected {' or '.join(map(_name, get_args(kind)))}")


def _from_literal(choices: tuple[Any, ...], plain: Any, where: str) -> Any:
    for choice in choices:
        if type(choice) is type(plain) and choice == plain:
            return choice
    raise ValueError(f"{where} is {plain!r}; expected one of {', '.join(map(repr, choices))}")


def _from_list(kind: Any, plain: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(plain, list):
        raise ValueError(f"{where} is {plain!r}; expected a list")
    kinds = _item_kinds(kind, len(plain))
    if len(kinds) != len(plain):
        raise ValueError(f"{where} has {len(plain)} entries; expected {len(kinds)}")
    return tuple(
        _from_plain(of, item, f"{where}[{number}]") for number, (of, item) in enumerate(zip(kinds, plain, strict=True))
    )


def _from_dictionary(kind: Any, plain: Any, where: str) -> Any:
    if not isinstance(plain, dict):
        raise ValueError(f"{where} is {plain!r}; expected the fields of {kind.__name__}")
    known = {field.name: field for field in _given(kind)}
    if unknown := [name for name in plain if name not in known]:
        raise ValueError(
            f"{where} has {', '.join(map(repr, unknown))}, which {kind.__name__} does not; expected only "
            f"{', '.join(known)}. Was it written by another version, or misspelt?"
        )
    if missing := [name for name, field in known.items() if name not in plain and _required(field)]:
        raise ValueError(f"{where} lacks {', '.join(map(repr, missing))}, which {kind.__name__} needs")
    hints = get_type_hints(kind)
    return kind(**{name: _from_plain(hints[name], value, f"{where}.{name}") for name, value in plain.items()})


def _given(kind: Any) -> list[Field[Any]]:
    return [field for field in fields(kind) if field.init]


def _required(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _members(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _choices(kind: Any) -> list[Any]:
    """The dataclasses among a union's members. The tag tells them apart, so none may have a field of that name."""
    choices = [member for member in _members(kind) if is_dataclass(member)]
    if len(choices) > 1:
        for choice in choices:
            if any(field.name == TAG for field in _given(choice)):
                raise TypeError(
                    f"{_name(choice)} is in a union of dataclasses and has a field {TAG!r}; rename the field"
                )
    return choices


def _item_kinds(kind: Any, count: int) -> tuple[Any, ...]:
    """The annotation of each of ``count`` items: tuple[X, ...] repeats X, tuple[X, Y] lists them."""
    of = get_args(kind)
    return (of[0],) * count if len(of) == 2 and of[1] is Ellipsis else of


def _name(kind: Any) -> str:
    return (
        "null" if kind is NoneType else getattr(kind, "__name__", str(kind)) if get_origin(kind) is None else str(kind)
    )
