"""Reading what a data set's folder holds, with errors that name the file and show the layout expected.

A ``Layout`` is the one-glance picture of a public data set on disk. What an adapter refuses about a folder it refuses
through it, so that somebody who unpacked an archive one level too deep sees at once what was looked for and where.
"""

import csv
import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from textwrap import dedent, indent
from typing import Any, TypeVar

Kind = TypeVar("Kind")
IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff")


class FolderError(ValueError):
    """A folder on disk is not what its adapter expects; the message names the file and shows the layout."""


@dataclass(frozen=True)
class Layout:
    """What a data set is called and how its folder looks."""

    name: str
    tree: str

    def odd(self, path: Path, what: str) -> FolderError:
        """The error for a file (or folder) and what is odd about it."""
        return FolderError(f"{path}: {what}; {self.name} is expected as\n{indent(dedent(self.tree).strip(), '  ')}")

    def folder(self, path: str | Path) -> Path:
        """The folder, which must be there."""
        path = Path(path)
        if not path.is_dir():
            raise self.odd(path, "this is a file, not a folder" if path.exists() else "there is no such folder")
        return path

    def first(self, folder: Path, *names: str) -> Path:
        """The first of these files or folders that exists."""
        for name in names:
            if (folder / name).exists():
                return folder / name
        others = f" (nor {', '.join(names[1:])})" if names[1:] else ""
        raise self.odd(folder / names[0], f"there is no such file or folder{others}")

    def text(self, path: Path) -> str:
        try:
            return path.read_text(encoding="utf-8-sig")
        except FileNotFoundError:
            raise self.odd(path, "there is no such file") from None
        except (OSError, UnicodeDecodeError) as error:
            raise self.odd(path, f"this is not a readable text file ({error})") from None

    def json(self, path: Path) -> Any:
        try:
            return json.loads(self.text(path))
        except json.JSONDecodeError as error:
            raise self.odd(path, f"this is not valid JSON ({error})") from None

    def entry(self, path: Path, record: Any, key: str, kind: type[Kind]) -> Kind:
        """``record[key]`` of a JSON file, which must be there and of this kind."""
        value = record.get(key) if isinstance(record, dict) else None
        if kind is float and isinstance(value, int):
            value = float(value)
        if not isinstance(value, kind):
            raise self.odd(path, f"{key!r} is {_short(value)}; it should be of type {kind.__name__}")
        return value

    def numbers(self, path: Path, record: Any, key: str, length: int) -> list[float]:
        """``record[key]`` of a JSON file, a list of at least ``length`` numbers; the first ``length`` of them."""
        values = self.entry(path, record, key, list)[:length]
        if len(values) < length or not {int, float}.issuperset(map(type, values)):
            raise self.odd(path, f"{key!r} is {_short(values)}; it should be a list of {length} numbers")
        return values

    def rows(self, path: Path, columns: Iterable[str] | None = None) -> dict[str, list[str]]:
        """The columns of a csv file with a header line, as text; all of them, or those named."""
        try:
            lines = [line for line in csv.reader(StringIO(self.text(path), newline="")) if line]
        except csv.Error as error:
            raise self.odd(path, f"this is not a csv table ({error})") from None
        if len(lines) < 2:
            raise self.odd(path, "the table is empty; it should have a header line and a line for each image")
        header, body = [name.strip() for name in lines[0]], lines[1:]
        self._check_header(path, header, columns)
        for number, line in enumerate(body, start=1):
            if len(line) != len(header):
                raise self.odd(path, f"row {number} has {len(line)} cells where the header has {len(header)}")
        wanted = header if columns is None else list(columns)
        return {name: [line[header.index(name)].strip() for line in body] for name in wanted}

    def _check_header(self, path: Path, header: Sequence[str], columns: Iterable[str] | None) -> None:
        for name in header:
            if header.count(name) > 1:
                raise self.odd(path, f"the column {name!r} occurs twice")
        for name in columns or ():
            if name not in header:
                raise self.odd(path, f"there is no column {name!r} among {', '.join(header)}")

    def choice(self, option: str, value: str, choices: Iterable[str]) -> None:
        """Refuse a value that is not one of the choices."""
        if value not in (known := list(choices)):
            raise ValueError(f"{self.name}: {option} is {value!r}; expected one of {', '.join(known)}")

    def match(self, folder: Path, images: set[str], table: Path, named: Sequence[str], unlisted: bool) -> None:
        """Refuse a table that names an image twice or one that is not there, or images it does not name."""
        if len(set(named)) < len(named):
            twice, _ = Counter(named).most_common(1)[0]
            raise self.odd(table, f"the image {twice} is listed twice")
        if missing := next((name for name in named if name not in images), None):
            raise self.odd(folder / missing, f"there is no such image, though {table.name} lists it")
        if not unlisted and len(images) > len(named):
            extra = min(images.difference(named))
            raise self.odd(folder / extra, f"{table.name} does not list this image (add it there, or move the image)")


def files_below(folder: Path, endings: tuple[str, ...] = IMAGES) -> set[str]:
    """Every file of a kind in a folder and the folders inside it, as paths from the folder with forward slashes.

    Hidden files are passed over: archives made on a Mac are full of ``._000001.png`` that are no images.
    """
    found: set[str] = set()
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        names = [name for name in files if name.lower().endswith(endings) and not name.startswith(".")]
        prefix = Path(parent).relative_to(folder).as_posix()
        found.update(names if prefix == "." else [f"{prefix}/{name}" for name in names])
    return found


def _short(value: Any) -> str:
    text = "missing" if value is None else json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
