"""A suite as a command: exit codes, what goes where. The slots suite itself is only listed, not run."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from compgen_fast.bench import slots, suite
from compgen_fast.bench.harness import Case, Contender, Outputs
from tests.bench.fakes import make_case, product


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(suite, "QUICK", suite.Effort("quick", 0.0))


def run(ours: Contender, json: str | None = None) -> int:
    return suite.run_suite(lambda device: [make_case(ours)], quick=True, threads=1, json=json, device="cpu")


def test_green_run_returns_0_and_leaves_csv_and_chart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(Contender("ours", product)) == 0
    assert (tmp_path / "bench-results" / "fake.csv").exists()
    assert (tmp_path / "bench-results" / "fake.png").exists()
    assert "bench-results/fake.csv" in capsys.readouterr().out


def test_json_alone_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(Contender("ours", product), json="-") == 0
    captured = capsys.readouterr()
    assert [row["direction"] for row in json.loads(captured.out)] == ["forward", "backward", "full"]
    assert "product 5 × 3" in captured.err


def test_json_into_a_file(tmp_path: Path) -> None:
    assert run(Contender("ours", product), json="rows.json") == 0
    assert len(json.loads((tmp_path / "rows.json").read_text())) == 3


def test_closed_gate_returns_1_and_still_writes_the_rows(capsys: pytest.CaptureFixture[str]) -> None:
    def wrong(x: Tensor, y: Tensor) -> Outputs:
        return x * y + 1, x + y

    assert run(Contender("ours", wrong), json="-") == 1
    assert all(row["gate"].startswith("gate: ") for row in json.loads(capsys.readouterr().out))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_without_cuda_is_one_sentence_and_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert slots.run(device="cuda") == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_slots_lists_the_cases_of_the_issue() -> None:
    assert [case.name for case in slots.cases("cpu")] == [
        "slot_cross_attention B4 N4096 H4 S7 D32",
        "slot_cross_attention B1 N16384 H12 S7 D43",
        "slot_cross_attention B16 N1024 H8 S11 D64",
        "slot_competition B8 N4096 H1 S7 D64",
        "slot_competition B8 N1024 H1 S11 D128",
    ]


@pytest.mark.parametrize("case", slots.cases("cpu"), ids=lambda case: case.name)
def test_slots_peers_are_explicit(case: Case) -> None:
    assert [peer.name for peer in case.peers] == ["eager", "torch.compile", "SDPA", "flex_attention", "flash-attn"]


def test_commit_is_unknown_outside_of_a_checkout(tmp_path: Path) -> None:
    assert suite.commit(tmp_path) is None
