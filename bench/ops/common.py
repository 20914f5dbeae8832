"""What the slot ops share: the sizes of a problem, random tensors of them, and which backend answers."""

from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from compgen_fast.ops.backends import Device, serving


@dataclass(frozen=True)
class Shape:
    """B images of N pixels, S slots, H heads of width D."""

    B: int
    N: int
    H: int
    S: int
    D: int

    def __str__(self) -> str:
        return " ".join(f"{name}{size}" for name, size in asdict(self).items())

    def tensors(self, counts: dict[str, int], dtype: torch.dtype, device: str) -> dict[str, Tensor]:
        """Named random tensors [B, count, H, D], the same in every run."""
        generator = torch.Generator(device).manual_seed(0)
        return {
            name: torch.randn(self.B, count, self.H, self.D, dtype=dtype, device=device, generator=generator)
            for name, count in counts.items()
        }


def backend_of(op: str, device: str) -> str:
    """The backend that really answers calls of ``compgen::op``: an op may lack the kernel its device would prefer."""
    name: Device = "cuda" if device == "cuda" else "cpu"
    own_kernel = torch._C._dispatch_has_kernel_for_dispatch_key(f"compgen::{op}", name.upper())
    return (serving(name) or "refused") if own_kernel else "torch"
