"""A source for tests: small images that differ from sample to sample, with a category, a number and a mask."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from compgen_fast.stream import pack
from compgen_fast.stream.manifest import Format, Manifest
from compgen_fast.worlds.source import Factor, Samples


@dataclass(frozen=True)
class Stub:
    count: int = 100
    side: int = 16
    name: str = "stub"
    masks: bool = True
    shift: int = 0
    """Changes every pixel: another source of the same name."""

    @property
    def factors(self) -> tuple[Factor, ...]:
        return (Factor("shape", ("disc", "square", "star")), Factor("x", low=0.0, high=1.0))

    @property
    def slots(self) -> tuple[str, ...]:
        return ("background", "thing") if self.masks else ()

    def __len__(self) -> int:
        return self.count

    def samples(self, indices: NDArray[np.int64]) -> Samples:
        rows, columns = np.mgrid[: self.side, : self.side]
        n = indices[:, None, None]
        images = np.stack([rows * 5 + n * 7, columns * 3 + n, rows + columns + n // 5], -1) + self.shift
        masks = ((rows + n) % self.side > self.side // 2).astype(np.uint8) if self.masks else None
        factors = {"shape": indices % 3, "x": (indices / self.count).astype(np.float32)}
        return Samples((images % 256).astype(np.uint8), factors, masks)

    def image(self, number: int) -> NDArray[np.uint8]:
        return self.samples(np.array([number])).images[0]


def packed(folder: Path, count: int = 100, shard_size: int = 30, format: Format = "png", side: int = 16) -> Manifest:
    return pack(Stub(count, side), folder, shard_size=shard_size, format=format)


def numbers(keys: Sequence[str]) -> list[int]:
    return [int(key) for key in keys]
