"""CelebA (Liu et al., 2015): aligned faces with forty attributes, each of them absent or present.

The text files may lie beside the image folder or, as in the original archive, in Anno, Eval and Img. The images are
178 by 218 pixels; the middle square is kept.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from compgen_fast.worlds.adapters.columns import Column
from compgen_fast.worlds.adapters.folder_source import FolderSource, rows
from compgen_fast.worlds.adapters.layout import Layout, files_below
from compgen_fast.worlds.source import Factor

LAYOUT = Layout(
    "CelebA",
    """
    celeba/
      img_align_celeba/000001.jpg …    (or in Img/)
      list_attr_celeba.txt             (or in Anno/) the number of images, the attributes' names, then a line each
      list_eval_partition.txt          (or in Eval/) `000001.jpg 0`: 0 train, 1 validation, 2 test
    """,
)
PARTS = {"train": "0", "validation": "1", "test": "2"}


def celeba(folder: str | Path, *, resolution: int = 64, part: str = "all") -> FolderSource:
    """CelebA's ``train``, ``validation`` or ``test`` part, or ``all`` of it."""
    LAYOUT.choice("part", part, ("all", *PARTS))
    root = LAYOUT.folder(folder)
    pictures = LAYOUT.first(root, "img_align_celeba", "Img/img_align_celeba")
    path = LAYOUT.first(root, "list_attr_celeba.txt", "Anno/list_attr_celeba.txt")
    names, columns = _attributes(path)
    LAYOUT.match(pictures, files_below(pictures), path, names, unlisted=False)
    if part != "all":
        parts = _parts(LAYOUT.first(root, "list_eval_partition.txt", "Eval/list_eval_partition.txt"), names)
        kept = np.flatnonzero(np.array(parts) == PARTS[part])
        names, columns = [names[index] for index in kept], dict(rows(columns, kept))
    factors = tuple(Factor(name, ("absent", "present")) for name in columns)
    return FolderSource(f"celeba-{part}", pictures, factors, columns, tuple(names), resolution)


def _attributes(path: Path) -> tuple[list[str], dict[str, Column]]:
    count, header, *lines = [*LAYOUT.text(path).splitlines(), "", ""]
    attributes, cells = header.split(), [line.split() for line in lines if line.strip()]
    if count.strip() != str(len(cells)) or not attributes:
        raise LAYOUT.odd(path, f"its first line says {count.strip()[:20]!r} images and {len(cells)} lines follow")
    for number, line in enumerate(cells, start=3):
        if len(line) != len(attributes) + 1 or not {"1", "-1"}.issuperset(line[1:]):
            raise LAYOUT.odd(path, f"line {number} is not a file name and {len(attributes)} times 1 or -1")
    present = np.array([line[1:] for line in cells]) == "1"
    columns: dict[str, Column] = {name: present[:, i].astype(np.int64) for i, name in enumerate(attributes)}
    return [line[0] for line in cells], columns


def _parts(path: Path, names: Sequence[str]) -> list[str]:
    """The part of each image."""
    cells = [line.split() for line in LAYOUT.text(path).splitlines() if line.strip()]
    for number, line in enumerate(cells, start=1):
        if len(line) != 2 or line[1] not in PARTS.values():
            raise LAYOUT.odd(path, f"line {number} is not a file name and 0, 1 or 2")
    parts = dict(cells)
    if missing := next((name for name in names if name not in parts), None):
        raise LAYOUT.odd(path, f"it does not say to which part {missing} belongs")
    return [parts[name] for name in names]
