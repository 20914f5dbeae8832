"""The measurement itself: is it right, how fast is it beside its peers, how much memory does it take.

A `Case` is one problem: inputs, the fp64 oracle, us, and the peers a user would pick instead. `measure` does, in order:

1. **the gate**: every contender's outputs and gradients are compared with the oracle. Where we are less exact than
   plain eager torch (times `ALLOWED`), the case has no ratios at all: a wrong kernel has no speed.
2. **memory**: the peak of one pass, per contender and direction.
3. **timing**: rounds of ours, peer, peer, … ours, peer, peer, … so that a slow second of the machine hits all of them.
   A ratio is formed inside each round; the row reports its median and its 20th and 80th percentile.

One timed pass is a forward and the backward that follows it, marked at both ends: forward, backward and full come from
the same pass, as in training. The backward frees its graph as training does, since torch.compile gives up buffer reuse
when the graph must be kept. Upstream gradients are dense random tensors made beforehand: the gradient of ``.sum()`` is
an expanded scalar, which some kernels read from cache for free.

Not here: files, tables and charts (report.py), the command (suite.py).
"""

import contextlib
import gc
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import numpy
import torch
from torch import Tensor

from compgen_fast.bench.clock import Clock, clock_of
from compgen_fast.bench.memory import measure_peaks

