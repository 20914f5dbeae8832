"""Packing: what is in the shards, what survives a kill, and what a full disk leaves behind."""

import errno
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import imagecodecs
import numpy as np
import pytest
import webdataset

from compgen_fast.stream import StreamError, pack, verify
from compgen_fast.stream.manifest import FILE, Format
from compgen_fast.stream.packing import PLAN
from compgen_fast.worlds.source import Factor, Samples
from tests.stream.stub import Stub, packed

ROOT = Path(__file__).parents[2]


def webdataset_alone(folder: Path) -> list[dict[str, object]]:
    urls = [str(path) for path in sorted(folder.glob("*.tar"))]
    return list(webdataset.WebDataset(urls, shardshuffle=False).decode("rgb8"))


@pytest.mark.parametrize("format", ["raw", "png"])
def test_the_webdataset_library_alone_reads_the_shards(tmp_path: Path, format: Format) -> None:
    packed(tmp_path, format=format)
    found = webdataset_alone(tmp_path)
    expected = Stub().samples(np.arange(100))
    assert expected.masks is not None
    ending = "npy" if format == "raw" else "png"
    assert [sample["__key__"] for sample in found] == [f"{number:09d}" for number in range(100)]
    assert np.array_equal(np.stack([np.asarray(sample[ending]) for sample in found]), expected.images)
    assert np.array_equal(np.stack([np.asarray(s["mask.png"])[..., 0] for s in found]), expected.masks)
    assert [sample["json"] for sample in found][4] == {"shape": "square", "x": pytest.approx(0.04)}


@pytest.mark.parametrize(("format", "error"), [("jpg", 6), ("webp", 14)])
def test_lossy_formats_come_close(tmp_path: Path, format: Format, error: float) -> None:
    packed(tmp_path, format=format, side=32, count=30)
    found = np.stack([np.asarray(sample[format]) for sample in webdataset_alone(tmp_path)]).astype(int)
    smooth = np.abs(found - Stub(30, 32).samples(np.arange(30)).images).mean()
    assert smooth < error


def test_the_same_samples_give_the_same_bytes_whoever_packs_them(tmp_path: Path) -> None:
    alone = packed(tmp_path / "one")
    together = pack(Stub(), tmp_path / "two", shard_size=30, format="png", workers=2)
    assert together == alone
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


def test_members_carry_no_time_and_no_owner(tmp_path: Path) -> None:
    packed(tmp_path)
    with tarfile.open(tmp_path / "shard-000000.tar") as archive:
        assert {(m.mtime, m.uid, m.gid, m.uname) for m in archive} == {(0, 0, 0, "")}


def test_the_last_shard_holds_the_rest(tmp_path: Path) -> None:
    assert [shard.samples for shard in packed(tmp_path).shards] == [30, 30, 30, 10]


class Slow(Stub):
    """Renders slowly enough to be killed on the way, and says so when it starts a chunk."""

    def samples(self, indices: np.ndarray) -> Samples:
        time.sleep(0.05)
        return super().samples(indices)


KILLED = """
import sys
from tests.stream.test_pack import Slow
from compgen_fast.stream import pack
if __name__ == "__main__":
    pack(Slow(600), sys.argv[1], shard_size=64, format="raw", workers=int(sys.argv[2]))
"""


def identity(path: Path) -> tuple[int, int]:
    return path.stat().st_ino, path.stat().st_mtime_ns


def children(process: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_pack_goes_on_without_touching_good_shards(tmp_path: Path, workers: int) -> None:
    out, script = tmp_path / "out", tmp_path / "script.py"
    script.write_text(KILLED)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, str(script), str(out), str(workers)], env=environment, cwd=ROOT)
    patience = time.monotonic() + 60
    while len(list(out.glob("*.index.npy"))) < 3 and process.poll() is None and time.monotonic() < patience:
        time.sleep(0.01)
    helpers = children(process.pid)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    wait_until_gone(helpers)

    good = {path: identity(path) for path in out.glob("shard-*") if path.with_suffix("").suffix != ".tmp"}
    good = {path: found for path, found in good.items() if path.suffix == ".npy" or has_index(path)}
    assert len(good) >= 6
    assert not (out / FILE).exists()
    again = pack(Slow(600), out, shard_size=64, format="raw")
    assert {path: identity(path) for path in good} == good
    assert again == pack(Stub(600), tmp_path / "undisturbed", shard_size=64, format="raw")
    assert verify(out) == []


def has_index(tar: Path) -> bool:
    return tar.with_suffix(".index.npy").exists()


def wait_until_gone(processes: list[int]) -> None:
    """A pack's own helpers end with it: they must not write beside the one that takes over."""
    patience = time.monotonic() + 30
    while any(Path(f"/proc/{process}").exists() and not ended(process) for process in processes):
        assert time.monotonic() < patience, "a helper outlived its killed parent"
        time.sleep(0.05)


def ended(process: int) -> bool:
    try:
        return "State:\tZ" in Path(f"/proc/{process}/status").read_text()
    except OSError:
        return True


