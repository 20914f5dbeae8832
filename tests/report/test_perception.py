import html
import json
import re
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from rich.console import Console

from compgen_fast.report import perception_pictures, perception_plots
from compgen_fast.report.page import NOTHING, PAGE, PICTURE, Grid, drawing
from compgen_fast.report.perception import read_results, tables, write
from compgen_fast.report.perception_numbers import (
    decoder_table,
    factors_table,
    finding,
    main_table,
    other_encoders_table,
    rows,
)
from compgen_fast.report.study import claims_table
from tests.report.perception_results import entry, folder_of, pictures, results

HOSTILE = "<i>&attention"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def study_of(*entries: dict[str, Any], **changed: Any) -> dict[str, Any]:
    seeds = sorted({one["seed"] for one in entries})
    return results() | {"methods": list(entries), "seeds": seeds} | changed


def line(grid: Grid, name: str) -> dict[str, str]:
    (found,) = [row for row in grid.rows if row[0] == name]
    return dict(zip(grid.head, found, strict=True))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of three seeds, with all that a study can hold."""
    folder = folder_of(tmp_path_factory.mktemp("full"), results((0, 1, 2)))
    path = write(folder)
    assert path == folder / PAGE and (folder / PICTURE).read_bytes().startswith(b"\x89PNG")
    return path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def bare_page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of one seed, with pictures of one decoder, no sweeps, curves or failures, nothing measured that can be left out,
    and a name that is no HTML."""
    numbers: dict[str, Any] = json.loads(json.dumps(results(sweeps=False)).replace("attention", HOSTILE))
    for method in numbers["methods"]:
        method |= {"mse": {"id": None, "ood": None}, "images_per_second": None, "train_seconds": None, "r2": {}}
    for decoder in numbers["decoders"]:
        decoder |= {key: None for key in decoder if key not in ("decoder", "seed", "mse", "parameters")}
    arrays = {
        name.replace("attention", HOSTILE): array
        for name, array in pictures(failures=0).items()
        if name.startswith("attention")
    }
    arrays[f"{HOSTILE}/labels"] = np.array([f"{label} {HOSTILE}" for label in arrays[f"{HOSTILE}/labels"]])
    folder = folder_of(tmp_path_factory.mktemp("bare"), numbers | {"curves": {}}, arrays)
    return write(folder).read_text(encoding="utf-8")


def test_a_line_holds_mean_and_spread_over_seeds_and_the_share_of_the_fall_that_is_won_back() -> None:
    grid = main_table(results((0, 1, 2)))
    assert line(grid, "hessian, replay + search") == {
        "method": "hessian, replay + search",
        "ID %": "98.0 ± 0.0",
        "OOD %": "82.0 ± 1.0",
        "won back": "82 %",  # (0.82 − 0.11) / (0.98 − 0.11)
        "error ID": "0.0021 ± 0.0000",
        "error OOD": "0.0043 ± 0.0000",
        "images/s": "40",
        "training s": "312",
    }
    assert "3 seeds, mean ± standard deviation; chance 5 %" in grid.title


def test_longer_training_is_held_against_the_supervised_encoder_and_an_encoder_wins_nothing_back() -> None:
    grid = main_table(results())
    assert line(grid, "supervised, longer")["won back"] == "1 %"
    assert line(grid, "supervised")["won back"] == line(grid, "hessian, encoder")["won back"] == NOTHING
    assert line(grid, "supervised")["training s"] == "60" and line(grid, "supervised, longer")["training s"] == "312"
    assert line(grid, "supervised")["error OOD"] == NOTHING


def test_one_seed_has_no_spread() -> None:
    assert line(main_table(results()), "additive, search")["OOD %"] == "41.0"
    assert "±" not in str(main_table(results()))


def test_methods_stand_by_decoder_and_inference_and_unknown_ones_last() -> None:
    mixed = [*results()["methods"], entry("vae", "attention", "dreaming", 0, 0.5)]
    names = [row.name for row in rows(study_of(*reversed(mixed)))]
    assert names[:2] == ["supervised", "supervised, longer"]
    assert [name for name in names if name.startswith("attention")] == [
        "attention, encoder",
        "attention, search",
        "attention, search by Newton",
        "attention, replay",
        "attention, replay + search",
        "attention, dreaming",
    ]


