"""Turns a source of samples into shards: tars, an index beside each, a manifest at the end.

Shards are written in parallel, each under a temporary name that becomes the real one when all its bytes are on the
disk. So a file with a shard's name is whole, and a pack that was killed goes on where it stopped: shards that are there
are checked against their indexes and kept. The manifest is written last; a folder without one is not finished.

A sample is ``KEY.jpg`` (or png, webp, npy), ``KEY.json`` with the factors by name, and ``KEY.mask.png`` where the
source knows masks. The stream reads only the first, through the index, which holds the factors too.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import mmap
import multiprocessing
import os
import pickle
import shlex
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from compgen_fast.files import LEFTOVERS
from compgen_fast.progress import following
from compgen_fast.stream import codecs, index, manifest
from compgen_fast.stream.faults import StreamError
from compgen_fast.stream.manifest import FORMATS, Format, Manifest, Schema, Shard
from compgen_fast.stream.tar import END, TarWriter
from compgen_fast.worlds.source import Samples, Source

PLAN = "plan.json"
CHUNK = 64


@dataclass(frozen=True)
class Plan:
    """What is being packed. A folder takes one plan only, and a second call with the same one goes on."""

    name: str
    split: str
    samples: int
    shard_size: int
    schema: Schema
    probe: int
    """A checksum of the first and the last image: two sources of the same name are told apart by it."""
    made: str
    """How the images came to be, where the source says so."""
    skipped: Mapping[str, str]
    """What was left out as bad, and why."""

    @property
    def shards(self) -> int:
        return -(-self.samples // self.shard_size)

    def numbers(self, shard: int) -> range:
        return range(shard * self.shard_size, min((shard + 1) * self.shard_size, self.samples))

    def to_json(self) -> str:
        given = {name: value for name, value in asdict(self).items() if value or name not in ("made", "skipped")}
        return json.dumps(given, indent=1) + "\n"


def pack(
    source: Source,
    out: str | Path,
    *,
    shard_size: int = 10_000,
    format: Format = "png",
    split: str = "",
    workers: int = 1,
    skipped: Mapping[str, str] | None = None,
    progress: bool = False,
) -> Manifest:
    """Writes all samples of ``source`` into the folder ``out`` and returns its manifest.

    Args:
        source: a world's split, an adapter, or anything else with the `Source` interface; with several workers it
            travels to other processes, so it must pickle.
        out: a folder, made if need be. An unfinished pack of the same source in it is completed.
        shard_size: samples per tar. At most this many are lost to a kill, and a shard is what remote readers fetch.
        format: ``"png"`` (exact, small), ``"raw"`` (exact, fastest to read), ``"jpg"`` or ``"webp"`` (lossy, smallest).
        split: recorded in the manifest, for people.
        workers: processes that render and encode; a script that asks for several calls this under
            ``if __name__ == "__main__"``.
        skipped: what was left out of ``source`` as bad, and why; kept beside the shards, in plan.json.
        progress: show a bar with the rate and the time left.
    """
    folder = Path(out)
    check_request(folder, shard_size, format, workers)
    plan = _plan(source, split, shard_size, format, skipped or {})
    folder.mkdir(parents=True, exist_ok=True)
    with _sole_owner(folder, plan):
        try:
            shards = _pack_all(source, folder, plan, workers, progress)
            done = Manifest(plan.name, plan.split, plan.schema, tuple(shards), plan.made)
            manifest.write(done, folder)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            raise StreamError(
                f"{folder}: {error.strerror}; make room and run the same command again, finished shards are kept"
            ) from None
        finally:
            _remove_leftovers(folder)
    return done


def check_request(out: Path, shard_size: int, format: Format, workers: int) -> None:
    """Refuses what no source can be packed with."""
    if format not in FORMATS:
        raise ValueError(f"pack: format is {format!r}; expected one of {', '.join(FORMATS)}")
    if shard_size < 1 or workers < 1:
        raise ValueError(f"pack: shard_size is {shard_size} and workers is {workers}; both must be at least 1")
    if out.exists() and not out.is_dir():
        raise StreamError(f"{out} is a file; expected a folder to pack into")
    if out.exists() and not (out / PLAN).exists() and any(out.iterdir()):
        raise StreamError(f"{out} holds other files; pack into a folder that is new or empty")


def skipped_in(out: Path) -> Mapping[str, str] | None:
    """What the pack that was begun in a folder leaves out; None where none was."""
    text = (out / PLAN).read_text() if (out / PLAN).exists() else ""
    return _read(text, out).get("skipped", {}) if text else None


def _plan(source: Source, split: str, shard_size: int, format: Format, skipped: Mapping[str, str]) -> Plan:
    if len(source) < 1:
        raise ValueError(f"pack: {source.name} has no samples; expected at least one")
    probe = source.samples(np.array([0, len(source) - 1]))
    height, width = probe.images.shape[1:3]
    schema = Schema(format, height, width, tuple(source.factors), probe.masks is not None, tuple(source.slots))
    checksum = codecs.crc32(np.ascontiguousarray(probe.images).tobytes())
    made = getattr(source, "made", "")
    return Plan(source.name, split, len(source), shard_size, schema, checksum, made, skipped)


@contextlib.contextmanager
def _sole_owner(folder: Path, plan: Plan) -> Iterator[None]:
    """Holds the folder's plan while packing. Refuses a folder of another plan, or one that somebody is packing."""
    with (folder / PLAN).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise StreamError(f"{folder} is being packed by another process; wait for it, or choose another") from None
        wanted = plan.to_json()
        file.seek(0)
        found = file.read()
        if found and found != wanted:
            kind = "a pack" if (folder / manifest.FILE).exists() else "an unfinished pack"
            difference = _difference(_read(found, folder), json.loads(wanted))
            raise StreamError(f"{folder} holds {kind} of other images or settings ({difference}); {anew(folder)}")
        if not found:
            file.write(wanted)
            file.flush()
        yield