@pytest.mark.parametrize("damage", ["image", "header", "json", "index", "cut", "empty", "gone"])
def test_packing_again_rewrites_only_the_damaged_shard(tmp_path: Path, damage: str) -> None:
    before = packed(tmp_path, format="raw")
    victim = tmp_path / "shard-000001.tar"
    keep = identity(tmp_path / "shard-000000.tar")
    data = bytearray(victim.read_bytes())
    places = {"image": 512 + 200, "header": 10, "json": data.index(b'{"shape"') + 3}
    if damage in places:
        data[places[damage]] ^= 1
        victim.write_bytes(data)
    elif damage == "index":
        victim = tmp_path / "shard-000001.index.npy"
        victim.write_bytes(victim.read_bytes()[:-7])
    elif damage == "gone":
        victim.unlink()
    else:
        victim.write_bytes(data[: len(data) // 2] if damage == "cut" else b"")
    assert verify(tmp_path) != []
    assert packed(tmp_path, format="raw") == before
    assert verify(tmp_path) == []
    assert identity(tmp_path / "shard-000000.tar") == keep


def test_a_folder_takes_one_plan_only_and_says_in_a_line_what_differs(tmp_path: Path) -> None:
    packed(tmp_path)
    anew = f"start anew with `rm -r {tmp_path}`, or pack into another folder"
    for other, difference in (
        (Stub(99), "samples: 100 → 99"),
        (Stub(side=8), "height: 16 → 8, width: 16 → 8"),
        (Stub(masks=False), "masks: yes → no, slots: background, thing → none"),
        (Stub(shift=1), "other pixels"),
        (Renamed(), "factor shape: disc, square, star → none, factor form: none → 30 of them"),
        (Stub(7, 8, "dots", masks=False), "name: stub → dots, samples: 100 → 7, height: 16 → 8, …"),
    ):
        with pytest.raises(StreamError) as refusal:
            pack(other, tmp_path, shard_size=30)
        assert str(refusal.value) == f"{tmp_path} holds a pack of other images or settings ({difference}); {anew}"
    with pytest.raises(StreamError, match="shard_size: 30 → 31"):
        packed(tmp_path, shard_size=31)
    with pytest.raises(StreamError, match=r"skipped: none → a\.png"):
        pack(Stub(), tmp_path, shard_size=30, skipped={"a.png": "broken"})
    (tmp_path / FILE).unlink()
    with pytest.raises(StreamError, match="holds an unfinished pack of other images"):
        pack(Stub(99), tmp_path, shard_size=30)


class Renamed(Stub):
    @property
    def factors(self) -> tuple[Factor, ...]:
        return (Factor("form", tuple(f"form {number}" for number in range(30))), *super().factors[1:])


def test_a_plan_that_is_damaged_or_no_folder_is_a_sentence(tmp_path: Path) -> None:
    packed(tmp_path / "out")
    (tmp_path / "out" / PLAN).write_text("[1, 2")
    with pytest.raises(StreamError, match=r"plan\.json is damaged; start anew with `rm -r"):
        packed(tmp_path / "out")
    with pytest.raises(StreamError, match=r"plan\.json is a file; expected a folder"):
        packed(tmp_path / "out" / PLAN)


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(StreamError, match="holds other files"):
        packed(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


FULL = """
import resource, signal, sys
from tests.stream.stub import Stub
from compgen_fast.stream import StreamError, pack
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
try:
    pack(Stub(100, 32), sys.argv[1], shard_size=50, format="raw")
except StreamError as error:
    print(error)
"""


def test_a_file_that_cannot_grow_leaves_no_half_shard(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path / "out")], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "make room and run the same command again" in done.stdout
    assert [path.name for path in (tmp_path / "out").iterdir()] == [PLAN]


@pytest.fixture
def small_disk(tmp_path: Path) -> Path:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=400k", "compgen", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root; RLIMIT_FSIZE stands in for it above")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_keeps_finished_shards_and_says_what_to_do(small_disk: Path) -> None:
    out = small_disk / "out"
    with pytest.raises(StreamError, match=os.strerror(errno.ENOSPC)):
        pack(Stub(100, 32), out, shard_size=20, format="raw")
    kept = sorted(path.name for path in out.glob("shard-*.tar"))
    assert kept and len(kept) < 5
    assert not list(out.glob(".*.tmp"))
    subprocess.run(["mount", "-o", "remount,size=4m", str(small_disk)], check=True)
    assert pack(Stub(100, 32), out, shard_size=20, format="raw").samples == 100
    assert verify(out) == []


class Odd(Stub):
    def samples(self, indices: np.ndarray) -> Samples:
        found = super().samples(indices)
        return Samples(found.images, {**found.factors, "shape": indices}, found.masks)


def test_a_source_that_breaks_its_promise_is_named(tmp_path: Path) -> None:
    with pytest.raises(StreamError, match="factor 'shape' goes from 0 to 9; expected numbers below 3"):
        pack(Odd(10), tmp_path)


def test_a_source_that_does_not_pickle_is_refused_before_work_starts(tmp_path: Path) -> None:
    class Inner(Stub):
        pass

    with pytest.raises(StreamError, match="does not pickle"):
        pack(Inner(), tmp_path, workers=2)


def test_png_is_exact_and_plain(tmp_path: Path) -> None:
    packed(tmp_path)
    with tarfile.open(tmp_path / "shard-000000.tar") as archive:
        member = archive.extractfile("000000007.png")
        assert member is not None
        assert np.array_equal(imagecodecs.png_decode(member.read()), Stub().image(7))
        description = archive.extractfile("000000007.json")
        assert description is not None
        assert json.load(description)["shape"] == "square"
