"""The watch: who is at fault, by the judge without waiting, and by real ranks that are killed, stopped and hung."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch.distributed as dist

from compgen_fast.exits import Exit
from compgen_fast.train import watch as watch_module
from compgen_fast.train.ranks import Ranks
from compgen_fast.train.watch import GRACE_SECONDS, Judge, Member, Report, Verdict, Watch

STALL = 20.0


# The judge, with a clock of our own.


class Trial:
    """Four ranks that beat every second, and the judge of rank 0 that reads them."""

    def __init__(self) -> None:
        members = [Member(rank, f"node{rank // 2}", f"machine{rank // 2}", 100 + rank, "0") for rank in range(4)]
        self.judge = Judge(members, own=0, stall=STALL)
        self.reports = dict.fromkeys(range(4), Report(phase="forward"))
        self.now = 1000.0

    def say(self, *ranks: int, **changes: object) -> None:
        for rank in ranks:
            self.reports[rank] = replace(self.reports[rank], **changes)  # type: ignore[arg-type]

    def passes(self, seconds: float, silent: tuple[int, ...] = (), leaving: bool = False) -> Verdict | None:
        """The first verdict within so many seconds."""
        for _ in range(round(seconds)):
            self.now += 1
            for rank in self.reports:
                if rank not in silent:
                    self.say(rank, beat=self.reports[rank].beat + 1)
            verdict = self.judge.verdict(dict(self.reports), self.now, leaving)
            if verdict is not None:
                return verdict
        return None

    def train(self, seconds: int, silent: tuple[int, ...] = ()) -> Verdict | None:
        for _ in range(seconds):
            for rank in self.reports:
                if rank not in silent:
                    self.say(rank, step=self.reports[rank].step + 1)
            verdict = self.passes(1, silent)
            if verdict is not None:
                return verdict
        return None


def test_ranks_that_move_are_left_alone() -> None:
    assert Trial().train(500) is None


def test_a_rank_without_a_beat_is_silent_after_the_stall_and_not_before() -> None:
    trial = Trial()
    trial.train(5)
    assert trial.passes(STALL, silent=(2,)) is None
    verdict = trial.passes(2, silent=(2,))
    assert verdict is not None and verdict.ranks == (2,) and verdict.deaf
    assert "rank 2 (host node1, process 102) gave no sign of life for 20 s" in verdict.sentence
    assert "'forward' of step 5" in verdict.sentence


def test_a_lost_machine_takes_all_its_ranks_along() -> None:
    trial = Trial()
    verdict = trial.passes(30, silent=(2, 3))
    assert verdict is not None and verdict.ranks == (2, 3)


def test_the_rank_that_has_come_least_far_is_stalled_and_those_who_wait_are_not() -> None:
    trial = Trial()
    trial.say(0, 2, 3, step=57, phases=2, phase="backward")
    trial.say(1, step=57, phases=1, phase="forward", place="model.py:12 in forward")
    verdict = trial.passes(30)
    assert verdict is not None and verdict.ranks == (1,) and not verdict.deaf
    assert "rank 1 (host node0, process 101) stalled" in verdict.sentence
    assert "'forward' of step 57, at model.py:12 in forward while others wait" in verdict.sentence


def test_of_ranks_that_stand_equally_far_those_in_a_collective_only_wait() -> None:
    trial = Trial()
    trial.say(0, 2, 3, waiting=True)
    verdict = trial.passes(30)
    assert verdict is not None and verdict.ranks == (1,)


def test_where_nobody_can_be_told_apart_all_are_named() -> None:
    trial = Trial()
    trial.say(0, 1, 2, 3, waiting=True)
    verdict = trial.passes(30)
    assert verdict is not None and verdict.ranks == (0, 1, 2, 3) and "others wait" not in verdict.sentence


def test_a_later_step_is_further_whatever_the_number_of_phases() -> None:
    trial = Trial()
    trial.say(0, step=8, phases=0)
    trial.say(1, 2, 3, step=7, phases=9)
    verdict = trial.passes(30)
    assert verdict is not None and verdict.ranks == (1, 2, 3)


def test_a_rank_with_patience_left_protects_those_that_wait_for_it() -> None:
    trial = Trial()
    trial.say(0, patience=100.0)  # saves a checkpoint while the others stand at a barrier
    assert trial.passes(100) is None
    assert trial.passes(5) is not None


def test_patience_does_not_excuse_silence() -> None:
    trial = Trial()
    trial.say(1, patience=1000.0)
    verdict = trial.passes(30, silent=(1,))
    assert verdict is not None and verdict.ranks == (1,)


def test_a_rank_that_is_gone_is_named_at_once_by_the_one_who_looked() -> None:
    trial = Trial()
    trial.passes(3)
    trial.say(2, gone=3)
    verdict = trial.passes(1, silent=(3,))
    assert verdict is not None and verdict.ranks == (3,) and verdict.deaf and "is gone" in verdict.sentence


def test_a_rank_that_is_gone_while_all_leave_has_merely_left() -> None:
    trial = Trial()
    trial.say(2, gone=3)
    assert trial.passes(10, silent=(3,), leaving=True) is None


def test_an_error_is_told_as_the_cause_also_when_its_process_is_gone_by_then() -> None:
    trial = Trial()
    trial.say(3, failed="ValueError: a bad sample")
    trial.say(2, gone=3)
    assert trial.passes(GRACE_SECONDS - 1, silent=(3,)) is None  # the others may be about to fail alike
    verdict = trial.passes(5, silent=(3,))
    assert verdict is not None and verdict.ranks == (3,) and not verdict.deaf
    assert "failed in 'forward' of step 0: ValueError: a bad sample" in verdict.sentence


def test_a_judge_that_was_stopped_itself_starts_over() -> None:
    trial = Trial()
    trial.train(5)
    trial.now += 3600  # the whole job was suspended
    assert trial.passes(STALL) is None
    verdict = trial.passes(5)
    assert verdict is not None and "stands still for 2" in verdict.sentence


def test_many_ranks_at_fault_are_counted_not_listed() -> None:
    members = [Member(rank, "node", "machine", rank, "0") for rank in range(100)]
    judge = Judge(members, own=0, stall=STALL)
    reports = {rank: Report(waiting=True) for rank in range(100)}
    verdicts = [judge.verdict({r: replace(v, beat=now) for r, v in reports.items()}, now) for now in range(30)]
    found = next(verdict for verdict in verdicts if verdict is not None)
    assert len(found.ranks) == 100 and "and 96 more" in found.sentence


def test_reports_and_verdicts_survive_the_journey() -> None:
    report = Report(beat=3, step=7, phases=2, phase="data", patience=1.5, place="x.py:1 in f", waiting=True, gone=4)
    assert Report.decoded(report.encoded().encode()) == report
    verdict = Verdict((1, 2), "a sentence", deaf=True)
    assert Verdict.decoded(verdict.encoded().encode()) == verdict


# Processes.


def test_a_process_is_known_by_its_birth_not_its_number_alone() -> None:
    own = Member.here(0)
    assert own.alive
    assert not replace(own, born="1").alive


def test_a_process_that_ended_is_not_alive_even_before_it_is_asked_for_its_code() -> None:
    child = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    member = replace(Member.here(1), process=child.pid, born=watch_module._started(child.pid))
    assert member.alive
    os.kill(child.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)
    assert member.alive
    member.end()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not member.alive
    assert child.wait() == -signal.SIGKILL


def test_another_process_that_got_the_number_is_not_killed() -> None:
    child = subprocess.Popen(["sleep", "60"])
    try:
        replace(Member.here(1), process=child.pid, born="1").end()
        assert child.poll() is None
    finally:
        child.kill()
        child.wait()


# One rank.


def test_a_phase_gives_ten_times_its_length_in_patience_and_an_allowance_does_not_count() -> None:
    watch = Watch(Ranks.alone())
    watch.beat("data", 0)
    watch._since -= 3
    watch.beat("forward")
    assert 30 <= watch._report(1).patience < 31
    with watch.allowing(500):
        assert watch._report(1).patience == 500
        watch._since -= 100
        watch.beat("forward")
    watch.beat("backward")
    assert watch._report(1).patience < 31
    with watch.allowing(500, learning=True):
        watch.beat("forward")
        watch._since -= 40
        watch.beat("backward")
    assert 400 <= watch._report(1).patience < 410


def test_an_allowance_that_ends_counts_as_progress() -> None:
    watch = Watch(Ranks.alone())
    watch.beat("data", 3)
    seen = [watch._report(1).progress]
    with watch.allowing(500):
        seen.append(watch._report(1).progress)
    seen.append(watch._report(1).progress)
    assert seen == [(3, 0), (3, 1), (3, 2)]


def test_an_error_of_ones_own_needs_no_verdict() -> None:
    with Watch(Ranks.alone()) as watch:
        assert watch.explain(ValueError("a bad sample\nwith details")) == "ValueError: a bad sample"


def test_an_error_goes_through_the_watch_unchanged(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="a bad sample"), Watch(Ranks.alone()):
        raise ValueError("a bad sample")
    assert capfd.readouterr().err == ""


def test_the_threads_end_with_the_watch() -> None:
    with Watch(Ranks.alone()) as watch:
        threads = list(watch._threads)
        assert all(thread.is_alive() for thread in threads)
    assert not any(thread.is_alive() for thread in threads)


def test_an_error_is_of_a_collective_by_its_kind_or_by_where_it_was_raised() -> None:
    assert watch_module._is_of_a_collective(dist.DistNetworkError("reset"))
    assert not watch_module._is_of_a_collective(RuntimeError("CUDA out of memory"))
    try:
        dist.all_reduce(None)  # type: ignore[arg-type]
    except (RuntimeError, TypeError, ValueError) as error:
        raised_there = RuntimeError("Connection closed by peer").with_traceback(error.__traceback__)
        assert watch_module._is_of_a_collective(raised_there)


def test_a_stall_below_the_beat_is_refused() -> None:
    with pytest.raises(ValueError, match=r"stall is 0\.1 s"):
        Watch(Ranks.alone(), stall=0.1)


class Fragile:
    """A store that can be closed under the watch."""

    def __init__(self) -> None:
        self.store, self.closed = dist.HashStore(), False

    def clone(self) -> "Fragile":
        return self

    def set(self, key: str, value: str) -> None:
        if self.closed:
            raise dist.DistNetworkError("connection reset by peer")
        self.store.set(key, value)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self.store.multi_get(keys)


@pytest.mark.parametrize("leaving", [True, False])
def test_a_store_that_closes_means_harm_unless_all_are_about_to_leave(
    monkeypatch: pytest.MonkeyPatch, leaving: bool
) -> None:
    left: list[int] = []
    monkeypatch.setattr(watch_module, "_leave", left.append)
    monkeypatch.setattr(watch_module, "GRACE_SECONDS", 0.2)
    store = Fragile()
    with Watch(replace(Ranks.alone(), store=store), stall=30.0) as watch:  # type: ignore[arg-type]
        watch._period = 0.05
        watch._leaving = leaving
        store.closed = True
        time.sleep(2.0)
    assert left == ([] if leaving else [Exit.STALLED])


def test_without_a_store_one_rank_on_each_machine_speaks(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(watch_module, "_leave", lambda code: None)
    store = Fragile()
    store.set("watch/0", Report().encoded())
    store.set(watch_module.VERDICT, watch_module.NOTHING)
    with Watch(replace(Ranks.alone(), rank=2, store=store), stall=2.0) as watch:  # type: ignore[arg-type]
        watch._members = [Member(rank, "node0", "another machine", rank, "0") for rank in range(2)] + [watch._own]
        store.closed = True
        watch._known.wait(30)
    assert "rank 0 (host node0, process 0), which holds the store of all ranks, has" in capfd.readouterr().err


# Real ranks: three processes, one of which comes to harm. A nursery imports torch once and forks all of them. Where a
# harm is "under torchrun", the store of the ranks is in a process of its own, as it is there.

NURSERY = """
    import json, os, signal, sys, time, traceback
    from contextlib import ExitStack
    import torch.distributed as dist
    from compgen_fast.train.launch import Placement, _reserved_port, _Tie
    from compgen_fast.train.ranks import joined
    from compgen_fast.train.signals import Stop
    from compgen_fast.train.watch import Watch

    def rank(harm, victim):
        with joined("cpu") as ranks, Stop() as stop, Watch(ranks, stall=3.0) as watch:
            for step in range(100_000):
                watch.beat("forward", step)
                if step == 20 and ranks.rank == victim:
                    if harm == "hangs":
                        time.sleep(600)
                    elif harm == "fails":
                        raise ValueError("a bad sample")
                    elif harm.startswith("SIG"):
                        os.kill(os.getpid(), getattr(signal, harm.partition(" ")[0]))
                time.sleep(0.02)
                watch.beat("backward")
                if step == 20 and ranks.rank == victim and harm == "lags":
                    time.sleep(600)
                try:
                    stop.agree(ranks)
                except RuntimeError as error:
                    if harm == "SIGKILL" and ranks.rank == 2:
                        explanation = watch.explain(error)
                        time.sleep(0.5)
                        print("explained:", explanation, file=sys.stderr, flush=True)
                        os._exit(9)
                    raise
                if stop.signal:
                    break
        os.write(2, f"left at step {step}\\n".encode())  # in one piece: three ranks write into one file

    def fork(parent, work, *arguments):
        process = os.fork()
        if process:
            return process
        code = 1
        try:
            _Tie(parent)()
            work(*arguments)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def serve(port):
        store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        time.sleep(600)

    def run(number, port, out, *case):
        os.dup2(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = str("torchrun" in case[0])
        Placement(number, 3, number, "127.0.0.1", port).export()
        rank(*case)

    folder, cases = sys.argv[1], [(harm, int(victim)) for harm, victim in zip(sys.argv[2::2], sys.argv[3::2])]
    with ExitStack() as ports:
        born = {}
        for case in cases:
            port, name = ports.enter_context(_reserved_port()), f"{case[0]} {case[1]}"
            if "torchrun" in name:
                fork(os.getpid(), serve, port)
            born[name] = [fork(os.getpid(), run, number, port, f"{folder}/{name}", *case) for number in range(3)]
        codes = {
            name: [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes]
            for name, processes in born.items()
        }
    print(json.dumps({name: [born[name], codes[name]] for name in born}))
"""


@dataclass(frozen=True)
class Outcome:
    """What became of a run of three ranks."""

    processes: list[int]
    codes: list[int]
    printed: str

    @property
    def verdicts(self) -> list[str]:
        return [line for line in self.printed.splitlines() if "All ranks end with exit code" in line]


HARMS = {
    "SIGKILL": "is gone: its process has ended without a word",
    "SIGSTOP": "it is stopped, or its machine or network is lost",
    "SIGKILL under torchrun": "is gone: its process has ended without a word",
    "SIGSTOP under torchrun": "it is stopped, or its machine or network is lost",
    "hangs": "stalled: it stands still for",
    "lags": "stalled: it stands still for",
    "fails": "failed in 'forward' of step 20: ValueError: a bad sample",
    "SIGTERM": "",
}
CODE_OF_VICTIM = {"hangs": Exit.STALLED, "lags": Exit.STALLED, "fails": 1}
EXPLAINED = 9
FATAL = [harm for harm in HARMS if harm != "SIGTERM"]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Outcome]:
    """All cases at once: most of their time is waiting."""
    folder = tmp_path_factory.mktemp("ranks")
    cases = [(harm, victim) for harm in HARMS for victim in (0, 1)]
    words = [str(word) for case in cases for word in case]
    finished = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(NURSERY), str(folder), *words],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},
        stdout=subprocess.PIPE,
        timeout=120,
        check=True,
    )
    found = json.loads(finished.stdout)
    return {
        (harm, victim): Outcome(*found[f"{harm} {victim}"], (folder / f"{harm} {victim}").read_text())
        for harm, victim in cases
    }


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("harm", FATAL)
def test_a_rank_that_comes_to_harm_is_named_once_and_the_run_ends(
    outcomes: dict[tuple[str, int], Outcome], harm: str, victim: int
) -> None:
    outcome = outcomes[harm, victim]
    assert len(outcome.verdicts) == 1, outcome.printed
    named = set(re.findall(r"rank (\d) \(host \S+, process (\d+)\)", outcome.verdicts[0]))
    assert named == {(str(victim), str(outcome.processes[victim]))}
    assert HARMS[harm] in outcome.verdicts[0]
    assert "left at step" not in outcome.printed


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("harm", FATAL)
def test_nobody_survives_and_nobody_exits_as_if_all_were_well(
    outcomes: dict[tuple[str, int], Outcome], harm: str, victim: int
) -> None:
    outcome = outcomes[harm, victim]
    expected = [Exit.STALLED] * 3
    expected[victim] = CODE_OF_VICTIM.get(harm, -signal.SIGKILL)
    if harm == "SIGKILL" and not watched_first(outcome):
        expected[2] = EXPLAINED
    assert outcome.codes == expected
    assert not any(Path(f"/proc/{process}").exists() for process in outcome.processes)


def watched_first(outcome: Outcome) -> bool:
    """On a busy machine the watch may end the last rank before its collective fails, which it would explain."""
    return outcome.codes[2] == Exit.STALLED


def test_the_place_where_a_rank_hangs_is_told(outcomes: dict[tuple[str, int], Outcome]) -> None:
    said = outcomes["hangs", 1].verdicts[0]
    assert "in 'forward' of step 20, at <string>:" in said and said.count("while others wait for it") == 1


def test_ranks_that_wait_in_the_phase_where_another_hangs_are_not_blamed(
    outcomes: dict[tuple[str, int], Outcome],
) -> None:
    said = outcomes["lags", 1].verdicts[0]
    assert "in 'backward' of step 20, at <string>:" in said and said.count("while others wait for it") == 1


def test_a_broken_collective_is_explained_by_the_rank_that_went_away(outcomes: dict[tuple[str, int], Outcome]) -> None:
    for victim in (0, 1):
        outcome = outcomes["SIGKILL", victim]
        explained = [line for line in outcome.printed.splitlines() if line.startswith("explained:")]
        assert len(explained) == (0 if watched_first(outcome) else 1)
        assert all(f"rank {victim} (host" in line and "RuntimeError" in line for line in explained)


def test_the_error_of_a_failed_rank_reaches_the_user_with_its_traceback(
    outcomes: dict[tuple[str, int], Outcome],
) -> None:
    for victim in (0, 1):
        assert "\nValueError: a bad sample\n" in outcomes["fails", victim].printed


@pytest.mark.parametrize("victim", [0, 1])
def test_sigterm_of_one_rank_ends_all_of_them_well(outcomes: dict[tuple[str, int], Outcome], victim: int) -> None:
    outcome = outcomes["SIGTERM", victim]
    assert outcome.codes == [0, 0, 0], outcome.printed
    assert outcome.printed == "left at step 20\n" * 3
