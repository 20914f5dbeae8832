"""Choosing configurations: the space, the judge, the table that is written."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter is on: start pytest without TRITON_INTERPRET", allow_module_level=True)
pytest.importorskip("triton")

import torch

from compgen_fast.cli import main
from compgen_fast.kernels import launch
from compgen_fast.prove import tuning
from compgen_fast.prove.ahead_of_time import TARGETS
from compgen_fast.prove.catalogue import Case, launches, shipped_rows
from compgen_fast.prove.tuning import Candidate, Choice, choose, launched_as, space

ROW = next(row for row in shipped_rows("sm_80") if row.kernel == "slot_cross_attention forward" and row.bits == 16)
SHIPPED = (ROW.BLOCK_N, ROW.BLOCK_D, ROW.num_warps, ROW.num_stages)
OTHER = next(each for each in space(ROW) if each != SHIPPED)


@pytest.mark.parametrize("architecture", TARGETS)
def test_every_architecture_has_rows_of_the_same_limits_and_their_hash(architecture: str) -> None:
    entry = launch.configurations()[architecture]
    assert entry["hash"] == launch.configuration_hash(entry["kernels"])
    limits = [[row[:4] for row in shipped_rows(name)] for name in (architecture, "sm_80")]
    assert limits[0] == limits[1]


def test_every_row_has_candidates_and_real_shapes_are_judged_where_they_are() -> None:
    assert all(space(row) for row in shipped_rows("sm_80"))
    assert any(case.sizes == (1, 16384, 12, 7, 43) for case in tuning.judged_on(ROW))


def test_a_candidate_is_what_the_launcher_launches_and_only_of_its_kernel() -> None:
    forward, backward = (
        Case("slot_cross_attention", way, "plain", torch.bfloat16, (1, 256, 2, 7, 64))
        for way in ("forward", "backward")
    )  # type: ignore[arg-type]
    shipped = launches(backward, "sm_80")[0].options
    with launched_as("slot_cross_attention forward", (32, 64, 8, 1)), tuning.recorded_launches() as recorded:
        for case in (forward, backward):
            case.launch(case.arguments(values=False))
    options = recorded[0].options
    assert (options["BLOCK_N"], options["BLOCK_D"], options["num_warps"], options["num_stages"]) == (32, 64, 8, 1)
    assert recorded[1].options == shipped


def judge(seconds: dict[Candidate, float]) -> tuning.Judge:
    return lambda case, row, candidate, architecture: seconds.get(candidate, math.inf)


def test_the_fastest_is_chosen_and_what_is_shipped_stays_unless_it_is_beaten() -> None:
    assert choose(ROW, "sm_80", judge({SHIPPED: 1.0, OTHER: 0.9})).new == OTHER
    assert choose(ROW, "sm_80", judge({SHIPPED: 1.0, OTHER: 0.995})).new == SHIPPED
    assert choose(ROW, "sm_80", judge({OTHER: 1.0})).new == OTHER
    with pytest.raises(RuntimeError, match="slot_cross_attention forward 16 bit, 16 slots of 64: no candidate runs"):
        choose(ROW, "sm_80", judge({}))


def test_the_model_refuses_what_spills() -> None:
    """A tile of 64 pixels of jets in fp32 does not fit into registers."""
    row = next(row for row in shipped_rows("sm_80") if row.kernel == "jet_cross_attention backward" and row.bits == 32)
    case = Case("jet_cross_attention", "backward", "plain", torch.float32, (1, 256, 1, 7, 32))
    assert tuning.modelled(case, row, (64, 32, 4, 1), "sm_80") == math.inf
    assert 0 < tuning.modelled(case, row, (16, 32, 4, 1), "sm_80") < 1e-3


def test_the_model_refuses_what_moves_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(case for case in tuning.judged_on(ROW) if case.sizes[-1] == 32)
    assert 0 < tuning.modelled(case, ROW, SHIPPED, "sm_80") < 1e-3
    monkeypatch.setitem(tuning.MOST_MOVED, "forward", 1.0)
    assert tuning.modelled(case, ROW, SHIPPED, "sm_80") == math.inf


def test_a_candidate_that_does_not_run_is_not_tried_on_other_shapes() -> None:
    tried: list[Case] = []

    def refuse(case: Case, *others: object) -> float:
        tried.append(case)
        return math.inf

    assert tuning.score(ROW, SHIPPED, "sm_80", refuse) == math.inf
    assert len(tried) == 1 < len(tuning.judged_on(ROW))


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the table, in its place."""
    copy = tmp_path / "configs.json"
    copy.write_text(launch.CONFIGS.read_text())
    with monkeypatch.context() as patch:
        patch.setattr(launch, "CONFIGS", copy)
        yield copy
    launch.configurations.cache_clear()


