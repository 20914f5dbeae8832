"""What a world takes, as text."""

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
