"""A packed folder at a glance: what its samples are made of, how many there are, and what they look like."""

from collections.abc import Mapping
from pathlib import Path

import imagecodecs
import numpy as np
from rich.console import Console

from compgen_fast.stream import manifest
from compgen_fast.stream.manifest import Manifest
from compgen_fast.stream.packing import PLAN, skipped_in
from compgen_fast.stream.remote import Local
from compgen_fast.stream.shards import DataSet, Pixels
from compgen_fast.tables import Sheet

GRID = (4, 8)


def inspect(out: str | Path, picture: str | Path | None = None, console: Console | None = None) -> Manifest:
    """Prints schema and counts, and draws samples spread over the whole folder into the PNG file ``picture``."""
    folder = Path(out)
    found = manifest.read(folder / manifest.FILE)
    console = console or Console(highlight=False)
    console.print(_summary(found, skipped_in(folder)))
    if found.schema.factors:
        console.print(_factors(found))
    if picture is not None:
        Path(picture).write_bytes(imagecodecs.png_encode(grid(folder)))
        console.print(f"{GRID[0] * GRID[1]} samples drawn in {picture}", soft_wrap=True)
    return found


def _summary(found: Manifest, skipped: Mapping[str, str] | None) -> Sheet:
    schema = found.schema
    table = Sheet("what", "found", words=("what", "found"), folds=("found",), show_header=False)
    rows = {
        "name": found.name + (f", split {found.split}" if found.split else ""),
        "samples": f"{found.samples:,} in {len(found.shards):,} shards, {found.bytes / 1e6:,.1f} MB",
        "skipped": f"{len(skipped):,}, listed in {PLAN}" if skipped else "",
        "image": f"{schema.height} × {schema.width}, {schema.format}",
        "made": found.made,
        "masks": ", ".join(schema.slots) or "yes" if schema.masks else "none",
        "factors": "" if schema.factors else "none",
        "hash": found.hash,
    }
    for name, value in rows.items():
        if value:
            table.add_row(name, value)
    return table


def _factors(found: Manifest) -> Sheet:
    table = Sheet("factor", "values", words=("factor", "values"), folds=("factor", "values"))
    for factor in found.schema.factors:
        table.add_row(factor.name, ", ".join(factor.values) if factor.values else f"{factor.low:g} to {factor.high:g}")
    return table


def grid(folder: Path) -> Pixels:
    """uint8 [rows · height, columns · width, 3]: samples at equal distances, from the first to the last."""
    data = DataSet(Local(folder))
    rows, columns = GRID
    height, width = data.manifest.schema.height, data.manifest.schema.width
    cells = np.empty((rows * columns, height, width, 3), np.uint8)
    data.fill(np.linspace(0, data.samples - 1, rows * columns).round().astype(int).tolist(), cells)
    cells = cells.reshape(rows, columns, height, width, 3)
    return np.ascontiguousarray(cells.transpose(0, 2, 1, 3, 4)).reshape(rows * height, columns * width, 3)
