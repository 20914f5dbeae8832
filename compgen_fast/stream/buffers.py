"""Memory for batches, used again once nobody holds a batch any more.

A batch of large images is megabytes. Fresh from the system it comes page by page, each page zeroed on first touch. A
buffer that was in use before is all there.
"""

import math
import weakref

import numpy as np
import torch
from torch import Tensor

from compgen_fast.stream.shards import Pixels

KEPT = 8


class Buffers:
    """Gives out uint8 tensors of one shape, and takes their memory back when the last view of it is gone."""

    def __init__(self, shape: tuple[int, ...], pinned: bool) -> None:
        self._shape, self._pinned = shape, pinned
        self._free: list[Pixels] = []
        self._lent: dict[int, weakref.ref[Pixels]] = {}

    def take(self) -> Tensor:
        if self._pinned:  # torch keeps freed pinned memory itself, and knows when copies out of it are done
            return torch.empty(self._shape, dtype=torch.uint8, pin_memory=True)
        memory = self._free.pop() if self._free else np.empty(math.prod(self._shape), np.uint8)
        pixels = memory.reshape(self._shape)

        # The tensor's storage holds this very array, so the array ends with the last tensor that shares the storage.
        def ended(_: "weakref.ref[Pixels]") -> None:
            del self._lent[id(memory)]
            if len(self._free) < KEPT:
                self._free.append(memory)

        self._lent[id(memory)] = weakref.ref(pixels, ended)
        return torch.from_numpy(pixels)
