"""The page of a generation study: curves along training, images of every composition, and circuits.

It reads what the study left in its folder (results.json, pictures.npz) and writes report.html, which needs nothing
beside it, and report.png for a README. It measures nothing and changes no number. What a study did not run is left out.
"""

import html
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Group

from compgen_fast.report import generation_plots as plots
from compgen_fast.report import study
from compgen_fast.report.generation_numbers import (
    LEVEL_2,
    LEVELS,
    Run,
    circuits_table,
    compared,
    last,
    level,
    part_table,
    tokenizers_table,
)
from compgen_fast.report.page import PAGE, PICTURE, drawing, image, listed_pairs, paint, table
from compgen_fast.report.study import (
    Arrays,
    Results,
    claims_table,
    in_terminal,
    read_pictures,
    section,
    seeds_of,
    write_page,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME, VERSION = "generation", 1
ASKED = "asked for"
_NEEDED = (
    "command", "scale", "part", "seeds", "versions", "written", "job_seconds", "tokenizers", "runs", "claims",
)  # fmt: skip
_TITLE = "Which generators compose?"
_HEADINGS = {
    "objectives": ("Objectives", "generator"),
    "conditioning": ("What a DiT is told", "told"),
    "jepa": ("MaskGIT with JEPA", "JEPA"),
}
_NOTES = {
    "objectives": "All on one trunk, and told everything.",
    "conditioning": "Quantised: each number by the half of its range it lies in. Concept dropout: each factor is left "
    "out of one in ten images.",
    "jepa": "Hidden states after these layers predict those that a moving average of the network has of all tokens.",
}


def write(folder: Path) -> Path:
    """Draws the study in ``folder`` and returns the page."""
    results, arrays = read_results(folder), read_pictures(folder, NAME)
    write_page(folder, NAME, _TITLE, lambda: _body(results, arrays), "")
    if compared(results):
        paint(partial(_poster, results=results, arrays=arrays), (13, 12), folder / PICTURE, dots_per_inch=100)
    return folder / PAGE


def tables(results: Results) -> Group:
    """For a terminal of 80 columns: each part, circuits, claims."""
    grids = [
        part_table(_HEADINGS[part][1], groups).only(
            _HEADINGS[part][1], "seen %", "level 1 %", "level 2 %", "level 2 there %"
        )
        for part, groups in compared(results).items()
    ]
    return in_terminal((tokenizers_table(results), *grids, circuits_table(results), claims_table(results)))


def read_results(folder: Path) -> dict[str, Any]:
    return study.read_results(folder, NAME, VERSION, _NEEDED)


def _body(results: Results, arrays: Arrays) -> str:
    parts = compared(results)
    return "".join(
        (
            f"<h1>{_TITLE}</h1><p class=finding id=finding>{_finding(results)}</p>",
            f"<p class=note>{_setting(results)}</p>",
            *(section(_HEADINGS[part][0], _part(part, groups, arrays)) for part, groups in parts.items()),
            section("Circuits", _circuits(results)),
            section("Claims", table(claims_table(results), "claims")),
            section("Probes and tokenizers", table(tokenizers_table(results), "tokenizers")),
            section("How to run it again", _run(results)),
        )
    )


def _finding(results: Results) -> str:
    """Level 2 of all objectives, true of these numbers whatever they are."""
    groups = compared(results).get("objectives", {})
    shares = {name: fmean(level(last(run), LEVEL_2) for run in runs) for name, runs in groups.items()}
    told = ", ".join(
        f"{html.escape(name)} {100 * share:.0f}&nbsp;%" for name, share in sorted(shares.items(), key=lambda x: -x[1])
    )
    return f"All three factors high together, never seen in training: {told} of images show it." if told else ""


def _setting(results: Results) -> str:
    return (
        "Shapes2D: shape, colour and size, each with a low and a high side. Training shows each high alone, never two "
        "together; level 1 asks for two, level 2 for all three. Probes that were taught on real images judge the "
        f"generated ones. {seeds_of(results)}. Best step: by level 1."
    )


def _part(part: str, groups: Mapping[str, Sequence[Run]], arrays: Arrays) -> str:
    heading, column = _HEADINGS[part]
    drawn = drawing(partial(plots.curves, groups=groups, levels=tuple(LEVELS)), (10.4, 3.6), f"{heading} by step")
    shown = "".join(
        f"<figure>{image(plots.sheet(pixels), f'samples: {name}')}<figcaption>{html.escape(name)}</figcaption></figure>"
        for name, pixels in _samples(groups, arrays).items()
    )
    order = "Columns: 000, 001, 010, 100 (seen), 011, 101, 110 (level 1), 111 (level 2); shape, colour, size."
    return (
        f"<p class=note>{html.escape(_NOTES[part])}</p><div class=wide>{drawn}</div>"
        f"{table(part_table(column, groups), part)}"
        f"<details><summary>Images</summary><p class=note>{order}</p><div class=panels>{shown}</div></details>"
    )


def _samples(groups: Mapping[str, Sequence[Run]], arrays: Arrays) -> dict[str, NDArray[np.uint8]]:
    """Real images of the factors that were asked for, and the first seed's of each variation, at the last step."""
    names = {ASKED: ASKED} | {label: f"{runs[0]['name']}-seed{runs[0]['seed']}" for label, runs in groups.items()}
    return {label: arrays[name] for label, name in names.items() if name in arrays}


def _circuits(results: Results) -> str:
    groups = {
        name: [run["circuits"] for run in runs if "circuits" in run]
        for name, runs in compared(results).get("jepa", {}).items()
    }
    groups = {name: found for name, found in groups.items() if found}
    if not groups:
        return ""
    bars = drawing(partial(plots.polysemantic, groups=groups), (10.4, 3.4), "Units that matter, by layer")
    maps = "".join(
        f"<figure>{drawing(partial(plots.units, found=found[0]), (5.1, 3.4), f'Effects of units {name}')}"
        f"<figcaption>{html.escape(name)}</figcaption></figure>"
        for name, found in groups.items()
    )
    note = (
        "A unit is an attention head or one of eight groups of an MLP's neurons. Its effect on a factor: how much of "
        "the probes' margin for the side that was asked for is lost when it adds nothing, in percent of the margin, on "
        "seen compositions. It matters if that is above three standard errors. A factor's circuit is the quarter of "
        "the units with the largest effects; the overlap of two by chance is 0.14."
    )
    return (
        f"<p class=note>{note}</p><div class=wide>{bars}</div>{table(circuits_table(results), 'circuits')}"
        f"<div class=panels>{maps}</div>"
    )


def _run(results: Results) -> str:
    pairs = [
        ("scale", str(results["scale"])),
        ("seeds", ", ".join(map(str, results["seeds"]))),
        ("written", str(results["written"])),
        ("time of all jobs", f"{results['job_seconds'] / 60:.0f} min"),
        *((name, str(version)) for name, version in results["versions"].items()),
    ]
    return f"<pre><code>{html.escape(results['command'])}</code></pre>{listed_pairs(pairs)}"


def _poster(figure: "Figure", results: Results, arrays: Arrays) -> None:
    """The picture for a README: level 2 along training, and images below."""
    parts = compared(results)
    groups = parts.get("objectives") or next(iter(parts.values()))
    sheets = {name: plots.sheet(pixels, rows=1) for name, pixels in _samples(groups, arrays).items()}
    grid = figure.add_gridspec(2, 1, height_ratios=(1, 1.7))
    plots.curves(figure.add_subfigure(grid[0]), groups, tuple(LEVELS))
    if sheets:
        plots.sample_sheets(figure.add_subfigure(grid[1]), sheets)
