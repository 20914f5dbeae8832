"""The plots of a bump study: errors of decoders, the geometry of their layers, and what the two plans mend.

Each function draws on the axes or the figure it is given, so that the page and the picture for the README show the
same. Errors are told as multiples of a blank image's, which is 1 in every plot.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from compgen_fast.report.page import colour
from compgen_fast.report.study import known
from compgen_fast.worlds.bumps import Bumps

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

    Canvas: TypeAlias = Figure | SubFigure

Entry: TypeAlias = Mapping[str, Any]

SUCCESS = 0.1  # of a blank image's error: what Plan B calls a success
DECODERS = {"mlp": "MLP", "cnn": "CNN"}
ENCODINGS = {
    "bump": colour(0), "ramp": colour(1), "one-hot": colour(2), "thermometer": colour(4), "fourier": "#c9a227",
}  # fmt: skip
REGULARISERS = {"none": colour(5), "entropy": colour(1), "variance": colour(2), "both": colour(0)}
TARGETS = {"stripes": "sum of two stripes", "log": "log of the bump", "bump": "bump"}
OUTSIDE = ("bump",)  # of F_int: no sum of one function per factor
WAYS = {
    "anywhere": ("bumps anywhere", colour(1)),
    "stripes": ("bumps, stripes and white", colour(0)),
    "outside": ("bumps outside the square", colour(3)),
}
LOUD, CALM, GREY = colour(3), colour(0), "#8c8c8c"
TOP = 2.0  # of the scale of error maps, in blank images
_DOT: Mapping[str, Any] = {"marker": "o", "linestyle": "none", "zorder": 4}


# ------------------------------------------------------------------------------------------------ errors


def failure(figure: "Canvas", entries: Sequence[Entry]) -> None:
    """Error ÷ blank by depth, a line per encoding: held out (full) and known (hollow, dashed). A panel per decoder."""
    kinds = [kind for kind in DECODERS if any(entry["decoder"] == kind for entry in entries)]
    depths = {kind: sorted({entry["depth"] for entry in entries if entry["decoder"] == kind}) for kind in kinds}
    axes = figure.subplots(
        1, len(kinds), sharey=True, squeeze=False, width_ratios=[1 + len(depths[kind]) for kind in kinds]
    )[0]
    for ax, kind in zip(axes, kinds, strict=True):
        for entry in entries:
            if entry["decoder"] == kind:
                _depth_dots(ax, entry, depths[kind].index(entry["depth"]))
        _depth_lines(ax, [entry for entry in entries if entry["decoder"] == kind], depths[kind])
        ax.set_xticks(range(len(depths[kind])), [str(depth) for depth in depths[kind]])
        ax.set_xlim(-0.6, len(depths[kind]) - 0.4)
        ax.set_xlabel(f"layers of the {DECODERS[kind]}")
        ax.set_yscale("log")
        _quiet(ax)
        _level(ax, 1, "blank image" if ax is axes[-1] else "")
        _level(ax, SUCCESS, "a tenth" if ax is axes[-1] else "", GREY)
    axes[0].set_ylabel("error ÷ error of a blank image")
    _encoding_key(figure, entries)


def _shift(encoding: str) -> float:
    """Encodings stand side by side."""
    return 0.13 * (list(ENCODINGS).index(encoding) - (len(ENCODINGS) - 1) / 2)


def relative(entry: Entry, part: str) -> tuple[float, ...]:
    """Errors per seed in blank images."""
    return tuple(error / entry["blank"][part] for error in known(entry[part]))


def _depth_dots(ax: "Axes", entry: Entry, at: int) -> None:
    shade, place = ENCODINGS[entry["encoding"]], at + _shift(entry["encoding"])
    unseen, seen = relative(entry, "ood"), relative(entry, "id")
    ax.plot([place] * len(unseen), unseen, color=shade, ms=4.5, **_DOT)
    ax.plot([place] * len(seen), seen, color=shade, ms=4, mfc="none", mew=0.9, **_DOT)


def _depth_lines(ax: "Axes", entries: Sequence[Entry], depths: Sequence[int]) -> None:
    for encoding, shade in ENCODINGS.items():
        found = sorted((entry for entry in entries if entry["encoding"] == encoding), key=lambda entry: entry["depth"])
        places = [depths.index(entry["depth"]) + _shift(encoding) for entry in found]
        for part, style in (("ood", "-"), ("id", ":")):
            means = [fmean(relative(entry, part) or (math.nan,)) for entry in found]
            ax.plot(places, means, style, color=shade, lw=1.1, alpha=0.7)


def _encoding_key(figure: "Canvas", entries: Sequence[Entry]) -> None:
    from matplotlib.lines import Line2D

    keys = [
        Line2D([], [], color=shade, marker="o", ms=5, lw=1.1, label=encoding)
        for encoding, shade in ENCODINGS.items()
        if any(entry["encoding"] == encoding for entry in entries)
    ]
    keys += _part_keys()
    figure.legend(handles=keys, loc="outside upper center", ncols=len(keys), frameon=False, fontsize=10)


def shots(ax: "Axes", entries: Sequence[Entry]) -> None:
    """Error ÷ blank at the held-out positions that were not shown, by how many were."""
    counts = sorted({point["shots"] for entry in entries for point in entry["curve"]})
    for number, entry in enumerate(entries):
        label = f"{DECODERS[entry['decoder']]}, {entry['depth']} layers, {entry['encoding']}"
        dots = [(counts.index(point["shots"]), point["ood"] / entry["blank"]) for point in entry["curve"]]
        dots = [(at, value) for at, value in dots if math.isfinite(value)]
        _through_means(ax, dots, colour(1 - number if number < 2 else number), label)
    ax.set_xticks(range(len(counts)), map(str, counts))
    ax.set_xlabel(f"bumps shown inside the square (of {held_out(28).sum()})")
    ax.set_ylabel("OOD error ÷ blank")
    ax.set_yscale("log")
    _quiet(ax)
    _level(ax, 1, "blank")
    _level(ax, SUCCESS, "a tenth", GREY)
    ax.legend(frameon=False, fontsize=9)


def _through_means(ax: "Axes", dots: Sequence[tuple[float, float]], shade: str, label: str | None = None) -> None:
    places = sorted({at for at, _ in dots})
    ax.plot(places, [fmean(value for at, value in dots if at == here) for here in places], color=shade, lw=1.5)
    ax.plot([at for at, _ in dots], [value for _, value in dots], color=shade, ms=4.5, label=label, **_DOT)


# ------------------------------------------------------------------------------------------------ layers


def factorization(figure: "Canvas", entries: Sequence[Entry], *, font: float = 10) -> None:
    """By layer, a line per depth, panels of decoders below and encodings side by side; dashed as the paper measures."""
    kinds = [kind for kind in DECODERS if any(entry["decoder"] == kind for entry in entries)]
    encodings = [name for name in ENCODINGS if any(entry["encoding"] == name for entry in entries)]
    axes = figure.subplots(len(kinds), len(encodings), squeeze=False, sharey=True)
    for row, kind in zip(axes, kinds, strict=True):
        shades = depth_colours([entry["depth"] for entry in entries if entry["decoder"] == kind])
        for ax, encoding in zip(row, encodings, strict=True):
            among = [entry for entry in entries if (entry["decoder"], entry["encoding"]) == (kind, encoding)]
            by_layer(ax, among, shades, title=f"{DECODERS[kind]}, {encoding}", font=font)
            ax.set_xlabel("layer" if kind == kinds[-1] else "", fontsize=font)
            ax.set_visible(bool(among))
        row[0].set_ylabel("factorization", fontsize=font)
        _depth_key(row[0], shades, font)


def _depth_key(ax: "Axes", shades: Mapping[int, Any], font: float) -> None:
    from matplotlib.lines import Line2D

    keys = [Line2D([], [], color=shade, marker="o", ms=3.2, label=f"{depth} layers") for depth, shade in shades.items()]
    keys.append(Line2D([], [], color=GREY, linestyle="--", lw=1, label="differences"))
    ax.legend(handles=keys, loc="lower left", fontsize=font - 2, frameon=False, handlelength=1.3, labelspacing=0.2)


def by_layer(ax: "Axes", entries: Sequence[Entry], shades: Mapping[int, Any], title: str, font: float = 10) -> None:
    """One panel: means over seeds, input first; a band from the lowest to the highest seed."""
    entries = sorted(entries, key=lambda entry: entry["depth"])
    for entry in entries:
        shade = shades[entry["depth"]]
        means, lowest, highest = _layer_means(entry["factorization"])
        ax.plot(means, "o-", color=shade, ms=3.2, lw=1.4, zorder=3)
        ax.fill_between(range(len(means)), lowest, highest, color=shade, alpha=0.15, lw=0)
        if entry is entries[-1]:
            ax.plot(_layer_means(entry["factorization_on_grid"])[0], "--", color=shade, lw=1, zorder=2)
    layers = max((len(entry["factorization"]) for entry in entries), default=1)
    step = 1 if layers < 7 else 2
    ax.set_xticks(range(0, layers, step), ["in", *map(str, range(step, layers, step))], fontsize=font - 1)
    ax.tick_params(axis="y", labelsize=font - 1)
    ax.set_title(title, fontsize=font)
    _quiet(ax)


def _layer_means(layers: Sequence[Sequence[float | None]]) -> tuple[list[float], list[float], list[float]]:
    """Mean, lowest and highest over seeds of each layer; a layer that was not measured is a gap."""
    values = [known(layer) or (math.nan,) for layer in layers]
    return [fmean(each) for each in values], [min(each) for each in values], [max(each) for each in values]


def depth_colours(depths: Sequence[int]) -> dict[int, Any]:
    """From dark for the shallowest to light for the deepest."""
    from matplotlib import colormaps

    found = sorted(set(depths))
    return {depth: colormaps["plasma"](0.05 + 0.75 * at / max(1, len(found) - 1)) for at, depth in enumerate(found)}


def tuning(figure: "Canvas", layers: Sequence[tuple[str, NDArray[Any]]]) -> None:
    """Two neurons of each layer: the response over positions, its mean over y and its mean over x."""
    neurons = len(layers[0][1])
    axes = figure.subplots(neurons, 3 * len(layers), squeeze=False, width_ratios=[1.15, 1, 1] * len(layers))
    for place, (name, maps) in enumerate(layers):
        for row, response in zip(axes, maps.astype(float), strict=True):
            shown, over_y, over_x = row[3 * place : 3 * place + 3]
            heat(shown, response, "viridis", split="square")
            over_y.plot(response.mean(0), color=colour(0), lw=1.6)
            over_x.plot(response.mean(1), color=colour(1), lw=1.6)
            over_x.sharey(over_y)
            over_x.tick_params(labelleft=False)
            for ax in (over_y, over_x):
                ax.set_box_aspect(1)
                ax.set_xticks([0, 14, 27])
                ax.tick_params(labelsize=8)
                _mark_held(ax, len(response))
                _quiet(ax)
        for ax, title in zip(axes[0, 3 * place :], (name, "mean over y", "mean over x"), strict=False):
            ax.set_title(title, fontsize=10)
        axes[-1, 3 * place + 1].set_xlabel("x", fontsize=9)
        axes[-1, 3 * place + 2].set_xlabel("y", fontsize=9)


def _mark_held(ax: "Axes", size: int) -> None:
    """A shade over the positions of the held-out square."""
    inside = np.flatnonzero(held_out(size).any(0))
    ax.axvspan(inside[0] - 0.5, inside[-1] + 0.5, color="#8882", lw=0, zorder=0)


# ------------------------------------------------------------------------------------------------ maps


@dataclass(frozen=True)
class Picture:
    """A map over positions or an image: what it is called, its colours and their range, and the split it outlines."""

    title: str
    pixels: NDArray[Any]
    colours: str = "magma"
    low: float | None = 0.0
    high: float | None = TOP
    split: str | None = "square"


def error_map(title: str, errors: NDArray[Any], blank: float, split: str = "square") -> Picture:
    """Errors over positions, in blank images."""
    return Picture(title, errors.astype(float) / blank, split=split)


def bump_image(title: str, pixels: NDArray[Any]) -> Picture:
    """From 0 to 1, as its square root: what decoders make of unseen positions is often faint."""
    return Picture(title, np.sqrt(pixels.astype(float).clip(0, 1)), "gray", 0.0, 1.0, None)


def volume_map(title: str, volumes: NDArray[Any]) -> Picture:
    """Each layer has its own range, told in the title, and at least half a decade, lest rounding look like a shape."""
    values = volumes.astype(float)
    middle, reach = (values.max() + values.min()) / 2, max(0.25, (values.max() - values.min()) / 2)
    told = f"{title}\n{values.min():.1f} … {values.max():.1f}"
    return Picture(told, values, "viridis", middle - reach, middle + reach)


def pictures(
    figure: "Canvas", rows: Sequence[Sequence[Picture]], names: Sequence[str] = (), bar: str = "", font: float = 10
) -> None:
    """Rows of maps, each row with a name to its left, and a bar for their colours if it has a title."""
    width = max(map(len, rows))
    axes = figure.subplots(len(rows), width, squeeze=False)
    shown = None
    for row, line in zip(axes, rows, strict=True):
        for ax in row[len(line) :]:
            ax.set_axis_off()
        for ax, picture in zip(row, line, strict=False):
            shown = heat(ax, picture.pixels, picture.colours, picture.low, picture.high, picture.split)
            ax.set_title(picture.title, fontsize=font - 1)
    for row, name in zip(axes, names, strict=False):
        row[0].set_ylabel(name, fontsize=font)
    if bar and shown is not None:
        tall = min(2, len(rows))
        drawn = figure.colorbar(shown, ax=axes, shrink=0.9 * tall / len(rows), aspect=11 * tall, extend="max")
        drawn.set_label(bar, fontsize=font)
        drawn.ax.tick_params(labelsize=font - 1)


def asked_and_made(
    figure: "Canvas", asked: NDArray[Any], made: NDArray[Any], errors: Picture, name: str, font: float
) -> None:
    """A row of true images, below it what a decoder made of them, and the map of its errors beside both."""
    grid = figure.add_gridspec(2, 4)
    for row, (title, images) in enumerate((("asked for", asked), (name, made))):
        for column, pixels in enumerate(images[:2]):
            ax = figure.add_subplot(grid[row, column])
            heat(ax, bump_image("", pixels).pixels, "gray", 0, 1)
            ax.set_ylabel(title if column == 0 else "", fontsize=font)
    ax = figure.add_subplot(grid[:, 2:])
    heat(ax, errors.pixels, errors.colours, errors.low, errors.high, errors.split)
    ax.set_title(errors.title, fontsize=font)


def heat(
    ax: "Axes", pixels: NDArray[Any], colours: str, low: float | None = None, high: float | None = None,
    split: str | None = None,
) -> Any:  # fmt: skip
    """One map [y, x], rows downwards as in an image, with what its split holds out inside a line."""
    shown = ax.imshow(pixels, cmap=colours, vmin=low, vmax=high, interpolation="none")
    ax.set_xticks([])
    ax.set_yticks([])
    ax.spines[:].set_visible(False)
    if split is not None:
        outline(ax, held_out(len(pixels), split))
    return shown


def held_out(size: int, split: str = "square") -> NDArray[np.bool_]:
    """[y, x], True where training never has a bump."""
    return Bumps(size).held_out(split)


def outline(ax: "Axes", held: NDArray[np.bool_]) -> None:
    from matplotlib.patches import Rectangle

    inside = np.flatnonzero(held.any(0))
    first, side = inside[0] - 0.5, len(inside)
    ax.add_patch(Rectangle((first, first), side, side, fill=False, ec="#5fd0ff", lw=1.1, ls=(0, (3, 2)), clip_on=False))


# ------------------------------------------------------------------------------------------------ plans


def regularisers(ax: "Axes", tokens: Entry, font: float = 10) -> None:
    """Plan A: errors of each choice of regularisers in blank images, bars at the means and a dot per seed."""
    groups = [
        (name, [_parts(outcome, tokens["blank"]) for outcome in tokens["outcomes"] if outcome["regulariser"] == name])
        for name in REGULARISERS
    ]
    _pairs_of_dots(ax, groups, list(REGULARISERS.values()), font)
    _level(ax, 1, "blank", font=font)
    ax.set_xlabel("regularisers of the tokens", fontsize=font)
    ax.set_ylabel("error ÷ blank", fontsize=font)
    ax.legend(
        handles=_part_keys(), loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False, fontsize=font - 1,
        handletextpad=0.1,
    )  # fmt: skip


def _part_keys() -> list[Any]:
    from matplotlib.lines import Line2D

    return [
        Line2D([], [], color=GREY, ms=5, **_DOT, label="held out (OOD)"),
        Line2D([], [], color=GREY, ms=5, mfc="none", **_DOT, label="known (ID)"),
    ]


def _parts(outcome: Entry, unseen: float, seen: float | None = None) -> tuple[float, float]:
    return outcome["ood"] / unseen, outcome["id"] / (seen or unseen)


def _pairs_of_dots(
    ax: "Axes", groups: Sequence[tuple[str, Sequence[tuple[float, float]]]], shades: Sequence[str], font: float
) -> None:
    """OOD full with a stroke and a number at the mean, ID hollow to its right; on a log scale."""
    ax.set_yscale("log")
    for at, ((_, pairs), shade) in enumerate(zip(groups, shades, strict=True)):
        unseen, seen = (known(part) for part in zip(*pairs, strict=True)) if pairs else ((), ())
        if not unseen:
            continue
        spread = np.linspace(-0.07, 0.07, len(unseen)) if len(unseen) > 1 else np.zeros(1)
        mean = fmean(unseen)
        ax.plot(at - 0.12 + spread, unseen, color=shade, ms=6, **_DOT)
        ax.plot([at - 0.28, at + 0.04], [mean] * 2, color=shade, lw=2.2, zorder=3)
        ax.plot(at + 0.24 + spread[: len(seen)], seen, color=shade, ms=5, mfc="none", **_DOT)
        ax.annotate(
            _short(mean), (at - 0.12, max(unseen)), (0, 6), textcoords="offset points", ha="center", fontsize=font,
            fontweight="bold",
        )  # fmt: skip
    ax.set_xticks(range(len(groups)), [label for label, _ in groups], fontsize=font)
    ax.set_xlim(-0.6, len(groups) - 0.4)
    ax.tick_params(axis="x", length=0)
    ax.tick_params(axis="y", labelsize=font - 1)
    ax.margins(y=0.14)
    _quiet(ax)


def penalty(ax: "Axes", entries: Sequence[Entry], font: float = 10) -> None:
    """OOD error of each target in mean images, without the interaction penalty and with it."""
    found = {entry["target"]: entry for entry in entries}
    groups, shades = [], []
    for target in TARGETS:
        for penalised in (False, True):
            entry = found.get(target, {"outcomes": (), "mean_image": {"ood": 1, "id": 1}})
            level = entry["mean_image"]
            pairs = [
                _parts(outcome, level["ood"], level["id"])
                for outcome in entry["outcomes"]
                if outcome["penalised"] == penalised
            ]
            groups.append(("with" if penalised else "without", pairs))
            shades.append(CALM if penalised else GREY)
    _pairs_of_dots(ax, groups, shades, font)
    for at, (target, label) in enumerate(TARGETS.items()):
        text = f"{label},\n{'outside' if target in OUTSIDE else 'inside'} F_int"
        ax.text(2 * at + 0.5, 1.02, text, transform=ax.get_xaxis_transform(), ha="center", va="bottom", fontsize=font)
        if at:
            ax.axvline(2 * at - 0.5, color="#8886", lw=0.8)
    _level(ax, 1, "mean\nimage", font=font)
    ax.set_xlabel("the interaction penalty", fontsize=font)
    ax.set_ylabel("error ÷ mean image's", fontsize=font)


def scaling(ax: "Axes", results: Entry, font: float = 10) -> None:
    """Plan B: the least number of bumps by N, a dot per seed, with fitted lines; a cross where all were not enough."""
    sizes = sorted({entry["size"] for entry in results["thresholds"]})
    ax.set_xscale("log")
    ax.set_yscale("log")
    for place, (way, (label, shade)) in enumerate(WAYS.items()):
        among = [entry for entry in results["thresholds"] if entry["way"] == way]
        fit = results["exponents"].get(way)
        told = f"{label}: N^{fit['exponent']:.2f} ({fit['low']:.2f} to {fit['high']:.2f})" if fit else label
        if among:
            _thresholds(ax, among, shade, told, 1 + 0.008 * (place - 1))
        if fit:
            factor = _factor(among, fit)
            ax.plot(sizes, [factor * size ** fit["exponent"] for size in sizes], color=shade, lw=1.6, zorder=3)
    _references(ax, results, sizes, font)
    ax.set_xlim(sizes[0] / 1.06, sizes[-1] * 1.14)
    ax.set_xticks(sizes, map(str, sizes), fontsize=font - 1)
    ax.set_xticks([], minor=True)
    ax.tick_params(axis="y", labelsize=font - 1)
    ax.set_xlabel("side of the image, N", fontsize=font)
    ax.set_ylabel("bumps needed", fontsize=font)
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1), frameon=False, fontsize=font - 1, handletextpad=0.2)
    _quiet(ax)


def _thresholds(ax: "Axes", among: Sequence[Entry], shade: str, label: str, shift: float) -> None:
    needed = [(entry["size"], bumps) for entry in among for bumps in entry["needed"] if bumps]
    never = [(entry["size"], entry["most"]) for entry in among for bumps in entry["needed"] if not bumps]
    spread = _apart(needed)
    ax.plot(
        [shift * at * size for (size, _), at in zip(needed, spread, strict=True)], [bumps for _, bumps in needed],
        color=shade, ms=5.5, label=label if needed else None, **_DOT,
    )  # fmt: skip
    told = None if needed else f"{label}: never, with all of them"
    ax.plot([size for size, _ in never], [most for _, most in never], "x", color=shade, ms=7, mew=2, label=told)


def _apart(points: Sequence[tuple[float, float]]) -> list[float]:
    """Factors that set equal points side by side."""
    seen: dict[tuple[float, float], int] = {}
    factors = []
    for point in points:
        seen[point] = seen.get(point, -1) + 1
        factors.append(1 + 0.012 * ((seen[point] + 1) // 2) * (-1) ** seen[point])
    return factors


def _factor(among: Sequence[Entry], fit: Entry) -> float:
    """What the line N^exponent is multiplied by, from the points if the fit does not tell."""
    if "factor" in fit:
        return float(fit["factor"])
    logs = [math.log(bumps) - fit["exponent"] * math.log(entry["size"])
            for entry in among for bumps in entry["needed"] if bumps]  # fmt: skip
    return math.exp(fmean(logs))


def _references(ax: "Axes", results: Entry, sizes: Sequence[int], font: float) -> None:
    """N, N² and N³ from one point below all others."""
    least = min(
        (bumps for entry in results["thresholds"] for bumps in entry["needed"] if bumps), default=10
    )  # fmt: skip
    for power, name in ((1, "N"), (2, "N²"), (3, "N³")):
        heights = [0.15 * least * (size / sizes[0]) ** power for size in sizes]
        ax.plot(sizes, heights, ":", color=GREY, lw=1, zorder=1)
        ax.annotate(
            name, (sizes[-1], heights[-1]), (4, 0), textcoords="offset points", va="center", fontsize=font - 1,
            color=GREY,
        )  # fmt: skip


# ------------------------------------------------------------------------------------------------ shared


def _short(value: float) -> str:
    """Two digits, without a power of ten where none is needed: 1.4, 0.053, 3e-4."""
    return f"{value:.2g}" if value >= 1e-3 else f"{value:.0e}".replace("e-0", "e-")


def _level(ax: "Axes", height: float, name: str, shade: str = LOUD, font: float = 10) -> None:
    ax.axhline(height, linestyle="--", linewidth=1, color=shade, zorder=2)
    ax.annotate(
        name, (1, height), (3, 0), xycoords=("axes fraction", "data"), textcoords="offset points", va="center",
        color=shade, fontsize=font - 1,
    )  # fmt: skip


def _quiet(ax: "Axes") -> None:
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="y", color="#8883", linewidth=0.6, zorder=0)
    ax.set_axisbelow(True)
