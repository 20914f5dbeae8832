"""How many images a second each world draws: `python -m compgen_fast.worlds.speed [resolution]`.

Rounds of all worlds in turn, so that a busy moment of the machine falls on all of them; median and extremes of rounds.
Run it with OMP_NUM_THREADS=1 for the figure per core.
"""

import sys
import time

import numpy as np

from compgen_fast.worlds import NAMES, Part, open_split

BATCH, ROUNDS = 256, 9


def rate(part: Part, start: int) -> float:
    began = time.perf_counter()
    part.samples(np.arange(start, start + BATCH) % len(part))
    return BATCH / (time.perf_counter() - began)


def main(resolution: int) -> None:
    parts = {name: open_split(name, resolution=resolution) for name in NAMES}
    parts["scenes, two objects"] = open_split("scenes", split="object", resolution=resolution)
    for part in parts.values():
        part.samples(np.arange(2))  # tables are made on first use
    rates: dict[str, list[float]] = {name: [] for name in parts}
    for turn in range(ROUNDS):
        for name, part in parts.items():
            rates[name].append(rate(part, turn * BATCH))
    for name, found in rates.items():
        print(f"{name:20} {np.median(found):7.0f} images/s at {resolution} px ({min(found):.0f}–{max(found):.0f})")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 64)
