"""The perception study end to end, as small as it gets: two decoders and two encoders on a few images."""

import json
import signal
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from compgen_fast.cli import main
from compgen_fast.report import perception as report
from compgen_fast.studies.perception import plan as plans
from compgen_fast.studies.perception import queue, study, work
from compgen_fast.train.signals import Stopped

TINY = plans.Scale(
    seeds=1, decoders=("unconstrained", "additive"), steps=4, replay_steps=3, supervised_steps=4, longer=2, probes=80,
    tested=40, images=128,
)  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    out = tmp_path_factory.mktemp("study")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(plans.SCALES, "quick", TINY)
        patch.chdir(out)
        assert study.run("quick", "background", None, out / "run", workers=2) == 0
        yield out / "run"


def test_the_study_leaves_results_a_page_and_a_picture(finished):
    assert {"results.json", "pictures.npz", "report.html", "report.png"} <= {path.name for path in finished.iterdir()}
    results = report.read_results(finished)
    assert len(results["methods"]) == 2 * 4 + 2
    assert {row["decoder"] for row in results["decoders"]} == {"unconstrained", "additive"}


def test_accuracies_are_shares_and_errors_are_finite(finished):
    for row in report.read_results(finished)["methods"]:
        for scores in row["accuracy"].values():
            assert all(0 <= score <= 1 for score in scores.values())
        if row["decoder"] is not None:
            assert all(np.isfinite(error) and error > 0 for error in row["mse"].values())


def test_search_never_leaves_a_larger_error_than_its_start(finished):
    error = {(row["decoder"], row["inference"]): row["mse"] for row in report.read_results(finished)["methods"]}
    for decoder in TINY.decoders:
        for start, after in (("encoder", "search"), ("replay", "replay+search")):
            for part in ("id", "ood"):
                assert error[decoder, after][part] <= error[decoder, start][part] + 1e-6


def test_the_additive_decoder_does_not_interact(finished):
    shares = {row["decoder"]: row["block_hessian_share"] for row in report.read_results(finished)["decoders"]}
    assert shares["additive"] == 0 < shares["unconstrained"]


def test_a_finished_study_is_not_run_again(finished, monkeypatch):
    def never(*_: object) -> None:
        raise AssertionError("a job was run again")

    monkeypatch.setattr(queue, "_process", never)
    monkeypatch.chdir(finished.parent)
    before, told = (finished / "results.json").stat().st_mtime_ns, report.read_results(finished)
    assert study.run("quick", "background", None, finished) == 0
    assert (finished / "results.json").stat().st_mtime_ns > before
    assert report.read_results(finished)["seconds"] == told["seconds"] > 1  # what it took, not what gathering took


def test_a_folder_of_another_study_is_refused(finished, monkeypatch):
    monkeypatch.chdir(finished.parent)
    jobs = [replace(job, tested=41) for job in plans.plan("quick", "background", 1, finished)]
    with pytest.raises(ValueError, match="other settings"):
        queue.run(jobs, finished, 1, Console(quiet=True))


def test_a_job_that_fails_names_its_log(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(queue, "_pack", lambda *_: None)
    job = next(job for job in plans.plan("quick", "background", 1, tmp_path / "run") if job.method == "supervised")
    job = replace(job, train=replace(job.train, data=replace(job.train.data, world="nowhere")))
    with pytest.raises(queue.JobFailed, match=r"(?s)supervised-0 failed while training.*nowhere.*log\.txt"):
        queue.run([job], tmp_path / "run", 1, Console(quiet=True))


def test_a_dry_run_at_the_papers_sizes_writes_what_deepspeed_would_get(tmp_path, capsys):
    assert study.run("gpu", "background", 1, tmp_path, dry_run=True) == 0
    assert "attention-0" in capsys.readouterr().out
    settings = json.loads((tmp_path / "plan" / "attention-0" / "deepspeed.json").read_text())
    assert settings["zero_optimization"]["stage"] == 0 and settings["train_batch_size"] == 64


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--seeds", "0"], "--seeds is 0"),
        (["--workers", "0"], "--workers is 0"),
        (["--scale", "gpu"], "no CUDA"),
        (["--vit", "nowhere.safetensors"], "nowhere.safetensors"),
    ],
)
def test_what_cannot_be_studied_is_one_sentence(options, sentence, capsys):
    assert main(["study", "perception", *options]) == 2
    assert sentence in capsys.readouterr().err


def test_a_run_that_was_stopped_is_not_taken_for_a_trained_one(tmp_path, monkeypatch):
    (job, *_) = plans.plan("quick", "background", 1, tmp_path)
    folder = queue._claimed(job, tmp_path)
    trained = []

    def stopped(config, ranks, told):
        trained.append(config)
        (config.out / "weights").mkdir(parents=True, exist_ok=True)
        if len(trained) == 1:
            raise Stopped(signal.SIGTERM)

    monkeypatch.setattr(work.training, "prepared", lambda device: nullcontext())
    monkeypatch.setattr(work.training, "run", stopped)
    with pytest.raises(SystemExit):
        work.train(folder)
    work.train(folder)
    work.train(folder)
    runs = [config for config in (job.train, job.replay) if config]
    assert trained == [job.train, *runs]
