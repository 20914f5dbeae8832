"""The generated part of docs/prove.md: sections of Markdown between two markers, the rest of the page left as it is."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from compgen_fast.prove.catalogue import Use
from compgen_fast.prove.command import alike, cells, reasons, roofline_cells
from compgen_fast.prove.ladder import Ladder, Row, Step
from compgen_fast.prove.roofline import PEAKS

BEGIN = "<!-- made by `cgf prove --page docs/prove.md`; do not edit from here on -->"
END = "<!-- end of what the command made -->"


class Section(NamedTuple):
    title: str
    body: str


def write(path: Path, sections: list[Section]) -> None:
    """Put the sections in the place of what is between the markers. Raises ValueError for a page without them."""
    text = path.read_text()
    if BEGIN not in text or END not in text:
        raise ValueError(f"{path} has no place for what is generated; it needs the lines {BEGIN} and {END}")
    made = "\n\n".join(f"## {section.title}\n\n{section.body}" for section in sections)
    path.write_text(f"{text.partition(BEGIN)[0]}{BEGIN}\n\n{made}\n\n{END}{text.partition(END)[2]}")


def sections(found: Ladder, steps: dict[Use, dict[str, Step]]) -> list[Section]:
    return [
        Section("How high each op has climbed", _rungs(steps)),
        Section("What is moved, and how long that takes: modelled", _roofline(found)),
        Section("What it is compiled to", _kernels(found)),
    ]


def _roofline(found: Ladder) -> str:
    lines = [(case.name, *roofline_cells(work)) for case, work in found.works]
    columns = ("case", "needs", "moves", "asks for", *(peak.name for peak in PEAKS))
    return f"Modelled from the traced sm_80 code; nothing was measured on a GPU.\n\n{markdown(columns, lines)}"


def _rungs(steps: dict[Use, dict[str, Step]]) -> str:
    architectures = list(next(iter(steps.values())))
    lines = [
        (op, direction, " ".join(dtypes), *map(str, rungs)) for (op, direction, rungs), dtypes in alike(steps).items()
    ]
    table = markdown(("op", "direction", "dtype", *architectures), lines)
    return f"{table}\n\nWhy no higher:\n\n" + "\n".join(f"- {line}" for line in reasons(steps))


def _kernels(found: Ladder) -> str:
    architectures = list(dict.fromkeys(row.architecture for row in found.rows))
    by_kernel: dict[tuple[str, str, str], dict[str, Row]] = {}
    for row in found.rows:
        if row.real:
            by_kernel.setdefault((row.case.op, row.kernel, row.case.name), {})[row.architecture] = row
    lines = [
        (kernel.strip("_"), name, *(_cell(chips.get(architecture)) for architecture in architectures))
        for (_, kernel, name), chips in by_kernel.items()
    ]
    shipped = sum(not row.real for row in found.rows)
    spilled = ", ".join(f"{row.name} on {row.architecture}" for row in found.rows if row.figures.spills)
    return (
        "At the shapes users have: registers · shared memory · occupancy and what limits it · the width that "
        f"carries most of the loaded bytes, with its share where it is not all of them. {spilled or 'Nothing'} spills. "
        f"{shipped:,} more were compiled at the limits of every shipped configuration; `--json` has them all.\n\n"
        + markdown(("kernel", "case", *architectures), lines)
    )


def _cell(row: Row | None) -> str:
    if row is None:
        return "as above"
    registers, _, shared, _, loads, _, occupancy, *_ = cells(row)
    return " · ".join((registers, shared, occupancy, loads))


def markdown(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [columns, tuple("---" for _ in columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
