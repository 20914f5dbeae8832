"""What a world or an adapter takes besides its name, as text: name=value, from command lines and settings."""

import json
from collections.abc import Mapping, Sequence
from inspect import Parameter
from numbers import Integral, Real
from typing import Any, get_args

_KINDS: Mapping[Any, tuple[Any, str]] = {
    bool: (bool, "true or false"),
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
    str: (str, "text"),
    Sequence[str]: (list | tuple, 'a list, such as ["a", "b"]'),
}


def named(options: Sequence[str]) -> dict[str, Any]:
    """name=value pairs; values that read as JSON (2, true) are what they read as, others are text."""
    found: dict[str, Any] = {}
    for option in options:
        name, equals, value = option.partition("=")
        if not (name and equals):
            raise ValueError(f"--options {option}: expected name=value, such as objects=2")
        if name in found:
            raise ValueError(f"--options {option}: {name} is given twice; give it once")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def check_kinds(owner: str, taken: Mapping[str, Parameter], given: Mapping[str, Any]) -> None:
    """Refuses what is of another kind than the parameter: the text "no" would otherwise pass for true."""
    for option, value in given.items():
        annotation = taken[option].annotation
        kinds = [_KINDS[kind] for kind in get_args(annotation) or (annotation,) if kind in _KINDS]
        if kinds and not any(_is(value, kind) for kind, _ in kinds):
            raise ValueError(f"{owner}: {option} is {value!r}; expected {' or '.join(said for _, said in kinds)}")


def _is(value: object, kind: Any) -> bool:
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))  # to Python true is a number
