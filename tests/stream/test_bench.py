"""The suite `stream`: its gate, its rows and its files, on data too small to mean anything."""

import csv
import json
from pathlib import Path

import pytest

from compgen_fast.bench import stream as suite
from compgen_fast.bench import stream_peers


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(suite, "SIDES", (16,))
    monkeypatch.setattr(suite, "SAMPLES", {16: 64})
    monkeypatch.setattr(suite, "FORMATS", ("raw", "png", "jpg"))
    monkeypatch.setattr(suite, "WORKERS", (0,))
    monkeypatch.setattr(suite, "RESUMED", "jpg16")
    monkeypatch.setattr(suite, "QUICK", suite.Effort(0.002, 2))
    monkeypatch.setattr(stream_peers, "BATCH", 8)
    return tmp_path


def test_a_run_prints_and_writes_a_row_per_reader(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert suite.run(quick=True, json="rows.json") == suite.GREEN
    rows = json.loads((tiny / "rows.json").read_text())
    readers = {row["reader"] for row in rows}
    assert {"ours", "webdataset + PIL", "tar bytes", "decode only"} <= readers
    for row in rows:
        assert (row["ratio"] is not None) != bool(row["unsupported"])
        if row["reader"] == "ours":
            assert row["ratio"] == 1
    with (tiny / "bench-results" / "stream.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(rows)
    shown = capsys.readouterr().out
    assert "png 16 px, 0 workers" in shown and "resume" in shown and "memory of shuffling" in shown


def test_a_wrong_reader_has_no_speed(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "FORMATS", ("jpg",))
    monkeypatch.setattr(stream_peers, "pil_image", lambda content: 255 * suite.np.eye(16)[..., None])
    assert suite.run(quick=True, json="rows.json") == suite.RED
    rows = json.loads((tiny / "rows.json").read_text())
    assert all(row["ratio"] is None and "differs from what Pillow decodes" in row["gate"] for row in rows)


def test_a_device_makes_no_sense_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert suite.run(device="cuda") == suite.IMPOSSIBLE
    assert "which the CPU does" in capsys.readouterr().err
