"""Rows in files and on the screen."""

import csv
import io
import json
from dataclasses import fields
from pathlib import Path

import pytest
from rich.console import Console

from compgen_fast.bench import report
from compgen_fast.bench.harness import Row
from tests.bench.fakes import make_row

ASKED_FOR = (
    "suite", "case", "direction", "peer", "ratio", "ratio_low", "ratio_high", "peak_ratio", "error", "threads", "dtype",
)  # fmt: skip
COLUMNS = tuple(field.name for field in fields(Row))
UNSUPPORTED = make_row(peer="flash-attn", ratio=None, ratio_low=None, ratio_high=None, unsupported="needs CUDA")
LESS = make_row(peer="SDPA", ratio=0.9, ratio_low=0.8, ratio_high=1.0, does_less="no slot weights")


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def shown(rows: list[Row], width: int = 100) -> str:
    console = Console(width=width, file=io.StringIO())
    with console.capture() as captured:
        console.print(report.table("product", rows))
    return captured.get()


def test_csv_grows_under_one_header(tmp_path: Path) -> None:
    path = tmp_path / "results" / "fake.csv"
    report.append_csv([make_row(), UNSUPPORTED], path)
    report.append_csv([make_row(peer="other")], path)
    assert [row["peer"] for row in read(path)] == ["eager", "flash-attn", "other"]
    assert path.read_text().count("suite,case") == 1
    assert read(path)[1]["ratio"] == ""


def test_csv_with_other_columns_is_kept_aside(tmp_path: Path) -> None:
    path = tmp_path / "fake.csv"
    path.write_text("suite,speed\nfake,9\n")
    report.append_csv([make_row()], path)
    assert (tmp_path / "fake.old1.csv").read_text() == "suite,speed\nfake,9\n"
    assert len(read(path)) == 1


def test_columns_begin_with_those_other_tools_read() -> None:
    assert COLUMNS[: len(ASKED_FOR)] == ASKED_FOR


def test_json_has_the_same_keys_and_null_for_nothing() -> None:
    first, second = json.loads(report.to_json([make_row(), UNSUPPORTED]))
    assert tuple(first) == COLUMNS
    assert second["ratio"] is None
    assert second["unsupported"] == "needs CUDA"


def test_json_has_no_infinity() -> None:
    (row,) = json.loads(report.to_json([make_row(error=float("inf"))]), parse_constant=pytest.fail)
    assert row["error"] is None


def test_table_shows_ratio_spread_and_reasons() -> None:
    text = shown([make_row(), LESS, UNSUPPORTED])
    assert "2.00×" in text
    assert "1.50–2.50" in text
    assert "SDPA*" in text
    assert "* SDPA does less: no slot weights" in text
    assert "unsupported: flash-attn: needs CUDA" in text


def test_table_of_a_closed_gate_shows_the_verdict_and_no_number() -> None:
    text = shown([make_row(ratio=None, gate="gate: error of dk is 3e-02")])
    assert "gate: error of dk is 3e-02" in text
    assert "×" not in text


def test_table_fits_in_100_columns() -> None:
    wide = make_row(our_ms=12345.67, peer_ms=23456.78, ratio=123.45, ratio_low=100.01, ratio_high=150.02)
    assert all(len(line.rstrip()) <= 100 for line in shown([wide], width=100).splitlines())
    assert "100.01–150.02" in shown([wide], width=100)


def test_summary_names_the_fastest_peer_with_the_same_outputs() -> None:
    rows = [make_row(), make_row(peer="compiled", ratio=1.7), LESS]
    assert report.summary(rows).startswith("full: 1.70× compiled")
    assert "1.01× inputs + outputs" in report.summary(rows)


@pytest.mark.parametrize(
    "rows", [[make_row(), LESS, UNSUPPORTED], [UNSUPPORTED], [make_row(ratio=None, gate="gate: no")]]
)
def test_chart_is_written(tmp_path: Path, rows: list[Row]) -> None:
    path = tmp_path / "charts" / "fake.png"
    report.draw(rows, path)
    assert path.read_bytes().startswith(b"\x89PNG")
