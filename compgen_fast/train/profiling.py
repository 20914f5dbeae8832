"""Where the time of a training step goes: a trace to look at, and two tables, by phase and by operator.

Every moment of a step belongs to exactly one phase, so shares add up to 100 %. On a CPU the moments are those of the
training thread, and a moment belongs to the innermost range around it. On a GPU they are those of the device: a kernel
belongs to the phase that launched it, and a moment without a kernel is idle.

The backward pass is told apart by module: autograd gives each operator of the forward pass a number and hands it to the
gradient's node, so the node's time goes to the module in which the operator ran.

Recording costs a few microseconds per operator: read the shares, and take speeds from metrics.py or `cgf bench`.
"""

import heapq
import os
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from rich.console import Group
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from compgen_fast.jets.jet import Jet
from compgen_fast.tables import Sheet
from compgen_fast.train.ranks import Ranks

# kineto announces each start and stop on stderr; it reads this at its first use.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

TOP = 15
STEP = "compgen_fast.train.profiling: step"
NODE = "autograd::engine::evaluate_function: "
REST = {"forward": "rest of forward", "backward": "rest of backward"}
MODULES = ("encoder", "decoder", "penalty")
PHASES = (
    "data", *MODULES, REST["forward"], *(f"{module} backward" for module in MODULES), REST["backward"],
    "optimiser", "communication", "other", "idle",
)  # fmt: skip
RANGES = ("data", "forward", *MODULES, "backward", "optimiser")


class Profiled(Protocol):
    """What is profiled. The loop marks its parts with `record_function`: data, forward, backward, optimiser."""

    @property
    def model(self) -> nn.Module:
        """Its ``encoder`` and ``decoder`` are told apart, where it has them."""

    @property
    def ranks(self) -> Ranks: ...

    def step_once(self) -> object: ...


@dataclass(frozen=True)
class Row:
    """A line of one of the tables, per step. An operator's time is without that of the operators it calls."""

    table: Literal["phase", "operator"]
    name: str
    milliseconds: float
    share: float
    """Of the whole step, from 0 to 1."""
    calls: float | None
    """Of an operator."""


def profile_steps(trainer: Profiled, steps: int, out: Path) -> list[Row]:
    """Runs ``steps`` steps to warm up and as many under the profiler; call it on every rank.

    The first rank writes out/trace.json.gz, which ui.perfetto.dev and chrome://tracing open.

    Returns:
        the phases that took any time, in the order of a step, then the operators that took most, longest first.
    """
    if steps < 1:
        raise ValueError(f"profile_steps: steps is {steps}; expected at least 1")
    on_gpu = trainer.ranks.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with _marked_modules(trainer.model):
        for _ in range(steps):
            trainer.step_once()
        with profile(activities=activities) as recording:
            for _ in range(steps):
                with record_function(STEP):
                    trainer.step_once()
                    if on_gpu:
                        torch.cuda.synchronize()
    if trainer.ranks.first:
        out.mkdir(parents=True, exist_ok=True)
        recording.export_chrome_trace(str(out / "trace.json.gz"))
    pieces = disjoint(_on_device(recording.events()) if on_gpu else _on_thread(recording.events()))
    total = sum(piece.end - piece.start for piece in pieces)
    return [*_phases(pieces, total, steps), *_operators(recording.key_averages(), total, steps, on_gpu)]


def tables(rows: Sequence[Row]) -> Group:
    """Both tables, for people."""
    return Group(*(_table(title, [row for row in rows if row.table == title]) for title in ("phase", "operator")))


@dataclass(frozen=True)
class Piece:
    """A stretch of time, in microseconds, that a phase claims. Of two that overlap the one of higher layer has it, and
    in one layer the one that began later, which is the inner one.
    """

    phase: str
    start: float
    end: float
    layer: int = 0


def disjoint(pieces: Iterable[Piece]) -> list[Piece]:
    """The same time with each moment given to one phase, in order."""
    coming = sorted(pieces, key=lambda piece: piece.start)
    moments = sorted({moment for piece in coming for moment in (piece.start, piece.end)})
    claims: list[tuple[tuple[int, float, float], str]] = []  # a heap, the strongest claim on top
    found: list[Piece] = []
    begun = 0
    for start, end in pairwise(moments):
        while begun < len(coming) and coming[begun].start <= start:
            piece = coming[begun]
            heapq.heappush(claims, ((-piece.layer, -piece.start, piece.end), piece.phase))
            begun += 1
        while claims and claims[0][0][2] <= start:
            heapq.heappop(claims)
        if claims:
            found.append(Piece(claims[0][1], start, end))
    return found


@contextmanager
def _marked_modules(model: nn.Module) -> Iterator[None]:
    """Inside, each call of the encoder and the decoder is a range; the decoder's on a jet is the penalty's."""
    with ExitStack() as hooks:
        for name in ("encoder", "decoder"):
            module = getattr(model, name, None)
            if isinstance(module, nn.Module):
                begin, end = _range_hooks(name)
                hooks.callback(module.register_forward_pre_hook(begin).remove)
                hooks.callback(module.register_forward_hook(end).remove)
        yield


