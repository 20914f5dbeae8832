"""What is written is what happened: means over steps and ranks, rates by the clock, a file that survives crashes."""

import io
import json
import math
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from compgen_fast.train import metrics
from compgen_fast.train.metrics import Metrics, keep_before, read
from compgen_fast.train.ranks import Ranks
from tests.train.two_ranks import run_two_ranks


class Clock:
    """Time that passes when told to; takes the place of the module ``time``."""

    def __init__(self) -> None:
        self.now = 1000.0

    def pass_by(self, seconds: float) -> None:
        self.now += seconds

    def perf_counter(self) -> float:
        return self.now

    monotonic = time = perf_counter


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(metrics, "time", clock)
    return clock


def console(terminal: bool = False) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=160)


def made(folder: Path, **changes: Any) -> Metrics:
    settings: dict[str, Any] = {
        "steps": 20, "batch_size": 8, "flops_per_image": 3e6, "peak": 1e9, "first_step": 0, "every": 5,
        "ranks": Ranks.alone(), "console": console(),
    }  # fmt: skip
    return Metrics(folder, **{**settings, **changes})


def train(told: Metrics, steps: range, loss: Callable[[int], Any] = float) -> None:
    for step in steps:
        told.log(step, {"loss": loss(step)}, lr=0.1, grad_norm=None)


def test_a_line_holds_means_over_the_steps_since_the_line_before(tmp_path: Path) -> None:
    with made(tmp_path) as told:
        train(told, range(20))
    lines = read(tmp_path)
    assert [line["step"] for line in lines] == [0, 4, 9, 14, 19]
    assert [line["loss"] for line in lines] == [0, 2.5, 7, 12, 17]
    assert [line["samples"] for line in lines] == [8, 40, 80, 120, 160]


def test_rates_are_those_of_the_clock_since_the_line_before(tmp_path: Path, clock: Clock) -> None:
    with made(tmp_path) as told:
        for step in range(10):
            with told.waiting():
                clock.pass_by(0.1 if step else 7.0)
            clock.pass_by(0.3)
            told.log(step, {"loss": 1.0}, lr=0.1, grad_norm=2.0)
    first, _, last = read(tmp_path)
    assert first["samples_per_second"] == pytest.approx(8 / 7.3)
    assert last["samples_per_second"] == pytest.approx(8 / 0.4)
    assert last["data_wait"] == pytest.approx(0.25)
    assert last["utilisation"] == pytest.approx(3e6 * 20 / 1e9)
    assert last["lr"] == 0.1 and last["grad_norm"] == 2.0 and last["memory"] > 2**20


def test_time_between_steps_counts_as_time_of_the_run(tmp_path: Path, clock: Clock) -> None:
    with made(tmp_path, every=1) as told:
        clock.pass_by(1.0)
        told.log(0, {"loss": 1.0}, 0.1, None)
        clock.pass_by(3.0)  # a checkpoint
        clock.pass_by(1.0)
        told.log(1, {"loss": 1.0}, 0.1, None)
    assert read(tmp_path)[-1]["samples_per_second"] == pytest.approx(8 / 4)


