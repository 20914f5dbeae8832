"""The whole study: the jobs of a plan, results.json, the tables and the page."""

import json
import os
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from compgen_fast.models import summary
from compgen_fast.models.build import check as check_model
from compgen_fast.models.config import SlotVAEConfig, SupervisedConfig
from compgen_fast.recipes.perception import READ
from compgen_fast.report import perception as report
from compgen_fast.report.perception_numbers import of_objects
from compgen_fast.report.study import PICTURES, RESULTS
from compgen_fast.settings import to_json
from compgen_fast.studies.perception import queue
from compgen_fast.studies.perception.claims import claims
from compgen_fast.studies.perception.measuring import RESULT
from compgen_fast.studies.perception.plan import SCALES, Job, ScaleName, Split, plan
from compgen_fast.studies.record import versions
from compgen_fast.tables import Sheet
from compgen_fast.train import engine
from compgen_fast.train.data import factors, part


def run(
    scale: ScaleName,
    split: Split,
    seeds: int | None,
    out: Path,
    *,
    workers: int | None = None,
    vit: Path | None = None,
    dry_run: bool = False,
) -> int:
    """Runs the study, or goes on with it, and prints its tables."""
    jobs = plan(scale, split, seeds or SCALES[scale].seeds, out, vit)
    for job in jobs:
        check_model(job.train.model)
    console = Console()
    if dry_run:
        console.print(planned(jobs))
        _write_plan(jobs, out)
        print(f"settings of all {len(jobs)} jobs, for DeepSpeed too, in {out / 'plan'}")
        return 0
    started = time.time()
    ran = queue.run(jobs, out, workers or _places(scale), Console(stderr=True))
    results = gathered(jobs, scale, split, out, started)
    if not ran and (out / RESULTS).is_file():  # only gathered anew: it took what it took
        results |= {key: report.read_results(out)[key] for key in ("started", "seconds")}
    (out / RESULTS).write_text(json.dumps(results, indent=1) + "\n")
    np.savez_compressed(out / PICTURES, **pictures(jobs, out))
    page = report.write(out)
    console.print(report.tables(results))
    print(f"page: {page}")
    return 0


def _places(scale: ScaleName) -> int:
    """Jobs that can run side by side: one per GPU, or per core."""
    return torch.cuda.device_count() if scale == "gpu" else max(1, os.cpu_count() or 1)


def planned(jobs: Sequence[Job]) -> Sheet:
    """What would be trained."""
    head = ("job", "steps", "images", "image size", "slots", "parameters", "penalty")
    table = Sheet(*head, words=("job", "penalty"))
    for job in jobs:
        model = job.train.model
        assert isinstance(model, SlotVAEConfig | SupervisedConfig)
        count = summary.of_config(model, factors(job.train)).parameters
        penalty = model.loss.penalty if isinstance(model, SlotVAEConfig) else "–"
        table.add_row(
            job.name, f"{job.train.steps:,}", f"{job.train.data.size:,}", f"{model.image_size}", f"{model.slots}",
            f"{count:,}", penalty,
        )  # fmt: skip
    return table


def _write_plan(jobs: Sequence[Job], out: Path) -> None:
    for job in jobs:
        folder = out / "plan" / job.name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "job.json").write_text(to_json(job))
        (folder / "deepspeed.json").write_text(json.dumps(engine.settings(job.train, 1), indent=1) + "\n")


def gathered(jobs: Sequence[Job], scale: ScaleName, split: Split, out: Path, started: float) -> dict[str, Any]:
    """results.json, from the results of the jobs."""
    done = {job.name: json.loads((queue.folder_of(job, out) / RESULT).read_text()) for job in jobs}
    main = [job for job in jobs if job.sweep is None]
    inverted = [job for job in main if job.method == "vae" and job.encoder is None]
    seeds = sorted({job.seed for job in jobs})
    results: dict[str, Any] = {
        "study": "perception",
        "version": report.VERSION,
        "command": f"cgf study perception --scale {scale} --split {split} --seeds {len(seeds)}",
        "scale": scale,
        "split": split,
        "encoder": _slots_by(main[0]),
        "seeds": seeds,
        "world": _world(main[0]),
        "versions": versions(),
        "started": datetime.fromtimestamp(started, UTC).isoformat(timespec="seconds"),
        "seconds": time.time() - started,
        "chance": _chance(main[0], split),
        "methods": [entry for job in main for entry in done[job.name]["methods"]],
        "decoders": [done[job.name]["decoder"] for job in inverted],
        "sweeps": {"strength": _strengths(jobs, done), "data_size": _sizes(jobs, done)},
        "curves": {f"{job.decoder}/{job.seed}": done[job.name]["curve"] for job in inverted},
    }
    return results | {"claims": claims(results)}


