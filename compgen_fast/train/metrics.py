"""What a run tells while it trains: metrics.jsonl for programs, TensorBoard for curves, a progress bar for people.

The loop calls `Metrics.log` once per optimiser step, on every rank. Losses are added up where they are, on the device;
only every so many steps they are averaged over ranks and turned into numbers, which is the one moment that waits for
the device. So a line holds means over the steps since the line before it. The first step of a process is a line of its
own: it pays for warm-up, and would spoil the rates of the others.

Not for deciding anything: losses that are not finite are written down here and judged in guards.py.
"""

import json
import math
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Self

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column
from torch import Tensor

from compgen_fast.files import whole_file
from compgen_fast.progress import SECONDS_BETWEEN_LINES
from compgen_fast.tables import Sheet
from compgen_fast.train.peak import memory_in_use
from compgen_fast.train.ranks import Ranks

NAME = "metrics.jsonl"
FIELDS = (
    "step", "time", "samples", "epoch", "samples_per_second", "data_wait", "utilisation", "memory", "lr", "grad_norm",
)  # fmt: skip
NOT_FINITE = ("NaN", "Infinity", "-Infinity")
SHORTEST_BAR = 4
Row = dict[str, Any]


class Metrics:
    """Collects what each step gives, and tells it every ``every`` steps; a context manager.

    Args:
        folder: of the run; metrics.jsonl and tensorboard/ are written into it by rank 0.
        steps: of the whole run. Steps are counted from 0.
        batch_size: images per optimiser step, over all ranks.
        flops_per_image: of a training step, forward and backward.
        peak: FLOP/s of one rank at most (peak.py); None leaves out the utilisation.
        first_step: the step at which this process begins. Lines of this step and later ones, left by a run that went
            further than its last checkpoint, are dropped.
        every: steps per line.
        console: where rank 0 shows progress; stderr if None. A bar on a terminal, now and then a line elsewhere.

    Each line of metrics.jsonl is an object with the names in `FIELDS` (``epoch``, ``utilisation`` and ``grad_norm``
    only where known) and each loss under its own name. ``time`` is in seconds since 1970 and ``samples`` counts from
    the start of the run. ``data_wait`` is the share of time spent waiting for data, ``memory`` the most bytes a rank
    ever held, both as means over ranks. ``utilisation`` is flops_per_image · samples_per_second / (peak · ranks).
    """

    def __init__(
        self,
        folder: Path,
        *,
        steps: int,
        batch_size: int,
        flops_per_image: float,
        peak: float | None,
        first_step: int,
        ranks: Ranks,
        every: int,
        console: Console | None = None,
    ) -> None:
        if every < 1 or steps < 1 or not 0 <= first_step <= steps:
            raise ValueError(
                f"Metrics: every={every}, steps={steps}, first_step={first_step}; expected every and steps of at least "
                "1, and a first_step from 0 to steps"
            )
        self.folder, self.steps, self.batch_size, self.first_step = folder, steps, batch_size, first_step
        self.ranks, self.every, self.console = ranks, every, console or Console(stderr=True)
        self._flops_per_image, self._peak = flops_per_image, peak
        self._tellers: list[_Teller] = []
        self._open = ExitStack()
        self._window = _Window(time.perf_counter())
        self._step, self._lr = first_step - 1, math.nan
        self._epoch: float | None = None
        self._lines, self._spent = 0, _Spent()
        self._first: Row | None = None
        self._last: Row | None = None

    def __enter__(self) -> Self:
        self._started = time.perf_counter()
        if self.ranks.first:
            self.folder.mkdir(parents=True, exist_ok=True)
            kept = keep_before(self.folder / NAME, self.first_step)
            self._first = kept[0] if kept else None
            screen = _Bar if self.console.is_terminal else _PlainLines
            self._tellers = [
                self._open.enter_context(_File(self.folder / NAME)),
                self._open.enter_context(_Board(self.folder / "tensorboard", self.first_step)),
                self._open.enter_context(screen(self.console, self.first_step, self.steps)),
            ]
        self._window = _Window(time.perf_counter())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            # Every rank leaves in good order after the same step, or some rank has failed and nobody may wait for it.
            if kind is None and self._window.steps:
                self._tell()
        finally:
            self._open.close()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around ``next(batches)``: time in here is time without data."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._window.spent.waited += time.perf_counter() - started

    def log(
        self,
        step: int,
        losses: Mapping[str, Tensor | float],
        lr: float,
        grad_norm: Tensor | float | None,
        epoch: float | None = None,
    ) -> Row | None:
        """Takes in one step. Every so often this talks to the other ranks, and then returns the line, on each of them.

        Args:
            losses: scalars by name, ``"loss"`` among them, with the same names on every rank; they are averaged over
                steps and ranks.
            grad_norm: before clipping; None where the engine does not tell.
            epoch: how often the data were seen, if that is known.
        """
        _check(step, losses, self._step)
        self._step, self._lr, self._epoch = step, lr, epoch
        self._window.add(losses if grad_norm is None else {**losses, "grad_norm": grad_norm})
        for teller in self._tellers:
            teller.advance(step)
        due = step == self.first_step or (step + 1) % self.every == 0 or step == self.steps - 1
        return self._tell() if due else None

    def summary(self) -> Sheet:
        """The run in one table, for its end."""
        first, last, spent = self._first or {}, self._last or {}, self._spent
        table = Sheet("what", "found", words=("what", "found"), show_header=False)
        table.add_row("first loss", _number(first.get("loss"), ".4g"))
        table.add_row("last loss", _number(last.get("loss"), ".4g"))
        table.add_row("images/s", _number(self._rate(spent) if spent.steps else None, ",.1f"))
        table.add_row("of peak", _number(self._utilisation(spent) if spent.steps else None, ".1%"))
        table.add_row("waiting for data", _number(spent.waited / spent.seconds if spent.steps else None, ".1%"))
        table.add_row("peak memory of a rank", _number(last["memory"] / 2**20 if last else None, ",.0f", " MiB"))
        table.add_row("wall time", str(timedelta(seconds=round(time.perf_counter() - self._started))))
        return table

    def _tell(self) -> Row:
        window = self._window
        here = {**window.means(), "data_wait": window.spent.waited, "memory": memory_in_use(self.ranks.device).peak}
        on_device = {name: torch.as_tensor(value, device=self.ranks.device) for name, value in here.items()}
        means = self.ranks.mean(on_device)  # all ranks meet here, and the device has finished when it returns
        spent = window.close(means.pop("data_wait"))
        self._window = _Window(time.perf_counter())
        row = self._row(spent, means)
        self._lines += 1
        self._spent = spent if self._lines <= 2 else self._spent + spent  # forgets the first line: warm-up
        self._first, self._last = self._first or row, row
        left = (self.steps - 1 - self._step) * self._spent.seconds / self._spent.steps
        for teller in self._tellers:
            teller.tell(row, left)
        return row

    def _row(self, spent: "_Spent", means: dict[str, float]) -> Row:
        row: Row = {
            "step": self._step,
            "time": round(time.time(), 3),
            "samples": (self._step + 1) * self.batch_size,
            "epoch": self._epoch,
            "samples_per_second": self._rate(spent),
            "data_wait": spent.waited / spent.seconds,
            "utilisation": self._utilisation(spent),
            "memory": round(means.pop("memory")),
            "lr": self._lr,
            **means,
        }
        return {name: value for name, value in row.items() if value is not None}

    def _rate(self, spent: "_Spent") -> float:
        return spent.steps * self.batch_size / spent.seconds

    def _utilisation(self, spent: "_Spent") -> float | None:
        if self._peak is None:
            return None
        return self._flops_per_image * self._rate(spent) / (self._peak * self.ranks.size)


