"""Ends a run, within seconds and with a name, when one of its ranks hangs, is stopped or is gone.

Collectives cannot tell: a rank that waits for another waits for as long as its group allows, half an hour in
DeepSpeed's. So beside the training a thread on each rank publishes once a second, through the store that all ranks
share, a beat (the process lives) and how far the main thread has come (`Watch.beat`). A rank is at fault when

    it failed        its main thread left the watch with an error
    it is gone       its process ended without a word; the next rank on the same machine looks
    it is silent     its beat stands still for ``stall`` seconds: it is stopped, or its machine or network is lost
    it is stalled    it beats, but of all ranks it has come least far, and has stood there for longer than it may

Rank 0 reads all beats in one request and publishes a verdict; the others read two keys, the verdict and rank 0's beat.
So the store serves two requests per rank and second, which is little also for 1024 ranks. A store that does not answer
means rank 0, which holds it. All times are differences on the observer's own clock: hosts need not agree on the time.

A thread that never gets Python's lock cannot beat: an extension that holds it for ``stall`` seconds looks like silence.
"""

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from compgen_fast.exits import Exit
from compgen_fast.train.ranks import Ranks

PERIOD_SECONDS = 1.0
GRACE_SECONDS = 3.0
"""For a rank that failed to say more itself, for ranks to read a verdict, for a rank at fault to end by itself."""
PATIENCE_IN_PHASES = 10
START = "start"
GONE = "is gone: its process has ended without a word"
LOST = "it is stopped, or its machine or network is lost"
VERDICT, SEEN, NOTHING = "watch/verdict", "watch/seen", "-"


@dataclass(frozen=True)
class Member:
    """The process that is a rank."""

    rank: int
    host: str
    machine: str
    """Where its process number means something; hosts may share a name, and containers a host."""
    process: int
    born: str
    """When it started, in the kernel's ticks: a process number alone may be given to another process later."""

    @classmethod
    def here(cls, rank: int) -> Self:
        return cls(rank, socket.gethostname(), _machine(), os.getpid(), _started(os.getpid()))

    @property
    def alive(self) -> bool:
        """Whether the process is there; asked on its own machine. A stopped process is there."""
        return _started(self.process) == self.born

    def end(self) -> None:
        """Kills the process unless it ends by itself."""
        until = time.monotonic() + GRACE_SECONDS / 3
        while self.alive and time.monotonic() < until:
            time.sleep(0.05)
        if self.alive:
            with suppress(ProcessLookupError):
                os.kill(self.process, signal.SIGKILL)

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, process {self.process})"


