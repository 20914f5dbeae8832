"""Kernel-optimised training of models that generalise by composition: slots in, pixels out.

The public ops are importable from here; everything else from the subpackage it lives in. Importing this package does
not import torch, so that `cgf --help` answers at once: the ops load on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compgen_fast.ops import projected_slot_attention, slot_competition, slot_cross_attention

__version__ = "0.1.0"
__all__ = ["__version__", "projected_slot_attention", "slot_competition", "slot_cross_attention"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'compgen_fast' has no attribute {name!r}; it exports {', '.join(__all__)}")
    return getattr(import_module("compgen_fast.ops"), name)


def __dir__() -> list[str]:
    return __all__
