"""The contract can fail: four mistakes that are easy to make, each put into the Triton source, each turn it red.

A copy of the tree is changed in one line and the contract's oracle comparison runs on it, in Triton's interpreter.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COMPARISON = "tests/ops/test_contract.py::test_outputs_and_gradients_are_as_exact_as_eager"
CROSS_ATTENTION, COMPETITION = "slot_cross_attention", "slot_competition"
MUTANTS = {
    "zero-padded slot": (
        CROSS_ATTENTION,
        's = tl.where(alive[None, :], s, float("-inf"))',
        "s = tl.where(alive[None, :], s, 0.0)",
    ),
    "dropped weight-gradient": (CROSS_ATTENTION, "dp += dw_tile.to(tl.float32) / H", "dp += 0.0"),
    "wrong scale": (
        CROSS_ATTENTION,
        "head_sum(p * dp, S, BLOCK_S, PACK)) * scale",
        "head_sum(p * dp, S, BLOCK_S, PACK))",
    ),
    "missing renormalisation": (
        COMPETITION,
        "(tl.sum(u_sum, 0) * _reciprocal(total)).to(u.dtype.element_ty)",
        "tl.sum(u_sum, 0).to(u.dtype.element_ty)",
    ),
}


def contract_on(tree: Path, op: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-k",
        f"float32 and {op}",
        COMPARISON,
    ]
    environment = os.environ | {"COMPGEN_BACKEND": "triton", "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what the contract needs, with kernels/ where the installed package has it."""
    skip = shutil.ignore_patterns("__pycache__", "*.so")
    for source, target in (("compgen_fast", "compgen_fast"), ("kernels", "compgen_fast/kernels"), ("tests", "tests")):
        shutil.copytree(ROOT / source, tmp_path / target, ignore=skip)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


@pytest.mark.parametrize("op", [CROSS_ATTENTION, COMPETITION])
def test_the_contract_is_green_on_an_unchanged_copy(tree: Path, op: str) -> None:
    done = contract_on(tree, op)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_turns_the_contract_red(tree: Path, mutant: str) -> None:
    op, right, wrong = MUTANTS[mutant]
    kernel = tree / f"compgen_fast/kernels/{op}.py"
    source = kernel.read_text()
    assert source.count(right) == 1, f"the line that {mutant!r} changes is no longer in kernels/{op}.py: {right}"
    kernel.write_text(source.replace(right, wrong))
    done = contract_on(tree, op)
    assert done.returncode == 1 and f"{op} " in done.stdout and "bound" in done.stdout, done.stdout
