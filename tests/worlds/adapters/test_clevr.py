from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compgen_fast.worlds.adapters.clevr import clevr, cogent
from compgen_fast.worlds.source import Factor
from tests.worlds.adapters.folders import Damage, check_refused, edit_json, noise, write_image, write_json

SCENES = "scenes/CLEVR_train_scenes.json"


def thing(shape: str, color: str, x: float = 1.0) -> dict[str, Any]:
    return {
        "shape": shape,
        "color": color,
        "size": "large",
        "material": "rubber",
        "3d_coords": [x, -2.5, 0.7],
        "pixel_coords": [100, 120, 10.0],
        "rotation": 90,
    }


def make(root: Path, part: str) -> Path:
    """Three scenes of two, none and one objects, in 12 by 8 pixels."""
    things = [[thing("cube", "red"), thing("sphere", "blue", -0.5)], [], [thing("cylinder", "yellow", 2.0)]]
    names = [f"CLEVR_{part}_{index:06d}.png" for index in range(3)]
    scenes = [{"image_filename": name, "objects": objects} for name, objects in zip(names, things, strict=True)]
    write_json(root / f"scenes/CLEVR_{part}_scenes.json", {"info": {"split": part}, "scenes": scenes})
    for seed, name in enumerate(names):
        write_image(root / "images" / part / name, noise(seed, 8, 12))
    return root


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make(tmp_path, "train")


def test_scenes_become_flat_factors_with_absent_objects_coded(folder: Path) -> None:
    source = clevr(folder, resolution=8, max_objects=2)
    table = {name: column.tolist() for name, column in source.table.items()}
    assert table == {
        "count": [2, 0, 1],
        "object0_shape": [1, 0, 2],
        "object0_size": [2, 0, 2],
        "object0_material": [2, 0, 2],
        "object0_color": [7, 0, 8],
        "object0_x": [1, 0, 2],
        "object0_y": [-2.5, 0, -2.5],
        "object0_rotation": [90, 0, 90],
        "object1_shape": [3, 0, 0],
        "object1_size": [2, 0, 0],
        "object1_material": [2, 0, 0],
        "object1_color": [1, 0, 0],
        "object1_x": [-0.5, 0, 0],
        "object1_y": [-2.5, 0, 0],
        "object1_rotation": [90, 0, 0],
    }
    assert [factor.name for factor in source.factors] == list(table)
    assert source.factors[1] == Factor("object0_shape", ("none", "cube", "cylinder", "sphere"))
    assert source.factors[5] == Factor("object0_x", low=-3, high=3)


def test_images_are_those_of_the_scenes(folder: Path) -> None:
    samples = clevr(folder, resolution=8).samples(np.array([2, 1]))
    np.testing.assert_array_equal(samples.images, np.stack([noise(2, 8, 12)[:, 2:10], noise(1, 8, 12)[:, 2:10]]))
    assert samples.factors["count"].tolist() == [1, 0] and samples.masks is None
    assert len(samples.factors) == 1 + 10 * 7


def test_scenes_of_too_many_objects_are_left_out(folder: Path) -> None:
    source = clevr(folder, resolution=8, max_objects=1)
    assert source.table["count"].tolist() == [0, 1]
    np.testing.assert_array_equal(source.samples(np.array([1])).images[0], noise(2, 8, 12)[:, 2:10])


@pytest.mark.parametrize("part", ["trainA", "valB"])
def test_cogent_has_parts_of_its_own(tmp_path: Path, part: str) -> None:
    source = cogent(make(tmp_path, part), part=part)
    assert len(source) == 3 and source.name == f"cogent-{part}"


def test_a_part_without_scene_files_is_refused() -> None:
    with pytest.raises(ValueError, match="CLEVR: part is 'test'; expected one of train, val"):
        clevr(".", part="test")
    with pytest.raises(ValueError, match="CLEVR-CoGenT: part is 'train'; expected one of trainA, valA, valB"):
        cogent(".", part="train")


def edited(key: str, value: Any) -> Damage:
    return lambda root: edit_json(
        root / SCENES, lambda content: content["scenes"][0]["objects"][1].update({key: value})
    )


@pytest.mark.parametrize(
    ("damage", "file", "what"),
    [
        (lambda f: (f / SCENES).unlink(), SCENES, "there is no such file"),
        (lambda f: (f / SCENES).write_text('{"scenes": ['), SCENES, "this is not valid JSON"),
        (lambda f: (f / SCENES).write_text("[]"), SCENES, "'scenes' is missing; it should be of type list"),
        (lambda f: (f / "images/train").rename(f / "images/x"), "images/train", "there is no such file or folder"),
        (lambda f: (f / "images/train/CLEVR_train_000001.png").unlink(), "CLEVR_train_000001.png", "no such image"),
        (lambda f: write_image(f / "images/train/x.png", noise(0)), "x.png", "_scenes.json does not list this image"),
        (edited("color", "pink"), SCENES, "an object's color is 'pink'; it should be one of blue, brown"),
        (edited("shape", None), SCENES, "'shape' is missing; it should be of type str"),
        (edited("3d_coords", [1]), SCENES, r"'3d_coords' is \[1\]; it should be a list of 2 numbers"),
        (edited("3d_coords", ["a", "b"]), SCENES, "it should be a list of 2 numbers"),
        (edited("rotation", "north"), SCENES, "'rotation' is \"north\"; it should be of type float"),
    ],
)
def test_an_odd_folder_is_refused_with_a_sentence(folder: Path, damage: Damage, file: str, what: str) -> None:
    damage(folder)
    check_refused(lambda: clevr(folder), file, what, "scenes/CLEVR_train_scenes.json")


def test_nothing_left_is_refused(folder: Path) -> None:
    edit_json(folder / SCENES, lambda content: content["scenes"].pop(1))
    (folder / "images/train/CLEVR_train_000001.png").unlink()
    check_refused(lambda: clevr(folder, max_objects=0), SCENES, "no scene has at most 0 objects", "scenes/")
