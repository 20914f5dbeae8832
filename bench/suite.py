"""Runs the cases of a suite as a command: progress, tables, files, exit code. Which cases is the suite's business."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
from rich.console import Console

from compgen_fast import __version__
from compgen_fast.bench import report
from compgen_fast.bench.harness import Case, Row, Stamp, measure
from compgen_fast.cpu import this_cpu
from compgen_fast.progress import following

RESULTS = Path("bench-results")
GREEN, RED, IMPOSSIBLE = 0, 1, 2


@dataclass(frozen=True)
class Effort:
    """How long each case is timed, in seconds, all contenders together. Checking and compiling come on top."""

    mode: str
    seconds: float


QUICK, FULL = Effort("quick", 2.5), Effort("full", 15.0)


def run_suite(cases: Callable[[str], Sequence[Case]], quick: bool, threads: int, json: str | None, device: str) -> int:
    """Measures all cases and writes what was found. Returns 0, 1 if a gate is red, 2 if the device is not there."""
    if device == "cuda" and not torch.cuda.is_available():
        print("--device cuda: torch sees no CUDA or ROCm device here; leave it out to run on the CPU", file=sys.stderr)
        return IMPOSSIBLE
    RESULTS.mkdir(exist_ok=True)  # a folder that cannot be written must not be found out after the measurement
    effort = QUICK if quick else FULL
    people = Console(stderr=json == "-", highlight=False)
    rows = _measure_all(cases(device), effort, stamp(threads, effort.mode, device), people)
    _write(rows, json, people)
    return RED if any(row.gate for row in rows) else GREEN


def _measure_all(cases: Sequence[Case], effort: Effort, stamp: Stamp, people: Console) -> list[Row]:
    rows: list[Row] = []
    with following("measure", len(cases), "cases") as advance:
        for case in cases:
            advance(0, f"{case.name}: check, compile, measure")
            found = measure(case, effort.seconds, stamp)
            rows += found
            for title, group in report.by_case(found):
                people.print(report.table(title, group))
            advance()
    return rows


def _write(rows: Sequence[Row], json: str | None, people: Console) -> None:
    table, chart = (RESULTS / f"{rows[0].suite}{ending}" for ending in (".csv", ".png"))
    report.draw(rows, chart)
    people.print(report.LEGEND, style="dim")
    report.write(rows, table, json, people, f", chart in {chart}")


def stamp(threads: int, mode: str, device: str) -> Stamp:
    return Stamp(
        threads=threads,
        mode=mode,
        hardware=torch.cuda.get_device_name() if device == "cuda" else this_cpu().model,
        version=__version__,
        torch=torch.__version__,
        commit=commit(Path(__file__).resolve().parent.parent),
        timestamp=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def commit(checkout: Path) -> str | None:
    """The commit measured, with a + when files differ from it; None outside of a checkout of ours."""
    if not (checkout / ".git").exists():  # installed as a package, perhaps inside somebody else's repository
        return None
    head = _git(checkout, "rev-parse", "--short", "HEAD")
    return head and head + ("+" if _git(checkout, "status", "--porcelain") else "")


def _git(checkout: Path, *arguments: str) -> str | None:
    try:
        answer = subprocess.run(["git", "-C", str(checkout), *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return answer.stdout.strip()
