"""How high a kernel has climbed, what stops it, and what is remembered from one run to the next."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter is on: start pytest without TRITON_INTERPRET", allow_module_level=True)
pytest.importorskip("triton")

from compgen_fast.prove import ladder
from compgen_fast.prove.ahead_of_time import TARGETS, Launch, cost, recorded_launches
from compgen_fast.prove.catalogue import RAGGED, Case, compilations
from compgen_fast.prove.ladder import Failure, Job, Ladder, Row, in_processes, steps
from tests.prove.rows import CASE, made_emulation, made_row


def climbed(*rows: Row, **others: Any) -> tuple[int, str]:
    """The one step of the one architecture of these rows."""
    found = Ladder(rows, others.pop("failures", ()), others.pop("emulations", ()))
    ((step,),) = [tuple(each.values()) for each in steps(found, others.pop("broken", frozenset())).values()]
    return step


def test_a_kernel_that_was_emulated_stands_on_rung_5() -> None:
    assert climbed(made_row(), emulations=(made_emulation(),)) == (5, "no GPU has run it")


def test_a_kernel_that_is_far_from_the_formula_stops_at_4() -> None:
    wrong = made_emulation(error=3.0, why="emulated, it is 3.0 times as far from the formula as allowed")
    assert climbed(made_row(), emulations=(made_emulation(), wrong)) == (4, wrong.why)


def test_a_kernel_over_its_budget_stops_at_3() -> None:
    row = made_row()
    broken = frozenset({(row.name, "sm_80")})
    rung, why = climbed(row, emulations=(made_emulation(),), broken=broken)
    assert rung == 3 and why == "_forward_kernel breaks its budget"


def test_a_kernel_that_was_not_compiled_stops_at_3() -> None:
    failure = Failure("x: _sum_kernel", "sm_80", frozenset({CASE.use}), "not compiled: the compiler crashed")
    assert climbed(made_row(), failures=(failure,)) == (3, failure.why)


@pytest.mark.parametrize(
    ("architecture", "instructions", "why"),
    [
        ("sm_100", {"UTCHMMA": 4}, "it uses tcgen05, which the emulator does not execute"),
        ("sm_100", {"HMMA": 4}, "not emulated: code for sm_80 is"),
        ("gfx942", {"v_mfma_f32_16x16x16_bf16": 4}, "not emulated: its instructions are not PTX"),
    ],
)
def test_what_is_not_emulated_says_why(architecture: str, instructions: dict[str, int], why: str) -> None:
    assert climbed(made_row(architecture, instructions=instructions)) == (4, why)


def test_without_the_tests_that_prove_them_the_lower_rungs_are_not_reached(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    contract, _, launchers = ladder.TESTS[CASE.op]
    monkeypatch.setattr(ladder, "ROOT", tmp_path)
    assert climbed(made_row()) == (0, f"{contract} is not here")
    (tmp_path / contract).parent.mkdir(parents=True)
    (tmp_path / contract).touch()
    assert climbed(made_row()) == (2, f"{launchers} is not here")


def test_the_files_that_prove_the_lower_rungs_are_there() -> None:
    for files in ladder.TESTS.values():
        for file in files:
            assert (ladder.ROOT / file).exists(), file


def smallest() -> tuple[str, Launch]:
    found = next(each for each in compilations("sm_80").values() if each.launch.name == "_sum_kernel")
    return found.name, found.launch


def test_what_was_compiled_is_remembered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    name, _ = smallest()
    first = ladder.compiled(compilations("sm_80")[name], "sm_80")
    monkeypatch.setattr(ladder, "cost", lambda *of: pytest.fail("compiled again"))
    assert ladder.compiled(compilations("sm_80")[name], "sm_80") == first
    monkeypatch.setattr(ladder, "_content", lambda names: "other tools")
    with pytest.raises(pytest.fail.Exception, match="compiled again"):
        ladder.compiled(compilations("sm_80")[name], "sm_80")


def test_a_failure_to_compile_is_said_and_not_remembered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def refuse(*of: Any) -> None:
        raise ValueError("no such instruction")

    monkeypatch.setattr(ladder, "cost", refuse)
    name, _ = smallest()
    with pytest.raises(RuntimeError, match="not compiled: ValueError: no such instruction"):
        ladder.compiled(compilations("sm_80")[name], "sm_80")
    assert not list(tmp_path.rglob("*.*")) and not list((tmp_path / "compgen_fast").glob("prove/*"))


def crash_on_three(job: Job) -> dict[str, Any]:
    if job.name == "3":
        os._exit(1)
    return {"found": int(job.name)}


def test_a_compiler_that_crashes_is_named_and_the_others_go_on() -> None:
    jobs = [Job("compile", "sm_80", str(place)) for place in range(6)]
    results = dict(in_processes(jobs, crash_on_three))
    assert results.pop(jobs[3]) == {"why": "not compiled: the compiler crashed"}
    assert results == {job: {"found": int(job.name)} for job in jobs if job.name != "3"}


@pytest.mark.parametrize("architecture", ["sm_80", "gfx942"])
def test_figures_count_the_instructions_of_the_machine(architecture: str) -> None:
    _, launch = smallest()
    figures = cost(launch, TARGETS[architecture])
    loads, adds = {"sm_80": ("LDG", "FADD"), "gfx942": ("buffer_load_dword", "v_pk_add_f32")}[architecture]
    assert figures.instructions[loads] == sum(figures.loads.values())
    assert figures.instructions[adds] > 0 and "NOP" not in figures.instructions


def test_the_time_of_a_compilation_is_known_unless_it_was_cached(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    _, launch = smallest()
    seconds = cost(launch, TARGETS["sm_80"]).compile_seconds
    assert seconds is not None and 0.01 < seconds < 60
    assert cost(launch, TARGETS["sm_80"]).compile_seconds is None


def test_an_unknown_instruction_is_named_without_its_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*of: Any) -> None:
        raise NotImplementedError("launch.py:179: the emulator does not know 'stmatrix.sync.x4.b16 [%r4], {%r503}'")

    monkeypatch.setattr(Case, "launch", refuse)
    monkeypatch.setattr(ladder, "launches", lambda *of: ())
    assert ladder.emulate(RAGGED[0], "sm_90")["why"] == "not emulated: the emulator does not know stmatrix"


def test_recording_launches_runs_nothing() -> None:
    _, launch = smallest()
    x = torch.zeros(64)
    with recorded_launches() as found:
        launch.kernel[(1,)](x, x, None, 64, 1, BLOCK_P=8, BLOCK=64)
    assert [each.name for each in found] == ["_sum_kernel"] and not x.any()
