"""How far a long command is, on a terminal and in a log."""

import io
import re
import threading

import pytest
from rich.console import Console

from compgen_fast import progress
from compgen_fast.progress import following, numbers


def written(console: Console) -> list[str]:
    assert isinstance(console.file, io.StringIO)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())
    return [line.rstrip() for line in text.replace("\r", "\n").splitlines() if line.strip()]


class Log(io.StringIO):
    """Lets a test wait until so many lines were written."""

    def __init__(self) -> None:
        super().__init__()
        self._grew = threading.Condition()

    def write(self, text: str) -> int:
        with self._grew:
            self._grew.notify_all()
            return super().write(text)

    def wait_for(self, lines: int) -> None:
        with self._grew:
            assert self._grew.wait_for(lambda: self.getvalue().count("\n") >= lines, timeout=30)


def test_a_log_gets_a_line_at_once_and_then_also_while_nothing_gets_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.01)
    log = Log()
    with following("study", 12, "jobs", done=2, console=Console(file=log)) as advance:
        advance(0, "vae 0: training")
        log.wait_for(3)
        advance(1, "vae 1: training")
        log.wait_for(6)
    lines = written(Console(file=log))
    assert re.fullmatch(r"study · 2/12 jobs · 0:00:00 · vae 0: training", lines[0])
    assert any(re.fullmatch(r"study · 3/12 jobs · .* left · vae 1: training", line) for line in lines[1:])


def test_a_log_ends_with_what_was_done() -> None:
    log = io.StringIO()
    with following("pack", 3, "samples", console=Console(file=log)) as advance:
        for _ in range(3):
            advance()
    assert [line.split(" · ")[1] for line in written(Console(file=log))] == ["1/3 samples", "3/3 samples"]


def test_nothing_is_written_unless_wanted() -> None:
    log = io.StringIO()
    with following("pack", 3, "samples", show=False, console=Console(file=log)) as advance:
        advance(3, "all")
    assert not log.getvalue()


@pytest.mark.parametrize("width", [80, 120])
def test_a_bar_is_one_line_and_its_note_another_and_no_number_is_cut(width: int) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=width)
    with following("pack " + 9 * "long name ", 1_234_567, "samples", done=1_234_000, console=console) as advance:
        advance(500, "shard 12 is done")
    bar, note = written(console)[-2:]
    assert len(bar) <= width and re.search(r"━╸ 1,234,500/1,234,567 samples · .*\d", bar)
    assert note == "shard 12 is done"


def test_rates_are_per_second_or_per_minute_and_the_rest_is_told_in_hours() -> None:
    assert numbers(1200, 20_000, "images", 310.0, 4.0) == "1,200/20,000 images · 310/s · 0:01:01 left"
    assert numbers(3, 12, "jobs", 0.0125, 240.0) == "3/12 jobs · 0.8/min · 0:12:00 left"
    assert numbers(0, 12, "jobs", None, 10.0) == "0/12 jobs · 0:00:10"
