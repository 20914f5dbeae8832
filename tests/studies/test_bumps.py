"""The bump study: its parts on the smallest of worlds, and the whole as small as it gets."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from compgen_fast.cli import main
from compgen_fast.report import bumps as report
from compgen_fast.studies import queue
from compgen_fast.studies.bumps import plan as plans
from compgen_fast.studies.bumps import study
from compgen_fast.studies.bumps.claims import claims, exponents
from compgen_fast.studies.bumps.decoders import cnn, mlp, rendering
from compgen_fast.studies.bumps.fitting import Fit, decoded, draws, errors, optimise, squared
from compgen_fast.studies.bumps.plan_a import Tokens, penalised, target_images
from compgen_fast.studies.bumps.plan_b import Threshold, ladder
from compgen_fast.studies.bumps.sheet import open_sheet

TINY = plans.Scale(1, ("bump", "ramp"), (3,), (2, 4), (0, 10), (24, 28, 32), shortened=1000)


# ------------------------------------------------------------------------------------------------ the sheet


def test_a_sheet_s_images_are_the_products_of_its_stripes():
    sheet = open_sheet(16, "bump")
    vertical, horizontal = sheet.images[sheet.stripes].split(16)
    row = 16 * 5 + 11  # y = 5, x = 11
    torch.testing.assert_close(sheet.images[row], vertical[11] * horizontal[5])
    assert sheet.images[row].argmax() == row
    assert (sheet.codes[sheet.white] == 0).all() and (sheet.images[sheet.white] == 1).all()


@pytest.mark.parametrize("encoding", ["bump", "ramp", "fourier"])
def test_slopes_are_what_codes_change_by(encoding):
    sheet = open_sheet(16, encoding)
    codes = sheet.codes[: sheet.positions].double().unflatten(0, (16, 16))
    for dim, slope in zip((1, 0), sheet.slopes, strict=True):
        inner = torch.gradient(codes, dim=dim)[0][2:-2, 2:-2]
        found = slope.double().unflatten(0, (16, 16))[2:-2, 2:-2]
        assert (inner - found).norm() < 0.35 * found.norm()  # differences of a step of one pixel, σ = 1
        assert (inner * found).sum() > 0.95 * inner.norm() * found.norm()


def test_the_core_is_further_from_all_known_positions():
    sheet = open_sheet(28, "ramp")
    core = sheet.core(2).view(28, 28)
    assert core[8:21, 8:21].all() and int(core.sum()) == 13 * 13
    corner = open_sheet(32, "ramp", "corner").core(2).view(32, 32)
    assert corner[14:, 14:].all() and int(corner.sum()) == 18 * 18  # the image's border is no known position


# ------------------------------------------------------------------------------------------------ training


@pytest.mark.parametrize(
    "build",
    [lambda seeds: mlp(seeds, 32, 16, 3, 24), lambda seeds: cnn(seeds, 32, 16, 4, 4), lambda s: rendering(s, 32, 16)],
)
def test_a_model_learns_the_same_alone_and_in_company(build):
    sheet, fit = open_sheet(16, "bump"), Fit(12, batch=8)
    trained = {}
    for seeds in ([5], [4, 5, 6]):
        decoder = build(seeds)
        rows = draws([[sheet.known]] * len(seeds), seeds, fit)
        optimise(decoder, squared(decoder, sheet.codes, sheet.images), rows, fit)
        trained[len(seeds)] = decoded(decoder, sheet.codes, len(seeds))[seeds.index(5)]
    torch.testing.assert_close(trained[1], trained[3], rtol=1e-3, atol=1e-4)


def test_batches_are_shared_among_groups():
    groups = [[torch.arange(3), torch.arange(100, 140)]]
    rows = draws(groups, [0], Fit(50, batch=8))[0]
    assert (rows[:, :4] < 3).all() and (rows[:, 4:] >= 100).all()
    with pytest.raises(ValueError, match="not divisible among 2 groups"):
        draws(groups, [0], Fit(5, batch=7))


def test_a_decoder_that_knows_the_product_has_no_error():
    sheet = open_sheet(16, "bump")
    product = lambda codes: (lambda x, y: y[..., :, None] * x[..., None, :])(*codes.split(16, -1))  # noqa: E731
    assert errors(product, sheet, 2).abs().max() < 1e-12


def test_cnns_ask_for_sides_they_can_double_to():
    with pytest.raises(ValueError, match="multiple of 4"):
        cnn([0], 36, 18, 4)


# ------------------------------------------------------------------------------------------------ plans


def test_tokens_of_one_term_have_no_entropy_and_flat_ones_no_variance():
    tokens = Tokens([0], 8)
    with torch.no_grad():
        tokens.weights.zero_()[..., 1] = 2.0
        tokens.left.fill_(0.3)
        tokens.right.fill_(-1.0)
    assert tokens.entropy().abs().max() < 1e-6 and tokens.variance().abs().max() < 1e-6
    torch.testing.assert_close(tokens.matrices(), torch.full((1, 2, 8, 8, 8), -0.6))


def test_targets_inside_f_int_are_sums_over_factors_and_the_bump_is_not():
    sheet = open_sheet(16, "one-hot")
    for target, additive in (("stripes", True), ("log", True), ("bump", False)):
        images = target_images(sheet, target).unflatten(0, (16, 16))  # [y, x]
        mixed = images[3, 4] - images[3, 9] - images[8, 4] + images[8, 9]
        assert (mixed.abs().max() < 1e-5) == additive


def test_an_additive_decoder_pays_no_penalty():
    sheet, images = open_sheet(16, "one-hot"), open_sheet(16, "one-hot").images
    rows = draws([[sheet.known]] * 2, [0, 1], Fit(1, batch=8))[:, 0]
    linear = mlp([0, 1], 32, 16, depth=1, width=32)
    bent = mlp([0, 1], 32, 16, depth=2, width=8, activation=torch.nn.functional.gelu)
    for decoder, pays in ((linear, False), (bent, True)):
        without, paid = squared(decoder, sheet.codes, images)(rows, 0), penalised(decoder, sheet, images, 5.0)(rows, 0)
        assert bool((paid > without).all()) == pays


def test_the_ladder_climbs_by_half_octaves_to_the_most_there_is():
    assert ladder(50) == [1, 2, 3, 4, 6, 8, 11, 16, 23, 32, 45, 50]


def test_the_threshold_is_found_by_bisection(monkeypatch):
    needed = {0: 23, 1: 1, 2: 10**9}

    def tried(self, sheet, counts):
        return {seed: 0.0 if count >= needed[seed] else 1.0 for seed, count in counts.items()}

    monkeypatch.setattr(Threshold, "_tried", tried)
    found, _ = Threshold(24, "stripes", (0, 1, 2), Fit(1)).run()
    assert found["needed"] == [23, 1, None]
    assert len(found["tried"]) <= 3 * 5


def test_exponents_of_exact_laws_are_found_with_tight_intervals():
    sizes = (24, 28, 32, 40, 48)
    laws = [{"way": "stripes", "size": N, "needed": [3 * N, None]} for N in sizes]
    laws += [{"way": "anywhere", "size": N, "needed": [N * N]} for N in sizes]
    fits = exponents(laws)
    assert fits["stripes"]["exponent"] == pytest.approx(1, abs=1e-6)
    assert fits["anywhere"]["exponent"] == pytest.approx(2, abs=1e-6)
    assert fits["anywhere"]["high"] - fits["anywhere"]["low"] < 1e-3
    assert exponents(laws[:2]) == {}


# ------------------------------------------------------------------------------------------------ the whole


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    out = tmp_path_factory.mktemp("bumps") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(plans.SCALES, "quick", TINY)
        assert study.run("quick", "all", out, workers=2) == 0
        yield out


def test_the_study_leaves_results_a_page_and_a_picture(finished):
    assert {"results.json", "pictures.npz", "report.html", "report.png"} <= {path.name for path in finished.iterdir()}
    results = report.read_results(finished)
    assert len(results["failure"]) == 2 * 3 and len(results["penalty"]) == 3 and len(results["thresholds"]) == 3 * 4
    assert {each["regulariser"] for each in results["tokens"]["outcomes"]} == {"none", "entropy", "variance", "both"}
    assert results["stacking"]["speedup"] > 0
    assert len(results["claims"]) == len(claims(results))


def test_untrained_decoders_are_not_claimed_to_compose(finished):
    for row in report.read_results(finished)["failure"]:
        assert np.isfinite(row["ood"]).all() and min(row["ood"]) > 0.5 * row["blank"]["ood"]
        assert all(0.5 - 1e-6 <= value <= 1 + 1e-6 for layer in row["factorization"] for value in layer)
        assert row["factorization"][0] == pytest.approx([1.0])  # codes that have x and y apart


def test_a_finished_study_is_not_run_again(finished, monkeypatch):
    monkeypatch.setitem(plans.SCALES, "quick", TINY)
    monkeypatch.setattr(queue, "ProcessPoolExecutor", lambda *_, **__: pytest.fail("a job was run again"))
    told = report.read_results(finished)
    assert study.run("quick", "geometry", finished) == 0
    again = report.read_results(finished)
    assert again["job_seconds"] == told["job_seconds"] and len(again["thresholds"]) == 12  # others are still there


def test_a_folder_of_another_study_is_refused(finished):
    jobs = plans.plan("cpu", "plan-a")
    with pytest.raises(ValueError, match=r"other settings.*--out"):
        queue.run(jobs, study._work, finished, 1, Console(quiet=True))


def test_no_workers_are_refused_in_one_sentence(capsys):
    assert main(["study", "bumps", "--workers", "0"]) == 2
    assert "--workers is 0" in capsys.readouterr().err


def test_the_record_checked_in_is_what_the_page_reads():
    results = json.loads((Path(__file__).parents[2] / "results" / "bumps" / "results.json").read_text())
    assert results["scale"] == "cpu" and len(results["seeds"]) >= 3
    assert claims(results) == results["claims"]
