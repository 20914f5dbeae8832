"""The page of a bump study, from made-up numbers and pictures, with all that a study can hold or leave out."""

import html
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from numpy.typing import NDArray
from rich.console import Console

from compgen_fast.report import bumps, bumps_plots
from compgen_fast.report.bumps import read_results, tables, write
from compgen_fast.report.bumps_numbers import (
    bumps_table,
    exponents_table,
    failure_table,
    finding,
    penalty_table,
    tokens_table,
)
from compgen_fast.report.page import NOTHING, PAGE, PICTURE, Grid
from compgen_fast.studies.bumps import plan_b
from compgen_fast.worlds.bumps import Bumps

DEPTHS = {"mlp": (3, 5), "cnn": (2, 4, 6)}
ENCODINGS = ("bump", "ramp")
BLANK = 4e-3
SHOTS = (0, 10, 100)
SECTIONS = {
    "failure": ("Naive decoders at held-out positions", "What happens in their layers"),
    "few_shot": ("A few bumps inside the square",),
    "tokens": ("Plan A: tokens that render themselves",),
    "penalty": ("Plan A, by penalty: its controls",),
    "thresholds": ("Plan B: data that shows each factor alone",),
    "stacking": ("Many models as one",),
}
LEFT_OUT: dict[str, Any] = {"tokens": None, "stacking": None, "exponents": {}}


def results(
    seeds: Sequence[int] = (0, 1, 2), depths: dict[str, Any] = DEPTHS, encodings: Sequence[str] = ENCODINGS
) -> dict[str, Any]:
    """The contents of results.json. OOD errors are 1.2 blank images and more; Plan B needs N and N² bumps."""
    return {
        "study": "bumps",
        "version": 1,
        "command": "cgf study bumps --scale cpu --part all",
        "scale": "cpu",
        "part": "all",
        "seeds": list(seeds),
        "versions": {"compgen_fast": "0.8.0", "torch": "2.13.0"},
        "written": "2026-11-18T10:00:00+00:00",
        "job_seconds": 7000.0,
        "failure": [
            naive(decoder, depth, encoding, seeds)
            for decoder, among in depths.items()
            for depth in among
            for encoding in encodings
        ],
        "few_shot": [few_shot("cnn", 4, seeds), few_shot("mlp", 3, seeds)],
        "tokens": {
            "blank": 6.6e-3, "size": 32, "fit": {"steps": 4000, "rate": 0.002},
            "outcomes": [
                {"regulariser": name, "seed": seed, "id": 1e-5 * (1 + seed), "ood": ood * (1 + 0.2 * seed)}
                for name, ood in {"none": 7e-3, "entropy": 4e-3, "variance": 1e-3, "both": 1e-4}.items()
                for seed in seeds
            ],
        },
        "penalty": [
            {"target": target, "mean_image": {"id": 0.05, "ood": 0.04},
             "outcomes": [{"penalised": penalised, "seed": seed, "id": 1e-4, "ood": ood * (1 + 0.1 * seed)}
                          for penalised, ood in zip((False, True), both, strict=True) for seed in seeds]}
            for target, both in {"bump": (0.05, 0.06), "stripes": (0.02, 1e-3), "log": (0.03, 2e-3)}.items()
        ],
        "thresholds": [
            threshold(size, way, seeds) for size in (24, 28, 32, 40, 48) for way in ("anywhere", "stripes", "outside")
        ],
        "exponents": {
            "stripes": {"exponent": 1.02, "low": 0.81, "high": 1.23, "points": 15},
            "anywhere": {"exponent": 2.04, "low": 1.9, "high": 2.18, "points": 15, "factor": 0.32},
        },
        "stacking": {
            "models": 24, "one_after_another": 0.024, "stacked": 0.004, "speedup": 6.0, "decoder": "MLP 56-128-784"
        },
        "claims": [
            {"claim": "naive decoders fail", "holds": True, "evidence": "10 of 10"},
            {"claim": "tokens help", "holds": False, "evidence": "<b>70×</b>"},
            {"claim": "stripes help", "holds": None, "evidence": "not tried"},
        ],
    }  # fmt: skip


def naive(decoder: str, depth: int, encoding: str, seeds: Sequence[int]) -> dict[str, Any]:
    worse = 1.2 + 0.05 * depth + 0.1 * len(encoding)
    return {
        "decoder": decoder, "depth": depth, "encoding": encoding, "fit": {"steps": 8000, "batch": 32, "rate": 1e-3},
        "id": [1e-6 * depth * (1 + seed) for seed in seeds],
        "ood": [BLANK * (worse + 0.05 * seed) for seed in seeds],
        "core": [BLANK * (worse + 0.2 + 0.05 * seed) for seed in seeds],
        "blank": {"id": 0.96 * BLANK, "ood": BLANK, "core": BLANK},
        "factorization": [[1 - 0.02 * layer - 0.005 * seed * layer for seed in seeds] for layer in range(depth + 1)],
        "factorization_on_grid": [[1 - 0.025 * layer for _ in seeds] for layer in range(depth + 1)],
    }  # fmt: skip


