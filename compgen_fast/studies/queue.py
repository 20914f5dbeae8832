"""Runs jobs, as many at a time as there are cores, each on one thread; what a job found is kept as soon as it is done.

A job leaves NAME.json (its settings and numbers) and NAME.npz (arrays for the page) in the study's jobs/PART. One that
is there with the same settings is not run again. What a job does is the study's own: a function of the job and the
study's folder, in a process of its own.
"""

import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console

from compgen_fast.exits import Exit
from compgen_fast.files import write_whole
from compgen_fast.progress import following
from compgen_fast.train.memory import keep_freed_memory


class Job(Protocol):
    """A dataclass; its fields are its settings."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def part(self) -> str: ...

    @property
    def name(self) -> str: ...


Found = tuple[Mapping[str, Any], Mapping[str, NDArray[Any]]]
"""Numbers, and arrays for the page."""
Work = Callable[[Any, Path], Found]
"""Job and the study's folder → what was found. A function of a module, since other processes import it."""


def run(
    jobs: Sequence[Job], work: Work, out: Path, workers: int, console: Console, *, a_process_each: bool = False
) -> None:
    """Runs what is not done yet. Jobs that train by DeepSpeed need a process each: it starts only once in one."""
    waiting = [job for job in jobs if not done(job, out)]
    if not waiting:
        return
    done_before = len(jobs) - len(waiting)
    with terminable(), following("study", len(jobs), "jobs", done=done_before, console=console) as advance:
        advance(0, "training")
        most = 1 if a_process_each else None
        with ProcessPoolExecutor(workers, get_context("spawn"), initializer=_alone, max_tasks_per_child=most) as pool:
            running = {pool.submit(_run, job, work, out): job for job in waiting}
            try:
                for future in as_completed(running):
                    future.result()
                    advance(1, f"{running[future].name} is done")
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                for worker in active_children():  # or an interrupted study would wait for its jobs, minutes each
                    worker.terminate()
                raise


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM ends a study as ctrl-C does, with its workers; by itself it would end this process alone."""
    if threading.current_thread() is not threading.main_thread():  # which has no say in signals
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(Exit.TERMINATED))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def results(job: Job, out: Path) -> dict[str, Any]:
    """The job's ``settings``, the ``seconds`` it took, and the numbers it ``found``."""
    stored: dict[str, Any] = json.loads(_path(job, out, "json").read_text())
    return stored


def arrays(job: Job, out: Path) -> dict[str, NDArray[Any]]:
    with np.load(_path(job, out, "npz"), allow_pickle=False) as kept:
        return {name: kept[name] for name in kept}


def _path(job: Job, out: Path, suffix: str) -> Path:
    return out / "jobs" / job.part / f"{job.name}.{suffix}"


def _settings(job: Job) -> Any:
    return json.loads(json.dumps(asdict(job), default=str))


def done(job: Job, out: Path) -> bool:
    """Whether its results are there; an error if they are of other settings."""
    path = _path(job, out, "json")
    if not path.is_file():
        return False
    if json.loads(path.read_text())["settings"] != _settings(job):
        raise ValueError(
            f"{path} holds what was found with other settings; finish that study with its own command, or choose "
            "another folder with --out"
        )
    return True


def _alone() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C reaches all of them; the parent ends its workers
    torch.set_num_threads(1)
    keep_freed_memory()


def _run(job: Job, work: Work, out: Path) -> None:
    started = time.perf_counter()
    numbers, drawn = work(job, out)
    stored = {"settings": _settings(job), "seconds": time.perf_counter() - started, "found": numbers}
    path = _path(job, out, "json")
    path.parent.mkdir(parents=True, exist_ok=True)
    with _path(job, out, "npz").open("wb") as file:
        np.savez_compressed(file, **drawn)  # type: ignore[arg-type]
    write_whole(path, json.dumps(stored))  # last: a job is done when this is there
