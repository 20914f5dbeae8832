"""What others wrote beside their images, as factors: ``.json`` by name, ``.cls`` as ``class``, ``.txt`` as ``text``.

A label becomes a factor if every sample has it and all its values are of one kind: numbers become a number; strings,
truth values, classes and short texts become a category. Any other is left out, with the reason.
"""

import json
from array import array
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compgen_fast.worlds.source import Factor

Values = NDArray[np.int64] | NDArray[np.float32]
PARTS = ("json", "cls", "txt")
MOST_VALUES = 1024
MOST_CLASSES = 1 << 16
_CLASS = "class"
_LARGEST = float(np.finfo(np.float32).max)


class Labels:
    """The labels of one sample after another."""

    def __init__(self) -> None:
        self.samples = 0
        self._columns: dict[str, _Column] = {}

    def add(self, parts: Mapping[str, bytes]) -> None:
        """One sample's parts out of `PARTS`, those that it has."""
        for name, value in _read(parts):
            self._columns.setdefault(name, _Column(name)).add(value, self.samples)
        self.samples += 1

    def factors(self) -> Iterator[tuple[Factor, Values]]:
        """Each factor with its values: the number of a category, int64, or float32."""
        for column in self._columns.values():
            if not column.refusal(self.samples):
                yield column.factor()

    def left_out(self) -> Iterator[str]:
        for name, column in self._columns.items():
            if reason := column.refusal(self.samples):
                yield f"the label {name!r} is left out: {reason}"


def _read(parts: Mapping[str, bytes]) -> Iterator[tuple[str, Any]]:
    """Names and values. A value that cannot be read is None, as is JSON's null. ``json.`` tells two of a name apart."""
    plain: dict[str, Any] = {}
    if "cls" in parts:
        plain[_CLASS] = _class(parts["cls"])
    if "txt" in parts:
        plain["text"] = _text(parts["txt"])
    yield from plain.items()
    if "json" in parts:
        for name, value in _object(parts["json"]).items():
            yield (f"json.{name}" if name in plain else name), value


def _class(data: bytes) -> str | None:
    try:
        return str(int(data))
    except ValueError:
        return None


def _text(data: bytes) -> str | None:
    try:
        return data.decode().strip()
    except UnicodeDecodeError:
        return None


def _object(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


class _Column:
    """One label's values until one of them rules it out."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._most = MOST_CLASSES if name == _CLASS else MOST_VALUES
        self._kind = ""
        self._refusal = ""
        self._cells = array("d")
        self._numbers: dict[str, int] = {}

    def add(self, value: Any, before: int) -> None:
        """The value of a sample that has so many ``before`` it."""
        if self._refusal:
            return
        kind = _kind(value)
        self._kind = self._kind or kind
        if len(self._cells) != before:
            self._refusal = "some samples lack it"
        elif not kind:
            self._refusal = f"a sample has {_shown(value)} there; expected a finite number, a text or a truth value"
        elif kind != self._kind:
            self._refusal = f"some samples have a {self._kind} there and others a {kind}"
        elif kind == "number":
            self._cells.append(value)
        elif len(self._numbers) == self._most and _spelt(value) not in self._numbers:
            self._refusal = f"it has more than {self._most:,} values"
        else:
            self._cells.append(self._numbers.setdefault(_spelt(value), len(self._numbers)))
        if self._refusal:
            self._cells, self._numbers = array("d"), {}

    def refusal(self, samples: int) -> str:
        return self._refusal or ("some samples lack it" if len(self._cells) != samples else "")

    def factor(self) -> tuple[Factor, Values]:
        cells = np.array(self._cells)
        if self._kind == "number":
            column = cells.astype(np.float32)
            return Factor(self.name, low=float(column.min()), high=float(column.max())), column
        values = sorted(self._numbers, key=int if self.name == _CLASS else str)
        place = np.empty(len(values), np.int64)
        place[[self._numbers[value] for value in values]] = np.arange(len(values))
        return Factor(self.name, tuple(values)), place[cells.astype(np.int64)]


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "truth value"
    if isinstance(value, str):
        return "text"
    return "number" if isinstance(value, int | float) and -_LARGEST <= value <= _LARGEST else ""


def _spelt(value: str | bool) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _shown(value: Any) -> str:
    if value is None:
        return "nothing that can be read"
    return str(value) if isinstance(value, int | float) else f"a {type(value).__name__}"
