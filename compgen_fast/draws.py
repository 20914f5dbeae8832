"""Random numbers of a batch, the same numbers however many ranks share it.

A rank that holds rows [first, first + n) of a batch of ``total`` draws for all rows and keeps its own. What is drawn
once for the batch (a choice of pixels) comes out alike on every rank, since their generators go through the same draws.
So a step is a pure function of (seed, step) and the samples: it can be resumed, and it can be split over ranks.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True)
class Draws:
    """Draws for ``first`` … of ``total`` rows; by default for a batch that is all here.

    generator: on the device of what is drawn; torch's own if None, and then ranks differ.
    """

    generator: torch.Generator | None = None
    first: int = 0
    total: int | None = None

    @classmethod
    def at(
        cls, seed: int, step: int, *, first: int = 0, total: int | None = None, device: str | torch.device = "cpu"
    ) -> Self:
        """The draws of one step of one run; any two (seed, step) are unrelated."""
        mixed = hashlib.blake2b(f"{seed} {step}".encode(), digest_size=8).digest()
        return cls(torch.Generator(device).manual_seed(int.from_bytes(mixed, "big") >> 1), first, total)

    def normal(self, like: Tensor) -> Tensor:
        """Standard normal, one for each number in ``like`` [n, …]."""
        return self._rows(
            like, lambda shape: torch.randn(shape, generator=self.generator, device=like.device, dtype=like.dtype)
        )

    def uniform(self, like: Tensor) -> Tensor:
        """Uniform in [0, 1), one for each number in ``like`` [n, …]."""
        return self._rows(
            like, lambda shape: torch.rand(shape, generator=self.generator, device=like.device, dtype=like.dtype)
        )

    def signs(self, like: Tensor) -> Tensor:
        """Rademacher: ±1, one for each number in ``like`` [n, …]."""
        coins = self._rows(like, lambda shape: torch.randint(0, 2, shape, generator=self.generator, device=like.device))
        return (2 * coins - 1).to(like.dtype)

    def permutation(self, count: int, device: torch.device) -> Tensor:
        """One order of ``count`` things, the same on every rank."""
        return torch.randperm(count, generator=self.generator, device=device)

    def _rows(self, like: Tensor, draw: Callable[[tuple[int, ...]], Tensor]) -> Tensor:
        total, last = self.total or len(like), self.first + len(like)
        if last > total:
            raise ValueError(
                f"Draws: rows {self.first} to {last} of a batch of {total}; expected rows inside the batch"
            )
        return draw((total, *like.shape[1:]))[self.first : last]
