"""Runs the jobs of a study, as many at once as there are cores or GPUs to share, each in processes of its own.

A job's folder holds job.json, its runs, log.txt and at the end result.json. A job that has its result is not run again,
so a study that was cut off goes on when its command is repeated; one whose job.json would be another is refused.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from queue import SimpleQueue

from rich.console import Console

from compgen_fast.files import write_whole
from compgen_fast.progress import Advance, following
from compgen_fast.settings import to_json
from compgen_fast.studies.perception.measuring import RESULT
from compgen_fast.studies.perception.plan import Job
from compgen_fast.studies.perception.work import JOB, read_job
from compgen_fast.studies.queue import terminable
from compgen_fast.train import data
from compgen_fast.train.config import DataConfig
from compgen_fast.train.ranks import Ranks

MODULES = {"work": "training", "measuring": "measuring"}
TAIL = 5  # lines of a log in an error


class JobFailed(ValueError):
    """A job ended with an error; its message names the log."""


def folder_of(job: Job, out: Path) -> Path:
    return out / "jobs" / job.name


def run(jobs: Sequence[Job], out: Path, workers: int, console: Console) -> int:
    """Runs all that have no result yet, and says how many. The first failure ends the others, and what they have done
    stays.

    With jobs for CUDA, each worker has a GPU to itself.
    """
    waiting = [job for job in jobs if not (_claimed(job, out) / RESULT).is_file()]
    for config in dict.fromkeys((job.train.data, job.train.model.image_size) for job in waiting):
        _pack(*config)
    running: set[subprocess.Popen[str]] = set()
    gpus: SimpleQueue[int] = SimpleQueue()
    for number in range(workers):
        gpus.put(number)
    with (
        terminable(),
        following("study", len(jobs), "jobs", done=len(jobs) - len(waiting), console=console) as advance,
        ThreadPoolExecutor(workers) as pool,
    ):
        told = _Told(advance)
        done = [pool.submit(_run, job, folder_of(job, out), told, running, gpus) for job in waiting]
        try:
            wait(done, return_when=FIRST_EXCEPTION)
            for future in done:
                if future.done() and not future.cancelled():
                    future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(running):
                process.terminate()
    return len(waiting)


def _claimed(job: Job, out: Path) -> Path:
    """The job's folder with its job.json."""
    folder = folder_of(job, out)
    if (folder / JOB).is_file():
        if read_job(folder) != job:
            raise ValueError(
                f"{folder} holds a job with other settings; finish that study with its own command, or choose another "
                "folder with --out"
            )
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / JOB, to_json(job))
    return folder


def _pack(config: DataConfig, image_size: int) -> None:
    """Packs the shards that jobs share, before several of them would at once."""
    data.image_shards(config, image_size, Ranks.alone())


class _Told:
    """What each of the running jobs is at, as a note beside the number of those that are done."""

    def __init__(self, advance: Advance) -> None:
        self._advance, self._at = advance, dict[str, str]()

    def at(self, job: Job, phase: str, done: str, total: str) -> None:
        self._at[job.name] = f"{job.name}: {phase} {int(done):,}/{int(total):,}"
        self._tell(0)

    def done(self, job: Job) -> None:
        self._at.pop(job.name, None)
        self._tell(1)

    def _tell(self, count: int) -> None:
        self._advance(count, ", ".join(list(self._at.values())))


def _run(job: Job, folder: Path, told: _Told, running: set[subprocess.Popen[str]], gpus: "SimpleQueue[int]") -> None:
    gpu = gpus.get()
    try:
        for module in MODULES:
            _process(module, job, folder, gpu, partial(told.at, job), running)
        told.done(job)
    finally:
        gpus.put(gpu)


def _process(
    module: str, job: Job, folder: Path, gpu: int, tell: Callable[..., None], running: set[subprocess.Popen[str]]
) -> None:
    """One half of a job. What it says on stdout is progress, all else goes to its log."""
    command = [sys.executable, "-m", f"compgen_fast.studies.perception.{module}", str(folder)]
    environment = {"OMP_NUM_THREADS": "1"} | os.environ | {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    if job.train.device == "cuda":
        environment["CUDA_VISIBLE_DEVICES"] = str(gpu)
    with (folder / "log.txt").open("a") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
        running.add(process)
        try:
            for line in _lines(process):
                if len(words := line.split()) == 3:
                    tell(*words)
                else:
                    log.write(line)
            code = process.wait()
        finally:
            running.discard(process)
    if code:
        raise JobFailed(f"the job {job.name} failed while {MODULES[module]}:\n{_tail(folder / 'log.txt')}")


def _lines(process: subprocess.Popen[str]) -> Iterable[str]:
    assert process.stdout is not None
    return process.stdout


def _tail(path: Path) -> str:
    last = path.read_text(errors="replace").splitlines()[-TAIL:]
    return "\n".join([*(f"  {line}" for line in last), f"(all of it in {path})"])