Direction = Literal["forward", "backward", "full"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward", "full")
Outputs = tuple[Tensor, ...]

ALLOWED = 4.0  # our error over eager's: another summation order costs a factor of 2 or 3, a mistake costs thousands
PEER_ALLOWED = 100.0  # a peer may be less exact than eager, but must compute the same thing
FLOOR = 4  # in units of the dtype's epsilon: where eager happens to be exact, rounding is still allowed
FEWEST_ROUNDS, MOST_ROUNDS = 5, 200


@dataclass(frozen=True)
class Contender:
    """Someone who solves the case. ``call`` takes the inputs and returns the outputs, both in the case's order.

    One that ``does_less`` (a reason, for people) may return only the first outputs; its gradients go through those.
    """

    name: str
    call: Callable[..., Outputs]
    does_less: str = ""
    unsupported: str = ""
    """Why it cannot take part, when that is known without trying."""
    inexact: str = ""
    """Why it is wrong by design; it is timed all the same, and its error stands beside its time."""
    backend: str = ""
    """Which of our backends serves it."""


@dataclass(frozen=True)
class Case:
    """One problem: what to compute, who computes it, and on which tensors."""

    suite: str
    name: str
    inputs: Callable[[], Mapping[str, Tensor]]
    """Builds the inputs by name, in the order of the contenders' arguments. All of them get gradients."""
    outputs: tuple[str, ...]
    oracle: Callable[..., Outputs]
    """The specification; called with the inputs in fp64."""
    ours: Contender
    peers: tuple[Contender, ...]
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    directions: tuple[Direction, ...] = DIRECTIONS
    yardstick: str = "eager"
    """The peer whose error sets how exact we must be."""

    def __post_init__(self) -> None:
        names = [peer.name for peer in self.peers]
        if self.yardstick not in names:
            raise ValueError(f"{self.name}: the yardstick {self.yardstick!r} is not among the peers {names}; add it")

    @property
    def contenders(self) -> tuple[Contender, ...]:
        return (self.ours, *self.peers)

    @property
    def trains(self) -> bool:
        return self.directions != ("forward",)


@dataclass(frozen=True)
class Stamp:
    """Where a row comes from: the same for all rows of one run."""

    threads: int
    mode: str
    hardware: str
    version: str
    torch: str
    commit: str | None
    timestamp: str


@dataclass(frozen=True)
class Row:
    """One peer on one case in one direction. The fields are the columns of the CSV and the keys of the JSON.

    Exactly one of these holds: there is a ratio; ``unsupported`` says why the peer could not; ``gate`` why we may not.
    """

    suite: str
    case: str
    direction: Direction
    peer: str
    ratio: float | None
    """Peer's time ÷ our time, median over rounds. Above 1 we are faster."""
    ratio_low: float | None
    """20th percentile over rounds; ``ratio_high`` is the 80th."""
    ratio_high: float | None
    peak_ratio: float | None
    """Peer's peak ÷ our peak, each the most bytes held during the direction's pass beyond those alive before it."""
    error: float | None
    """Our worst error against the oracle, over outputs and gradients, relative to the largest entry of each tensor."""
    threads: int
    dtype: str
    device: str
    does_less: str | None
    unsupported: str | None
    gate: str | None
    rounds: int
    our_ms: float | None
    """Median; the peer's three are the 20th, 50th and 80th percentile."""
    peer_ms_low: float | None
    peer_ms: float | None
    peer_ms_high: float | None
    peer_error: float | None
    our_peak: int | None
    peer_peak: int | None
    peak_over_io: float | None
    """Our peak ÷ (bytes of the inputs + bytes of the outputs). The denominator has no gradients. In the peak, gradients
    of the outputs are absent, being alive before the pass; gradients of the inputs count, being made by it."""
    backend: str
    """Which of our backends ran."""
    mode: str
    hardware: str
    version: str
    torch: str
    commit: str | None
    timestamp: str


@dataclass(frozen=True)
class Runner:
    """One contender bound to the tensors of one case."""

    contender: Contender
    inputs: Outputs
    upstream: Outputs
    trains: bool

    def forward(self) -> Outputs:
        return self.contender.call(*self.inputs)

    def backward(self, outputs: Outputs) -> Outputs:
        return torch.autograd.grad(outputs, self.inputs, self.upstream[: len(outputs)])

    def full(self) -> tuple[Outputs, Outputs]:
        outputs = self.forward()
        return outputs, self.backward(outputs) if self.trains else ()

    def peaks(self, device: str) -> dict[Direction, int]:
        """Peak bytes of one pass, by direction."""
        peaks = measure_peaks(self.forward, self.backward if self.trains else lambda outputs: (), device)
        if not self.trains:
            return {"forward": peaks.forward}
        return {"forward": peaks.forward, "backward": peaks.backward, "full": peaks.full}

    def times(self, clock: Clock) -> dict[Direction, float]:
        """Seconds of one pass, by direction."""
        clock.ready()
        start = clock.mark()
        outputs = self.forward()
        middle = clock.mark()
        if not self.trains:
            return {"forward": clock.seconds(start, middle)}
        gradients = self.backward(outputs)
        end = clock.mark()
        found: dict[Direction, float] = {
            "forward": clock.seconds(start, middle),
            "backward": clock.seconds(middle, end),
            "full": clock.seconds(start, end),
        }
        del gradients  # held until here: releasing them is nobody's work
        return found


class Problem:
    """A case with its tensors in place, and the oracle's answer to it."""

    def __init__(self, case: Case) -> None:
        self.case = case
        named = {name: x.detach() for name, x in case.inputs().items()}
        self.names = tuple(named)
        self.inputs = tuple(x.clone().requires_grad_(case.trains) for x in named.values())
        self._expected: dict[int, dict[str, Tensor]] = {}
        self._exact = tuple(x.double().requires_grad_(case.trains) for x in named.values())
        shapes = [x.shape for x in case.oracle(*(x.detach() for x in self._exact))]
        generator = torch.Generator(case.device).manual_seed(1)
        self.upstream = tuple(
            torch.randn(shape, dtype=case.dtype, device=case.device, generator=generator) for shape in shapes
        )

    def expected(self, outputs: int) -> dict[str, Tensor]:
        """The oracle's first ``outputs`` outputs, and the gradients through those alone."""
        if outputs not in self._expected:
            self._expected[outputs] = self._consult_oracle(outputs)
        return self._expected[outputs]

    def _consult_oracle(self, outputs: int) -> dict[str, Tensor]:
        exact = Runner(
            Contender("oracle", lambda *inputs: self.case.oracle(*inputs)[:outputs]),
            self._exact,
            tuple(x.double() for x in self.upstream),
            self.case.trains,
        )
        return {name: x.detach() for name, x in self._named(*exact.full()).items()}

    def runner(self, contender: Contender) -> Runner:
        return Runner(contender, self.inputs, self.upstream, self.case.trains)

    def untrained(self, contender: Contender) -> Runner:
        """For a contender that refuses inputs which require gradients."""
        return Runner(contender, tuple(x.detach() for x in self.inputs), self.upstream, trains=False)

    def errors(self, runner: Runner) -> dict[str, float]:
        """Runs a pass: by tensor, the largest difference from the oracle's, over the largest entry of the oracle's."""
        outputs = runner.forward()
        self._check(runner.contender, outputs)
        gradients = runner.backward(outputs) if runner.trains else ()
        expected = self.expected(len(outputs))
        return {name: _error(found, expected[name]) for name, found in self._named(outputs, gradients).items()}

    def _check(self, contender: Contender, outputs: Outputs) -> None:
        if len(outputs) != len(self.upstream) and not contender.does_less:
            raise ValueError(f"{contender.name} returns {len(outputs)} of {len(self.upstream)} outputs")
        for name, found, wanted in zip(self.case.outputs, outputs, self.upstream, strict=False):
            if found.shape != wanted.shape:
                raise ValueError(f"{name} has shape {list(found.shape)}, the oracle's {list(wanted.shape)}")

    @property
    def io(self) -> int:
        """Bytes of the inputs and outputs; an output is as large as its gradient."""
        return sum(x.nbytes for x in (*self.inputs, *self.upstream))

    def _named(self, outputs: Outputs, gradients: Outputs) -> dict[str, Tensor]:
        named = dict(zip(self.case.outputs, outputs, strict=False))
        return named | dict(zip((f"d{name}" for name in self.names), gradients, strict=False))


def _error(found: Tensor, expected: Tensor) -> float:
    scale = expected.abs().max().clamp_min(torch.finfo(expected.dtype).tiny)
    difference = (found.detach().double() - expected).abs().max() / scale
    return float(difference.nan_to_num(nan=float("inf")))


@dataclass(frozen=True)
class Tried:
    """What one contender could do when it was tried: everything, the forward only, or nothing."""

    contender: Contender
    runner: Runner | None
    reason: str = ""
    """Why a direction is missing; empty when none is."""
    errors: Mapping[str, float] | None = None

    @property
    def worst(self) -> float | None:
        return max(self.errors.values()) if self.errors else None

    @property
    def less(self) -> str:
        """What it does less than we do, also what was only found by trying."""
        forward_only = self.runner is not None and bool(self.reason)
        return ", ".join(filter(None, (self.contender.does_less, "no gradient" if forward_only else "")))

    def can(self, direction: Direction) -> bool:
        return self.runner is not None and (direction == "forward" or not self.reason)


def attempt(problem: Problem, contender: Contender) -> Tried:
    """Runs a contender once, which also compiles what needs compiling."""
    if contender.unsupported:
        return Tried(contender, None, contender.unsupported)
    runner = problem.runner(contender)
    try:
        return Tried(contender, runner, "", problem.errors(runner))
    except Exception as refusal:  # whatever a peer raises is its reason for not taking part
        reason = sentence(refusal)
    runner = problem.untrained(contender)
    try:
        return Tried(contender, runner, reason, problem.errors(runner))
    except Exception:
        return Tried(contender, None, reason)


def sentence(error: Exception) -> str:
    """The first sentence of the message of an error's first cause, in at most 100 characters."""
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    text = " ".join(str(cause).split()) or type(cause).__name__
    if inside := re.fullmatch(r"raised exception \w+\(['\"](.*)['\"]\)", text):  # how dynamo quotes what it traced
        text = inside[1]
    first = re.split(r"(?<=[.!?]) ", text, maxsplit=1)[0].rstrip(".")
    return first if len(first) <= 100 else first[:99] + "…"


def gate(case: Case, tried: Sequence[Tried]) -> str:
    """Why our numbers must not be shown, or an empty string."""
    ours, yardstick = tried[0], next(t for t in tried if t.contender.name == case.yardstick)
    if ours.reason:
        return f"gate: we failed: {ours.reason}"
    if yardstick.reason:
        return f"gate: nothing to judge by, {case.yardstick} failed: {yardstick.reason}"
    return _less_exact(case, ours, yardstick, ALLOWED)


def _less_exact(case: Case, judged: Tried, yardstick: Tried, allowed: float) -> str:
    assert judged.errors is not None
    assert yardstick.errors is not None
    floor = FLOOR * torch.finfo(case.dtype).eps
    for name, error in judged.errors.items():
        reference = yardstick.errors[name]
        if not (math.isfinite(error) and error <= allowed * reference + floor):
            return f"gate: error of {name} is {error:.1e}, {case.yardstick}'s is {reference:.1e}"
    return ""


def _judge_peer(case: Case, peer: Tried, yardstick: Tried) -> Tried:
    """A peer that computes something else is no peer: it stays in the list, with the reason and without a ratio."""
    if peer.errors is None or yardstick.errors is None or peer.contender.inexact:
        return peer
    wrong = _less_exact(case, peer, yardstick, PEER_ALLOWED)
    return Tried(peer.contender, None, wrong.removeprefix("gate: "), peer.errors) if wrong else peer


def time_rounds(runners: Sequence[Runner], clock: Clock, budget: float) -> list[list[dict[Direction, float]]]:
    """Seconds by round, runner and direction. Rounds stop once their sum passes ``budget`` seconds."""
    for runner in runners:  # one untimed round: caches, allocator, frequency
        runner.times(clock)
    rounds: list[list[dict[Direction, float]]] = []
    spent = 0.0
    while len(rounds) < FEWEST_ROUNDS or (spent < budget and len(rounds) < MOST_ROUNDS):
        rounds.append([runner.times(clock) for runner in runners])
        spent += sum(max(times.values()) for times in rounds[-1])
    return rounds


@contextlib.contextmanager
def quiet_process(threads: int) -> Iterator[None]:
    """No garbage collection, and the given number of threads, put back afterwards."""
    threads_before, collecting = torch.get_num_threads(), gc.isenabled()
    torch.set_num_threads(threads)
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        torch.set_num_threads(threads_before)
        if collecting:
            gc.enable()


def try_all(case: Case) -> tuple[Problem, list[Tried], str]:
    """The case's tensors, what each contender can do with them (ours first), and the gate's verdict."""
    torch.compiler.reset()  # torch.compile falls back to eager, silently, after 8 shapes of one function
    problem = Problem(case)
    tried = [attempt(problem, contender) for contender in case.contenders]
    verdict = gate(case, tried)
    yardstick = next(t for t in tried if t.contender.name == case.yardstick)
    return problem, [tried[0], *(_judge_peer(case, t, yardstick) for t in tried[1:])], verdict


@dataclass(frozen=True)
class Sample:
    """One contender in one direction: milliseconds of each round, and the peak of one pass in bytes."""

    ms: tuple[float, ...]
    peak: int


def measure(case: Case, budget: float, stamp: Stamp, clock: Clock | None = None) -> list[Row]:
    """All rows of one case: one per direction and peer, also for peers and directions that could not be run."""
    with quiet_process(stamp.threads):
        problem, tried, verdict = try_all(case)
        samples = {} if verdict else take_samples(case, tried, clock or clock_of(case.device), budget)
        return [_row(problem, direction, tried[0], peer, verdict, samples, stamp)
                for direction in case.directions for peer in tried[1:]]  # fmt: skip


def take_samples(
    case: Case, tried: Sequence[Tried], clock: Clock, budget: float
) -> dict[tuple[str, Direction], Sample]:
    """Memory and time of every contender, by its name and direction; what it cannot do is missing."""
    runners = [t.runner for t in tried if t.runner is not None]
    peaks = [runner.peaks(case.device) for runner in runners]
    rounds = time_rounds(runners, clock, budget)
    return {
        (runner.contender.name, direction): Sample(tuple(1e3 * times[i][direction] for times in rounds), peak)
        for i, runner in enumerate(runners)
        for direction, peak in peaks[i].items()
    }


def _row(
    problem: Problem,
    direction: Direction,
    ours: Tried,
    peer: Tried,
    verdict: str,
    samples: Mapping[tuple[str, Direction], Sample],
    stamp: Stamp,
) -> Row:
    case = problem.case
    our = samples.get((ours.contender.name, direction))
    their = samples.get((peer.contender.name, direction))
    ratios = [theirs / mine for theirs, mine in zip(their.ms, our.ms, strict=True)] if our and their else []
    low, middle, high = percentiles(ratios)
    peer_low, peer_middle, peer_high = percentiles(their.ms if their else ())
    return Row(
        suite=case.suite,
        case=case.name,
        direction=direction,
        peer=peer.contender.name,
        ratio=middle,
        ratio_low=low,
        ratio_high=high,
        peak_ratio=their.peak / our.peak if our and their and our.peak else None,
        error=ours.worst,
        dtype=str(case.dtype).removeprefix("torch."),
        device=case.device,
        does_less=peer.less or None,
        unsupported=None if peer.can(direction) else peer.reason,
        gate=verdict or None,
        rounds=len(ratios),
        our_ms=percentiles(our.ms if our else ())[1],
        peer_ms_low=peer_low,
        peer_ms=peer_middle,
        peer_ms_high=peer_high,
        peer_error=peer.worst,
        our_peak=our.peak if our else None,
        peer_peak=their.peak if their else None,
        peak_over_io=our.peak / problem.io if our else None,
        backend=ours.contender.backend,
        **asdict(stamp),
    )


def percentiles(values: Sequence[float]) -> tuple[float, float, float] | tuple[None, None, None]:
    """The 20th, 50th and 80th."""
    if not values:
        return None, None, None
    low, middle, high = numpy.percentile(values, (20, 50, 80))
    return float(low), float(middle), float(high)
