"""Where the files of a packed folder are: in a local folder, or at an address, fetched once into a cache.

Fetching is webdataset's `gopen` (curl for http and https, gsutil for gs, …), into a temporary name that becomes the
real one when the file is whole. After that a remote data set is a local one. Nothing is ever removed from the cache.

`gopen` also runs shell commands (``pipe:…``) and copies over ssh. Such addresses are refused unless the caller allows
their scheme by name, since an address often comes from a configuration file that somebody else wrote.
"""

import fcntl
import hashlib
import importlib
import os
import re
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from compgen_fast.stream.faults import BadShard, StreamError
from compgen_fast.stream.index import digest

SCHEMES = frozenset({"http", "https", "gs", "hf", "ais"})
DEFAULT_CACHE = Path("~/.cache/compgen_fast/shards")
_PLACEHOLDER = "{name}"


class Place(Protocol):
    """Gives a local path for each file of a packed folder."""

    @property
    def origin(self) -> str: ...

    def file(self, name: str, sha256: str | None = None) -> Path:
        """The hash, where given, is checked of what is fetched, not of what is there."""
        ...


@dataclass(frozen=True)
class Local:
    folder: Path

    @property
    def origin(self) -> str:
        return str(self.folder)

    def file(self, name: str, sha256: str | None = None) -> Path:
        return self.folder / name


@dataclass(frozen=True)
class Remote:
    """Files at ``address/name``, or at the address with ``{name}`` replaced; kept in ``cache``."""

    address: str
    cache: Path

    @property
    def origin(self) -> str:
        return self.address

    def file(self, name: str, sha256: str | None = None) -> Path:
        path = self.cache / name
        if not path.exists():
            self._fetch(name, path, sha256)
        return path

    def _fetch(self, name: str, path: Path, sha256: str | None) -> None:
        """Several processes may want the same file: one fetches, the others wait for it."""
        self.cache.mkdir(parents=True, exist_ok=True)
        with (self.cache / f".{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if path.exists():
                return
            temporary = self.cache / f".{name}.tmp"
            try:
                _download(self._address(name), temporary)
                if sha256 is not None and digest(temporary) != sha256:
                    raise BadShard(f"{self._address(name)} came damaged: its hash differs from the manifest's")
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)

    def _address(self, name: str) -> str:
        if _PLACEHOLDER in self.address:
            return self.address.replace(_PLACEHOLDER, name)
        return f"{self.address.rstrip('/')}/{name}"


def _download(address: str, path: Path) -> None:
    gopen: Any = importlib.import_module("webdataset.gopen").gopen
    try:
        with gopen(address, "rb") as stream, path.open("wb") as file:
            shutil.copyfileobj(stream, file, 1 << 20)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:  # gopen's pipes raise OSError when the command behind them fails
        raise BadShard(f"{address} cannot be fetched: {error}") from None


def place(address: str | Path, cache: str | Path | None = None, allow: Collection[str] = ()) -> Place:
    """A place by its path or address. ``allow`` names schemes beyond the safe ones, such as ``"pipe"``."""
    text = str(address)
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]+):", text)
    if scheme is None or scheme[1] == "file":
        return Local(Path(re.sub(r"^file:(//)?", "", text)).expanduser())
    if scheme[1] not in SCHEMES and scheme[1] not in allow:
        raise StreamError(
            f"{text} is refused: opening {scheme[1]}: addresses may run commands. Expected a folder or one of "
            f"{', '.join(sorted(SCHEMES))}; to trust this one, give allow={{{scheme[1]!r}}}"
        )
    if scheme[1] == "pipe" and _PLACEHOLDER not in text:
        raise StreamError(f"{text} has no {_PLACEHOLDER}; expected a command with {_PLACEHOLDER} where the file goes")
    name = hashlib.sha256(text.encode()).hexdigest()[:16]
    return Remote(text, Path(cache or DEFAULT_CACHE).expanduser() / name)
