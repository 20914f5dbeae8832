"""Checkpoints: folders that are whole or not there, of which the last few and the best are kept.

    checkpoints/step_00001000/state.safetensors    the engine's state (state.py) and named tensors of the caller's
                              extra.json           what the caller adds: where the stream is, the settings' hash, …
                              random.json          the random generators of every rank
                              manifest.json        size and SHA-256 of the others, the step, the metric

Only rank 0 touches the disk; the others are told what came of it, so that all ranks go on or fail together. A folder is
filled under a hidden name, flushed, and renamed: a process that is killed at any moment leaves the earlier checkpoints
as they were. Nothing in a checkpoint is a pickle: reading one runs no code.
"""

import errno
import hashlib
import json
import math
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from safetensors.torch import load_file
from torch import Tensor

from compgen_fast.files import hidden_beside, recover, whole_folder
from compgen_fast.models.io import copied, save_tensors
from compgen_fast.settings import from_json, to_json
from compgen_fast.train.ranks import Ranks
from compgen_fast.train.state import Engine, collect, random_state, restore, restore_random, shared

T = TypeVar("T")
TENSORS, EXTRA, RANDOM, MANIFEST = "state.safetensors", "extra.json", "random.json", "manifest.json"
VERSION = 1
STATE, NAMED = "state.", "named."  # what a tensor's name begins with: the engine's, the caller's
HEADER = 256  # bytes of a file that a tensor takes besides its numbers, at most; for the estimate of a size
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_STEP = re.compile(r"step_\d{8,}")
_HIDDEN = re.compile(r"\.(step_\d{8,})\.(saving|replaced|pruned)")


class CheckpointError(Exception):
    """A checkpoint could not be written or read, told in a sentence."""


class DiskFull(CheckpointError):
    """There is no room for a checkpoint; the earlier ones are intact."""