def read(folder: Path) -> list[Row]:
    """The lines of a run's metrics.jsonl, also while it is being written and after a crash cut its last line."""
    path = Path(folder) / NAME
    if not path.exists():
        raise ValueError(f"{folder} holds no {NAME}; expected the folder of a run")
    return [row for _, row in _lines(path)]


def keep_before(path: Path, step: int) -> list[Row]:
    """Drops the lines of this step and later ones from the file, all at once; returns those that stay."""
    if not path.exists():
        return []
    kept = [(line, row) for line, row in _lines(path) if row["step"] < step]
    with whole_file(path) as temporary:
        temporary.write_bytes(b"".join(line + b"\n" for line, _ in kept))
    return [row for _, row in kept]


def _lines(path: Path) -> Iterator[tuple[bytes, Row]]:
    """Each line and what it says. A last one that was cut off is passed over; elsewhere it is an error."""
    *whole, cut = path.read_bytes().split(b"\n")
    for number, line in enumerate(whole, 1):
        try:
            row = json.loads(line)
        except ValueError:
            if number == len(whole) and not cut:
                return
            raise ValueError(f"{path}, line {number}, is not JSON; expected one object per line. Remove it") from None
        yield line, {name: float(value) if value in NOT_FINITE else value for name, value in row.items()}


def _check(step: int, losses: Mapping[str, Tensor | float], before: int) -> None:
    if "loss" not in losses:
        raise ValueError(f"Metrics.log: the losses are {sorted(losses)}; expected one that is called loss")
    if taken := sorted(set(losses) & set(FIELDS)):
        raise ValueError(f"Metrics.log: a loss is called {taken[0]}, which a line uses itself; give it another name")
    if step <= before:
        raise ValueError(f"Metrics.log: step {step} after step {before}; expected steps to go up")


@dataclass
class _Spent:
    """Where the time of some steps went."""

    steps: int = 0
    seconds: float = 0.0
    waited: float = 0.0

    def __add__(self, other: "_Spent") -> "_Spent":
        return _Spent(self.steps + other.steps, self.seconds + other.seconds, self.waited + other.waited)


