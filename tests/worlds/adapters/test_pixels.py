import pickle
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import ExifTags, Image

from compgen_fast.worlds.adapters import FolderError
from compgen_fast.worlds.adapters.pixels import MAX_PIXELS, BadImage, Fit, read_image, read_mask, resized
from tests.worlds.adapters.folders import noise, truncate, write_image, write_mask


def test_an_image_of_the_right_size_comes_through_unchanged(tmp_path: Path) -> None:
    write_image(tmp_path / "a.png", noise(0))
    np.testing.assert_array_equal(read_image(tmp_path / "a.png", 8), noise(0))


@pytest.mark.parametrize(
    ("height", "width", "rows", "columns"),
    [(8, 14, slice(0, 8), slice(3, 11)), (13, 8, slice(2, 10), slice(0, 8))],
)
def test_the_middle_square_is_kept(tmp_path: Path, height: int, width: int, rows: slice, columns: slice) -> None:
    pixels = noise(1, height, width)
    write_image(tmp_path / "a.png", pixels)
    np.testing.assert_array_equal(read_image(tmp_path / "a.png", 8), pixels[rows, columns])


@pytest.mark.parametrize("resolution", [5, 8, 24])
def test_resizing_does_not_stretch_and_sees_nothing_outside_the_square(tmp_path: Path, resolution: int) -> None:
    pixels = np.full((16, 32, 3), 255, np.uint8)
    pixels[:, 8:24] = (10, 20, 30)
    write_image(tmp_path / "a.png", pixels)
    found = read_image(tmp_path / "a.png", resolution)
    np.testing.assert_array_equal(found, np.broadcast_to(np.array([10, 20, 30], np.uint8), (resolution, resolution, 3)))


def test_shrinking_averages_where_nearest_neighbour_would_pick(tmp_path: Path) -> None:
    pixels = np.zeros((32, 32, 3), np.uint8)
    pixels[::2] = 200
    write_image(tmp_path / "a.png", pixels)
    middle = read_image(tmp_path / "a.png", 8)[2:6, 2:6].astype(int)
    assert abs(middle - 100).max() <= 3


@pytest.mark.parametrize(("height", "width"), [(32, 32), (32, 44), (50, 32)])
@pytest.mark.parametrize("palette", [True, False])
def test_masks_shrink_without_new_numbers_and_stay_aligned_with_images(
    tmp_path: Path, height: int, width: int, palette: bool
) -> None:
    top, left = (height - 32) // 2, (width - 32) // 2
    numbers = np.full((height, width), 2, np.uint8)
    block = np.kron(np.random.default_rng(0).integers(0, 2, (4, 4)), np.ones((8, 8))).astype(np.uint8)
    numbers[top : top + 32, left : left + 32] = np.where(block, 5, 1)
    write_mask(tmp_path / "m.png", numbers) if palette else Image.fromarray(numbers).save(tmp_path / "m.png")
    write_image(tmp_path / "a.png", np.repeat((numbers * 50)[..., None], 3, -1))
    mask = read_mask(tmp_path / "m.png", tmp_path / "a.png", 16, 6)
    uneven = read_mask(tmp_path / "m.png", tmp_path / "a.png", 11, 6)
    assert set(np.unique(mask)) == set(np.unique(uneven)) == {1, 5}
    np.testing.assert_array_equal(mask, np.where(block[::2, ::2], 5, 1))
    np.testing.assert_array_equal(mask == 5, read_image(tmp_path / "a.png", 16)[..., 0] > 150)


def test_a_mask_of_another_size_than_its_image_is_refused(tmp_path: Path) -> None:
    write_image(tmp_path / "a.png", noise(0))
    write_mask(tmp_path / "m.png", np.zeros((8, 9), np.uint8))
    with pytest.raises(FolderError, match=r"m\.png: the mask is 9×8 pixels and its image a\.png 8×8"):
        read_mask(tmp_path / "m.png", tmp_path / "a.png", 8, 3)


def test_a_mask_with_more_objects_than_slots_is_refused(tmp_path: Path) -> None:
    write_image(tmp_path / "a.png", noise(0))
    write_mask(tmp_path / "m.png", np.full((8, 8), 3, np.uint8))
    assert read_mask(tmp_path / "m.png", tmp_path / "a.png", 8, 4).max() == 3
    with pytest.raises(FolderError, match=r"m\.png: the mask holds the number 3, but there are 2 objects at most"):
        read_mask(tmp_path / "m.png", tmp_path / "a.png", 8, 3)


def test_a_coloured_mask_is_refused(tmp_path: Path) -> None:
    write_image(tmp_path / "a.png", noise(0))
    with pytest.raises(FolderError, match="its mode is RGB, expected one of L, P"):
        read_mask(tmp_path / "a.png", tmp_path / "a.png", 8, 3)


def test_transparent_pixels_are_black_whatever_colour_hides_there(tmp_path: Path) -> None:
    pixels = np.full((8, 8, 4), 255, np.uint8)
    pixels[:4, :, 3] = 0
    Image.fromarray(pixels).save(tmp_path / "a.png")
    found = read_image(tmp_path / "a.png", 8)
    assert not found[:4].any() and (found[4:] == 255).all()


