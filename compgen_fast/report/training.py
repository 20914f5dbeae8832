"""The page of a training run: its curves, its settings, and pictures: of a slot VAE or a tokenizer, images beside what
the model makes of them; of a generator, images beside samples of the same factors.

It reads what the run left (metrics.jsonl, config.json, the validation samples it is handed) and writes report.html and
report.png into the run's folder.
"""

import html
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from compgen_fast.draws import Draws
from compgen_fast.generate.generator import Generator
from compgen_fast.models.diagnosed import Diagnosed
from compgen_fast.models.slot_vae import SlotVAE
from compgen_fast.models.tokenizer import Tokenizer
from compgen_fast.report.page import PAGE, PICTURE, document, listed_pairs, paint, tinted
from compgen_fast.train.folder import read_history
from compgen_fast.train.metrics import Row, read

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

IMAGES = 8
NO_FACTORS: Mapping[str, Tensor] = MappingProxyType({})
CURVES = ("mse", "penalty", "overlap", "kl", "velocity", "cross_entropy", "nll", "jepa")


def write(
    folder: Path,
    model: nn.Module,
    samples: Tensor,
    factors: Mapping[str, Tensor] = NO_FACTORS,
    tokenizer: Tokenizer | None = None,
) -> Path:
    """Draws the run in ``folder``.

    Args:
        folder: the run's.
        model: trained, in evaluation.
        samples: what it was trained on: images uint8 [n, H, W, 3], or for a generator tokens [n, T, …].
        factors: of the samples, by name, [n] each; a generator is told them.
        tokenizer: of a generator's tokens; without it there are no pictures.
    """
    rows = read(folder)
    sheets = _sheets(model, samples[:IMAGES], {name: of[:IMAGES] for name, of in factors.items()}, tokenizer)
    paint(partial(_draw, rows=rows, sheets=sheets), (14, 7), folder / PICTURE, dots_per_inch=90)
    settings = html.escape((folder / "config.json").read_text())
    last = [(name, f"{value:.6g}") for name, value in rows[-1].items() if isinstance(value, int | float)]
    body = (
        f"<h1>{html.escape(folder.name)}</h1>{_fault(model, samples)}"
        f"<img src={PICTURE} alt='curves and pictures'>"
        f"<h2>The last step</h2>{listed_pairs(last)}"
        f"{_history(folder)}<h2>Settings</h2><details><summary>config.json</summary><pre>{settings}</pre></details>"
    )
    (folder / PAGE).write_text(document(folder.name, body))
    return folder / PAGE


@torch.no_grad()
def _fault(model: nn.Module, samples: Tensor) -> str:
    """What the model itself finds wrong."""
    if not isinstance(model, Diagnosed):
        return ""
    found = model.diagnose(samples, Draws.at(0, 0, device=samples.device))
    fault = model.fault({name: float(value) for name, value in found.items()})
    return f"<p class='finding bad'>{html.escape(fault)}</p>" if fault else ""


def _history(folder: Path) -> str:
    """Which settings were changed on the way."""
    changes = [
        (f"after step {line['step']}", f"{change['name']}: {change['was']} → {change['now']}")
        for line in read_history(folder)
        for change in line["changes"]
    ]
    return f"<h2>Changed on the way</h2>{listed_pairs(changes)}" if changes else ""


@torch.no_grad()
def _sheets(
    model: nn.Module, samples: Tensor, factors: Mapping[str, Tensor], tokenizer: Tokenizer | None
) -> dict[str, NDArray[np.uint8]]:
    """Rows of pictures by title."""
    if isinstance(model, SlotVAE | Tokenizer):
        sheets = _reconstructed(model, samples)
    elif isinstance(model, Generator) and tokenizer is not None:
        sheets = _sampled(model, samples, factors, tokenizer.to(samples.device))
    else:
        sheets = {}
    return {title: np.concatenate([*sheet.cpu().numpy()], axis=1) for title, sheet in sheets.items()}


def _sampled(
    model: Generator, tokens: Tensor, factors: Mapping[str, Tensor], tokenizer: Tokenizer
) -> dict[str, Tensor]:
    drawn = model.sample(factors, draws=Draws.at(0, 0, device=tokens.device))
    return {
        "images, as decoded from their tokens": tokenizer.paint(tokens),
        "samples of the same factors": tokenizer.paint(drawn),
    }


def _reconstructed(model: SlotVAE | Tokenizer, images: Tensor) -> dict[str, Tensor]:
    parts = "tokens" if isinstance(model, Tokenizer) else "slots"
    sheets = {"images": images, f"as decoded from their {parts}": model.reconstruct(images)}
    with_masks: Any = getattr(model.decoder, "decode_with_masks", None)
    if with_masks is not None:
        _, masks = with_masks(model.encode(images)[0])
        shares = masks.float().unflatten(2, images.shape[1:3])
        sheets["which slot each pixel looks at"] = torch.from_numpy(tinted(shares.cpu().numpy()))
    return sheets


def _draw(figure: "Figure", rows: Sequence[Row], sheets: Mapping[str, NDArray[np.uint8]]) -> None:
    grid = figure.add_gridspec(1, 2, width_ratios=(1, 1.4 if sheets else 0.01))
    left, right = (figure.add_subfigure(grid[half]) for half in (0, 1))
    # A generator's own loss is all of it where nothing is added.
    shown = ["loss", *(name for name in CURVES if any(name in row and row[name] != row["loss"] for row in rows))]
    for ax, name in zip(left.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0], shown, strict=True):
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
            alone = {"marker": "o"} if len(points) == 1 else {}
            ax.plot(*zip(*points, strict=True), label=key, **style | alone)
    if name in ("loss", "mse") and all(row[name] > 0 for row in rows if name in row):
        ax.set_yscale("log")
    ax.grid(alpha=0.3)
    ax.legend(frameon=False)
