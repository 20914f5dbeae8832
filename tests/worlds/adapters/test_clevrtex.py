from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compgen_fast.worlds.adapters.clevrtex import clevrtex
from compgen_fast.worlds.source import Factor
from tests.worlds.adapters.folders import (
    Damage,
    check_refused,
    edit_json,
    noise,
    write_image,
    write_json,
    write_mask,
)


def thing(shape: str, material: str) -> dict[str, Any]:
    return {
        "shape": shape,
        "size": "small",
        "material": material,
        "color": "red",
        "rotation": 45.5,
        "3d_coords": [0.5, -1.0, 0.4],
        "index": 1,
    }


def mask(seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, 3, (8, 12), np.uint8)


def make(root: Path, count: int, variant: str = "full") -> Path:
    """Scenes of 12 by 8 pixels; the odd ones have two objects, the even ones one."""
    for index in range(count):
        stem = root / str(index // 2) / f"CLEVRTEX_{variant}_{index:06d}"
        things = [thing("cube", f"m{index}"), thing("monkey", "m0")][: 1 + index % 2]
        write_json(stem.with_suffix(".json"), {"ground_material": f"g{index % 2}", "objects": things})
        write_image(stem.with_suffix(".png"), noise(index, 8, 12))
        write_image(root / str(index // 2) / f"{stem.name}_depth_0001.png", noise(99))
        write_mask(root / str(index // 2) / f"{stem.name}_flat.png", mask(index))
    return root


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make(tmp_path, 3)


def test_scenes_have_images_masks_and_factors(folder: Path) -> None:
    source = clevrtex(folder, resolution=8, max_objects=2)
    samples = source.samples(np.array([1, 0]))
    np.testing.assert_array_equal(samples.images, np.stack([noise(1, 8, 12)[:, 2:10], noise(0, 8, 12)[:, 2:10]]))
    assert samples.masks is not None
    np.testing.assert_array_equal(samples.masks, np.stack([mask(1)[:, 2:10], mask(0)[:, 2:10]]))
    assert source.slots == ("background", "object0", "object1")
    assert {name: column.tolist() for name, column in samples.factors.items()} == {
        "ground_material": [1, 0],
        "count": [2, 1],
        "object0_shape": [1, 1],
        "object0_size": [1, 1],
        "object0_material": [2, 1],
        "object0_x": [0.5, 0.5],
        "object0_y": [-1, -1],
        "object0_rotation": [45.5, 45.5],
        "object1_shape": [2, 0],
        "object1_size": [1, 0],
        "object1_material": [1, 0],
        "object1_x": [0.5, 0],
        "object1_y": [-1, 0],
        "object1_rotation": [45.5, 0],
    }
    assert source.factors[0] == Factor("ground_material", ("g0", "g1"))
    assert source.factors[4] == Factor("object0_material", ("none", "m0", "m1", "m2"))


def test_the_mask_is_resized_with_the_image(folder: Path) -> None:
    found = clevrtex(folder, resolution=4).samples(np.array([0])).masks
    assert found is not None and found.shape == (1, 4, 4)
    np.testing.assert_array_equal(found[0], mask(0)[1::2, 3:11:2])


def test_parts_are_tenths_by_number_with_one_vocabulary(tmp_path: Path) -> None:
    make(tmp_path, 20)
    parts = {name: clevrtex(tmp_path, part=name, resolution=8) for name in ("test", "validation", "train", "all")}
    assert [len(part) for part in parts.values()] == [2, 2, 16, 20]
    assert all(part.factors == parts["all"].factors for part in parts.values())
    np.testing.assert_array_equal(
        parts["validation"].samples(np.array([1])).images[0], parts["all"].samples(np.array([3])).images[0]
    )
    with pytest.raises(ValueError, match="CLEVRTex: part is 'val'; expected one of all, test, validation, train"):
        clevrtex(tmp_path, part="val")


def test_colours_are_read_only_where_they_are_in_the_image(tmp_path: Path) -> None:
    assert "object0_color" not in clevrtex(make(tmp_path / "full", 1)).table
    assert clevrtex(make(tmp_path / "vbg", 1, "vbg")).table["object0_color"].tolist() == [1]


def test_scenes_of_too_many_objects_are_left_out(folder: Path) -> None:
    assert clevrtex(folder, max_objects=1).table["count"].tolist() == [1, 1]
    check_refused(
        lambda: clevrtex(folder, max_objects=0), folder.name, "no scene of at most 0 objects", "clevrtex_full/"
    )


SCENE = "0/CLEVRTEX_full_000001"


@pytest.mark.parametrize(
    ("damage", "file", "what"),
    [
        (lambda f: [path.unlink() for path in f.rglob("*.png")], "", r"no image CLEVRTEX_\*_NNNNNN\.png was found"),
        (lambda f: (f / f"{SCENE}.json").unlink(), f"{SCENE}.json", "there is no such file"),
        (lambda f: (f / f"{SCENE}_flat.png").unlink(), f"{SCENE}_flat.png", "there is no such file"),
        (lambda f: (f / f"{SCENE}.png").unlink(), f"{SCENE}.json", "the scene's image is not there"),
        (lambda f: (f / f"{SCENE}.json").write_text("{"), f"{SCENE}.json", "this is not valid JSON"),
        (
            lambda f: edit_json(f / f"{SCENE}.json", lambda content: content.pop("ground_material")),
            f"{SCENE}.json",
            "'ground_material' is missing",
        ),
        (
            lambda f: edit_json(f / f"{SCENE}.json", lambda content: content["objects"][0].pop("size")),
            f"{SCENE}.json",
            "'size' is missing",
        ),
    ],
)
def test_an_odd_folder_is_refused_with_a_sentence(folder: Path, damage: Damage, file: str, what: str) -> None:
    damage(folder)
    check_refused(lambda: clevrtex(folder), f"{folder.name}/{file}".rstrip("/"), what, "CLEVRTEX_full_000000_flat.png")
