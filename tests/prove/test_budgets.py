"""Every compiled kernel keeps its budget; kernels that cost too much, made up or broken on purpose, do not."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter is on: start pytest without TRITON_INTERPRET", allow_module_level=True)
pytest.importorskip("triton")

import triton
import triton.language as tl

from compgen_fast.prove.ahead_of_time import TARGETS, Figures, cost, recorded_launches
from compgen_fast.prove.budgets import (
    PATH,
    TILES,
    Budget,
    Budgets,
    breaches,
    broken_rules,
    found,
    multiplies,
    read,
    recorded,
    required_width,
    write,
)
from compgen_fast.prove.catalogue import BF16, FP16, FP32, REAL, Case, compilations, shipped
from compgen_fast.prove.chips import CHIPS
from compgen_fast.prove.ladder import Row, compiled
from tests.prove.rows import CASE, made_row

# Compiling everything for all four architectures takes minutes, which is for `cgf prove`. fp16 compiles like bf16.
CHECKED = [
    *((case, architecture) for architecture in TARGETS for case in REAL if case.dtype != FP16),
    *((case, "sm_80") for case in dict.fromkeys(shipped("sm_80")) if case not in REAL),
]


def name(value: object) -> str:
    return value.name if isinstance(value, Case) else str(value)


@pytest.mark.parametrize(("case", "architecture"), CHECKED, ids=name)
def test_every_kernel_keeps_its_budget(case: Case, architecture: str) -> None:
    mine = [each for each in compilations(architecture).values() if each.case == case]
    broken = breaches([compiled(each, architecture) for each in mine], read(PATH))
    assert not broken, "\n".join(map(str, broken))


@pytest.mark.parametrize("architecture", TARGETS)
def test_the_budgets_are_of_what_there_is(architecture: str) -> None:
    """Nothing is without a budget, and no budget is of something that is gone."""
    budgets = read(PATH)
    assert {name for name, chips in budgets.items() if architecture in chips} == set(compilations(architecture))


def test_the_file_is_as_it_is_written(tmp_path: Path) -> None:
    write(read(PATH), tmp_path / "budgets.json")
    assert (tmp_path / "budgets.json").read_text() == PATH.read_text()
    assert all(len(line) < 300 for line in PATH.read_text().splitlines())
    assert json.loads(PATH.read_text())["columns"] == list(Budget._fields)


def test_every_kernel_that_moves_pixels_has_a_width_to_keep() -> None:
    kernels = {(each.case.op, each.launch.name) for each in compilations("sm_80").values()}
    assert set(TILES) <= kernels
    assert {kernel for _, kernel in kernels} - {kernel for _, kernel in TILES} == {"_sum_kernel", "_normalise_kernel"}


# ------------------------------------------------------------------------------------------ made up


def of(row: Row) -> Budgets:
    return {row.name: {row.architecture: found(row)}}


def sentence(broken: Row, budgets: Budgets) -> str:
    (breach,) = breaches([broken], budgets)
    return str(breach)


def test_a_kernel_within_its_budget_is_left_alone() -> None:
    assert not breaches([made_row()], of(made_row()))
    assert not breaches([made_row(registers=63, shared=0)], of(made_row()))


def test_one_register_more_is_too_many() -> None:
    said = sentence(made_row(registers=65), of(made_row()))
    assert said == (
        f"{CASE.name}: _forward_kernel on sm_80: registers 65, allowed at most 64; "
        "if it is meant, `cgf prove --record` records it"
    )


def test_a_spill_is_a_breach_whatever_was_recorded() -> None:
    spilling = made_row(spills=16)
    assert sentence(spilling, of(spilling)) == (
        f"{CASE.name}: _forward_kernel on sm_80: spilled bytes 16, allowed 0; this cannot be recorded away"
    )


def test_missing_tensor_cores_are_a_breach() -> None:
    plain = made_row(matrix_instructions=0)
    assert "matrix instructions 0, allowed some, in 16 bit" in sentence(plain, of(plain))
    exact = replace(CASE, dtype=FP32)  # where fp32 had them, it must keep them
    assert "matrix instructions none, allowed some" in sentence(
        made_row(case=exact, matrix_instructions=0), of(made_row(case=exact))
    )


def test_two_programs_fit_side_by_side_at_real_shapes() -> None:
    half = CHIPS["sm_80"].shared_per_block // 2
    assert not breaches([made_row(shared=half)], of(made_row(shared=half)))
    assert "room for 2" in sentence(made_row(shared=half + 1), of(made_row(shared=half + 1)))


def test_a_kernel_without_a_budget_is_a_breach() -> None:
    assert "budget none, allowed one" in sentence(made_row(), {})


def test_narrow_loads_of_aligned_pixels_are_a_breach_whatever_was_recorded() -> None:
    narrow = made_row(loads={16: 256})
    assert required_width(narrow, "load") == (128, 64 * 64 * 2)
    assert "bytes that loads of 128 bits and more carry 0, allowed at least 8192" in sentence(narrow, of(narrow))
    assert "stores of 128 bits" in sentence(made_row(stores={64: 64}), of(made_row(stores={64: 64})))


def test_what_is_read_in_chunks_is_stored_whole() -> None:
    chunks = replace(made_row(), options=made_row().options | {"OWN": 128})
    assert required_width(chunks, "load") == (128, 64 * 64 * 2)
    assert required_width(chunks, "store") == (128, 64 * 128 * 2)


def test_rows_that_are_not_aligned_may_be_loaded_narrowly() -> None:
    odd = made_row(case=replace(CASE, sizes=(1, 16384, 12, 7, 43)), loads={16: 8}, stores={16: 8})
    assert odd.real and not list(broken_rules(odd))


def test_the_matrix_units_of_gfx942_leave_64_bits_to_store() -> None:
    row = made_row("gfx942")
    assert multiplies(row) and required_width(row, "store")[0] == 64 and required_width(row, "load")[0] == 128


def test_recording_shows_what_changes_and_for_better_or_worse(tmp_path: Path) -> None:
    old = of(made_row(registers=60, shared=9000)) | {"gone": {"sm_80": Budget(1, 1, 1, 1, False)}}
    new, changes = recorded([made_row(), made_row("sm_90")], old, gone={("gone", "sm_80")})
    assert [str(change).split(": ")[-1] for change in changes if change.verdict == "better"] == ["shared 9000 → 8192"]
    assert [str(change).split(": ")[-1] for change in changes if change.verdict == "worse"] == ["registers 60 → 64"]
    assert [change.name for change in changes if change.verdict == "gone"] == ["gone"]
    assert [change.architecture for change in changes if change.verdict == "new"] == ["sm_90"]
    write(new, tmp_path / "budgets.json")
    assert read(tmp_path / "budgets.json") == new and not breaches([made_row()], new)
    kept, _ = recorded([made_row()], old)
    assert "gone" in kept
    name = made_row().name
    fewer, _ = recorded([made_row("sm_90")], new, gone={(name, "sm_80")})
    assert [*fewer[name]] == ["sm_90"]  # gone from one architecture, and still there on another


# ------------------------------------------------------------------------------------------ broken on purpose


@triton.jit(do_not_specialize=["step"])
def _scaled_kernel(x, y, step, KNOWN: tl.constexpr, BLOCK: tl.constexpr):
    """y = 2 x, where the compiler may not know that neighbours in the tile are neighbours in memory."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    from_x = at if KNOWN else at * step
    tl.store(y + at, 2 * tl.load(x + from_x))


def scaled(known: bool, architecture: str) -> Figures:
    x = torch.empty(4096, dtype=BF16, device="meta")
    with recorded_launches() as launches:
        _scaled_kernel[(2,)](x, x, 1, KNOWN=known, BLOCK=2048, enable_fp_fusion=False)
    return cost(launches[0], TARGETS[architecture])


@pytest.mark.parametrize("architecture", TARGETS)
def test_loads_of_2_bytes_where_16_are_possible_break_the_budget(architecture: str) -> None:
    case = next(case for case in REAL if case.op == "jet_pointwise")
    good, broken = (
        replace(made_row(architecture, case, "_scaled_kernel"), figures=scaled(known, architecture))
        for known in (True, False)
    )
    assert not breaches([good], of(good))
    assert set(broken.figures.loads) == {16}
    (said,) = [str(breach) for breach in breaches([broken], of(good)) if breach.what == "loads"]
    assert "loads 0 % of the bytes in instructions of 128 bits" in said and "of 16 bits" in said
    assert "allowed at least 100 %" in said
