"""Peak memory of a pass, counted from the allocator's own events rather than sampled from the process.

On CPU every allocation and release that goes through torch's allocator is seen, also inside C++ ops (``at::empty``) and
code from inductor, so the figure is exact and the same on each run. Not seen: memory that a library takes from malloc
itself (MKL and oneDNN scratch, a ``std::vector``), and tensors allocated inside the worker threads of a parallel loop.
"""

import gc
import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

import torch

# kineto announces each start and stop on stderr, in the middle of our tables; it reads this at its first use.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
_BOUNDARY = "compgen_fast.bench: backward begins"
T = TypeVar("T")


@dataclass(frozen=True)
class Peaks:
    """The most bytes held at once during a part of a pass, beyond those held when that part began."""

    forward: int
    backward: int
    full: int


def measure_peaks(forward: Callable[[], T], backward: Callable[[T], object], device: str) -> Peaks:
    """Runs ``backward(forward())`` once. What they return counts as held: it is alive when the pass ends.

    The backward is measured within the whole pass, not alone: what it releases was allocated by the forward.
    """
    gc.collect()  # or garbage from before is released during the pass and hides what the pass takes
    return (_on_cuda if device == "cuda" else _on_cpu)(forward, backward)


def _on_cpu(forward: Callable[[], T], backward: Callable[[T], object]) -> Peaks:
    with torch.autograd.profiler.profile(use_cpu=True, profile_memory=True) as recording:
        outputs = forward()
        with torch.autograd.profiler.record_function(_BOUNDARY):
            pass
        gradients = backward(outputs)
    del outputs, gradients  # held until here
    assert recording.kineto_results is not None
    events = sorted(recording.kineto_results.events(), key=lambda event: event.start_ns())
    boundary = next(i for i, event in enumerate(events) if event.name() == _BOUNDARY)
    return peaks_of(_changes(events[:boundary]), _changes(events[boundary:]))


def _changes(events: list[Any]) -> list[int]:
    return [event.nbytes() for event in events if event.name() == "[memory]"]


def peaks_of(forward: list[int], backward: list[int]) -> Peaks:
    """Peaks of two sequences of allocations (above 0) and releases (below 0), one after the other."""
    between = sum(forward)
    rise, rise_after = max(accumulate(forward, initial=0)), max(accumulate(backward, initial=0))
    return Peaks(rise, rise_after, max(rise, between + rise_after))


def _on_cuda(forward: Callable[[], T], backward: Callable[[T], object]) -> Peaks:
    before = _start_on_cuda()
    outputs = forward()
    torch.cuda.synchronize()
    rise = torch.cuda.max_memory_allocated() - before
    between = _start_on_cuda()
    gradients = backward(outputs)
    torch.cuda.synchronize()
    rise_after = torch.cuda.max_memory_allocated() - between
    del outputs, gradients  # held until here
    return Peaks(rise, rise_after, max(rise, between - before + rise_after))


def _start_on_cuda() -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()
