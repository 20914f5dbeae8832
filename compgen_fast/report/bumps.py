"""The page of a bump study: that decoders of disentangled codes fail, what happens in their layers, two remedies.

It reads what the study left in its folder (results.json, pictures.npz) and writes report.html, which needs nothing
beside it, and report.png for a README. It measures nothing and changes no number. What a study did not run is left out.
"""

import html
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Group

from compgen_fast.report import bumps_plots as plots
from compgen_fast.report import study
from compgen_fast.report.bumps_numbers import (
    bumps_table,
    decoder_name,
    exponents_table,
    failure_table,
    finding,
    ordered,
    penalty_table,
    shots_table,
    times,
    tokens_table,
)
from compgen_fast.report.bumps_plots import (
    DECODERS,
    REGULARISERS,
    SUCCESS,
    Entry,
    Picture,
    relative,
)
from compgen_fast.report.page import (
    PAGE,
    PICTURE,
    drawing,
    listed_pairs,
    paint,
    table,
)
from compgen_fast.report.study import (
    Arrays,
    Results,
    claims_table,
    in_terminal,
    read_pictures,
    section,
    write_page,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure, SubFigure

    _Panel = Callable[[SubFigure], None]

NAME, VERSION = "bumps", 1
_NEEDED = (
    "command", "scale", "part", "seeds", "versions", "written", "job_seconds", "failure", "few_shot",
    "tokens", "penalty", "thresholds", "exponents", "stacking", "claims",
)  # fmt: skip
_TITLE = "Disentangled codes, and positions never seen"
_STYLE = """
figure{margin:1em 0}figure .panels{overflow-x:auto;margin-bottom:.3em}figure .panels svg{max-width:none;flex:none}
"""
_FONT = 13  # of the picture for the README
Pixels = NDArray[Any]


def write(folder: Path) -> Path:
    """Draws the study in ``folder`` and returns the page."""
    results, arrays = read_results(folder), read_pictures(folder, NAME)
    write_page(folder, NAME, _TITLE, lambda: _body(results, arrays), _STYLE)
    panels = _poster_panels(results, arrays)
    paint(partial(_poster, panels=panels), (13, 8.6 if len(panels) > 2 else 4.6), folder / PICTURE, dots_per_inch=120)
    return folder / PAGE


def tables(results: Results) -> Group:
    """For a terminal of 80 columns: naive decoders, the two plans, claims."""
    grids = (
        failure_table(results).only("decoder", "encoding", "ID", "OOD", "core", "blank"),
        shots_table(results),
        tokens_table(results),
        penalty_table(results),
        bumps_table(results),
        exponents_table(results),
        claims_table(results),
    )
    return in_terminal(grids)


def read_results(folder: Path) -> dict[str, Any]:
    return study.read_results(folder, NAME, VERSION, _NEEDED)


# ------------------------------------------------------------------------------------------------ the page


def _body(results: Results, arrays: Arrays) -> str:
    return "".join(
        (
            f"<h1>{_TITLE}</h1><p class=finding id=finding>{html.escape(finding(results))}</p>",
            f"<p class=note>{html.escape(_setting(results))}</p>",
            section("Claims", table(claims_table(results), "claims")),
            section("Naive decoders at held-out positions", _failure(results, arrays)),
            section("A few bumps inside the square", _few_shot(results, arrays)),
            section("What happens in their layers", _geometry(results, arrays)),
            section("Plan A: tokens that render themselves", _tokens(results, arrays)),
            section("Plan A, by penalty: its controls", _penalty(results)),
            section("Plan B: data that shows each factor alone", _scaling(results)),
            section("Many models as one", _stacking(results)),
            section("How to run it again", _run(results)),
        )
    )


def _setting(results: Results) -> str:
    seeds = f"{len(results['seeds'])} seeds, dots are seeds" if len(results["seeds"]) > 1 else "1 seed"
    return (
        "An image shows one Gaussian bump at (x, y); the codes of x and of y are given apart. Training has every x and "
        "every y, and never a bump in the middle square (dashed in the maps). A blank image is already almost "
        f"right, so every error stands beside that of a blank one. {seeds}; scale {results['scale']}."
    )


def _figure(*drawn: str, caption: str = "") -> str:
    """Drawings side by side as far as there is room. They keep their sizes: a narrow screen scrolls."""
    below = f"<figcaption>{html.escape(caption)}</figcaption>" if caption else ""
    side_by_side = "".join(drawn)
    return side_by_side and f"<figure><div class=panels>{side_by_side}</div>{below}</figure>"


def _folded(title: str, body: str) -> str:
    return f"<details><summary>{html.escape(title)}</summary>{body}</details>" if body else ""


def _job(entry: Entry) -> str:
    return f"{entry['decoder']}{entry['depth']}-{entry['encoding']}"


def _failure(results: Results, arrays: Arrays) -> str:
    entries = ordered(results)
    if not entries:
        return ""
    chart = drawing(partial(plots.failure, entries=entries), (10.6, 4.4), "errors of naive decoders by depth")
    some = _some(results, arrays)
    return (
        _figure(
            chart, caption="Full: held-out positions. Hollow: known ones. A tenth of a blank image counts as solved."
        )
        + _figure(*_made(some, arrays), caption=_ASKED)
        + _error_maps(some, arrays, "Errors over positions, mean over seeds, in blank images.")
        + _folded("Error maps of all decoders", _error_maps(entries, arrays, ""))
        + _folded("Numbers", _note(_CORE) + table(failure_table(results), "failure"))
    )


_ASKED = "Images at four held-out positions, first seed, from 0 (black) to 1, as square roots so that faint ones show."
_CORE = "Core: held-out positions more than 2σ from any known one. Errors are mean squared errors over pixels."


def _note(text: str) -> str:
    return f"<p class=note>{html.escape(text)}</p>" if text else ""


def _middle(entries: Sequence[Entry], kind: str) -> int | None:
    """The depth in the middle of those that were trained."""
    depths = sorted({entry["depth"] for entry in entries if entry["decoder"] == kind})
    return depths[len(depths) // 2] if depths else None


def _shown(results: Results, arrays: Arrays) -> Entry | None:
    """The decoder whose insides are shown: a CNN of middle depth on bump codes, of those that fail if any do."""
    among = [entry for entry in ordered(results) if f"{_job(entry)}/made" in arrays]
    choices = (
        [entry for entry in among if entry["decoder"] == "cnn" and entry["encoding"] == "bump" and _fails(entry)],
        [entry for entry in among if entry["decoder"] == "cnn"],
        among,
    )
    return next((found[len(found) // 2] for found in choices if found), None)


def _fails(entry: Entry) -> bool:
    return fmean(relative(entry, "core") or (0.0,)) > SUCCESS


def _some(results: Results, arrays: Arrays) -> list[Entry]:
    """One depth of each kind of decoder, on all encodings: that of the shown one, and the middle of the other kind."""
    entries, shown = ordered(results), _shown(results, arrays)
    depths = {kind: _middle(entries, kind) for kind in DECODERS} | ({shown["decoder"]: shown["depth"]} if shown else {})
    return [entry for entry in entries if entry["depth"] == depths.get(entry["decoder"])]


def _made(entries: Sequence[Entry], arrays: Arrays) -> list[str]:
    """What was asked for and what decoders made of it, a drawing for each kind of decoder."""
    among = [entry for entry in entries if f"{_job(entry)}/made" in arrays]
    kinds = [[entry for entry in among if entry["decoder"] == kind] for kind in DECODERS]
    return [_made_by(each, arrays) for each in kinds if each]


def _made_by(entries: Sequence[Entry], arrays: Arrays) -> str:
    asked = arrays[f"{_job(entries[0])}/asked"]
    sets = [("asked for", asked), *((entry["encoding"], arrays[f"{_job(entry)}/made"]) for entry in entries)]
    name = decoder_name(entries[0])
    row = [plots.bump_image(title, _mosaic(images)) for title, images in sets]
    return drawing(
        partial(plots.pictures, rows=[row], names=[name]), (0.3 + 1.7 * len(row), 1.95), f"images made by {name}"
    )


def _mosaic(images: Pixels) -> Pixels:
    """[4, N, N] as two by two, with a line between."""
    size = images.shape[-1]
    sheet = np.full((2 * size + 1, 2 * size + 1), 0.35)
    for number, pixels in enumerate(images[:4]):
        top, left = (size + 1) * (number // 2), (size + 1) * (number % 2)
        sheet[top : top + size, left : left + size] = pixels
    return sheet


def _error_maps(entries: Sequence[Entry], arrays: Arrays, caption: str) -> str:
    """A row per decoder, a column per encoding."""
    rows: dict[str, list[Picture]] = {}
    for entry in entries:
        errors = arrays.get(f"{_job(entry)}/errors")
        if errors is not None:
            share = fmean(relative(entry, "ood")) if relative(entry, "ood") else float("nan")
            picture = plots.error_map(f"{entry['encoding']}: {times(share)}", _mean(errors), entry["blank"]["ood"])
            rows.setdefault(decoder_name(entry), []).append(picture)
    if not rows:
        return ""
    width = max(map(len, rows.values()))
    draw = partial(plots.pictures, rows=list(rows.values()), names=list(rows), bar="error ÷ blank")
    drawn = drawing(draw, (1.2 + 1.85 * width, 0.3 + 1.85 * len(rows)), f"error maps of {', '.join(rows)}")
    return _figure(drawn, caption=caption and f"{caption} The number is the mean over the dashed square.")


def _mean(maps: Pixels) -> Pixels:
    """Over seeds; halves would overflow or round."""
    mean: Pixels = maps.astype(np.float64).mean(0)
    return mean


def _few_shot(results: Results, arrays: Arrays) -> str:
    entries = results["few_shot"]
    if not entries:
        return ""
    chart = drawing(lambda figure: plots.shots(figure.subplots(), entries), (4.2, 3.3), "few shots")
    rows = {f"{decoder_name(entry)}, {entry['encoding']}": _shot_maps(entry, arrays) for entry in entries}
    rows = {name: row for name, row in rows.items() if row}
    maps = ""
    if rows:
        width = max(map(len, rows.values()))
        draw = partial(plots.pictures, rows=list(rows.values()), names=list(rows), bar="error ÷ blank")
        maps = drawing(draw, (1.1 + 1.45 * width, 0.2 + 1.6 * len(rows)), "error maps after few shots")
    caption = "Judged at the held-out positions that were not shown. Maps: first seed; dark dots are what was shown."
    return _figure(chart, maps, caption=caption) + _folded("Numbers", table(shots_table(results), "shots"))


def _shot_maps(entry: Entry, arrays: Arrays) -> list[Picture]:
    counts = sorted({point["shots"] for point in entry["curve"]})
    errors = arrays.get(f"shots-{_job(entry)}/errors")
    if errors is None:
        return []
    return [
        plots.error_map(f"{count} shown", each, entry["blank"])
        for count, each in zip(counts, errors, strict=False)
    ]  # fmt: skip


def _geometry(results: Results, arrays: Arrays) -> str:
    entries = [entry for entry in ordered(results) if entry["factorization"]]
    if not entries:
        return ""
    across = len({entry["encoding"] for entry in entries})
    down = len({entry["decoder"] for entry in entries})
    size = (1.2 + 2.0 * across if across > 1 else 4.4, 0.3 + 2.4 * down)
    lines = drawing(partial(plots.factorization, entries=entries), size, "factorization by layer")
    return (
        _note(
            "g is what a layer makes of a step along x and along y: g_ij = ⟨∂_i h, ∂_j h⟩. Factorization is "
            "1 − mean|g_xy| / mean(|g_xx| + |g_yy|): 1 where the two directions stay orthogonal, at least ½."
        )
        + _figure(
            lines,
            caption="A line per depth, a band over seeds; “in” is the code, the last layer the image. Solid: exact "
            "derivatives. Dashed, for the deepest decoder: differences between neighbours, as the paper measures.",
        )
        + _volumes(results, arrays)
        + _tuning(results, arrays)
    )


def _volumes(results: Results, arrays: Arrays) -> str:
    """Of the shown decoder, on bump and on ramp codes where both were trained."""
    shown = _shown(results, arrays)
    if shown is None:
        return ""
    same = [
        entry
        for entry in ordered(results)
        if (entry["decoder"], entry["depth"]) == (shown["decoder"], shown["depth"])
        and entry["encoding"] in ("bump", "ramp", shown["encoding"])
        and f"{_job(entry)}/volume" in arrays
    ]
    if not same:
        return ""
    rows = [_layers(arrays[f"{_job(entry)}/volume"]) for entry in same]
    draw = partial(plots.pictures, rows=rows, names=[entry["encoding"] for entry in same])
    drawn = drawing(draw, (0.4 + 1.5 * len(rows[0]), 0.1 + 1.95 * len(rows)), "volume by layer")
    return _figure(
        drawn,
        caption=f"log₁₀ √det g over positions in the layers of the {decoder_name(shown)}, first seed: how much area a "
        "layer gives to the neighbourhood of a position. Each map has its own colours; above it, least and most.",
    )


def _layers(volumes: Pixels) -> list[Picture]:
    last = len(volumes) - 1
    names = ["code", *(f"layer {number}" for number in range(1, last)), "image"]
    return [plots.volume_map(name, each) for name, each in zip(names, volumes, strict=True)]


def _tuning(results: Results, arrays: Arrays) -> str:
    shown = _shown(results, arrays)
    if shown is None:
        return ""
    prefix = f"{_job(shown)}/tuning/"
    numbers = sorted(int(name.removeprefix(prefix)) for name in arrays if name.startswith(prefix))
    chosen = dict.fromkeys((numbers[0], numbers[-1])) if numbers else {}
    layers = [(f"layer {number + 1}", arrays[f"{prefix}{number}"]) for number in chosen]
    if not layers:
        return ""
    drawn = drawing(partial(plots.tuning, layers=layers), (0.4 + 5.1 * len(layers), 3.6), "tuning curves")
    return _figure(
        drawn,
        caption="Responses of the two neurons that vary most, in the first and the last hidden layer of the "
        f"{decoder_name(shown)} on {shown['encoding']} codes. Shaded: the held-out square.",
    )


def _tokens(results: Results, arrays: Arrays) -> str:
    tokens = results["tokens"]
    if not tokens:
        return ""
    chart = drawing(lambda figure: plots.regularisers(figure.subplots(), tokens), (5.2, 3.6), "tokens by regulariser")
    return (
        _note(
            "Each position of x and of y owns a matrix, an image of its own; a small CNN combines the two. "
            f"N = {tokens['size']}; held out is the corner where both x and y are large."
        )
        + _figure(chart, _token_matrices(arrays), caption=_MATRICES)
        + _token_errors(tokens, arrays)
        + table(tokens_table(results), "tokens")
    )


_MATRICES = (
    "Right: matrices of a token of x and of one of y, first seed, without regularisers and with both; white is 0."
)


def _token_matrices(arrays: Arrays) -> str:
    found = arrays.get("tokens-0/tokens")
    if found is None:
        return ""
    rows = [
        [_matrix(f"{factor} = {found.shape[-1] * 5 // 8}", matrix) for factor, matrix in zip("xy", both, strict=True)]
        for both in (found[0], found[-1])
    ]
    draw = partial(plots.pictures, rows=rows, names=["none", "both"])
    return drawing(draw, (3.7, 3.7), "matrices of a token of x and one of y")


def _matrix(title: str, matrix: Pixels) -> Picture:
    """Colours from −most to +most, so that 0 is white."""
    values = matrix.astype(float)
    most = float(np.abs(values).max()) or 1.0
    return Picture(title, values, "RdBu_r", -most, most, None)


def _token_errors(tokens: Entry, arrays: Arrays) -> str:
    errors = arrays.get("tokens-0/errors")
    if errors is None:
        return ""
    row = [
        plots.error_map(name, each, tokens["blank"], "corner") for name, each in zip(REGULARISERS, errors, strict=False)
    ]
    draw = partial(plots.pictures, rows=[row], bar="error ÷ blank")
    return _figure(
        drawing(draw, (1.2 + 1.85 * len(row), 2.1), "error maps of tokens"),
        caption="Errors over positions, first seed. Dashed: what is held out.",
    )


def _penalty(results: Results) -> str:
    entries = results["penalty"]
    if not entries:
        return ""
    chart = drawing(lambda figure: plots.penalty(figure.subplots(), entries), (7.6, 3.8), "the interaction penalty")
    return (
        _note(
            "The interaction penalty asks a decoder to be a sum of one function per factor (F_int). A sum of two "
            "stripes and the logarithm of a bump are; the bump, a product of stripes, is not. The yardstick is the "
            "mean of all known images. Full: OOD, hollow: ID."
        )
        + _figure(chart)
        + table(penalty_table(results), "penalty")
    )


def _scaling(results: Results) -> str:
    if not results["thresholds"]:
        return ""
    chart = drawing(lambda figure: plots.scaling(figure.subplots(), results), (7.6, 5.0), "bumps needed by size")
    return (
        _note(
            "The least number of bumps with which the error at held-out positions falls below a tenth of a blank "
            "image's. Stripes show one factor, with the other's code at zero: N vertical and N horizontal ones, not "
            "counted as bumps, and a white image stands for no factor. Bumps anywhere include the square, and are "
            "judged where none was shown. Controls: all bumps outside the square and nothing else; N bumps and "
            "stripes, but no white image."
        )
        + _figure(chart)
        + table(bumps_table(results), "bumps")
        + table(exponents_table(results), "exponents")
        + _note(_overlap(results))
    )


def _overlap(results: Results) -> str:
    """Why the intervals of the exponents do not lie apart, where they do not."""
    fits = results["exponents"]
    if not {"stripes", "anywhere"} <= fits.keys() or fits["stripes"]["high"] < fits["anywhere"]["low"]:
        return ""
    needed = [bumps for entry in results["thresholds"] if entry["way"] == "stripes" for bumps in entry["needed"]]
    single = sum(bumps == 1 for bumps in needed)
    return (
        f"The intervals overlap. With stripes {single} of {len(needed)} runs need a single bump: there is hardly any "
        "growth to fit, and the other runs make the interval wide."
    )


def _stacking(results: Results) -> str:
    found = results["stacking"]
    if not found:
        return ""
    stacked, alone = (f"{1e3 * found[name]:.1f} ms" for name in ("stacked", "one_after_another"))
    return (
        f"<p>{found['models']} models of {html.escape(found['decoder'])} take {stacked} a step as one stack, {alone} "
        f"one after another: <b>{found['speedup']:.1f}×</b>.</p>"
    )


def _run(results: Results) -> str:
    pairs = [
        ("scale", str(results["scale"])),
        ("part", str(results["part"])),
        ("seeds", ", ".join(map(str, results["seeds"]))),
        ("written", str(results["written"])),
        ("sum over jobs", _lasted(results["job_seconds"])),
        *_fits(results),
        *((name, str(version)) for name, version in results["versions"].items()),
    ]
    command = f"<pre><code>{html.escape(results['command'])}</code></pre>"
    return command + _folded("Settings and versions", listed_pairs(pairs))


def _lasted(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min {rest} s"


def _fits(results: Results) -> list[tuple[str, str]]:
    """How each kind of model was trained, where the study tells."""
    kinds = {
        **{f"training: {entry['decoder'].upper()}": entry for entry in results["failure"]},
        "training: tokens": results["tokens"] or {},
        "training: penalty": next(iter(results["penalty"]), {}),
        "training: Plan B": next(iter(results["thresholds"]), {}),
    }
    return [
        (name, ", ".join(f"{key} {value:g}" for key, value in entry["fit"].items()))
        for name, entry in kinds.items()
        if entry.get("fit")
    ]


# ------------------------------------------------------------------------------------------------ the picture


def _poster_panels(results: Results, arrays: Arrays) -> "list[tuple[str, _Panel]]":
    """What fails, why, and both remedies; of a part of the study, what there is."""
    panels = (
        ("Disentangled codes, unseen positions", _failure_panel(results, arrays)),
        ("What their layers do to x and y", _layers_panel(results, arrays)),
        ("Plan A: tokens that render themselves", _tokens_panel(results)),
        ("Plan B: each factor shown alone", _scaling_panel(results)),
    )
    return [(title, draw) for title, draw in panels if draw is not None]


def _poster(figure: "Figure", panels: "Sequence[tuple[str, _Panel]]") -> None:
    """The picture for a README."""
    if not panels:
        figure.text(0.5, 0.5, "nothing to show", ha="center")
        return
    columns = min(2, len(panels))
    grid = figure.add_gridspec(-(-len(panels) // columns), columns)
    for number, (title, draw) in enumerate(panels):
        part = figure.add_subfigure(grid[divmod(number, columns)])
        part.suptitle(title, fontsize=16, fontweight="bold")
        draw(part)


def _failure_panel(results: Results, arrays: Arrays) -> "_Panel | None":
    shown = _shown(results, arrays)
    if shown is None:
        return None
    asked, made, errors = (arrays[f"{_job(shown)}/{name}"] for name in ("asked", "made", "errors"))
    share = fmean(relative(shown, "core") or (float("nan"),))
    picture = plots.error_map(f"error: {times(share)} × blank\nin its middle", _mean(errors), shown["blank"]["ood"])
    name = f"{decoder_name(shown).replace(' ', ', ')} layers"
    return partial(plots.asked_and_made, asked=asked, made=made, errors=picture, name=f"made\n({name})", font=_FONT)


def _layers_panel(results: Results, arrays: Arrays) -> "_Panel | None":
    shown = _shown(results, arrays)
    kind = "cnn" if shown is None else shown["decoder"]
    entries = [
        entry
        for entry in ordered(results)
        if entry["decoder"] == kind and entry["encoding"] in ("bump", "ramp") and entry["factorization"]
    ]
    return partial(plots.factorization, entries=entries, font=_FONT) if entries else None


def _tokens_panel(results: Results) -> "_Panel | None":
    tokens = results["tokens"]
    return (lambda part: plots.regularisers(part.subplots(), tokens, font=_FONT)) if tokens else None


def _scaling_panel(results: Results) -> "_Panel | None":
    return (lambda part: plots.scaling(part.subplots(), results, font=_FONT)) if results["thresholds"] else None
