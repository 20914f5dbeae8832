"""Clocks: what a moment is on the CPU and on a GPU."""

import time
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Marks moments. On CUDA a moment is an event on the stream, known only later; hence two steps."""

    def ready(self) -> None:
        """Called before each pass, outside of the timing."""

    def mark(self) -> Any: ...

    def seconds(self, start: Any, end: Any) -> float: ...


class CpuClock:
    def ready(self) -> None:
        pass

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        return end - start


class CudaClock:
    """Written for, but never yet run on, a GPU."""

    def __init__(self) -> None:
        # Larger than any L2 cache: a pass must not find its inputs there because the previous one left them. Zeroing it
        # also keeps the GPU busy while the first kernels are queued, which hides the launch latency.
        self._flush = torch.empty(256 * 2**20, dtype=torch.int8, device="cuda")

    def ready(self) -> None:
        self._flush.zero_()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


def clock_of(device: str) -> Clock:
    return CudaClock() if device == "cuda" else CpuClock()