def _machine() -> str:
    """This boot of this kernel, and the container's own numbering of processes."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return socket.gethostname()


def _started(process: int) -> str:
    """When a process of this machine started; "" if it has ended, be it that nobody has asked for its exit code."""
    try:
        # The name in brackets may hold anything; after it come the state (field 3) and the start (field 22).
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if fields[0] in "ZX" else fields[19]


@dataclass(frozen=True)
class Report:
    """What a rank says of itself, once a second."""

    beat: int = 0
    step: int = 0
    phases: int = 0
    """Begun in this step. (step, phases) is how far the rank has come."""
    phase: str = START
    patience: float = 0.0
    """How many seconds it may stand here."""
    place: str = ""
    """Where its main thread stands, once it has stood for a while."""
    waiting: bool = False
    """It stands in a collective: for another rank."""
    gone: int | None = None
    """The rank it looks after has ended without a word."""
    failed: str = ""
    """Its main thread left with this error."""

    @property
    def progress(self) -> tuple[int, int]:
        return self.step, self.phases

    @property
    def standing(self) -> str:
        return f"'{self.phase}' of step {self.step}" + (f", at {self.place}" if self.place else "")

    def encoded(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decoded(cls, text: bytes) -> Self:
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Verdict:
    """The ranks at fault, and the sentence that says why."""

    ranks: tuple[int, ...]
    sentence: str
    deaf: bool = False
    """They cannot read this themselves, so that others have to end them."""

    def encoded(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decoded(cls, text: bytes) -> Self:
        found = json.loads(text)
        return cls(tuple(found["ranks"]), found["sentence"], found["deaf"])


@dataclass
class _Seen:
    """The last news of a rank, and when they came."""

    report: Report
    beat_at: float
    moved_at: float
    failed_at: float | None = None

    def take(self, report: Report, now: float) -> None:
        if report.beat != self.report.beat:
            self.beat_at = now
        if report.progress != self.report.progress:
            self.moved_at = now
        if report.failed and self.failed_at is None:
            self.failed_at = now
        self.report = report


class Judge:
    """Finds the ranks at fault in what they report. Its clock is handed in, so that it can be tested without waiting.

    members: all ranks. stall: seconds of silence that are too many. own: the rank that judges; it knows others only by
    their reports, and of itself that it is alive.
    """

    def __init__(self, members: Sequence[Member], own: int, stall: float) -> None:
        self._members, self._own, self._stall = members, own, stall
        self._seen: dict[int, _Seen] = {}
        self._last: float | None = None

    def verdict(self, reports: dict[int, Report], now: float, leaving: bool = False) -> Verdict | None:
        """Who is at fault, if anybody. ``leaving``: all ranks are about to end, so that one may be gone."""
        if self._last is not None and now - self._last > self._stall / 2:
            self._seen.clear()  # we were stopped ourselves, perhaps all of us were: what we know is old
        self._last = now
        for rank, report in reports.items():
            self._seen.setdefault(rank, _Seen(report, now, now)).take(report, now)
        return self._failed(now) or (None if leaving else self._gone()) or self._silent(now) or self._stalled(now)

    def _failed(self, now: float) -> Verdict | None:
        grace = min(GRACE_SECONDS, self._stall / 2)  # the others may be about to fail alike
        for rank, seen in self._seen.items():
            if seen.failed_at is not None and (rank == self._own or now - seen.failed_at >= grace):
                return self._fault([rank], f"failed in {seen.report.standing}: {seen.report.failed}")
        return None

    def _gone(self) -> Verdict | None:
        for seen in self._seen.values():
            rank = seen.report.gone
            if rank is not None and not (rank in self._seen and self._seen[rank].report.failed):
                return self._fault([rank], f"{GONE}{self._last_seen([rank])}", deaf=True)
        return None

    def _silent(self, now: float) -> Verdict | None:
        silent = [rank for rank, seen in self._seen.items() if now - seen.beat_at > self._stall and rank != self._own]
        if not silent:
            return None
        what = f"gave no sign of life for {self._stall:g} s: {LOST}"
        return self._fault(silent, what + self._last_seen(silent), deaf=True)

    def _stalled(self, now: float) -> Verdict | None:
        if len(self._seen) < len(self._members):
            return None
        least = min(seen.report.progress for seen in self._seen.values())
        last = {rank: seen for rank, seen in self._seen.items() if seen.report.progress == least}
        # While one of them may still take its time, the others may be waiting for it.
        if any(now - seen.moved_at <= max(self._stall, seen.report.patience) for seen in last.values()):
            return None
        at_fault = [rank for rank, seen in last.items() if not seen.report.waiting] or list(last)
        seconds = now - min(last[rank].moved_at for rank in at_fault)
        places = "; ".join(dict.fromkeys(last[rank].report.standing for rank in at_fault))
        others = " while others wait for it" if len(at_fault) < len(self._members) else ""
        return self._fault(at_fault, f"stalled: it stands still for {seconds:.0f} s in {places}{others}")

    def _last_seen(self, ranks: Sequence[int]) -> str:
        places = dict.fromkeys(self._seen[rank].report.standing for rank in ranks if rank in self._seen)
        return f"; last seen in {'; '.join(places)}" if places else ""

    def _fault(self, ranks: Sequence[int], what: str, deaf: bool = False) -> Verdict:
        return Verdict(tuple(ranks), f"{_named([self._members[rank] for rank in ranks])} {what}", deaf)


def _named(members: Sequence[Member]) -> str:
    shown = ", ".join(str(member) for member in members[:4])
    return shown if len(members) <= 4 else f"{shown} and {len(members) - 4} more"


class Watch:
    """``with Watch(ranks) as watch:`` around the training; leave it on all ranks together or with an error.

    Args:
        ranks: the processes of this run.
        stall: seconds without a sign of life, and the least that a phase may last, before the run is ended.

    A phase may also last `PATIENCE_IN_PHASES` times as long as the longest so far, and as long as `allowing` says.
    """

    def __init__(self, ranks: Ranks, stall: float = 20.0) -> None:
        if stall < 1:
            raise ValueError(f"Watch: stall is {stall} s; expected at least 1, and 20 where machines are busy")
        self._ranks, self._stall = ranks, stall
        self._own = Member.here(ranks.rank)
        self._members: list[Member] = []
        self._mate: Member | None = None
        self._period = min(PERIOD_SECONDS, stall / 8)
        self._step, self._phases, self._phase = 0, 0, START
        self._since = time.monotonic()
        self._longest = self._allowance = 0.0
        self._learning = False
        self._failed = ""
        self._leaving = self._affected = self._held = False
        self._stop, self._said, self._known = threading.Event(), threading.Event(), threading.Event()
        self._verdict: Verdict | None = None
        self._of_first = Report()
        self._answered = self._since
        self._executing = threading.Lock()
        self._threads: list[threading.Thread] = []

    # What the main thread calls.

    def beat(self, phase: str, step: int | None = None) -> None:
        """Says that ``phase`` begins, of ``step`` if a new one does. Costs about a microsecond."""
        now = time.monotonic()
        if (not self._allowance or self._learning) and self._phase != START:
            self._longest = max(self._longest, now - self._since)
        self._begin(phase, now, step)

    @contextmanager
    def allowing(self, seconds: float, learning: bool = False) -> Iterator[None]:
        """The main thread may stand still for so long: a checkpoint, an evaluation, a first step that compiles.

        ``learning``: phases in here are of the usual length, so that later ones are judged by them.
        """
        before, self._allowance, self._learning = self._allowance, seconds, learning
        self._begin(self._phase, time.monotonic())
        try:
            yield
        finally:
            self._begin(self._phase, time.monotonic())
            self._allowance, self._learning = before, False

    def explain(self, error: BaseException) -> str:
        """An error of the main thread in a sentence; for one of a collective, which rank it was that went away.

        Waits for the verdict, a few seconds and at most a little longer than ``stall``. Then exit with `Exit.STALLED`.
        """
        told = f"{type(error).__name__}: {error}".partition("\n")[0]
        if _is_of_a_collective(error):
            self._held = True
            self._await_verdict()
        return told if self._verdict is None else f"{self._verdict.sentence} ({told})"

    def __enter__(self) -> Self:
        # A connection of our own, since the main thread may wait in its. Made here, before all ranks meet: the store
        # looks up the name of whoever connects, which can take it 5 s.
        store: Store = self._ranks.store.clone()  # type: ignore[attr-defined]
        store.set(_key(self._own.rank), Report().encoded())
        if self._ranks.first:
            store.set(VERDICT, NOTHING)
        self._members = self._ranks.gather(self._own)
        self._mate = _next_on_machine(self._members, self._own)
        self._answered = self._since = time.monotonic()
        self._threads = [
            threading.Thread(target=self._talk, args=(store,), name="watch: talk", daemon=True),
            threading.Thread(target=self._guard, name="watch: guard", daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.beat("leaving")
                self._leaving = True
                self._ranks.barrier()
            else:
                self._tell(error)
        except RuntimeError as lost:
            self._tell(lost)
            raise
        finally:
            self._stop.set()
            for thread in self._threads:
                thread.join(GRACE_SECONDS)  # one that waits for a store that is gone may stay behind

    def _tell(self, error: BaseException) -> None:
        """Tells the other ranks of an error; not of one that is only the echo of another rank's end."""
        if _is_of_a_collective(error):
            self._await_verdict()
            if self._known.is_set() and not self._held:
                _leave(Exit.STALLED)
        if self._known.is_set():
            return
        self._failed = self.explain(error)
        self._said.wait(2 * GRACE_SECONDS)

    def _await_verdict(self) -> None:
        if not self._affected:
            self._affected = True
            self._known.wait(self._stall + 2 * GRACE_SECONDS)

    def _begin(self, phase: str, now: float, step: int | None = None) -> None:
        if step is None or step == self._step:
            self._phases += 1
        else:
            self._step, self._phases = step, 0
        self._phase, self._since = phase, now

    # What the threads do.

    def _talk(self, store: Store) -> None:
        """Publishes, reads, judges."""
        try:
            self._rounds(store)
        except RuntimeError:
            # The store is gone, and rank 0 with it; or all of us are about to end, and rank 0 was first.
            if not self._stop.wait(self._stall if self._leaving else GRACE_SECONDS / 2):
                self._execute(self._without_store("has closed the connection"), None)

    def _rounds(self, store: Store) -> None:
        judge = Judge(self._members, self._own.rank, self._stall)
        read = range(self._ranks.size if self._ranks.first else 1)
        keys = [*(_key(rank) for rank in read), VERDICT]
        beat = 0
        while not self._stop.wait(0 if self._failed else self._period):
            beat += 1
            report = self._report(beat)
            store.set(_key(self._own.rank), report.encoded())
            *reports, published = store.multi_get(keys)
            now = self._answered = time.monotonic()
            if published != NOTHING.encode():
                return self._execute(Verdict.decoded(published), store)
            found = {rank: Report.decoded(text) for rank, text in zip(read, reports, strict=True)}
            self._of_first = found[0]
            verdict = judge.verdict(found | {self._own.rank: report}, now, self._leaving)
            if verdict is not None and self._may_judge(verdict):
                agreed = store.compare_set(VERDICT, NOTHING, verdict.encoded())
                return self._execute(Verdict.decoded(agreed), store)
            if report.failed:
                store.add(SEEN, 1)
                return self._said.set()

    def _may_judge(self, verdict: Verdict) -> bool:
        """Rank 0 judges all, others only rank 0: of the rest they see too little to know who has come least far."""
        return self._ranks.first or verdict.ranks == (0,)

    def _guard(self) -> None:
        """Looks whether the store still answers the other thread, which may be waiting in it."""
        last = time.monotonic()
        while not self._stop.wait(self._period):
            now = time.monotonic()
            if now - last > self._stall / 2:
                self._answered = self._since = now  # this process itself was stopped
            elif now - self._answered > self._stall:
                return self._execute(self._without_store(f"has not answered for {self._stall:g} s"), None)
            last = now

    def _without_store(self, what: str) -> Verdict:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return Verdict((), f"the launcher, which holds the store of all ranks, {what}")
        first, last_seen = self._members[0], f"last seen in {self._of_first.standing}"
        if first.machine == self._own.machine and not first.alive:
            return Verdict((0,), f"{first} {GONE}; {last_seen}", deaf=True)
        return Verdict((0,), f"{first}, which holds the store of all ranks, {what}: {LOST}; {last_seen}", deaf=True)

    def _report(self, beat: int) -> Report:
        """What there is to say now. Where the main thread stands is looked up only when it has stood for a while."""
        stands = time.monotonic() - self._since > 2 * self._period
        place, waiting = _where_threads_stand(self._threads) if stands else ("", False)
        return Report(
            beat=beat,
            step=self._step,
            phases=self._phases,
            phase=self._phase,
            patience=max(PATIENCE_IN_PHASES * self._longest, self._allowance),
            place=place,
            waiting=waiting or self._affected,
            gone=None if self._mate is None or self._mate.alive else self._mate.rank,
            failed=self._failed,
        )

    def _execute(self, verdict: Verdict, store: Store | None) -> None:
        """Says the verdict once, ends who is at fault, lets others read it, ends this process."""
        with self._executing:
            if self._stop.is_set() or self._known.is_set():
                return
            self._verdict = verdict
            mates = [member for member in self._members if member.machine == self._own.machine]
            # Without a store, ranks of different machines do not know of each other: one on each machine speaks.
            if self._own == _spokesman(self._members if store else mates, verdict) and not self._failed:
                _say(f"cgf: {verdict.sentence}. All ranks end with exit code {Exit.STALLED}.")
            if verdict.deaf and self._own == _spokesman(mates, verdict):
                for member in mates:
                    if member.rank in verdict.ranks and member != self._own:
                        member.end()
            if store is not None:
                with suppress(RuntimeError):
                    _let_read(store, self._ranks, verdict)
            held = self._held  # the main thread is about to end the process itself
            self._known.set()
            self._said.set()
            if not self._failed and not (held and self._stop.wait(GRACE_SECONDS)):
                _leave(Exit.STALLED)


