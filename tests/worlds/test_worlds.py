"""What holds for every procedural world: pure functions of (seed, index), the shapes promised, errors in sentences."""

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from compgen_fast import worlds
from compgen_fast.worlds import NAMES, Samples, Source, World, open_split, open_world

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "scenes": ("scenes", {}),
    "two scenes": ("scenes", {"objects": 2}),
    "occluded scenes": ("scenes", {"objects": 2, "occlusion": True}),
    "two calm scenes": ("scenes", {"objects": 2, "variation": 0.1, "own_looks": True, "haze": 0.6}),
    "shapes2d": ("shapes2d", {}),
    "continuous shapes2d": ("shapes2d", {"continuous": True}),
    "bumps": ("bumps", {}),
    "wide bumps": ("bumps", {"sigma": 1.5}),
    "sprites": ("sprites", {}),
    "five white sprites": ("sprites", {"objects": 5, "coloured": False}),
    "additive of order 0": ("additive", {"order": 0}),
    "additive of order 1": ("additive", {"order": 1, "slot_count": 3}),
    "additive of order 2": ("additive", {"order": 2}),
}
NOT_BUMPS = [variant for variant in VARIANTS if "bumps" not in variant]  # whose positions count pixels


def opened(variant: str, resolution: int = 16, seed: int = 0) -> World:
    name, options = VARIANTS[variant]
    return open_world(name, resolution=resolution, seed=seed, **options)


def assert_same(found: Samples, expected: Samples, rows: NDArray[np.int64]) -> None:
    assert found.masks is not None and expected.masks is not None
    np.testing.assert_array_equal(found.images, expected.images[rows])
    np.testing.assert_array_equal(found.masks, expected.masks[rows])
    assert found.factors.keys() == expected.factors.keys()
    for name, values in found.factors.items():
        np.testing.assert_array_equal(values, expected.factors[name][rows])


@pytest.mark.parametrize("variant", VARIANTS)
@settings(max_examples=15)
@given(data=st.data(), resolution=st.sampled_from([16, 19, 64]))
def test_a_sample_does_not_depend_on_its_batch(variant: str, data: st.DataObject, resolution: int) -> None:
    world = opened(variant, resolution, seed=7)
    part = world.split(world.splits[0], data.draw(st.sampled_from(world.parts)))
    last = min(len(part), 100)
    whole = part.samples(np.arange(last))
    rows = np.array(data.draw(st.lists(st.integers(0, last - 1), min_size=1, max_size=9)))
    assert_same(part.samples(rows), whole, rows)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("resolution", [16, 64, 128, 256])
def test_samples_are_as_promised(variant: str, resolution: int) -> None:
    world = opened(variant, resolution)
    source: Source = world.split(world.splits[0], "ood")
    found = source.samples(np.arange(5))
    assert found.masks is not None
    assert found.images.shape == (5, resolution, resolution, 3) and found.images.dtype == np.uint8
    assert found.masks.shape == (5, resolution, resolution) and found.masks.dtype == np.uint8
    assert found.masks.max() < len(source.slots)
    assert list(found.factors) == [factor.name for factor in source.factors]
    for factor in source.factors:
        values = found.factors[factor.name]
        assert values.shape == (5,) and values.dtype == (np.int64 if factor.categorical else np.float32)
        assert values.max() < len(factor.values) if factor.values else factor.low <= values.min()


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_factors_of_a_sample_render_to_it(variant: str) -> None:
    world = opened(variant)
    found = world.split(world.splits[0]).samples(np.arange(20))
    assert_same(world.render(found.factors), found, np.arange(20))


@pytest.mark.parametrize("variant", NOT_BUMPS)
def test_seeds_give_other_images(variant: str) -> None:
    first, second = (opened(variant, seed=seed) for seed in (0, 1))
    images = [world.split(world.splits[0]).samples(np.arange(8)).images for world in (first, second)]
    assert (images[0] != images[1]).any(axis=(1, 2, 3)).all()


@pytest.mark.parametrize("variant", NOT_BUMPS)
def test_the_same_scene_looks_alike_at_any_resolution(variant: str) -> None:
    fine, coarse = opened(variant, 128), opened(variant, 32)
    values = coarse.split(coarse.splits[0]).values(np.arange(12))
    small = fine.render(values).images.reshape(12, 32, 4, 32, 4, 3).mean((2, 4))
    difference = np.abs(small - coarse.render(values).images).mean()
    unrelated = np.abs(small - np.roll(coarse.render(values).images, 1, axis=0)).mean()
    assert difference < 0.45 * unrelated


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_part_travels_to_another_process(variant: str) -> None:
    world = opened(variant)
    part = world.split(world.splits[0])
    assert_same(pickle.loads(pickle.dumps(part)).samples(np.arange(3)), part.samples(np.arange(3)), np.arange(3))


