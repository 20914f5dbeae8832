"""The whole study: the jobs of a plan, results.json, the tables and the page."""

import json
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from compgen_fast.report import bumps as report
from compgen_fast.report.study import PICTURES, RESULTS
from compgen_fast.studies import queue
from compgen_fast.studies.bumps.claims import claims, exponents
from compgen_fast.studies.bumps.failure import FewShot, Naive
from compgen_fast.studies.bumps.plan import Job, PartName, ScaleName, plan
from compgen_fast.studies.bumps.plan_a import Control, TokenRun
from compgen_fast.studies.bumps.plan_b import Threshold
from compgen_fast.studies.bumps.stacking import speedup
from compgen_fast.studies.record import versions


def run(scale: ScaleName, part: PartName, out: Path, workers: int | None = None) -> int:
    """Runs the study or a part, or goes on with it, and tells of all that is done by now."""
    queue.run(plan(scale, part), _work, out, workers or max(1, os.cpu_count() or 1), Console(stderr=True))
    jobs = [job for job in plan(scale, "all") if queue.done(job, out)]
    results = gathered(jobs, scale, part, out)
    (out / RESULTS).write_text(json.dumps(results, indent=1) + "\n")
    np.savez_compressed(out / PICTURES, **pictures(jobs, out))
    page = report.write(out)
    Console().print(report.tables(results))
    print(f"page: {page}")
    return 0


def _work(job: Job, _: Path) -> queue.Found:
    return job.run()


def gathered(jobs: Sequence[Job], scale: ScaleName, part: PartName, out: Path) -> dict[str, Any]:
    """results.json, from what the jobs found."""
    stored = [(job, queue.results(job, out)) for job in jobs]
    found = [(job, each["settings"] | each["found"]) for job, each in stored]
    thresholds = [each for job, each in found if isinstance(job, Threshold)]
    results: dict[str, Any] = {
        "study": "bumps",
        "version": report.VERSION,
        "command": f"cgf study bumps --scale {scale} --part {part}",
        "scale": scale,
        "part": part,
        "seeds": sorted({seed for _, each in found for seed in each.get("seeds", ())}),
        "versions": versions(),
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "job_seconds": sum(each["seconds"] for _, each in stored),
        "failure": [each for job, each in found if isinstance(job, Naive)],
        "few_shot": [each for job, each in found if isinstance(job, FewShot)],
        "tokens": _tokens([each for job, each in found if isinstance(job, TokenRun)]),
        "penalty": [each for job, each in found if isinstance(job, Control)],
        "thresholds": thresholds,
        "exponents": exponents(thresholds),
        "stacking": speedup() if part == "all" else None,
    }
    return results | {"claims": claims(results)}


def _tokens(runs: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """All seeds as one."""
    if not runs:
        return None
    return runs[0] | {"outcomes": [outcome for run in runs for outcome in run["outcomes"]]}


def pictures(jobs: Sequence[Job], out: Path) -> dict[str, Any]:
    """All arrays for the page, under the names of their jobs."""
    return {
        f"{job.name}/{name}": array.astype(np.float16 if array.dtype == np.float32 else array.dtype)
        for job in jobs
        for name, array in queue.arrays(job, out).items()
    }
