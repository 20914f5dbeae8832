"""A run's folder: whose it is, and whether a run may start or go on in it.

config.json    the settings, all of them      metrics.jsonl, tensorboard/    metrics.py
checkpoints/   checkpoints.py                 weights/                       export.py
"""

import os
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from compgen_fast.train.config import TrainConfig
from compgen_fast.train.ranks import Ranks
from compgen_fast.train.settings import from_json, to_json

CONFIG = "config.json"
# What a run may not change on its way: the model, and which samples come in which order.
FIXED = ("model", "seed", "data.world", "data.split", "data.seen_pairs", "data.size", "data.seed", "data.shards")
FREE = ("model.checkpoint_activations",)


def claim(config: TrainConfig, resume: bool, ranks: Ranks) -> None:
    """Writes config.json, or refuses on all ranks: a folder that holds another run is not touched."""
    refusal = ""
    if ranks.first:
        try:
            _claim(config, resume)
        except (OSError, ValueError) as error:
            refusal = str(error)
    if refusal := ranks.gather(refusal)[0]:
        raise ValueError(refusal)


def _claim(config: TrainConfig, resume: bool) -> None:
    path = config.out / CONFIG
    if path.exists() and not resume and any((config.out / "checkpoints").glob("step_*")):
        raise ValueError(f"{config.out} already holds a run; go on with --resume, or choose another folder with --out")
    if path.exists() and resume:
        former = from_json(TrainConfig, path.read_text(), str(path))
        for name, was, now in changes(former, config):
            if name.startswith(FIXED) and name not in FREE:
                raise ValueError(
                    f"{name} is {now!r}, but the run in {config.out} was started with {was!r}; give it as it was, or "
                    "choose another folder with --out"
                )
    config.out.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{CONFIG}.{os.getpid()}")
    temporary.write_text(to_json(config))
    temporary.replace(path)


def changes(former: Any, now: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Each setting in which two configs differ: its dotted name and both values."""
    if is_dataclass(former) and type(former) is type(now):
        for field in fields(former):
            dotted = f"{name}.{field.name}" if name else field.name
            yield from changes(getattr(former, field.name), getattr(now, field.name), dotted)
    elif former != now:
        yield name, former, now


def read_config(folder: Path) -> TrainConfig:
    """The settings of the run in a folder."""
    path = folder / CONFIG
    if not path.exists():
        raise ValueError(f"{folder} holds no {CONFIG}; expected the folder of a run")
    return from_json(TrainConfig, path.read_text(), str(path))
