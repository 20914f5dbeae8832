"""What every data set here is to the rest of the system: a number of samples, each an image with known factors.

A procedural world's split, an adapter for a folder on disk and a test's stub are all a ``Source``. Packing to shards,
drawing and training know nothing else.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Factor:
    """One cause of an image: a category out of ``values``, or a number between ``low`` and ``high``."""

    name: str
    values: tuple[str, ...] | None = None
    low: float = 0.0
    high: float = 1.0

    @property
    def categorical(self) -> bool:
        return self.values is not None


@dataclass(frozen=True)
class Samples:
    """n samples.

    images: uint8 [n, height, width, 3].
    factors: by name, int64 [n] (index into the factor's values) or float32 [n].
    masks: uint8 [n, height, width], the number of the slot that owns each pixel; None where nobody knows.
    """

    images: NDArray[np.uint8]
    factors: Mapping[str, NDArray[np.int64] | NDArray[np.float32]]
    masks: NDArray[np.uint8] | None = None


class Source(Protocol):
    """Samples by number. The same number always gives the same sample.

    A source may also have ``made: str``, a few words on how its images came to be; a manifest keeps them.
    """

    @property
    def name(self) -> str: ...

    @property
    def factors(self) -> tuple[Factor, ...]: ...

    @property
    def slots(self) -> tuple[str, ...]:
        """What the numbers in a mask stand for; empty where there are no masks."""
        ...

    def __len__(self) -> int: ...

    def samples(self, indices: NDArray[np.int64]) -> Samples: ...
