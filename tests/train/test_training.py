"""`cgf train` as a user runs it: whole runs, in processes of their own, some of them killed on the way."""

import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import webdataset
from PIL import Image

from compgen_fast.cli import main
from compgen_fast.models.io import load_model
from compgen_fast.train.checkpoints import Checkpoints
from compgen_fast.train.folder import read_config
from compgen_fast.train.ranks import Ranks
from tests.train.runs import finish, lines, losses, settings_of, start, train, wait_until


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 12 steps in one process that nothing disturbs; the others are compared with it."""
    out = tmp_path_factory.mktemp("runs") / "straight"
    train(out)
    return out


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What `cgf train` says to settings that it refuses; in this process, since nothing is to be made."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # so that it is put back, whatever the command leaves there
        monkeypatch.delenv(name)

    def run(out: Path, *settings: str) -> str:
        try:
            code: object = main(["train", "slot_vae_cpu", *settings_of(out, *settings)])
        except SystemExit as exit:
            code = exit.code
        said = capsys.readouterr()
        assert code == 2, said.err
        return " ".join((said.out + said.err).split())

    return run


def test_a_run_learns_and_leaves_weights_that_decode(straight: Path) -> None:
    found = losses(straight)
    assert len(found) == 12
    assert found[-1] < 0.9 * found[0]
    assert {"reconstruction", "kl", "penalty", "lr", "samples_per_second", "utilisation"} <= lines(straight)[5].keys()
    assert "validation_loss" in lines(straight)[11]
    model = load_model(straight / "weights")
    images = model.reconstruct(torch.zeros(2, 16, 16, 3, dtype=torch.uint8))
    assert images.shape == (2, 16, 16, 3)


def test_a_run_that_is_killed_goes_on_bit_for_bit(straight: Path) -> None:
    out = straight.parent / "killed"
    process = start(out, "--checkpoint.every", "3", "--steps", "100000")
    wait_until(lambda: len(lines(out)) > 5, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    printed = train(out, "--checkpoint.every", "3", "--resume")
    assert "going on after step" in printed
    assert losses(out) == losses(straight)
    assert (
        printed.count("slots are not bound") == 1
    )  # after 12 steps no slot owns anything; said once, not at each save
    assert "slots are not bound" in (out / "report.html").read_text()


def test_shards_of_ones_own_are_enough(straight: Path) -> None:
    out, (shards,) = straight.parent / "own", (straight.parent / "data").glob("*train64*")
    train(out, "--data.shards", str(shards), "--steps", "6")
    kept = read_config(out).data
    assert (kept.shards, kept.world, kept.split, kept.validation) == (str(shards), None, None, None)
    assert losses(out) == losses(straight)[:6]
    assert {"overlap", "slot_0_owns", "slot_1_owns"} <= lines(out)[5].keys() and "validation_loss" not in lines(out)[5]


DIES_AFTER_ITS_CHECKPOINT = """
import os, signal, sys
from compgen_fast.cli import main
from compgen_fast.train.checkpoints import Checkpoints
save = Checkpoints.save
Checkpoints.save = lambda *given: (save(*given), os.kill(os.getpid(), signal.SIGKILL))
main(sys.argv[1:])
"""


def test_a_run_that_dies_right_after_its_checkpoint_has_the_line_of_that_step(straight: Path) -> None:
    out = straight.parent / "died"
    settings = settings_of(out, "--checkpoint.every", "3")
    subprocess.run([sys.executable, "-c", DIES_AFTER_ITS_CHECKPOINT, "train", "slot_vae_cpu", *settings])
    assert len(lines(out)) == 3
    train(out, "--resume")
    assert losses(out) == losses(straight)


def test_a_run_goes_on_with_more_ranks_and_another_zero_stage(straight: Path) -> None:
    out = straight.parent / "grown"
    train(out, "--steps", "5")
    printed = train(out, "--resume", "--nproc", "2", "--zero-stage", "2")
    assert printed.count("goes on after step 5 with other settings") == printed.count("zero_stage: 0 → 2") == 1
    assert "zero_stage: 0 → 2" in (out / "report.html").read_text()
    assert losses(out)[:5] == losses(straight)[:5]
    assert losses(out) == pytest.approx(losses(straight), rel=1e-4)


@pytest.mark.parametrize("stage", ["0", "2"])
def test_two_ranks_with_accumulation_and_a_hessian_penalty_do_what_one_process_does(straight: Path, stage: str) -> None:
    hessian = ("--model.loss.penalty", "hessian", "--model.loss.alpha", "1e-3", "--steps", "4")
    one = straight.parent / "one"
    if not one.exists():
        train(one, *hessian)
    out = straight.parent / f"two_{stage}"
    printed = train(out, *hessian, "--nproc", "2", "--accumulation", "2", "--zero-stage", stage)
    assert "audit" in printed
    assert losses(out) == pytest.approx(losses(one), rel=1e-4)
    assert lines(out)[3]["penalty"] == pytest.approx(lines(one)[3]["penalty"], rel=1e-3)


@pytest.mark.parametrize(
    ("number", "ranks", "code"), [(signal.SIGTERM, 1, 143), (signal.SIGINT, 2, 130), (signal.SIGUSR1, 1, 138)]
)
def test_a_signal_saves_and_is_no_success(straight: Path, number: signal.Signals, ranks: int, code: int) -> None:
    out = straight.parent / number.name
    process = start(out, "--steps", "100000", "--nproc", f"{ranks}")
    wait_until(lambda: len(lines(out)) > 3, process)
    process.send_signal(number)
    printed = finish(process, code)
    assert f"stopped by {number.name} after step {len(lines(out))}" in printed
    assert "Traceback" not in printed and "cgf: rank" not in printed
    newest = Checkpoints(out / "checkpoints", 2, Ranks.alone()).latest()
    assert newest is not None and newest.name == f"step_{len(lines(out)):08d}"
    assert (out / "weights").is_dir() and (out / "report.html").is_file()


SIGNALLED_IN_A_STEP = """
import os, signal, sys
from compgen_fast.cli import main
from compgen_fast.train.loop import Trainer
step_once = Trainer.step_once
def step(trainer):
    if trainer.step == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGTERM)
    return step_once(trainer)
