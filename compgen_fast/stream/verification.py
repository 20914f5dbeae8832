"""Checks a packed or indexed folder against its manifest, bit by bit, and names everything that is wrong.

For each shard: the hashes of tar and index, the tar's structure and names, that the index and the members agree, each
checksum, and that each image and mask decodes. Nothing is repaired; packing again into the same folder rewrites exactly
the shards that are damaged. Tars of others that were indexed may lie among other files and name samples as they like.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from compgen_fast.progress import following
from compgen_fast.stream import codecs, index, manifest
from compgen_fast.stream.faults import BadShard, StreamError
from compgen_fast.stream.manifest import AS_FOUND, Format, Manifest, Schema, Shard
from compgen_fast.stream.packing import PLAN
from compgen_fast.stream.tar import Member, members


@dataclass(frozen=True)
class Problem:
    """One thing wrong: with a file, or with a key in it."""

    file: str
    key: str
    what: str

    def __str__(self) -> str:
        return f"{self.file}{f', key {self.key}' if self.key else ''}: {self.what}"


def verify(out: str | Path, *, progress: bool = False) -> list[Problem]:
    """Everything wrong with the folder, shard by shard; an empty list if it is as it was packed."""
    folder = Path(out)
    try:
        found = manifest.read(folder / manifest.FILE)
    except StreamError as error:
        return [Problem(manifest.FILE, "", str(error))]
    ours = found.schema.format != AS_FOUND
    around = [*_strangers(folder, found), *_repeated_keys(folder, found)] if ours else []
    return [*around, *_all_shards(folder, found, progress)]


def _strangers(folder: Path, found: Manifest) -> Iterator[Problem]:
    known = {manifest.FILE, PLAN, *(name for shard in found.shards for name in (shard.name, shard.index_name))}
    for path in sorted(folder.iterdir()):
        if path.name not in known:
            yield Problem(path.name, "", "is not in the manifest; remove it")


def _repeated_keys(folder: Path, found: Manifest) -> Iterator[Problem]:
    """Keys that two shards share. Within a shard, the tar's own check finds them."""
    home: dict[bytes, str] = {}
    for shard in found.shards:
        try:
            keys = index.read(folder / shard.index_name, found.schema)["key"].tolist()
        except BadShard:
            continue  # named with the shard
        for key in keys:
            if home.setdefault(key, shard.name) != shard.name:
                yield Problem(shard.name, key.decode(), f"the key is also in {home[key]}")


def _all_shards(folder: Path, found: Manifest, progress: bool) -> Iterator[Problem]:
    with following(f"verify {found.name}", len(found.shards), "shards", show=progress) as advance:
        for shard in found.shards:
            yield from _shard(folder, shard, found.schema)
            advance()


def _shard(folder: Path, shard: Shard, schema: Schema) -> Iterator[Problem]:
    path = folder / shard.name
    if not path.exists():
        yield Problem(shard.name, "", "is missing")
        return
    if path.stat().st_size != shard.bytes:
        yield Problem(shard.name, "", f"has {path.stat().st_size} bytes; the manifest says {shard.bytes}")
    elif index.digest(path) != shard.sha256:
        yield Problem(shard.name, "", "its hash differs from the manifest's")
    ours = schema.format != AS_FOUND
    structure: list[Member] = []
    try:
        for member in members(path, strict=ours):
            structure.append(member)
    except BadShard as error:
        yield Problem(shard.name, "", str(error))
    if ours:
        yield from _groups(shard, structure)
    try:
        records = index.read(folder / shard.index_name, schema, shard.samples, shard.index_sha256)
    except BadShard as error:
        yield Problem(shard.index_name, "", str(error))
        return
    yield from _samples(path, records, schema, {member.offset: member for member in structure})


def _groups(shard: Shard, structure: list[Member]) -> Iterator[Problem]:
    """WebDataset takes neighbouring members of one key for a sample: a key must not come twice, or be torn apart."""
    finished: set[str] = set()
    names: set[str] = set()
    before = ""
    for member in structure:
        if member.name in names:
            yield Problem(shard.name, member.key, f"the member {member.name} occurs twice")
        elif member.key != before and member.key in finished:
            yield Problem(
                shard.name, member.key, "its members are interleaved with another sample's, or it occurs twice"
            )
        names.add(member.name)
        finished.add(before)
        before = member.key


def _samples(path: Path, records: index.Records, schema: Schema, at: dict[int, Member]) -> Iterator[Problem]:
    image = np.empty((schema.height, schema.width, 3), np.uint8)
    parts: list[tuple[tuple[str, ...], str, Format, codecs.Pixels]] = [
        (index.PLACE, codecs.EXTENSIONS.get(schema.format, "image"), schema.format, image)
    ]
    if schema.masks:
        parts.append((index.MASK_PLACE, "mask.png", "png", image[..., 0].copy()))
    with path.open("rb") as file:
        for place, ending, format, out in parts:
            for key, record in zip(records["key"].tolist(), records[list(place)].tolist(), strict=True):
                offset, size, crc = record
                file.seek(offset)
                data = file.read(size)
                member = at.get(offset)
                if member is None or (member.key, member.size) != (key.decode(), size):
                    yield Problem(
                        path.name, key.decode(), f"the index speaks of its {ending} at byte {offset}; it is not there"
                    )
                if codecs.crc32(data) != crc:
                    yield Problem(path.name, key.decode(), f"the checksum of its {ending} differs from the index")
                    continue
                try:
                    codecs.DECODERS[format](data, out)
                except codecs.UNDECODABLE as error:
                    yield Problem(path.name, key.decode(), str(codecs.refusal(format, out, error)))
