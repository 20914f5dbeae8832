"""Streaming: the same sequence for any number of ranks and workers, from any point on, across killed processes."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compgen_fast.stream import Batch, ShardStream, StreamError, fewest_good, measure_workers, pack
from compgen_fast.stream.manifest import Format
from tests.stream.stub import Stub, numbers, packed

ROOT = Path(__file__).parents[2]
COUNT = 53


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("data") / "out"
    packed(out, count=COUNT, shard_size=10)
    return out


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("data") / "other"
    pack(Stub(31, shift=9), out, shard_size=7, format="raw")
    return out


def run(streams: list[ShardStream], steps: int) -> list[list[Batch]]:
    """Up to so many steps of all ranks side by side; each must make as many as the others."""
    iterators = [iter(stream) for stream in streams]
    made = []
    for _ in range(steps):
        batches = [next(iterator, None) for iterator in iterators]
        assert len({batch is None for batch in batches}) == 1, "ranks disagree on the number of steps"
        if batches[0] is None:
            break
        made.append([batch for batch in batches if batch is not None])
    for iterator in iterators:
        iterator.close()  # type: ignore[attr-defined]
    return made


def keys(steps: list[list[Batch]]) -> list[tuple[int, str]]:
    """(data set, key) of the valid samples of all ranks, in the order of the run."""
    return [
        (int(number), key)
        for batches in steps
        for batch in batches
        for number, key, valid in zip(batch.sets, batch.keys, batch.valid, strict=True)
        if valid
    ]


def ranks_of(data: Path | list[Path], ranks: int, batch: int, workers: int, **options: object) -> list[ShardStream]:
    return [
        ShardStream(data, batch_size=batch, rank=rank, ranks=ranks, workers=workers, **options)  # type: ignore[arg-type]
        for rank in range(ranks)
    ]


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    st.data(),
    st.integers(1, 4),
    st.integers(0, 1),
    st.integers(1, 4),
    st.integers(0, 1),
    st.integers(0, 2**40),
    st.none() | st.integers(1, 4),
    st.booleans(),
)
def test_a_run_resumed_on_other_ranks_and_workers_goes_on_exactly(
    folder: Path,
    other: Path,
    data: st.DataObject,
    ranks: int,
    workers: int,
    new_ranks: int,
    new_workers: int,
    seed: int,
    window: int | None,
    mixture: bool,
) -> None:
    sets = [folder, other] if mixture else [folder]
    share, new_share = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))
    options = {"seed": seed, "epochs": 2, "window": window}
    whole = keys(run(ranks_of(sets, 1, 7, 0, **options), 10**6))

    first = ranks_of(sets, ranks, share * ranks, workers, **options)
    stop = data.draw(st.integers(0, first[0].steps or 0))
    before = keys(run(first, stop))
    states = [stream.state_dict() for stream in first]
    assert all(state == states[0] for state in states)
    assert len(json.dumps(states[0])) < 120

    second = ranks_of(sets, new_ranks, new_share * new_ranks, new_workers, **options)
    for stream in second:
        stream.load_state_dict(json.loads(json.dumps(states[0])))
    expected = second[0].steps
    steps = run(second, 10**6)
    assert len(steps) == expected
    assert before + keys(steps) == whole
    if not mixture:
        for epoch in (whole[:COUNT], whole[COUNT:]):
            assert sorted(numbers([key for _, key in epoch])) == list(range(COUNT))
    assert len(whole) == 2 * (first[0].samples)


TRAINED = """
import sys, time
from compgen_fast.stream import ShardStream
folder, rank, ranks, batch, workers, position, log = sys.argv[1:]
stream = ShardStream(
    folder, batch_size=int(batch), rank=int(rank), ranks=int(ranks), workers=int(workers), seed=11, epochs=3
)
stream.seek(int(position))
with open(log, "w") as file:
    for batch in stream:
        valid = [key for key, valid in zip(batch.keys, batch.valid) if valid]
        print(stream.state_dict()["position"], *valid, file=file, flush=True)
        time.sleep(0.02)
