from pathlib import Path

import numpy as np
import pytest

from compgen_fast.worlds.adapters.celeba import celeba
from compgen_fast.worlds.source import Factor
from tests.worlds.adapters.folders import Damage, check_refused, noise, replace, write_image

ATTRIBUTES = """4
Bald Smiling
000001.png -1  1
000002.png  1 -1
000003.png  1  1
000004.png -1 -1
"""
PARTS = "000001.png 0\n000002.png 1\n000003.png 0\n000004.png 2\n"


def make(root: Path, images: str = "", attributes: str = "", parts: str = "") -> Path:
    """Portraits of 8 by 11 pixels, as png so that pixels can be compared."""
    for seed in range(4):
        write_image(root / images / "img_align_celeba" / f"{seed + 1:06d}.png", noise(seed, 11, 8))
    for folder, name, text in ((attributes, "list_attr_celeba", ATTRIBUTES), (parts, "list_eval_partition", PARTS)):
        (root / folder).mkdir(exist_ok=True)
        (root / folder / f"{name}.txt").write_text(text)
    return root


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make(tmp_path)


def test_attributes_are_absent_or_present(folder: Path) -> None:
    source = celeba(folder, resolution=8)
    assert source.factors == (Factor("Bald", ("absent", "present")), Factor("Smiling", ("absent", "present")))
    samples = source.samples(np.array([3, 1]))
    np.testing.assert_array_equal(samples.images, np.stack([noise(3, 11, 8)[1:9], noise(1, 11, 8)[1:9]]))
    assert samples.factors["Bald"].tolist() == [0, 1] and samples.factors["Smiling"].tolist() == [0, 0]


def test_parts_are_those_of_the_partition_file(folder: Path) -> None:
    assert len(celeba(folder)) == 4
    train = celeba(folder, part="train", resolution=8)
    assert train.table["Bald"].tolist() == [0, 1] and train.table["Smiling"].tolist() == [1, 1]
    np.testing.assert_array_equal(train.samples(np.array([1])).images[0], noise(2, 11, 8)[1:9])
    assert [celeba(folder, part=part).table["Bald"].tolist() for part in ("validation", "test")] == [[1], [0]]
    with pytest.raises(ValueError, match="CelebA: part is 'val'; expected one of all, train, validation, test"):
        celeba(folder, part="val")


def test_the_folders_of_the_original_archive_are_found(tmp_path: Path) -> None:
    assert len(celeba(make(tmp_path, "Img", "Anno", "Eval"), part="train")) == 2


TABLE, PARTITION = "list_attr_celeba.txt", "list_eval_partition.txt"


@pytest.mark.parametrize(
    ("damage", "file", "what"),
    [
        (lambda f: (f / TABLE).unlink(), TABLE, r"there is no such file or folder \(nor Anno/list_attr_celeba\.txt\)"),
        (lambda f: (f / PARTITION).unlink(), PARTITION, "there is no such file"),
        (lambda f: (f / "img_align_celeba").rename(f / "x"), "img_align_celeba", "there is no such file or folder"),
        (lambda f: (f / "img_align_celeba/000002.png").unlink(), "000002.png", "no such image, though list_attr"),
        (lambda f: write_image(f / "img_align_celeba/9.png", noise(0)), "9.png", "does not list this image"),
        (lambda f: replace(f / TABLE, "000004.png -1 -1\n", ""), TABLE, "its first line says '4' images and 3 lines"),
        (lambda f: (f / TABLE).write_text(""), TABLE, "its first line says '' images and 0 lines"),
        (lambda f: replace(f / TABLE, "1 -1", "1 0"), TABLE, "line 4 is not a file name and 2 times 1 or -1"),
        (lambda f: replace(f / TABLE, "1 -1", "1"), TABLE, "line 4 is not a file name and 2 times 1 or -1"),
        (lambda f: replace(f / PARTITION, "png 1", "png 3"), PARTITION, "line 2 is not a file name and 0, 1 or 2"),
        (lambda f: replace(f / PARTITION, "000004.png 2\n", ""), PARTITION, r"to which part 000004\.png belongs"),
    ],
)
def test_an_odd_folder_is_refused_with_a_sentence(folder: Path, damage: Damage, file: str, what: str) -> None:
    damage(folder)
    check_refused(lambda: celeba(folder, part="train"), file, what, "img_align_celeba/000001.jpg")
