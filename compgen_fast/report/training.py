"""The page of a training run: its curves, its settings, and for a slot VAE or a tokenizer images beside what the model
makes of them.

It reads what the run left (metrics.jsonl, config.json, the validation images it is handed) and writes report.html and
report.png into the run's folder.
"""

import html
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compgen_fast.models.slot_vae import SlotVAE
from compgen_fast.models.tokenizer import Tokenizer
from compgen_fast.report.page import PAGE, PICTURE, document, listed_pairs, paint, tinted
from compgen_fast.train.metrics import Row, read

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

IMAGES = 8
CURVES = ("loss", "validation_loss", "mse", "validation_mse", "penalty", "kl")


def write(folder: Path, model: torch.nn.Module, images: Tensor) -> Path:
    """Draws the run in ``folder``; ``images`` uint8 [n, H, W, 3] are shown with their reconstructions."""
    rows = read(folder)
    sheets = _sheets(model, images[:IMAGES]) if isinstance(model, SlotVAE | Tokenizer) else {}
    paint(partial(_draw, rows=rows, sheets=sheets), (14, 7), folder / PICTURE, dots_per_inch=90)
    settings = html.escape((folder / "config.json").read_text())
    last = [(name, f"{value:.6g}") for name, value in rows[-1].items() if isinstance(value, int | float)]
    body = (
        f"<h1>{html.escape(folder.name)}</h1><img src={PICTURE} alt='curves and reconstructions'>"
        f"<h2>The last step</h2>{listed_pairs(last)}"
        f"<h2>Settings</h2><details><summary>config.json</summary><pre>{settings}</pre></details>"
    )
    (folder / PAGE).write_text(document(folder.name, body))
    return folder / PAGE


@torch.no_grad()
def _sheets(model: SlotVAE | Tokenizer, images: Tensor) -> dict[str, NDArray[np.uint8]]:
    """Rows of pictures by title."""
    parts = "tokens" if isinstance(model, Tokenizer) else "slots"
    sheets = {"images": images, f"as decoded from their {parts}": model.reconstruct(images)}
    with_masks: Any = getattr(model.decoder, "decode_with_masks", None)
    if with_masks is not None:
        _, masks = with_masks(model.encode(images)[0])
        shares = masks.float().unflatten(2, images.shape[1:3])
        sheets["which slot each pixel looks at"] = torch.from_numpy(tinted(shares.cpu().numpy()))
    return {title: np.concatenate([*sheet.cpu().numpy()], axis=1) for title, sheet in sheets.items()}


def _draw(figure: "Figure", rows: Sequence[Row], sheets: Mapping[str, NDArray[np.uint8]]) -> None:
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


def _curve(ax: "Axes", rows: Sequence[Row], name: str) -> None:
    for key, style in ((name, {"lw": 1.2}), (f"validation_{name}", {"marker": "o", "lw": 0.8})):
        points = [(row["step"], row[key]) for row in rows if key in row]
        if points:
            ax.plot(*zip(*points, strict=True), label=key, **style)
    if name in ("loss", "mse") and all(row[name] > 0 for row in rows if name in row):
        ax.set_yscale("log")
    ax.grid(alpha=0.3)
    ax.legend(frameon=False)
