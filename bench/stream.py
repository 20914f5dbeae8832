"""The suite `stream`: samples per second from packed shards, beside what users would read them with.

Reading has no fp64 oracle and no backward, so this suite has its own rows: a case is an image size, a format and a
number of workers; a row is a reader. Rounds are interleaved and ratios formed inside each round, as everywhere here.
Before timing, what our stream gives is compared with what Pillow decodes, and every sample must come once.
"""

import statistics
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console, Group
from rich.text import Text

from compgen_fast.bench import report
from compgen_fast.bench import stream_peers as peers
from compgen_fast.bench.suite import GREEN, IMPOSSIBLE, RED, RESULTS, stamp
from compgen_fast.progress import following
from compgen_fast.stream import ShardStream, pack
from compgen_fast.stream.manifest import Format
from compgen_fast.stream.order import Order, Part
from compgen_fast.stream.remote import Local
from compgen_fast.stream.shards import DataSet
from compgen_fast.tables import Sheet
from compgen_fast.worlds.source import Factor, Samples

SIDES = (64, 128, 224)
FORMATS: tuple[Format, ...] = ("raw", "png", "jpg")
WORKERS = (0, 2)
SAMPLES = {64: 2048, 128: 1024, 224: 512}
RESUMED = "jpg64"
WARM = 6  # batches taken before a timed stretch: what was read ahead while others ran must not count


@dataclass(frozen=True)
class Effort:
    """How long each reader is timed in a round, and how many rounds there are."""

    seconds: float
    rounds: int


QUICK, FULL = Effort(0.25, 5), Effort(1.0, 15)


@dataclass(frozen=True)
class Pictures:
    """Smooth shading, a disc and a little grain: compresses as rendered scenes do."""

    side: int
    count: int
    name: str = "pictures"
    slots: tuple[str, ...] = ()

    @property
    def factors(self) -> tuple[Factor, ...]:
        return (Factor("hue", ("red", "green", "blue")), Factor("x"), Factor("y"))

    def __len__(self) -> int:
        return self.count

    def samples(self, indices: NDArray[np.int64]) -> Samples:
        rows, columns = np.mgrid[: self.side, : self.side] / self.side
        draw = np.random.default_rng(indices.tolist())
        x, y = draw.uniform(0.2, 0.8, (2, len(indices), 1, 1)).astype(np.float32)
        phase = draw.uniform(0, 6, (len(indices), 1, 1, 1))
        ground = 128 + 50 * np.sin(4 * (rows + columns)[..., None] + phase + np.arange(3))
        disc = ((rows - y) ** 2 + (columns - x) ** 2 < 0.04)[..., None]
        grain = draw.normal(0, 2, (len(indices), self.side, self.side, 1))
        images = np.where(disc, 220 - 60 * np.arange(3), ground) + grain
        factors = {"hue": indices % 3, "x": x[:, 0, 0], "y": y[:, 0, 0]}
        return Samples(images.clip(0, 255).astype(np.uint8), factors)


@dataclass(frozen=True)
class Row:
    """One reader on one case. The fields are the columns of the CSV and the keys of the JSON."""

    suite: str
    case: str
    side: int
    format: str
    workers: int
    reader: str
    samples_per_second: float | None
    """Median over rounds."""
    ratio: float | None
    """Our rate ÷ the reader's, median over rounds; above 1 we are faster."""
    ratio_low: float | None
    """20th percentile over rounds; ``ratio_high`` is the 80th."""
    ratio_high: float | None
    unsupported: str | None
    gate: str | None
    rounds: int
    mode: str
    threads: int
    hardware: str
    version: str
    torch: str
    commit: str | None
    timestamp: str


