from pathlib import Path
from typing import Any

import h5py  # type: ignore[import-untyped]
import numpy as np
import pytest
from numpy.typing import NDArray

from compgen_fast.worlds.adapters.shapes3d import NAMES, SHAPES, shapes3d
from compgen_fast.worlds.source import Factor
from tests.worlds.adapters.folders import check_refused, noise, truncate

LABELS = np.array([[0.1, 0.2, 0.3, 0.75, 3, -30], [0.9, 0.0, 0.5, 1.25, 0, 30], [0.1, 0.1, 0.1, 1.0, 2, 0]])
IMAGES = np.stack([noise(seed) for seed in range(3)])


def make(root: Path, **contents: NDArray[Any]) -> Path:
    with h5py.File(root / "3dshapes.h5", "w") as file:
        for name, content in ({"images": IMAGES, "labels": LABELS} | contents).items():
            file[name] = content
    return root


def test_rows_come_with_their_labels_in_any_order(tmp_path: Path) -> None:
    source = shapes3d(make(tmp_path), resolution=8)
    samples = source.samples(np.array([2, 0, 2, 1]))
    np.testing.assert_array_equal(samples.images, IMAGES[[2, 0, 2, 1]])
    assert samples.masks is None and len(source) == 3
    assert samples.factors["shape"].tolist() == [2, 3, 2, 0] and samples.factors["shape"].dtype == np.int64
    for column in set(range(6)) - {4}:
        expected = LABELS[[2, 0, 2, 1], column].astype(np.float32)
        np.testing.assert_array_equal(samples.factors[NAMES[column]], expected)
    assert source.factors[3:5] == (Factor("scale", low=0.75, high=1.25), Factor("shape", SHAPES))
    assert source.factors[5] == Factor("orientation", low=-30, high=30)


def test_images_are_resized(tmp_path: Path) -> None:
    flat = np.broadcast_to(np.array([1, 2, 3], np.uint8), (3, 8, 8, 3))
    images = shapes3d(make(tmp_path, images=flat), resolution=4).samples(np.array([1])).images
    np.testing.assert_array_equal(images, flat[:1, :4, :4])


def test_only_the_rows_asked_for_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = shapes3d(make(tmp_path), resolution=8)
    asked: list[Any] = []
    read = h5py.Dataset.__getitem__

    def recorded(dataset: Any, rows: Any, **options: Any) -> Any:
        asked.append((dataset.name, list(rows)))
        return read(dataset, rows, **options)

    monkeypatch.setattr(h5py.Dataset, "__getitem__", recorded)
    source.samples(np.array([2, 0, 2]))
    assert asked == [("/images", [0, 2])]


def test_the_file_itself_may_be_given(tmp_path: Path) -> None:
    assert len(shapes3d(make(tmp_path) / "3dshapes.h5")) == 3


@pytest.mark.parametrize(
    ("contents", "what"),
    [
        ({"images": IMAGES[..., 0]}, r"no 'images' of the right shape; the file holds images \[3, 8, 8\], labels"),
        ({"labels": LABELS[:, :5]}, r"no 'labels' of the right shape; .*labels \[3, 5\]"),
        ({"labels": LABELS[:2]}, "there are 3 images of type uint8 and 2 labels"),
        ({"images": IMAGES.astype(np.float32)}, "there are 3 images of type float32 and 3 labels"),
        ({"labels": LABELS + 0.5}, "a shape's label is not one of 0, 1, 2, 3"),
        ({"images": IMAGES[:0], "labels": LABELS[:0]}, "no 'images' of the right shape"),
    ],
)
def test_a_file_with_other_contents_is_refused(tmp_path: Path, contents: dict[str, NDArray[Any]], what: str) -> None:
    make(tmp_path, **contents)
    check_refused(lambda: shapes3d(tmp_path), "3dshapes.h5", what, "labels: float [480000, 6]")


def test_a_file_with_other_keys_is_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "3dshapes.h5", "w") as file:
        file["pictures"] = IMAGES
    check_refused(lambda: shapes3d(tmp_path), "3dshapes.h5", r"the file holds pictures \[3, 8", "images: uint8")


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    check_refused(lambda: shapes3d(tmp_path), "3dshapes.h5", "there is no such file", "3dshapes.h5")
    truncate(make(tmp_path) / "3dshapes.h5")
    check_refused(lambda: shapes3d(tmp_path), "3dshapes.h5", "this is not a readable HDF5 file", "3dshapes.h5")
