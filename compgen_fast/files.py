"""Files and folders that are whole or not there: written under a hidden name beside their own, flushed, and renamed."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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
        _flush(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    with whole_file(path) as temporary:
        temporary.write_text(text)


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A folder to fill. When the block ends it becomes ``target``, in place of what had that name; when the block
    raises it is removed, and what had that name stays.
    """
    recover(target)
    filling = hidden_beside(target, "saving")
    filling.mkdir(parents=True)
    try:
        yield filling
        for path in [*filling.iterdir(), filling]:
            _flush(path)
        _rename(filling, target)
        _flush(target.parent)
    except BaseException:
        shutil.rmtree(filling, ignore_errors=True)
        raise
    shutil.rmtree(hidden_beside(target, "replaced"), ignore_errors=True)


def recover(target: Path) -> None:
    """Clears away what a process killed inside `whole_folder` or while pruning left beside ``target``."""
    replaced = hidden_beside(target, "replaced")
    if replaced.exists() and not target.exists():
        os.rename(replaced, target)  # killed between the two renames
    for state in ("saving", "replaced", "pruned"):
        with suppress(FileNotFoundError):
            shutil.rmtree(hidden_beside(target, state))


def _rename(filling: Path, target: Path) -> None:
    """A folder cannot be renamed onto a full one, so that one steps aside."""
    replaced = hidden_beside(target, "replaced")
    if target.exists():
        os.rename(target, replaced)
    try:
        os.replace(filling, target)
    except OSError:
        if replaced.exists():
            os.rename(replaced, target)
        raise


def hidden_beside(target: Path, state: str) -> Path:
    return target.with_name(f".{target.name}.{state}")


def _flush(path: Path) -> None:
    """What was written to a file, or the names in a folder, to the disk itself."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
