"""What a compiled kernel may cost: rules that hold for all, and for each the figures that were once recorded.

Recorded in kernels/budgets.json, one line per kernel and case: registers and shared memory at most so many, matrix
instructions if there were any, and of the bytes that load and store instructions carry at least that share in
instructions of 128 bits. A change that costs more either is a mistake or is recorded, with the difference shown.

Rules cannot be recorded away: no spills; room for a program, at shapes users have for two; matrix units in 16 bit; and
pixels moved as wide as their rows are aligned.
"""

from __future__ import annotations

import json
import math
from collections.abc import Container, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from compgen_fast.prove.catalogue import KERNELS
from compgen_fast.prove.chips import CHIPS
from compgen_fast.prove.ladder import Row

PATH = KERNELS / "budgets.json"
WIDE = 128  # bits: the most that one thread moves at a time


class Budget(NamedTuple):
    registers: int  # at most
    shared: int  # bytes, at most
    loads: int  # percent of the bytes in wide instructions, at least
    stores: int
    matrix: bool


Budgets = dict[str, dict[str, Budget]]  # kernel's name → architecture


class Breach(NamedTuple):
    """A kernel that costs more than it may."""

    name: str
    architecture: str
    what: str
    allowed: str
    found: str
    recordable: bool

    def __str__(self) -> str:
        remedy = (
            "if it is meant, `cgf prove --record` records it" if self.recordable else "this cannot be recorded away"
        )
        return f"{self.name} on {self.architecture}: {self.what} {self.found}, allowed {self.allowed}; {remedy}"


class Change(NamedTuple):
    """One figure that recording changes."""

    name: str
    architecture: str
    what: str
    old: str
    new: str
    verdict: str  # better, worse, new or gone

    def __str__(self) -> str:
        return f"{self.verdict:6} {self.name} on {self.architecture}: {self.what} {self.old} → {self.new}"


def found(row: Row) -> Budget:
    """The figures of a row, as they are recorded."""
    figures = row.figures
    return Budget(
        figures.registers,
        figures.shared,
        _wide_percent(figures.loads),
        _wide_percent(figures.stores),
        figures.matrix_instructions > 0,
    )


def _wide_percent(instructions: dict[int, int]) -> int:
    carried = sum(bits * count for bits, count in instructions.items())
    return (
        100 * sum(bits * count for bits, count in instructions.items() if bits >= WIDE) // carried if carried else 100
    )


# ------------------------------------------------------------------------------------------ the file


def read(path: Path) -> Budgets:
    if not path.exists():
        return {}
    stored = json.loads(path.read_text())
    columns = stored.pop("columns")
    assert columns == list(Budget._fields), f"{path}: columns are {columns}; expected {list(Budget._fields)}"
    return {name: {chip: Budget(*values) for chip, values in chips.items()} for name, chips in stored.items()}


def write(budgets: Budgets, path: Path) -> None:
    """One line per kernel, so that a difference reads as one."""
    lines = [f' "columns": {json.dumps(Budget._fields)}']
    for name, chips in sorted(budgets.items()):
        ordered = {chip: chips[chip] for chip in CHIPS if chip in chips}
        lines.append(f" {json.dumps(name, ensure_ascii=False)}: {json.dumps(ordered)}")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def recorded(rows: Iterable[Row], old: Budgets, gone: Container[tuple[str, str]] = ()) -> tuple[Budgets, list[Change]]:
    """The budgets with these rows' figures in them, without those of kernels that are ``gone`` from an architecture,
    and what that changes.
    """
    kept = {
        name: {chip: budget for chip, budget in chips.items() if (name, chip) not in gone}
        for name, chips in old.items()
    }
    budgets: Budgets = {name: chips for name, chips in kept.items() if chips}
    for row in rows:
        budgets.setdefault(row.name, {})[row.architecture] = found(row)
    return budgets, [
        change
        for name in sorted({*old, *budgets})
        for chip in CHIPS
        for change in _changes(name, chip, old.get(name, {}).get(chip), budgets.get(name, {}).get(chip))
    ]


def _changes(name: str, architecture: str, old: Budget | None, new: Budget | None) -> Iterator[Change]:
    if old == new:
        return
    if old is None or new is None:
        verdict = "new" if old is None else "gone"
        yield Change(name, architecture, "budget", _shown(old), _shown(new), verdict)
        return
    for what, before, after in zip(Budget._fields, old, new, strict=True):
        if before != after:
            better = after < before if what in ("registers", "shared") else after > before
            yield Change(name, architecture, what, str(before), str(after), "better" if better else "worse")


def _shown(budget: Budget | None) -> str:
    return "none" if budget is None else ", ".join(f"{what} {value}" for what, value in budget._asdict().items())


# ------------------------------------------------------------------------------------------ breaches


def breaches(rows: Iterable[Row], budgets: Budgets) -> list[Breach]:
    """All that is wrong with these rows."""
    return [breach for row in rows for breach in (*broken_rules(row), *_over(row, budgets))]


