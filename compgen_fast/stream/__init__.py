"""Data sets as WebDataset shards: pack them, verify them, and stream them in an order that resumes exactly.

A packed folder holds plain tar files that any WebDataset reader opens, an index beside each, and a manifest; tars of
other writers are indexed where they are. With the index the order of samples is a pure function of (seed, epoch,
manifest), whoever reads it and with how many processes.

Names load on first use: the processes that read and decode import this package and must not pay for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compgen_fast.stream.faults import OverBudget, StreamError
    from compgen_fast.stream.indexing import Indexed, index_tars
    from compgen_fast.stream.inspection import inspect
    from compgen_fast.stream.manifest import Manifest
    from compgen_fast.stream.packing import pack
    from compgen_fast.stream.stream import Batch, ShardStream
    from compgen_fast.stream.tuning import fewest_good, measure_workers
    from compgen_fast.stream.verification import Problem, verify

__all__ = [
    "Batch",
    "Indexed",
    "Manifest",
    "OverBudget",
    "Problem",
    "ShardStream",
    "StreamError",
    "fewest_good",
    "index_tars",
    "inspect",
    "measure_workers",
    "pack",
    "verify",
]

_HOMES = {
    "Batch": "stream",
    "Indexed": "indexing",
    "Manifest": "manifest",
    "OverBudget": "faults",
    "Problem": "verification",
    "ShardStream": "stream",
    "StreamError": "faults",
    "fewest_good": "tuning",
    "index_tars": "indexing",
    "inspect": "inspection",
    "measure_workers": "tuning",
    "pack": "packing",
    "verify": "verification",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'compgen_fast.stream' has no attribute {name!r}; it exports {', '.join(__all__)}")
    return getattr(import_module(f"compgen_fast.stream.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