def test_another_process_draws_the_same_bytes() -> None:
    script = (
        "import hashlib, numpy as np; from compgen_fast.worlds import open_split;"
        "print(hashlib.sha256(open_split('scenes').samples(np.arange(40)).images).hexdigest())"
    )
    found = {subprocess.check_output([sys.executable, "-c", script], text=True) for _ in range(2)}
    assert len(found) == 1


def test_opening_a_scene_does_not_import_torch() -> None:
    script = (
        "import sys; from compgen_fast.worlds import open_split;open_split('scenes'); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("name", NAMES)
def test_every_world_opens_by_name_and_by_class(name: str) -> None:
    world = open_world(name)
    assert world.name == name and type(world) is getattr(worlds, type(world).__name__)
    for split in world.splits:
        if (name, split) != ("scenes", "object"):
            assert open_split(name, split=split, part="ood").name == f"{name}-{split}-ood"
    assert len(open_split(name, size=7)) == 7


def test_the_object_split_brings_its_two_objects() -> None:
    assert open_split("scenes", split="object").slots == ("background", "object_1", "object_2")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"name": "pug"}, "there is no world 'pug'; expected one of scenes, shapes2d"),
        ({"name": "scenes", "split": "colour"}, "no split 'colour'; expected one of background, texture, object"),
        ({"name": "scenes", "part": "dev"}, "no part 'dev'; expected one of train, validation, test, ood"),
        ({"name": "scenes", "resolution": 8}, "resolution is 8; expected 16 to 256"),
        ({"name": "scenes", "resolution": 512}, "resolution is 512; expected 16 to 256"),
        ({"name": "scenes", "seed": -1}, "seed is -1; expected 0 or more"),
        ({"name": "scenes", "size": 0}, "size is 0; expected 1"),
        ({"name": "scenes", "objects": 3}, "objects is 3; expected 1 or 2"),
        ({"name": "scenes", "occlusion": True}, "occlusion needs two objects"),
        ({"name": "scenes", "split": "object", "objects": 1}, "set objects=2"),
        ({"name": "scenes", "colour": 3}, "no option 'colour'; expected one of resolution, seed, objects, occlusion"),
        ({"name": "shapes2d", "seen_pairs": 2}, "seen_pairs is 2, but its splits are fixed; leave it out"),
        ({"name": "bumps", "sigma": 0.0}, "sigma is 0.0; expected a width above 0"),
        ({"name": "sprites", "objects": 9}, "objects is 9; expected 1 to 8"),
        ({"name": "sprites", "split": "colour", "coloured": False}, "no split 'colour'; expected position"),
        ({"name": "additive", "order": 3}, "order is 3; expected 0"),
        ({"name": "additive", "slot_count": 1}, "slot_count is 1; expected 2 to 8"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        open_split(**arguments)


def test_wrong_indices_are_refused() -> None:
    part = open_split("shapes2d", resolution=16, size=10)
    for wrong in (np.array([10]), np.array([-1])):
        with pytest.raises(IndexError, match="expected 0 to 9"):
            part.samples(wrong)
    for odd in (np.array([[1]]), np.array([0.5])):
        with pytest.raises(ValueError, match="expected one row of integers"):
            part.samples(odd)
    assert len(part.samples(np.array([], dtype=np.int64)).images) == 0


def test_wrong_factors_are_refused() -> None:
    world = open_world("scenes", resolution=16)
    values = dict(world.split("background").values(np.arange(3)))
    wrong = {
        "the factor 'hue_1' is missing": {name: value for name, value in values.items() if name != "hue_1"},
        r"'hue_1' has shape \[2\]; expected \[3\]": values | {"hue_1": values["hue_1"][:2]},
        "'object_1' holds something other": values | {"object_1": np.array([0, 20, 1])},
        "'scale_1' leaves its range; expected 0.4 to": values | {"scale_1": np.array([0.5, 3, 0.5])},
        "'x_1' leaves its range": values | {"x_1": np.array([0, np.nan, 0])},
    }
    for sentence, given_values in wrong.items():
        with pytest.raises(ValueError, match=sentence):
            world.render(given_values)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_split_can_be_shown(variant: str, tmp_path: Path) -> None:
    world = opened(variant)
    for split in world.splits:
        if split == "object" and variant == "scenes":
            continue
        path = worlds.show(world, split, path=tmp_path / f"{split}.png")
        assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000


def test_a_picture_in_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist; create it first"):
        worlds.show(open_world("bumps"), path=tmp_path / "none" / "bumps.png")
