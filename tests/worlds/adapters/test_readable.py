"""Finding what cannot be read, and leaving it out."""

from pathlib import Path

import numpy as np
import pytest

from compgen_fast.worlds.adapters import held_out, open_folder, unreadable, without
from compgen_fast.worlds.adapters.folder_source import FolderSource
from compgen_fast.worlds.source import Factor
from tests.worlds.adapters.folders import noise, truncate, write_image, write_mask


@pytest.fixture
def source(tmp_path: Path) -> FolderSource:
    """Every pair of three shapes and three grounds four times."""
    images = [f"{number:02d}.png" for number in range(36)]
    for number, name in enumerate(images):
        write_image(tmp_path / name, noise(number, 12, 16))
    number = np.arange(36)
    table = {"shape": number % 3, "ground": number // 3 % 3}
    factors = tuple(Factor(name, ("a", "b", "c")) for name in table)
    return FolderSource("pairs", tmp_path, factors, table, tuple(images), 8)


@pytest.mark.parametrize("workers", [1, 3])
def test_bad_images_are_found_with_what_is_wrong(source: FolderSource, workers: int) -> None:
    assert unreadable(source) == {}
    truncate(source.folder / "07.png")
    (source.folder / "03.png").write_text("hello")
    found = unreadable(source, workers=workers)
    assert list(found) == ["03.png", "07.png"]
    assert found["03.png"] == "this is not an image, whatever its ending says"
    assert found["07.png"].startswith("the image cannot be read (")


def test_the_others_are_left_in_their_order(source: FolderSource) -> None:
    rest = without(source, {"03.png": "", "00.png": "", "gone.png": ""})
    assert (len(rest), rest.name, rest.made) == (34, source.name, source.made)
    np.testing.assert_array_equal(rest.samples(np.array([1])).images, source.samples(np.array([2])).images)
    assert without(source, {}) is source


def test_a_bad_image_moves_no_other_between_the_parts_of_a_split(source: FolderSource) -> None:
    """Parts are packed one by one: were the bad left out first, a sample could change sides between two of them."""
    truncate(source.folder / "07.png")
    parts = held_out(source, ("shape", "ground"))
    found = [unreadable(part) for part in parts]
    assert sorted(name for bad in found for name in bad) == ["07.png"]
    assert sum(len(without(part, bad)) for part, bad in zip(parts, found, strict=True)) == 35


def test_a_bad_mask_makes_its_image_bad_and_is_named(tmp_path: Path) -> None:
    write_image(tmp_path / "a.png", noise(0))
    write_mask(tmp_path / "m.png", np.full((8, 8), 3, np.uint8))
    source = FolderSource("masked", tmp_path, (), {}, ("a.png",), 8, ("m.png",), ("background", "thing"))
    assert unreadable(source)["a.png"].startswith("m.png: the mask holds the number 3")


def test_holding_out_factors_of_images_without_any_is_refused(tmp_path: Path) -> None:
    write_image(tmp_path / "a.png", noise(0))
    with pytest.raises(ValueError, match="has no factor 'shape'; it has none"):
        held_out(open_folder("images", tmp_path), ("shape", "ground"))
