"""How many workers a stream should have, found by trying: it depends on the disk, the codec and the free cores."""

import os
import time
from pathlib import Path

from compgen_fast.stream.stream import ShardStream

WARM = 8
GOOD_ENOUGH = 0.95


def measure_workers(
    data: str | Path, batch_size: int, *, most: int | None = None, seconds: float = 1.0, masks: bool = False
) -> dict[int, float]:
    """Samples per second for 0, 1, 2, 4, … workers, up to ``most`` (by default, the cores this process may use)."""
    most = len(os.sched_getaffinity(0)) if most is None else most
    counts = [0, *(1 << power for power in range(most.bit_length()) if 1 << power < most), *([most] if most else [])]
    return {workers: _rate(data, batch_size, workers, seconds, masks) for workers in counts}


def fewest_good(rates: dict[int, float]) -> int:
    """The smallest number of workers that comes within 5 % of the fastest."""
    fastest = max(rates.values())
    return min(workers for workers, rate in rates.items() if rate >= GOOD_ENOUGH * fastest)


def _rate(data: str | Path, batch_size: int, workers: int, seconds: float, masks: bool) -> float:
    batches = iter(ShardStream(data, batch_size=batch_size, workers=workers, masks=masks))
    for _ in range(WARM + 2 * workers):  # workers start, files are opened, and what is read ahead does not count
        next(batches)
    taken, started = 0, time.perf_counter()
    while (passed := time.perf_counter() - started) < seconds:
        next(batches)
        taken += 1
    return taken * batch_size / passed
