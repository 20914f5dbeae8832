"""Whose a run's folder is, and which settings it had when."""

from dataclasses import replace
from pathlib import Path

import pytest

from compgen_fast.recipes import RECIPES
from compgen_fast.train.config import DataConfig, TrainConfig
from compgen_fast.train.folder import claim, read_config, read_history
from compgen_fast.train.ranks import Ranks

ALONE = Ranks.alone()


def config_in(folder: Path) -> TrainConfig:
    return replace(RECIPES["frame_vae_cpu"](), out=folder / "run")


def started(config: TrainConfig, *steps: int) -> None:
    """Leaves what a run with checkpoints after so many steps leaves."""
    claim(config, False, ALONE)
    for step in steps:
        (config.out / "checkpoints" / f"step_{step:08d}").mkdir(parents=True)


def test_changed_settings_are_told_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_in(tmp_path)
    started(config, 20, 100)
    faster = replace(config, optimiser=replace(config.optimiser, lr=0.5), steps=200)
    claim(faster, True, ALONE)
    told = capsys.readouterr().err
    assert "goes on after step 100 with other settings" in told
    assert "  optimiser.lr: 0.002 → 0.5\n  steps: 3000 → 200\n" in told
    assert read_config(config.out) == faster
    (line,) = read_history(config.out)
    assert line["step"] == 100 and line["time"] > 1e9
    assert line["changes"] == [
        {"name": "optimiser.lr", "was": 0.002, "now": 0.5},
        {"name": "steps", "was": 3000, "now": 200},
    ]
    claim(replace(faster, start=Path("weights")), True, ALONE)
    assert [line["changes"][-1]["now"] for line in read_history(config.out)] == [200, "weights"]


def test_a_run_that_goes_on_as_it_was_has_no_history(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_in(tmp_path)
    started(config, 20)
    claim(config, True, ALONE)
    assert read_history(config.out) == [] and capsys.readouterr().err == ""


def test_a_run_that_kept_no_step_begins_anew_with_any_settings(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    started(config)
    other = replace(config, seed=7)
    claim(other, True, ALONE)
    assert read_config(config.out) == other and read_history(config.out) == []


@pytest.mark.parametrize("change", [{"seed": 7}, {"data": DataConfig(shards="mine")}, {"data": DataConfig(seed=3)}])
def test_what_a_run_may_not_change_leaves_its_folder_alone(tmp_path: Path, change: dict[str, object]) -> None:
    config = config_in(tmp_path)
    started(config, 20)
    with pytest.raises(ValueError, match=r"the run in .* was started with"):
        claim(replace(config, **change), True, ALONE)  # type: ignore[arg-type]
    assert read_config(config.out) == config and read_history(config.out) == []


def test_a_run_on_shards_from_before_they_were_enough_goes_on(tmp_path: Path) -> None:
    config = replace(config_in(tmp_path), data=DataConfig(shards="mine", world=None))
    started(replace(config, data=DataConfig(shards="mine", world="scenes")), 20)
    claim(config, True, ALONE)
    assert read_history(config.out) == []
