"""The page of a training run: its curves, its settings, and for a slot VAE images beside what the model makes of them.

It reads what the run left (metrics.jsonl, config.json, the validation images it is handed) and writes report.html and
report.png into the run's folder.
"""

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compgen_fast.models.slot_vae import SlotVAE
from compgen_fast.train.metrics import Row, read

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAGE, PICTURE = "report.html", "report.png"
IMAGES = 8
PALETTE = np.array(
    [(43, 108, 176), (232, 137, 58), (64, 145, 108), (184, 50, 39), (122, 81, 149), (140, 140, 140), (214, 180, 60)]
)
CURVES = ("loss", "validation_loss", "mse", "validation_mse", "penalty", "kl")


def write(folder: Path, model: torch.nn.Module, images: Tensor) -> Path:
    """Draws the run in ``folder``; ``images`` uint8 [n, H, W, 3] are shown with their reconstructions."""
    rows = read(folder)
    _draw(folder / PICTURE, rows, _sheets(model, images[:IMAGES]) if isinstance(model, SlotVAE) else {})
    settings = html.escape((folder / "config.json").read_text())
    (folder / PAGE).write_text(
        f"<!doctype html><meta charset=utf-8><title>{html.escape(folder.name)}</title>"
        "<style>body{font:16px system-ui;max-width:70em;margin:2em auto}img{max-width:100%}td{padding:0 1ex}</style>"
        f"<h1>{html.escape(folder.name)}</h1><img src={PICTURE} alt='curves and reconstructions'>"
        f"<h2>The last step</h2><table>{_table(rows[-1])}</table>"
        f"<h2>Settings</h2><details><summary>config.json</summary><pre>{settings}</pre></details>"
    )
    return folder / PAGE


def _table(row: Mapping[str, Any]) -> str:
    return "".join(
        f"<tr><td>{html.escape(name)}<td>{value:.6g}" for name, value in row.items() if isinstance(value, int | float)
    )


@torch.no_grad()
def _sheets(model: SlotVAE, images: Tensor) -> dict[str, NDArray[np.uint8]]:
    """Rows of pictures by title."""
    mean, _ = model.encode(images)
    sheets = {"images": images, "as decoded from their slots": model.reconstruct(images)}
    with_masks: Any = getattr(model.decoder, "decode_with_masks", None)
    if with_masks is not None:
        _, masks = with_masks(mean)
        sheets["which slot each pixel looks at"] = _coloured(masks, images.shape[1])
    return {title: np.concatenate([*sheet.cpu().numpy()], axis=1) for title, sheet in sheets.items()}


def _coloured(masks: Tensor, size: int) -> Tensor:
    """Shares [B, K, N] as colours [B, size, size, 3]: each slot's colour, mixed by its share."""
    colours = torch.from_numpy(PALETTE[np.arange(masks.shape[1]) % len(PALETTE)]).to(masks)
    mixed = torch.einsum("bkn,kc->bnc", masks, colours)
    return mixed.round().to(torch.uint8).view(-1, size, size, 3)


def _draw(path: Path, rows: Sequence[Row], sheets: Mapping[str, NDArray[np.uint8]]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 7), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(1, 2, width_ratios=(1, 1.4 if sheets else 0.01))
    left, right = (figure.add_subfigure(grid[half]) for half in (0, 1))
    shown = [name for name in CURVES if any(name in row for row in rows)] or ["loss"]
    pairs = [name for name in shown if not name.startswith("validation_")]
    for ax, name in zip(left.subplots(len(pairs), 1, sharex=True, squeeze=False)[:, 0], pairs, strict=True):
        _curve(ax, rows, name)
        ax.set_ylabel(name)
    ax.set_xlabel("step")
    for number, (title, sheet) in enumerate(sheets.items(), 1):
        ax = right.add_subplot(len(sheets), 1, number)
        ax.imshow(sheet, interpolation="nearest")
        ax.set_title(title)
        ax.set_axis_off()
    figure.savefig(path, format="png", dpi=90)


def _curve(ax: "Axes", rows: Sequence[Row], name: str) -> None:
    for key, style in ((name, {"lw": 1.2}), (f"validation_{name}", {"marker": "o", "lw": 0.8})):
        points = [(row["step"], row[key]) for row in rows if key in row]
        if points:
            ax.plot(*zip(*points, strict=True), label=key, **style)
    if name in ("loss", "mse") and all(row[name] > 0 for row in rows if name in row):
        ax.set_yscale("log")
    ax.grid(alpha=0.3)
    ax.legend(frameon=False)
