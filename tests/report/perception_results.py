"""A folder as a perception study leaves it, made without training: real images of Scenes, invented numbers."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compgen_fast.worlds.scenes import Scenes
from compgen_fast.worlds.scenes_backgrounds import BACKGROUNDS
from compgen_fast.worlds.scenes_shapes import CATEGORIES

DECODERS = ("unconstrained", "attention", "hessian", "additive")
INFERENCES = ("encoder", "search", "replay", "replay+search")
UNSEEN = {
    "unconstrained": (0.11, 0.16, 0.18, 0.22),
    "attention": (0.12, 0.58, 0.66, 0.79),
    "hessian": (0.10, 0.61, 0.64, 0.81),
    "additive": (0.13, 0.41, 0.50, 0.62),
}
SIZE, STEPS = 32, 40


def results(seeds: Sequence[int] = (0,), *, sweeps: bool = True) -> dict[str, Any]:
    """The contents of results.json. Accuracies are those of UNSEEN, plus 0.01 per seed."""
    return {
        "study": "perception",
        "version": 1,
        "command": "cgf study perception --scale quick --out <folder>",
        "scale": "quick",
        "split": "background",
        "seeds": list(seeds),
        "encoder": "dense",
        "world": {
            "name": "scenes", "resolution": SIZE, "seen_pairs": 2, "options": ["variation=0.1"], "train_images": 20000,
            "objects": 20, "partners": 10,
        },
        "versions": {"compgen_fast": "0.6.0", "torch": "2.13.0"},
        "started": "2026-11-16T20:00:00+00:00",
        "seconds": 512.3,
        "chance": {"object_1": 0.05, "background": 0.1},
        "methods": [entry for seed in seeds for entry in _methods(seed)],
        "decoders": [_decoder(name, number, seed) for seed in seeds for number, name in enumerate(DECODERS)],
        "sweeps": _sweeps(seeds) if sweeps else {"strength": [], "data_size": []},
        "curves": {f"{name}/{seed}": _curve(number, seed) for number, name in enumerate(DECODERS) for seed in seeds},
        "claims": [
            {"claim": "every method reads objects ID at 97 % or more", "holds": True, "evidence": "lowest 98.0 %"},
            {"claim": "longer training closes the gap", "holds": False, "evidence": "9.0 % <b>OOD</b>"},
        ],
    }  # fmt: skip


def entry(
    method: str,
    decoder: str | None,
    inference: str,
    seed: int,
    unseen: float,
    seen: float = 0.98,
    encoder: str | None = None,
) -> dict[str, Any]:
    """One of results["methods"]. It names its slot encoder if that is not the study's main one."""
    error: dict[str, float | None] = {"id": None, "ood": None} if decoder is None else {"id": 0.0021, "ood": 0.0043}
    named = {} if encoder is None else {"encoder": encoder}
    return named | {
        "method": method, "decoder": decoder, "inference": inference, "seed": seed,
        "accuracy": {"object_1": {"id": seen, "ood": unseen}, "background": {"id": 1.0, "ood": 0.99}},
        "r2": {"x_1": {"id": 0.97, "ood": 0.81}}, "mse": error,
        "images_per_second": 40.0 if "search" in inference else 5000.0,
        "train_seconds": 60.1 if method == "supervised" else 312.0,
    }  # fmt: skip


def _methods(seed: int) -> list[dict[str, Any]]:
    lift = 0.01 * seed
    of_decoders = [
        entry("vae", decoder, inference, seed, unseen + lift)
        for decoder in DECODERS
        for inference, unseen in zip(INFERENCES, UNSEEN[decoder], strict=True)
    ]
    of_encoders = [
        entry("vae", "attention", inference, seed, unseen + lift, encoder=encoder)
        for encoder, both in (("attention", (0.15, 0.71)), ("queries", (0.14, 0.64)))
        for inference, unseen in zip(("encoder", "replay+search"), both, strict=True)
    ]
    return [
        entry("supervised", None, "encoder", seed, 0.08 + lift),
        entry("supervised_longer", None, "encoder", seed, 0.09 + lift),
        *of_decoders,
        entry("vae", "attention", "newton", seed, 0.55 + lift),
        *of_encoders,
    ]


def _decoder(name: str, number: int, seed: int) -> dict[str, Any]:
    return {
        "decoder": name, "seed": seed, "parameters": 412_345 + number,
        "mse": {"id": 0.002 + 0.0004 * number, "ood": 0.009 - 0.001 * number + 0.0003 * seed},
        "block_hessian_share": (0.21, 0.04, 0.006, 0.0)[number], "jis": 0.5 + 0.1 * number, "j_ari": 0.4 + 0.1 * number,
        "fg_ari": None if name == "unconstrained" else 0.6 + 0.1 * number, "composite_error": 0.012 - 0.002 * number,
    }  # fmt: skip