def test_the_table_is_written_whole_with_new_hashes_and_other_rows_stay(path: Path) -> None:
    before = path.read_text()
    choice = Choice(ROW, (1, 1, 1, 1), (16, 64, 8, 1), 2.0, 1.0)
    tuning.write([("sm_90", choice)], "measured on a test")
    old, new = json.loads(before), json.loads(path.read_text())
    assert new["sm_90"]["by"] == "measured on a test"
    assert new["sm_90"]["hash"] == launch.configuration_hash(new["sm_90"]["kernels"]) != old["sm_90"]["hash"]
    rows = new["sm_90"]["kernels"][ROW.kernel]["16 bit"]
    assert [ROW.S, ROW.D, 16, 64, 8, 1] in rows
    old["sm_90"]["kernels"][ROW.kernel]["16 bit"] = rows
    assert new["sm_90"]["kernels"] == old["sm_90"]["kernels"] and new["sm_80"] == old["sm_80"]
    assert max(map(len, path.read_text().splitlines())) < 400 and list(path.parent.iterdir()) == [path]


def test_rows_that_nobody_chose_are_refused(path: Path) -> None:
    table = json.loads(path.read_text())
    table["gfx942"]["kernels"][ROW.kernel]["16 bit"][0][2] = 256
    path.write_text(json.dumps(table))
    with pytest.raises(ValueError, match="the rows of gfx942 are not those that were chosen; undo, or run `cgf tune`"):
        launch.configurations.__wrapped__()


def test_devices_find_their_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    found = launch.architecture_of.__wrapped__
    assert found(torch.device("cpu")) == "sm_80"
    for capability, name in {(8, 6): "sm_80", (9, 0): "sm_90", (10, 0): "sm_100", (12, 0): "sm_80"}.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, have=capability: have)
        assert found(torch.device("cuda", 0)) == name
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert found(torch.device("cuda", 0)) == "gfx942"
    with launch.architecture("gfx942"):
        assert launch.tuned_config(ROW.kernel, torch.empty(0, dtype=torch.bfloat16), 7, 64) == launch.looked_up(
            "gfx942", ROW.kernel, 2, 7, 64
        )


def test_the_command_writes_what_was_chosen_and_shows_what_changed(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tuning, "choices", lambda rows, names, device: [("sm_90", Choice(ROW, SHIPPED, OTHER, 2, 1.5))])
    assert main(["tune", "--kernel", "slot_cross_attention", "--arch", "sm_90"]) == 0
    printed = capsys.readouterr().out
    assert "1 of 1 configurations changed, modelled" in printed and "cgf prove --record" in printed
    assert [ROW.S, ROW.D, *OTHER] in json.loads(path.read_text())["sm_90"]["kernels"][ROW.kernel]["16 bit"]


def test_what_was_chosen_stays_when_the_rest_is_cut_off(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut_off(*_: object) -> Iterator[tuple[str, Choice]]:
        yield "sm_90", Choice(ROW, SHIPPED, OTHER, 2, 1.5)
        raise KeyboardInterrupt

    monkeypatch.setattr(tuning, "choices", cut_off)
    assert main(["tune", "--arch", "sm_90"]) == 130
    assert [ROW.S, ROW.D, *OTHER] in json.loads(path.read_text())["sm_90"]["kernels"][ROW.kernel]["16 bit"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--kernel", "softmax"], "tune: 'softmax' is no kernel with a configuration; there are slot_cross_attention,"),
        (["--arch", "sm_70"], "tune: 'sm_70' is no architecture; there are sm_80, sm_90, sm_100, gfx942"),
        pytest.param(
            ["--device", "cuda"],
            "CUDA",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_what_cannot_be_tuned_is_refused_with_a_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = launch.CONFIGS.read_text()
    assert main(["tune", *arguments]) == 2
    assert sentence in capsys.readouterr().err
    assert launch.CONFIGS.read_text() == before
