"""The help of every command reads alone."""

import re
from collections.abc import Iterator

import pytest

from compgen_fast.cli import COMMANDS, RECIPE_COMMANDS, main
from compgen_fast.recipes import RECIPES

STUDIES = ("perception", "bumps", "generation")
ASKED = [
    *([command] for command in COMMANDS if command != "study"),
    *(["study", study] for study in STUDIES),
    *([command, "slot_vae_cpu"] for command in RECIPE_COMMANDS if command != "train"),
    *(["train", recipe] for recipe in RECIPES if recipe.endswith("_cpu")),
]


def helped(capsys: pytest.CaptureFixture[str], *asked: str) -> str:
    with pytest.raises(SystemExit, match="0"):
        main([*asked, "--help"])
    return capsys.readouterr().out


def options(text: str) -> Iterator[tuple[str, str]]:
    """Each option or argument with what is said of it."""
    found: list[list[str]] = []
    for line in (line[1:].rstrip("│ ") for line in text.splitlines()):
        if named := re.match(r" (?:-h, )?(--[a-z]\S*|[A-Z][A-Z|]+)(?: \S+)*?(?: {2,}|$)", line):
            found.append([named[1], line[named.end() :]])
        elif found and line.startswith(4 * " "):
            found[-1][1] += f" {line.strip()}"
    return ((name, said.strip()) for name, said in found)


@pytest.mark.parametrize("asked", ASKED, ids=" ".join)
def test_every_option_says_what_it_does_in_words_that_need_no_other(
    asked: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    text = helped(capsys, *asked)
    for nothing in ("(default: )", "(default: None)", "(default: False)", "{None}", "--no-", ".no-"):
        assert nothing not in text
    for name, said in options(text):
        assert re.match(r"\w.* ", said), f"{name} says nothing"
        assert not re.match(r"(Of|That|Those|The same)\b", said), f"{name}: {said}"


def test_options_of_a_training_begin_with_those_used_most(capsys: pytest.CaptureFixture[str]) -> None:
    named = [name for name, _ in options(helped(capsys, "train", "slot_vae_cpu"))]
    assert {"--steps", "--batch-size", "--out", "--resume"} <= set(named[:8])


def test_a_value_of_a_recipe_can_still_be_taken_away() -> None:
    from compgen_fast.train.command import parse

    given = parse("train", ["slot_vae_cpu", "--data.split", "None", "--model.loss.penalty-pixels", "64"])
    assert given.config.data.split is None and given.config.model.loss.penalty_pixels == 64
