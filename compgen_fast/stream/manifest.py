"""The manifest of a packed folder: what a sample is made of, which shards there are, and a hash over all of it.

The order in which a stream visits samples is a function of this file, so its hash says whether two folders give the
same run. The file is small: everything per sample is in the shards' indexes.
"""

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from compgen_fast.files import write_whole
from compgen_fast.stream.faults import StreamError
from compgen_fast.worlds.source import Factor

Format = Literal["raw", "png", "jpg", "webp", "as found"]
AS_FOUND: Format = "as found"
"""Somebody else's tars (see `indexing`): each image of its own kind and size, fitted to this size as it is read."""
FORMATS: tuple[Format, ...] = tuple(format for format in get_args(Format) if format != AS_FOUND)
"""What packing writes."""
FILE = "manifest.json"
VERSION = 1

# A name from a manifest becomes part of a path, an address or a command: nothing in it may mean more than itself.
_SAFE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Schema:
    """What every sample of a data set is made of."""

    format: Format
    height: int
    width: int
    factors: tuple[Factor, ...]
    masks: bool
    slots: tuple[str, ...]


@dataclass(frozen=True)
class Shard:
    """One tar file and the index beside it."""

    name: str
    samples: int
    bytes: int
    sha256: str
    index_sha256: str

    @property
    def index_name(self) -> str:
        return index_name(self.name)


@dataclass(frozen=True)
class Manifest:
    """A whole packed folder."""

    name: str
    split: str
    schema: Schema
    shards: tuple[Shard, ...]
    made: str = ""
    """How the images came to be, where the source says so; without it a manifest is as it was before there was one."""

    @property
    def samples(self) -> int:
        return sum(shard.samples for shard in self.shards)

    @property
    def bytes(self) -> int:
        return sum(shard.bytes for shard in self.shards)

    @property
    def hash(self) -> str:
        """Changes with every pixel, factor, key and name, since the shards' own hashes are in it."""
        return hashlib.sha256(json.dumps(_plain(self), sort_keys=True).encode()).hexdigest()

    def to_json(self) -> str:
        return json.dumps({**_plain(self), "samples": self.samples, "hash": self.hash}, indent=1) + "\n"


def _plain(manifest: Manifest) -> dict[str, Any]:
    plain = {"version": VERSION, **asdict(manifest)}
    if not manifest.made:
        del plain["made"]
    return plain


def index_name(shard: str) -> str:
    return shard.removesuffix(".tar") + ".index.npy"


def shard_name(number: int) -> str:
    return f"shard-{number:06d}.tar"


def write(manifest: Manifest, folder: Path) -> None:
    write_whole(folder / FILE, manifest.to_json())


def read(path: Path, origin: str | None = None) -> Manifest:
    """The manifest in a file; ``origin`` is what to call it in an error."""
    where = origin or str(path)
    try:
        text = path.read_text()
    except FileNotFoundError:
        raise StreamError(
            f"{where} is not there; expected a folder made by `cgf pack` (one that was interrupted is finished by "
            "running the same command again), or tars of yours that `cgf index` has been through"
        ) from None
    return parse(text, where)


def parse(text: str, where: str) -> Manifest:
    """Refuses what this version cannot read, names that lead elsewhere, and contents that differ from the hash."""
    try:
        found = json.loads(text)
        if found["version"] != VERSION:
            raise StreamError(f"{where} has version {found['version']}; this program reads version {VERSION}")
        manifest = _manifest(found)
        samples, digest = found["samples"], found["hash"]
    except (KeyError, TypeError, ValueError) as error:
        raise StreamError(f"{where} is not a manifest of packed shards ({error!r}); pack the data again") from None
    for shard in manifest.shards:
        check_safe(shard.name, where)
    if manifest.schema.format not in get_args(Format):
        raise StreamError(
            f"{where}: format is {manifest.schema.format!r}; expected one of {', '.join(get_args(Format))}"
        )
    if samples != manifest.samples or digest != manifest.hash:
        raise StreamError(f"{where} was changed after packing: its hash or count does not fit its contents; restore it")
    return manifest


def _manifest(found: dict[str, Any]) -> Manifest:
    schema = dict(found["schema"])
    schema["factors"] = tuple(
        Factor(**{**factor, "values": None if factor["values"] is None else tuple(factor["values"])})
        for factor in schema["factors"]
    )
    schema["slots"] = tuple(schema["slots"])
    shards = tuple(Shard(**shard) for shard in found["shards"])
    return Manifest(found["name"], found["split"], Schema(**schema), shards, found.get("made", ""))


def check_safe(name: str, where: str) -> None:
    if not _SAFE.fullmatch(name):
        raise StreamError(
            f"{where} names a file {name!r}; expected a plain name of letters, digits, '.', '_' and '-' that stays in "
            "its folder"
        )
