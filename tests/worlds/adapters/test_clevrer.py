from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compgen_fast.worlds.adapters.clevrer import clevrer
from compgen_fast.worlds.source import Factor
from tests.worlds.adapters.folders import Damage, check_refused, edit_json, noise, write_image, write_json

FRAMES = 11


def make_video(root: Path, number: int, colors: list[str]) -> None:
    """Objects have the ids 3, 4, …, stand at x = id and y = frame, and are out of view in frame 1."""
    folder = f"{number // 1000 * 1000:05d}-{number // 1000 * 1000 + 1000:05d}"
    properties = [
        {"object_id": 3 + place, "color": color, "material": "metal", "shape": "cube"}
        for place, color in enumerate(colors)
    ]
    frames = [
        {
            "frame_id": frame,
            "objects": [
                {"object_id": 3 + place, "location": [3 + place, frame, 0.5], "inside_camera_view": frame != 1}
                for place in reversed(range(len(colors)))
            ],
        }
        for frame in range(FRAMES)
    ]
    path = root / "annotation" / f"annotation_{folder}" / f"annotation_{number:05d}.json"
    write_json(path, {"scene_index": number, "object_property": properties, "motion_trajectory": frames})
    for frame in range(FRAMES):
        write_image(root / "frames" / f"video_{number:05d}" / f"{frame + 1}.png", noise(number + frame, 8, 12))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_video(tmp_path, 0, ["red", "blue"])
    make_video(tmp_path, 10001, ["cyan"])
    return tmp_path


FIRST = "annotation/annotation_00000-01000/annotation_00000.json"


def test_frames_have_images_and_factors(folder: Path) -> None:
    source = clevrer(folder, resolution=8, max_objects=2)
    samples = source.samples(np.array([10, 1, FRAMES]))
    expected = [noise(10, 8, 12), noise(1, 8, 12), noise(10001, 8, 12)]
    np.testing.assert_array_equal(samples.images, np.stack(expected)[:, :, 2:10])
    assert {name: column.tolist() for name, column in samples.factors.items()} == {
        "count": [2, 0, 1],
        "object0_shape": [1, 0, 1],
        "object0_material": [1, 0, 1],
        "object0_color": [7, 0, 3],
        "object0_x": [3, 0, 3],
        "object0_y": [10, 0, 0],
        "object0_z": [0.5, 0, 0.5],
        "object1_shape": [1, 0, 0],
        "object1_material": [1, 0, 0],
        "object1_color": [1, 0, 0],
        "object1_x": [4, 0, 0],
        "object1_y": [10, 0, 0],
        "object1_z": [0.5, 0, 0],
    }
    assert source.factors[5] == Factor("object0_y", low=0, high=10) and source.slots == ()


def test_parts_go_by_the_number_of_the_video(folder: Path) -> None:
    assert len(clevrer(folder)) == 2 * FRAMES
    np.testing.assert_array_equal(
        clevrer(folder, part="validation", resolution=8).samples(np.array([0])).images[0], noise(10001, 8, 12)[:, 2:10]
    )
    assert len(clevrer(folder, part="train")) == FRAMES
    with pytest.raises(ValueError, match="CLEVRER: part is 'test'; expected one of all, train, validation"):
        clevrer(folder, part="test")


def test_a_stride_takes_every_nth_frame(folder: Path) -> None:
    source = clevrer(folder, stride=5, part="train", resolution=8)
    assert source.table["object0_y"].tolist() == [0, 5, 10]
    np.testing.assert_array_equal(source.samples(np.array([2])).images[0], noise(10, 8, 12)[:, 2:10])
    with pytest.raises(ValueError, match="clevrer: stride is 0; expected at least 1"):
        clevrer(folder, stride=0)


def test_videos_of_too_many_objects_are_left_out(folder: Path) -> None:
    assert len(clevrer(folder, max_objects=1)) == FRAMES
    check_refused(lambda: clevrer(folder, max_objects=0), folder.name, "no video of at most 0 objects", "video_00000/")


def edited(edit: Any) -> Damage:
    return lambda root: edit_json(root / FIRST, edit)


@pytest.mark.parametrize(
    ("damage", "file", "what"),
    [
        (lambda f: (f / FIRST).unlink(), "annotation_00000.json", "no such file, though the frames are there"),
        (lambda f: (f / "frames/video_00000").rename(f / "frames/x"), "video_00000", "no folder of frames"),
        (lambda f: (f / "annotation").rename(f.with_name("gone")), "", r"no annotation_NNNNN\.json was found"),
        (lambda f: (f / FIRST).write_text("nothing"), FIRST, "this is not valid JSON"),
        (lambda f: (f / "frames/video_00000/7.png").unlink(), FIRST, "11 frames, but frames/video_00000 holds 10 im"),
        (edited(lambda c: c.pop("motion_trajectory")), FIRST, "'motion_trajectory' is missing"),
        (edited(lambda c: c["object_property"][0].update(color="pink")), FIRST, "an object's color is 'pink'"),
        (edited(lambda c: c["object_property"].pop()), FIRST, "moves object 4, which has no properties"),
        (
            edited(lambda c: c["motion_trajectory"][2]["objects"][0].update(location=[1, 2])),
            FIRST,
            r"'location' is \[1, 2\]; it should be a list of 3 numbers",
        ),
    ],
)
def test_an_odd_folder_is_refused_with_a_sentence(folder: Path, damage: Damage, file: str, what: str) -> None:
    damage(folder)
    check_refused(lambda: clevrer(folder), file or folder.name, what, "annotation_00000.json")
