"""`cgf pack` and its kin: a folder packs as it is, no option is silently ignored, and bad images have a way out."""

import dataclasses
import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from compgen_fast import cli
from compgen_fast.commands.data import _MEANT_FOR, Pack
from compgen_fast.stream import ShardStream, manifest, verify
from tests.worlds.adapters.folders import noise, truncate, write_image

Shown = pytest.CaptureFixture[str]


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Twelve images without labels in photos, the folder above being where one stands."""
    for number in range(12):
        write_image(tmp_path / f"photos/{number:02d}.png", noise(number, 20, 24))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "photos"


@pytest.fixture
def labelled(photos: Path) -> Path:
    pairs = itertools.islice(itertools.cycle(itertools.product("abc", "xyz")), 12)
    lines = [f"{number:02d}.png,{shape},{ground}" for number, (shape, ground) in enumerate(pairs)]
    (photos / "factors.csv").write_text("\n".join(["filename,shape,ground", *lines]))
    return photos


def refused(shown: Shown, *arguments: str) -> str:
    """The sentence with which a command is refused."""
    assert cli.main(list(arguments)) == 2
    sentence = shown.readouterr().err.splitlines()[-1]
    assert sentence.startswith("cgf: ")
    return sentence.removeprefix("cgf: ")


HELD_OUT = ("--hold-out", "shape", "ground")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ("photos", "--part", "ood"),
            "--part has no effect on a folder; it is for a world or a folder with --hold-out",
        ),
        (("photos", "--part", "train"), "--part has no effect on a folder; it is for a world or a folder with"),
        (("photos", "--seen-pairs", "2"), "--seen-pairs has no effect on a folder; it is for a world or a folder with"),
        (("photos", "--seed", "0"), "--seed has no effect on a folder; it is for a world or a folder with --hold-out"),
        (("photos", "--size", "5"), "--size has no effect on a folder; it is for a world"),
        (("photos", "--split", "texture"), "--split has no effect on a folder; it is for a world"),
        (("photos", "--adapter", "images", "--part", "ood"), "--part has no effect on a folder"),
        (("photos", *HELD_OUT, "--size", "5"), "--size has no effect on a folder"),
        (("photos", *HELD_OUT, "--split", "texture"), "--split has no effect on a folder"),
        (
            ("photos", *HELD_OUT, "--part", "level1"),
            "--part is 'level1'; with --hold-out it is one of train, validation",
        ),
        (("photos", *HELD_OUT, "--seen-pairs", "0"), "held_out: seen is 0; expected at least 2"),
        (("photos", "--subset", "val"), "--subset has no effect on images"),
        (("photos", "--adapter", "shapes3d", "--fit", "pad"), "--fit has no effect on shapes3d"),
        (("photos", "--adapter", "shapes3d", "--skip-bad"), "--skip-bad has no effect on shapes3d"),
        (("photos", "--adapter", "imags"), "there is no adapter 'imags'; did you mean images?"),
        (("photos", "--options", "part=val"), "--options part=val: this has an option of its own, --subset"),
        (("photos", "--options", "fit=pad"), "--options fit=pad: this has an option of its own, --fit"),
        (("photos", "--options", "unlisted=true"), "photos: unlisted is about a csv file, and there is none"),
        (("scenes", "--subset", "val"), "--subset has no effect on a world; it is for a folder"),
        (("scenes", *HELD_OUT), "--hold-out has no effect on a world; it is for a folder"),
        (("scenes", "--fit", "crop"), "--fit has no effect on a world; it is for a folder"),
        (("scenes", "--skip-bad"), "--skip-bad has no effect on a world; it is for a folder"),
        (
            ("scenes", "--options", "resolution=32"),
            "--options resolution=32: this has an option of its own, --resolution",
        ),
        (("scnes",), "there is no world or folder 'scnes'; did you mean scenes?"),
        (
            ("nowhere",),
            "there is no world or folder 'nowhere'; expected one of scenes, shapes2d, bumps, sprites, additive",
        ),
    ],
)
def test_an_option_without_effect_is_refused_by_name(
    labelled: Path, arguments: tuple[str, ...], sentence: str, capsys: Shown
) -> None:
    if "unlisted=true" in arguments:
        (labelled / "factors.csv").unlink()
    source, *options = arguments
    assert refused(capsys, "pack", source, "out", *options).startswith(sentence)
    assert not Path("out").exists()


def test_every_option_that_may_be_left_out_says_what_it_is_for() -> None:
    """A new option lands here: it means something everywhere, or the table says where."""
    may_be_left_out = {field.name for field in dataclasses.fields(Pack) if field.default in (None, False)}
    assert may_be_left_out - set(_MEANT_FOR) == {"resolution"}


def test_a_drawn_world_refuses_alike(tmp_path: Path, capsys: Shown) -> None:
    show = ("world", "show", "--out", str(tmp_path / "world.png"))
    assert refused(capsys, *show, "scnes") == "there is no world 'scnes'; did you mean scenes?"
    assert "this has an option of its own, --seed" in refused(capsys, *show, "scenes", "--options", "seed=3")
    assert "own_looks is 'no'; expected true or false" in refused(capsys, *show, "scenes", "--options", "own_looks=no")
    assert list(tmp_path.iterdir()) == []


def test_images_without_labels_pack_as_they_are_and_stream(photos: Path, capsys: Shown) -> None:
    assert cli.main(["pack", "photos", "out", "--resolution", "16"]) == 0
    assert "photos: 12 samples, 1 shards in out, no factors" in capsys.readouterr().out
    assert cli.main(["verify", "out"]) == 0
    assert cli.main(["inspect", "out", "--picture", "grid.png"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "made centre crop, resized by Lanczos, EXIF turned, alpha over black" in shown and "factors none" in shown
    batch = next(iter(ShardStream("out", batch_size=4, shuffle=False)))
    assert batch.images.shape == (4, 16, 16, 3) and batch.factors == {}


def test_how_images_become_squares_is_in_the_manifest_and_not_mixed(photos: Path, capsys: Shown) -> None:
    assert cli.main(["pack", "photos", "out"]) == 0
    assert "made: centre crop" in refused(capsys, "pack", "photos", "out", "--fit", "pad")
    assert cli.main(["pack", "photos", "other", "--fit", "pad"]) == 0
    assert manifest.read(Path("other/manifest.json")).made.startswith("whole image on a black square")


def test_folders_of_classes_are_packed_with_their_names(photos: Path) -> None:
    for number, name in enumerate(("owl", "cat")):
        shutil.copytree(photos, f"animals/{name}")
        (Path("animals") / name / "00.png").write_bytes((photos / f"{number + 3:02d}.png").read_bytes())
    assert cli.main(["pack", "animals", "out"]) == 0
    (factor,) = manifest.read(Path("out/manifest.json")).schema.factors
    assert (factor.name, factor.values) == ("class", ("cat", "owl"))


def test_a_worlds_name_wins_over_a_folder_of_that_name(photos: Path, capsys: Shown) -> None:
    photos.rename("bumps")
    assert cli.main(["pack", "bumps", "out", "--size", "3"]) == 0
    assert cli.main(["pack", "./bumps", "other"]) == 0
    shown = capsys.readouterr().out
    assert "bumps-square-train: 3 samples" in shown and "bumps: 12 samples" in shown


def test_bad_images_are_named_before_anything_is_written(photos: Path, capsys: Shown) -> None:
    truncate(photos / "04.png")
    (photos / "07.png").write_text("hello")
    sentence = refused(capsys, "pack", "photos", "out")
    assert sentence.startswith("photos: 2 of 12 images cannot be used: 04.png: the image cannot be read (")
    assert "07.png: this is not an image" in sentence and sentence.endswith("or leave them out with --skip-bad")
    assert not Path("out").exists()


def test_bad_images_are_skipped_and_listed_whoever_packs(photos: Path, capsys: Shown) -> None:
    for name in ("02", "04", "06", "07"):
        truncate(photos / f"{name}.png")
    command = ["pack", "photos", "--skip-bad", "--shard-size", "3"]
    assert cli.main([*command, "one"]) == 0
    shown = capsys.readouterr().out
    assert "photos: 8 samples, 3 shards" in shown
    assert "4 skipped, listed in one/plan.json: 02.png: the image" in shown and "06.png" in shown
    assert "07.png" not in shown and shown.endswith(", …\n")
    listed = json.loads(Path("one/plan.json").read_text())["skipped"]
    assert list(listed) == ["02.png", "04.png", "06.png", "07.png"] and "cannot be read" in listed["07.png"]
    assert verify("one") == []
    assert cli.main(["inspect", "one"]) == 0
    assert "skipped  4, listed in plan.json" in capsys.readouterr().out
    assert cli.main([*command, "two", "--workers", "2"]) == 0
    for path in Path("one").iterdir():
        assert path.read_bytes() == (Path("two") / path.name).read_bytes()


def interrupted(out: Path) -> None:
    for name in ("manifest.json", "shard-000002.tar", "shard-000002.index.npy"):
        (out / name).unlink()


def test_a_pack_that_goes_on_leaves_out_what_it_did_before(photos: Path, capsys: Shown) -> None:
    whole = (photos / "04.png").read_bytes()
    truncate(photos / "04.png")
    command = ["pack", "photos", "out", "--shard-size", "4"]
    assert cli.main([*command, "--skip-bad"]) == 0
    before = Path("out/manifest.json").read_bytes()
    interrupted(Path("out"))
    assert "out holds a pack that leaves out bad images (04.png: " in refused(capsys, *command)
    (photos / "04.png").write_bytes(whole)
    assert cli.main([*command, "--skip-bad"]) == 0
    (photos / "04.png").unlink()
    assert cli.main([*command, "--skip-bad"]) == 0
    assert Path("out/manifest.json").read_bytes() == before


def test_an_unfinished_pack_of_other_images_says_how_to_start_anew(photos: Path, capsys: Shown) -> None:
    command = ["pack", "photos", "out", "--shard-size", "4"]
    assert cli.main(command) == 0
    interrupted(Path("out"))
    (photos / "05.png").unlink()
    assert refused(capsys, *command) == (
        "out holds an unfinished pack of other images or settings (samples: 12 → 11); start anew with `rm -r out`, or "
        "pack into another folder"
    )


def test_a_folder_of_bad_images_alone_is_refused(photos: Path, capsys: Shown) -> None:
    for path in photos.iterdir():
        path.write_text("hello")
    sentence = refused(capsys, "pack", "photos", "out", "--skip-bad")
    assert sentence.startswith("photos: no image can be used: 00.png: this is not an image")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("photos",), "photos holds other files; pack into a folder that is new or empty"),
        (("photos/00.png",), "photos/00.png is a file; expected a folder to pack into"),
        (("out", "--shard-size", "0"), "pack: shard_size is 0"),
        (("out", "--workers", "0"), "pack: shard_size is 10000 and workers is 0"),
    ],
)
def test_what_can_be_refused_is_before_images_are_read(
    photos: Path, options: tuple[str, ...], sentence: str, capsys: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compgen_fast.worlds.adapters.unreadable", lambda *_, **__: pytest.fail("images were read"))
    assert refused(capsys, "pack", "photos", *options).startswith(sentence)


def test_bad_images_of_another_part_are_no_matter(labelled: Path) -> None:
    """Which part a sample is in does not depend on what can be read, so parts packed apart share nothing."""
    parts = {part: f"out/{part}" for part in ("train", "ood")}
    command = ["pack", "photos", *HELD_OUT, "--resolution", "20", "--part"]
    assert [cli.main([*command, part, out]) for part, out in parts.items()] == [0, 0]
    before = {part: images(out) for part, out in parts.items()}
    bad = next(number for number in range(12) if square(number) in before["ood"])
    truncate(labelled / f"{bad:02d}.png")
    shutil.rmtree("out")
    assert cli.main([*command, "train", "out/train"]) == 0
    assert cli.main([*command, "ood", "out/ood"]) == 2
    assert cli.main([*command, "ood", "out/ood", "--skip-bad"]) == 0
    assert images("out/train") == before["train"]
    assert images("out/ood") == [image for image in before["ood"] if image != square(bad)]


def images(out: str) -> list[bytes]:
    stream = ShardStream(out, batch_size=1, epochs=1, shuffle=False)
    return [np.asarray(batch.images).tobytes() for batch in stream]


def square(number: int) -> bytes:
    """The middle of an image, which packing at this resolution leaves as it is."""
    return noise(number, 20, 24)[:, 2:22].tobytes()
