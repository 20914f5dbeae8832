"""Checkpoints on disk: whole or not there, found again, pruned, and refused when they are damaged or do not fit."""

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from compgen_fast import files
from compgen_fast.train import checkpoints
from compgen_fast.train.checkpoints import EXTRA, MANIFEST, RANDOM, TENSORS, CheckpointError, Checkpoints, DiskFull
from compgen_fast.train.ranks import Ranks
from compgen_fast.train.state import collect
from tests.train.engines import ROOT, StandIn, draw, same_bits


def opened(folder: Path, keep: int = 2) -> Checkpoints:
    return Checkpoints(folder, keep, Ranks.alone())


def trained(steps: int = 3) -> StandIn:
    engine = StandIn.fresh()
    engine.train(steps)
    return engine


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_comes_back_as_it_was(tmp_path: Path) -> None:
    engine = trained()
    saved = opened(tmp_path)
    path = saved.save(
        engine, 3, {"stream": {"position": 24}, "note": "é"}, 0.5, {"average": torch.arange(6.0).view(2, 3).t()}
    )
    drawn = draw()
    resumed = StandIn.fresh(seed=1)
    loaded = opened(tmp_path).load(resumed, path)
    assert draw() == drawn
    assert path.name == "step_00000003" and names(path) == [EXTRA, MANIFEST, RANDOM, TENSORS]
    assert same_bits(collect(resumed), collect(engine))
    assert (loaded.step, loaded.extra) == (3, {"stream": {"position": 24}, "note": "é"})
    assert torch.equal(loaded.tensors["average"], torch.arange(6.0).view(2, 3).t())
    assert (resumed.global_steps, resumed.micro_steps, resumed.global_samples) == (3, 3, 24)


def test_an_empty_folder_has_no_checkpoint(tmp_path: Path) -> None:
    saved = opened(tmp_path / "new" / "checkpoints")
    assert saved.latest() is None and saved.best() is None


def test_files_have_the_rights_of_any_new_file(tmp_path: Path) -> None:
    path = opened(tmp_path).save(trained(), 3, {})
    assert len({file.stat().st_mode for file in path.iterdir()}) == 1


def test_the_last_ones_and_the_best_are_kept(tmp_path: Path) -> None:
    saved, engine = opened(tmp_path, keep=2), trained()
    for step, metric in ((1, 0.9), (2, 0.3), (3, 0.5), (4, None), (5, float("nan"))):
        saved.save(engine, step, {}, metric)
    assert names(tmp_path) == ["step_00000002", "step_00000004", "step_00000005"]
    assert saved.best() == tmp_path / "step_00000002" and saved.latest() == tmp_path / "step_00000005"
    saved.save(engine, 6, {}, 0.1)
    assert names(tmp_path) == ["step_00000005", "step_00000006"]
    assert saved.best() == tmp_path / "step_00000006"


def test_without_a_metric_none_is_the_best(tmp_path: Path) -> None:
    saved = opened(tmp_path, keep=1)
    saved.save(trained(), 1, {}, float("nan"))
    saved.save(trained(), 2, {})
    assert saved.best() is None and names(tmp_path) == ["step_00000002"]


def test_the_newest_of_equally_good_ones_is_the_best(tmp_path: Path) -> None:
    saved = opened(tmp_path)
    for step in (1, 2):
        saved.save(trained(), step, {}, 0.5)
    assert saved.best() == tmp_path / "step_00000002"


def test_a_run_that_went_back_goes_on_from_what_it_saved_last(tmp_path: Path) -> None:
    saved = opened(tmp_path)
    for step in (10, 20, 12):
        saved.save(trained(), step, {})
    assert saved.latest() == tmp_path / "step_00000012" and names(tmp_path) == ["step_00000012", "step_00000020"]


def test_the_same_step_saved_again_replaces_the_first(tmp_path: Path) -> None:
    saved = opened(tmp_path, keep=1)
    for note in ("first", "second"):
        path = saved.save(trained(), 7, {"note": note})
    assert saved.load(trained(), path).extra == {"note": "second"} and names(tmp_path) == ["step_00000007"]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize(
    ("file", "damage", "reason"),
    [
        (TENSORS, flip, "checksum"),
        (EXTRA, flip, "checksum"),
        (RANDOM, flip, "checksum"),
        (TENSORS, cut, "cut off"),
        (RANDOM, Path.unlink, "cut off"),
        (MANIFEST, Path.unlink, "no readable manifest"),
        (MANIFEST, cut, None),
    ],
)
def test_a_damaged_checkpoint_is_named_and_never_picked(
    tmp_path: Path, file: str, damage: Callable[[Path], None], reason: str | None
) -> None:
    saved = opened(tmp_path)
    saved.save(trained(), 1, {"note": "one"}, 0.5)
    path = saved.save(trained(), 2, {"note": "two"}, 0.1)
    damage(path / file)
    if reason is None:  # only the newline at the end is gone: nothing is lost
        assert saved.latest() == path
        return
    for pick in (saved.latest, saved.best):
        with pytest.warns(RuntimeWarning, match=f"step_00000002.*{reason}"):
            assert pick() == tmp_path / "step_00000001"
    engine = trained()
    before = collect(engine)
    with pytest.raises(CheckpointError, match=reason):
        saved.load(engine, path)
    assert same_bits(collect(engine), before)


@pytest.mark.parametrize(
    ("text", "reason"),
    [("{", "is not JSON"), ('{"version": 1}', "lacks 'step'"), ("[]", "expected the fields of Manifest")],
)
def test_a_manifest_that_is_not_one_is_not_believed(tmp_path: Path, text: str, reason: str) -> None:
    saved = opened(tmp_path)
    (saved.save(trained(), 1, {}) / MANIFEST).write_text(text)
    with pytest.warns(RuntimeWarning, match=reason):
        assert saved.latest() is None


