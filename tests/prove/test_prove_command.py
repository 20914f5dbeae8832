"""`cgf prove` on a ladder that was climbed elsewhere: what it prints, writes, refuses and returns."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter is on: start pytest without TRITON_INTERPRET", allow_module_level=True)
pytest.importorskip("triton")

from compgen_fast import cli
from compgen_fast.prove import budgets, command, ladder, page
from compgen_fast.prove.ahead_of_time import TARGETS
from compgen_fast.prove.catalogue import OPS
from compgen_fast.prove.ladder import Emulated, Failure, Ladder
from tests.prove.rows import CASE, made_emulation, made_row


class Climb:
    """Stands in the place of the real one and notes what it was asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.asked: list[tuple[tuple[str, ...], tuple[str, ...]]] = []
        self.found = self.all_good()
        self.budgets = tmp_path / "budgets.json"
        monkeypatch.setattr(budgets, "PATH", self.budgets)
        monkeypatch.setattr(ladder, "climb", self)
        monkeypatch.delenv("COLUMNS", raising=False)

    @staticmethod
    def all_good(**sm_80: Any) -> Ladder:
        rows = [made_row(**sm_80), *(made_row(name) for name in TARGETS if name != "sm_80")]
        why = "it uses wgmma, which the emulator does not execute"
        return Ladder(tuple(rows), (), (made_emulation(), made_emulation("sm_90", None, why)))

    def __call__(self, architectures: tuple[str, ...], ops: tuple[str, ...], console: Console) -> Ladder:
        self.asked.append((architectures, ops))
        return self.found

    def record(self) -> None:
        budgets.write(budgets.recorded(self.found.rows, {})[0], self.budgets)