def test_grey_images_become_three_channels(tmp_path: Path) -> None:
    Image.fromarray(noise(0)[..., 0]).save(tmp_path / "a.png")
    np.testing.assert_array_equal(read_image(tmp_path / "a.png", 8), np.repeat(noise(0)[..., :1], 3, -1))


@pytest.mark.parametrize("name", ["a.png", "a.tif"])
def test_sixteen_bits_of_grey_are_scaled_to_eight_rather_than_clipped(tmp_path: Path, name: str) -> None:
    grey = noise(0)[..., 0]
    Image.fromarray(grey.astype(np.uint16) * 257).save(tmp_path / name)
    np.testing.assert_array_equal(read_image(tmp_path / name, 8), np.repeat(grey[..., None], 3, -1))


def test_an_image_of_unknown_scale_is_refused(tmp_path: Path) -> None:
    Image.fromarray(np.full((8, 8), 0.5, np.float32)).save(tmp_path / "a.tif")
    with pytest.raises(BadImage, match=r"a\.tif: the image cannot be read \(its mode is F"):
        read_image(tmp_path / "a.tif", 8)


def test_print_colours_become_screen_colours(tmp_path: Path) -> None:
    Image.new("CMYK", (8, 8), (0, 255, 255, 0)).save(tmp_path / "a.tif")
    assert (read_image(tmp_path / "a.tif", 8) == (255, 0, 0)).all()


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("fit", ["crop", "pad"])
def test_cameras_rotation_marks_are_followed(tmp_path: Path, orientation: int, fit: Fit) -> None:
    upright = noise(2, 8, 12)
    turned = upright[::-1] if orientation in (3, 4, 7, 8) else upright
    turned = turned[:, ::-1] if orientation in (2, 3, 6, 7) else turned
    turned = turned.swapaxes(0, 1) if orientation >= 5 else turned
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    Image.fromarray(np.ascontiguousarray(turned)).save(tmp_path / "a.png", exif=exif)
    expected = upright[:, 2:10] if fit == "crop" else np.pad(upright, ((2, 2), (0, 0), (0, 0)))
    np.testing.assert_array_equal(read_image(tmp_path / "a.png", len(expected), fit), expected)
    write_mask(tmp_path / "m.png", np.ones((8, 12), np.uint8))
    assert read_mask(tmp_path / "m.png", tmp_path / "a.png", 8, 2).all()


@pytest.mark.parametrize(("height", "width"), [(16, 32), (40, 16), (1, 300), (9, 9)])
def test_padding_keeps_all_of_an_image_and_its_mask_in_the_middle_of_black(
    tmp_path: Path, height: int, width: int
) -> None:
    write_image(tmp_path / "a.png", np.full((height, width, 3), 200, np.uint8))
    write_mask(tmp_path / "m.png", np.ones((height, width), np.uint8))
    image = read_image(tmp_path / "a.png", 16, "pad")
    covered = np.argwhere((image == 200).all(-1))
    scale = 16 / max(height, width)
    assert (covered.max(0) - covered.min(0) + 1).tolist() == [max(1, round(side * scale)) for side in (height, width)]
    assert abs(covered.mean(0) - 7.5).max() <= 0.5
    assert len(covered) == (image > 0).any(-1).sum()
    mask = read_mask(tmp_path / "m.png", tmp_path / "a.png", 16, 2, "pad")
    np.testing.assert_array_equal(mask == 1, (image > 0).any(-1))


def test_a_bad_image_travels_between_processes(tmp_path: Path) -> None:
    bad = pickle.loads(pickle.dumps(BadImage(tmp_path, "it is torn")))
    assert (str(bad), bad.what) == (f"{tmp_path}: it is torn; restore or remove the file", "it is torn")


def test_a_file_that_is_no_image_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_text("hello")
    with pytest.raises(BadImage, match=r"a\.png: this is not an image, whatever its ending says; restore or remove"):
        read_image(tmp_path / "a.png", 8)


@pytest.mark.parametrize("name", ["a.png", "a.jpg", "a.webp"])
def test_a_truncated_image_is_named(tmp_path: Path, name: str) -> None:
    write_image(tmp_path / name, noise(0, 32, 32))
    truncate(tmp_path / name)
    with pytest.raises(FolderError, match=rf"{name}: the image cannot be read .*; restore or remove the file"):
        read_image(tmp_path / name, 8)


@pytest.mark.parametrize("side", [int(MAX_PIXELS**0.5) + 1, 2**16])
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_decompression_bomb_is_refused_by_its_header(tmp_path: Path, side: int) -> None:
    header = b"IHDR" + struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    (tmp_path / "a.png").write_bytes(png + struct.pack(">I", 8) + b"IDAT" + bytes(12))
    with pytest.raises(FolderError, match=r"a\.png: the image cannot be read \(.*pixels"):
        read_image(tmp_path / "a.png", 8)


def test_decoded_images_are_cut_and_resized_alike(tmp_path: Path) -> None:
    write_image(tmp_path / "a.png", noise(0, 16, 20))
    np.testing.assert_array_equal(resized(noise(0, 16, 20), 8), read_image(tmp_path / "a.png", 8))