def run(quick: bool = False, threads: int = 1, json: str | None = None, device: str = "cpu") -> int:
    """Measures all cases and writes what was found. Returns 0, 1 if a gate is red, 2 if the device is not there."""
    if device != "cpu":
        print("stream: this suite reads and decodes, which the CPU does; leave --device out", file=sys.stderr)
        return IMPOSSIBLE
    RESULTS.mkdir(exist_ok=True)
    torch.set_num_threads(threads)
    people = Console(stderr=json == "-", highlight=False)
    stamped = asdict(stamp(threads, "quick" if quick else "full", device))
    with tempfile.TemporaryDirectory(prefix="compgen-bench-") as scratch:
        rows = _measure_all(Path(scratch), QUICK if quick else FULL, stamped, people)
        people.print(resume_table(Path(scratch) / RESUMED), memory_table())
    for note in dict.fromkeys(f"{row.reader}: {row.unsupported}" for row in rows if row.unsupported):
        people.print(f"unsupported: {note}", style="dim")
    people.print(LEGEND, style="dim")
    report.write(rows, RESULTS / "stream.csv", json, people)
    return RED if any(row.gate for row in rows) else GREEN


def _measure_all(scratch: Path, effort: Effort, stamped: dict[str, Any], people: Console) -> list[Row]:
    rows: list[Row] = []
    with following("measure", len(SIDES) * len(FORMATS) * len(WORKERS), "cases") as advance:
        for side, format in product(SIDES, FORMATS):
            folder = scratch / f"{format}{side}"
            advance(0, f"{side} px, {format}: pack, check")
            pack(Pictures(side, SAMPLES[side]), folder, shard_size=SAMPLES[side] // 8, format=format)
            gate = check(folder, format)
            for workers in WORKERS:
                advance(0, f"{side} px, {format}, {workers} workers")
                rows += (found := measure(folder, side, format, workers, gate, effort, stamped))
                people.print(table(found))
                advance()
    return rows


LEGEND = (
    "samples/s: median over interleaved rounds. ratio: our rate ÷ the reader's, above 1 we are faster, with the 20th "
    "and 80th percentile. Floors do less: `tar bytes` only reads, `decode only` neither reads nor checks nor orders."
)


def check(folder: Path, format: Format) -> str:
    """Empty if an epoch brings every sample once, each as Pillow decodes it."""
    data = DataSet(Local(folder))
    everything = [data.at(sample) for sample in range(data.samples)]
    encoded = {shard.description(row)[0].decode(): (shard, row) for shard, row in everything}
    seen: list[str] = []
    for batch in ShardStream(folder, batch_size=peers.BATCH, epochs=1):
        seen += [key for key, valid in zip(batch.keys, batch.valid.tolist(), strict=True) if valid]
        if format != "raw":
            shard, row = encoded[batch.keys[0]]
            expected = peers.pil_image(shard.encoded(shard.place, row))
            if np.abs(batch.images[0].numpy().astype(int) - expected).max() > (0 if format == "png" else 8):
                return f"{batch.keys[0]} differs from what Pillow decodes"
    return "" if sorted(seen) == sorted(encoded) else "an epoch does not bring every sample once"


def measure(
    folder: Path,
    side: int,
    format: Format,
    workers: int,
    gate: str,
    effort: Effort,
    stamped: dict[str, object],
) -> list[Row]:
    readers: dict[str, peers.Reader] = {"ours": peers.ours, **peers.PEERS}
    if workers == 0:
        readers |= {"tar bytes": peers.tar_bytes} | ({"decode only": peers.decode_only} if format != "raw" else {})
    absent = {name: peers.missing(name) for name in peers.PEERS if peers.missing(name)}
    supplies, failed = _supplies({n: r for n, r in readers.items() if n not in absent}, folder, format, workers)
    rates = {} if gate else _rates(supplies, effort)
    supplies.clear()

    def row(name: str) -> Row:
        ratios = (
            [mine / theirs for mine, theirs in zip(rates["ours"], rates[name], strict=True)] if name in rates else []
        )
        low, middle, high = np.percentile(ratios, (20, 50, 80)).tolist() if ratios else (None, None, None)
        return Row(
            "stream", f"{format} {side} px, {workers} workers", side, format, workers, name,
            statistics.median(rates[name]) if ratios else None, middle, low, high,
            absent.get(name) or failed.get(name), gate or None, len(ratios), **stamped,  # type: ignore[arg-type]
        )  # fmt: skip

    return [row(name) for name in readers]


def _supplies(
    readers: dict[str, peers.Reader], folder: Path, format: Format, workers: int
) -> tuple[dict[str, Iterator[object]], dict[str, str]]:
    """Every reader, started; and why those that could not start could not."""
    found: dict[str, Iterator[object]] = {}
    failed: dict[str, str] = {}
    for name, reader in readers.items():
        try:
            found[name] = reader(folder, format, workers)
            next(found[name])
        except Exception as error:
            if name == "ours":
                raise
            found.pop(name, None)
            failed[name] = f"{type(error).__name__}: {str(error).splitlines()[-1] if str(error) else 'no reason given'}"
    return found, failed


def _rates(supplies: dict[str, Iterator[object]], effort: Effort) -> dict[str, list[float]]:
    """Samples per second of each reader in each round."""
    found: dict[str, list[float]] = {name: [] for name in supplies}
    for _ in range(effort.rounds):
        for name, supply in supplies.items():
            found[name].append(_rate(supply, effort.seconds))
    return found


def _rate(supply: Iterator[object], seconds: float) -> float:
    for _ in range(WARM):
        next(supply)
    batches, started = 0, time.perf_counter()
    while (passed := time.perf_counter() - started) < seconds:
        next(supply)
        batches += 1
    return batches * peers.BATCH / passed


FLOORS = ("tar bytes", "decode only")


def table(rows: Sequence[Row]) -> Group:
    """One case: a line for each reader that could take part."""
    found = Sheet("reader", "samples/s", "ratio", "20–80 %")
    for row in rows:
        if row.ratio is not None:
            style = "" if row.reader in ("ours", *FLOORS) else "bold green" if row.ratio >= 1 else "bold red"
            ratio = Text(f"{row.ratio:.2f}×" if row.ratio >= 0.1 else f"{row.ratio:.2g}×", style=style)
            spread = f"{row.ratio_low:.2g}–{row.ratio_high:.2g}"
            found.add_row(row.reader, f"{row.samples_per_second:,.0f}", ratio, spread)
    gate = next((row.gate for row in rows if row.gate), "")
    return Group(Text.assemble((rows[0].case, "bold"), (f"\n{gate}" if gate else "", "bold red")), found)


def resume_table(folder: Path) -> Sheet:
    """From nothing to the first batch after so many samples: opening, seeking, reading one batch."""
    found = Sheet("after samples", "first batch, ms", words=(), title="resume")
    for position in (0, 10**3, 10**6, 10**9, 10**12):
        fastest = min(_timed(partial(_resumed, folder, position)) for _ in range(7))
        found.add_row(f"{position:,}", f"{1e3 * fastest:.2f}")
    return found


def _resumed(folder: Path, position: int) -> None:
    stream = ShardStream(folder, batch_size=peers.BATCH)
    stream.seek(position)
    next(iter(stream))


def _timed(call: Callable[[], None]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def memory_table() -> Sheet:
    """Peak memory of working out 1,000 shuffled batches, by the size of the data set."""
    found = Sheet("samples", "shards", "peak, kB", words=(), title="memory of shuffling")
    for samples in (10**4, 10**6, 10**8):
        shards = samples // 10**4
        tracemalloc.start()
        order = Order([Part((10**4,) * shards)], seed=0)
        for step in range(1000):
            order(np.arange(step * peers.BATCH, (step + 1) * peers.BATCH))
        found.add_row(f"{samples:,}", f"{shards:,}", f"{tracemalloc.get_traced_memory()[1] / 1e3:,.0f}")
        tracemalloc.stop()
    return found
