"""`cgf prove`: climb the ladder, show it, and fail where a budget is broken."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from compgen_fast.tables import Sheet

if TYPE_CHECKING:
    from compgen_fast.prove.budgets import Breach
    from compgen_fast.prove.catalogue import Case
    from compgen_fast.prove.ladder import Ladder, Row, Step
    from compgen_fast.prove.roofline import Work

WIDTH = 120  # columns in a file or a pipe
SHOWN_CHANGES = 40  # of those that recording makes; a new kernel has one for each architecture


def refuse_without_compiler(command: str) -> None:
    """Raises ValueError where kernels cannot be compiled."""
    if importlib.util.find_spec("triton") is None:
        raise ValueError(
            f"{command} compiles kernels with triton, which is not installed; pip install triton (Linux only)"
        )
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        raise ValueError(
            f"{command} compiles kernels, and TRITON_INTERPRET is set, which replaces the compiler; unset it"
        )


def chosen(command: str, what: str, names: tuple[str, ...], known: tuple[str, ...]) -> tuple[str, ...]:
    """The names asked for, all if none were. Raises ValueError for one that is not known."""
    for name in names:
        if name not in known:
            raise ValueError(f"{command}: {name!r} is no {what}; there are {', '.join(known)}")
    return names or known


def run(*, kernel: str | None, arch: str | None, json_path: str | None, record: bool, page: Path | None) -> int:
    """Prove, show, write; 1 if a budget is broken and not recorded."""
    refuse_without_compiler("prove")
    from compgen_fast.prove import budgets, catalogue, ladder, roofline
    from compgen_fast.prove import page as pages
    from compgen_fast.prove.ahead_of_time import TARGETS

    ops = chosen("prove", "kernel", (kernel,) if kernel else (), catalogue.OPS)
    architectures = chosen("prove", "architecture", tuple(arch.split(",")) if arch else (), tuple(TARGETS))
    everything = len(ops) == len(catalogue.OPS) and len(architectures) == len(TARGETS)
    if page is not None and not everything:
        raise ValueError("prove: the page shows all kernels on all architectures; leave out --kernel and --arch")
    console = Console(stderr=json_path == "-")
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)
    found = ladder.climb(architectures, ops, Console(stderr=True))
    broken = budgets.breaches(found.rows, budgets.read(budgets.PATH))
    if record:
        broken = [breach for breach in broken if not breach.recordable]
        _record(found, {(breach.name, breach.architecture) for breach in broken}, everything, console)
    steps = ladder.steps(found, frozenset((breach.name, breach.architecture) for breach in broken))
    if json_path == "-":
        json.dump(as_json(found, steps, broken), sys.stdout, indent=1)
        print()
    else:
        show(found, steps, broken, console)
        if json_path is not None:
            Path(json_path).write_text(json.dumps(as_json(found, steps, broken), indent=1) + "\n")
    if page is not None:
        pages.write(page, pages.sections(found, steps))
        console.print(f"written to {page}")
    for breach in broken:
        console.print(f"[red]{breach}[/]", soft_wrap=True, highlight=False)
    for failure in found.failures:
        console.print(
            f"[red]{failure.name} on {failure.architecture}: {failure.why}[/]", soft_wrap=True, highlight=False
        )
    most = roofline.MOST_MOVED
    excessive = [(case, work) for case, work in found.works if work.excess > most[case.direction]]
    for case, work in excessive:
        said = f"{case.name}: moves {work.excess:.2f} times the necessary bytes, allowed {most[case.direction]}"
        console.print(f"[red]{said}[/]", soft_wrap=True, highlight=False)
    wrong = [each for each in found.emulations if each.error is not None and each.why]
    for each in wrong:
        console.print(f"[red]{each.case.name} on {each.architecture}: {each.why}[/]", soft_wrap=True, highlight=False)
    return 1 if broken or found.failures or excessive or wrong else 0


def _record(found: Ladder, over: set[tuple[str, str]], everything: bool, console: Console) -> None:
    """Make the figures the budgets, but for kernels that break a rule."""
    from compgen_fast.prove import budgets

    old = budgets.read(budgets.PATH)
    good = [row for row in found.rows if (row.name, row.architecture) not in over]
    there = {(row.name, row.architecture) for row in found.rows}
    there |= {(failure.name, failure.architecture) for failure in found.failures}
    gone = {(name, chip) for name, chips in old.items() for chip in chips} - there if everything else set()
    new, changes = budgets.recorded(good, old, gone)
    for change in changes[:SHOWN_CHANGES]:
        console.print(str(change), soft_wrap=True, highlight=False, style="red" if change.verdict == "worse" else "")
    if len(changes) > SHOWN_CHANGES:
        console.print(f"… and {len(changes) - SHOWN_CHANGES:,} more changes; see `git diff {budgets.PATH}`")
    budgets.write(new, budgets.PATH)
    console.print(f"{len(changes):,} changes recorded in {budgets.PATH}")


# ------------------------------------------------------------------------------------------ on the screen


def show(found: Ladder, steps: dict[Any, dict[str, Step]], broken: list[Breach], console: Console) -> None:
    over = {(breach.name, breach.architecture) for breach in broken}
    for op in dict.fromkeys(row.case.op for row in found.rows):
        console.print(kernel_table(op, [row for row in found.rows if row.case.op == op], over))
    if found.works:
        console.print(roofline_table(found))
    console.print(summary_table(steps))
    for line in reasons(steps):
        console.print(line, highlight=False)


def kernel_table(op: str, rows: list[Row], over: set[tuple[str, str]]) -> Sheet:
    """One line per compiled kernel and architecture; beside the lines of a kernel stands what it is."""
    numbers = ("regs", "spill", "shared", "mma", "load", "store", "occupancy", "code", "sec")
    table = Sheet("kernel", "chip", *numbers, words=("kernel", "chip"), folds=("kernel",), title=op)
    by_name: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: not row.real):
        by_name.setdefault(row.name, []).append(row)
    for alike in by_name.values():
        lines = heading(alike[0])
        for place, row in enumerate(alike):
            last = place == len(alike) - 1
            style = "red" if (row.name, row.architecture) in over else ""
            beside = "\n".join(lines[place:] if last else lines[place : place + 1])
            table.add_row(beside, row.architecture, *cells(row), style=style, end_section=last)
    return table


def heading(row: Row) -> list[str]:
    """What a kernel is, in three lines."""
    what = row.case.name.removeprefix(f"{row.case.op} ").removesuffix(row.case.shape).strip()
    return [f"{row.kernel.strip('_')}, {what}", row.case.shape, config_label(row)]


def cells(row: Row) -> tuple[str, ...]:
    figures, have = row.figures, row.occupancy
    return (
        str(figures.registers),
        str(figures.spills),
        f"{figures.shared / 1024:.1f} K",
        str(figures.matrix_instructions),
        widths_label(figures.loads),
        widths_label(figures.stores),
        f"{have.share:.0%} {have.limit.split()[0]}",
        f"{sum(figures.instructions.values()):,}",
        "–" if figures.compile_seconds is None else f"{figures.compile_seconds:.1f}",
    )


def config_label(row: Row) -> str:
    """64×64 in 4 warps: the tile without its slots, and how it is launched."""
    tile = "×".join(str(size) for name, size in row.config.items() if name.startswith("BLOCK") and name != "BLOCK_S")
    stages = row.config.get("num_stages", 1)
    return f"tile {tile}, {row.warps} warps" + (f", {stages} stages" if stages > 1 else "")


def widths_label(instructions: dict[int, int]) -> str:
    """The width that carries most bytes, and its share of them where it is not all."""
    if not instructions:
        return "none"
    carried = {bits: bits * count for bits, count in instructions.items()}
    widest = max(carried, key=lambda bits: carried[bits])
    share = carried[widest] / sum(carried.values())
    return f"{widest} b" if share > 0.995 else f"{widest} b {share:.0%}"


def roofline_table(found: Ladder) -> Sheet:
    """What is moved at real shapes, and how long that takes at least."""
    from compgen_fast.prove.roofline import PEAKS

    title = "modelled from the traced sm_80 code: nothing here was measured on a GPU"
    names = (peak.name.split()[0] for peak in PEAKS)
    table = Sheet("case", "needs", "moves", "asks for", *names, folds=("case",), title=title)
    for case, work in found.works:
        table.add_row(case.name, *roofline_cells(work))
    return table


def roofline_cells(work: Work) -> tuple[str, ...]:
    """Megabytes needed, moved and asked for as multiples of it, and for each GPU the least time with its bound."""
    from compgen_fast.prove.roofline import PEAKS, predict

    predictions = [predict(work, peak) for peak in PEAKS]
    return (
        f"{work.necessary / 1e6:.1f} MB",
        f"{work.excess:.2f}×",
        f"{work.requested / work.necessary:.2f}×",
        *(f"{each.seconds * 1e6:.1f} µs {each.bound.split()[0]}" for each in predictions),
    )


def summary_table(steps: dict[Any, dict[str, Step]]) -> Sheet:
    words = ("op", "direction", "dtype")
    table = Sheet(*words, *next(iter(steps.values()), {}), words=words, title="highest rung")
    for (op, direction, rungs), dtypes in alike(steps).items():
        table.add_row(op, direction, " ".join(dtypes), *(str(rung) for rung in rungs))
    return table


def alike(steps: dict[Any, dict[str, Step]]) -> dict[tuple[str, str, tuple[int, ...]], list[str]]:
    """(op, direction, rungs) → the dtypes that have climbed as high."""
    found: dict[tuple[str, str, tuple[int, ...]], list[str]] = {}
    for use, by_architecture in steps.items():
        rungs = tuple(step.rung for step in by_architecture.values())
        found.setdefault((use.op, use.direction, rungs), []).append(use.dtype)
    return found


def reasons(steps: dict[Any, dict[str, Step]]) -> list[str]:
    """Why each stops where it does, those with the same reason together."""
    found: dict[tuple[str, int, str], dict[tuple[str, str], list[str]]] = {}
    for use, by_architecture in steps.items():
        for architecture, (rung, why) in by_architecture.items():
            who = found.setdefault((architecture, rung, why), {})
            who.setdefault((use.op, use.direction), []).append(use.dtype)
    every = len(steps)
    return [
        f"{architecture} stops at {rung}: {why}: "
        + (
            "all"
            if sum(map(len, who.values())) == every
            else ", ".join(f"{op} {direction} ({' '.join(dtypes)})" for (op, direction), dtypes in who.items())
        )
        for (architecture, rung, why), who in sorted(found.items(), key=lambda each: (each[0][0], -each[0][1]))
    ]


# ------------------------------------------------------------------------------------------ as JSON


def as_json(found: Ladder, steps: dict[Any, dict[str, Step]], broken: list[Breach]) -> dict[str, Any]:
    import triton

    return {
        "triton": triton.__version__,
        "kernels": [_row(row) for row in found.rows],
        "emulated": [
            {"case": each.case.name, "architecture": each.architecture, "error": each.error, "why": each.why}
            for each in found.emulations
        ],
        "rungs": [
            use._asdict() | {"architecture": architecture, "rung": step.rung, "why": step.why}
            for use, by_architecture in steps.items()
            for architecture, step in by_architecture.items()
        ],
        "modelled": [_modelled(case, work) for case, work in found.works],
        "breaches": [str(breach) for breach in broken],
        "not_compiled": [
            {"name": each.name, "architecture": each.architecture, "why": each.why} for each in found.failures
        ],
    }


def _modelled(case: Case, work: Work) -> dict[str, Any]:
    from compgen_fast.prove.roofline import PEAKS, predict

    gpus = [asdict(predict(work, peak)) for peak in PEAKS]
    return {"case": case.name, "moved": work.moved, "excess": work.excess} | asdict(work) | {"gpus": gpus}


def _row(row: Row) -> dict[str, Any]:
    use = row.case.use._asdict()
    about = {"name": row.name, "kernel": row.kernel, "architecture": row.architecture, "real": row.real}
    case = {"variant": row.case.variant, "shape": row.case.shape, "config": row.config}
    return about | use | case | asdict(row.figures) | {"occupancy": asdict(row.occupancy)}
