"""What a run leaves behind: rows in a CSV that only grows, JSON for programs, a table and a chart for people."""

import csv
import json
import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from itertools import groupby
from pathlib import Path
from typing import Any, TypeAlias

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from rich.console import Console, Group
from rich.text import Text

from compgen_fast.bench.harness import DIRECTIONS, Row
from compgen_fast.tables import Sheet

AnyRow: TypeAlias = Any
"""A dataclass whose fields are columns: ``Row``, or what a suite of another kind has in its place."""
SHADES = {"forward": "#9ecae1", "backward": "#4292c6", "full": "#08306b"}


def write(rows: Sequence[AnyRow], path: Path, json_to: str | None, people: Console, beside: str = "") -> None:
    """Adds rows, of one kind and at least one, to a CSV and says so; as JSON too, to stdout for ``-`` or to a file."""
    append_csv(rows, path)
    people.print(f"rows added to {path}{beside}", soft_wrap=True)
    if json_to == "-":
        print(to_json(rows))
    elif json_to is not None:
        Path(json_to).write_text(to_json(rows) + "\n")


def to_json(rows: Iterable[AnyRow]) -> str:
    """A list of objects. JSON has no infinity, which is the error of a NaN: it becomes null, and ``gate`` says why."""
    return json.dumps([{key: _finite(value) for key, value in asdict(row).items()} for row in rows], indent=2)


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def append_csv(rows: Sequence[AnyRow], path: Path) -> None:
    """Adds rows to the file. One with other columns, from another version, is kept under another name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = tuple(field.name for field in fields(rows[0]))
    if path.exists() and _header(path) != columns:
        path.rename(_unused(path))
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns)
        if new:
            writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def _header(path: Path) -> tuple[str, ...]:
    with path.open(newline="") as file:
        return tuple(next(csv.reader(file), ()))


def _unused(path: Path) -> Path:
    numbered = (path.with_name(f"{path.stem}.old{i}{path.suffix}") for i in range(1, 10_000))
    return next(candidate for candidate in numbered if not candidate.exists())


def by_case(rows: Iterable[Row]) -> list[tuple[str, list[Row]]]:
    """Rows of each case, under its title; a case in two dtypes is two."""
    return [(title, list(group)) for title, group in groupby(rows, lambda row: f"{row.case}, {row.dtype}")]


def summary(rows: Sequence[Row]) -> str:
    """One case in one sentence: the whole pass against the fastest peer with the same outputs, and our memory."""
    if rows[0].gate:
        return rows[0].gate
    whole = [row for row in rows if row.direction == "full" and row.ratio is not None]
    equal = [row for row in whole if not row.does_less]
    if not equal:
        return "no peer with the same outputs ran"
    rival = min(equal, key=lambda row: row.ratio or 0)
    speed = f"full: {rival.ratio:.2f}× {rival.peer}, the fastest peer with the same outputs"
    return f"{speed}; our peak is {rival.peak_over_io:.2f}× inputs + outputs"


LEGEND = (
    "ratio: peer's time ÷ ours, above 1 we are faster. memory: peer's peak ÷ ours. "
    "error: worst of ours against the fp64 oracle; then the peer's."
)


NUMBERS = ("ours ms", "peer ms", "ratio", "20–80 %", "memory", "error", "peer's")


def table(title: str, rows: Sequence[Row]) -> Group:
    """One case: a line per direction and peer, then who did less and who could not, and why."""
    lines = Sheet("direction", "peer", *NUMBERS, words=("direction", "peer"))
    measured = [row for row in rows if row.ratio is not None]
    for row in measured:
        lines.add_row(*_line(row), end_section=row is _last(measured, row.direction))
    heading = Text.assemble((title, "bold"), "\n", (summary(rows), "bold red" if rows[0].gate else ""))
    return Group(heading, *([lines] if measured else []), Text("\n".join(notes(rows)), style="dim"), "")


def _last(rows: Sequence[Row], direction: str) -> Row:
    return [row for row in rows if row.direction == direction][-1]


def _line(row: Row) -> tuple[str | Text, ...]:
    assert row.ratio is not None
    return (
        row.direction,
        row.peer + ("*" if row.does_less else ""),
        f"{row.our_ms:.2f}",
        f"{row.peer_ms:.2f}",
        Text(f"{row.ratio:.2f}×", style="bold green" if row.ratio >= 1 else "bold red"),
        f"{row.ratio_low:.2f}–{row.ratio_high:.2f}",
        "" if row.peak_ratio is None else f"{row.peak_ratio:.2f}×",
        f"{row.error:.0e}",
        f"{row.peer_error:.0e}",
    )


MISSING = ("–", "–", "–", "–")  # times, ratio and spread of a row that has none


def reasons(rows: Iterable[Row]) -> list[str]:
    """Why rows have no numbers, each reason once."""
    missing = (row for row in rows if row.ratio is None)
    return list(dict.fromkeys(row.gate or f"unsupported: {row.peer}: {row.unsupported}" for row in missing))


def notes(rows: Sequence[Row]) -> list[str]:
    """A sentence for each peer that does less than we do, and for each that cannot do some direction."""
    less = _grouped({row.peer: row.does_less for row in rows if row.ratio is not None and row.does_less})
    cannot: dict[str, str] = {}
    for peer, group in _by_peer(rows).items():
        refused = [row for row in group if row.unsupported]
        some = "" if len(refused) == len(group) else f" ({' and '.join(row.direction for row in refused)})"
        if refused:
            cannot[peer + some] = refused[0].unsupported or ""
    return [
        *(f"* {peers} does less: {reason}" for reason, peers in less.items()),
        *(f"unsupported: {peers}: {reason}" for reason, peers in _grouped(cannot).items()),
    ]


def _by_peer(rows: Iterable[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.peer, []).append(row)
    return found


def _grouped(reasons: dict[str, str]) -> dict[str, str]:
    """Reason → the names it holds for."""
    found: dict[str, str] = {}
    for name, reason in reasons.items():
        found[reason] = f"{found[reason]}, {name}" if reason in found else name
    return found


def draw(rows: Sequence[Row], path: Path) -> None:
    """A chart of the run: a panel per case, a group of bars per peer, a bar per direction."""
    cases = by_case(rows)
    columns = min(2, len(cases))
    lines = -(-len(cases) // columns)
    figure = Figure(figsize=(6.4 * columns, 2.9 * lines + 1.2), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False, sharex=True).flatten()
    for panel, (title, group) in zip(panels, cases, strict=False):
        _draw_case(panel, title, group)
    for spare in panels[len(cases) :]:
        spare.axis("off")
    _draw_scale(panels, rows)
    figure.suptitle(f"{rows[0].suite}: times faster than each peer\n{_conditions(rows[0])}", fontsize=11)
    figure.legend(handles=_key(), loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def _draw_case(panel: Axes, title: str, rows: Sequence[Row]) -> None:
    peers = list(dict.fromkeys(row.peer for row in rows))
    for row in rows:
        place = peers.index(row.peer) + 0.26 * (DIRECTIONS.index(row.direction) - 1)
        if row.ratio is not None:
            _draw_bar(panel, row, place)
    for place, peer in enumerate(peers):
        if note := _missing(_by_peer(rows)[peer]):
            panel.annotate(note, (1, place), (6, 0), textcoords="offset points", fontsize=7, va="center", color="0.35")
    panel.set_yticks(range(len(peers)), peers, fontsize=9)
    panel.set_ylim(len(peers) - 0.5, -0.5)
    panel.axvline(1, color="black", linewidth=0.8)
    panel.set_title(title, fontsize=9.5, loc="left")
    panel.spines[["top", "right"]].set_visible(False)


def _draw_bar(panel: Axes, row: Row, place: float) -> None:
    assert row.ratio is not None
    assert row.ratio_low is not None
    assert row.ratio_high is not None
    spread = [[row.ratio - row.ratio_low], [row.ratio_high - row.ratio]]
    # Bars start at 1, the point of equality: on a logarithmic axis no other start means anything.
    panel.barh(
        place, row.ratio - 1, 0.24, left=1, color=SHADES[row.direction], hatch="////" if row.does_less else None,
        edgecolor="white", linewidth=0, xerr=spread, error_kw={"ecolor": "#d95f02", "elinewidth": 1.2, "capsize": 2},
    )  # fmt: skip
    right_of_all = (max(row.ratio_high, 1), place)
    panel.annotate(f"{row.ratio:.2f}", right_of_all, (4, 0), textcoords="offset points", fontsize=7, va="center")


def _missing(rows: Sequence[Row]) -> str:
    """Why a peer has no bar; where it has some, only which are missing (the table says why)."""
    missing = [row for row in rows if row.ratio is None]
    if not missing:
        return ""
    if len(missing) < len(rows):
        return f"{' and '.join(row.direction for row in missing)} unsupported"
    return textwrap.fill(missing[0].gate or f"unsupported: {missing[0].unsupported}", 58)


def _draw_scale(panels: Iterable[Axes], rows: Sequence[Row]) -> None:
    """One logarithmic axis for all panels, wide enough for every error bar, with 1 on it and plain numbers."""
    ends = [end for row in rows for end in (row.ratio_low, row.ratio_high) if end is not None]
    low, high = min([0.8, *ends]) / 1.1, max([4.0, *ends]) * 1.25
    for panel in panels:
        panel.set_xscale("log")
        panel.set_xlim(low, high)
        panel.xaxis.set_major_locator(FixedLocator([tick for tick in TICKS if low <= tick <= high]))
        panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
        panel.xaxis.set_minor_locator(NullLocator())
        panel.tick_params(labelbottom=True, labelsize=8)


TICKS = (0.1, 0.2, 0.5, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128)


def _conditions(row: Row) -> str:
    threads = f"{row.threads} thread{'s' if row.threads > 1 else ''}"
    return f"{row.hardware}, {threads}, backend {row.backend}, torch {row.torch}, {row.mode} run"


def _key() -> list[Patch]:
    shades = [Patch(color=shade, label=direction) for direction, shade in SHADES.items()]
    return [*shades, Patch(facecolor="0.6", hatch="////", edgecolor="white", label="peer does less than we do")]
