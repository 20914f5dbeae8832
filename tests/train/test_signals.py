"""Being asked to stop: flags, agreement over ranks, and handlers put back."""

import os
import pickle
import signal

import pytest
import torch

from compgen_fast.exits import STOPS
from compgen_fast.train import launch
from compgen_fast.train.ranks import Ranks
from compgen_fast.train.signals import Stop, Stopped
from tests.train.two_ranks import run_two_ranks


@pytest.mark.parametrize("number", STOPS)
def test_each_signal_asks_once_and_nothing_else_happens(number: signal.Signals) -> None:
    with Stop() as stop:
        assert asked(stop) is None
        os.kill(os.getpid(), number)
        assert stop.signal is None, "not before all ranks agree"
        assert asked(stop) is number


def asked(stop: Stop) -> signal.Signals | None:
    assert stop.agree(Ranks.alone(), loss=torch.tensor(2.5)) == {"loss": 2.5}
    return stop.signal


@pytest.mark.parametrize("number", STOPS)
def test_a_process_that_takes_no_notice_ends_with_the_signals_code(number: signal.Signals) -> None:
    there_and_back = pickle.loads(pickle.dumps(Stopped(number)))  # as from a study's worker
    with pytest.raises(SystemExit) as ended:
        raise there_and_back
    assert ended.value.code == 128 + number


def test_a_second_ctrl_c_interrupts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "ECHO_SECONDS", 0.0)
    with Stop():
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_one_ctrl_c_that_arrives_twice_counts_once() -> None:
    with Stop() as stop:
        os.kill(os.getpid(), signal.SIGINT)  # from the terminal, and passed on by a launcher
        os.kill(os.getpid(), signal.SIGINT)
        assert asked(stop) is signal.SIGINT


def test_a_second_sigterm_does_not_interrupt_the_saving() -> None:
    with Stop() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked(stop) is signal.SIGTERM


def test_former_handlers_are_put_back() -> None:
    before = [signal.getsignal(number) for number in STOPS]
    with Stop():
        assert [signal.getsignal(number) for number in STOPS] != before
    assert [signal.getsignal(number) for number in STOPS] == before


def test_all_ranks_stop_at_the_same_step_for_the_same_signal_when_one_wants_an_end() -> None:
    printed = run_two_ranks(
        """
        import os, signal
        from compgen_fast.train.ranks import joined
        from compgen_fast.train.signals import Stop
        with joined("cpu") as ranks, Stop() as stop:
            for step in range(100):
                if step == 3 and ranks.rank == 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                if step == 3:
                    os.kill(os.getpid(), signal.SIGUSR1)
                if stop.agree(ranks) or stop.signal:
                    break
            print("step", step, "for", stop.signal.name)
        """
    )
    assert ["step 3 for SIGTERM" in text for text in printed] == [True, True]