def anew(folder: Path) -> str:
    """How a folder whose pack cannot be gone on with is had again."""
    return f"start anew with `rm -r {shlex.quote(str(folder))}`, or pack into another folder"


def _read(text: str, folder: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(text))
    except (TypeError, ValueError):
        raise StreamError(f"{folder / PLAN} is damaged; {anew(folder)}") from None


def _difference(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """The first settings that differ between two plans, or that only the pixels do."""
    was, now = _flat(found), _flat(wanted)
    names = [name for name in {**was, **now} if was.get(name) != now.get(name) and name != "probe"]
    told = [f"{name}: {_told(was.get(name))} → {_told(now.get(name))}" for name in names[:3]]
    return ", ".join(told + ["…"] * (len(names) > len(told))) or "other pixels"


def _flat(plan: Mapping[str, Any]) -> dict[str, Any]:
    """A plan's settings side by side with those of its schema and its factors."""
    schema = dict(plan.get("schema", {}))
    factors = {f"factor {factor['name']}": factor["values"] or factor for factor in schema.pop("factors", ())}
    settings = {name: value for name, value in plan.items() if name not in ("schema", "skipped")}
    return settings | {"skipped": list(plan.get("skipped", ()))} | schema | factors


def _told(value: Any) -> str:
    match value:
        case None | "" | []:
            return "none"
        case bool():
            return "yes" if value else "no"
        case {"low": low, "high": high}:
            return f"{low:g} to {high:g}"
        case [*several]:
            text = ", ".join(map(str, several))
            return text if len(text) < 40 else f"{len(several)} of them"
    return str(value)


@dataclass(frozen=True)
class _Job:
    source: Source
    folder: Path
    plan: Plan
    known: tuple[Shard, ...] | None
    """The shards of a manifest that is there already: those that differ from it are written again."""


def _pack_all(source: Source, folder: Path, plan: Plan, workers: int, progress: bool) -> list[Shard]:
    _remove_leftovers(folder)
    try:
        known = manifest.read(folder / manifest.FILE).shards
    except StreamError:
        known = None
    job = _Job(source, folder, plan, known)
    with following(f"pack {plan.name}", plan.samples, "samples", show=progress) as advance:
        if workers == 1:
            return [_shard(job, number, advance) for number in range(plan.shards)]
        return _in_parallel(job, workers, advance)


def _in_parallel(job: _Job, workers: int, advance: Callable[[int], None]) -> list[Shard]:
    try:
        pickle.dumps(job)
    except Exception as error:
        raise StreamError(f"{job.plan.name} does not pickle ({error}); pack it with workers=1") from None
    context = multiprocessing.get_context("spawn")
    counter: Any = context.Value("q", 0)
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_initialise, initargs=(job, counter)) as pool:
        futures = [pool.submit(_shard_in_worker, number) for number in range(job.plan.shards)]
        try:
            _follow(futures, counter, advance)
            return [future.result() for future in futures]
        except BrokenProcessPool:
            raise StreamError(
                "a packing worker ended early, killed (out of memory?) or unable to start (a script that packs with "
                "several workers needs `if __name__ == '__main__':`); run it again, finished shards are kept"
            ) from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _follow(futures: list[Future[Shard]], counter: Any, advance: Callable[[int], None]) -> None:
    seen, pending = 0, set(futures)
    while pending:
        done, pending = wait(pending, timeout=0.2, return_when=FIRST_EXCEPTION)
        advance(counter.value - seen)
        seen = counter.value
        for future in done:
            future.result()


_worker: tuple[_Job, Any]


def _initialise(job: _Job, counter: Any) -> None:
    global _worker
    _worker = (job, counter)
    threading.Thread(target=_die_with_parent, daemon=True).start()