def _over(row: Row, budgets: Budgets) -> Iterator[Breach]:
    allowed = budgets.get(row.name, {}).get(row.architecture)
    if allowed is None:
        yield Breach(row.name, row.architecture, "budget", "one", "none", True)
        return
    mine = found(row)
    for what in ("registers", "shared"):
        most, have = getattr(allowed, what), getattr(mine, what)
        if have > most:
            yield Breach(row.name, row.architecture, what, f"at most {most}", str(have), True)
    for what in ("loads", "stores"):
        least, have = getattr(allowed, what), getattr(mine, what)
        if have < least:
            widths = ", ".join(f"{count} of {bits} bits" for bits, count in getattr(row.figures, what).items())
            carried = f"{have} % of the bytes in instructions of {WIDE} bits ({widths})"
            yield Breach(row.name, row.architecture, what, f"at least {least} %", carried, True)
    if allowed.matrix and not mine.matrix:
        yield Breach(row.name, row.architecture, "matrix instructions", "some", "none", True)


def broken_rules(row: Row) -> Iterator[Breach]:
    """Breaches that cannot be recorded away."""
    chip, figures = CHIPS[row.architecture], row.figures

    def broken(what: str, allowed: str, have: object) -> Breach:
        return Breach(row.name, row.architecture, what, allowed, str(have), False)

    if figures.spills:
        yield broken("spilled bytes", "0", figures.spills)
    programs = 2 if row.real else 1
    if figures.shared > chip.shared_per_block // programs:
        room = f"{chip.shared_per_block // programs}, room for {programs}"
        yield broken("bytes of shared memory", room, figures.shared)
    if multiplies(row) and row.case.dtype.itemsize == 2 and not figures.matrix_instructions:
        yield broken("matrix instructions", "some, in 16 bit", 0)
    for kind, instructions in (("load", figures.loads), ("store", figures.stores)):
        bits, tiles = required_width(row, kind)
        carried = bits and _carried(instructions, bits, row.warps * chip.warp_size)
        if carried < tiles:
            what = f"bytes that {kind}s of {bits} bits and more carry"
            yield broken(what, f"at least {tiles}, the tiles of pixels", carried)


# How many tiles of pixels each kernel loads and stores; all else is small beside them.
TILES = {
    ("slot_cross_attention", "_forward_kernel"): (1, 1),
    ("slot_cross_attention", "_backward_kernel"): (2, 1),
    ("slot_competition", "_rows_kernel"): (1, 0),
    ("slot_competition", "_forward_kernel"): (2, 0),
    ("slot_competition", "_backward_kernel"): (2, 2),
    ("jet_cross_attention", "_jet_forward_kernel"): (4, 4),
    ("jet_cross_attention", "_jet_backward_kernel"): (8, 4),
    ("jet_pointwise", "_pointwise_forward_kernel"): (4, 4),
    ("jet_pointwise", "_pointwise_backward_kernel"): (8, 4),
    ("jet_norm", "_norm_forward_kernel"): (4, 4),
    ("jet_norm", "_norm_backward_kernel"): (8, 4),
    ("jet_slot_softmax", "_slot_softmax_forward_kernel"): (7, 7),
    ("jet_slot_softmax", "_slot_softmax_backward_kernel"): (11, 7),
    ("recon_error", "_recon_error_kernel"): (1, 1),
    ("latent_adam", "_latent_adam_kernel"): (4, 4),
}


def multiplies(row: Row) -> bool:
    """Whether the kernel multiplies matrices: all that have tiles of pixels against slots."""
    return row.case.op.endswith(("cross_attention", "competition")) and (row.case.op, row.kernel) in TILES


def required_width(row: Row, kind: str) -> tuple[int, int]:
    """(bits, bytes): instructions at least so wide must carry so many bytes of a program's tiles; (0, 0): no matter.

    128 bits at a time where a row is whole 16 bytes: 180 columns of bf16 are whole 8 bytes, which allows 64.
    """
    case, chip = row.case, CHIPS[row.architecture]
    if not row.real or (case.op, row.kernel) not in TILES:
        return 0, 0
    itemsize = 4 if case.op == "latent_adam" else case.dtype.itemsize
    aligned = 16 if case.op == "recon_error" else math.gcd(16, case.sizes[-1] * itemsize)
    if aligned < 8:
        return 0, 0
    of_slots = ("BLOCK_S",) if case.op != "jet_slot_softmax" else ()
    blocks = {name: size for name, size in row.options.items() if name.startswith("BLOCK") and name not in of_slots}
    if kind == "store" and "OWN" in row.options:
        blocks["BLOCK_D"] = row.options["OWN"]  # read in chunks of columns, written whole
    tile = math.prod(blocks.values()) * itemsize
    loads, stores = TILES[case.op, row.kernel]
    if case.op == "latent_adam" and case.dtype.itemsize == 2:
        loads -= 1  # the gradient is narrower than the state beside which it is read
    bits = min(8 * aligned, 8 * tile // (row.warps * chip.warp_size))
    if row.architecture == "gfx942" and kind == "store" and multiplies(row):
        bits = min(bits, 64)  # its matrix units leave four neighbouring columns in a thread
    return bits, tile * (loads if kind == "load" else stores)


def _carried(instructions: dict[int, int], bits: int, threads: int) -> int:
    """Bytes that the instructions at least this wide move, each executed once by all threads."""
    return threads * sum(count * width // 8 for width, count in instructions.items() if width >= bits)
