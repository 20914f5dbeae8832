"""What a command line names, and what of it would have no effect."""

import operator
import sys
from pathlib import Path
from typing import Any

import pytest

from compgen_fast.train import launch
from compgen_fast.train.command import parse, run
from compgen_fast.train.config import OF_WORLD, TrainConfig
from compgen_fast.train.given import IDLE, given, without

VALUES = {"split": "texture", "world": "sprites", "options": "variation=0.1"}


def test_settings_are_found_however_they_are_written() -> None:
    words = ["frame_vae_cpu", "--data.validation-size=64", "--steps", "5", "--data.seen_pairs", "2", "--resume"]
    assert given(words) == {
        "data.validation_size": "--data.validation-size",
        "steps": "--steps",
        "data.seen_pairs": "--data.seen_pairs",
        "resume": "--resume",
    }


def test_shards_are_enough_and_a_recipes_world_is_not_kept_with_them() -> None:
    recipe = parse("train", ["frame_vae_cpu"]).config
    found = parse("train", ["frame_vae_cpu", "--data.shards", "mine", "--data.workers", "3"]).config
    assert recipe.data.split == "background" and recipe.data.options
    data = found.data
    assert (data.shards, data.world, data.split, data.seen_pairs, data.options) == ("mine", None, None, None, ())
    assert data.workers == 3 and found.model == recipe.model


@pytest.mark.parametrize("name", OF_WORLD)
def test_a_setting_of_a_world_beside_shards_is_refused_by_its_name(name: str) -> None:
    option = f"--data.{name.replace('_', '-')}"
    words = ["frame_vae_cpu", "--data.shards", "mine", option, VALUES.get(name, "2")]
    with pytest.raises(ValueError, match=f"^{option} has no effect with --data.shards, .* give one of the two"):
        parse("train", words)


@pytest.mark.parametrize(
    ("command", "words", "sentence"),
    [
        (
            "train",
            "--data.validation a --data.validation-size 64",
            "--data.validation-size has no effect with --data.v",
        ),
        ("train", "--data.shards a --data.cache b", "--data.cache has no effect with --data.shards"),
        ("profile", "--steps 3", "--steps has no effect on `cgf profile`"),
        ("profile", "--checkpoint.every 3", "--checkpoint.every has no effect on `cgf profile`"),
        ("profile", "--guard.skip-audit", "--guard.skip-audit has no effect on `cgf profile`"),
        ("scale-plan", "--optimiser.lr 3", "--optimiser.lr has no effect on `cgf scale-plan`"),
        ("model", "--batch-size 3", "--batch-size has no effect on `cgf model`"),
    ],
)
def test_what_has_no_effect_is_refused_by_its_name(command: str, words: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{sentence}"):
        parse(command, ["frame_vae_cpu", *words.split()])


@pytest.mark.parametrize("command", IDLE)
def test_what_commands_do_not_look_at_are_settings_of_a_run(command: str) -> None:
    for name in IDLE[command]:
        operator.attrgetter(name)(TrainConfig())  # raises where there is none


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("train", "--data.validation a"),
        ("profile", "--batch-size 64 --data.shards a --optimiser.lr 3"),
        ("scale-plan", "--batch-size 64 --precision bf16"),
        ("model", "--model.slots 3 --data.world sprites"),
    ],
)
def test_what_has_an_effect_is_taken(command: str, words: str) -> None:
    parse(command, ["frame_vae_cpu", *words.split()])


def test_tokens_of_images_at_an_address_are_kept_in_the_cache_that_is_named() -> None:
    parse("train", ["dit_cpu", "--data.shards", "https://here/images", "--data.cache", "kept"])


def test_how_ranks_are_started_is_not_handed_on_to_them() -> None:
    words = ["train", "frame_vae_cpu", "--nproc", "2", "--steps", "5", "--hostfile=hosts", "--resume"]
    assert without(words, ("nproc", "hostfile")) == ["train", "frame_vae_cpu", "--steps", "5", "--resume"]


def test_ranks_are_asked_for_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RANK", raising=False)
    started: list[Any] = []
    monkeypatch.setattr(launch, "run_hosts", lambda hostfile, arguments: started.append(arguments) or 0)
    (tmp_path / "hosts").write_text("node03 slots=4\n")
    words = ["train", "frame_vae_cpu", "--hostfile", str(tmp_path / "hosts")]
    assert run(words) == 0 and started == [["train", "frame_vae_cpu"]]
    with pytest.raises(ValueError, match=r"^--nproc has no effect with --hostfile, whose slots= count processes"):
        run([*words, "--nproc", "2"])
    (tmp_path / "hosts").write_text("node03 slots=5\n")
    with pytest.raises(ValueError, match="batch_size is 32, split over 5 ranks"):
        run(words)
    monkeypatch.setenv("RANK", "0")
    for option in ("--nproc", "--hostfile"):
        with pytest.raises(ValueError, match=f"^{option} has no effect on a process that a launcher has started"):
            run(["train", "frame_vae_cpu", option, "2"])


def test_no_ranks_at_all_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(launch, "run_ranks", lambda *_: sys.exit("started"))
    for number in ("0", "-2"):
        with pytest.raises(ValueError, match=f"^nproc is {number}; expected at least 1"):
            run(["train", "frame_vae_cpu", "--nproc", number])
