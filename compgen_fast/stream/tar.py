"""Plain tar files: written member by member with known offsets, and read back with suspicion.

Written members carry no times, owners or long names, so the same samples give the same bytes on any machine.
"""

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Protocol

from compgen_fast.stream.faults import BadShard

BLOCK = tarfile.BLOCKSIZE
END = bytes(2 * BLOCK)


class _Hash(Protocol):
    def update(self, data: bytes, /) -> None: ...


class TarWriter:
    """Appends members to a file and keeps a hash of everything written."""

    def __init__(self, file: IO[bytes], digest: _Hash) -> None:
        self._file, self._digest = file, digest
        self.bytes = 0

    def add(self, name: str, data: bytes) -> int:
        """Writes one member and returns where its data begin."""
        member = tarfile.TarInfo(name)
        member.size = len(data)
        self._write(member.tobuf(tarfile.USTAR_FORMAT))
        offset = self.bytes
        self._write(data + bytes(-len(data) % BLOCK))
        return offset

    def finish(self) -> None:
        self._write(END)

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self._digest.update(data)
        self.bytes += len(data)


@dataclass(frozen=True)
class Member:
    """A file in a tar: its name, and where its data lie."""

    name: str
    offset: int
    size: int

    @property
    def key(self) -> str:
        """WebDataset's rule: everything before the first dot of the last part of the name."""
        return self.name.split(".", 1)[0] if "/" not in self.name else _key_with_folder(self.name)


def _key_with_folder(name: str) -> str:
    folder, _, last = name.rpartition("/")
    return f"{folder}/{last.split('.', 1)[0]}"


def members(path: Path, strict: bool = True) -> Iterator[Member]:
    """Every member of a tar, in order. Raises `BadShard` at the first thing a tar of samples must not hold; unless
    ``strict``, folders, links and devices are passed over, as webdataset does.

    Python's tarfile takes a damaged header for the end of the archive, and so do readers built on it; here the end
    must be where the two empty blocks are.
    """
    end = 0
    try:
        with tarfile.open(path, "r:", errorlevel=2) as archive:
            for member in archive:
                end = archive.offset
                if strict or member.isreg():
                    _check(member, path)
                    yield Member(member.name, member.offset_data, member.size)
    except tarfile.TarError as error:
        raise BadShard(f"{path.name} is not a readable tar after byte {end}: {error}") from None
    except OSError as error:
        raise BadShard(f"{path.name} cannot be read: {error.strerror or error}") from None
    with path.open("rb") as file:
        file.seek(end)
        rest = file.read()
    if len(rest) < len(END) or any(rest):
        raise BadShard(f"{path.name} breaks off or is damaged at byte {end}: no further member, and no end of archive")


def _check(member: tarfile.TarInfo, path: Path) -> None:
    if not member.isreg():
        raise BadShard(f"{path.name} holds {member.name!r}, which is a link, folder or device; expected plain files")
    place = PurePosixPath(member.name)
    if place.is_absolute() or ".." in place.parts or "\\" in member.name:
        raise BadShard(f"{path.name} holds {member.name!r}, a name that leads out of the folder; refuse this archive")
