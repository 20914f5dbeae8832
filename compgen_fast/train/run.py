"""A run on this rank, from its settings to its exit code: what to refuse before any work, how failures are told."""

import os
import signal
import sys
from dataclasses import replace

from rich.console import Console

from compgen_fast.exits import Exit
from compgen_fast.models.build import check as check_model
from compgen_fast.report import training as report
from compgen_fast.settings import changes
from compgen_fast.train import folder
from compgen_fast.train.config import TrainConfig, check
from compgen_fast.train.data import check_sources, check_tokenizer, fitted, open_tokenizer
from compgen_fast.train.launch import placed
from compgen_fast.train.loop import SHARED_FAILURES, Trainer
from compgen_fast.train.memory import keep_freed_memory
from compgen_fast.train.profiling import profile_steps, tables
from compgen_fast.train.ranks import Ranks, joined, leave
from compgen_fast.train.signals import Stopped


def run(config: TrainConfig, resume: bool) -> int:
    """Trains, and returns the exit code, alike on all ranks: 0 for a run that is complete."""
    placement = placed(os.environ)
    refuse_impossible(config, placement.size)
    config = _fitted(config, tell=placement.rank == 0)
    placement.export()
    if placement.size > 1:  # until `Stop` listens: ranks may wait for each other where Python takes no notice of ctrl-C
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    keep_freed_memory()
    with joined(config.device) as ranks:
        folder.claim(config, resume, ranks)
        code = _trained(config, resume, ranks)
        if ranks.size > 1:
            leave(ranks, code)
    return code


def _trained(config: TrainConfig, resume: bool, ranks: Ranks) -> int:
    code = int(Exit.DONE)
    try:
        with Trainer(config, ranks) as trainer:
            if resume:
                trainer.resume()
            try:
                trainer.train()
            except Stopped as stopped:
                code = stopped.code
            write_report(trainer)
    except SHARED_FAILURES as failure:
        if ranks.first:
            print(f"cgf: {failure}", file=sys.stderr)
        return Exit.FAILED
    return code


def write_report(trainer: Trainer) -> None:
    """Rank 0 draws the run, with the averaged weights on a few validation samples."""
    if not trainer.ranks.first:
        return
    shown = trainer.validation or trainer.stream
    shown.seek(0)
    batch = next(iter(shown))
    tokenizer = open_tokenizer(trainer.config)
    with trainer.ema.applied(trainer.model):
        page = report.write(trainer.config.out, trainer.model.eval(), batch.images, batch.factors, tokenizer)
    trainer.console.print(f"report in {page}", soft_wrap=True, highlight=False)


def profile(config: TrainConfig, steps: int) -> int:
    """Steps of a run that is not kept, under the profiler: a trace and two tables in out/profile."""
    config = replace(config, out=config.out / "profile")
    placement = placed(os.environ)
    refuse_impossible(config, placement.size)
    config = _fitted(config, tell=placement.rank == 0)
    placement.export()
    with joined(config.device) as ranks, Trainer(config, ranks) as trainer:
        rows = profile_steps(trainer, steps, config.out)
        if ranks.first:
            Console().print(tables(rows))
            print(f"trace in {config.out / 'trace.json.gz'}: open it in ui.perfetto.dev")
    return 0


def refuse_impossible(config: TrainConfig, ranks: int) -> None:
    """What can be known to be wrong before anything is made or started."""
    import torch

    check(config, ranks)
    check_model(config.model)
    for name, place in (("out", config.out), ("data.cache", config.data.cache)):
        if (file := next((found for found in (place, *place.parents) if found.is_file()), None)) is not None:
            raise ValueError(f"{name} is {place}, and {file} is a file; choose a folder")
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "device is 'cuda', and torch sees no CUDA or ROCm device here; `cgf env` says what it sees. "
            "--device cpu trains on the processor"
        )
    check_tokenizer(config)
    check_sources(config)


def _fitted(config: TrainConfig, tell: bool) -> TrainConfig:
    """The settings with those that the data limit, which is told."""
    found = fitted(config)
    for name, was, now in changes(config, found) if tell else ():
        print(f"{name} is {now} instead of {was}: there are {now} training images", file=sys.stderr)
    return found
