"""Every fault, made for real: what the stream does about it, and what `verify` says."""

import contextlib
import dataclasses
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from compgen_fast.stream import OverBudget, Problem, ShardStream, StreamError, manifest, verify
from compgen_fast.stream.manifest import Format
from compgen_fast.stream.tar import members
from tests.stream import damage
from tests.stream.damage import Entry
from tests.stream.stub import Stub, numbers, packed

GENEROUS = 0.5


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    packed(tmp_path / "out")
    return tmp_path / "out"


def read(folder: Path, **options: object) -> tuple[ShardStream, list[int], list[bool]]:
    """One epoch: the numbers of all samples in order, and which are valid. Every image must be the sample's own."""
    stream = ShardStream(folder, **{"batch_size": 10, "epochs": 1, "budget": GENEROUS, **options})  # type: ignore[arg-type]
    found: list[int] = []
    valid: list[bool] = []
    for batch in stream:
        assert np.array_equal(batch.images.numpy(), Stub().samples(np.array(numbers(batch.keys))).images)
        found += numbers(batch.keys)
        valid += batch.valid.tolist()
    return stream, found, valid


def named(problems: list[Problem]) -> str:
    return "\n".join(map(str, problems))


def check_set_aside(folder: Path, bad: set[int], before: list[int]) -> ShardStream:
    """The bad samples, and only they, have others in their places; the same ones whoever reads."""
    stream, found, valid = read(folder)
    assert [number for number, ok in zip(before, valid, strict=True) if not ok] == [n for n in before if n in bad]
    assert all(new == old for new, old in zip(found, before, strict=True) if old not in bad)
    assert not bad & set(found)
    assert read(folder, workers=2, batch_size=20)[1] == found
    halves = [read(folder, rank=rank, ranks=2)[1] for rank in range(2)]
    assert [n for step in range(10) for half in halves for n in half[5 * step : 5 * step + 5]] == found
    return stream