Trainer.step_once = step
sys.exit(main(sys.argv[2:]))
"""


def test_a_signal_in_the_last_step_finds_the_run_complete(straight: Path) -> None:
    settings = ["train", "slot_vae_cpu", *settings_of(straight.parent / "last", "--steps", "3")]
    done = subprocess.run([sys.executable, "-c", SIGNALLED_IN_A_STEP, "2", *settings], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "stopped" not in done.stderr


def test_a_rank_that_is_killed_is_named_and_the_checkpoint_stays(straight: Path) -> None:
    out = straight.parent / "lost"
    process = start(out, "--steps", "100000", "--checkpoint.every", "4", "--nproc", "2", "--guard.stall", "5")
    wait_until(lambda: len(lines(out)) > 5, process)
    second = next(pid for pid in _children(process.pid) if b"RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes())
    os.kill(second, signal.SIGKILL)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "rank 1" in printed
    assert Checkpoints(out / "checkpoints", 2, Ranks.alone()).latest() is not None
    assert not _children(process.pid)


def _children(parent: int) -> list[int]:
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(status.read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(status.parent.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


@pytest.mark.parametrize("stage", ["0", "1"])
def test_a_loss_that_is_not_finite_ends_the_run_and_names_the_layer(straight: Path, stage: str) -> None:
    out = straight.parent / f"exploded_{stage}"
    settings = ("--optimiser.lr", "1e30", "--optimiser.clip", "0", "--zero-stage", stage)
    printed = train(out, *settings, code=1)
    assert "The step was not taken" in printed
    assert "first seen in" in printed
    assert "Traceback" not in printed


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (("--batch-size", "9", "--nproc", "2"), "batch_size is 9, split over 2 ranks"),
        (("--zero-stage", "3"), "zero_stage is 3; expected 0, 1 or 2"),
        (("--device", "cuda"), "torch sees no CUDA"),
        (("--model.loss.penalty", "attention", "--model.decoder.kind", "additive"), "penalty 'attention'"),
        (("--data.shards", "nowhere", "--data.split", "background"), "--data.split has no effect with"),
        (("--data.world", "atlantis"), "there is no world 'atlantis'"),
        (("--nproc", "0"), "nproc is 0; expected at least 1"),
        (("--optimiser.betas", "2", "0.9"), "optimiser.betas is (2.0, 0.9)"),
        (("--start", "nowhere"), "start: nowhere does not hold config.json"),
        (("--data.cache", str(Path(__file__) / "data")), "test_training.py is a file; choose a folder"),
        (("--steps", "0"), "steps is 0; expected at least 1"),
        (("--data.budget", "1.5"), "data.budget is 1.5; expected a share of samples, from 0 to below 1"),
        (("--bogus", "1"), "--bogus"),
    ],
)
def test_impossible_settings_end_with_a_sentence(
    tmp_path: Path, refused: Callable[..., str], settings: tuple[str, ...], sentence: str
) -> None:
    if settings[0] == "--device" and torch.cuda.is_available():
        pytest.skip("there is one")
    assert sentence in refused(tmp_path / "run", *settings)
    assert not (tmp_path / "run").exists() and not (tmp_path / "data").exists()


def test_a_folder_with_a_run_is_not_overwritten(straight: Path, refused: Callable[..., str]) -> None:
    before = (straight / "metrics.jsonl").read_bytes()
    assert "already holds a run" in refused(straight)
    assert "model.slots is 3, but the run" in refused(straight, "--resume", "--model.slots", "3")
    assert (straight / "metrics.jsonl").read_bytes() == before


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """Eight photographs of several sizes in tars that webdataset wrote; one breaks off."""
    folder = tmp_path / "foreign"
    folder.mkdir()
    generator = np.random.default_rng(0)
    with webdataset.ShardWriter(str(folder / "%03d.tar"), maxcount=3, verbose=0) as writer:
        for number in range(8):
            file = io.BytesIO()
            Image.fromarray(generator.integers(0, 256, (20 + number, 24, 3), np.uint8)).save(file, "JPEG")
            data = file.getvalue()
            writer.write({"__key__": f"{number:03d}", "jpg": data[:-100] if number == 5 else data, "cls": number % 2})
    return folder


def test_a_run_trains_on_tars_of_others_and_passes_over_bad_samples_within_its_budget(
    foreign: Path, refused: Callable[..., str]
) -> None:
    runs, given = foreign.parent, ("--data.shards", str(foreign), "--steps", "2")
    assert main(["index", str(foreign), "--resolution", "16"]) == 0
    train(runs / "generous", *given, "--data.budget", "0.125")
    assert len(losses(runs / "generous")) == 2
    said = refused(runs / "strict", *given)
    assert "(--data.budget in training): 001.tar, key 005: not a readable image" in said
    assert main(["index", str(foreign), "--resolution", "32"]) == 0
    assert "32×32, the model takes 16×16; index them with --resolution 16" in refused(runs / "large", *given)
    (foreign / "manifest.json").unlink()
    assert "or tars of yours that `cgf index` has been through" in refused(runs / "bare", *given)