"""


def trained(
    folder: Path, log: Path, ranks: int, batch: int, workers: int, position: int
) -> list[subprocess.Popen[bytes]]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                TRAINED,
                folder,
                *map(str, (rank, ranks, batch, workers, position)),
                f"{log}.{rank}",
            ],
            env=environment,
        )
        for rank in range(ranks)
    ]


def logged(log: Path, ranks: int) -> list[list[tuple[int, list[str]]]]:
    """Per rank, the steps whose line is whole: (position after it, keys)."""
    found = []
    for rank in range(ranks):
        path = Path(f"{log}.{rank}")
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        found.append([(int(line.split()[0]), line.split()[1:]) for line in lines])
    return found


def test_killed_processes_resume_on_another_number_of_ranks(folder: Path, tmp_path: Path) -> None:
    """2 ranks with a worker each are killed in the middle of a run; 3 ranks without workers finish it."""
    first = trained(folder, tmp_path / "first", ranks=2, batch=6, workers=1, position=0)
    patience = time.monotonic() + 90
    while min(len(steps) for steps in logged(tmp_path / "first", 2)) < 5:
        assert time.monotonic() < patience and all(process.poll() is None for process in first)
        time.sleep(0.02)
    for process in first:
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    before = logged(tmp_path / "first", 2)
    made = min(len(steps) for steps in before)
    position = before[0][made - 1][0]
    assert position == before[1][made - 1][0] == 6 * made < 3 * COUNT

    second = trained(folder, tmp_path / "second", ranks=3, batch=9, workers=0, position=position)
    assert [process.wait() for process in second] == [0, 0, 0]
    after = logged(tmp_path / "second", 3)
    assert len({len(steps) for steps in after}) == 1

    found = [key for steps in zip(*(rank[:made] for rank in before), strict=True) for _, key in steps]
    found += [key for steps in zip(*after, strict=True) for _, key in steps]
    sequence = [key for part in found for key in part]
    assert sequence == [key for _, key in keys(run(ranks_of(folder, 1, 50, 0, seed=11, epochs=3), 10**6))]


def ended(process: int) -> bool:
    try:
        return "State:\tZ" in Path(f"/proc/{process}/status").read_text()
    except OSError:
        return True


def test_workers_end_with_a_parent_that_is_killed(folder: Path, tmp_path: Path) -> None:
    (parent,) = trained(folder, tmp_path / "log", ranks=1, batch=2, workers=2, position=0)
    patience = time.monotonic() + 60
    while not logged(tmp_path / "log", 1)[0]:
        assert time.monotonic() < patience
        time.sleep(0.02)
    workers = [int(child) for child in Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()]
    assert len(workers) == 2
    parent.kill()
    parent.wait()
    while not all(map(ended, workers)):
        assert time.monotonic() < patience
        time.sleep(0.02)


@pytest.mark.parametrize("format", ["raw", "png", "jpg", "webp"])
@pytest.mark.parametrize("workers", [0, 1])
def test_batches_hold_what_was_packed(tmp_path: Path, format: Format, workers: int) -> None:
    packed(tmp_path, format=format, side=32)
    stream = ShardStream(tmp_path, batch_size=24, epochs=1, workers=workers, masks=True)
    for batch in stream:
        expected = Stub(side=32).samples(np.array(numbers(batch.keys)))
        assert batch.images.dtype == torch.uint8
        error = np.abs(batch.images.numpy().astype(int) - expected.images).mean()
        assert error == 0 if format in ("raw", "png") else error < 14
        assert batch.masks is not None
        assert np.array_equal(batch.masks.numpy(), expected.masks)
        assert np.array_equal(batch.factors["shape"].numpy(), expected.factors["shape"])
        assert np.array_equal(batch.factors["x"].numpy(), expected.factors["x"])
        assert batch.factors["x"].dtype == torch.float32


def test_a_batch_stays_as_it_was_when_the_next_is_read(folder: Path) -> None:
    stream = ShardStream(folder, batch_size=8, epochs=2, workers=1, prefetch=1)
    batches = list(stream)
    for batch in batches:
        assert np.array_equal(batch.images.numpy(), Stub().samples(np.array(numbers(batch.keys))).images)


def test_the_last_batch_is_full_and_says_what_is_filling(folder: Path) -> None:
    (*_, last) = ShardStream(folder, batch_size=10, epochs=1)
    assert last.images.shape[0] == 10
    assert last.valid.tolist() == [True] * 3 + [False] * 7


def test_an_endless_stream_carries_on_into_the_next_epoch(folder: Path) -> None:
    stream = ShardStream(folder, batch_size=10)
    assert stream.steps is None
    found: list[str] = []
    for batch in stream:
        assert batch.valid.all()
        found += batch.keys
        if len(found) >= 2 * COUNT:
            break
    for epoch in (found[:COUNT], found[COUNT : 2 * COUNT]):
        assert sorted(numbers(epoch)) == list(range(COUNT))
    assert stream.epoch == 2


def test_a_finished_stream_gives_nothing_and_starts_over_when_told(folder: Path) -> None:
    stream = ShardStream(folder, batch_size=10, epochs=1)
    first = [batch.keys for batch in stream]
    assert list(stream) == [] and stream.steps == 0
    stream.seek(0)
    assert [batch.keys for batch in stream] == first


def test_batches_read_ahead_are_not_counted_as_taken(folder: Path) -> None:
    stream = ShardStream(folder, batch_size=4, workers=2, prefetch=3)
    iterator = iter(stream)
    next(iterator), next(iterator)
    assert stream.state_dict()["position"] == 8


def test_batches_on_their_way_to_a_device_are_not_counted_as_taken(folder: Path) -> None:
    """torch's meta device stands in for a GPU: it takes the same path, one batch ahead, and holds no pixels."""
    stream = ShardStream(folder, batch_size=10, epochs=1, device="meta")
    taken = []
    for step, batch in enumerate(stream):
        assert batch.images.device.type == "meta"
        assert stream.position == min(10 * (step + 1), COUNT)
        taken.append(batch.keys)
    assert taken == [batch.keys for batch in ShardStream(folder, batch_size=10, epochs=1)]


