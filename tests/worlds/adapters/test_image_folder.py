from pathlib import Path

import numpy as np
import pytest

from compgen_fast.worlds.adapters.image_folder import image_folder
from compgen_fast.worlds.source import Factor
from tests.worlds.adapters.folders import Damage, check_refused, noise, replace, write_image

TABLE = """filename,animal,size,label
b.png,fox,0.5,10
deep/a.jpg.png,bear,2,9
c.png,"fox, red",-1,10
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "factors.csv").write_text(TABLE)
    for seed, name in enumerate(("b.png", "deep/a.jpg.png", "c.png")):
        write_image(tmp_path / name, noise(seed))
    return tmp_path


def test_column_types_are_inferred(folder: Path) -> None:
    source = image_folder(folder, resolution=8)
    assert source.factors == (
        Factor("animal", ("bear", "fox", "fox, red")),
        Factor("size", low=-1, high=2),
        Factor("label", low=9, high=10),
    )
    assert len(source) == 3 and source.slots == () and source.name == folder.name


def test_samples_come_in_the_order_asked_for(folder: Path) -> None:
    samples = image_folder(folder, resolution=8).samples(np.array([2, 0, 2]))
    np.testing.assert_array_equal(samples.images, np.stack([noise(2), noise(0), noise(2)]))
    assert samples.masks is None
    assert samples.factors["animal"].tolist() == [2, 1, 2] and samples.factors["animal"].dtype == np.int64
    assert samples.factors["size"].tolist() == [-1, 0.5, -1] and samples.factors["size"].dtype == np.float32


def test_numbers_may_be_declared_names_and_keep_their_order(folder: Path) -> None:
    source = image_folder(folder, resolution=8, categories=("label",), columns=("label",))
    assert source.factors == (Factor("label", ("9", "10")),)
    assert source.table["label"].tolist() == [1, 0, 1]


def test_a_table_with_a_byte_order_mark_and_windows_lines_reads_the_same(folder: Path) -> None:
    (folder / "factors.csv").write_bytes(b"\xef\xbb\xbf" + TABLE.replace("\n", "\r\n").encode())
    assert image_folder(folder).table["size"].tolist() == [0.5, 2, -1]


def test_another_table_and_file_column_may_be_named(folder: Path) -> None:
    (folder / "other.csv").write_text("image,hue\nc.png,0.25\n")
    source = image_folder(folder, table="other.csv", filename="image", unlisted=True, resolution=8)
    np.testing.assert_array_equal(source.samples(np.array([0])).images[0], noise(2))
    assert source.table["hue"].tolist() == [0.25]


def test_hidden_files_are_no_images_and_a_leading_dot_is_no_other_path(folder: Path) -> None:
    for hidden in ("._b.png", ".trash/b.png"):
        (folder / hidden).parent.mkdir(exist_ok=True)
        (folder / hidden).write_bytes(b"resource fork")
    replace(folder / "factors.csv", "b.png", "./b.png")
    np.testing.assert_array_equal(image_folder(folder, resolution=8).samples(np.array([0])).images[0], noise(0))


def test_a_table_of_file_names_alone_gives_no_factors(folder: Path) -> None:
    (folder / "factors.csv").write_text("filename\nb.png\nc.png\n")
    source = image_folder(folder, unlisted=True)
    assert (source.factors, dict(source.table), source.images) == ((), {}, ("b.png", "c.png"))


def test_images_without_labels_come_sorted_by_path_and_have_no_factors(folder: Path) -> None:
    (folder / "factors.csv").unlink()
    source = image_folder(folder, resolution=8)
    assert (source.factors, source.images) == ((), ("b.png", "c.png", "deep/a.jpg.png"))
    samples = source.samples(np.array([1]))
    assert samples.factors == {}
    np.testing.assert_array_equal(samples.images[0], noise(2))


def test_a_folder_for_each_class_gives_the_factor_class(tmp_path: Path) -> None:
    for seed, name in enumerate(("dog/1.png", "cat/2.png", "cat/deep/1.png")):
        write_image(tmp_path / name, noise(seed))
    source = image_folder(tmp_path)
    assert source.factors == (Factor("class", ("cat", "dog")),)
    assert (source.images, source.table["class"].tolist()) == (("cat/2.png", "cat/deep/1.png", "dog/1.png"), [0, 0, 1])


def test_one_folder_of_all_images_is_no_class(tmp_path: Path) -> None:
    write_image(tmp_path / "images/1.png", noise(0))
    assert image_folder(tmp_path).factors == ()


def test_the_folder_one_stands_in_has_a_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert image_folder(".").name == folder.name


@pytest.mark.parametrize("option", ["filename", "columns", "categories", "unlisted"])
def test_what_is_about_a_table_is_refused_without_one(folder: Path, option: str) -> None:
    (folder / "factors.csv").unlink()
    with pytest.raises(ValueError, match=f"{option} is about a csv file, and there is none; leave it out"):
        image_folder(folder, **{option: ("size",)})


def test_a_folder_without_images_is_named(tmp_path: Path) -> None:
    check_refused(lambda: image_folder(tmp_path), tmp_path.name, r"no image was found \(\.png, ", "FOLDER/")


@pytest.mark.parametrize(
    ("damage", "file", "what"),
    [
        (lambda f: (f / "b.csv").touch(), "", r"at most was looked for and b\.csv, factors\.csv found"),
        (lambda f: (f / "c.png").unlink(), "c.png", r"there is no such image, though factors\.csv lists it"),
        (lambda f: write_image(f / "new.png", noise(9)), "new.png", r"factors\.csv does not list this image"),
        (lambda f: replace(f / "factors.csv", "filename", "file"), "factors.csv", "no column 'filename' among file"),
        (lambda f: replace(f / "factors.csv", "0.5", ""), "factors.csv", "row 1 has nothing in column 'size'"),
        (lambda f: replace(f / "factors.csv", "0.5", "inf"), "factors.csv", "column 'size' holds .* not finite"),
        (lambda f: replace(f / "factors.csv", ",9", ""), "factors.csv", "row 2 has 3 cells where the header has 4"),
        (lambda f: replace(f / "factors.csv", "label", "size"), "factors.csv", "column 'size' occurs twice"),
        (lambda f: replace(f / "factors.csv", "c.png", "b.png"), "factors.csv", r"image b\.png is listed twice"),
        (lambda f: replace(f / "factors.csv", "c.png", "../c.png"), "../c.png", "there is no such image"),
        (lambda f: (f / "factors.csv").write_text("filename,size\n"), "factors.csv", "the table is empty"),
        (lambda f: (f / "factors.csv").write_bytes(b"\xff\xfe\x00"), "factors.csv", "not a readable text file"),
        (lambda f: (f / "factors.csv").write_text("a" * 200_000), "factors.csv", "this is not a csv table"),
    ],
)
def test_an_odd_folder_is_refused_with_a_sentence(folder: Path, damage: Damage, file: str, what: str) -> None:
    damage(folder)
    check_refused(lambda: image_folder(folder), f"{folder.name}/{file}".rstrip("/"), what, "factors.csv")


def test_a_column_that_is_not_there_is_named(folder: Path) -> None:
    sentence = "there is no column 'hue' among filename, animal, size, label"
    check_refused(lambda: image_folder(folder, columns=("hue",)), "factors.csv", sentence, "factors.csv")
    check_refused(lambda: image_folder(folder, categories=("hue",)), "factors.csv", sentence, "factors.csv")


def test_no_folder_and_no_table_are_named(folder: Path) -> None:
    check_refused(lambda: image_folder(folder / "x"), f"{folder.name}/x", "there is no such folder", "FOLDER/")
    check_refused(lambda: image_folder(folder / "c.png"), "c.png", "this is a file, not a folder", "FOLDER/")
    check_refused(lambda: image_folder(folder, table="x.csv"), "x.csv", "there is no such file", "FOLDER/")