def few_shot(decoder: str, depth: int, seeds: Sequence[int]) -> dict[str, Any]:
    curve = [
        {"shots": shots, "seed": seed, "ood": BLANK * (1.3 + 0.1 * seed) / (1 + shots / 20)}
        for shots in SHOTS
        for seed in seeds
    ]
    return {"decoder": decoder, "depth": depth, "encoding": "bump", "blank": BLANK, "curve": curve}


def threshold(size: int, way: str, seeds: Sequence[int]) -> dict[str, Any]:
    needed = {"stripes": size, "anywhere": size**2 // 3, "outside": None}[way]
    return {
        "size": size, "way": way, "blank": math.pi / size**2, "most": size**2 * 2 // 3,
        "needed": [needed] * len(seeds), "tried": [{"seed": seed, "bumps": 8, "ood": 1e-3} for seed in seeds],
    }  # fmt: skip


def pictures(study: dict[str, Any]) -> dict[str, NDArray[Any]]:
    """The contents of pictures.npz, as halves."""
    seeds, inside = len(study["seeds"]), Bumps(28).held_out("square")
    arrays: dict[str, NDArray[Any]] = {}
    y, x = np.indices((28, 28))
    bumps = np.stack([np.exp(-((x - a) ** 2 + (y - b) ** 2) / 2) for a, b in ((14, 14), (9, 18), (18, 9), (11, 11))])
    for entry in study["failure"]:
        layers = entry["depth"]
        wave = 1 + 0.4 * np.sin(x / 2) * np.cos(y / 3)
        arrays |= {
            f"{entry['decoder']}{layers}-{entry['encoding']}/{name}": array.astype(np.float16)
            for name, array in {
                "errors": BLANK * np.stack([np.where(inside, wave, 0.01)] * seeds),
                "volume": np.stack([-number + 0.2 * number * wave for number in range(layers + 1)]),
                "asked": bumps,
                "made": 0.4 * bumps + 0.2 * bumps[::-1],
                **{f"tuning/{number}": np.stack([wave + x / 20, wave * y / 20]) for number in range(layers - 1)},
            }.items()
        }
    for entry in study["few_shot"]:
        maps = BLANK * np.stack([np.where(inside, 1 / (1 + shots / 20), 0.01) for shots in SHOTS])
        arrays[f"shots-{entry['decoder']}{entry['depth']}-bump/errors"] = maps
    if study["tokens"]:
        corner = Bumps(32).held_out("corner")
        arrays["tokens-0/errors"] = np.stack([np.where(corner, 7e-3 / 4**number, 1e-5) for number in range(4)])
        stripe = np.exp(-((np.arange(32) - 20) ** 2) / 4)
        noise = np.random.default_rng(0).normal(size=(2, 32, 32))
        arrays["tokens-0/tokens"] = np.stack([
            np.stack([np.tile(stripe, (32, 1)), np.tile(stripe[:, None], (1, 32))]) + share * noise
            for share in (1, 0.5, 0.2, 0)
        ])  # fmt: skip
    return arrays


def folder_of(folder: Path, study: dict[str, Any], arrays: dict[str, NDArray[Any]] | None = None) -> Path:
    (folder / "results.json").write_text(json.dumps(study))
    np.savez_compressed(folder / "pictures.npz", **(pictures(study) if arrays is None else arrays))  # type: ignore[arg-type]
    return folder


def line(grid: Grid, *names: str) -> dict[str, str]:
    (found,) = [row for row in grid.rows if row[: len(names)] == names]
    return dict(zip(grid.head, found, strict=True))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of three seeds, with all that a study can hold."""
    folder = folder_of(tmp_path_factory.mktemp("full"), results())
    path = write(folder)
    assert path == folder / PAGE and (folder / PICTURE).read_bytes().startswith(b"\x89PNG")
    return path.read_text(encoding="utf-8")


def only(*kept: str, seeds: Sequence[int] = (0,)) -> dict[str, Any]:
    """A study of which nothing but these lists was run."""
    study = results(seeds)
    dropped = {name for name in (*SECTIONS, "exponents") if name not in kept}
    return study | {name: LEFT_OUT.get(name, []) for name in dropped}


def test_success_means_the_same_on_the_page_as_in_the_study() -> None:
    assert bumps_plots.SUCCESS == plan_b.SUCCESS


def test_a_line_holds_mean_and_spread_over_seeds_beside_the_blank_level() -> None:
    assert line(failure_table(results()), "CNN 4", "ramp") == {
        "decoder": "CNN 4",
        "encoding": "ramp",
        "ID": "8.0e-6 ± 4e-6",
        "OOD": "7.4e-3 ± 2e-4",
        "core": "8.2e-3 ± 2e-4",
        "blank": "4.0e-3",
        "OOD ÷ blank": "1.85",
        "core ÷ blank": "2.05",
    }
    assert line(tokens_table(results()), "both")["OOD ÷ blank"] == "0.018"
    assert line(penalty_table(results()), "sum of two stripes", "inside", "with")["mean image"] == "4.0e-2"


def test_one_seed_has_no_spread() -> None:
    grids = (failure_table(results((0,))), tokens_table(results((0,))), penalty_table(results((0,))))
    assert not any("±" in str(grid) for grid in grids)


def test_decoders_stand_by_kind_depth_and_encoding_in_whatever_order_they_ran() -> None:
    study = results()
    backwards = study | {"failure": study["failure"][::-1]}
    assert failure_table(backwards) == failure_table(study)
    assert [row[0] for row in failure_table(study).rows[::2]] == ["MLP 3", "MLP 5", "CNN 2", "CNN 4", "CNN 6"]


def test_an_error_that_is_missing_or_no_number_is_left_out_of_the_mean() -> None:
    study = results((0, 1))
    study["failure"][0] |= {"ood": [None, 4e-3], "core": [None, math.nan]}
    shown = line(failure_table(study), "MLP 3", "bump")
    assert shown["OOD"] == "4.0e-3" and shown["core"] == shown["core ÷ blank"] == NOTHING


def test_bumps_needed_are_listed_by_seed_and_never_is_said_once_if_no_seed_succeeds() -> None:
    study = results()
    study["thresholds"][1]["needed"] = [24, None, 34]
    assert line(bumps_table(study), "24") == {
        "N": "24",
        "with stripes": "24, never, 34",
        "anywhere": "192, 192, 192",
        "outside alone": "never (of 384)",
        "no white": "–",
    }
    assert exponents_table(study).rows[0][1:] == ("1.02", "0.81 to 1.23", "15")


def test_the_finding_counts_failures_and_tells_what_mends_them() -> None:
    assert finding(results()) == (
        "Asked for bumps at positions they never saw, 10 of 10 decoders of disentangled codes make errors as large as "
        "a blank image or larger, more than 2σ from any known position; the median is 2.05 blank images there and "
        "0.0021 at known positions. Tokens that render themselves are at 1.27 blank images without regularisers and at "
        "0.018 with both. At N = 48, 48 bumps are enough once each factor is shown alone in stripes, else 768."
    )
    assert finding(only()) == "Nothing was run."


def test_the_finding_does_not_compare_sizes_where_one_way_never_succeeds() -> None:
    study = only("thresholds")
    for entry in study["thresholds"]:
        if entry["way"] == "stripes" or entry["size"] > 32:
            entry["needed"] = [None] if entry["size"] > 28 else entry["needed"]
    assert finding(study).startswith("At N = 28, 28 bumps")


def test_the_page_says_why_intervals_overlap_and_only_then() -> None:
    study = results()
    assert bumps._overlap(study) == ""
    study["exponents"]["stripes"]["high"] = study["exponents"]["anywhere"]["low"] + 0.1
    study["thresholds"][1]["needed"] = [1, 1, 16]
    assert "2 of 15 runs need a single bump" in bumps._overlap(study)


def test_tables_fit_a_terminal() -> None:
    study = results(encodings=("bump", "thermometer"))
    console = Console(width=80)
    with console.capture() as captured:
        console.print(tables(study))
    shown = captured.get()
    assert re.search(r"CNN 6 +thermometer +1.2e-5 ± 6e-6 +1.1e-2 ± 2e-4 +1.1e-2 ± 2e-4 +4.0e-3", shown)
    for title in ("Few shots", "Plan A: tokens", "the interaction penalty", "Plan B: bumps needed", "Claims"):
        assert title in shown
    assert "<b>70×</b>" in shown and "…" not in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_the_page_has_every_section_and_no_number_that_is_none(page: str) -> None:
    for titles in SECTIONS.values():
        for title in titles:
            assert f"<h2>{title}</h2>" in page
    assert "<h2>Claims</h2>" in page and "<h2>How to run it again</h2>" in page
    words = set(re.findall(r">[^<>]*\b(nan|inf|None|null)\b[^<>]*<", re.sub(r"data:image[^\"]*", "", page)))
    assert not words
    assert len(page) < 1_500_000


def test_the_page_needs_nothing_beside_it(page: str) -> None:
    assert "http" not in page and "<script" not in page and "<link" not in page and "@import" not in page
    assert set(re.findall(r'href="(.)', page)) <= {"d", "#"} and "data:image/png" in page


def test_names_from_the_study_are_text_and_never_html(page: str) -> None:
    assert "<b>70" not in page and html.escape("<b>70×</b>") in page


@pytest.mark.parametrize("kept", ["failure", "few_shot", "tokens", "penalty", "thresholds", "stacking", ""])
def test_a_page_leaves_out_what_the_study_left_out(tmp_path: Path, kept: str) -> None:
    study = only(kept)
    shown = write(folder_of(tmp_path, study)).read_text(encoding="utf-8")
    for name, titles in SECTIONS.items():
        for title in titles:
            assert (f"<h2>{title}</h2>" in shown) == (name == kept)
    assert (tmp_path / PICTURE).is_file()
    with Console(width=80).capture():
        Console(width=80).print(tables(study))


def test_a_page_without_pictures_keeps_its_plots(tmp_path: Path) -> None:
    shown = write(folder_of(tmp_path, results((0, 1)), arrays={})).read_text(encoding="utf-8")
    assert 'aria-label="factorization by layer"' in shown and 'aria-label="volume by layer"' not in shown
    assert 'aria-label="error maps' not in shown and 'aria-label="images made' not in shown


def test_failures_are_drawn_in_blank_images_one_dot_per_seed() -> None:
    figure = Figure()
    bumps_plots.failure(figure, results()["failure"])
    mlps, cnns = figure.axes
    dots = [one for one in cnns.lines if one.get_marker() == "o" and one.get_markerfacecolor() != "none"]
    assert len(dots) == 6 and {np.size(one.get_xdata()) for one in dots} == {3}
    assert np.allclose(np.sort(dots[0].get_ydata()), [1.7, 1.75, 1.8])
    assert [tick.get_text() for tick in mlps.get_xticklabels()] == ["3", "5"]


def test_a_fit_goes_through_its_points_and_what_never_succeeds_is_a_cross() -> None:
    ax = Figure().subplots()
    bumps_plots.scaling(ax, results())
    legend = ax.get_legend()
    assert legend is not None
    told = [text.get_text() for text in legend.get_texts()]
    assert "N^2.04 (1.90 to 2.18)" in told[0] and "N^1.02 (0.81 to 1.23)" in told[1] and "never" in told[2]
    fits = [one for one in ax.lines if one.get_linestyle() == "-" and np.size(one.get_xdata()) == 5]
    assert np.allclose(fits[1].get_ydata(), (24, 28, 32, 40, 48), rtol=0.02)
    assert sum(one.get_marker() == "x" and np.size(one.get_xdata()) > 0 for one in ax.lines) == 1


def test_a_layer_that_was_not_measured_is_a_gap() -> None:
    entry = naive("cnn", 4, "bump", (0, 1))
    entry["factorization"][2] = [None, math.nan]
    ax = Figure().subplots()
    bumps_plots.by_layer(ax, [entry], bumps_plots.depth_colours([4]), "CNN, bump")
    assert np.isnan(ax.lines[0].get_ydata()).tolist() == [False, False, True, False, False]


def test_a_flat_volume_does_not_show_its_rounding() -> None:
    flat = bumps_plots.volume_map("code", np.full((28, 28), -1.0) + 1e-6 * np.arange(28))
    assert flat.high is not None and flat.low is not None and flat.high - flat.low == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "there is no results.json in it; run `cgf study bumps`"),
        ("{", "results.json: it is damaged"),
        ("[]", "results.json: it holds study None, version None; expected 'bumps', 1"),
        ('{"study": "perception", "version": 1}', "it holds study 'perception', version 1; expected 'bumps', 1"),
        ('{"study": "bumps", "version": 1, "command": ""}', "results.json: it has no scale, part, seeds"),
    ],
)
def test_bad_results_are_refused_with_a_sentence(tmp_path: Path, text: str | None, sentence: str) -> None:
    if text is not None:
        (tmp_path / "results.json").write_text(text)
    with pytest.raises(ValueError, match=re.escape(sentence)):
        read_results(tmp_path)


def test_results_laid_out_otherwise_are_refused_and_leave_no_page(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"it is not laid out as a study lays it out .KeyError"):
        write(folder_of(tmp_path, only("failure") | {"failure": [{}]}, arrays={}))
    assert not (tmp_path / PAGE).exists()


@pytest.mark.parametrize("damage", ["missing", "empty", "cut"])
def test_bad_pictures_are_refused_with_a_sentence(tmp_path: Path, damage: str) -> None:
    path = folder_of(tmp_path, only("tokens")) / "pictures.npz"
    whole = path.read_bytes()
    path.unlink()
    if damage != "missing":
        path.write_bytes(b"" if damage == "empty" else whole[:-100])
    sentence = "there is no pictures.npz in it" if damage == "missing" else "pictures.npz: it is damaged"
    with pytest.raises(ValueError, match=f"{sentence}.*; run `cgf study bumps` into this folder again"):
        write(tmp_path)
