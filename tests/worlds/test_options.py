"""What a world takes, as text."""

import numpy as np
import pytest

from compgen_fast.worlds import open_world
from compgen_fast.worlds.options import named


def test_values_are_what_they_read_as() -> None:
    given = ("objects=2", "occlusion=true", "variation=0.1", "kind=plain", "label=a=b", "none=null", "empty=")
    assert named(given) == {
        "objects": 2,
        "occlusion": True,
        "variation": 0.1,
        "kind": "plain",
        "label": "a=b",
        "none": None,
        "empty": "",
    }
    assert named(()) == {}


def test_options_open_a_world() -> None:
    world = open_world("scenes", **named(("objects=2", "variation=0.5")))
    assert (world.objects, world.variation) == (2, 0.5)  # type: ignore[attr-defined]


@pytest.mark.parametrize("option", ["objects", "=2", ""])
def test_what_is_no_pair_is_refused(option: str) -> None:
    with pytest.raises(ValueError, match=rf"--options {option}: expected name=value, such as objects=2"):
        named(("variation=0.1", option))


def test_an_option_that_is_given_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="objects is given twice; give it once"):
        named(("objects=1", "objects=2"))


@pytest.mark.parametrize(
    ("world", "option", "expected"),
    [
        ("scenes", "own_looks=False", "own_looks is 'False'; expected true or false"),
        ("scenes", "own_looks=1", "own_looks is 1; expected true or false"),
        ("sprites", "objects=two", "objects is 'two'; expected a whole number"),
        ("sprites", "objects=true", "objects is True; expected a whole number"),
        ("bumps", "sigma=wide", "sigma is 'wide'; expected a number"),
    ],
)
def test_a_value_of_another_kind_is_refused_rather_than_taken_for_true(world: str, option: str, expected: str) -> None:
    with pytest.raises(ValueError, match=f"{world}: {expected}"):
        open_world(world, **named((option,)))


def test_numbers_of_numpy_are_numbers() -> None:
    assert open_world("bumps", resolution=np.int64(16), sigma=np.float32(2)).resolution == 16
