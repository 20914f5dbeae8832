"""How far a long command is: a bar on a terminal, and a line every ten seconds where nobody watches, as in a batch
job's log. Both say what is done, how fast, and how long it will take. Training tells more: see train/metrics.py.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Protocol, Self

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

SECONDS_BETWEEN_LINES = 10.0


class Advance(Protocol):
    """Tells that ``count`` more things are done, and in a note what is under way; with 0 only the note changes."""

    def __call__(self, count: int = 1, note: str = "") -> None: ...


@contextmanager
def following(
    what: str, total: int, unit: str, *, done: int = 0, show: bool = True, console: Console | None = None
) -> Iterator[Advance]:
    """Yields ``advance(count, note="")``, to be called as things get done, from any thread.

    Args:
        what: the work in a few words.
        total: how many things there are to do.
        unit: what one is called, in the plural: images, jobs, shards.
        done: how many were there before.
        show: nothing is written if not.
        console: stderr if not given.
    """
    console = console or Console(stderr=True)
    if not show:
        yield lambda count=1, note="": None
    elif console.is_terminal:
        with _Bar(console, unit) as bar:
            task = bar.add_task(what, total=total, completed=done, note="")
            yield lambda count=1, note="": bar.update(task, advance=count, note=note)
    else:
        with _Lines(console, what, total, unit, done) as lines:
            yield lines.advance


class _Bar(Progress):
    """Fits a line of 80: words give way, numbers do not. The note stands below."""

    def __init__(self, console: Console, unit: str) -> None:
        words = Column(ratio=1, no_wrap=True, overflow="ellipsis")
        super().__init__(
            TextColumn("{task.description}", markup=False, table_column=words),
            BarColumn(bar_width=12),
            _Numbers(unit, Column(no_wrap=True, justify="right")),
            console=console,
            expand=True,
        )

    def get_renderables(self) -> Iterator[RenderableType]:
        yield from super().get_renderables()
        yield from (Text(task.fields["note"], "dim") for task in self.tasks if task.fields["note"])


class _Numbers(ProgressColumn):
    def __init__(self, unit: str, table_column: Column) -> None:
        super().__init__(table_column)
        self._unit = unit

    def render(self, task: Task) -> Text:
        total = task.total or 0
        return Text(numbers(task.completed, total, self._unit, task.speed, task.elapsed))


def numbers(done: float, total: float, unit: str, speed: float | None, elapsed: float | None) -> str:
    """1,200/20,000 images · 310/s · 0:01:01 left"""
    told = [f"{done:,.0f}/{total:,.0f} {unit}"]
    if speed and done < total:
        rate = f"{speed:,.0f}/s" if speed >= 10 else f"{speed * 60:,.1f}/min"
        told += [rate, f"{timedelta(seconds=round((total - done) / speed))} left"]
    elif elapsed is not None:
        told.append(f"{timedelta(seconds=round(elapsed))}")
    return " · ".join(told)


class _Lines:
    """A line as soon as there is something to tell, then one every ten seconds, whatever got done, and the last."""

    def __init__(self, console: Console, what: str, total: int, unit: str, done: int) -> None:
        self._console, self._what, self._total, self._unit = console, what, total, unit
        self._before = self._done = done
        self._note, self._told = "", -1
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._clock = threading.Thread(target=self._tick, daemon=True)

    def __enter__(self) -> Self:
        self._started = time.monotonic()
        self._clock.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._clock.join()
        self._note = ""
        if self._done != self._told:
            self._tell()

    def advance(self, count: int = 1, note: str = "") -> None:
        with self._lock:
            self._done += count
            self._note = note
            if self._told < 0:
                self._tell()

    def _tick(self) -> None:
        while not self._ended.wait(SECONDS_BETWEEN_LINES):
            with self._lock:
                self._tell()

    def _tell(self) -> None:
        self._told, elapsed = self._done, time.monotonic() - self._started
        speed = (self._done - self._before) / elapsed if elapsed > 0 else None
        told = f"{self._what} · {numbers(self._done, self._total, self._unit, speed, elapsed)}"
        line = f"{told} · {self._note}" if self._note else told
        self._console.print(line, soft_wrap=True, highlight=False, markup=False)
