from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from compgen_fast.worlds.adapters.kubric import kubric
from compgen_fast.worlds.source import Factor
from tests.worlds.adapters.folders import (
    Damage,
    check_refused,
    edit_json,
    noise,
    write_json,
    write_mask,
)

FRAMES = 3


def instance(place: float, **properties: str) -> dict[str, Any]:
    positions = [[place, float(frame), -1.0] for frame in range(FRAMES)]
    return {"positions": positions, "visibility": [20, 0, 5], "mass": 1.0, **properties}


def mask(seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, 3, (8, 8), np.uint8)


def make_scene(folder: Path, seed: int, instances: list[dict[str, Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "metadata.json", {"metadata": {"num_frames": FRAMES}, "instances": instances})
    for frame in range(FRAMES):
        opaque = np.full((8, 8, 1), 255, np.uint8)
        Image.fromarray(np.concatenate([noise(seed + frame), opaque], -1)).save(folder / f"rgba_{frame:05d}.png")
        write_mask(folder / f"segmentation_{frame:05d}.png", mask(seed + frame))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_scene(tmp_path / "10", 10, [instance(2.0, shape="cube", material="metal")])
    make_scene(tmp_path / "9", 20, [instance(-4.0, shape="gear", material="metal"), instance(1.0, shape="cube")])
    return tmp_path


def test_frames_have_images_masks_and_factors(folder: Path) -> None:
    source = kubric(folder, resolution=8)
    assert len(source) == 6 and source.slots == ("background", "object0", "object1")
    samples = source.samples(np.array([3, 1, 2]))
    np.testing.assert_array_equal(samples.images, np.stack([noise(20), noise(11), noise(12)]))
    assert samples.masks is not None
    np.testing.assert_array_equal(samples.masks, np.stack([mask(20), mask(11), mask(12)]))
    assert source.factors[:4] == (
        Factor("count", low=0, high=2),
        Factor("object0_shape", ("none", "cube", "gear")),
        Factor("object0_material", ("none", "metal")),
        Factor("object0_x", low=-4, high=2),
    )
    assert {name: column.tolist() for name, column in samples.factors.items()} == {
        "count": [2, 0, 1],
        "object0_shape": [2, 0, 1],
        "object0_material": [1, 0, 1],
        "object0_x": [-4, 0, 2],
        "object0_y": [0, 0, 2],
        "object0_z": [-1, 0, -1],
        "object1_shape": [1, 0, 0],
        "object1_material": [0, 0, 0],
        "object1_x": [1, 0, 0],
        "object1_y": [0, 0, 0],
        "object1_z": [-1, 0, 0],
    }


def test_without_visibility_every_object_is_there(folder: Path) -> None:
    edit_json(folder / "10/metadata.json", lambda content: content["instances"][0].pop("visibility"))
    assert kubric(folder).table["count"].tolist() == [1, 1, 1, 2, 0, 2]


def test_a_stride_takes_every_nth_frame(folder: Path) -> None:
    source = kubric(folder, stride=2, resolution=8)
    assert source.table["object0_y"].tolist() == [0, 2, 0, 2]
    np.testing.assert_array_equal(source.samples(np.array([1])).images[0], noise(12))
    with pytest.raises(ValueError, match="kubric: stride is 0; expected at least 1"):
        kubric(folder, stride=0)


def test_scenes_of_too_many_objects_are_left_out(folder: Path) -> None:
    source = kubric(folder, max_objects=1)
    assert len(source) == 3 and source.slots == ("background", "object0")
    check_refused(lambda: kubric(folder, max_objects=0), folder.name, "no scene has at most 0", "SCENE/")


def test_a_scene_alone_may_be_given(folder: Path) -> None:
    samples = kubric(folder / "9", resolution=8).samples(np.array([2]))
    np.testing.assert_array_equal(samples.images[0], noise(22))


@pytest.mark.parametrize(
    ("damage", "file", "what"),
    [
        (lambda f: (f / "9/metadata.json").unlink(), "9/metadata.json", "there is no such file"),
        (lambda f: (f / "9/metadata.json").write_text("{]"), "9/metadata.json", "this is not valid JSON"),
        (lambda f: (f / "9/segmentation_00001.png").unlink(), "9/segmentation_00001.png", "there is no such file"),
        (lambda f: [path.unlink() for path in (f / "9").glob("rgba*")], "9", r"there is no image rgba_\*\.png"),
        (
            lambda f: edit_json(f / "9/metadata.json", lambda content: content["instances"][1]["positions"].pop()),
            "9/metadata.json",
            "'positions' of instance 1 has 2 frames; the images go to 2",
        ),
        (
            lambda f: edit_json(f / "9/metadata.json", lambda content: content["instances"][0].update(positions="x")),
            "9/metadata.json",
            "'positions' is \"x\"; it should be of type list",
        ),
        (
            lambda f: edit_json(f / "9/metadata.json", lambda content: content["instances"][0].update(positions=[[1]])),
            "9/metadata.json",
            "'positions' of instance 0 is not 3 numbers for each frame",
        ),
        (
            lambda f: edit_json(f / "9/metadata.json", lambda content: content.pop("instances")),
            "9/metadata.json",
            "'instances' is missing",
        ),
    ],
)
def test_an_odd_folder_is_refused_with_a_sentence(folder: Path, damage: Damage, file: str, what: str) -> None:
    damage(folder)
    check_refused(lambda: kubric(folder), file, what, "segmentation_00000.png")


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    check_refused(lambda: kubric(tmp_path), tmp_path.name, "no scene was found", "SCENE/")
