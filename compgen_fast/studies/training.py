"""A study's training runs, in this process: quiet, patient, and going on where they were cut off."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from compgen_fast.train import folder
from compgen_fast.train.config import TrainConfig
from compgen_fast.train.launch import placed
from compgen_fast.train.loop import Trainer
from compgen_fast.train.memory import keep_freed_memory
from compgen_fast.train.ranks import Ranks, joined

PATIENCE = 600.0  # seconds: two jobs on two cores may each wait long


@contextmanager
def prepared(device: str) -> Iterator[Ranks]:
    """This process as the only rank, or as one of those that a launcher has started."""
    keep_freed_memory()
    placed(os.environ).export()
    with joined(device) as ranks:
        yield ranks


def run(config: TrainConfig, ranks: Ranks, told: Callable[[Trainer], None]) -> None:
    """Trains to the last step, or raises `Stopped`; ``told`` is called before the first step and after each."""
    config = replace(config, guard=replace(config.guard, stall=PATIENCE))
    folder.claim(config, True, ranks)
    with Trainer(config, ranks, quiet=True) as trainer:
        trainer.resume()
        trainer.told = lambda _: told(trainer)
        told(trainer)
        trainer.train()
