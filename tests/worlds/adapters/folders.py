"""Tiny folders in the layout of each public data set, and what to check of every refusal."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from compgen_fast.worlds.adapters import FolderError

Damage = Callable[[Path], object]


def noise(seed: int, height: int = 8, width: int = 8) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def write_image(path: Path, pixels: NDArray[np.uint8]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def write_mask(path: Path, numbers: NDArray[np.uint8]) -> None:
    """As a palette image whose colours have nothing to do with the numbers, as CLEVRTex and Kubric write them."""
    mask = Image.fromarray(numbers).convert("P")
    mask.putdata(list(map(int, numbers.ravel())))
    mask.putpalette([(7 * value + 100) % 256 for value in range(768)])
    path.parent.mkdir(parents=True, exist_ok=True)
    mask.save(path)


def write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def edit_json(path: Path, edit: Callable[[Any], object]) -> None:
    content = json.loads(path.read_text())
    edit(content)
    write_json(path, content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def check_refused(attempt: Callable[[], object], file: str, what: str, tree: str) -> None:
    """One sentence that names the file and says what is odd, then the layout."""
    with pytest.raises(FolderError) as refusal:
        attempt()
    sentence, _, layout = str(refusal.value).partition("\n")
    assert re.search(f"{re.escape(file)}: .*{what}", sentence), sentence
    assert sentence.endswith("is expected as")
    assert tree in layout