def test_other_slot_encoders_have_their_own_table_and_fall_and_no_bar() -> None:
    study = results((0, 1))
    assert not any("Slot Attention" in row[0] for row in main_table(study).rows)
    others = other_encoders_table(study)
    assert [row[0] for row in others.rows] == [
        "Transformer: attention, encoder",
        "Transformer: attention, replay + search",
        "Slot Attention: attention, encoder",
        "Slot Attention: attention, replay + search",
    ]
    assert line(others, "Slot Attention: attention, replay + search")["won back"] == "68 %"  # 0.56 / (0.98 − 0.155)
    ax = Figure().subplots()
    perception_plots.methods(ax, study)
    assert len(ax.patches) == 2 * len(main_table(study).rows)


def test_an_entry_that_names_the_main_slot_encoder_belongs_to_it() -> None:
    named = study_of(*(one | {"encoder": one.get("encoder", "dense")} for one in results()["methods"]))
    assert main_table(named).rows == main_table(results()).rows


def test_two_objects_count_as_their_mean_and_no_object_is_refused() -> None:
    two = entry("supervised", None, "encoder", 0, 0.2)
    two["accuracy"]["object_2"] = {"id": 0.9, "ood": 0.4}
    assert line(main_table(study_of(two)), "supervised")["OOD %"] == "30.0"
    del two["accuracy"]["object_1"], two["accuracy"]["object_2"]
    with pytest.raises(ValueError, match="no object among background; expected object_1"):
        main_table(study_of(two))


def test_everything_that_was_read_is_listed_with_a_dash_where_it_was_not() -> None:
    study = results((0, 1))
    study["methods"][0]["r2"] = study["methods"][22]["r2"] = {}
    grid = factors_table(study)
    assert line(grid, "supervised")["background % OOD"] == "99.0 ± 0.0"
    assert line(grid, "supervised, longer")["x_1 R² ID"] == "0.970 ± 0.000"
    assert "Slot Attention: attention, encoder" in [row[0] for row in grid.rows]


def test_a_measure_that_is_null_is_a_dash() -> None:
    study = results((0, 1))
    assert line(decoder_table(study), "unconstrained")["FG-ARI"] == NOTHING
    assert line(decoder_table(study), "hessian")["FG-ARI"] == "0.800 ± 0.000"
    assert line(decoder_table(study), "additive")["error OOD"] == "0.0061 ± 0.0002"
    study["decoders"][0]["jis"] = None
    assert line(decoder_table(study), "unconstrained")["JIS"] == "0.500"


def test_claims_hold_or_not_or_were_not_asked() -> None:
    claims = [*results()["claims"], {"claim": "more data helps", "holds": None, "evidence": ""}]
    assert [row[1] for row in claims_table(results() | {"claims": claims}).rows] == ["✓", "✗", NOTHING]


def test_the_finding_names_the_best_inversion_and_what_it_stands_against() -> None:
    assert finding(results((0, 1, 2))) == (
        "Replay and search through the hessian decoder, the best of 13 inversions here, read 82 % of objects in unseen "
        "combinations; its encoder alone reads 11 %, and 98 % in seen ones. That wins back 82 % of the fall. For "
        "comparison: the same through an unconstrained decoder 23 %, the best supervised encoder 10 %, chance 5 %."
    )


def test_the_finding_does_not_boast_of_a_lift_that_one_seed_lacks() -> None:
    encoders = [entry("vae", "hessian", "encoder", seed, 0.1) for seed in (0, 1)]
    told = finding(
        study_of(*encoders, *(entry("vae", "hessian", "search", seed, (0.9, 0.14)[seed]) for seed in (0, 1)))
    )
    assert "reads 52 % of objects" in told and "not 5 points better in every seed" in told and "wins back" not in told


