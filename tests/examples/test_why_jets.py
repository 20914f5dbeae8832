"""Torch's derivatives through norms are still as wrong as docs/jets.md shows, and ours are as right."""

import pytest
import torch

from tests.examples.scripts import ROOT, printed_by

MENDED = f"torch {torch.__version__} no longer errs: update docs/jets.md and README"


@pytest.fixture(scope="module")
def table() -> str:
    try:
        return printed_by("why_jets.py")
    except RuntimeError as error:
        pytest.fail(f"{MENDED}. It refuses now: {error}")


def test_torch_is_silently_wrong_where_central_differences_side_with_jets(table: str) -> None:
    rows = [line.rsplit(maxsplit=3) for line in table.splitlines() if line.startswith("  ")]
    for what, by_torch, difference, ours in rows:
        assert ours == difference, f"{what}: {ours}, by central differences {difference}"
        assert abs(float(by_torch) - float(ours)) > 0.1 * abs(float(ours)), f"{MENDED} ({what.strip()})"
    assert len(rows) == 4


def test_the_page_shows_what_the_example_prints(table: str) -> None:
    message = "docs/jets.md shows another table; replace it by what `python examples/why_jets.py` prints"
    assert f"```text\n{table}```" in (ROOT / "docs" / "jets.md").read_text(), message
