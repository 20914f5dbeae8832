"""Being asked to stop: flags, agreement over ranks, and handlers put back."""

import os
import signal

import pytest

from compgen_fast.train import signals
from compgen_fast.train.ranks import Ranks
from compgen_fast.train.signals import SIGNALS, Stop
from tests.train.two_ranks import run_two_ranks


@pytest.mark.parametrize("number", SIGNALS)
def test_each_signal_asks_once_and_nothing_else_happens(number: signal.Signals) -> None:
    with Stop() as stop:
        assert not stop.asked and stop.as_number() == 0.0
        os.kill(os.getpid(), number)
        assert stop.asked and stop.as_number() == 1.0 and stop.signal is number


def test_a_second_ctrl_c_interrupts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "ECHO_SECONDS", 0.0)
    with Stop():
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_one_ctrl_c_that_arrives_twice_counts_once() -> None:
    with Stop() as stop:
        os.kill(os.getpid(), signal.SIGINT)  # from the terminal, and passed on by a launcher
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.asked


def test_a_second_sigterm_does_not_interrupt_the_saving() -> None:
    with Stop() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.signal is signal.SIGTERM


def test_former_handlers_are_put_back() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with Stop():
        assert [signal.getsignal(number) for number in SIGNALS] != before
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_a_single_rank_agrees_with_itself() -> None:
    with Stop() as stop:
        assert not stop.agreed(Ranks.alone())
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.agreed(Ranks.alone())


def test_all_ranks_stop_at_the_same_step_when_one_is_asked() -> None:
    printed = run_two_ranks(
        """
        import os, signal
        from compgen_fast.train.ranks import joined
        from compgen_fast.train.signals import Stop
        with joined("cpu") as ranks, Stop() as stop:
            for step in range(100):
                if step == 3 and ranks.rank == 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                if stop.agreed(ranks):
                    break
            print("step", step, "asked", stop.asked)
        """
    )
    assert ["step 3" in text for text in printed] == [True, True]
    assert "asked False" in printed[0] and "asked True" in printed[1]
