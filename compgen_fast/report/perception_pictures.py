"""The pictures of a perception study: searches frame by frame, where they fail, composites, and what was seen."""

import html
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from compgen_fast.report.page import NO, YES, image, tinted
from compgen_fast.report.perception_numbers import DECODERS
from compgen_fast.report.study import Arrays, Results, place
from compgen_fast.worlds import open_world

if TYPE_CHECKING:
    from matplotlib.figure import SubFigure


IMAGES, FAILURES, COMPOSITES, FRAMES = 6, 4, 6, 5
STYLE = """
.strip{margin:0 0 1.3em}.strip p{margin:0 0 .3em}
.frames{display:flex;gap:.4em;overflow-x:auto;align-items:flex-end}
.frames figure{margin:0;flex:none;width:8em;text-align:center}.frames .step{width:4.9em}.frames .curve{width:10.5em}
.frames img{width:100%;display:block;image-rendering:pixelated}figcaption{white-space:nowrap}
.frames big{align-self:center;color:var(--quiet);padding-bottom:1em}.curve svg{width:100%;height:5.2em}
.strips{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,23em),1fr));gap:1em}
.strips .frames figure{width:6.3em}
@media(max-width:40em){.strip .frames{flex-wrap:wrap}.frames figure{width:7em}.frames .step{display:none}}
table.seen{font-size:.8em}table.seen td{width:1.9em;height:1.3em;padding:0;border:2px solid Canvas;background:#8882}
table.seen td.seen{background:var(--seen)}table.seen td.never{background:none}
table.seen th{border:0;padding:.1em .5em;font-weight:400}
table.seen thead th{writing-mode:vertical-rl;transform:rotate(180deg);padding:.1em}
"""


@dataclass(frozen=True)
class Searches:
    """Searches for the slots of unseen images through one decoder.

    images: uint8 [n, H, W, 3]. path: uint8 [n, T, H, W, 3], what was decoded, first to last. maps: [n, K, H, W], shares
    of the slots in the last decode. labels: [n]. read: [n, 2], before and after. errors: [n, S].
    """

    images: NDArray[np.uint8]
    path: NDArray[np.uint8]
    maps: NDArray[np.float32]
    labels: NDArray[np.str_]
    read: NDArray[np.str_]
    errors: NDArray[np.float32]


_AXES = {"images": 4, "path": 5, "maps": 4, "labels": 1, "read": 2, "errors": 2}


def decoders(arrays: Arrays) -> list[str]:
    """Those with pictures."""
    return sorted({name.split("/")[0] for name in arrays}, key=lambda name: place(DECODERS, name))


def searches(arrays: Arrays, prefix: str) -> Searches | None:
    """What is kept under ``attention`` or ``attention/failures``, None if nothing is."""
    parts = {part: arrays[f"{prefix}/{part}"] for part in _AXES if f"{prefix}/{part}" in arrays}
    if all(array.size == 0 for array in parts.values()):
        return None
    missing = [part for part in _AXES if part not in parts]
    if missing:
        raise ValueError(f"pictures.npz: {prefix} has no {', '.join(missing)}; run the study again to make them")
    shapes = {part: array.shape for part, array in parts.items()}
    if len({shape[:1] for shape in shapes.values()}) > 1 or any(len(shapes[part]) != _AXES[part] for part in _AXES):
        raise ValueError(
            f"pictures.npz: {prefix} has shapes {shapes}; expected {_AXES} axes, the first of one length; "
            "run the study again to make them"
        )
    return Searches(**parts)


def right(read: str, label: str) -> bool:
    """Whether what was read is the label, or the object that the label begins with ("heart" of "heart on bricks")."""
    return bool(read) and (read == label or label.startswith(f"{read} "))


def turned_right(found: Searches) -> int:
    """The first search that turned a wrong reading into a right one, else the first search."""
    for number, ((before, after), label) in enumerate(zip(found.read, found.labels, strict=True)):
        if right(after, label) and not right(before, label):
            return number
    return 0


def frames(found: Searches, number: int) -> list[tuple[str, NDArray[np.uint8]]]:
    """An image, decodes along its search and the slots of the last, by name; those between have none."""
    path = found.path[number]
    between = np.unique(np.linspace(0, len(path) - 1, FRAMES + 2).round().astype(int))[1:-1]
    return [
        ("image", found.images[number]),
        ("encoder's guess", path[0]),
        *(("", path[step]) for step in between),
        ("after search", path[-1]),
        ("slots", tinted(found.maps[number : number + 1])[0]),
    ]


