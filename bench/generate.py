"""The suite `generate`: training each generator beside the same written straightforwardly.

1. Forward and backward: once on latents that are there already, and once from images, which a tokenizer encodes in
   every step (`generate_peers`).
2. Training throughput: whole steps, from stored data to updated weights, at the generation study's size
   (`generate_training`). It is a CPU's: with ``--device cuda`` there is only part 1.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from compgen_fast.bench import generate_training, report
from compgen_fast.bench.generate_peers import StepSize, backend, case
from compgen_fast.bench.generate_training import Found
from compgen_fast.bench.harness import Case, Row, Stamp, measure, percentiles
from compgen_fast.bench.suite import FULL, GREEN, IMPOSSIBLE, QUICK, RED, RESULTS, stamp
from compgen_fast.generate.config import (
    DiTConfig,
    GIVTConfig,
    JepaConfig,
    MARConfig,
    MaskGITConfig,
    ObjectiveConfig,
    TrunkConfig,
)
from compgen_fast.progress import following
from compgen_fast.tables import Sheet

OBJECTIVES: tuple[tuple[str, ObjectiveConfig], ...] = (
    ("DiT", DiTConfig()),
    ("MaskGIT", MaskGITConfig()),
    ("MaskGIT", MaskGITConfig(jepa=JepaConfig(layers=(3, 5)))),
    ("MAR", MARConfig()),
    ("masked GIVT", GIVTConfig()),
    ("causal GIVT", GIVTConfig(order="causal")),
)
SHAPES: tuple[tuple[dict[str, Any], int], ...] = (
    ({"side": 4, "trunk": TrunkConfig(width=64, layers=12, heads=4)}, 64),  # the generation study's
    ({"side": 8, "trunk": TrunkConfig(width=128, layers=6, heads=4)}, 16),  # 64 px and a tokenizer of 8 px to a token
    ({"side": 16, "trunk": TrunkConfig(width=128, layers=6, heads=4)}, 4),  # four times as many tokens
)
# What the suite was asked to show, of throughput. A look, not a gate.
WANTED = 1.3
# Of a loss, as a share of it. Rounding makes 1e-6; latents of other images, or another objective, 1e-2 and more.
MOST_ERROR = 1e-5


def sizes(shape: dict[str, Any], batch: int) -> list[StepSize]:
    return [StepSize(name, replace(config, **shape), batch) for name, config in OBJECTIVES]


def cases(device: str) -> list[Case]:
    return [case(size, device) for shape in SHAPES for size in sizes(*shape)]


def run(quick: bool = False, threads: int = 1, json: str | None = None, device: str = "cpu") -> int:
    """Measures everything and writes what was found. Returns 0, 1 if a gate is red, 2 if the device is not there."""
    if device == "cuda" and not torch.cuda.is_available():
        print("--device cuda: torch sees no CUDA or ROCm device here; leave it out to run on the CPU", file=sys.stderr)
        return IMPOSSIBLE
    RESULTS.mkdir(exist_ok=True)
    effort = QUICK if quick else FULL
    people = Console(stderr=json == "-", highlight=False)
    stamped = stamp(threads, effort.mode, device)
    rows: list[Row] = []
    wanted = cases(device)
    with following("measure", len(wanted), "cases") as advance:
        for each in wanted:
            advance(0, f"{each.name}: check, measure")
            rows += (found := measure(each, effort.seconds, stamped))
            people.print(report.table(each.name, found))
            advance()
    people.print(report.LEGEND, style="dim")
    if device == "cpu":
        rows += (found := measure_training(sizes(*SHAPES[0]), effort.seconds, stamped))
        people.print(training_table(found))
    report.draw(rows, RESULTS / "generate.png")
    report.write(rows, RESULTS / "generate.csv", json, people, f", chart in {RESULTS / 'generate.png'}")
    return RED if any(row.gate for row in rows) else GREEN


# ---------------------------------------------------------------------------------------------- training throughput


def measure_training(sizes: Sequence[StepSize], seconds: float, stamped: Stamp) -> list[Row]:
    """The rows of whole steps of these sizes."""
    rows: list[Row] = []
    with (
        generate_training.process(stamped.threads) as measured,
        following("measure training", len(sizes), "sizes") as advance,
    ):
        for size in sizes:
            advance(0, str(size))
            rows += training_rows(size, measured(size, seconds), stamped)
            advance()
    return rows


def training_rows(size: StepSize, found: Found, stamped: Stamp) -> list[Row]:
    """One for each peer; without times where a loss is wrong, or the peer is absent."""
    wrong = {name: error for name, error in found.errors.items() if not error <= MOST_ERROR}
    gate = "".join(f"gate: the first loss of {n} is {e:.0e} off the fp64 one" for n, e in [*wrong.items()][:1])
    return [
        training_row(size, peer, found, gate, stamped)
        for peer in (*(name for name in found.ms if name != "ours"), *found.absent)
    ]


def training_row(size: StepSize, peer: str, found: Found, gate: str, stamped: Stamp) -> Row:
    ours, theirs = ((), ()) if gate else (found.ms["ours"], found.ms.get(peer, ()))
    low, middle, high = percentiles([b / a for a, b in zip(ours, theirs, strict=bool(theirs))])
    peer_low, peer_middle, peer_high = percentiles(theirs)
    return Row(
        suite="generate",
        case=f"training, {size}",
        direction="full",
        peer=peer,
        ratio=middle,
        ratio_low=low,
        ratio_high=high,
        peak_ratio=None,
        error=found.errors["ours"],
        dtype="float32",
        device="cpu",
        does_less=None,
        unsupported=found.absent.get(peer),
        gate=gate or None,
        rounds=len(theirs),
        our_ms=percentiles(ours)[1],
        peer_ms_low=peer_low,
        peer_ms=peer_middle,
        peer_ms_high=peer_high,
        peer_error=found.errors.get(peer),
        our_peak=None,
        peer_peak=None,
        peak_over_io=None,
        backend=backend("cpu"),
        **asdict(stamped),
    )


def training_table(rows: Sequence[Row]) -> Sheet:
    """A line for each peer of each size."""
    title = "training throughput: whole steps, from stored data to updated weights"
    words = ("generator", "peer")
    table = Sheet(*words, "ours ms", "peer ms", "ratio", "20–80 %", words=words, title=title)
    for row in rows:
        if row.ratio is None:
            table.add_row(row.case, row.peer, *report.MISSING)
            continue
        ratio = Text(f"{row.ratio:.2f}×", style="bold green" if row.ratio >= WANTED else "bold red")
        spread = f"{row.ratio_low:.2f}–{row.ratio_high:.2f}"
        table.add_row(row.case, row.peer, f"{row.our_ms:.1f}", f"{row.peer_ms:.1f}", ratio, spread)
    wanted = f"eager has all latents in memory and reads nothing; wanted: {WANTED}×"
    table.caption = "\n".join([*report.reasons(rows), wanted])
    return table