def _die_with_parent() -> None:
    """A pool's workers outlive a parent that is killed; these must not write on beside its successor."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _shard_in_worker(number: int) -> Shard:
    job, counter = _worker

    def advance(samples: int) -> None:
        with counter.get_lock():
            counter.value += samples

    return _shard(job, number, advance)


def _shard(job: _Job, number: int, advance: Callable[[int], None]) -> Shard:
    """One shard, written unless a good one is there."""
    source, folder, plan, known = job.source, job.folder, job.plan, job.known
    found = _kept(folder, plan, number)
    if found is not None and (known is None or found in known):
        advance(found.samples)
        return found
    return _written(source, folder, plan, number, advance)


def _kept(folder: Path, plan: Plan, number: int) -> Shard | None:
    """The shard that is there already, if every sample in it has the checksum that its index says."""
    path, numbers = folder / manifest.shard_name(number), plan.numbers(number)
    try:
        records = index.read(folder / manifest.index_name(path.name), plan.schema, len(numbers))
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if data[-len(END) :] != END or not _intact(data, records):
                return None
            sha256, size = hashlib.sha256(data).hexdigest(), len(data)
    except (StreamError, OSError, ValueError):  # an empty file cannot be mapped: ValueError
        return None
    if records["key"].tolist() != [key_of(sample).encode() for sample in numbers]:
        return None
    return Shard(path.name, len(numbers), size, sha256, index.digest(folder / manifest.index_name(path.name)))


def _intact(data: mmap.mmap, records: index.Records) -> bool:
    places = [place for place in (index.PLACE, index.MASK_PLACE) if place[0] in (records.dtype.names or ())]
    return all(
        codecs.crc32(data[offset : offset + size]) == crc
        for place in places
        for offset, size, crc in records[list(place)].tolist()
    )


def _written(source: Source, folder: Path, plan: Plan, number: int, advance: Callable[[int], None]) -> Shard:
    name = manifest.shard_name(number)
    temporary, temporary_index = (folder / f".{file}.tmp" for file in (name, manifest.index_name(name)))
    digest, numbers = hashlib.sha256(), plan.numbers(number)
    records = np.zeros(len(numbers), index.dtype(plan.schema))
    with temporary.open("wb") as file:
        tar = TarWriter(file, digest)
        for start in range(0, len(numbers), CHUNK):
            chosen = numbers[start : start + CHUNK]
            samples = source.samples(np.array(chosen))
            _check(samples, len(chosen), plan)
            _add(tar, samples, chosen, plan.schema, records[start : start + CHUNK])
            advance(len(chosen))
        tar.finish()
        file.flush()
        os.fsync(file.fileno())
    index_sha256 = index.write(records, temporary_index)
    # The tar first: an index without its tar would speak of bytes that are not there.
    temporary.replace(folder / name)
    temporary_index.replace(folder / manifest.index_name(name))
    return Shard(name, len(numbers), tar.bytes, digest.hexdigest(), index_sha256)


def _check(samples: Samples, count: int, plan: Plan) -> None:
    schema = plan.schema
    expected = (count, schema.height, schema.width, 3)
    if samples.images.dtype != np.uint8 or samples.images.shape != expected:
        raise StreamError(
            f"{plan.name} gave images {samples.images.dtype} {list(samples.images.shape)}; expected uint8 "
            f"{list(expected)}"
        )
    if (samples.masks is not None) != schema.masks:
        raise StreamError(f"{plan.name} has masks for some samples only; expected masks for all or for none")
    for factor in schema.factors:
        values = samples.factors.get(factor.name)
        if values is None or values.shape != (count,):
            raise StreamError(
                f"{plan.name}: factor {factor.name!r} is missing or not [{count}]; expected one per sample"
            )
        if factor.values is not None and (values.min() < 0 or values.max() >= len(factor.values)):
            raise StreamError(
                f"{plan.name}: factor {factor.name!r} goes from {values.min()} to {values.max()}; expected numbers "
                f"below {len(factor.values)}, the count of its values"
            )


def _add(tar: TarWriter, samples: Samples, numbers: range, schema: Schema, records: index.Records) -> None:
    encode, ending = codecs.encoder(schema.format), codecs.EXTENSIONS[schema.format]
    for factor in schema.factors:
        records[f"factor.{factor.name}"] = samples.factors[factor.name]
    for row, number in enumerate(numbers):
        key = key_of(number)
        records["key"][row] = key
        _put(tar, f"{key}.{ending}", encode(np.ascontiguousarray(samples.images[row])), records, row, index.PLACE)
        tar.add(f"{key}.json", json.dumps(_described(samples, schema, row)).encode())
        if samples.masks is not None:
            mask = codecs.encoder("png")(np.ascontiguousarray(samples.masks[row]))
            _put(tar, f"{key}.mask.png", mask, records, row, index.MASK_PLACE)


def _put(tar: TarWriter, name: str, data: bytes, records: index.Records, row: int, place: tuple[str, str, str]) -> None:
    for field, value in zip(place, (tar.add(name, data), len(data), codecs.crc32(data)), strict=True):
        records[field][row] = value


def _described(samples: Samples, schema: Schema, row: int) -> dict[str, str | float | None]:
    """The factors of one sample as people read them: a category by its name."""
    found: dict[str, str | float | None] = {}
    for factor in schema.factors:
        value = samples.factors[factor.name][row].item()
        if factor.values is not None:
            found[factor.name] = factor.values[value]
        else:
            found[factor.name] = value if np.isfinite(value) else None
    return found


def key_of(number: int) -> str:
    return f"{number:09d}"


def _remove_leftovers(folder: Path) -> None:
    for path in folder.glob(LEFTOVERS):
        path.unlink(missing_ok=True)
