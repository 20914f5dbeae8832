"""What all pages share: the sheet of styles, tables, and pictures that can sit inside the page.

Pages follow the reader's light or dark setting: drawings are transparent and their text takes the page's colour. Not
for what a page says: that is the modules beside this one.
"""

import base64
import html
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import imagecodecs
import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGE, PICTURE = "report.html", "report.png"
YES, NO, NOTHING = "✓", "✗", "–"
PALETTE = np.array(
    [(43, 108, 176), (232, 137, 58), (64, 145, 108), (184, 50, 39), (122, 81, 149), (140, 140, 140), (214, 180, 60)]
)
_INK = "#010203"  # stands for the page's own colour of text while matplotlib draws
_STYLE = """
:root{color-scheme:light dark;--good:#1a7f37;--bad:#c0322b;--line:#8884;--quiet:#666;--seen:#2b6cb0}
@media(prefers-color-scheme:dark){:root{--good:#4cc46a;--bad:#ff7b72;--quiet:#aaa;--seen:#5b9bd8}}
body{font:16px/1.5 system-ui,sans-serif;max-width:73em;margin:2em auto;padding:0 1em;background:Canvas;color:CanvasText}
h1{line-height:1.2;margin:0 0 .4em}h2{margin:2.2em 0 .4em}a{color:inherit}
.finding{font-size:1.3em;line-height:1.4;margin:.4em 0;text-wrap:pretty}
.note,figcaption{color:var(--quiet);font-size:.9em;line-height:1.4}
.wide{overflow-x:auto}.wide>svg{width:100%;min-width:44em}svg,img{max-width:100%;height:auto}
svg text{fill:currentColor}.panels{display:flex;flex-wrap:wrap;gap:1.4em 1em;margin-bottom:1em}
table{border-collapse:collapse;font-size:.9em;font-variant-numeric:tabular-nums}
th,td{padding:.3em .9em .3em 0;border-bottom:1px solid var(--line);text-align:left;vertical-align:top}
th{font-weight:600}td.number{text-align:right;white-space:nowrap}th.number{text-align:right}
.good{color:var(--good);font-weight:600}.bad{color:var(--bad);font-weight:600}
summary{cursor:pointer;font-weight:600;margin:.6em 0}pre{white-space:pre-wrap;overflow-wrap:anywhere}
"""


@dataclass(frozen=True)
class Grid:
    """A table before anything draws it. The columns named in ``words`` are text, the others numbers."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: tuple[str, ...]

    def only(self, *columns: str) -> "Grid":
        """Of all columns these, for where there is less room."""
        kept = [self.head.index(column) for column in columns]
        return replace(self, head=columns, rows=tuple(tuple(row[number] for number in kept) for row in self.rows))


def document(title: str, body: str, style: str = "") -> str:
    """The whole page. ``body`` and ``style`` are written as they are."""
    return (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width,initial-scale=1'>"
        f"<title>{html.escape(title)}</title><style>{_STYLE}{style}</style><body>{body}</body></html>\n"
    )


def table(grid: Grid, name: str) -> str:
    """As HTML, with ``name`` as its id. A mark for yes or no is green or red. Without rows there is no table."""
    if not grid.rows:
        return ""
    kinds = ["" if column in grid.words else " class=number" for column in grid.head]
    head = "".join(f"<th{kind}>{html.escape(cell)}" for kind, cell in zip(kinds, grid.head, strict=True))
    marks = {YES: " class=good", NO: " class=bad"}
    rows = "".join(
        "<tr>"
        + "".join(f"<td{marks.get(cell, kind)}>{html.escape(cell)}" for kind, cell in zip(kinds, row, strict=True))
        for row in grid.rows
    )
    return f"<div class=wide><table id={name}><thead><tr>{head}<tbody>{rows}</table></div>"


def listed_pairs(pairs: Sequence[tuple[str, str]]) -> str:
    """Names and what they stand for, one pair a line."""
    lines = "".join(f"<tr><th>{html.escape(name)}<td>{html.escape(value)}" for name, value in pairs)
    return f"<div class=wide><table>{lines}</table></div>"


def image(pixels: NDArray[np.uint8], description: str) -> str:
    """uint8 [H, W, 3] as an image inside the page."""
    data = base64.b64encode(imagecodecs.png_encode(np.ascontiguousarray(pixels))).decode()
    return f'<img src="data:image/png;base64,{data}" alt="{html.escape(description)}">'


def drawing(draw: "Callable[[Figure], None]", size: tuple[float, float], description: str) -> str:
    """What ``draw`` puts on an empty figure of ``size`` in inches, as SVG inside the page."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    inked = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    # Equal salts give equal pages; a salt of its own keeps a drawing's ids apart from those of the others.
    settings: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": description} | dict.fromkeys(inked, _INK)
    written = io.StringIO()
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=size, layout="constrained", facecolor="none")
        FigureCanvasSVG(figure)
        draw(figure)
        for ax in figure.axes:
            ax.set_facecolor("none")
        figure.savefig(written, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = written.getvalue().replace(_INK, "currentColor")
    # Inside HTML the name spaces are known; without them no address is left in the page.
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text[text.index("<svg") :])
    return text.replace("<svg", f'<svg role="img" aria-label="{html.escape(description)}"', 1)


def paint(draw: "Callable[[Figure], None]", size: tuple[float, float], path: Path, dots_per_inch: int) -> None:
    """What ``draw`` puts on an empty white figure of ``size`` in inches, as a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1), facecolor="white")
    FigureCanvasAgg(figure)
    draw(figure)
    figure.savefig(path, format="png", dpi=dots_per_inch)


def tinted(masks: NDArray[np.floating[Any]]) -> NDArray[np.uint8]:
    """Shares of slots [n, K, H, W] as colours uint8 [n, H, W, 3]: each slot's colour, mixed by its share."""
    colours = PALETTE[np.arange(masks.shape[1]) % len(PALETTE)]
    mixed: NDArray[Any] = np.einsum("nkhw,kc->nhwc", masks, colours)
    return mixed.round().clip(0, 255).astype(np.uint8)


def colour(number: int) -> str:
    """One of the palette, as matplotlib and CSS write it."""
    return "#{:02x}{:02x}{:02x}".format(*PALETTE[number % len(PALETTE)])
