"""What it brings to train small models as one: the same steps, one model after another and as a stack."""

import time
from statistics import median
from typing import Any

import torch

from compgen_fast.studies.bumps.decoders import mlp
from compgen_fast.studies.bumps.failure import SIZE
from compgen_fast.studies.bumps.fitting import Fit, draws, optimise, squared
from compgen_fast.studies.bumps.sheet import Sheet, open_sheet

MODELS, STEPS, ROUNDS = 8, 24, 7


def speedup(models: int = MODELS) -> dict[str, Any]:
    """Seconds for one step of all models, medians of interleaved rounds on one thread; the penalty study's MLP."""
    sheet, threads = open_sheet(SIZE, "one-hot"), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        seeds = list(range(models))
        rounds = [(_seconds(sheet, [[seed] for seed in seeds]), _seconds(sheet, [seeds])) for _ in range(ROUNDS)]
    finally:
        torch.set_num_threads(threads)
    alone, stacked = (median(each) / STEPS for each in zip(*rounds, strict=True))
    return {
        "models": models, "decoder": "MLP 56-128-128-784, batch 16", "one_after_another": alone, "stacked": stacked,
        "speedup": median(first / second for first, second in rounds),
    }  # fmt: skip


def _train(sheet: Sheet, seeds: list[int]) -> None:
    fit = Fit(STEPS, batch=16)
    decoder = mlp(seeds, sheet.codes.shape[1], SIZE, depth=3, width=128)
    rows = draws([[sheet.known]] * len(seeds), seeds, fit)
    optimise(decoder, squared(decoder, sheet.codes, sheet.images), rows, fit)


def _seconds(sheet: Sheet, stacks: list[list[int]]) -> float:
    started = time.perf_counter()
    for seeds in stacks:
        _train(sheet, seeds)
    return time.perf_counter() - started
