"""What `inspect` prints and draws."""

from pathlib import Path

import imagecodecs
import numpy as np
from rich.console import Console

from compgen_fast.stream import inspect
from tests.stream.stub import Stub, packed


def test_inspect_prints_schema_and_counts_and_draws_samples(tmp_path: Path) -> None:
    packed(tmp_path / "out")
    console = Console(record=True, width=100, file=open("/dev/null", "w"))  # noqa: SIM115
    inspect(tmp_path / "out", picture=tmp_path / "grid.png", console=console)
    text = console.export_text()
    for expected in ("stub", "100 in 4 shards", "16 × 16, png", "background, thing", "disc, square, star", "0 to 1"):
        assert expected in text
    drawn = imagecodecs.png_decode((tmp_path / "grid.png").read_bytes())
    assert drawn.shape == (4 * 16, 8 * 16, 3)
    assert np.array_equal(drawn[:16, :16], Stub().image(0))
    assert np.array_equal(drawn[-16:, -16:], Stub().image(99))


def test_shards_are_inspected_without_their_plan(tmp_path: Path) -> None:
    packed(tmp_path)
    (tmp_path / "plan.json").unlink()
    assert inspect(tmp_path, console=Console(quiet=True)).samples == 100