def test_a_flipped_bit_is_found_and_the_sample_set_aside(folder: Path) -> None:
    before = read(folder)[1]
    tar, offset, size = damage.place_of(folder, 42)
    damage.flip(tar, offset + size // 2)
    stream = check_set_aside(folder, {42}, before)
    (fault,) = stream.quarantine.faults.values()
    assert (fault.shard, fault.key, stream.quarantine.samples) == ("shard-000001.tar", "000000042", 1)
    assert "checksum" in fault.reason
    assert "shard-000001.tar, key 000000042: the checksum of its png differs" in named(verify(folder))


def test_a_tar_cut_short_loses_only_what_is_cut_off(folder: Path) -> None:
    before = read(folder)[1]
    tar, offset, _ = damage.place_of(folder, 27)
    os.truncate(tar, offset + 3)
    stream = check_set_aside(folder, {27, 28, 29}, before)
    assert all("ends before it" in fault.reason for fault in stream.quarantine.faults.values())
    assert "shard-000000.tar: has" in named(verify(folder))
    assert "breaks off" in named(verify(folder)) or "not a readable tar" in named(verify(folder))


def test_a_file_cut_short_while_it_is_read_does_not_kill_the_process(folder: Path) -> None:
    stream = ShardStream(folder, batch_size=10, epochs=1, budget=1.0)
    batches = iter(stream)
    next(batches)
    for number in range(4):
        os.truncate(folder / f"shard-{number:06d}.tar", 20_000)
    assert len(list(batches)) == 9
    assert stream.quarantine.samples > 10


def test_a_damaged_tar_header_is_named_and_harms_no_sample(folder: Path) -> None:
    """Readers without an index end the shard there, without a word."""
    before = read(folder)[1]
    tar, offset, _ = damage.place_of(folder, 12)
    damage.flip(tar, offset - 512 + 3)
    stream, found, valid = read(folder)
    assert found == before and all(valid) and not stream.quarantine.faults
    assert "its hash differs" in named(verify(folder))
    assert "breaks off or is damaged at byte" in named(verify(folder))


@pytest.mark.parametrize("file", ["shard-000001.tar", "shard-000001.index.npy"])
def test_a_missing_shard_is_set_aside_as_a_whole(folder: Path, file: str) -> None:
    before = read(folder)[1]
    (folder / file).unlink()
    stream = check_set_aside(folder, set(range(30, 60)), before)
    (fault,) = stream.quarantine.faults.values()
    assert (fault.shard, fault.key, fault.samples) == ("shard-000001.tar", "", 30)
    assert f"{file}" in named(verify(folder)) and "missing" in named(verify(folder))


def test_a_damaged_index_is_not_believed(folder: Path) -> None:
    before = read(folder)[1]
    path = folder / "shard-000002.index.npy"
    damage.flip(path, path.stat().st_size - 5)  # a factor of the last sample: nothing else would notice
    check_set_aside(folder, set(range(60, 90)), before)
    assert "shard-000002.index.npy is damaged" in named(verify(folder))


@pytest.mark.parametrize("workers", [0, 1])
def test_past_its_budget_the_stream_stops_with_the_list(folder: Path, workers: int) -> None:
    for number in (3, 50, 77):
        tar, offset, _ = damage.place_of(folder, number)
        damage.flip(tar, offset + 20)
    assert read(folder, budget=0.03, workers=workers)[0].quarantine.samples == 3
    with pytest.raises(OverBudget, match=r"3 of 100 samples are bad, and the budget allows 2") as stopped:
        read(folder, budget=0.02, workers=workers)
    assert {fault.key for fault in stopped.value.faults} == {"000000003", "000000050", "000000077"}
    with pytest.raises(OverBudget, match="budget allows 0"):
        read(folder, budget=1e-3, workers=workers)


def test_a_bad_sample_is_counted_once_however_often_it_is_met(folder: Path) -> None:
    tar, offset, _ = damage.place_of(folder, 3)
    damage.flip(tar, offset + 20)
    stream = ShardStream(folder, batch_size=10, epochs=5, budget=0.01)
    assert sum(int((~batch.valid).sum()) for batch in stream) == 5
    assert stream.quarantine.samples == 1


def test_nothing_readable_is_an_error_not_a_loop(folder: Path) -> None:
    for path in folder.glob("*.tar"):
        path.unlink()
    with pytest.raises(StreamError):
        read(folder, budget=10.0)


@pytest.mark.parametrize("format", ["png", "jpg", "webp", "raw"])
@pytest.mark.parametrize("content", [b"", b"no image at all", b"\x89PNG\r\n\x1a\n" + bytes(40)])
def test_an_undecodable_image_is_set_aside(tmp_path: Path, format: Format, content: bytes) -> None:
    packed(tmp_path, format=format)
    damage.replace_image(tmp_path, 5, content)
    stream = ShardStream(tmp_path, batch_size=10, epochs=1, budget=GENEROUS)
    assert sum(int((~batch.valid).sum()) for batch in stream) == 1
    (fault,) = stream.quarantine.faults.values()
    assert fault.key == "000000005"
    assert "key 000000005: not a readable" in named(verify(tmp_path))


BOMBS: dict[Format, Callable[[int], bytes]] = {
    "png": damage.png_bomb,
    "jpg": damage.jpeg_bomb,
    "webp": damage.webp_bomb,
}


@pytest.mark.parametrize("format", BOMBS)
def test_a_decompression_bomb_is_refused_before_it_takes_memory(tmp_path: Path, format: Format) -> None:
    packed(tmp_path, format=format)
    damage.replace_image(tmp_path, 5, BOMBS[format](12_000))  # 432 MB of pixels
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    stream = ShardStream(tmp_path, batch_size=10, epochs=1, budget=GENEROUS)
    assert sum(int((~batch.valid).sum()) for batch in stream) == 1
    (fault,) = stream.quarantine.faults.values()
    assert "12000" in fault.reason
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # kB


def swap(entries: list[Entry]) -> list[Entry]:
    """The second sample's image in the middle of the first sample."""
    return [entries[0], entries[3], *entries[1:3], *entries[4:]]


def twice(entries: list[Entry]) -> list[Entry]:
    return [*entries, *entries[:3]]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (swap, "key 000000000: its members are interleaved"),
        (twice, "key 000000000: the member 000000000.png occurs twice"),
    ],
)
def test_torn_and_repeated_keys_are_named_and_do_not_confuse_the_index(
    folder: Path, change: Callable[[list[Entry]], list[Entry]], says: str
) -> None:
    before = read(folder)[1]
    damage.rewrite(folder / "shard-000000.tar", change)
    assert says in named(verify(folder))
    damage.reseal(folder, folder / "shard-000000.tar")
    assert says in named(verify(folder))
    assert sorted(read(folder)[1]) == sorted(before)


