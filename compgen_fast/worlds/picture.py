"""Draws a split: seen samples on the left, unseen ones on the right, and the matrix of what is seen beside them."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from compgen_fast.worlds.world import Matrix, Part, World

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROWS, COLUMNS = 6, 5
_LEVELS = ("cannot occur", "seen", "unseen", "unseen, level 2")
_COLOURS = ("#f2f2f2", "#2b6cb0", "#e8893a", "#b83227")
_NAMED = 24  # more names than this along an axis are drawn as every so many


def show(
    world: World,
    split: str | None = None,
    *,
    path: str | Path,
    seen_pairs: int | None = None,
    parts: tuple[str, str] = ("train", "ood"),
) -> Path:
    """Draws ``split`` of ``world`` (its first if None) as a PNG at ``path``, and returns the path."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    target = Path(path)
    if not target.parent.is_dir():
        raise ValueError(f"{target}: the folder {target.parent} does not exist; create it first")
    split = world.splits[0] if split is None else split
    matrix = world.matrix(split, seen_pairs)
    figure = Figure(figsize=(17, 7.2), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    halves = figure.add_gridspec(1, 2, width_ratios=(2.1, 1))
    left, right = (figure.add_subfigure(halves[half]) for half in (0, 1))  # long names take no room from the images
    for ax, part in zip(left.subplots(1, 2), parts, strict=True):
        _draw_samples(ax, world.split(split, part, seen_pairs=seen_pairs))
    _draw_matrix(right.subplots(), matrix)
    figure.suptitle(f"{world.name}: split {split}, {world.resolution} px, seed {world.seed}", fontsize=16)
    figure.savefig(target, format="png", dpi=100)
    return target


def _draw_samples(ax: "Axes", part: Part) -> None:
    """The first samples, which are in shuffled order, as one picture; fewer where there are fewer."""
    images = part.samples(np.arange(min(len(part), ROWS * COLUMNS))).images
    ax.imshow(_tiled(images), interpolation="nearest")
    ax.set_title(f"{part.part}: {'unseen' if part.unseen else 'seen'} combinations", fontsize=14)
    ax.set_axis_off()


def _tiled(images: NDArray[np.uint8], gap: int = 2) -> NDArray[np.uint8]:
    count, size = images.shape[:2]
    sheet = np.full((ROWS * COLUMNS, size + gap, size + gap, 3), 255, dtype=np.uint8)
    sheet[:count, :size, :size] = images
    rows = sheet.reshape(ROWS, COLUMNS, size + gap, size + gap, 3).swapaxes(1, 2)
    return rows.reshape(ROWS * (size + gap), COLUMNS * (size + gap), 3)[:-gap, :-gap]


def _draw_matrix(ax: "Axes", matrix: Matrix) -> None:
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    ax.imshow(matrix.level, cmap=ListedColormap(_COLOURS), vmin=-1, vmax=2, aspect="auto", interpolation="nearest")
    for axis, names in ((ax.yaxis, matrix.rows), (ax.xaxis, matrix.columns)):
        step = -(-len(names) // _NAMED)
        axis.set_ticks(np.arange(0, len(names), step), names[::step])
        axis.set_ticks(np.arange(1, len(names)) - 0.5, minor=True)
    ax.tick_params(axis="x", rotation=90 if len(matrix.columns) > 8 and max(map(len, matrix.columns)) > 2 else 0)
    ax.grid(which="minor", color="white", linewidth=1.5 if max(matrix.level.shape) <= _NAMED else 0.3)
    ax.tick_params(which="both", length=0)
    ax.set_xlabel(matrix.column, fontsize=12)
    ax.set_ylabel(matrix.row, fontsize=12)
    for spine in ax.spines.values():
        spine.set_visible(False)
    keys: list[Any] = [Patch(color=_COLOURS[level + 1], label=_LEVELS[level + 1]) for level in np.unique(matrix.level)]
    ax.legend(handles=keys, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(keys), frameon=False, fontsize=12)
