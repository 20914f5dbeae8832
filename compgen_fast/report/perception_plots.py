"""The plots of a perception study: bars of the methods, measures of the decoders, sweeps and training curves.

Each function draws on axes it is given, so that the page and the picture for the README show the same.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from compgen_fast.report.page import colour
from compgen_fast.report.perception_numbers import (
    INFERENCES,
    MEASURES,
    Row,
    chance,
    decoder_names,
    measured,
    rows,
    spoken,
)
from compgen_fast.report.study import Results, known, place

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {
    "supervised": "#a6a6a6", "supervised_longer": "#6f6f6f", "encoder": colour(0), "search": colour(1),
    "newton": "#f3bd8b", "replay": colour(2), "replay+search": colour(4),
}  # fmt: skip
DECODER_COLOURS = {
    "unconstrained": "#8c8c8c", "unconstrained+hessian": "#c9a227", "apart": colour(3), "attention": colour(0),
    "hessian": colour(2), "additive": colour(1),
}  # fmt: skip
_OTHER = colour(6)
_CHANCE = "#d0453a"
_STEP, _GAP = 0.8, 0.9  # from bar to bar, and the room between groups
_DOTS: Mapping[str, Any] = {"color": "white", "mec": "#333333", "mew": 0.8, "zorder": 4}


def methods(ax: "Axes", results: Results) -> None:
    """OOD accuracy as bars grouped by decoder, ID as an outline, a dot per seed, and a line at chance."""
    from matplotlib.patches import Patch

    among = rows(results)
    places = _places(among)
    for at, row in zip(places, among, strict=True):
        _bar(ax, at, row)
    level = 100 * chance(results)
    ax.axhline(level, linestyle="--", linewidth=1, color=_CHANCE, zorder=3)
    ax.annotate(
        "chance", (1, level), (4, 0), xycoords=("axes fraction", "data"), textcoords="offset points", va="center",
        color=_CHANCE, fontsize=9,
    )  # fmt: skip
    _name_groups(ax, among, places)
    kinds = sorted({_kind(row) for row in among}, key=lambda kind: place(tuple(COLOURS), kind))
    keys = [Patch(color=COLOURS.get(kind, _OTHER), label=spoken(kind)) for kind in kinds]
    keys.append(Patch(fill=False, edgecolor="#888888", label="in seen combinations (ID)"))
    ax.legend(
        handles=keys, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=(len(keys) + 1) // 2, frameon=False,
        fontsize=10,
    )  # fmt: skip
    ax.set_ylim(0, 108)
    ax.set_ylabel("objects read in unseen combinations, %")
    _quiet(ax)


def _bar(ax: "Axes", at: float, row: Row) -> None:
    dots = [100 * value for value in row.unseen]
    ax.bar(at, fmean(dots), 0.7, color=COLOURS.get(_kind(row), _OTHER), zorder=2)
    ax.bar(at, 100 * fmean(row.seen), 0.7, fill=False, edgecolor="#8889", linewidth=0.8, zorder=1)
    if len(dots) > 1:
        ax.plot(at + np.linspace(-0.16, 0.16, len(dots)), dots, "o", ms=4, **_DOTS)
    ax.annotate(
        f"{fmean(dots):.0f}", (at, max(dots)), (0, 4), textcoords="offset points", ha="center", fontsize=10,
        fontweight="bold", zorder=5,
    )  # fmt: skip


def _kind(row: Row) -> str:
    return row.method if row.decoder is None else row.inference


def _places(among: Sequence[Row]) -> list[float]:
    """Bars side by side, a gap before each new decoder."""
    places: list[float] = []
    for number, row in enumerate(among):
        gap = _GAP if number and row.decoder != among[number - 1].decoder else 0
        places.append(places[-1] + _STEP + gap if number else 0)
    return places


def _name_groups(ax: "Axes", among: Sequence[Row], places: Sequence[float]) -> None:
    groups: dict[str, list[float]] = {}
    for at, row in zip(places, among, strict=True):
        groups.setdefault("no\ndecoder" if row.decoder is None else row.decoder.replace("+", "\n+ "), []).append(at)
    ax.set_xticks([fmean(group) for group in groups.values()], list(groups), fontsize=10)
    ax.tick_params(axis="x", length=0)


def measure(ax: "Axes", results: Results, key: str) -> None:
    """One measure of all decoders: the mean as a bar, a dot per seed. ``mse`` shows ID and OOD side by side."""
    names = decoder_names(results)
    parts = ("id", "ood") if key == "mse" else (None,)
    for middle, name in enumerate(names):
        for number, part in enumerate(parts):
            values = measured(results, name, key, part)
            at, width = middle + 0.36 * (number - (len(parts) - 1) / 2), 0.7 / len(parts)
            if values:
                shade = 0.45 if part == "id" else 1.0
                ax.bar(at, fmean(values), width, color=DECODER_COLOURS.get(name, _OTHER), alpha=shade, zorder=2)
            if len(values) > 1:
                ax.plot([at] * len(values), values, "o", ms=3, **_DOTS)
    ax.set_xticks(range(len(names)), map(spoken, names), fontsize=8, rotation=25, ha="right", rotation_mode="anchor")
    ax.set_title("reconstruction error (pale ID, full OOD)" if key == "mse" else MEASURES[key][0], fontsize=10)
    _quiet(ax)


def sweep(ax: "Axes", points: Sequence[Mapping[str, Any]], key: str) -> None:
    """Accuracy along a sweep over ``key``: OOD as a line through the means, ID dashed, a dot per seed."""
    _along(ax, points, key)
    kinds = {kind for point in points for kind in point["accuracy"]}
    for kind in sorted(kinds, key=lambda kind: place(("supervised", *INFERENCES), kind)):
        for part, style, dots in (("ood", "-", "o"), ("id", "--", "")):
            pairs = [(point[key], 100 * point["accuracy"][kind][part]) for point in points if kind in point["accuracy"]]
            _through_means(ax, pairs, COLOURS.get(kind, _OTHER), style, dots, spoken(kind) if dots else None)
    ax.set_ylim(0, 104)
    ax.set_ylabel("objects read, %  (dashed: ID)")
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=len(kinds), frameon=False, fontsize=9)


def sweep_interaction(ax: "Axes", points: Sequence[Mapping[str, Any]]) -> None:
    """What the strength of the penalty does to the interaction it punishes."""
    _along(ax, points, "alpha")
    shares = [(point["alpha"], share) for point in points for share in known([point["block_hessian_share"]])]
    _through_means(ax, shares, colour(0), "-", "o", None)
    ax.set_ylim(bottom=0)
    ax.set_ylabel(MEASURES["block_hessian_share"][0])


def _through_means(
    ax: "Axes", pairs: Sequence[tuple[float, float]], shade: str, style: str, dots: str, label: str | None
) -> None:
    places = sorted({at for at, _ in pairs})
    means = [fmean(value for at, value in pairs if at == here) for here in places]
    ax.plot(places, means, style, color=shade, lw=1.6 if dots else 0.9, label=label)
    if dots:
        ax.plot(*zip(*pairs, strict=True), dots, color=shade, ms=3.5)


def _along(ax: "Axes", points: Sequence[Mapping[str, Any]], key: str) -> None:
    """Both sweeps go by factors; a strength may also be 0, which gets a place of its own left of the others."""
    places = sorted({point[key] for point in points})
    above = [at for at in places if at > 0]
    if above and len(above) < len(places):
        ax.set_xscale("symlog", linthresh=above[0], linscale=0.5)
    elif above:
        ax.set_xscale("log")
    ax.set_xticks(places, [f"{at:,.0f}" if at >= 1000 else f"{at:g}" for at in places], fontsize=9)
    ax.set_xticks([], minor=True)
    ax.set_xlabel({"alpha": "strength of the penalty, α", "images": "training images"}[key])
    _quiet(ax)


def curves(ax: "Axes", results: Results, key: str) -> None:
    """``key`` over the steps of training, a line per decoder and seed."""
    labelled, lowest = set(), np.inf
    for run, curve in results["curves"].items():
        decoder = run.split("/")[0]
        values = np.array(curve.get(key, ()), dtype=float)  # null becomes NaN, which is a gap in the line
        if not np.isfinite(values).any():
            continue
        label = None if decoder in labelled else decoder
        labelled.add(decoder)
        lowest = min(lowest, np.nanmin(values))
        ax.plot(curve["step"], values, lw=1.2, color=DECODER_COLOURS.get(decoder, _OTHER), label=label)
    if lowest > 0:
        ax.set_yscale("log")
    ax.set_title({"mse": "reconstruction error", "penalty": "interaction penalty"}[key], fontsize=10)
    ax.set_xlabel("step")
    ax.legend(frameon=False, fontsize=8)
    _quiet(ax)


def _quiet(ax: "Axes") -> None:
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="y", color="#8883", linewidth=0.6, zorder=0)
    ax.set_axisbelow(True)
