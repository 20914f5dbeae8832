"""The catalogue calls every kernel, selects every shipped configuration, and compiles nothing twice."""

from __future__ import annotations

import os
import re

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter is on: start pytest without TRITON_INTERPRET", allow_module_level=True)
pytest.importorskip("triton")

from compgen_fast.kernels.launch import Config, owned_columns
from compgen_fast.prove.ahead_of_time import TARGETS, identity
from compgen_fast.prove.catalogue import (
    BF16,
    KERNELS,
    OPS,
    RAGGED,
    REAL,
    SHORT,
    Case,
    Direction,
    ShippedRow,
    compilations,
    directions,
    launches,
    shipped,
    shipped_rows,
)

SHARED_FILES = {"__init__", "launch", "jet"}


def jitted() -> set[str]:
    """The names of all kernels in kernels/."""
    found = re.compile(r"^def (_\w+_kernel)\(", re.MULTILINE)
    return {name for path in KERNELS.glob("*.py") for name in found.findall(path.read_text())}


def test_every_file_of_kernels_is_in_the_catalogue() -> None:
    assert {path.stem for path in KERNELS.glob("*.py")} - SHARED_FILES == set(OPS)


def test_every_kernel_is_compiled_at_a_real_shape_but_for_that_of_more_heads_than_anyone_has() -> None:
    assert {launch.name for case in REAL for launch in launches(case, "sm_80")} == jitted() - {"_rows_kernel"}
    assert {each.launch.name for each in compilations("sm_80").values()} == jitted()


def test_every_kernel_is_emulated() -> None:
    assert {launch.name for case in RAGGED for launch in launches(case, "sm_80")} == jitted()


@pytest.mark.parametrize("cases", [REAL, RAGGED], ids=["real", "ragged"])
def test_every_op_is_there_in_every_direction_and_dtype(cases: tuple[Case, ...]) -> None:
    expected = {
        (op, direction, dtype) for op in OPS for direction in directions(op) for dtype in ("bf16", "fp16", "fp32")
    }
    assert {case.use for case in cases} == expected


@pytest.mark.parametrize("architecture", TARGETS)
def test_every_shipped_configuration_is_selected_by_its_cases(architecture: str) -> None:
    for row in shipped_rows(architecture):
        for case in row.cases():
            assert any(sets(row, launch.options) for launch in launches(case, architecture)), f"{row} by {case.name}"


def sets(row: ShippedRow, options: dict[str, int]) -> bool:
    tile = options.get("BLOCK_N", options.get("BLOCK_R"))
    return (tile, options.get("BLOCK_D"), options.get("num_warps")) == (row.BLOCK_N, row.BLOCK_D, row.num_warps)


@pytest.mark.parametrize("architecture", TARGETS)
def test_nothing_is_compiled_twice(architecture: str) -> None:
    found = compilations(architecture)
    same = {identity(each.launch, TARGETS[architecture]) for each in found.values()}
    made = sum(len(launches(case, architecture)) for case in (*REAL, *shipped(architecture)))
    assert len(same) == len(found) < made


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_competition_reads_its_inputs_once_while_a_tile_holds_all_heads(direction: Direction) -> None:
    def kernels(heads: int) -> set[str]:
        case = Case("slot_competition", direction, "plain", BF16, (1, 256, heads, 7, 64))
        return {launch.name for launch in launches(case, "sm_80")}

    assert "_rows_kernel" not in kernels(4)
    assert "_rows_kernel" in kernels(5)


def test_a_program_owns_all_columns_whose_sums_it_has_registers_for() -> None:
    few, many = Config(16, 32, 16, 8, 1), Config(16, 32, 64, 8, 1)
    assert [owned_columns(few, width, 1024) for width in (7, 43, 64, 256)] == [16, 64, 64, 64]
    assert [owned_columns(many, width, 1024) for width in (43, 256)] == [32, 32]  # no fewer than are read at a time


def test_a_kernel_that_several_ops_launch_knows_all_of_them() -> None:
    shared = [each for each in compilations("sm_80").values() if each.launch.name == "_sum_kernel"]
    assert any(len({use.op for use in each.users}) > 1 for each in shared)


@pytest.mark.parametrize("case", [*RAGGED, *REAL[:1]], ids=lambda case: case.name)
def test_what_is_compiled_has_the_layout_of_what_is_emulated(case: Case) -> None:
    for meta, real in zip(case.arguments(values=False), case.arguments(values=True), strict=True):
        assert isinstance(meta, torch.Tensor) == isinstance(real, torch.Tensor)
        if isinstance(meta, torch.Tensor):
            assert (meta.shape, meta.dtype, meta.stride()) == (real.shape, real.dtype, real.stride())


@pytest.mark.parametrize("case", RAGGED, ids=lambda case: case.name)
def test_values_depend_on_the_case_alone_and_the_formula_leaves_them(case: Case) -> None:
    first, second = case.arguments(values=True), case.arguments(values=True)
    case.reference(first)
    for one, other in zip(case.inputs(first), case.inputs(second), strict=True):
        assert torch.equal(one, other)


def test_names_are_unique() -> None:
    for cases in (REAL, RAGGED):
        assert len({case.name for case in cases}) == len(cases)
    assert REAL[0].name == f"slot_cross_attention forward plain {SHORT[REAL[0].dtype]} B1 N16384 H12 S7 D43"
