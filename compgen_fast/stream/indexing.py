"""Makes an index and a manifest beside tars that others wrote, so that they stream like packed ones.

The tars are read and never written. Members that share a key are one sample, wherever in the tar they stand; as in
webdataset the key is everything before the first dot of a name's last part, and folders, names without a dot or with
nothing before it, and ``__names__`` of metadata are no samples. Everything is read before anything is written, and the
manifest comes last: tars that cannot be indexed leave the folder as it was.
"""

import glob
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
from braceexpand import braceexpand

from compgen_fast.progress import following
from compgen_fast.stream import codecs, found, index, labels, manifest
from compgen_fast.stream.faults import BadShard, StreamError
from compgen_fast.stream.labels import Labels
from compgen_fast.stream.manifest import AS_FOUND, Manifest, Schema, Shard
from compgen_fast.stream.packing import PLAN
from compgen_fast.stream.tar import Member, members
from compgen_fast.worlds.adapters.pixels import MADE

PICTURES = (
    *("jpg", "jpeg", "jpe", "jfif", "png", "webp", "ppm", "pgm", "pbm", "pnm", "bmp", "tif", "tiff", "gif"),
    *("img", "image"),
)
ARRAYS = ("npy",)
"""An image only in a sample without a picture: next to one it is more likely an embedding."""

_COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
_COMPRESSED_START = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")
_METADATA = re.compile(r"__[^/.]*__([/.]|$)")
Parts = Mapping[str, Member]


@dataclass(frozen=True)
class Indexed:
    """What `index_tars` made."""

    manifest: Manifest
    folder: Path
    left_out: tuple[str, ...]
    """What the stream will not give, and why: a sentence each."""


def index_tars(
    tars: str | Path | Sequence[str | Path],
    *,
    resolution: int | None = None,
    image: str | None = None,
    progress: bool = False,
) -> Indexed:
    """Writes an index beside each tar and a manifest into their folder, over those of an earlier call.

    Args:
        tars: a folder, all of whose tars are meant, a tar, or a pattern like ``train-{000000..000009}.tar`` or
            ``train-*.tar``; or several of these. All tars are in one folder.
        resolution: the side at which images are given out: each is cut to its middle square and resized as it is read.
            Only images that are all of one size can do without.
        image: which part of a sample is its image, such as ``jpg`` or ``rgb.png``, where samples have several.
        progress: show how many tars are read.
    """
    if resolution is not None and resolution < 1:
        raise ValueError(f"index: resolution is {resolution}; expected at least 1 pixel")
    paths = _paths([tars] if isinstance(tars, str | Path) else tars)
    folder = paths[0].parent
    _check_folder(folder)
    reading = _Reading(resolution, image.lower().lstrip(".") if image else None)
    read = _read_all(paths, reading, progress)
    if reading.size is None:
        raise StreamError(f"{folder}: {reading.nothing()}")
    factors = list(reading.labels.factors())
    schema = Schema(AS_FOUND, *reading.size, tuple(factor for factor, _ in factors), masks=False, slots=())
    columns = {f"factor.{factor.name}": column for factor, column in factors}
    made = _write(folder, schema, [tar for tar in read if tar.rows], columns)
    return Indexed(made, folder, tuple(reading.left_out()))


def _paths(given: Sequence[str | Path]) -> list[Path]:
    """The tars that are meant, each once."""
    paths = list(dict.fromkeys(path for item in given for path in _expanded(str(item))))
    if not paths:
        raise StreamError("no tars were given; expected a folder of tars, or a pattern such as train-{000..009}.tar")
    if len(folders := {path.parent.resolve() for path in paths}) > 1:
        raise StreamError(
            f"the tars are in {len(folders)} folders ({', '.join(map(str, sorted(folders)[:3]))}); index each "
            "folder by itself, and stream them as a mixture"
        )
    for path in paths:
        manifest.check_safe(path.name, str(path.parent))
        with path.open("rb") as file:
            if file.read(6).startswith(_COMPRESSED_START):
                raise StreamError(f"{path} is compressed, so no sample in it can be reached by itself; unpack it first")
    return paths


def _expanded(text: str) -> Iterator[Path]:
    if Path(text).is_dir():
        endings = (".tar", *_COMPRESSED)
        inside = sorted(path for path in Path(text).iterdir() if path.name.endswith(endings) and path.name[0] != ".")
        if not inside:
            raise StreamError(f"{text} holds no tars; expected WebDataset shards such as train-000000.tar")
        yield from inside
        return
    for piece in [text] if Path(text).exists() else braceexpand(text):
        matching = [piece] if Path(piece).exists() else sorted(glob.glob(piece))
        if not matching:
            raise StreamError(f"{piece} is not there; expected a folder of tars, a tar, or a pattern that fits some")
        yield from map(Path, matching)


def _check_folder(folder: Path) -> None:
    """Refuses, before anything is read, a folder whose files are not ours to replace."""
    if (folder / PLAN).exists():
        raise StreamError(f"{folder} is written by `cgf pack`, which makes the index too; there is nothing to add")
    path = folder / manifest.FILE
    if path.exists() and _format(path) != AS_FOUND:
        raise StreamError(f"{path} is of packed shards, which have an index; there is nothing to add")
    if not os.access(folder, os.W_OK):
        raise StreamError(f"{folder} cannot be written to; the index and the manifest go beside the tars")


def _format(path: Path) -> manifest.Format:
    try:
        return manifest.read(path).schema.format
    except StreamError:
        raise StreamError(f"{path} is somebody else's, or damaged, and would be overwritten; move it away") from None