def test_a_key_in_two_shards_is_named(folder: Path) -> None:
    for ending in ("tar", "index.npy"):
        (folder / f"shard-000001.{ending}").write_bytes((folder / f"shard-000000.{ending}").read_bytes())
    assert "shard-000001.tar, key 000000029: the key is also in shard-000000.tar" in named(verify(folder))


@pytest.mark.parametrize("name", ["../escape.png", "/etc/escape.png", "a/../../escape.png", "a\\escape.png"])
def test_a_member_that_leads_out_of_the_folder_is_refused(folder: Path, name: str) -> None:
    tar = folder / "shard-000000.tar"
    damage.rewrite(tar, lambda entries: [*entries, (name, b"x")])
    with pytest.raises(StreamError, match="leads out of the folder"):
        list(members(tar))
    assert "leads out of the folder" in named(verify(folder))


@pytest.mark.parametrize("name", ["../shard.tar", "/etc/passwd", "a b.tar", "$(touch x).tar", ".hidden.tar", ""])
def test_a_manifest_that_names_files_elsewhere_is_refused(folder: Path, name: str) -> None:
    found = manifest.read(folder / manifest.FILE)
    shards = (dataclasses.replace(found.shards[0], name=name), *found.shards[1:])
    manifest.write(dataclasses.replace(found, shards=shards), folder)
    with pytest.raises(StreamError, match="plain name"):
        ShardStream(folder, batch_size=10)


@pytest.mark.parametrize("change", [("png", "jpg"), ('"samples": 100', '"samples": 99'), ('"x"', '"y"'), ("{", "[")])
def test_a_manifest_that_was_edited_is_refused(folder: Path, change: tuple[str, str]) -> None:
    path = folder / manifest.FILE
    path.write_text(path.read_text().replace(*change))
    with pytest.raises(StreamError, match=r"changed after packing|not a manifest"):
        ShardStream(folder, batch_size=10)
    assert len(verify(folder)) == 1


def test_a_folder_without_a_manifest_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(StreamError, match=r"expected a folder made by `cgf pack`"):
        ShardStream(tmp_path, batch_size=10)


def test_strange_files_are_named(folder: Path) -> None:
    (folder / "shard-000009.tar").write_bytes(b"")
    assert named(verify(folder)) == "shard-000009.tar: is not in the manifest; remove it"


def test_an_intact_folder_has_no_problem(folder: Path) -> None:
    assert verify(folder) == []


def test_killed_workers_are_replaced_and_the_order_is_kept(folder: Path) -> None:
    expected = read(folder, epochs=3)[1]
    stream = ShardStream(folder, batch_size=10, epochs=3, workers=2)
    found: list[int] = []
    for step, batch in enumerate(stream):
        found += numbers(batch.keys)
        if step % 4 == 1:
            assert stream.workers
            os.kill(stream.workers[step % 2], signal.SIGKILL)
    assert found == expected


def test_a_batch_that_kills_every_worker_is_an_error_that_names_it(folder: Path) -> None:
    stream = ShardStream(folder, batch_size=10, epochs=100, workers=1)
    batches = iter(stream)
    next(batches)
    stop = threading.Event()

    def kill_all() -> None:
        while not stop.is_set():
            for worker in stream.workers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker, signal.SIGKILL)
            time.sleep(0.001)

    killer = threading.Thread(target=kill_all)
    killer.start()
    try:
        with pytest.raises(StreamError, match=r"3 workers in turn ended \(signal SIGKILL\) on the same batch"):
            list(batches)
    finally:
        stop.set()
        killer.join()


def test_storage_that_hangs_ends_in_an_error_after_the_timeout(folder: Path) -> None:
    """A stopped worker is to its parent what one is that waits for a dead file server."""
    stream = ShardStream(folder, batch_size=10, epochs=9, workers=1, prefetch=1, timeout=1.5)
    batches = iter(stream)
    next(batches)
    os.kill(stream.workers[0], signal.SIGSTOP)
    with pytest.raises(StreamError, match=r"no data for 1.5 s: .* hangs or is very slow"):
        list(batches)
