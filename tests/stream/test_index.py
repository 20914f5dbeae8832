"""Tars that webdataset's own writer made, indexed where they are: the same pixels, labels as factors, none touched."""

import gzip
import io
import json
import os
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np
import pytest
import webdataset
from numpy.typing import NDArray
from PIL import Image

from compgen_fast import cli
from compgen_fast.stream import (
    Indexed,
    OverBudget,
    ShardStream,
    StreamError,
    index,
    index_tars,
    inspect,
    labels,
    verify,
)
from compgen_fast.stream.manifest import FILE
from tests.stream import damage
from tests.stream.stub import packed

Pixels = NDArray[np.uint8]


def picture(number: int, height: int = 16, width: int = 16) -> Pixels:
    rows, columns = np.mgrid[:height, :width]
    return np.stack([rows * 5 + number * 7, columns * 3 + number, rows + columns + number // 5], -1).astype(np.uint8)


def encoded(image: Pixels | Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(file, kind, **options)
    return file.getvalue()


def write(path: Path, *samples: Mapping[str, Any]) -> Path:
    """A tar by webdataset's writer; samples without a key are numbered."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with webdataset.TarWriter(str(path)) as tar:
        for number, sample in enumerate(samples):
            tar.write({"__key__": f"{number:03d}", **sample})
    return path


def write_members(path: Path, *members: tuple[str, bytes | None]) -> Path:
    """A tar of these files, and folders where there are no contents, in this order."""
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size, member.type = len(data or b""), tarfile.REGTYPE if data is not None else tarfile.DIRTYPE
            tar.addfile(member, io.BytesIO(data or b""))
    return path


def in_order(folder: Path, **options: Any) -> tuple[list[Pixels], list[str], dict[str, list[Any]]]:
    """Images, keys and factors, a category as its name."""
    images: list[Pixels] = []
    keys: list[str] = []
    factors: dict[str, list[Any]] = {}
    with ShardStream(folder, batch_size=3, epochs=1, shuffle=False, **options) as stream:
        for batch in stream:
            images += [image.numpy() for image in batch.images[batch.valid]]
            keys += [key for key, valid in zip(batch.keys, batch.valid, strict=True) if valid]
            for factor in stream.schema.factors:
                found = batch.factors[factor.name][batch.valid].tolist()
                named = [factor.values[number] for number in found] if factor.values else found
                factors.setdefault(factor.name, []).extend(named)
    return images, keys, factors


def webdataset_alone(tars: Sequence[Path], part: str) -> list[Pixels]:
    urls = [str(path) for path in sorted(tars)]
    return [np.asarray(sample[part]) for sample in webdataset.WebDataset(urls, shardshuffle=False).decode("rgb8")]


def check_same(found: Sequence[Pixels], expected: Sequence[Pixels]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Twenty samples in three tars, with all kinds of labels."""
    folder = tmp_path / "shards"
    folder.mkdir()
    with webdataset.ShardWriter(str(folder / "train-%06d.tar"), maxcount=8, verbose=0) as writer:
        for number in range(20):
            told = {"x": number / 20, "shape": "disc" if number % 2 else "star", "seen": number > 3}
            label = {"json": told, "cls": 7 * (number % 3), "txt": f"colour {number % 4}\n"}
            writer.write({"__key__": f"{number:04d}", "png": picture(number), **label})
    return folder


def test_shards_of_webdatasets_own_writer_stream_with_their_labels_and_stay_as_they_are(shards: Path) -> None:
    before = {path: path.read_bytes() for path in shards.iterdir()}
    made = index_tars(shards)
    assert made.left_out == () and made.manifest.samples == 20 and len(made.manifest.shards) == 3
    assert {path: path.read_bytes() for path in before} == before
    added = {path.name for path in shards.iterdir()} - {path.name for path in before}
    assert added == {FILE, *(f"train-{number:06d}.index.npy" for number in range(3))}

    images, keys, factors = in_order(shards)
    check_same(images, webdataset_alone([*before], "png"))
    check_same(images, [picture(number) for number in range(20)])
    assert keys == [f"{number:04d}" for number in range(20)]
    assert factors["x"] == pytest.approx([number / 20 for number in range(20)])
    assert factors["shape"] == ["star", "disc"] * 10 and factors["seen"] == ["false"] * 4 + ["true"] * 16
    assert factors["class"][:4] == ["0", "7", "14", "0"] and factors["text"][3] == "colour 3"
    values = {factor.name: factor.values for factor in made.manifest.schema.factors}
    assert values["class"] == ("0", "7", "14") and values["x"] is None


def test_indexed_shards_have_the_order_of_packed_ones_whoever_reads(shards: Path) -> None:
    index_tars(shards)

    def keys(**options: Any) -> list[str]:
        with ShardStream(shards, batch_size=4, epochs=1, seed=3, **options) as stream:
            return [key for batch in stream for key in batch.keys]

    assert sorted(keys()) == [f"{number:04d}" for number in range(20)] != keys()
    assert keys(workers=1) == keys()


GREY = picture(3)[..., 1]
PALETTE = Image.fromarray(picture(4)).convert("P")
BACKGROUND_CLEAR = {"transparency": (0, 4, 0)}
KINDS: dict[str, tuple[str, bytes]] = {
    "jpg": ("jpg", encoded(picture(1), "JPEG")),
    "jpeg": ("jpeg", encoded(picture(1), "JPEG", subsampling=2, progressive=True)),
    "grey jpg": ("jpg", encoded(GREY, "JPEG")),
    "cmyk jpg": ("jpg", encoded(Image.fromarray(picture(1)).convert("CMYK"), "JPEG")),
    "jpg with bytes after its end": ("jpg", encoded(picture(1), "JPEG") + bytes(7)),
    "jpg with EXIF": ("jpg", encoded(picture(1), "JPEG", exif=Image.Exif())),
    "PNG": ("PNG", encoded(picture(2), "PNG")),
    "grey png": ("png", encoded(GREY, "PNG")),
    "palette png": ("png", encoded(PALETTE, "PNG")),
    "black and white png": ("png", encoded(Image.fromarray(GREY > 20), "PNG")),
    "large png": ("png", imagecodecs.png_encode(picture(2, 128, 128))),
    "webp": ("webp", encoded(picture(5), "WEBP")),
    "lossless webp": ("webp", encoded(picture(5), "WEBP", lossless=True)),
    "ppm": ("ppm", encoded(picture(6), "PPM")),
    "pgm": ("pgm", encoded(GREY, "PPM")),
    "bmp": ("bmp", encoded(picture(7), "BMP")),
    "tiff": ("tiff", encoded(picture(7), "TIFF")),
    "compound": ("rgb.png", encoded(picture(8), "PNG")),
    "not square": ("png", encoded(picture(8, 12, 20), "PNG")),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_image_has_the_pixels_that_webdataset_gives(tmp_path: Path, kind: str) -> None:
    part, data = KINDS[kind]
    tar = write(tmp_path / "a.tar", {part: data}, {part: data})
    index_tars(tmp_path)
    check_same(in_order(tmp_path)[0], webdataset_alone([tar], part.lower()))
    assert verify(tmp_path) == []


@pytest.mark.parametrize("channels", [(), (1,), (3,), (4,)])
def test_numpy_files_of_bytes_are_images(tmp_path: Path, channels: tuple[int, ...]) -> None:
    array = np.random.default_rng(0).integers(0, 256, (16, 16, *channels), np.uint8)
    if channels == (4,):
        array[..., 3] = 255
    write(tmp_path / "a.tar", {"npy": array})
    index_tars(tmp_path)
    expected = np.broadcast_to(array.reshape(16, 16, -1)[..., :3], (16, 16, 3))
    check_same(in_order(tmp_path)[0], [expected])


def test_numpy_files_beside_a_picture_are_no_images(tmp_path: Path) -> None:
    write(tmp_path / "a.tar", {"png": picture(0), "npy": np.zeros(512, np.float32)})
    assert index_tars(tmp_path).left_out == ()
    write(tmp_path / "a.tar", {"npy": np.zeros(512, np.float32)}, {"npy": np.zeros((16, 16), bool)})
    with pytest.raises(StreamError, match="no sample has an image that can be read; there are npy"):
        index_tars(tmp_path)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("shape", [(16, 16), (12, 20)])
def test_images_are_turned_as_exif_says(tmp_path: Path, kind: str, shape: tuple[int, int]) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn to the right
    options = {"lossless": True} if kind == "WEBP" else {"quality": 95} if kind == "JPEG" else {}
    write(tmp_path / "a.tar", {kind.lower(): encoded(picture(3, *shape), kind, exif=exif, **options)})
    index_tars(tmp_path)
    (image,) = in_order(tmp_path)[0][:1]
    assert image.shape == (*shape[::-1], 3)
    assert np.abs(image.astype(int) - np.rot90(picture(3, *shape), -1)).mean() < 8


@pytest.mark.parametrize("transparent", ["alpha png", "one colour of a png", "alpha webp"])
def test_what_is_transparent_is_black(tmp_path: Path, transparent: str) -> None:
    image = picture(9)
    clear = np.zeros((16, 16), bool)
    clear[3, 5:9] = True
    if transparent == "one colour of a png":
        image[clear] = (1, 2, 3)
        data = encoded(image, "PNG", transparency=(1, 2, 3))
    else:
        kind, options = ("PNG", {}) if transparent == "alpha png" else ("WEBP", {"lossless": True, "exact": True})
        data = encoded(np.dstack([image, np.where(clear, 0, 255).astype(np.uint8)]), kind, **options)
    write(tmp_path / "a.tar", {transparent.rpartition(" ")[2]: data})
    index_tars(tmp_path)
    check_same(in_order(tmp_path)[0], [np.where(clear[..., None], 0, image)])


def test_images_of_several_sizes_are_given_out_at_the_resolution_that_was_asked_for(tmp_path: Path) -> None:
    shapes = [(30, 20), (20, 20), (24, 40), (16, 16)]
    write(tmp_path / "a.tar", *({"png": picture(number, *shape)} for number, shape in enumerate(shapes)))
    write(tmp_path / "b.tar", {"jpg": encoded(picture(4), "JPEG")})
    with pytest.raises(StreamError, match=r"000 in a.tar is 30×20, 001 in a.tar is 20×20; .*--resolution 64"):
        index_tars(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"a.tar", "b.tar"}
    index_tars(tmp_path, resolution=16)
    images = in_order(tmp_path)[0]
    assert {image.shape for image in images} == {(16, 16, 3)}
    middle = Image.fromarray(picture(0, 30, 20)).crop((0, 5, 20, 25)).resize((16, 16), Image.Resampling.LANCZOS)
    check_same([images[0], images[3]], [np.asarray(middle), picture(3)])
    assert verify(tmp_path) == []


def test_another_resolution_is_another_order_and_the_same_one_the_same(shards: Path) -> None:
    first = index_tars(shards).manifest.hash
    assert index_tars(shards, resolution=8).manifest.hash != first
    assert in_order(shards)[0][0].shape == (8, 8, 3)
    assert index_tars(shards).manifest.hash == first


def test_shards_that_changed_are_indexed_anew(shards: Path) -> None:
    index_tars(shards)
    write(shards / "train-000001.tar", {"png": picture(50), "cls": 2})
    assert "train-000001.tar: has" in "\n".join(map(str, verify(shards)))
    again = index_tars(shards)
    assert again.manifest.samples == 13 and verify(shards) == []
    assert "the label 'x' is left out: some samples lack it" in again.left_out


LABELS: dict[str, tuple[Sequence[Mapping[str, Any]], str]] = {
    "absent first": ([{"json": {}}, {"json": {"a": 1}}], "some samples lack it"),
    "absent last": ([{"json": {"a": 1}}, {}], "some samples lack it"),
    "null": ([{"json": {"a": 1}}, {"json": {"a": None}}], "nothing that can be read"),
    "list": ([{"json": {"a": [1]}}, {"json": {"a": [1]}}], "has a list there"),
    "not finite": ([{"json": {"a": 1}}, {"json": {"a": float("nan")}}], "has nan there"),
    "too large": ([{"json": {"a": 10**400}}, {"json": {"a": 1}}], "expected a finite number"),
    "mixed": ([{"json": {"a": 1}}, {"json": {"a": "one"}}], "some samples have a number there and others a text"),
    "number or truth": ([{"json": {"a": 1}}, {"json": {"a": True}}], "a number there and others a truth value"),
}


@pytest.mark.parametrize("case", LABELS)
def test_labels_that_are_no_factor_are_left_out_with_the_reason(tmp_path: Path, case: str) -> None:
    samples, reason = LABELS[case]
    write(tmp_path / "a.tar", *({"png": picture(0), **sample} for sample in samples))
    made = index_tars(tmp_path)
    assert len(made.left_out) == 1 and "'a'" in made.left_out[0] and reason in made.left_out[0]
    assert made.manifest.schema.factors == ()
    assert len(in_order(tmp_path)[1]) == 2


def test_texts_of_many_values_are_left_out_and_classes_sorted_by_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(labels, "MOST_VALUES", 11)
    captions = [{"png": picture(0), "txt": f"caption {number}", "cls": number} for number in range(12)]
    write(tmp_path / "a.tar", *captions)
    made = index_tars(tmp_path)
    assert made.left_out == ("the label 'text' is left out: it has more than 11 values",)
    (classes,) = made.manifest.schema.factors
    assert classes.values == tuple(map(str, range(12)))
    write(tmp_path / "a.tar", *captions[:11])
    assert index_tars(tmp_path).left_out == ()


def test_labels_of_one_name_are_told_apart_and_odd_ones_do_no_harm(tmp_path: Path) -> None:
    told = {"class": "dog", "größe": 1.5, **{f"a label with a long name, number {n}": n for n in range(300)}}
    write(tmp_path / "a.tar", {"png": picture(0), "json": told, "cls": 3})
    factors = in_order(index_tars(tmp_path).folder)[2]
    assert (factors["class"], factors["json.class"], factors["größe"]) == (["3"], ["dog"], [1.5])
    assert len(factors) == 303
    write(tmp_path / "a.tar", {"png": picture(0), "json": b"{", "cls": b"dog", "txt": b"\xff"})
    assert [line.split("'")[1] for line in index_tars(tmp_path).left_out] == ["class", "text"]


def test_samples_are_found_under_any_name_and_in_any_order(tmp_path: Path) -> None:
    long = "photographs/Größe/" + "é" * 120
    data = [encoded(picture(number), "PNG") for number in range(5)]
    write_members(
        tmp_path / "a.tar",
        ("photographs", None),
        ("__index__.json", b"{}"),
        ("__made__/by.png", b"nobody"),
        ("photographs/v1.2/b.png", data[0]),
        ("README", b"no sample"),
        ("._photographs.png", b"a Mac's"),
        ("photographs/.hidden.png", b"a Mac's"),
        ("./a.png", data[1]),
        ("photographs/v1.2/b.cls", b"1"),
        (f"{long}.PNG", data[2]),
        ("./a.cls", b"2"),
        (f"{long}.cls", b"3"),
        ("words.cls", b"4"),
    )
    made = index_tars(tmp_path)
    images, keys, factors = in_order(tmp_path)
    assert keys == ["photographs/v1.2/b", "./a", long] and factors["class"] == ["1", "2", "3"]
    check_same(images, [picture(number) for number in range(3)])
    assert made.left_out == ("left out: 1 without an image, first words in a.tar",)
    assert verify(tmp_path) == []


def test_of_several_images_one_is_chosen_by_name(tmp_path: Path) -> None:
    write(tmp_path / "a.tar", {"jpg": encoded(picture(0), "JPEG"), "seg.png": picture(1)}, {"seg.png": picture(2)})
    with pytest.raises(StreamError, match=r"000 in a.tar has several images, jpg and seg.png; .*--image jpg"):
        index_tars(tmp_path)
    assert index_tars(tmp_path, image="seg.png").left_out == ()
    check_same(in_order(tmp_path)[0], [picture(1), picture(2)])
    assert index_tars(tmp_path, image="JPG").left_out == ("left out: 1 without an image, first 001 in a.tar",)
    with pytest.raises(StreamError, match=r"no sample has 'png'; there are jpg, seg\.png"):
        index_tars(tmp_path, image=".png")


def test_images_that_cannot_be_read_are_left_out_by_name(tmp_path: Path) -> None:
    bomb = damage.png_bomb(8200)
    write(tmp_path / "a.tar", {"png": picture(0)}, {"png": b"no image"}, {"png": bomb}, {"jpg": b""})
    made = index_tars(tmp_path)
    (sentence,) = made.left_out
    assert sentence.startswith("left out: 3 whose image cannot be read, first 001 in a.tar: no kind of image")
    assert in_order(tmp_path)[1] == ["000"]


def test_an_image_that_breaks_off_is_set_aside_while_streaming(tmp_path: Path) -> None:
    data = encoded(picture(0, 64, 64), "JPEG")
    write(tmp_path / "a.tar", *({"jpg": part} for part in (data, data[:-60], data, data)))
    assert index_tars(tmp_path).left_out == ()
    with pytest.raises(OverBudget, match=r"1 of 4 .* raise budget= \(--data.budget in training\)"):
        in_order(tmp_path)
    assert in_order(tmp_path, budget=0.25)[1] == ["000", "002", "003"]
    assert "a.tar, key 001: not a readable image of 64×64×3" in "\n".join(map(str, verify(tmp_path)))


def test_a_flipped_bit_in_an_indexed_tar_is_named(shards: Path) -> None:
    made = index_tars(shards)
    path = shards / "train-000001.tar"
    record = index.read(shards / "train-000001.index.npy", made.manifest.schema)[2]
    damage.flip(path, int(record["offset"]) + 40)
    assert "train-000001.tar, key 0010: the checksum of its image differs" in "\n".join(map(str, verify(shards)))
    assert len(in_order(shards, budget=0.1)[1]) == 19


def test_patterns_choose_some_tars_of_a_folder(shards: Path, tmp_path: Path) -> None:
    def chosen(*patterns: str) -> list[str]:
        return [shard.name for shard in index_tars([f"{shards}/{one}" for one in patterns]).manifest.shards]

    first, second, third = (f"train-{number:06d}.tar" for number in range(3))
    assert chosen("train-{000000..000001}.tar") == [first, second]
    assert chosen("*2.tar") == [third] and chosen(third, first) == [third, first]
    assert chosen("{*1,*2}.tar", second) == [second, third]
    assert len(in_order(shards)[1]) == 12 and verify(shards) == []
    write(tmp_path / "other" / "a.tar", {"png": picture(0)})
    for given, sentence in (
        (f"{shards}/train-{{000002..000004}}.tar", r"train-000003.tar is not there"),
        (f"{shards}/valid-*.tar", r"valid-\*.tar is not there"),
        (f"{tmp_path}/*/*.tar", "the tars are in 2 folders"),
        (tmp_path, "holds no tars; expected WebDataset shards"),
    ):
        with pytest.raises(StreamError, match=sentence):
            index_tars(given)


def spoil_cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:3000])


def spoil_header(path: Path) -> None:
    damage.flip(path, 3)


def spoil_empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("spoil", [spoil_cut, spoil_header, spoil_empty])
def test_broken_tars_are_all_named_and_nothing_is_written(shards: Path, spoil: Any) -> None:
    for number in (0, 2):
        spoil(shards / f"train-{number:06d}.tar")
    names = {path.name for path in shards.iterdir()}
    with pytest.raises(StreamError, match=r"2 of 3 tars .* train-000000.tar .*; train-000002.tar"):
        index_tars(shards)
    assert {path.name for path in shards.iterdir()} == names


def test_a_part_that_comes_twice_is_named(tmp_path: Path) -> None:
    write_members(tmp_path / "a.tar", *[("a.png", encoded(picture(0), "PNG"))] * 2)
    with pytest.raises(StreamError, match=r"a.tar holds 'a.png' twice"):
        index_tars(tmp_path)


def test_what_is_compressed_is_refused(tmp_path: Path) -> None:
    tar = write(tmp_path / "a.tar", {"png": picture(0)})
    (tmp_path / "b.tar.gz").write_bytes(gzip.compress(tar.read_bytes()))
    with pytest.raises(StreamError, match=r"b.tar.gz is compressed.* unpack it first"):
        index_tars(tmp_path)
    assert index_tars(tar).manifest.samples == 1


def test_files_that_are_not_ours_are_never_overwritten(tmp_path: Path) -> None:
    packed(tmp_path / "packed", count=4)
    before = (tmp_path / "packed" / FILE).read_bytes()
    with pytest.raises(StreamError, match="there is nothing to add"):
        index_tars(tmp_path / "packed")
    (tmp_path / "packed" / "plan.json").unlink()
    with pytest.raises(StreamError, match="is of packed shards, which have an index"):
        index_tars(tmp_path / "packed")
    assert (tmp_path / "packed" / FILE).read_bytes() == before
    write(tmp_path / "a.tar", {"png": picture(0)})
    (tmp_path / FILE).write_text('{"mine": 1}')
    with pytest.raises(StreamError, match=r"is somebody else's, or damaged, .* move it away"):
        index_tars(tmp_path)


def test_a_disk_that_is_full_leaves_the_earlier_index_whole(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index_tars(shards)
    before = {path.name: path.read_bytes() for path in shards.iterdir()}
    write_index, calls = index.write, []

    def full(*arguments: Any) -> str:
        calls.append(1)
        if len(calls) == 2:
            raise OSError(28, os.strerror(28))
        return write_index(*arguments)

    monkeypatch.setattr(index, "write", full)
    with pytest.raises(OSError, match=os.strerror(28)):
        index_tars(shards, resolution=8)
    assert {path.name: path.read_bytes() for path in shards.iterdir()} == before
    assert verify(shards) == []


def test_the_command_tells_what_was_left_out_and_what_to_do(shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(shards / "train-000003.tar", {"png": picture(1, 20, 20), "txt": "x"})
    assert cli.main(["index", str(shards)]) == 2
    assert "is 20×20; say at which side" in capsys.readouterr().err
    assert cli.main(["index", *map(str, sorted(shards.glob("*.tar"))), "--resolution", "8"]) == 0
    shown = capsys.readouterr()
    assert "the label 'shape' is left out: some samples lack it" in shown.out
    assert "21 samples, 4 tars indexed in" in shown.out and "index shards · 4/4 tars" in shown.err
    assert cli.main(["verify", str(shards)]) == 0 and cli.main(["inspect", str(shards)]) == 0
    assert "8 × 8, as found" in capsys.readouterr().out


def test_tars_without_an_index_name_the_command_that_makes_one(shards: Path) -> None:
    with pytest.raises(StreamError, match="`cgf index`"):
        ShardStream(shards, batch_size=4)


def test_inspect_draws_what_the_stream_gives(shards: Path) -> None:
    made: Indexed = index_tars(shards)
    inspect(shards, picture=shards / "grid.png")
    drawn = imagecodecs.png_decode((shards / "grid.png").read_bytes())
    check_same([drawn[:16, :16]], [picture(0)])
    assert json.loads((shards / FILE).read_text())["hash"] == made.manifest.hash
