"""The page of a search: errors before and after it, and images beside the encoder's guess and what was found."""

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compgen_fast.report.page import PAGE, colour, document, drawing, image, listed_pairs
from compgen_fast.report.study import section

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN = 6  # images of each kind
LEAST = 1e-9  # an error that a logarithmic axis still shows
ROWS = "Above, the image; below it, what the decoder makes of the encoder's guess, and of what was found."
_STYLE = "img{image-rendering:pixelated;width:100%;max-width:48em}"


@dataclass(frozen=True)
class Errors:
    """Mean squared errors of all images over pixels and colours, before and after, and the steps that it took."""

    start: Tensor
    found: Tensor
    steps: Tensor
    images_per_second: float

    def __str__(self) -> str:
        """The search in a sentence."""
        stuck = int((self.steps == 0).sum())
        return (
            f"{len(self.found):,} images: mean squared error per colour {self.start.mean():.2e} → "
            f"{self.found.mean():.2e}, encoder's guess → found; {self.images_per_second:,.1f} images/s; "
            f"{stuck:,} gave up: nothing was better than the guess"
        )

    def examples(self) -> dict[str, list[int]]:
        """Numbers of images by what they are examples of; an image is shown once."""
        best_first = self.found.argsort(stable=True).tolist()
        count = min(SHOWN, len(best_first) // 3)
        if not count:
            return {"All": best_first}
        middle = (len(best_first) - count) // 2
        return {
            "Least error": best_first[:count],
            "Typical": best_first[middle : middle + count],
            "Most error": best_first[-count:],
        }


def write(
    folder: Path,
    errors: Errors,
    examples: Mapping[str, Sequence[NDArray[np.uint8]]],
    settings: Mapping[str, object],
) -> Path:
    """report.html in the folder.

    Args:
        errors: of all images.
        examples: by title, for each image [3, H, W, 3] itself, from the encoder's guess, and as found.
        settings: of the search, by name.
    """
    told = {name: ", ".join(value) if isinstance(value, tuple) else value for name, value in settings.items()}
    pairs = [(name, f"{value}") for name, value in told.items()]
    body = (
        f"<h1>Search</h1><p class=finding>{html.escape(str(errors))}.</p>"
        f"<div class=wide>{drawing(partial(_histogram, errors=errors), (9, 3), 'errors before and after')}</div>"
        f"<p class=note>{html.escape(ROWS)}</p>"
        + "".join(section(title, image(_sheet(shown), title)) for title, shown in examples.items())
        + section("Settings", listed_pairs(pairs))
    )
    page = folder / PAGE
    page.write_text(document("Search", body, _STYLE), encoding="utf-8")
    return page


def _sheet(shown: Sequence[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    """A column for each image."""
    return np.concatenate([np.concatenate([*rows]) for rows in shown], axis=1)


def _histogram(figure: "Figure", errors: Errors) -> None:
    ax = figure.subplots()
    named = {"encoder's guess": errors.start, "found": errors.found}
    logs = {name: error.double().clamp(min=LEAST).log10() for name, error in named.items()}
    ends = torch.cat([*logs.values()])
    edges = np.logspace(float(ends.min()) - 0.05, float(ends.max()) + 0.05, 40)
    for number, (name, log) in enumerate(logs.items()):
        ax.hist(10 ** log.numpy(), edges.tolist(), alpha=0.6, label=name, color=colour(number))
    ax.set_xscale("log")
    ax.set_xlabel("mean squared error per colour")
    ax.set_ylabel("images")
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False)