@pytest.fixture
def climb(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Climb:
    return Climb(monkeypatch, tmp_path)


def test_it_ends_with_the_highest_rungs_and_why_no_higher(climb: Climb, capsys: pytest.CaptureFixture[str]) -> None:
    climb.record()
    assert cli.main(["prove"]) == 0
    said = capsys.readouterr().out
    table, summary = said.split("highest rung")
    first = next(line for line in table.splitlines() if "sm_80" in line)
    assert " ".join(first.split()) == (
        "forward_kernel, forward plain bf16 sm_80 64 0 8.0 K 8 128 b 128 b 50% registers 72 0.5"
    )
    assert " ".join(next(line for line in summary.splitlines() if "bf16" in line).split()) == (
        "slot_cross_attention forward bf16 5 4 4 4"
    )
    assert "sm_90 stops at 4: it uses wgmma, which the emulator does not execute: all" in summary
    assert max(map(len, said.splitlines())) <= 120
    assert climb.asked == [(tuple(TARGETS), OPS)]


def test_it_can_be_asked_for_one_kernel_and_some_architectures(climb: Climb) -> None:
    climb.record()
    cli.main(["prove", "--kernel", "jet_norm", "--arch", "sm_90,gfx942"])
    assert climb.asked == [(("sm_90", "gfx942"), ("jet_norm",))]


def test_a_broken_budget_is_named_and_the_exit_code_is_1(climb: Climb, capsys: pytest.CaptureFixture[str]) -> None:
    climb.record()
    climb.found = climb.all_good(registers=80)
    assert cli.main(["prove"]) == 1
    said = capsys.readouterr().out
    assert "registers 80, allowed at most 64; if it is meant, `cgf prove --record` records it" in said
    assert "slot_cross_attention forward bf16 3 4 4 4" in " ".join(said.split())


def test_recording_shows_the_difference_and_mends_the_exit_code(
    climb: Climb, capsys: pytest.CaptureFixture[str]
) -> None:
    climb.record()
    climb.found = climb.all_good(registers=80)
    assert cli.main(["prove", "--record"]) == 0
    assert "worse" in (said := capsys.readouterr().out) and "registers 64 → 80" in said
    assert cli.main(["prove"]) == 0


def test_a_spill_cannot_be_recorded(climb: Climb, capsys: pytest.CaptureFixture[str]) -> None:
    climb.record()
    before = climb.budgets.read_text()
    climb.found = climb.all_good(spills=8, registers=80)
    assert cli.main(["prove", "--record"]) == 1
    assert "spilled bytes 8, allowed 0; this cannot be recorded away" in capsys.readouterr().out
    assert climb.budgets.read_text() == before


def test_recording_everything_forgets_what_is_gone(climb: Climb) -> None:
    climb.record()
    all_there = climb.budgets.read_text()
    more = budgets.read(climb.budgets) | {"gone": {"sm_80": budgets.Budget(1, 1, 1, 1, False)}}
    budgets.write(more, climb.budgets)
    assert cli.main(["prove", "--record", "--arch", "sm_80"]) == 0 and "gone" in climb.budgets.read_text()
    assert cli.main(["prove", "--record"]) == 0 and climb.budgets.read_text() == all_there


def test_a_kernel_that_does_not_compile_or_agree_is_a_failure(climb: Climb, capsys: pytest.CaptureFixture[str]) -> None:
    climb.record()
    good = climb.found
    crashed = Failure("x: _y_kernel", "sm_100", frozenset({CASE.use}), "not compiled: the compiler crashed")
    climb.found = Ladder(good.rows, (crashed,), good.emulations)
    assert cli.main(["prove"]) == 1
    assert "x: _y_kernel on sm_100: not compiled: the compiler crashed" in capsys.readouterr().out
    far = Emulated(good.emulations[0].case, "sm_80", 3.0, "emulated, it is 3.0 times as far as allowed")
    climb.found = Ladder(good.rows, (), (far,))
    assert cli.main(["prove"]) == 1
    assert "3.0 times as far as allowed" in capsys.readouterr().out


def test_json_is_all_there_is_on_stdout(climb: Climb, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    climb.record()
    assert cli.main(["prove", "--json", "-"]) == 0
    told = json.loads(capsys.readouterr().out)
    climb.found = climb.all_good(registers=80)  # and so are complaints
    assert cli.main(["prove", "--json", "-"]) == 1
    assert json.loads((captured := capsys.readouterr()).out)["breaches"] and "registers 80" in captured.err
    climb.found = climb.all_good()
    row = told["kernels"][0]
    assert (row["op"], row["dtype"], row["registers"], row["spills"]) == ("slot_cross_attention", "bf16", 64, 0)
    assert row["occupancy"] == {"blocks": 8, "share": 0.5, "limit": "registers"} and row["instructions"]["HMMA"] == 8
    assert {(each["architecture"], each["rung"]) for each in told["rungs"]} == {
        ("sm_80", 5), ("sm_90", 4), ("sm_100", 4), ("gfx942", 4),
    }  # fmt: skip
    assert cli.main(["prove", "--json", str(tmp_path / "rows.json")]) == 0
    assert json.loads((tmp_path / "rows.json").read_text()) == told


def test_the_page_keeps_what_is_written_by_hand(climb: Climb, tmp_path: Path) -> None:
    climb.record()
    path = tmp_path / "page.md"
    path.write_text(f"# Title\n\nby hand\n\n{page.BEGIN}\nold\n{page.END}\n\nthe end\n")
    assert cli.main(["prove", "--page", str(path)]) == 0
    text = path.read_text()
    assert text.startswith("# Title\n\nby hand\n") and text.endswith("\n\nthe end\n") and "\nold\n" not in text
    assert "| slot_cross_attention | forward | bf16 | 5 | 4 | 4 | 4 |" in text
    assert "| forward_kernel | slot_cross_attention forward plain bf16" in text and "Nothing spills" in text
    assert cli.main(["prove", "--page", str(path)]) == 0 and path.read_text() == text


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--kernel", "slots"], "'slots' is no kernel; there are slot_cross_attention, slot_competition"),
        (["--arch", "sm_80,sm_70"], "'sm_70' is no architecture; there are sm_80, sm_90, sm_100, gfx942"),
        (["--json", "nowhere/rows.json"], "the folder nowhere does not exist"),
        (["--page", "docs/prove.md", "--arch", "sm_80"], "leave out --kernel and --arch"),
    ],
)
def test_the_impossible_is_refused_in_a_sentence(
    climb: Climb, capsys: pytest.CaptureFixture[str], arguments: list[str], complaint: str
) -> None:
    assert cli.main(["prove", *arguments]) == 2
    said = capsys.readouterr().err
    assert complaint in said and said.count("\n") == 1 and not climb.asked


def test_a_page_without_a_place_is_refused(climb: Climb, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    climb.record()
    (tmp_path / "page.md").write_text("# Title\n")
    assert cli.main(["prove", "--page", str(tmp_path / "page.md")]) == 2
    assert "has no place for what is generated" in capsys.readouterr().err


def test_the_interpreter_is_refused(
    climb: Climb, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert cli.main(["prove"]) == 2
    assert "TRITON_INTERPRET is set" in capsys.readouterr().err


def test_a_machine_without_triton_is_told_so(
    climb: Climb, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    assert cli.main(["prove"]) == 2
    assert "triton, which is not installed" in capsys.readouterr().err
