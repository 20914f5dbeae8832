"""Our PNG decoder gives the pixels every other one gives, and refuses what is not the image promised."""

import io

import imagecodecs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from compgen_fast.stream import codecs, png


def picture(*shape: int) -> png.Pixels:
    return np.random.default_rng(sum(shape)).integers(0, 256, shape, dtype=np.uint8)


@given(st.integers(1, 150), st.integers(110, 300), st.booleans())
@settings(max_examples=40, deadline=None)
def test_what_was_written_is_read_at_any_size(height: int, width: int, grey: bool) -> None:
    image = picture(height, width) if grey else picture(height, width, 3)
    out = np.empty_like(image)
    png.decode(png.encode(image), out)
    assert np.array_equal(out, image)


def test_the_fast_way_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    image = picture(224, 224, 3)
    data, out = png.encode(image), np.empty_like(image)
    monkeypatch.delattr(imagecodecs, "spng_decode")
    png.decode(data, out)
    assert np.array_equal(out, image)


@pytest.mark.parametrize("optimise", [False, True])
def test_files_of_other_writers_are_read(optimise: bool) -> None:
    image = picture(100, 120, 3)
    file = io.BytesIO()
    Image.fromarray(image).save(file, "png", optimize=optimise)
    out = np.empty_like(image)
    png.decode(file.getvalue(), out)
    assert np.array_equal(out, image)


@pytest.mark.parametrize("wrong", [(100, 121, 3), (101, 120, 3), (100, 120)])
def test_another_shape_is_refused(wrong: tuple[int, ...]) -> None:
    with pytest.raises(codecs.UNDECODABLE):
        png.decode(png.encode(picture(100, 120, 3)), np.empty(wrong, np.uint8))


@pytest.mark.parametrize("cut", [20, 60, 3000, -5000])
def test_a_file_cut_short_is_refused(cut: int) -> None:
    data = png.encode(picture(100, 120, 3))
    with pytest.raises(codecs.UNDECODABLE):
        png.decode(data[:cut], np.empty((100, 120, 3), np.uint8))


def test_rows_that_unpack_to_fewer_or_more_are_refused() -> None:
    small, large = png.encode(picture(100, 120, 3)), png.encode(picture(200, 120, 3))
    header = slice(16, 33)
    for rows, head in ((small, large), (large, small)):
        data = rows[: header.start] + head[header] + rows[header.stop :]
        height = 200 if head is large else 100
        with pytest.raises(codecs.UNDECODABLE):
            png.decode(data, np.empty((height, 120, 3), np.uint8))