def test_the_finding_says_when_inversion_harms() -> None:
    worse = study_of(entry("vae", "hessian", "encoder", 0, 0.3), entry("vae", "hessian", "newton", 0, 0.2))
    assert finding(worse).startswith("Search by Newton through the hessian decoder reads 20 %")
    assert "not 5 points better" in finding(worse)


def test_the_finding_says_when_nothing_fell() -> None:
    easy = study_of(entry("vae", "hessian", "encoder", 0, 0.95), entry("vae", "hessian", "search", 0, 0.97))
    assert "falls by less than 5 points: there is little to win back" in finding(easy)
    assert line(main_table(easy), "hessian, search")["won back"] == NOTHING


def test_the_finding_without_inversion_lists_what_was_read() -> None:
    alone = study_of(entry("supervised", None, "encoder", 0, 0.08), entry("vae", "hessian", "encoder", 0, 0.1))
    assert finding(alone) == (
        "Objects in unseen combinations: supervised reads 8 %, hessian, encoder reads 10 %; chance 5 %."
    )
    assert "nothing was read" in finding(study_of())


def test_what_ran_with_fewer_seeds_is_not_called_the_best() -> None:
    rows = [
        entry("vae", "attention", way, seed, 0.1 + 0.2 * place)
        for seed in (0, 1)
        for place, way in enumerate(("encoder", "search"))
    ]
    told = finding(study_of(*rows, entry("vae", "attention", "newton", 0, 0.9)))
    assert told.startswith("Search through the attention decoder reads 30 %")


def test_an_unconstrained_decoder_that_is_best_is_not_compared_with_itself() -> None:
    told = finding(
        study_of(entry("vae", "unconstrained", "encoder", 0, 0.1), entry("vae", "unconstrained", "search", 0, 0.9))
    )
    assert "through the unconstrained decoder reads 90 %" in told and told.endswith("For comparison: chance 5 %.")


def test_tables_fit_a_terminal() -> None:
    console = Console(width=80)
    with console.capture() as captured:
        console.print(tables(results((0, 1, 2))))
    shown = captured.get()
    assert re.search(r"unconstrained, replay \+ search +98.0 ± 0.0 +23.0 ± 1.0 +13 % +312", shown)
    assert "<b>OOD</b>" in shown and "…" not in shown


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "there is no results.json in it; run `cgf study perception`"),
        ("{", "results.json: it is damaged"),
        ("[]", "results.json: it holds study None, version None; expected 'perception', 1"),
        ('{"study": "perception", "version": 2}', "it holds study 'perception', version 2; expected 'perception', 1"),
        ('{"study": "perception", "version": 1, "command": ""}', "results.json: it has no scale, split, seeds"),
    ],
)
def test_bad_results_are_refused_with_a_sentence(tmp_path: Path, text: str | None, sentence: str) -> None:
    if text is not None:
        (tmp_path / "results.json").write_text(text)
    with pytest.raises(ValueError, match=re.escape(sentence)):
        read_results(tmp_path)


def test_results_laid_out_otherwise_are_refused_and_leave_no_page(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"it is not laid out as a study lays it out .KeyError: 'method'"):
        write(folder_of(tmp_path, results() | {"methods": [{}]}))
    assert not (tmp_path / PAGE).exists()


def damaged(whole: bytes) -> bytes:
    """With the first compressed byte, which stands after the names of the first member, made senseless."""
    at = 30 + sum(struct.unpack("<HH", whole[26:30]))
    return whole[:at] + b"\xff" + whole[at + 1 :]


@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "flipped", "other", "objects"])
def test_bad_pictures_are_refused_with_a_sentence(tmp_path: Path, damage: str) -> None:
    path = folder_of(tmp_path) / "pictures.npz"
    whole = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "other":
        np.save(path.open("wb"), np.zeros(3))
    elif damage == "objects":
        np.savez(path, labels=np.array([{}]))
    else:
        path.write_bytes({"empty": b"", "cut": whole[:-100], "flipped": damaged(whole)}[damage])
    sentence = "there is no pictures.npz in it" if damage == "missing" else "pictures.npz: it is damaged"
    with pytest.raises(ValueError, match=f"{sentence}.*; run `cgf study perception` into this folder again"):
        write(tmp_path)


