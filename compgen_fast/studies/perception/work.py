"""The training of one job, as a process of its own: `python -m compgen_fast.studies.perception.work FOLDER`.

FOLDER holds job.json. Both runs, the model and then its replay, go through the trainer that `cgf train` uses, on as
many ranks as the process was started as. A run that was cut off goes on from its last checkpoint, one that is done is
left alone. Lines of progress on stdout are for queue.py.
"""

import sys
from functools import partial
from pathlib import Path

from compgen_fast.settings import from_json
from compgen_fast.studies import training
from compgen_fast.studies.perception.plan import Job
from compgen_fast.train.loop import Trainer

JOB = "job.json"
TRAINED = "trained"
"""In the folder of a run that is complete. One that was stopped has weights too."""


def read_job(folder: Path) -> Job:
    path = folder / JOB
    if not path.is_file():
        raise ValueError(f"{folder}: there is no {JOB} in it; `cgf study perception` makes the folders of its jobs")
    return from_json(Job, path.read_text(), str(path))


def told(phase: str, done: int, total: int) -> None:
    """A line of progress."""
    print(f"{phase} {done} {total}", flush=True)


def train(folder: Path) -> None:
    """Trains what the job asks for and has not yet."""
    job = read_job(folder)
    runs = [(config, phase) for config, phase in ((job.train, "training"), (job.replay, "replay")) if config]
    waiting = [(config, phase) for config, phase in runs if not (config.out / TRAINED).is_file()]
    if not waiting:
        return
    with training.prepared(job.train.device) as ranks:
        for config, phase in waiting:
            training.run(config, ranks, partial(_told, phase))
            (config.out / TRAINED).touch()


def _told(phase: str, trainer: Trainer) -> None:
    if trainer.ranks.first and trainer.step % 20 == 0:
        told(phase, trainer.step, trainer.config.steps)


if __name__ == "__main__":
    train(Path(sys.argv[1]))
