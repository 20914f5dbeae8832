"""Compiled kernels that were never compiled: rows of the ladder with figures of one's choice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from compgen_fast.prove.ahead_of_time import Figures
from compgen_fast.prove.catalogue import RAGGED, REAL, Case
from compgen_fast.prove.ladder import Emulated, Row

FIGURES = Figures(
    registers=64,
    spills=0,
    shared=8192,
    matrix_instructions=8,
    loads={128: 64},
    stores={128: 64},
    instructions={"HMMA": 8, "LDG": 64},
    compile_seconds=0.5,
)
CASE = next(case for case in REAL if case.name == "slot_cross_attention forward plain bf16 B4 N4096 H4 S7 D64")
OPTIONS = {"BLOCK_N": 64, "BLOCK_D": 64, "BLOCK_S": 16, "num_warps": 4, "num_stages": 2}


def made_row(architecture: str = "sm_80", case: Case = CASE, kernel: str = "_forward_kernel", **figures: Any) -> Row:
    """A good row, but for these figures."""
    name = f"{case.name}: {kernel}"
    used = frozenset({case.use})
    return Row(name, architecture, case, kernel, case in REAL, OPTIONS, replace(FIGURES, **figures), used)


def made_emulation(architecture: str = "sm_80", error: float | None = 0.2, why: str = "") -> Emulated:
    case = next(case for case in RAGGED if case.use == CASE.use)
    return Emulated(case, architecture, error, why)
