"""Scenes: objects, textures and backgrounds can be told apart, and masks say what was drawn."""

import hashlib
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from compgen_fast.worlds import Scenes
from compgen_fast.worlds.drawing import axis
from compgen_fast.worlds.scenes import MARGIN, WINDOW
from compgen_fast.worlds.scenes_backgrounds import BACKGROUNDS
from compgen_fast.worlds.scenes_shapes import CATEGORIES
from compgen_fast.worlds.scenes_textures import TEXTURES


def posed(count: int, **values: Any) -> dict[str, NDArray[Any]]:
    """Upright objects in the middle, all alike but for the values given."""
    usual = {
        "object_1": 0, "texture_1": 0, "x_1": 0.0, "y_1": 0.0, "scale_1": 0.6, "rotation_1": 0.0, "hue_1": 0.0,
        "background": 0, "background_x": 0.0, "background_y": 0.0, "background_hue": 0.0,
        "light": 1.0, "light_angle": 0.0,
    }  # fmt: skip
    return {name: np.broadcast_to(value, (count,)).copy() for name, value in (usual | values).items()}


def grown(masks: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Masks and their neighbours: a smooth edge lies in pixels that mostly show something else."""
    padded = np.pad(masks, ((0, 0), (1, 1), (1, 1)))
    height, width = masks.shape[1:]
    near: NDArray[np.bool_] = np.any(
        [padded[:, y : y + height, x : x + width] for y in (0, 1, 2) for x in (0, 1, 2)], 0
    )
    return near


def test_there_are_as_many_kinds_as_promised() -> None:
    assert len(CATEGORIES) >= 16 and len(TEXTURES) >= 8 and len(BACKGROUNDS) >= 10


def test_every_silhouette_differs_from_every_other() -> None:
    masks = Scenes(64).render(posed(len(CATEGORIES), object_1=np.arange(len(CATEGORIES)))).masks
    assert masks is not None
    for one, other in combinations(range(len(CATEGORIES)), 2):
        shared, either = (masks[one] & masks[other]).sum(), (masks[one] | masks[other]).sum()
        assert shared < 0.85 * either, (CATEGORIES[one], CATEGORIES[other])


def test_objects_are_large_enough_to_see_and_stay_inside_their_radius() -> None:
    masks = Scenes(128).render(posed(len(CATEGORIES), object_1=np.arange(len(CATEGORIES)))).masks
    assert masks is not None
    line = (np.arange(128) + 0.5) / 64 - 1
    outside = np.hypot(line, line[:, None]) > 0.6 * MARGIN + 0.01
    assert not (masks[:, outside] == 1).any()
    assert (masks.mean((1, 2)) > 0.07).all()


@pytest.mark.parametrize(("factor", "kinds"), [("texture_1", TEXTURES), ("background", BACKGROUNDS)])
def test_every_pattern_differs_from_every_other_beyond_hue(factor: str, kinds: tuple[str, ...]) -> None:
    images = Scenes(64).render(posed(len(kinds), **{factor: np.arange(len(kinds))})).images
    grey = images.astype(float).mean(-1).reshape(len(kinds), -1)
    for one, other in combinations(range(len(kinds)), 2):
        assert np.abs(grey[one] - grey[other]).mean() > 4, (kinds[one], kinds[other])


def test_hue_and_texture_leave_the_mask_alone() -> None:
    masks = Scenes(64).render(posed(40, hue_1=np.linspace(0, 1, 40), texture_1=np.arange(40) % 10)).masks
    assert masks is not None and (masks == masks[0]).all()


@pytest.mark.parametrize("occlusion", [False, True])
@pytest.mark.parametrize("slot", [1, 2])
def test_removing_an_object_changes_only_its_mask_and_its_shadow(occlusion: bool, slot: int) -> None:
    world = Scenes(64, seed=3, objects=2, occlusion=occlusion)
    values = world.split("object").values(np.arange(64))
    full, less, alone = (world.render(values, hidden) for hidden in ((), (slot,), (3 - slot,)))
    assert full.masks is not None and less.masks is not None and alone.masks is not None
    own = full.masks == slot
    assert own.any((1, 2)).all() and (less.masks != slot).all() and (full.masks == less.masks)[~own].all()
    brighter = less.images.astype(int) - full.images.astype(int)
    # Outside of its mask it only took light away, but for the thinnest tips, which cover no pixel by half.
    outside = ~grown(alone.masks > 0)
    assert (brighter[outside] < 0).mean() < 1e-4 and (brighter[outside] > 0).mean() > 0.01
    x, y, scale = (values[f"{name}_{slot}"].astype(np.float32)[:, None, None] for name in ("x", "y", "scale"))
    far = np.hypot(axis(64) - x, axis(64)[:, None] - y) > WINDOW * scale + 0.05
    assert (brighter[far] == 0).all()  # and only nearby
    assert (brighter[own].any(-1)).mean() > 0.95


def test_a_shadow_falls_away_from_the_light() -> None:
    world = Scenes(64)
    values = posed(4, light_angle=np.array([0.0, np.pi / 2, np.pi, -np.pi / 2]))
    lost = world.render(values, hidden=(1,)).images.astype(float) - world.render(values).images
    masks = world.render(values).masks
    assert masks is not None
    lost = lost.mean(-1) * ~grown(masks > 0)
    line = axis(64)
    x, y = (lost * line).sum((1, 2)), (lost * line[:, None]).sum((1, 2))
    assert x[0] < 0 < x[2] and y[1] < 0 < y[3]


def test_the_side_towards_the_light_is_brighter() -> None:
    found = Scenes(64).render(posed(2, light_angle=np.array([np.pi, 0.0])))
    assert found.masks is not None
    left, right = (found.images.astype(float).mean(-1) * found.masks).reshape(2, 64, 2, 32).sum((1, 3))
    assert left[0] > 1.05 * right[0] and right[1] > 1.05 * left[1]


@pytest.mark.parametrize("resolution", [16, 37, 64, 256])
def test_an_object_is_where_and_as_large_as_its_factors_say(resolution: int) -> None:
    place = np.linspace(-0.4, 0.4, 9)
    values = posed(9, x_1=place, y_1=place[::-1], scale_1=np.linspace(0.4, 0.6, 9))
    masks = Scenes(resolution).render(values).masks
    assert masks is not None
    area = masks.sum((1, 2))
    x, y = (masks * axis(resolution)).sum((1, 2)) / area, (masks * axis(resolution)[:, None]).sum((1, 2)) / area
    np.testing.assert_allclose(x, place, atol=0.5 / resolution)
    np.testing.assert_allclose(y, place[::-1], atol=0.5 / resolution)
    ball = np.pi * (0.8 * values["scale_1"] * resolution / 2) ** 2
    np.testing.assert_allclose(area, ball, rtol=0.02 + 1 / resolution)


def test_without_occlusion_objects_stand_apart() -> None:
    world = Scenes(64, objects=2)
    values = world.split("object").values(np.arange(300))
    alone = [world.render(values, hidden=(slot,)).masks for slot in (2, 1)]
    assert alone[0] is not None and alone[1] is not None and not ((alone[0] > 0) & (alone[1] > 0)).any()


def test_with_occlusion_they_overlap_and_the_one_in_front_is_whole() -> None:
    world = Scenes(64, objects=2, occlusion=True)
    values = world.split("object").values(np.arange(300))
    masks, first, second = (world.render(values, hidden=hidden).masks for hidden in ((), (2,), (1,)))
    assert masks is not None and first is not None and second is not None
    overlap = (first > 0) & (second > 0)
    assert overlap.any((1, 2)).mean() > 0.9
    assert (masks[overlap] == (values["front"][np.nonzero(overlap)[0]] + 1)).all()
    assert all((masks == slot).sum((1, 2)).min() > 20 for slot in (1, 2))  # what is behind stays visible


def test_objects_stay_inside_the_frame() -> None:
    for world in (Scenes(16), Scenes(16, objects=2), Scenes(16, objects=2, occlusion=True)):
        values = world.split("texture").values(np.arange(5_000))
        for i in range(1, world.objects + 1):
            for name in "xy":
                assert (np.abs(values[f"{name}_{i}"]) + values[f"scale_{i}"] <= 1.001).all()


def test_the_first_object_is_left_of_or_above_the_second() -> None:
    for occlusion in (False, True):
        values = Scenes(16, objects=2, occlusion=occlusion).split("object").values(np.arange(2_000))
        assert ((values["x_1"] < values["x_2"]) | (values["y_1"] < values["y_2"])).all()


FREE = ("object", "background", "x", "y", "front")  # what variation leaves alone


def calm(variation: float, **options: Any) -> tuple[Scenes, dict[str, NDArray[Any]]]:
    world = Scenes(16, seed=5, variation=variation, **options)
    return world, dict(world.split("background").values(np.arange(2_000)))


def test_all_variation_is_the_world_as_it_always_was() -> None:
    images = Scenes(16, variation=1).split("background").samples(np.arange(32)).images
    assert hashlib.sha256(images.tobytes()).hexdigest().startswith("ed0c7a9e5fa73098")


@pytest.mark.parametrize("options", [{}, {"objects": 2}, {"objects": 2, "occlusion": True}])
@pytest.mark.parametrize("variation", [0.0, 0.1, 0.35])
def test_numbers_use_the_middle_of_their_range(variation: float, options: dict[str, Any]) -> None:
    world, values = calm(variation, **options)
    for factor in world.factors:
        if factor.values is None and factor.name.rstrip("_12") not in FREE:
            low, high = values[factor.name].min(), values[factor.name].max()
            assert high - low <= variation * (factor.high - factor.low) + 1e-6
            assert high - low >= 0.95 * variation * (factor.high - factor.low)
            assert low + high == pytest.approx(factor.low + factor.high, abs=0.05 * (factor.high - factor.low))
    world.render({name: value[:3] for name, value in values.items()})  # all in range, or it is refused


def test_variation_leaves_objects_backgrounds_and_places_alone() -> None:
    (_, few), (_, all_of_them) = calm(0.1), calm(1)
    for name in ("object_1", "background"):
        assert np.array_equal(few[name], all_of_them[name])
    reach = 1 - MARGIN * few["scale_1"]
    assert all((np.abs(few[name]) <= reach).all() and np.abs(few[name] / reach).max() > 0.99 for name in ("x_1", "y_1"))


@pytest.mark.parametrize(("variation", "count"), [(0.0, 1), (0.1, 1), (0.25, 3), (0.3, 3), (1.0, 10)])
def test_the_first_textures_are_used_equally_often(variation: float, count: int) -> None:
    _, values = calm(variation)
    shares = np.bincount(values["texture_1"], minlength=len(TEXTURES)) / 2_000
    np.testing.assert_allclose(shares[:count], 1 / count, atol=0.04)
    assert (shares[count:] == 0).all()


@pytest.mark.parametrize("part", ["train", "ood"])
@pytest.mark.parametrize("split", ["background", "texture", "object"])
def test_splits_hold_out_the_same_pairs_at_any_variation(split: str, part: str) -> None:
    names = {"background": ("object_1", "background"), "texture": ("object_1", "texture_1")}
    pairs = []
    for variation in (0.0, 1.0):
        values = Scenes(16, objects=2, variation=variation).split(split, part).values(np.arange(400))
        pairs.append([values[name] for name in names.get(split, ("object_1", "object_2"))])
    np.testing.assert_array_equal(*pairs)


@pytest.mark.parametrize("name", ["variation", "haze"])
@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan"), "much"])
def test_variation_and_haze_are_parts_of_the_whole(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{name} is {value}; expected 0 \(none\) to 1"):
        Scenes(**{name: value})


def looks(seed: int = 5, split: str = "background", **options: Any) -> dict[str, NDArray[Any]]:
    world = Scenes(16, seed=seed, objects=2, own_looks=True, **options)
    return dict(world.split(split).values(np.arange(4_000)))


def test_each_kind_has_hues_and_a_texture_of_its_own() -> None:
    values = looks(variation=0.1)
    kinds, hues, textures = (
        np.concatenate([values[f"{name}_{i}"] for i in (1, 2)]) for name in ("object", "hue", "texture")
    )
    middles = []
    for kind in range(len(CATEGORIES)):
        own = hues[kinds == kind]
        assert len(np.unique(textures[kinds == kind])) == 1 and np.ptp(own) < 0.041
        middles.append(own.mean())
    np.testing.assert_allclose(np.sort(middles), (np.arange(20) + 0.5) / 20, atol=0.002)
    assert (np.bincount(textures[np.unique(kinds, return_index=True)[1]]) == 2).all()  # 20 kinds share out 10 textures


def test_seeds_give_kinds_other_looks_and_all_are_in_range() -> None:
    one, other = (looks(seed) for seed in (5, 6))
    texture_of = [
        {kind: values["texture_1"][values["object_1"] == kind][0] for kind in range(20)} for values in (one, other)
    ]
    assert texture_of[0] != texture_of[1]
    assert all(one[f"hue_{i}"].min() >= 0 and one[f"hue_{i}"].max() < 1 for i in (1, 2))
    Scenes(16, objects=2, own_looks=True).render({name: value[:20] for name, value in one.items()})


def test_the_split_by_texture_keeps_its_textures() -> None:
    plain = Scenes(16, seed=5, objects=2).split("texture").values(np.arange(400))
    assert np.array_equal(looks(split="texture")["texture_1"][:400], plain["texture_1"])


def test_haze_fades_backgrounds_and_leaves_objects() -> None:
    values = posed(10, background=np.arange(10), light=0.75)  # so dim that nothing is clipped
    clear, hazy, grey = (Scenes(64, haze=haze).render(values) for haze in (0.0, 0.6, 1.0))
    assert clear.masks is not None
    far = np.hypot(axis(64), axis(64)[:, None]) > WINDOW * 0.6 + 0.05  # beyond the object and its shadow
    spread = [found.images[:, far].astype(float).std((1, 2)) for found in (clear, hazy, grey)]
    np.testing.assert_allclose(spread[1], 0.4 * spread[0], rtol=0.05)
    assert (np.abs(grey.images[:, far].astype(int) - 128) <= 1).all()
    inside = ~grown(clear.masks == 0)
    assert (clear.images[inside] == grey.images[inside]).all()