@dataclass
class _Window:
    """The steps since the last line."""

    started: float
    spent: _Spent = field(default_factory=_Spent)
    sums: dict[str, Tensor | float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        return self.spent.steps

    def add(self, values: Mapping[str, Tensor | float]) -> None:
        """Adds scalars up on their device; nothing here waits for it."""
        self.spent.steps += 1
        for name, value in values.items():
            value = value.detach().double() if isinstance(value, Tensor) else float(value)
            self.sums[name] = self.sums.get(name, 0.0) + value
            self.counts[name] = self.counts.get(name, 0) + 1

    def means(self) -> dict[str, Tensor | float]:
        return {name: total / self.counts[name] for name, total in self.sums.items()}

    def close(self, waited: float) -> _Spent:
        return _Spent(self.steps, time.perf_counter() - self.started, waited)


class _Teller:
    """Someone who is told the progress of a run."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def advance(self, step: int) -> None:
        """A step is done."""

    def tell(self, row: Row, left: float) -> None:
        """A line is complete; ``left`` is the seconds until the end, at the pace so far."""


class _File(_Teller):
    """metrics.jsonl. Each line is in the operating system's hands before the next step begins."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> Self:
        self._file = self._path.open("a")
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def tell(self, row: Row, left: float) -> None:
        self._file.write(json.dumps({name: _in_json(value) for name, value in row.items()}, allow_nan=False) + "\n")
        self._file.flush()


def _in_json(value: object) -> object:
    """JSON has no NaN and no infinity: they become text that `float` reads."""
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


class _Board(_Teller):
    """TensorBoard's event files; losses under loss/, the rest under run/."""

    def __init__(self, folder: Path, first_step: int) -> None:
        self._folder, self._first_step = folder, first_step

    def __enter__(self) -> Self:
        # Where TensorFlow is installed, TensorBoard imports it for its file functions: seconds, and a page of warnings.
        # This module's presence is TensorBoard's own sign to do without.
        sys.modules.setdefault("tensorboard.compat.notf", ModuleType("tensorboard.compat.notf"))
        from torch.utils.tensorboard import SummaryWriter

        self._leave_the_last_second()
        self._writer = SummaryWriter(str(self._folder), purge_step=self._first_step, flush_secs=10)
        return self

    def _leave_the_last_second(self) -> None:
        """TensorBoard reads files in the order of their names, which begin with the second they were opened in and then
        say nothing of time: two of one second may be read the wrong way round, and the older one wins.
        """
        opened = [int(path.name.split(".")[3]) for path in self._folder.glob("events.out.tfevents.*")]
        while opened and int(time.time()) == max(opened):
            time.sleep(0.05)

    def __exit__(self, *_: object) -> None:
        self._writer.close()

    def tell(self, row: Row, left: float) -> None:
        for name, value in row.items():
            if name not in ("step", "time"):
                self._writer.add_scalar(f"run/{name}" if name in FIELDS else f"loss/{name}", value, row["step"])


class _Bar(_Teller):
    """A progress bar on a terminal: numbers are whole, and the bar takes what they leave."""

    def __init__(self, console: Console, first_step: int, steps: int) -> None:
        self._console, self._beside = console, len(f"step {steps}/{steps}") + SHORTEST_BAR + 2
        self._progress = Progress(
            TextColumn("step {task.completed}/{task.total}", table_column=Column(no_wrap=True)),
            BarColumn(bar_width=None, table_column=Column(ratio=1)),
            TextColumn("{task.fields[told]}", markup=False, table_column=Column(no_wrap=True)),
            console=console,
            expand=True,
        )
        self._task = self._progress.add_task("", total=steps, completed=first_step, told="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def advance(self, step: int) -> None:
        self._progress.update(self._task, completed=step + 1)

    def tell(self, row: Row, left: float) -> None:
        self._progress.update(self._task, told=_sentence(row, left, self._console.width - self._beside))


class _PlainLines(_Teller):
    """A line now and then, for logs: the first, the last, and one every ten seconds."""

    def __init__(self, console: Console, first_step: int, steps: int) -> None:
        self._console, self._steps, self._next = console, steps, -math.inf

    def tell(self, row: Row, left: float) -> None:
        now = time.monotonic()
        if now < self._next and row["step"] < self._steps - 1:
            return
        self._next = now + SECONDS_BETWEEN_LINES
        line = f"step {row['step'] + 1}/{self._steps} · {_sentence(row, left)}"
        self._console.print(line, soft_wrap=True, highlight=False, markup=False)


def _sentence(row: Row, left: float, room: float = math.inf) -> str:
    """Where there is too little room, what says least is left out."""
    told = {"loss": f"loss {row['loss']:.4g}", "rate": f"{row['samples_per_second']:,.1f} images/s"}
    if "utilisation" in row:
        told["peak"] = f"{row['utilisation']:.1%} of peak"
    told |= {"wait": f"{row['data_wait']:.0%} waiting for data", "left": f"{timedelta(seconds=round(left))} left"}
    for least in ("wait", "peak"):
        if len(" · ".join(told.values())) > room:
            told.pop(least, None)
    return " · ".join(told.values())


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "–" if value is None else f"{value:{form}}{unit}"