def test_losses_become_numbers_only_when_a_line_is_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turning a tensor into a number waits for the device; here it is forbidden."""

    def forbidden(self: torch.Tensor, *_: object) -> None:
        raise AssertionError("waited for the device")

    with made(tmp_path) as told:
        train(told, range(1))
        with monkeypatch.context() as patch:
            for name in ("item", "tolist", "__float__", "__bool__", "cpu", "numpy"):
                patch.setattr(torch.Tensor, name, forbidden)
            train(told, range(1, 4), lambda step: torch.tensor(float(step), requires_grad=True))
        train(told, range(4, 5), lambda step: torch.tensor(float(step)))
    assert read(tmp_path)[-1]["loss"] == 2.5


def test_sums_of_many_steps_keep_their_digits(tmp_path: Path) -> None:
    with made(tmp_path, steps=1001, every=10_000) as told:
        train(told, range(1001), lambda step: torch.tensor(16777217.0 if step == 1 else 1.0))
    assert read(tmp_path)[-1]["loss"] == pytest.approx((16777216 + 999) / 1000, rel=1e-12)


def test_a_loss_that_begins_later_is_averaged_over_its_own_steps(tmp_path: Path) -> None:
    with made(tmp_path, steps=5) as told:
        train(told, range(3))
        for step in (3, 4):
            told.log(step, {"loss": float(step), "penalty": 6.0}, 0.1, None)
    assert read(tmp_path)[-1]["penalty"] == 6.0


def test_log_returns_the_line_when_there_is_one(tmp_path: Path) -> None:
    with made(tmp_path) as told:
        returned = [told.log(step, {"loss": 1.0}, 0.1, None, epoch=0.5) for step in range(5)]
    assert [line is not None for line in returned] == [True, False, False, False, True]
    assert returned[-1] == read(tmp_path)[-1] and returned[-1]["epoch"] == 0.5


def test_the_last_step_of_a_run_is_told_at_once(tmp_path: Path) -> None:
    with made(tmp_path, steps=7) as told:
        train(told, range(6))
        assert told.log(6, {"loss": 6.5}, 0.1, None) == read(tmp_path)[-1]  # not after what the loop still has to do


def test_what_is_not_known_is_left_out(tmp_path: Path) -> None:
    with made(tmp_path, peak=None) as told:
        train(told, range(1))
    assert {"utilisation", "epoch", "grad_norm"}.isdisjoint(read(tmp_path)[0])


def test_a_run_that_stops_in_good_order_writes_its_last_steps(tmp_path: Path) -> None:
    with made(tmp_path) as told:
        train(told, range(7))
    assert read(tmp_path)[-1]["step"] == 6 and read(tmp_path)[-1]["loss"] == 5.5


def test_a_run_that_fails_does_not_wait_for_the_other_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(step: int) -> float:
        if step == 7:
            monkeypatch.setattr(Ranks, "mean", lambda *_: pytest.fail("waited for other ranks"))
            raise RuntimeError("lost")
        return float(step)

    with pytest.raises(RuntimeError, match="lost"), made(tmp_path) as told:
        train(told, range(20), lost)
    assert read(tmp_path)[-1]["step"] == 4


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_leaves_the_file_json(tmp_path: Path, value: float) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    with made(tmp_path) as told:
        train(told, range(1), lambda _: torch.tensor(value))
    json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    (line,) = read(tmp_path)
    assert line["loss"] == value or (math.isnan(line["loss"]) and math.isnan(value))


def test_each_line_can_be_read_as_soon_as_it_is_told(tmp_path: Path) -> None:
    with made(tmp_path, every=1) as told:
        for step in range(3):
            train(told, range(step, step + 1))
            assert read(tmp_path)[-1]["step"] == step


def test_a_last_line_cut_by_a_crash_is_passed_over(tmp_path: Path) -> None:
    with made(tmp_path) as told:
        train(told, range(10))
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    for cut in range(len(whole.splitlines()[-1])):
        path.write_bytes(whole[: len(whole) - 1 - cut])
        assert [line["step"] for line in read(tmp_path)] == [0, 4]


def test_a_last_line_that_a_lost_page_left_blank_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 0}\n' + bytes(20) + b"\n")
    assert read(tmp_path) == [{"step": 0}]


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"st\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"line 2, is not JSON; expected .* Remove it"):
        read(tmp_path)


def test_a_folder_without_metrics_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no metrics\.jsonl; expected the folder of a run"):
        read(tmp_path)


def test_resuming_drops_lines_from_the_step_on_and_goes_on_in_the_same_file(tmp_path: Path) -> None:
    with made(tmp_path) as told:
        train(told, range(18))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 19, "lo')
    with made(tmp_path, first_step=10) as told:
        train(told, range(10, 20), lambda step: -float(step))
    lines = read(tmp_path)
    assert [line["step"] for line in lines] == [0, 4, 9, 10, 14, 19]
    assert [line["loss"] for line in lines] == [0, 2.5, 7, -10, -12.5, -17]


@pytest.mark.parametrize(("place", "moment"), [(os, "fsync"), (Path, "replace")])
def test_lines_are_dropped_all_at_once_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: Any, moment: str
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}}}\n' for step in range(5)))
    before = path.read_bytes()

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(place, moment, killed)
    with pytest.raises(KeyboardInterrupt):
        keep_before(path, 2)
    assert path.read_bytes() == before
    monkeypatch.undo()
    assert [row["step"] for row in keep_before(path, 2)] == [0, 1]


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(folder / "tensorboard"))
    board.Reload()
    return [(event.step, event.value) for event in board.Scalars(tag)]


def test_tensorboard_shows_the_same_and_forgets_what_a_resumed_run_does_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorboard.summary.writer import event_file_writer

    # The last part of a file's name, a number that goes up with every file of a process: 10 sorts before 9.
    monkeypatch.setattr(event_file_writer, "_global_uid", SimpleNamespace(get=iter((9, 10)).__next__))
    with made(tmp_path) as told:
        train(told, range(18))
    with made(tmp_path, first_step=10) as told:
        train(told, range(10, 20), lambda step: -float(step))
    assert scalars(tmp_path, "loss/loss") == [(line["step"], line["loss"]) for line in read(tmp_path)]
    assert [value for _, value in scalars(tmp_path, "run/lr")] == pytest.approx([0.1] * 6)


def test_tensorboard_does_not_import_tensorflow(tmp_path: Path) -> None:
    (tmp_path / "tensorflow.py").write_text("raise SystemExit('TensorFlow was imported')")
    script = f"""
        import sys; sys.path.insert(0, {str(tmp_path)!r})
        from pathlib import Path
        from compgen_fast.train.metrics import Metrics
        from compgen_fast.train.ranks import Ranks
        assert "tensorboard" not in sys.modules, "imported before it is needed"
        with Metrics(Path({str(tmp_path)!r}), steps=1, batch_size=1, flops_per_image=1, peak=1, first_step=0, every=1,
                     ranks=Ranks.alone()) as told:
            told.log(0, {{"loss": 1.0}}, 0.1, None)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("step 1/1 · loss 1 · ")