def _range_hooks(name: str) -> tuple[Callable[..., None], Callable[..., None]]:
    begun: list[record_function] = []

    def begin(module: nn.Module, inputs: tuple[object, ...]) -> None:
        range_ = record_function("penalty" if any(isinstance(value, Jet) for value in inputs) else name)
        range_.__enter__()
        begun.append(range_)

    def end(*_: object) -> None:
        begun.pop().__exit__(None, None, None)

    return begin, end


def _on_thread(events: Sequence[Any]) -> list[Piece]:
    """What claims the time of the training thread. It waits while gloo's threads communicate."""
    thread = next(event.thread for event in events if event.name == STEP)
    messages = [_piece("communication", event, 1) for event in events if event.name.startswith("gloo:")]
    return [*_steps(events, "other"), *messages, *_marks(events)[thread]]


def _on_device(events: Sequence[Any]) -> list[Piece]:
    """What claims the time of the GPU. Of communication only what no other kernel hides is counted."""
    marks = {thread: disjoint(marks) for thread, marks in _marks(events).items()}
    launches = {event.id: event for event in events if _on_host(event) and not event.linked_correlation_id}
    kernels = []
    for event in events:
        if _on_host(event) or event.is_user_annotation:
            continue
        launch = launches.get(event.linked_correlation_id)
        phase = "other" if launch is None else _at(marks.get(launch.thread, []), launch.time_range.start)
        message = "nccl" in event.name.lower()
        kernels.append(_piece("communication" if message else phase, event, 1 if message else 2))
    return [*_steps(events, "idle"), *kernels]


def _steps(events: Sequence[Any], phase: str) -> list[Piece]:
    """All of the time there is; it belongs to this phase where nobody else claims it."""
    return [_piece(phase, event, -1) for event in events if event.name == STEP and _on_host(event)]


def _marks(events: Sequence[Any]) -> dict[int, list[Piece]]:
    """By thread: the ranges that the loop and the hooks made, and the nodes of the backward pass."""
    ranges, nodes = defaultdict(list), []
    for event in events:
        if not _on_host(event):
            continue
        if event.is_user_annotation and event.name in RANGES:
            ranges[event.thread].append(_piece(REST.get(event.name, event.name), event))
        elif event.name.startswith(NODE):
            nodes.append(event)
    modules = _modules_by_number(events, {thread: disjoint(pieces) for thread, pieces in ranges.items()})
    for node in nodes:
        module = modules.get((node.fwd_thread, node.sequence_nr))
        ranges[node.thread].append(_piece(f"{module} backward" if module in MODULES else REST["backward"], node))
    return ranges


def _modules_by_number(events: Sequence[Any], ranges: dict[int, list[Piece]]) -> dict[tuple[int, int], str]:
    """(thread, autograd's number) of each forward operator → the phase it ran in.

    Several operators in a row see the same number, of which the last makes the node.
    """
    found: dict[tuple[int, int], str] = {}
    for event in sorted(events, key=lambda event: event.time_range.start):
        if event.sequence_nr >= 0 and not event.fwd_thread and event.thread in ranges:
            found[event.thread, event.sequence_nr] = _at(ranges[event.thread], event.time_range.start)
    return found


def _at(pieces: Sequence[Piece], moment: float) -> str:
    """The phase of a moment, of pieces in order."""
    before = bisect_right(pieces, moment, key=lambda piece: piece.start) - 1
    return pieces[before].phase if before >= 0 and moment < pieces[before].end else "other"


def _piece(phase: str, event: Any, layer: int = 0) -> Piece:
    return Piece(phase, event.time_range.start, event.time_range.end, layer)


def _on_host(event: Any) -> bool:
    """Ran on one thread of the CPU, from its start to its end."""
    return event.device_type.name == "CPU" and not event.is_async


def _phases(pieces: Sequence[Piece], total: float, steps: int) -> list[Row]:
    times: dict[str, float] = defaultdict(float)
    for piece in pieces:
        times[piece.phase] += piece.end - piece.start
    return [
        Row("phase", phase, times[phase] / 1e3 / steps, times[phase] / total, None)
        for phase in PHASES
        if phase in times
    ]


def _operators(averages: Iterable[Any], total: float, steps: int, on_gpu: bool) -> list[Row]:
    rows = []
    for average in averages:
        time = average.self_device_time_total if on_gpu else average.self_cpu_time_total
        if time > 0 and not average.is_user_annotation:
            rows.append(Row("operator", average.key, time / 1e3 / steps, time / total, average.count / steps))
    return sorted(rows, key=lambda row: -row.milliseconds)[:TOP]


def _table(title: str, rows: Sequence[Row]) -> Sheet:
    table = Sheet(title, "ms per step", "share", *(["calls"] if title == "operator" else []), folds=(title,))
    for row in rows:
        calls = [] if row.calls is None else [f"{row.calls:,.0f}"]
        table.add_row(row.name, f"{row.milliseconds:.2f}", f"{row.share:.1%}", *calls)
    return table
