"""The drawings of a generation study: curves along training, samples, and heads.

Each function draws on a figure it is given, so that the page and the picture for the README show the same.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from compgen_fast.report.generation_numbers import COMPOSITIONS, FACTORS, LEVELS, Run, level
from compgen_fast.report.page import colour

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

GAP = 2  # pixels between images


def curves(figure: "Figure | SubFigure", groups: Mapping[str, Sequence[Run]], levels: Sequence[str]) -> None:
    """Shares of images along training, a panel for each level; the band is from the worst seed to the best."""
    axes = figure.subplots(1, len(levels), sharey=True, squeeze=False)[0]
    for ax, name in zip(axes, levels, strict=True):
        for number, (label, runs) in enumerate(groups.items()):
            _curve(ax, label, runs, LEVELS[name], colour(number))
        ax.set_title(name, fontsize=11)
        ax.set_xlabel("step")
        ax.set_ylim(-2, 102)
        ax.grid(alpha=0.25, linewidth=0.6)
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("images as asked for, %")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(5, len(labels)), frameon=False, fontsize=10)


def _curve(ax: "Axes", label: str, runs: Sequence[Run], compositions: Sequence[str], ink: str) -> None:
    steps = [point["step"] for point in runs[0]["curve"]]
    shares = np.array([[100 * level(point, compositions) for point in run["curve"]] for run in runs])
    ax.plot(steps, shares.mean(0), color=ink, label=label, linewidth=1.8)
    if len(runs) > 1:
        ax.fill_between(steps, shares.min(0), shares.max(0), color=ink, alpha=0.18, linewidth=0)


def sheet(samples: NDArray[np.uint8], rows: int = 3, scale: int = 2) -> NDArray[np.uint8]:
    """Images [8, n, H, W, 3] side by side, the compositions as columns; larger by ``scale``."""
    some = samples[:, :rows].repeat(scale, 2).repeat(scale, 3)
    framed = np.pad(some, ((0, 0), (0, 0), (GAP, GAP), (GAP, GAP), (0, 0)), constant_values=255)
    joined: NDArray[np.uint8] = np.concatenate(np.concatenate(framed, axis=2), axis=0)
    return joined


def sample_sheets(figure: "Figure | SubFigure", sheets: Mapping[str, NDArray[np.uint8]]) -> None:
    """One row of images for each variation, the compositions above."""
    axes = figure.subplots(len(sheets), 1, squeeze=False)[:, 0]
    for ax, (name, pixels) in zip(axes, sheets.items(), strict=True):
        ax.imshow(pixels, interpolation="nearest")
        ax.set_yticks([])
        ax.set_xticks([])
        ax.set_ylabel(name, rotation=0, ha="right", va="center", fontsize=10)
        ax.spines[:].set_visible(False)
    width = pixels.shape[1] / len(COMPOSITIONS)
    axes[0].xaxis.set_ticks_position("top")
    axes[0].set_xticks([width * (number + 0.5) for number in range(len(COMPOSITIONS))], _titles(), fontsize=10)
    axes[0].tick_params(length=0)


def _titles() -> list[str]:
    names = {name: title for title, group in LEVELS.items() for name in group}
    return [f"{name}\n{names[name]}" for name in COMPOSITIONS]


def polysemantic(figure: "Figure | SubFigure", groups: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """By layer, how many units matter, and to several factors, the mean over seeds; and how circuits overlap."""
    left, right = figure.subplots(1, 2, width_ratios=(3, 1))
    for number, (label, found) in enumerate(groups.items()):
        some, several = (np.mean([each[key] for each in found], axis=0) for key in ("mattering", "polysemantic"))
        layers, offset = np.arange(1, len(some) + 1), 0.38 * (number - (len(groups) - 1) / 2)
        left.bar(layers + offset, some, 0.36, color=colour(number), alpha=0.35, label=f"{label}: matter")
        left.bar(layers + offset, several, 0.36, color=colour(number), label=f"{label}: to several factors")
        overlaps = [each["overlap"] for each in found]
        right.bar(number, np.mean(overlaps), 0.7, color=colour(number))
        right.plot([number] * len(overlaps), overlaps, "o", color="white", mec="#333333", ms=4)
    left.set_xlabel("layer")
    left.set_ylabel("units")
    left.legend(frameon=False, fontsize=9)
    right.set_xticks(range(len(groups)), list(groups), fontsize=9)
    right.set_ylabel("overlap of circuits (Jaccard)")
    for ax in (left, right):
        ax.spines[["top", "right"]].set_visible(False)


def units(figure: "Figure | SubFigure", found: Mapping[str, Any]) -> None:
    """The effect of every unit on every factor: layers down; across, heads and then groups of neurons."""
    effects, heads = 100 * np.array(found["effects"]), found["heads"]
    most = max(1.0, float(np.abs(effects).max()))
    for number, (ax, name) in enumerate(zip(figure.subplots(1, len(FACTORS), sharey=True), FACTORS, strict=True)):
        shown = ax.imshow(effects[..., number], cmap="RdBu_r", vmin=-most, vmax=most, aspect="auto")
        ax.set_title(name, fontsize=10)
        ax.axvline(heads - 0.5, color="#333333", lw=0.8)
        ax.set_xticks([(heads - 1) / 2, (heads + effects.shape[1] - 1) / 2], ["heads", "neurons"])
        ax.tick_params(axis="x", length=0)
        if number == 0:
            ax.set_yticks(range(len(effects)), range(1, len(effects) + 1))
            ax.set_ylabel("layer")
    figure.colorbar(shown, ax=figure.axes, label="margin lost, %", shrink=0.8)
