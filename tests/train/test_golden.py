"""The first steps of `cgf train slot_vae_cpu` are those that were checked in.

A change that should not change training must not change these. One that should is made known by writing them anew:
`python -m tests.train.test_golden`, and saying why in the commit.

Tolerance: another number of threads or another processor sums in another order. Over 20 steps that moved the loss by at
most 2e-7 of itself here; a change of the mathematics (a scale, a warm-up, a draw) moves it by percents.
"""

import json
import tempfile
from pathlib import Path

import pytest

from tests.train.runs import finish, losses, start_recipe

GOLDEN = Path(__file__).parent / "golden" / "slot_vae_cpu.json"
STEPS = 20
TOLERANCE = 1e-3


def first_losses(folder: Path) -> list[float]:
    out = folder / "run"
    settings = ("--steps", str(STEPS), "--log-every", "1", "--out", str(out), "--data.cache", str(folder / "data"))
    finish(start_recipe("slot_vae_cpu", *settings))
    return losses(out)


def test_the_first_losses_of_slot_vae_cpu_are_the_golden_ones(tmp_path: Path) -> None:
    assert first_losses(tmp_path) == pytest.approx(json.loads(GOLDEN.read_text()), rel=TOLERANCE)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        GOLDEN.write_text(json.dumps(first_losses(Path(folder)), indent=1) + "\n")