def test_pictures_that_do_not_belong_together_are_refused() -> None:
    arrays = pictures(images=2, failures=0)
    rest = {name: array for name, array in arrays.items() if not name.endswith(("/maps", "/errors"))}
    with pytest.raises(ValueError, match="attention has no maps, errors; run the study again"):
        perception_pictures.searches(rest, "attention")
    for wrong in (arrays["attention/labels"][:1], arrays["attention/labels"][:, None], np.array("heart")):
        with pytest.raises(ValueError, match=r"attention has shapes .*; expected .* axes, the first of one length"):
            perception_pictures.searches(arrays | {"attention/labels": wrong}, "attention")


def test_a_reading_is_right_when_it_is_the_label_or_the_object_it_begins_with() -> None:
    right = perception_pictures.right
    assert right("heart", "heart on bricks") and right("heart on bricks", "heart on bricks")
    assert not right("hear", "heart on bricks") and not right("bricks", "heart on bricks") and not right("", "heart")


def test_the_search_for_the_poster_is_one_that_turned_a_wrong_reading_right() -> None:
    found = perception_pictures.searches(pictures(images=3), "attention")
    assert found is not None
    assert perception_pictures.turned_right(found) == 0
    found.read[0] = ("ball", "ball")
    assert perception_pictures.turned_right(found) == 1


def test_a_long_path_is_shown_from_guess_to_end_and_a_short_one_whole() -> None:
    found = perception_pictures.searches(pictures(images=1), "attention")
    assert found is not None
    names = [name for name, _ in perception_pictures.frames(found, 0)]
    assert names == ["image", "encoder's guess", "", "", "", "", "", "after search", "slots"]
    shown = perception_pictures.frames(found, 0)
    assert (shown[1][1] == found.path[0, 0]).all() and (shown[7][1] == found.path[0, -1]).all()
    short = perception_pictures.Searches(**{**vars(found), "path": found.path[:, :2]})
    assert len(perception_pictures.frames(short, 0)) == 4


def test_curves_with_gaps_keep_their_log_scale() -> None:
    ax = Figure().subplots()
    curve = {"step": [0, 1, 2], "mse": [0.1, None, 0.01], "penalty": [0.0, None, 0.1]}
    perception_plots.curves(ax, results() | {"curves": {"attention/0": curve}}, "mse")
    assert ax.get_yscale() == "log"
    ax = Figure().subplots()
    perception_plots.curves(ax, results() | {"curves": {"attention/0": curve}}, "penalty")
    assert ax.get_yscale() == "linear"


def test_a_sweep_goes_through_the_means_and_a_strength_of_zero_has_its_place() -> None:
    ax = Figure().subplots()
    perception_plots.sweep(ax, results((0, 1))["sweeps"]["strength"], "alpha")
    lines = {str(one.get_label()): one for one in ax.lines}
    assert np.allclose(lines["replay + search"].get_ydata(), [21, 36, 51, 66])
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["0", "0.01", "0.05", "0.2"]
    assert ax.get_xscale() == "symlog"


def test_the_page_needs_nothing_beside_it(page: str) -> None:
    assert "http" not in page and "<script" not in page and "<link" not in page and "@import" not in page
    sources = re.findall(r'src=["\']?(.{5})', page)
    assert sources and set(sources) == {"data:"}
    assert set(re.findall(r"url\((.)", page)) <= {"#"}


def test_the_page_opens_the_decoder_that_is_read_best_among_those_with_pictures(page: str) -> None:
    searches = page[page.index("Search, frame by frame") : page.index("Where search fails")]
    folds = re.findall(r"<details( open)?><summary>(.*?)</summary>", searches)
    assert folds == [(" open", "attention decoder"), ("", "unconstrained decoder")]


def test_equal_drawings_are_equal_bytes_and_two_drawings_share_no_id() -> None:
    def draw(figure: Figure) -> None:
        figure.subplots().plot([0, 1])

    once, again, other = (drawing(draw, (2, 1), name) for name in ("a", "a", "b"))
    ids = [set(re.findall(r'id="(\w{11,})"', text)) for text in (once, other)]
    assert once == again and ids[0] and not ids[0] & ids[1]