def shown(told: Metrics) -> str:
    file = told.console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def summary(told: Metrics) -> dict[str, str]:
    page = console()
    with page.capture() as captured:
        page.print(told.summary())
    lines = (line.strip() for line in captured.get().splitlines())
    return dict(re.split(r"  +", line, maxsplit=1) for line in lines if line)


def test_a_log_gets_a_plain_line_now_and_then_the_first_and_the_last(tmp_path: Path, clock: Clock) -> None:
    with made(tmp_path, every=1, steps=30) as told:
        for step in range(30):
            clock.pass_by(1.0)
            train(told, range(step, step + 1))
    lines = shown(told).splitlines()
    assert [line.split(" · ")[0] for line in lines] == ["step 1/30", "step 11/30", "step 21/30", "step 30/30"]
    assert lines[2] == "step 21/30 · loss 20 · 8.0 images/s · 2.4% of peak · 0% waiting for data · 0:00:09 left"
    assert "\x1b" not in shown(told)


def test_a_terminal_gets_a_bar(tmp_path: Path) -> None:
    with made(tmp_path, console=console(terminal=True), first_step=3) as told:
        train(told, range(3, 7))
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown(told))
    assert "step 7/20 ━" in text and "loss 5.5" in text and "of peak" in text and "left" in text