def _sweeps(seeds: Sequence[int]) -> dict[str, Any]:
    def both(names: tuple[str, str], worse: float, better: float) -> dict[str, Any]:
        return {name: {"id": 0.98, "ood": ood} for name, ood in zip(names, (worse, better), strict=True)}

    return {
        "strength": [
            {"alpha": alpha, "seed": seed, "block_hessian_share": 0.2 / (1 + 40 * alpha),
             "accuracy": both(("encoder", "replay+search"), 0.1 + 0.01 * seed, 0.2 + 0.15 * place + 0.02 * seed)}
            for place, alpha in enumerate((0.0, 0.01, 0.05, 0.2))
            for seed in seeds
        ],
        "data_size": [
            {"images": images, "seed": seed,
             "accuracy": both(("supervised", "replay+search"), 0.06 + 0.02 * seed, 0.3 + 0.2 * place + 0.02 * seed)}
            for place, images in enumerate((2000, 6000, 20000))
            for seed in seeds
        ],
    }  # fmt: skip


def _curve(number: int, seed: int) -> dict[str, Any]:
    step = np.arange(0, 2000, 50)
    return {
        "step": step.tolist(),
        "mse": (0.05 / (1 + step / (100 + 20 * number + 10 * seed)) + 0.002).tolist(),
        "penalty": (0.2 / (1 + step / (50 + 30 * number))).tolist() if number in (1, 2) else [None] * len(step),
    }


def pictures(images: int = 6, failures: int = 3) -> dict[str, NDArray[Any]]:
    """The contents of pictures.npz for two decoders. Decodes are the wrong object fading into the right one."""
    arrays: dict[str, NDArray[Any]] = {}
    for place, decoder in enumerate(("attention", "unconstrained")):
        arrays |= {f"{decoder}/{name}": value for name, value in _searches(images, 100 * place, True).items()}
        if failures:
            failed = _searches(failures, 100 * place + 50, False)
            arrays |= {f"{decoder}/failures/{name}": value for name, value in failed.items()}
        arrays[f"{decoder}/composites"] = _composites(4, 100 * place)
    return arrays


def _searches(count: int, start: int, succeed: bool) -> dict[str, NDArray[Any]]:
    world = Scenes(resolution=SIZE)
    samples = world.split("background", "ood").samples(np.arange(start, start + count))
    objects = samples.factors["object_1"].astype(int)
    wrong = world.render(dict(samples.factors) | {"object_1": (objects + 7) % len(CATEGORIES)}).images
    target = samples.images if succeed else wrong
    mix = np.linspace(0.25, 1, 9)[None, :, None, None, None]
    blurred = (wrong.astype(float) + np.roll(wrong, 3, axis=2)) / 2
    path = (1 - mix) * blurred[:, None] + mix * target[:, None]
    assert samples.masks is not None
    inside = samples.masks[:, None] == np.arange(3)[None, :, None, None]
    names = [CATEGORIES[number] for number in objects]
    places = [BACKGROUNDS[int(number)] for number in samples.factors["background"]]
    before = [CATEGORIES[(number + 7) % len(CATEGORIES)] for number in objects]
    decay = 0.05 * np.exp(-np.arange(STEPS) / (8 if succeed else 30))[None] * (1 + np.arange(count))[:, None]
    return {
        "images": samples.images, "path": path.round().astype(np.uint8), "maps": 0.9 * inside + 0.1 / 3,
        "labels": np.array([f"{name} on {place}" for name, place in zip(names, places, strict=True)]),
        "read": np.array(list(zip(before, names if succeed else before, strict=True))), "errors": decay + 0.002,
    }  # fmt: skip


def _composites(count: int, start: int) -> NDArray[np.uint8]:
    world = Scenes(resolution=SIZE)
    part = world.split("background", "test")
    first, second = (part.samples(np.arange(at, at + count)) for at in (start, start + count))
    scenery = ("background", "background_x", "background_y", "background_hue", "light", "light_angle")
    together = world.render(dict(second.factors) | {name: first.factors[name] for name in scenery})
    return np.stack([first.images, second.images, together.images], axis=1)


def folder_of(path: Path, numbers: dict[str, Any] | None = None, arrays: dict[str, NDArray[Any]] | None = None) -> Path:
    """Writes both files into the folder ``path`` and returns it."""
    (path / "results.json").write_text(json.dumps(results() if numbers is None else numbers))
    np.savez_compressed(path / "pictures.npz", **(pictures() if arrays is None else arrays))  # type: ignore[arg-type]
    return path
