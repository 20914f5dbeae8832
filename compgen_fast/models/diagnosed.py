"""For models that can fail without their loss saying so: the trainer asks them now and then."""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from torch import Tensor

from compgen_fast.draws import Draws


@runtime_checkable
class Diagnosed(Protocol):
    """A model that the trainer asks, at each checkpoint and at the end, whether it learns what it is meant to."""

    @property
    def warmed_after(self) -> int:
        """Steps after which the weights of its losses grow no more; before, only the end of a run is judged."""
        ...

    def diagnose(self, images: Tensor, draws: Draws) -> dict[str, Tensor]:
        """Scalars by name, each a mean over images uint8 [B, H, W, 3], so that ranks can average theirs; they go into
        metrics.jsonl. Empty where nothing can be said.
        """
        ...

    def fault(self, found: Mapping[str, float]) -> str | None:
        """What these numbers say is wrong, and what to try; None if nothing is."""
        ...
