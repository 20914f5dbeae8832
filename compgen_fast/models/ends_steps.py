"""For models that learn something without gradients: a codebook, moments, a slow copy of a network."""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class EndsSteps(Protocol):
    """A model that the trainer tells when an optimiser step is done, on all ranks.

    What it keeps goes into buffers: persistent ones are in checkpoints and exported weights, and must come out alike on
    all ranks. What a forward in training adds up for `end_step` goes into non-persistent ones, empty between steps. A
    forward must not change what it reads, so that the micro-batches of a step, and the ranks, all see the same.
    """

    def end_step(self, total: Callable[[Tensor], Tensor]) -> None:
        """``total`` sums a tensor over ranks, in place, bit for bit the same on each of them."""
        ...
