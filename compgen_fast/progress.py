"""How far a long command is: a bar on a terminal, and a line every ten seconds where nobody watches, as in a batch
job's log. Both say what is done, how fast, and how long it will take. Training tells more: see train/metrics.py.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

SECONDS_BETWEEN_LINES = 10.0
Advance = Callable[..., None]


@contextmanager
def following(
    what: str, total: int, unit: str, *, done: int = 0, show: bool = True, console: Console | None = None
) -> Iterator[Advance]:
    """Yields ``advance(count, note="")``, to be called as things get done; a note says what was done last.

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
        with _bar(console, unit) as bar:
            task = bar.add_task(what, total=total, completed=done)
            yield lambda count=1, note="": bar.update(task, advance=count, description=noted(what, note))
    else:
        lines = _Lines(console, what, total, unit, done)
        yield lines.advance
        lines.close()


def _bar(console: Console, unit: str) -> Progress:
    """Fits a line of 80: words give way, numbers do not."""
    return Progress(
        TextColumn("{task.description}", markup=False, table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
        BarColumn(bar_width=12),
        _Numbers(unit, table_column=Column(no_wrap=True, justify="right")),
        console=console,
        expand=True,
    )


def noted(told: str, note: str) -> str:
    return f"{told} · {note}" if note else told


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
    """The first line when something is done, then one every ten seconds, and the last."""

    def __init__(self, console: Console, what: str, total: int, unit: str, done: int) -> None:
        self._console, self._what, self._total, self._unit = console, what, total, unit
        self._before = self._done = done
        self._started, self._next, self._told = time.monotonic(), -math.inf, -1

    def advance(self, count: int = 1, note: str = "") -> None:
        self._done += count
        if time.monotonic() >= self._next:
            self._tell(note)

    def close(self) -> None:
        if self._done != self._told:
            self._tell("")

    def _tell(self, note: str) -> None:
        now = time.monotonic()
        self._next, self._told = now + SECONDS_BETWEEN_LINES, self._done
        speed = (self._done - self._before) / (now - self._started) if now > self._started else None
        line = f"{self._what} · {numbers(self._done, self._total, self._unit, speed, now - self._started)}"
        self._console.print(noted(line, note), soft_wrap=True, highlight=False, markup=False)
