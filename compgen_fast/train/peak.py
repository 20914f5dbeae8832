"""What this machine can do at most: the FLOP/s of its best matrix product, and the memory that this process holds.

The utilisation of a run is its FLOP/s over this peak, so the peak is measured here and not read from a data sheet.
Not for comparing implementations: that is `cgf bench`.
"""

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

# Sizes of the square products. The largest takes a core a quarter of a second; the smaller ones do not fill a GPU.
SIZES = {"cpu": (256, 512, 1024, 2048), "cuda": (2048, 4096, 8192)}
SECONDS_PER_SIZE = 0.25
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Memory:
    """Bytes: resident in this process on a CPU, held by torch's allocator on a GPU."""

    now: int
    peak: int


def measured_peak(device: str | torch.device, dtype: torch.dtype, threads: int) -> float:
    """FLOP/s of the fastest of a few square matrix products on ``threads`` CPU threads, or on one GPU.

    It takes about a second. In fp32 on a GPU it is the rate of torch's current setting, TF32 or not.
    """
    device = torch.device(device)
    if device.type not in SIZES:
        raise ValueError(f"measured_peak: device is {device}; expected one of {', '.join(SIZES)}")
    if dtype not in DTYPES:
        raise ValueError(f"measured_peak: dtype is {dtype}; expected one of {', '.join(map(str, DTYPES))}")
    if threads < 1:
        raise ValueError(f"measured_peak: threads is {threads}; expected at least 1")
    best = 0.0
    with _threads(threads):
        for size in SIZES[device.type]:
            if best and 2 * size**3 / best > SECONDS_PER_SIZE:  # bf16 where the processor has no instructions for it
                break
            best = max(best, _rate(device, dtype, size))
    return best


def memory_in_use(device: str | torch.device) -> Memory:
    """What this process holds, and the most it ever held."""
    device = torch.device(device)
    if device.type == "cuda":
        return Memory(torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device))
    status = Path("/proc/self/status")
    if not status.exists():  # macOS, where only the peak can be had without a library, and in bytes
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return Memory(peak, peak)
    # Not getrusage: a child process starts with the peak of the process that started it.
    fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
    return Memory(*(int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM")))


def _rate(device: torch.device, dtype: torch.dtype, size: int) -> float:
    # a @ bᵀ is the product of a linear layer; the CPU's bf16 is seven times slower in other layouts.
    a, b = torch.randn(size, size, device=device).to(dtype), torch.randn(size, size, device=device).to(dtype).t()
    out = torch.empty(size, size, device=device, dtype=dtype)
    _seconds(a, b, out)  # the first call plans and allocates
    fastest, until = float("inf"), time.perf_counter() + SECONDS_PER_SIZE
    while time.perf_counter() < until:
        fastest = min(fastest, _seconds(a, b, out))
    return 2 * size**3 / fastest


def _seconds(a: Tensor, b: Tensor, out: Tensor) -> float:
    _finish(out.device)
    started = time.perf_counter()
    torch.mm(a, b, out=out)
    _finish(out.device)
    return time.perf_counter() - started


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
