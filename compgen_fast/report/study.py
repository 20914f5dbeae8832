"""What the pages of all studies share: reading the folder a study left, its claims, sections, tables for a terminal."""

import html
import json
import math
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Group
from rich.text import Text

from compgen_fast.report.page import NO, NOTHING, PAGE, YES, Grid, document
from compgen_fast.tables import Sheet

RESULTS, PICTURES = "results.json", "pictures.npz"
Results = Mapping[str, Any]
Arrays = Mapping[str, NDArray[Any]]


def read_results(folder: Path, study: str, version: int, needed: Sequence[str]) -> dict[str, Any]:
    """results.json of this study, of this version of its layout, with everything that the page needs in it."""
    path, again = folder / RESULTS, _again(study)
    if not path.is_file():
        raise ValueError(f"{folder}: there is no {RESULTS} in it; {again}, or name the folder of another study")
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: it is damaged ({error}); {again}") from error
    told = (results.get("study"), results.get("version")) if isinstance(results, dict) else (None, None)
    if told != (study, version):
        raise ValueError(f"{path}: it holds study {told[0]!r}, version {told[1]}; expected {study!r}, {version}")
    missing = [name for name in needed if name not in results]
    if missing:
        raise ValueError(f"{path}: it has no {', '.join(missing)}; {again}")
    return dict(results)


def read_pictures(folder: Path, study: str) -> Arrays:
    path, again = folder / PICTURES, _again(study)
    if not path.is_file():
        raise ValueError(f"{folder}: there is no {PICTURES} in it; {again}")
    try:
        with zipfile.ZipFile(path), np.load(path, allow_pickle=False) as arrays:
            return dict(arrays)
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{path}: it is damaged ({error}); {again}") from error


def write_page(folder: Path, study: str, title: str, body: Callable[[], str], style: str) -> None:
    """report.html, unless results.json is not laid out as the page expects it."""
    try:
        page = document(title, body(), style)
    except (KeyError, TypeError, AttributeError) as error:
        told = f"it is not laid out as a study lays it out ({type(error).__name__}: {error})"
        raise ValueError(f"{folder / RESULTS}: {told}; {_again(study)}") from error
    (folder / PAGE).write_text(page, encoding="utf-8")


def _again(study: str) -> str:
    return f"run `cgf study {study}` into this folder again"


def section(title: str, body: str) -> str:
    """With its heading; nothing where there is nothing to show."""
    return f"<section><h2>{html.escape(title)}</h2>{body}</section>" if body else ""


def in_terminal(grids: Iterable[Grid]) -> Group:
    """Those that have rows."""
    return Group(*(_rich(grid) for grid in grids if grid.rows))


def _rich(grid: Grid) -> Sheet:
    shown = Sheet(*grid.head, words=grid.words, title=grid.title)
    styles = {YES: "green", NO: "red"}
    for row in grid.rows:
        shown.add_row(*(Text(cell, styles.get(cell, "")) for cell in row))
    return shown


def claims_table(results: Results) -> Grid:
    """What was claimed beforehand, whether it holds, and the number that says so."""
    marks = {True: YES, False: NO, None: NOTHING}
    lines = tuple((claim["claim"], marks[claim["holds"]], claim["evidence"]) for claim in results["claims"])
    head = ("claim", "holds", "evidence")
    return Grid("Claims", head, lines, words=head)


def seeds_of(results: Results) -> str:
    count = len(results["seeds"])
    return "1 seed" if count == 1 else f"{count} seeds, mean ± standard deviation"


def known(values: Iterable[float | None]) -> tuple[float, ...]:
    """Without what was not measured."""
    return tuple(value for value in values if value is not None and math.isfinite(value))


def place(names: Sequence[str | None], name: str | None) -> int:
    """Where ``name`` stands among ``names``; what nobody foresaw stands last."""
    return names.index(name) if name in names else len(names)