def test_names_from_the_study_are_text_and_never_html(bare_page: str) -> None:
    assert "<i>" not in bare_page and "<b>OOD" not in bare_page
    assert html.escape(HOSTILE) in bare_page and "&lt;b&gt;OOD&lt;/b&gt;" in bare_page


def test_a_page_leaves_out_what_the_study_left_out(page: str, bare_page: str) -> None:
    for title in ("Where search fails", "Sweeps", "Training"):
        assert f"<h2>{title}</h2>" in page and f"<h2>{title}</h2>" not in bare_page
    for measure in ("jis", "fg_ari"):
        assert f'aria-label="{measure} of each decoder"' in page
        assert f'aria-label="{measure} of each decoder"' not in bare_page
    assert "unconstrained decoder</summary>" in page and "unconstrained decoder</summary>" not in bare_page
    assert "dots are seeds" in page and "dots are seeds" not in bare_page


def test_the_matrix_of_what_was_seen_is_the_worlds(page: str) -> None:
    matrix = page[page.index("<table class=seen") : page.index("</table>", page.index("<table class=seen"))]
    assert matrix.count("<td class=seen") == 40 and matrix.count("<td class=unseen") == 160


def test_the_matrix_is_that_of_the_first_seed(page: str) -> None:
    assert perception_pictures.seen_matrix(results((0, 5))) in page
    assert perception_pictures.seen_matrix(results((5, 0))) not in page


def test_a_world_of_another_size_shows_no_matrix() -> None:
    study = results()
    study["world"]["partners"] = 11
    assert perception_pictures.seen_matrix(study) == ""


PROBE = """<pre id=told></pre><script>onload = () => {
const told = [...document.querySelectorAll('iframe')].map(frame => {
  const page = frame.contentDocument, root = page.documentElement;
  const all = (query, told) => [...page.querySelectorAll(query)].map(told);
  return {
    finding: page.querySelector('#finding').textContent,
    rows: Object.fromEntries(all('table[id]', table => [table.id, table.tBodies[0].rows.length])),
    first: all('#methods tbody tr:first-child td', cell => cell.textContent),
    overflow: root.scrollWidth - root.clientWidth,
    scrolled: all('.wide, .frames', box => [box.scrollWidth - box.clientWidth, box.textContent.slice(0, 40)])
      .filter(([excess]) => excess > 0),
    broken: all('img', image => image.naturalWidth).filter(width => width == 0).length,
    chart: page.querySelector('.wide > svg').getBoundingClientRect().width,
  };
});
document.querySelector('#told').textContent = JSON.stringify(told);
}</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH: apt-get install chromium to see the page rendered")
def test_a_browser_shows_the_page_on_a_desk_and_on_a_phone(page: str, tmp_path: Path) -> None:
    frames = "".join(
        f'<iframe srcdoc="{html.escape(page)}" style="width:{width}px;height:900px;border:0"></iframe>'
        for width in (1200, 420)
    )
    (tmp_path / "probe.html").write_text(f"<!doctype html><meta charset=utf-8>{frames}{PROBE}", encoding="utf-8")
    ran = subprocess.run(
        [
            str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic",
            "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync",
            f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr", "--dump-dom",
            (tmp_path / "probe.html").as_uri(),
        ],
        capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    found = re.search(r'<pre id="told">(.*?)</pre>', ran.stdout, re.DOTALL)
    assert found is not None and found[1], ran.stderr
    study = results((0, 1, 2))
    desk, phone = json.loads(html.unescape(found[1]))
    for shown in (desk, phone):
        assert shown["finding"].replace("\xa0", " ") == finding(study)
        assert shown["rows"] == {"claims": 2, "methods": 19, "factors": 23, "encoders": 4, "decoders": 4, "seen": 20}
        assert shown["first"] == list(main_table(study).rows[0])
        assert shown["overflow"] == 0 and shown["broken"] == 0
    assert desk["scrolled"] == [] and desk["chart"] > 1100
    assert "CONSOLE" not in ran.stderr
