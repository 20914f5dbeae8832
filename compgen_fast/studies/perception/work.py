"""The training of one job, as a process of its own: `python -m compgen_fast.studies.perception.work FOLDER`.

FOLDER holds job.json. Both runs, the model and then its replay, go through the trainer that `compgen train` uses, on as
many ranks as the process was started as. A run that was cut off goes on from its last checkpoint, one that is done is
left alone. Lines of progress on stdout are for queue.py.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path

from compgen_fast.studies.perception.plan import Job
from compgen_fast.train import folder as run_folder
from compgen_fast.train.config import TrainConfig
from compgen_fast.train.launch import placed
from compgen_fast.train.loop import Trainer
from compgen_fast.train.memory import keep_freed_memory
from compgen_fast.train.ranks import Ranks, joined
from compgen_fast.train.settings import from_json

JOB = "job.json"


def read_job(folder: Path) -> Job:
    path = folder / JOB
    if not path.is_file():
        raise ValueError(f"{folder}: there is no {JOB} in it; `compgen study perception` makes the folders of its jobs")
    return from_json(Job, path.read_text(), str(path))


def told(phase: str, done: int, total: int) -> None:
    """A line of progress."""
    print(f"{phase} {done} {total}", flush=True)


def train(folder: Path) -> None:
    """Trains what the job asks for and has not yet."""
    job = read_job(folder)
    keep_freed_memory()
    runs = [(config, phase) for config, phase in ((job.train, "training"), (job.replay, "replay")) if config]
    waiting = [(config, phase) for config, phase in runs if not (config.out / "weights").is_dir()]
    if not waiting:
        return
    placed(os.environ).export()
    with joined(job.train.device) as ranks:
        for config, phase in waiting:
            _train(config, ranks, phase)


def _train(config: TrainConfig, ranks: Ranks, phase: str) -> None:
    config = replace(config, guard=replace(config.guard, stall=600.0))  # two jobs on two cores may each wait long
    run_folder.claim(config, True, ranks)
    with Trainer(config, ranks, quiet=True) as trainer:
        trainer.told = lambda step: told(phase, step, config.steps) if ranks.first and step % 20 == 0 else None
        trainer.resume()
        trainer.train()


if __name__ == "__main__":
    train(Path(sys.argv[1]))
