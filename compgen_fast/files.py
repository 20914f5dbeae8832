"""Files that are whole or not there: written under a hidden name beside their own, flushed, and renamed."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LEFTOVERS = ".*.tmp"
"""What processes that were killed may leave in a folder."""


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A path to write to. When the block ends, what was written is on the disk and becomes ``path``, in place of what
    had that name; when the block raises it is removed, and what had that name stays.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    with whole_file(path) as temporary:
        temporary.write_text(text)
