"""Scenes: objects, textures and backgrounds can be told apart, and masks say what was drawn."""

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