@pytest.mark.parametrize("change", [{"seed": 1}, {"window": 2}, {"shuffle": False}])
def test_a_state_of_another_order_is_refused(folder: Path, change: dict[str, int]) -> None:
    state = ShardStream(folder, batch_size=4).state_dict()
    with pytest.raises(StreamError, match="another order"):
        ShardStream(folder, batch_size=4, **change).load_state_dict(state)  # type: ignore[arg-type]


def test_a_state_of_other_data_is_refused(folder: Path, tmp_path: Path) -> None:
    pack(Stub(COUNT, shift=1), tmp_path, shard_size=10, format="png")
    state = ShardStream(tmp_path, batch_size=4).state_dict()
    with pytest.raises(StreamError, match="another order"):
        ShardStream(folder, batch_size=4).load_state_dict(state)


def test_a_mixture_tells_where_each_sample_is_from(folder: Path, other: Path) -> None:
    stream = ShardStream([folder, other], weights=[3, 1], batch_size=50)
    batch = next(iter(stream))
    for number, source in enumerate((Stub(COUNT), Stub(31, shift=9))):
        chosen = (batch.sets == number).numpy()
        assert chosen.sum() > 3
        expected = source.samples(np.array(numbers(batch.keys))[chosen])
        assert np.array_equal(batch.images.numpy()[chosen], expected.images)
        assert np.array_equal(batch.factors["x"].numpy()[chosen], expected.factors["x"])


def test_data_sets_of_different_kinds_do_not_mix(folder: Path, tmp_path: Path) -> None:
    packed(tmp_path, side=8)
    with pytest.raises(StreamError, match="in height"):
        ShardStream([folder, tmp_path], batch_size=4)


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 7, "ranks": 2},
        {"batch_size": 0},
        {"batch_size": 4, "rank": 2, "ranks": 2},
        {"batch_size": 4, "workers": -1},
        {"batch_size": 4, "epochs": 0},
        {"batch_size": 4, "window": 0},
        {"batch_size": 4, "weights": [1.0, 2.0]},
    ],
)
def test_impossible_requests_are_refused(folder: Path, options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="expected"):
        ShardStream(folder, **options)  # type: ignore[arg-type]


def test_masks_that_were_never_packed_are_refused(tmp_path: Path) -> None:
    pack(Stub(10, masks=False), tmp_path)
    with pytest.raises(StreamError, match="has no masks"):
        ShardStream(tmp_path, batch_size=2, masks=True)


def test_more_shards_than_files_may_be_open_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compgen_fast.stream.shards._most_open", lambda: 2)
    before = len(os.listdir("/proc/self/fd"))
    stream = ShardStream(folder, batch_size=10, epochs=2)
    for batch in stream:
        assert np.array_equal(batch.images.numpy(), Stub().samples(np.array(numbers(batch.keys))).images)
        assert len(os.listdir("/proc/self/fd")) <= before + 2 * 3


def test_no_worker_and_no_memory_stays_behind(folder: Path) -> None:
    def resources() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(list(children()))

    def children() -> Iterator[str]:
        yield from Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()

    for batch in ShardStream(folder, batch_size=8, epochs=1):
        del batch
    before = resources()
    for _ in ShardStream(folder, batch_size=8, epochs=1, workers=2):
        break
    assert resources() == before


def test_workers_are_chosen_by_measurement(folder: Path) -> None:
    rates = measure_workers(folder, 8, most=3, seconds=0.02)
    assert list(rates) == [0, 1, 2, 3]
    assert all(rate > 0 for rate in rates.values())
    assert fewest_good({0: 100.0, 1: 180.0, 2: 196.0, 4: 200.0, 8: 150.0}) == 2
