"""The page of a perception study: one file that shows what was found, frame by frame, before it says it in tables.

It reads what the study left in its folder (results.json, pictures.npz) and writes report.html, which needs nothing
beside it, and report.png for a README. It measures nothing and changes no number.
"""

import html
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rich.console import Group

from compgen_fast.report import perception_pictures as pictures
from compgen_fast.report import perception_plots as plots
from compgen_fast.report import study
from compgen_fast.report.page import PAGE, PICTURE, drawing, listed_pairs, paint, table
from compgen_fast.report.perception_numbers import (
    MEASURES,
    SLOT_ENCODERS,
    decoder_names,
    decoder_table,
    factors_table,
    finding,
    main_table,
    measured,
    other_encoders_table,
    rows,
)
from compgen_fast.report.study import (
    Arrays,
    Results,
    claims_table,
    in_terminal,
    known,
    read_pictures,
    section,
    seeds_of,
    write_page,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME, VERSION = "perception", 1
_NEEDED = (
    "command", "scale", "split", "seeds", "world", "versions", "started", "seconds", "chance", "methods", "decoders",
    "sweeps", "curves", "claims",
)  # fmt: skip


def write(folder: Path) -> Path:
    """Draws the study in ``folder`` and returns the page."""
    results, arrays = read_results(folder), read_pictures(folder, NAME)
    write_page(folder, NAME, "Perception of unseen combinations", lambda: _body(results, arrays), pictures.STYLE)
    paint(partial(_poster, results=results, arrays=arrays), (13, 7.2), folder / PICTURE, dots_per_inch=120)
    return folder / PAGE


def tables(results: Results) -> Group:
    """For a terminal of 80 columns: methods, decoders, claims."""
    methods = (main_table(results), other_encoders_table(results))
    grids = (
        *(grid.only("method", "ID %", "OOD %", "won back", "training s") for grid in methods),
        decoder_table(results).only("decoder", "interaction", "JIS", "composite error"),
        claims_table(results),
    )
    return in_terminal(grids)


def read_results(folder: Path) -> Results:
    return study.read_results(folder, NAME, VERSION, _NEEDED)


def _body(results: Results, arrays: Arrays) -> str:
    order = _best_first(results, arrays)
    return "".join(
        (
            f"<h1>Perception of unseen combinations</h1><p class=finding id=finding>{_unbroken(finding(results))}</p>",
            f"<p class=note>{_unbroken(_setting(results))} {_claims_held(results)}</p>",
            f"<div class=wide>{_chart('OOD accuracy', partial(plots.methods, results=results), (10.4, 4.6))}</div>",
            section("Search, frame by frame", _searches(order, arrays)),
            section("Where search fails", _failures(order, arrays)),
            section("Slots of two images, decoded together", _folds(order, partial(pictures.composites, arrays))),
            section("Claims", table(claims_table(results), "claims")),
            section("Numbers", _numbers(results)),
            section("Other slot encoders", _other_encoders(results)),
            section("The decoders", _measures(results)),
            section("Sweeps", _sweeps(results)),
            section("What was seen in training", _seen(results)),
            section("Training", _curves(results)),
            section("How to run it again", _run(results)),
        )
    )


def _chart(description: str, draw: "Callable[[Axes], None]", size: tuple[float, float] = (3.85, 2.7)) -> str:
    return drawing(lambda figure: draw(figure.subplots()), size, description)


def _panels(charts: Sequence[str]) -> str:
    return f"<div class=panels>{''.join(charts)}</div>" if charts else ""


def _unbroken(text: str) -> str:
    """A number and its % stay on one line."""
    return html.escape(text).replace(" %", "&nbsp;%")


def _setting(results: Results) -> str:
    world = results["world"]
    dots = "; dots are seeds" if len(results["seeds"]) > 1 else ""
    return (
        f"World {world['name']}, {world['resolution']} px, split {results['split']}: each of {world['objects']} "
        f"objects is seen in training with {world['seen_pairs']} of {world['partners']} partners, "
        f"{world['train_images']:,} images. {seeds_of(results)}{dots}."
    )


def _claims_held(results: Results) -> str:
    held = [claim["holds"] for claim in results["claims"] if claim["holds"] is not None]
    return f"<a href=#claims>{sum(held)} of {len(held)} claims hold.</a>" if held else ""


def _best_first(results: Results, arrays: Arrays) -> list[str]:
    """The decoders with pictures, first the one through which unseen combinations are read best."""
    among = rows(results)
    read = {name: [fmean(row.unseen) for row in among if row.decoder == name] for name in pictures.decoders(arrays)}
    return sorted(read, key=lambda name: max(read[name], default=0), reverse=True)


def _folds(order: Sequence[str], draw: Callable[[str], str], opened: int | None = None) -> str:
    """What ``draw`` makes of each decoder, to fold and unfold; the first ``opened`` are open, all if it is None."""
    bodies = [(name, body) for name in order if (body := draw(name))]
    return "".join(
        f"<details{' open' if opened is None or number < opened else ''}>"
        f"<summary>{html.escape(name)} decoder</summary>{body}</details>"
        for number, (name, body) in enumerate(bodies)
    )


def _searches(order: Sequence[str], arrays: Arrays) -> str:
    folds = _folds(order, lambda name: pictures.strips(pictures.searches(arrays, name), pictures.IMAGES), opened=1)
    note = (
        "<p class=note>Images of unseen combinations. Search starts at the encoder's guess and moves the slots until "
        "their decode matches the image. The last picture tints each pixel by the slots it comes from; the curve is "
        "the error, on a log scale.</p>"
    )
    return folds and note + folds


def _failures(order: Sequence[str], arrays: Arrays) -> str:
    def draw(name: str) -> str:
        return pictures.strips(pictures.searches(arrays, f"{name}/failures"), pictures.FAILURES)

    folds = _folds(order, draw, opened=1)
    note = (
        "<p class=note>A low error with a wrong reading: the decoder can draw the image from wrong slots. A high one: "
        "search got stuck, or the decoder cannot draw the image.</p>"
    )
    return folds and note + folds


def _numbers(results: Results) -> str:
    main, factors = main_table(results), factors_table(results)
    return (
        f"<p class=note>{_unbroken(main.title)}. Won back: of what the method's own encoder loses from ID to "
        "OOD. Error: mean squared error of the reconstruction. Training s: seconds of training, of all its parts.</p>"
        f"{table(main, 'methods')}"
        f"<details><summary>{factors.title}</summary>{table(factors, 'factors')}</details>"
    )


def _other_encoders(results: Results) -> str:
    main, others = SLOT_ENCODERS.get(results.get("encoder", "")), table(other_encoders_table(results), "encoders")
    note = f"The same with other networks from features to slots{f'; above: {main}' if main else ''}."
    return others and f"<p class=note>{note}</p>{others}"


def _measures(results: Results) -> str:
    names = decoder_names(results)
    charts = [
        _chart(f"{key} of each decoder", partial(plots.measure, results=results, key=key))
        for key in ("mse", *MEASURES)
        if key == "mse" or any(measured(results, name, key) for name in names)
    ]
    note = (
        "<p class=note>Interaction: of the decoder's curvature, the share that lies across slots; 0 is additive. JIS: "
        "how far each pixel is one slot's; 1 is all its own. J-ARI, FG-ARI: whether slots are objects, by gradients "
        "and by masks. Composite error: of slots of two images decoded together, against what the world draws.</p>"
    )
    return note + _panels(charts) + table(decoder_table(results), "decoders") if names else ""


def _sweeps(results: Results) -> str:
    strength, data_size = (results["sweeps"].get(name) or [] for name in ("strength", "data_size"))
    charts = []
    if strength:
        draw = partial(plots.sweep, points=strength, key="alpha")
        charts.append(_chart("Accuracy by strength of the penalty", draw))
    if known(point["block_hessian_share"] for point in strength):
        draw = partial(plots.sweep_interaction, points=strength)
        charts.append(_chart("Interaction by strength of the penalty", draw))
    if data_size:
        draw = partial(plots.sweep, points=data_size, key="images")
        charts.append(_chart("Accuracy by training images", draw))
    return _panels(charts)


def _seen(results: Results) -> str:
    world, matrix = results["world"], pictures.seen_matrix(results)
    blue = "Blue: seen. Grey: unseen, what OOD images show. " if matrix else ""
    others = " The first seed's are shown; other seeds see others." if matrix and len(results["seeds"]) > 1 else ""
    share = world["seen_pairs"] / world["partners"]
    return f"<p class=note>{blue}{100 * share:.0f} % of the combinations are seen.{others}</p>{matrix}"


def _curves(results: Results) -> str:
    charts = [
        _chart(f"{key} during training", partial(plots.curves, results=results, key=key))
        for key in ("mse", "penalty")
        if any(known(curve.get(key, ())) for curve in results["curves"].values())
    ]
    return _panels(charts)


def _run(results: Results) -> str:
    minutes, seconds = divmod(round(results["seconds"]), 60)
    pairs = [
        ("scale", str(results["scale"])),
        ("seeds", _listed(results["seeds"])),
        ("started", str(results["started"])),
        ("wall clock", f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min {seconds} s"),
        *((f"world: {name.replace('_', ' ')}", _listed(value)) for name, value in results["world"].items()),
        *((name, str(version)) for name, version in results["versions"].items()),
    ]
    return f"<pre><code>{html.escape(results['command'])}</code></pre>{listed_pairs(pairs)}"


def _listed(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _poster(figure: "Figure", results: Results, arrays: Arrays) -> None:
    """The picture for a README: the bars, and one search below."""
    kept = (pictures.searches(arrays, name) for name in _best_first(results, arrays))
    found = next((searches for searches in kept if searches is not None), None)
    if found is None:
        plots.methods(figure.subplots(), results)
        return
    grid = figure.add_gridspec(2, 1, height_ratios=(2.2, 1))
    plots.methods(figure.add_subfigure(grid[0]).subplots(), results)
    pictures.draw_search(figure.add_subfigure(grid[1]), found, pictures.turned_right(found))
