"""A run's folder: whose it is, whether a run may start or go on in it, and which settings it had when.

config.json    the settings, all of them      metrics.jsonl, tensorboard/    metrics.py
history.jsonl  settings changed on the way    checkpoints/   checkpoints.py                 weights/  models/io.py
"""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compgen_fast.files import write_whole
from compgen_fast.settings import changes, from_json, to_json, to_plain
from compgen_fast.train.config import OF_WORLD, TrainConfig, settled
from compgen_fast.train.ranks import Ranks

CONFIG, HISTORY = "config.json", "history.jsonl"
# What a run may not change on its way: the model, and which samples come in which order.
FIXED = ("model", "seed", "data.shards", *(f"data.{name}" for name in OF_WORLD))
FREE = ("model.checkpoint_activations",)
Row = dict[str, Any]


def claim(config: TrainConfig, resume: bool, ranks: Ranks) -> None:
    """Writes config.json, or refuses on all ranks: a folder that holds another run is not touched. Where a run goes on
    with other settings, says which, and keeps them in history.jsonl.
    """
    refusal = ""
    if ranks.first:
        try:
            _claim(config, resume)
        except (OSError, ValueError) as error:
            refusal = str(error)
    if refusal := ranks.gather(refusal)[0]:
        raise ValueError(refusal)


def check(config: TrainConfig, resume: bool) -> list[Row]:
    """Refuses a folder that holds another run; returns the changed settings of one that goes on."""
    out = config.out
    if not (out / CONFIG).exists() or not _steps_done(out):
        return []
    if not resume:
        raise ValueError(f"{out} already holds a run; go on with --resume, or choose another folder with --out")
    return _changed(config)


def _steps_done(out: Path) -> int:
    """As many as its newest checkpoint has; 0 where there is none."""
    return max((int(found.name.removeprefix("step_")) for found in (out / "checkpoints").glob("step_*")), default=0)


def _claim(config: TrainConfig, resume: bool) -> None:
    changed = check(config, resume)
    config.out.mkdir(parents=True, exist_ok=True)
    if changed:
        _note(config.out, changed)
    write_whole(config.out / CONFIG, to_json(config))


def _changed(config: TrainConfig) -> list[Row]:
    """In what the settings differ from those that the run had so far; what may not is refused."""
    differing = [*changes(settled(read_config(config.out)), config)]
    for name, was, now in differing:
        if name.startswith(FIXED) and name not in FREE:
            raise ValueError(
                f"{name} is {now!r}, but the run in {config.out} was started with {was!r}; give it as it was, or "
                "choose another folder with --out"
            )
    return [{"name": name, "was": to_plain(was), "now": to_plain(now)} for name, was, now in differing]


def _note(out: Path, changed: Sequence[Row]) -> None:
    step = _steps_done(out)
    print(f"{out} goes on after step {step} with other settings:", file=sys.stderr)
    for change in changed:
        print("  {name}: {was} → {now}".format(**change), file=sys.stderr)
    line = {"step": step, "time": round(time.time(), 3), "changes": changed}
    with (out / HISTORY).open("a") as file:
        file.write(json.dumps(line) + "\n")


def read_history(folder: Path) -> list[Row]:
    """The lines of history.jsonl, one for each time that a run went on with other settings: the steps done, the time,
    and of each changed setting ``name``, ``was`` and ``now``.
    """
    path = folder / HISTORY
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def read_config(folder: Path) -> TrainConfig:
    """The settings of the run in a folder."""
    path = folder / CONFIG
    if not path.exists():
        raise ValueError(f"{folder} holds no {CONFIG}; expected the folder of a run")
    return from_json(TrainConfig, path.read_text(), str(path))