def _world(job: Job) -> dict[str, Any]:
    data = job.train.data
    source: Any = part(data, job.train.model.image_size, "train").world
    level = source.matrix(data.split, data.seen_pairs).level
    return {
        "name": data.world, "resolution": job.train.model.image_size, "seen_pairs": data.seen_pairs,
        "options": list(data.options), "train_images": data.size, "objects": level.shape[0], "partners": level.shape[1],
    }  # fmt: skip


def _chance(job: Job, split: Split) -> dict[str, float]:
    known = {factor.name: factor for factor in factors(job.train)}
    return {name: 1 / len(known[name].values or (0,)) for name in READ[split]}


def _strengths(jobs: Sequence[Job], done: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Of the attention penalty: the sweep's points, and the study's own of the same seeds, without it and with it."""
    points = [job for job in jobs if job.sweep == "strength"]
    own = [job for job in _alike(jobs, points) if job.decoder in ("apart", "attention")]
    return sorted(
        (
            {
                "alpha": _alpha(job),
                "seed": job.seed,
                "block_hessian_share": done[job.name]["decoder"]["block_hessian_share"],
                "accuracy": _accuracies(done[job.name], ("encoder", "replay+search")),
            }
            for job in (*points, *own)
        ),
        key=lambda point: (point["alpha"], point["seed"]),
    )


def _alike(jobs: Sequence[Job], points: Sequence[Job]) -> list[Job]:
    """The study's own jobs of the seeds that a sweep has points of: seeds differ more than its points."""
    seeds = {job.seed for job in points}
    return [job for job in jobs if job.sweep is None and job.encoder is None and job.seed in seeds]


def _slots_by(job: Job) -> str:
    assert isinstance(job.train.model, SlotVAEConfig | SupervisedConfig)
    return job.train.model.encoder.slots_by


def _alpha(job: Job) -> float:
    assert isinstance(job.train.model, SlotVAEConfig)
    return job.train.model.loss.alpha


def _sizes(jobs: Sequence[Job], done: Mapping[str, Any]) -> list[dict[str, Any]]:
    swept = [job for job in jobs if job.sweep == "data_size"]
    own = [job for job in _alike(jobs, swept) if job.method == "supervised" or job.decoder == "attention"]
    points: dict[tuple[int, int], dict[str, Any]] = {}
    for job in (*swept, *own):
        size = job.train.data.size
        point = points.setdefault((size, job.seed), {"images": size, "seed": job.seed, "accuracy": {}})
        found = _accuracies(done[job.name], ("encoder", "replay+search"))
        if job.method == "supervised":
            point["accuracy"]["supervised"] = found["encoder"]
        else:
            point["accuracy"]["replay+search"] = found["replay+search"]
    return [points[key] for key in sorted(points)]


def _accuracies(result: Mapping[str, Any], inferences: Sequence[str]) -> dict[str, dict[str, float]]:
    """Of objects, ID and OOD."""
    return {
        entry["inference"]: {name: of_objects(entry["accuracy"], name) for name in ("id", "ood")}
        for entry in result["methods"]
        if entry["inference"] in inferences
    }


def pictures(jobs: Sequence[Job], out: Path) -> dict[str, Any]:
    """Of the decoders of the first seed, under their names."""
    arrays: dict[str, Any] = {}
    for job in jobs:
        if job.method == "vae" and job.sweep is None and job.encoder is None and job.seed == 0:
            with np.load(queue.folder_of(job, out) / PICTURES, allow_pickle=False) as kept:
                arrays |= {f"{job.decoder}/{name}": kept[name] for name in kept}
    return arrays