def test_a_manifest_cannot_lead_elsewhere_or_leave_a_file_out(tmp_path: Path) -> None:
    saved = opened(tmp_path)
    manifest = saved.save(trained(), 1, {}) / MANIFEST
    found = json.loads(manifest.read_text())
    for listed in ([], [*found["files"][:2], {**found["files"][2], "name": "../elsewhere"}]):
        manifest.write_text(json.dumps({**found, "files": listed}))
        with pytest.warns(RuntimeWarning, match="does not name the files"):
            assert saved.latest() is None


def test_damaged_checkpoints_do_not_push_whole_ones_out(tmp_path: Path) -> None:
    saved = opened(tmp_path, keep=2)
    for step in (1, 2):
        saved.save(trained(), step, {})
    cut(tmp_path / "step_00000002" / TENSORS)
    with pytest.warns(RuntimeWarning, match="step_00000002"):
        saved.save(trained(), 3, {})
    assert names(tmp_path) == ["step_00000001", "step_00000002", "step_00000003"]


# Full disks


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def check_intact(saved: Checkpoints, before: Path) -> None:
    assert names(saved.folder) == [before.name] and saved.latest() == before
    saved.save(trained(), 9, {})  # and the next one works, once there is room


def test_too_little_space_is_noticed_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, engine = opened(tmp_path), trained()
    before = saved.save(engine, 1, {})
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=5000))
        patch.setattr(checkpoints, "whole_folder", lambda _: pytest.fail("began to write"))
        with pytest.raises(DiskFull, match=r"step_00000002 was not written: it takes \d+ bytes, 5000 are free"):
            saved.save(engine, 2, {})
    check_intact(saved, before)


def test_a_file_that_does_not_fit_leaves_no_trace(tmp_path: Path) -> None:
    """The system's own limit on a file's size, which safetensors meets in the middle of its file."""
    saved, engine = opened(tmp_path), trained()
    before = saved.save(engine, 1, {})
    generators = (before / RANDOM).stat().st_size
    with file_size_limit(generators + 100), pytest.raises(DiskFull, match=r"(?i)file too large.*earlier checkpoints"):
        saved.save(engine, 2, {}, tensors={"large": torch.zeros(generators)})
    check_intact(saved, before)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_is_full_only_when_flushed_leaves_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    saved, engine = opened(tmp_path), trained()
    before = saved.save(engine, 1, {})

    def full(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(DiskFull, match=os.strerror(code)):
            saved.save(engine, 2, {})
    check_intact(saved, before)


def test_another_error_of_the_disk_is_told_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved, engine = opened(tmp_path), trained()
    before = saved.save(engine, 1, {})

    def broken(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", broken)
        with pytest.raises(CheckpointError, match="Input/output error") as caught:
            saved.save(engine, 1, {})
    assert not isinstance(caught.value, DiskFull) and isinstance(caught.value.__cause__, OSError)
    check_intact(saved, before)


def test_extra_that_json_cannot_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="extra cannot be written as JSON"):
        opened(tmp_path).save(trained(), 1, {"tensor": torch.zeros(2)})
    assert names(tmp_path) == []


def test_keeping_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep is 0; expected at least 1"):
        opened(tmp_path, keep=0)


# Killed processes


MOMENTS = {
    "the tensors are written": (checkpoints, "_described", TENSORS),
    "all files are written": (files, "_flush", MANIFEST),
    "the old one of this step has stepped aside": (os, "replace", "step_00000002"),
    "an old one is about to be deleted": (shutil, "rmtree", "step_00000001.pruned"),
}
"""When to die: before which function is called with a path that ends like this."""


def die_before(module: ModuleType, function: str, ending: str) -> None:
    """From now on that call kills this process, as a scheduler does: nothing is cleaned up."""
    real = getattr(module, function)

    def dying(*arguments: Any, **options: Any) -> Any:
        if str(arguments[-1]).endswith(ending):
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **options)

    setattr(module, function, dying)


def die_while_saving(folder: Path) -> None:
    """One child for each moment: it saves step 1, begins to save step 2, and dies."""
    for number, moment in enumerate(MOMENTS.values()):
        if (child := os.fork()) == 0:
            saved, engine = opened(folder / str(number), keep=1), trained()
            saved.save(engine, 1, {"note": "before"})
            if moment[0] is os:
                saved.save(engine, 2, {"note": "before"})
            die_before(*moment)
            saved.save(engine, 2, {"note": "after"})
            os._exit(7)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL, f"{moment} never came"


@pytest.fixture(scope="module")
def dead(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dead")
    command = [sys.executable, "-m", "tests.train.test_checkpoints", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_run_killed_while_saving_goes_on_from_a_whole_checkpoint(dead: Path, moment: str) -> None:
    number = list(MOMENTS).index(moment)
    left = names(dead / str(number))
    assert any(name.startswith(".") for name in left), "killed too early or too late to leave anything behind"
    saved = opened(dead / str(number), keep=1)
    latest = saved.latest()
    assert latest is not None and names(saved.folder) == [latest.name]
    resumed = StandIn.fresh(seed=1)
    note = saved.load(resumed, latest).extra["note"]
    assert same_bits(collect(resumed), collect(trained()))
    assert (latest.name, note) == {
        0: ("step_00000001", "before"),
        1: ("step_00000001", "before"),
        2: ("step_00000002", "before"),
        3: ("step_00000002", "after"),
    }[number]


if __name__ == "__main__":
    die_while_saving(Path(sys.argv[1]))
