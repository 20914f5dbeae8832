"""The whole study: tokenizers and probes, the generators of a plan, results.json, the tables and the page."""

import json
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from compgen_fast.report import generation as report
from compgen_fast.report.study import PICTURES, RESULTS
from compgen_fast.studies import queue
from compgen_fast.studies.generation import prepare, runs
from compgen_fast.studies.generation.claims import claims
from compgen_fast.studies.generation.plan import SCALES, PartName, Run, ScaleName, TokenizerJob, plan, tokenizers
from compgen_fast.studies.record import versions
from compgen_fast.train import data
from compgen_fast.train.ranks import Ranks


def run(scale: ScaleName, part: PartName, out: Path, workers: int | None = None) -> int:
    """Runs the study or a part, or goes on with it, and tells of all that is done by now."""
    console, cores = Console(stderr=True), workers or max(1, os.cpu_count() or 1)
    first = tokenizers(scale, out)
    console.print("teaching probes on real images")
    prepare.fit(first[0].train, out, SCALES[scale].probe_steps)
    _pack(first)
    queue.run(first, prepare.tokenizer, out, cores, console, a_process_each=True)
    jobs = plan(scale, part, out)
    _pack(jobs)
    queue.run(jobs, runs.run, out, cores, console, a_process_each=True)
    done = [job for job in plan(scale, "all", out) if queue.done(job, out)]
    results = gathered(done, scale, part, out)
    (out / RESULTS).write_text(json.dumps(results, indent=1) + "\n")
    np.savez_compressed(out / PICTURES, **pictures(done, out))
    page = report.write(out)
    Console().print(report.tables(results))
    print(f"page: {page}")
    return 0


def _pack(jobs: Sequence[TokenizerJob | Run]) -> None:
    """Images and tokens that jobs share, before several of them would make them at once."""
    shared = {(job.train.data, data.kind_of(job.train.model)): job.train for job in jobs}
    for config in shared.values():
        data.shards(config, Ranks.alone())


def pictures(jobs: Sequence[Run], out: Path) -> dict[str, Any]:
    """What generators made under their names, and the images that have the factors they were asked for."""
    first = jobs[0]
    real = runs.shown(prepare.unseen_images(first.train, first.images)[0], first.images)
    return {report.ASKED: real} | {job.name: queue.arrays(job, out)["samples"] for job in jobs}


def gathered(jobs: Sequence[Run], scale: ScaleName, part: PartName, out: Path) -> dict[str, Any]:
    """results.json, from what the jobs found."""
    stored = [queue.results(job, out) for job in jobs]
    found = [each["found"] | {"seconds": each["seconds"]} for each in stored]
    return {
        "study": report.NAME,
        "version": report.VERSION,
        "command": f"cgf study generation --scale {scale} --part {part}",
        "scale": scale,
        "part": part,
        "seeds": sorted({each["seed"] for each in found}),
        "versions": versions(),
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "job_seconds": sum(each["seconds"] for each in stored),
        "tokenizers": [queue.results(job, out)["found"] for job in tokenizers(scale, out)],
        "runs": found,
        "claims": claims(found),
    }
