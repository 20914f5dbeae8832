"""Settings through JSON and back, and every way in which a file can be wrong."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pytest

from compgen_fast.models.config import DecoderConfig, EncoderConfig, SlotVAEConfig, SupervisedConfig
from compgen_fast.settings import from_json, to_json
from compgen_fast.train.config import TrainConfig


@dataclass(frozen=True)
class Cat:
    lives: int = 9


@dataclass(frozen=True)
class Dog:
    name: str
    friends: tuple[Cat, ...] = ()


@dataclass(frozen=True)
class Tree:
    count: int
    share: float = 0.5
    on: bool = False
    colour: Literal["red", "green", 1] = "red"
    where: Path | None = None
    pair: tuple[int, str] = (1, "a")
    words: tuple[str, ...] | None = None
    pets: tuple[Cat | Dog, ...] = ()
    favourite: Cat | Dog | None = None
    limit: int | Literal["auto"] = "auto"
    inner: Cat = field(default_factory=Cat)


FULL = Tree(
    3,
    share=1.0,
    on=True,
    colour=1,
    where=Path("a/b"),
    pair=(2, "é"),
    words=("x", "y"),
    pets=(Dog("Rex", (Cat(1),)), Cat(2)),
    favourite=Dog("Tilly"),
    limit=7,
    inner=Cat(4),
)


@pytest.mark.parametrize("tree", [Tree(0), FULL, replace(FULL, favourite=None, words=()), replace(FULL, share=-1e-12)])
def test_settings_come_back_equal(tree: Tree) -> None:
    assert from_json(Tree, to_json(tree), "here") == tree


@pytest.mark.parametrize(
    "model",
    [
        SlotVAEConfig(encoder=EncoderConfig(kind="vit", weights=Path("vit.safetensors"), lora_rank=4)),
        SlotVAEConfig(decoder=DecoderConfig(kind="additive")),
        SupervisedConfig(factors=("shape", "x")),
    ],
)
def test_a_runs_settings_come_back_equal(model: SlotVAEConfig | SupervisedConfig) -> None:
    config = TrainConfig(model=model)
    assert from_json(TrainConfig, to_json(config), "here") == config
    assert json.loads(to_json(config))["model"]["kind"] == type(model).__name__


def test_a_whole_number_will_do_for_a_float() -> None:
    tree = from_json(Tree, '{"count": 1, "share": 2}', "here")
    assert tree.share == 2.0 and isinstance(tree.share, float)


def test_a_field_that_the_file_lacks_takes_its_default() -> None:
    assert from_json(Tree, '{"count": 1}', "here") == Tree(1)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"colour": "blue"}, "run.json.colour is 'blue'; expected one of 'red', 'green', 1"),
        ({"colour": True}, "colour is True"),
        ({"count": "3"}, "run.json.count is '3'; expected int"),
        ({"count": True}, "count is True; expected int"),
        ({"count": 1.0}, "count is 1.0; expected int"),
        ({"count": None}, "count is None; expected int"),
        ({"on": 1}, "on is 1; expected bool"),
        ({"share": "half"}, "share is 'half'; expected float"),
        ({"where": 3}, "where is 3; expected Path"),
        ({"pair": [1]}, "pair has 1 entries; expected 2"),
        ({"pair": ["a", 1]}, r"pair\[0\] is 'a'; expected int"),
        ({"words": "xy"}, "words is 'xy'; expected a list"),
        ({"limit": "none"}, "limit is 'none'; expected int or"),
        ({"pets": [{"kind": "Cow"}]}, r"run.json.pets\[0\].kind is 'Cow'; expected one of Cat, Dog"),
        ({"pets": [{"lives": 3}]}, r"pets\[0\].kind is None"),
        ({"pets": [{"kind": "Cat", "name": "Rex"}]}, r"pets\[0\] has 'name', which Cat does not; expected only lives"),
        ({"favourite": {"kind": "Dog"}}, "favourite lacks 'name', which Dog needs"),
        ({"inner": []}, r"inner is \[\]; expected the fields of Cat"),
        ({"inner": {"lifes": 3}}, "run.json.inner has 'lifes', which Cat does not"),
        ({"extra": 1}, "run.json has 'extra', which Tree does not"),
    ],
)
def test_what_does_not_fit_is_refused_and_named(change: dict[str, Any], sentence: str) -> None:
    plain = {**json.loads(to_json(FULL)), **change}
    with pytest.raises(ValueError, match=sentence):
        from_json(Tree, json.dumps(plain), "run.json")


def test_a_missing_field_and_broken_json_are_named() -> None:
    with pytest.raises(ValueError, match=r"run.json lacks 'count', which Tree needs"):
        from_json(Tree, "{}", "run.json")
    with pytest.raises(ValueError, match=r"run.json is not JSON"):
        from_json(Tree, "{", "run.json")


def test_what_settings_cannot_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="is a set"):
        to_json(replace(FULL, words={"x"}))  # type: ignore[arg-type]


def test_a_tag_that_would_hide_a_field_is_refused() -> None:
    @dataclass(frozen=True)
    class Cow:
        kind: str = "brown"

    @dataclass(frozen=True)
    class Farm:
        animal: Any = field(default_factory=Cow)

    Farm.__annotations__["animal"] = Cow | Cat
    with pytest.raises(TypeError, match="Cow is in a union of dataclasses and has a field 'kind'"):
        to_json(Farm())