def _key(rank: int) -> str:
    return f"watch/{rank}"


def _next_on_machine(members: Sequence[Member], own: Member) -> Member | None:
    """Whom to look after: the next rank on this machine, and the first after the last."""
    mates = [member for member in members if member.machine == own.machine]
    following = mates[(mates.index(own) + 1) % len(mates)]
    return None if following == own else following


def _spokesman(members: Sequence[Member], verdict: Verdict) -> Member:
    """The first that is not at fault; the first of all where all are."""
    return next((member for member in members if member.rank not in verdict.ranks), members[0])


def _let_read(store: Store, ranks: Ranks, verdict: Verdict) -> None:
    """Others say that they have read; rank 0, whose end may be the store's, waits for them."""
    if not ranks.first:
        store.add(SEEN, 1)
        return
    readers = ranks.size - 1 - (len(verdict.ranks) if verdict.deaf else 0)
    until = time.monotonic() + GRACE_SECONDS
    while store.add(SEEN, 0) < readers and time.monotonic() < until:
        time.sleep(0.05)


def _is_of_a_collective(error: BaseException) -> bool:
    """gloo raises plain RuntimeErrors, so also where it was raised counts."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(_in_collectives(frame) for frame in _frames(error.__traceback__))
    )


def _frames(trace: TracebackType | None) -> Iterator[FrameType]:
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def _in_collectives(frame: FrameType) -> bool:
    return str(Path(dist.__file__).parent) in frame.f_code.co_filename


def _where_threads_stand(but: Sequence[threading.Thread]) -> tuple[str, bool]:
    """file:line and function of the main thread, and whether any thread but these stands in a collective.

    On a GPU the backward pass, and what is reduced in it, runs in other threads than the main one.
    """
    frames = {ident: frame for ident, frame in sys._current_frames().items() if ident not in {t.ident for t in but}}
    main = frames.get(threading.main_thread().ident or 0)
    place = f"{Path(main.f_code.co_filename).name}:{main.f_lineno} in {main.f_code.co_name}" if main else ""
    return place, any(_in_collectives(frame) for frame in frames.values())


def _say(sentence: str) -> None:
    _briefly(lambda: os.write(2, f"{sentence}\n".encode()))


def _leave(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        _briefly(stream.flush)
    os._exit(code)  # the main thread may sit in a collective for ever


def _briefly(work: Callable[[], object]) -> None:
    """Does it, but does not wait long for a terminal that does not take what is printed."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(1.0)
