"""The queue of a study's jobs: what is done is not done again, and a study that is ended takes its workers along."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console

from compgen_fast.studies import queue
from compgen_fast.studies.queue import Found


@dataclass(frozen=True)
class Sleep:
    name: str
    seconds: float
    part: str = "sleep"


def work(job: Sleep, out: Path) -> Found:
    (out / f"{job.name}.pid").write_text(str(os.getpid()))
    time.sleep(job.seconds)
    return {"slept": job.seconds}, {}


def run(jobs: list[Sleep], out: Path) -> None:
    queue.run(jobs, work, out, 2, Console(stderr=True, quiet=True))


def test_a_job_is_done_once_and_not_again(tmp_path: Path) -> None:
    jobs = [Sleep("a", 0), Sleep("b", 0)]
    run(jobs, tmp_path)
    assert [queue.results(job, tmp_path)["found"] for job in jobs] == [{"slept": 0}, {"slept": 0}]
    (tmp_path / "a.pid").unlink()
    run(jobs, tmp_path)
    assert not (tmp_path / "a.pid").exists()


def test_results_of_other_settings_are_refused(tmp_path: Path) -> None:
    run([Sleep("a", 0)], tmp_path)
    with pytest.raises(ValueError, match=r"a\.json holds what was found with other settings"):
        run([Sleep("a", 0.1)], tmp_path)


def test_a_study_that_is_terminated_takes_its_workers_along(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; from tests.studies.test_queue import Sleep, run\n"
        f"if __name__ == '__main__': run([Sleep('a', 600), Sleep('b', 600)], Path({str(tmp_path)!r}))"
    )
    study = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[2])
    files = [tmp_path / "a.pid", tmp_path / "b.pid"]
    _until(lambda: all(file.is_file() and file.read_text() for file in files))
    study.send_signal(signal.SIGTERM)
    assert study.wait(60) == 128 + signal.SIGTERM
    _until(lambda: not any(_runs(int(file.read_text())) for file in files))


def _until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end, "it did not come to pass within a minute"
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    """Whether the process does; one that has ended and that nobody has asked after does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