@dataclass(frozen=True)
class _Tar:
    name: str
    size: int
    sha256: str
    rows: list[tuple[bytes, int, int, int]]
    """Key, offset, size, checksum of each image."""


def _read_all(paths: Sequence[Path], reading: "_Reading", progress: bool) -> list[_Tar]:
    """All tars, or a refusal that names every one that is damaged."""
    read, broken = [], []
    with following(f"index {paths[0].parent.name}", len(paths), "tars", show=progress) as advance:
        for path in paths:
            try:
                read.append(reading.tar(path))
            except BadShard as error:
                broken.append(str(error))
            advance(1, path.name)
    if broken:
        raise StreamError(
            f"{len(broken)} of {len(paths)} tars in {paths[0].parent} cannot be indexed, and nothing was written; "
            f"restore them, or leave them out by a pattern: {'; '.join(broken)}"
        )
    return read


class _Reading:
    """What is learnt from one tar after another."""

    def __init__(self, resolution: int | None, image: str | None) -> None:
        self.labels = Labels()
        self.size = None if resolution is None else (resolution, resolution)
        self._resolution, self._image = resolution, image
        self._first = ""
        self._endings: set[str] = set()
        self._skipped: dict[str, tuple[int, str]] = {}

    def tar(self, path: Path) -> _Tar:
        rows = []
        samples = _samples(path)
        with path.open("rb") as file:
            for key, parts in samples.items():
                self._endings.update(parts)
                name = f"{key} in {path.name}"
                member = self._chosen(parts, name)
                if member is None:
                    self._skip("without an image", name)
                    continue
                data = _data(file, member)
                try:
                    self._fit(found.size(data), name)
                except ValueError as error:
                    self._skip("whose image cannot be read", f"{name}: {error}")
                    continue
                self.labels.add({part: _data(file, parts[part]) for part in labels.PARTS if part in parts})
                rows.append((key.encode(), member.offset, member.size, codecs.crc32(data)))
        return _Tar(path.name, path.stat().st_size, index.digest(path), rows)

    def left_out(self) -> Iterator[str]:
        for what, (count, first) in self._skipped.items():
            yield f"left out: {count:,} {what}, first {first}"
        yield from self.labels.left_out()

    def nothing(self) -> str:
        asked = f"no sample has {self._image!r}" if self._image else "no sample has an image that can be read"
        return f"{asked}; there are {', '.join(sorted(self._endings)) or 'no samples at all'}"

    def _chosen(self, parts: Parts, name: str) -> Member | None:
        if self._image is not None:
            return parts.get(self._image)
        of = {kind: [part for part in parts if part.rpartition(".")[2] in kind] for kind in (PICTURES, ARRAYS)}
        images = of[PICTURES] or of[ARRAYS]
        if len(images) > 1:
            raise StreamError(
                f"sample {name} has several images, {' and '.join(images)}; say which with image= (--image {images[0]})"
            )
        return parts[images[0]] if images else None

    def _fit(self, size: tuple[int, int], name: str) -> None:
        if self.size is None:
            self.size, self._first = size, name
        elif self._resolution is None and size != self.size:
            raise StreamError(
                f"images differ in size: {self._first} is {_by(self.size)}, {name} is {_by(size)}; say at which side "
                "to give all of them out with resolution= (--resolution 64, say)"
            )

    def _skip(self, what: str, first: str) -> None:
        count, known = self._skipped.get(what, (0, first))
        self._skipped[what] = (count + 1, known)


def _samples(path: Path) -> dict[str, dict[str, Member]]:
    """Members by key and lower-case ending."""
    samples: dict[str, dict[str, Member]] = {}
    for member in members(path, strict=False):
        key = member.key
        ending = member.name[len(key) + 1 :].lower()
        if not ending or not key or key.endswith("/") or _METADATA.match(member.name):
            continue
        _check_name(member.name, path)
        if samples.setdefault(key, {}).setdefault(ending, member) is not member:
            raise BadShard(f"{path.name} holds {member.name!r} twice; expected each part of a sample once")
    return samples


def _check_name(name: str, path: Path) -> None:
    try:
        name.encode()
    except UnicodeEncodeError:
        raise BadShard(f"{path.name} holds {name!r}, which is not UTF-8; rename it") from None


def _data(file: IO[bytes], member: Member) -> bytes:
    file.seek(member.offset)
    return file.read(member.size)


def _write(folder: Path, schema: Schema, tars: Sequence[_Tar], columns: Mapping[str, labels.Values]) -> Manifest:
    """Indexes under temporary names, which become the real ones together; then the manifest."""
    temporaries = {folder / f".{name}.tmp": folder / name for name in (manifest.index_name(tar.name) for tar in tars)}
    shards, start = [], 0
    try:
        for tar, temporary in zip(tars, temporaries, strict=True):
            records = _records(schema, tar)
            for name, column in columns.items():
                records[name] = column[start : start + len(records)]
            start += len(records)
            shards.append(Shard(tar.name, len(records), tar.size, tar.sha256, index.write(records, temporary)))
        for temporary, path in temporaries.items():
            temporary.replace(path)
    finally:
        for temporary in temporaries:
            temporary.unlink(missing_ok=True)
    made = Manifest(folder.resolve().name, "", schema, tuple(shards), MADE["crop"])
    manifest.write(made, folder)
    return made


def _records(schema: Schema, tar: _Tar) -> index.Records:
    longest = max(len(key) for key, *_ in tar.rows)
    records = np.zeros(len(tar.rows), index.dtype(schema, longest))
    for name, column in zip(("key", *index.PLACE), zip(*tar.rows, strict=True), strict=True):
        records[name] = column
    return records


def _by(size: tuple[int, int]) -> str:
    return f"{size[0]}×{size[1]}"