def strips(found: Searches | None, most: int) -> str:
    """One search below the other."""
    return "" if found is None else "".join(_strip(found, number) for number in range(min(most, len(found.images))))


def _strip(found: Searches, number: int) -> str:
    label, (before, after) = str(found.labels[number]), found.read[number]
    cells = "".join(_frame(label, name, pixels) for name, pixels in frames(found, number))
    readings = f"{_reading(before, label)} → {_reading(after, label)}"
    return (
        f"<div class=strip><p><b>{html.escape(label)}</b>, read as {readings}</p>"
        f"<div class=frames>{cells}{_curve(found.errors, number)}</div></div>"
    )


def _frame(label: str, name: str, pixels: NDArray[np.uint8]) -> str:
    shown = image(pixels, f"{label}: {name or 'during search'}")
    return f"<figure{'' if name else ' class=step'}>{shown}<figcaption>{html.escape(name) or '→'}</figcaption></figure>"


def _reading(read: str, label: str) -> str:
    good = right(str(read), label)
    return f"<span class={'good' if good else 'bad'}>{html.escape(str(read)) or '?'} {YES if good else NO}</span>"


def _curve(errors: NDArray[np.float32], number: int) -> str:
    """The error over the steps of a search, on the log scale that all of ``errors`` [n, S] share."""
    logs = np.log10(np.maximum(errors, 1e-12))
    own = logs[number][np.isfinite(logs[number])]
    if len(own) < 2:
        return ""
    low, high = np.nanmin(logs), np.nanmax(logs, where=np.isfinite(logs), initial=-12)
    across, down = np.linspace(2, 98, len(own)), 38 - 36 * (own - low) / max(high - low, 1e-6)
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(across, down, strict=True))
    caption = f"error {10 ** own[0]:.2g} → {10 ** own[-1]:.2g}"
    return (
        f'<figure class=curve><svg viewBox="0 0 100 40" preserveAspectRatio="none" role="img" aria-label="{caption}">'
        f'<polyline points="{points}" fill="none" stroke="currentColor" stroke-width="1.5" '
        f'vector-effect="non-scaling-stroke"/></svg><figcaption>{caption}</figcaption></figure>'
    )


def composites(arrays: Arrays, decoder: str) -> str:
    """From uint8 [m, 3, H, W, 3]: a background's image, an object's image, and the decode of one slot of each."""
    parts = (("", "background of"), ("<big>+</big>", "object of"), ("<big>=</big>", "decoded"))
    lines = "".join(
        "<div class=frames>"
        + "".join(
            f"{sign}<figure>{image(pixels, name)}<figcaption>{name}</figcaption></figure>"
            for (sign, name), pixels in zip(parts, three, strict=True)
        )
        + "</div>"
        for three in arrays.get(f"{decoder}/composites", ())[:COMPOSITES]
    )
    return lines and f"<div class=strips>{lines}</div>"


def seen_matrix(results: Results) -> str:
    """Which combinations training showed at the first seed, as squares; "" where the world is not the one named."""
    told, seed = results["world"], results["seeds"][0]
    try:
        world = open_world(told["name"], split=results["split"], resolution=told["resolution"], seed=seed)
        matrix = world.matrix(results["split"], told["seen_pairs"])
    except ValueError:
        return ""
    if matrix.level.shape != (told["objects"], told["partners"]):
        return ""
    head = "<th>" + "".join(f"<th>{html.escape(name)}" for name in matrix.columns)
    body = "".join(
        f"<tr><th>{html.escape(row)}"
        + "".join(_square(row, column, int(level)) for column, level in zip(matrix.columns, levels, strict=True))
        for row, levels in zip(matrix.rows, matrix.level, strict=True)
    )
    return f"<div class=wide><table class=seen id=seen><thead><tr>{head}<tbody>{body}</table></div>"


def _square(row: str, column: str, level: int) -> str:
    kind, words = {-1: ("never", "cannot occur"), 0: ("seen", "seen in training")}.get(level, ("unseen", "unseen"))
    title = html.escape(f"{row}, {column}: {words}")
    return f'<td class={kind} title="{title}">'


def draw_search(figure: "SubFigure", found: Searches, number: int) -> None:
    """One search as a row of axes."""
    shown = frames(found, number)
    for ax, (name, pixels) in zip(figure.subplots(1, len(shown)), shown, strict=True):
        ax.imshow(pixels, interpolation="nearest")
        ax.set_title(name or "→", fontsize=12, color="black" if name else "#888888")
        ax.set_axis_off()
    label, (before, after) = found.labels[number], found.read[number]
    figure.suptitle(f"{label}: read as {before} before search, as {after} after", fontsize=14)