@dataclass(frozen=True)
class File:
    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a whole checkpoint consists of.

    number: checkpoints of this folder count up as they are saved. The newest is the one saved last, which is not the
        one of the most steps when a run has gone back to an earlier checkpoint.
    metric: the lower, the better; None where nobody measured.
    """

    version: int
    step: int
    number: int
    metric: float | None
    files: tuple[File, ...]


@dataclass(frozen=True)
class Loaded:
    """What a checkpoint held besides the engine's state; the tensors are on this rank's device."""

    step: int
    extra: dict[str, Any]
    tensors: dict[str, Tensor]


class Checkpoints:
    """The checkpoints in a folder. All ranks make one together and call its methods together.

    Making one clears away what a killed run left half done.

    Args:
        folder: where they are; made if it is not there. Only rank 0 needs to reach it.
        keep: how many of the last ones to keep, besides the best.
        ranks: the processes of the run.
    """

    def __init__(self, folder: Path, keep: int, ranks: Ranks) -> None:
        if keep < 1:
            raise ValueError(f"Checkpoints: keep is {keep}; expected at least 1")
        self.folder, self.keep, self.ranks = folder, keep, ranks
        self._on_first(self._clear)

    def save(
        self,
        engine: Engine,
        step: int,
        extra: Mapping[str, Any],
        metric: float | None = None,
        tensors: Mapping[str, Tensor] | None = None,
    ) -> Path:
        """Writes a checkpoint, then removes what is neither among the last nor the best.

        Args:
            engine: between two steps.
            step: how many steps are done; it names the folder, and one of that name is replaced.
            extra: anything that JSON can hold.
            metric: the lower, the better; None, or a number that is not finite, never makes a checkpoint the best.
            tensors: more to keep, by name, such as averaged weights. Those of rank 0 are kept.

        Returns:
            The checkpoint's folder.

        Raises:
            DiskFull: on every rank; the earlier checkpoints are intact.
            CheckpointError: on every rank, for any other reason.
        """
        state = {STATE + name: tensor for name, tensor in collect(engine).items()}
        generators = self.ranks.gather(random_state(self.ranks.device))
        if self.ranks.first:
            state |= {NAMED + name: copied(tensor) for name, tensor in (tensors or {}).items()}
        return self._on_first(lambda: self._write(step, metric, state, {EXTRA: dict(extra), RANDOM: generators}))

    def latest(self) -> Path | None:
        """The checkpoint saved last, of those that are whole; a warning names the others."""
        return self._on_first(lambda: _first_whole(sorted(self._found(), key=_age)))

    def best(self) -> Path | None:
        """The checkpoint of the lowest metric, of those that are whole; the newest of equals."""
        return self._on_first(lambda: _first_whole(sorted(_measured(self._found()), key=_rating)))

    def load(self, engine: Engine, path: Path) -> Loaded:
        """Puts a checkpoint into the engine and into the random generators, on any number of ranks.

        Raises:
            CheckpointError: it is not whole. Nothing has changed.
            ValueError: it is of another model. Nothing has changed.
        """
        held: dict[str, Tensor] = {}

        def read() -> tuple[int, dict[str, Any], list[dict[str, Any]]]:
            manifest = _whole(path)
            held.update(load_file(path / TENSORS))
            return manifest.step, json.loads((path / EXTRA).read_text()), json.loads((path / RANDOM).read_text())

        step, extra, generators = self._on_first(read)
        restore(engine, _named(held, STATE))
        tensors = shared(_named(held, NAMED), self.ranks.device)
        restore_random(generators, self.ranks.rank, self.ranks.device)
        return Loaded(step, extra, tensors)

    def _on_first(self, work: Callable[[], T]) -> T:
        """Rank 0 works; every rank returns what it returned, or raises the same sentence."""
        result: T | None = None
        failure: CheckpointError | None = None
        if self.ranks.first:
            try:
                result = work()
            except CheckpointError as error:
                failure = error
            except Exception as error:
                failure = CheckpointError(f"{self.folder}: {error or type(error).__name__}")
                failure.__cause__ = error
        told: tuple[T, CheckpointError | None] = self.ranks.gather((result, failure))[0]
        if problem := failure or told[1]:
            raise problem
        return told[0]

    def _clear(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for hidden in [*self.folder.iterdir()]:
            if match := _HIDDEN.fullmatch(hidden.name):
                recover(self.folder / match[1])

    def _found(self) -> list[tuple[Path, Manifest]]:
        """Every checkpoint whose files are there in full length; a warning for each that is not."""
        found = []
        for path in sorted(self.folder.iterdir()):
            if _STEP.fullmatch(path.name):
                with _skipping():
                    found.append((path, _complete(path)))
        return found

    def _write(self, step: int, metric: float | None, tensors: dict[str, Tensor], contents: Mapping[str, Any]) -> Path:
        try:
            texts = {name: json.dumps(content) + "\n" for name, content in contents.items()}
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"extra cannot be written as JSON ({error}); give dictionaries, lists, strings and numbers"
            ) from None
        target = self.folder / f"step_{step:08d}"
        size = sum(tensor.nbytes + HEADER for tensor in tensors.values()) + sum(map(len, texts.values())) + 4096
        try:
            if shutil.disk_usage(self.folder).free < size:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            with whole_folder(target) as folder:
                for name, text in texts.items():
                    (folder / name).write_text(text)
                save_tensors(tensors, folder / TENSORS)
                files = tuple(_described(folder / name) for name in (TENSORS, EXTRA, RANDOM))
                number = 1 + max((manifest.number for _, manifest in self._found()), default=0)
                finite = metric if metric is not None and math.isfinite(metric) else None
                (folder / MANIFEST).write_text(to_json(Manifest(VERSION, step, number, finite, files)))
        except OSError as error:
            if error.errno not in FULL:
                raise
            raise DiskFull(
                f"{target} was not written: it takes {size} bytes, {shutil.disk_usage(self.folder).free} are free "
                f"({error.strerror}); free some space or lower checkpoint.keep. Earlier checkpoints are intact"
            ) from error
        self._prune()
        return target

    def _prune(self) -> None:
        found = self._found()
        kept = sorted(found, key=_age)[: self.keep] + sorted(_measured(found), key=_rating)[:1]
        for path in {path for path, _ in found} - {path for path, _ in kept}:
            away = hidden_beside(path, "pruned")
            os.rename(path, away)  # gone at once; whatever deletion then leaves is cleared at the next start
            shutil.rmtree(away, ignore_errors=True)


def _age(checkpoint: tuple[Path, Manifest]) -> int:
    return -checkpoint[1].number


def _rating(checkpoint: tuple[Path, Manifest]) -> tuple[float, int]:
    metric = checkpoint[1].metric
    assert metric is not None
    return metric, _age(checkpoint)


def _measured(found: Sequence[tuple[Path, Manifest]]) -> list[tuple[Path, Manifest]]:
    return [checkpoint for checkpoint in found if checkpoint[1].metric is not None]


def _named(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


@contextmanager
def _skipping() -> Iterator[None]:
    """A damaged checkpoint becomes a warning."""
    try:
        yield
    except CheckpointError as error:
        warnings.warn(f"skipped a checkpoint: {error}", RuntimeWarning, stacklevel=2)


def _first_whole(found: Sequence[tuple[Path, Manifest]]) -> Path | None:
    for path, _ in found:
        with _skipping():
            _whole(path)
            return path
    return None


def _complete(path: Path) -> Manifest:
    """The manifest of a checkpoint whose files are there in full length."""
    try:
        manifest = from_json(Manifest, (path / MANIFEST).read_text(), str(path / MANIFEST))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} has no readable manifest ({error}); remove it") from None
    if manifest.version != VERSION:
        raise CheckpointError(f"{path} has version {manifest.version}; this program reads version {VERSION}")
    if {file.name for file in manifest.files} != {TENSORS, EXTRA, RANDOM}:
        raise CheckpointError(f"{path / MANIFEST} does not name the files of a checkpoint; remove {path}")
    for file in manifest.files:
        size = (path / file.name).stat().st_size if (path / file.name).is_file() else 0
        if size != file.bytes:
            raise CheckpointError(f"{path / file.name} has {size} bytes of {file.bytes}; the checkpoint is cut off")
    return manifest


def _whole(path: Path) -> Manifest:
    """The manifest of a checkpoint whose files are, byte for byte, what was written."""
    manifest = _complete(path)
    for file in manifest.files:
        if _described(path / file.name) != file:
            raise CheckpointError(f"{path / file.name} differs from what was written (its checksum); it is damaged")
    return manifest


def _described(path: Path) -> File:
    with path.open("rb") as file:
        return File(path.name, path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())
