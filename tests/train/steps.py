"""Stand-ins for a rank's training, for tests that send them to other processes: nothing heavy is imported here."""

import time
from collections.abc import Callable
from pathlib import Path
from threading import Barrier


def sleeping(seconds: float, marks: Path) -> Callable[[], object]:
    """A step that takes so long, whatever other processes do, and leaves a mark."""

    def step() -> None:
        with marks.open("a") as file:
            file.write(".")
        time.sleep(seconds)

    return step


def failing_in_the_second(rank: int, barrier: Barrier) -> None:
    """Work of two processes, of which the first waits for the second."""
    if rank == 1:
        raise RuntimeError("no such recipe")
    barrier.wait(600)