@pytest.mark.parametrize(("width", "kept"), [(80, False), (160, True)])
def test_a_narrow_terminal_gets_steps_loss_rate_and_time_on_one_line(tmp_path: Path, width: int, kept: bool) -> None:
    screen = Console(file=io.StringIO(), force_terminal=True, width=width)
    row = {"loss": 1.234e-5, "samples_per_second": 12345.67, "utilisation": 0.123, "data_wait": 0.01, "step": 99}
    with metrics._Bar(screen, 0, 100_000) as bar:
        bar.advance(99_998)
        bar.tell(row, 36_061.0)
    assert isinstance(screen.file, io.StringIO)
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.file.getvalue()).replace("\r", "\n").splitlines()
    last = [line for line in lines if line.strip()][-1]
    for part in ("step 99999/100000", "loss 1.234e-05", "12,345.7 images/s", "10:01:01 left"):
        assert part in last
    assert ("of peak" in last) == ("waiting for data" in last) == kept
    assert len(last) <= width and "…" not in last


def test_the_summary_tells_the_run_without_its_warm_up(tmp_path: Path, clock: Clock) -> None:
    with made(tmp_path) as told:
        for step in range(20):
            clock.pass_by(0.5 if step else 60.0)
            train(told, range(step, step + 1))
    cells = summary(told)
    assert cells["first loss"] == "0" and cells["last loss"] == "17"
    assert cells["images/s"] == "16.0" and cells["of peak"] == "4.8%" and cells["waiting for data"] == "0.0%"
    assert cells["wall time"] == "0:01:10" and cells["peak memory of a rank"].endswith(" MiB")


def test_the_summary_of_a_resumed_run_begins_with_the_first_loss_of_all(tmp_path: Path) -> None:
    with made(tmp_path) as told:
        train(told, range(10), lambda step: 111.0)
    with made(tmp_path, first_step=10) as told:
        train(told, range(10, 20))
    assert summary(told)["first loss"] == "111"


def test_a_run_without_a_step_has_a_summary(tmp_path: Path) -> None:
    with made(tmp_path) as told:
        pass
    assert summary(told)["last loss"] == "–"


@pytest.mark.parametrize(
    ("losses", "sentence"),
    [({"error": 1.0}, "expected one that is called loss"), ({"loss": 1.0, "lr": 1.0}, "give it another name")],
)
def test_losses_that_a_line_cannot_hold_are_refused(tmp_path: Path, losses: dict[str, float], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence), made(tmp_path) as told:
        told.log(0, losses, 0.1, None)


def test_steps_that_do_not_go_up_are_refused(tmp_path: Path) -> None:
    sentence = "step 3 after step 9; expected steps to go up"
    with pytest.raises(ValueError, match=sentence), made(tmp_path, first_step=10) as told:
        told.log(3, {"loss": 1.0}, 0.1, None)


@pytest.mark.parametrize("wrong", [{"every": 0}, {"steps": 0}, {"first_step": 21}, {"first_step": -1}])
def test_settings_that_make_no_run_are_refused(tmp_path: Path, wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"Metrics: every=.* expected"):
        made(tmp_path, **wrong)


RANK = """
    import sys, time
    from pathlib import Path
    import torch
    from compgen_fast.train.metrics import Metrics
    from compgen_fast.train.ranks import joined
    with joined("cpu") as ranks, Metrics(
        Path(sys.argv[1]) / str(ranks.rank), steps=7, batch_size=8, flops_per_image=1e6, peak=1e6, first_step=0,
        ranks=ranks, every=5,
    ) as told:
        for step in range(6):
            with told.waiting():
                time.sleep(0.05 * ranks.rank)
            row = told.log(step, {"loss": torch.tensor(float(step + ranks.rank))}, 0.1, None)
            if step == 4:
                assert row["loss"] == 3.0, row
"""


def test_ranks_share_one_line_and_only_the_first_writes(tmp_path: Path) -> None:
    run_two_ranks(RANK, tmp_path)
    lines = read(tmp_path / "0")
    assert [line["step"] for line in lines] == [0, 4, 5]
    assert [line["loss"] for line in lines] == [0.5, 3.0, 5.5]
    assert 0 < lines[1]["data_wait"] < 0.75  # rank 1 waits almost all the time, rank 0 never; the line has the mean
    assert lines[1]["utilisation"] == pytest.approx(lines[1]["samples_per_second"] / 2)
    assert not (tmp_path / "1").exists()
