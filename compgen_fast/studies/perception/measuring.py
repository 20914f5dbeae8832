"""What one trained job knows: `python -m compgen_fast.studies.perception.measuring FOLDER` writes its result.json.

Latents of an image come from the encoder, from search, from the replayed encoder, or from search that starts there.
Each way has readouts of its own, fitted on training images whose latents came the same way: a searched latent is not
the latent that an encoder gives, and a readout of one is void on the other. Settings never see an unseen combination.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from compgen_fast.files import write_whole
from compgen_fast.invert import Found, SlotMarginals, newton, search, starts
from compgen_fast.measure import (
    Readout,
    Regression,
    ari,
    block_hessian,
    fit_factors,
    jacobian_norms,
    jis,
    masks_by_attention,
    per_factor,
)
from compgen_fast.models.io import load_model
from compgen_fast.models.replay import Replay
from compgen_fast.models.slot_vae import SlotVAE
from compgen_fast.models.supervised import SupervisedEncoder
from compgen_fast.recipes.perception import READ
from compgen_fast.report.study import PICTURES
from compgen_fast.studies.perception import pictures
from compgen_fast.studies.perception.plan import Job
from compgen_fast.studies.perception.work import read_job, told
from compgen_fast.train.data import part
from compgen_fast.train.memory import keep_freed_memory
from compgen_fast.train.metrics import read as read_metrics
from compgen_fast.worlds.source import Factor

RESULT = "result.json"
CURVED, COMPOSED = 32, 256  # images that derivatives, and composites, are measured on
BATCH = 256
POINTS = 60  # of a curve


@dataclass(frozen=True)
class Images:
    """Some images of a part of the split, with all that is known of them."""

    pixels: Tensor  # uint8 [n, H, W, 3]
    values: Mapping[str, NDArray[Any]]
    masks: Tensor  # int64 [n, H · W]


@dataclass(frozen=True)
class Inferred:
    """Latents [n, K, D], the mean squared error of their decodes [n], and the seconds they took."""

    z: Tensor
    error: Tensor
    seconds: float


Inference = Callable[[Images], Inferred]


def measure(folder: Path) -> None:
    """Writes result.json and, for a decoder, pictures.npz."""
    job = read_job(folder)
    keep_freed_memory()
    parts = {
        "probe": _images(job, "train", job.probes),
        "id": _images(job, "test", job.tested),
        "ood": _images(job, "ood", job.tested),
    }
    model = load_model(job.train.out / "weights").to(job.train.device)
    if isinstance(model, SupervisedEncoder):
        result = {"methods": [_supervised(job, model, parts)]}
    else:
        assert isinstance(model, SlotVAE)
        result = _inverted(job, model, parts, folder)
    write_whole(folder / RESULT, json.dumps(result))


def _images(job: Job, name: str, count: int) -> Images:
    samples = part(job.train.data, job.train.model.image_size, name).samples(np.arange(count))
    assert samples.masks is not None
    return Images(torch.from_numpy(samples.images), samples.factors, torch.from_numpy(samples.masks).flatten(1).long())


# ------------------------------------------------------------------------------------------------ encoders alone


def _supervised(job: Job, model: SupervisedEncoder, parts: Mapping[str, Images]) -> dict[str, Any]:
    started = time.perf_counter()
    right = {name: _predicted(model, parts[name]) for name in ("id", "ood")}
    seconds = time.perf_counter() - started
    accuracy = {factor: {name: right[name][factor] for name in right} for factor in right["id"]}
    return _entry(job, "encoder", accuracy, {}, {"id": None, "ood": None}, 2 * job.tested / seconds, _seconds(job, 1))


def _predicted(model: SupervisedEncoder, images: Images) -> dict[str, float]:
    found = [model.predict(batch.to(_device(model))) for batch in images.pixels.split(BATCH)]
    return {
        factor.name: float(
            np.mean(torch.cat([each[factor.name] for each in found]).cpu().numpy() == images.values[factor.name])
        )
        for factor in model.factors
        if factor.categorical
    }


# ------------------------------------------------------------------------------------------------ decoders inverted


def _inverted(job: Job, vae: SlotVAE, parts: Mapping[str, Images], folder: Path) -> dict[str, Any]:
    assert job.replay is not None
    replay = load_model(job.replay.out / "weights").to(job.train.device)
    assert isinstance(replay, Replay)
    ways: dict[str, tuple[Inference, int]] = {
        "encoder": (_encoding(vae), 1),
        "search": (_searching(job, vae, parts), 1),
    }
    if job.newton:
        ways["newton"] = _searching(job, vae, parts, by_newton=True), 1
    ways["replay"] = _encoding(replay.vae), 2
    ways["replay+search"] = _searching(job, replay.vae, parts), 2
    entries, readouts, found = [], {}, {}
    for number, (name, (infer, runs)) in enumerate(ways.items()):
        told("measuring", number, len(ways) + 1)
        latents = {where: infer(images) for where, images in parts.items()}
        readouts[name] = fit_factors(_factors(job), latents["probe"].z, parts["probe"].values)
        entries.append(_read(job, name, readouts[name], latents, parts, runs))
        found[name] = latents
    told("measuring", len(ways), len(ways) + 1)
    things = _things(readouts["encoder"])
    composites = pictures.composites(job, vae, parts["probe"], found["encoder"]["probe"].z, things, COMPOSED)
    kept = pictures.of_search(job, vae, parts["ood"], found, readouts) | {"composites": composites.shown}
    np.savez_compressed(folder / PICTURES, **kept)  # type: ignore[arg-type]
    return {
        "methods": entries,
        "decoder": _decoder(job, vae, parts["id"], found["encoder"]) | {"composite_error": composites.error},
        "curve": _curve(job),
    }


def _factors(job: Job) -> list[Factor]:
    """The split's categories, and where objects are."""
    split = job.train.data.split or "background"
    places = [name.replace("object", axis) for name in READ[split] if name.startswith("object") for axis in "xy"]
    wanted = (*READ[split], *places)
    return [
        factor for factor in part(job.train.data, job.train.model.image_size, "train").factors if factor.name in wanted
    ]


def _encoding(vae: SlotVAE) -> Inference:
    @torch.no_grad()
    def infer(images: Images) -> Inferred:
        started = time.perf_counter()
        z = encoded(vae, images.pixels)
        seconds = time.perf_counter() - started
        return Inferred(z, _errors(vae, z, images), seconds)

    return infer


@torch.no_grad()
def encoded(vae: SlotVAE, pixels: Tensor) -> Tensor:
    """The encoder's latents [n, K, D], on the CPU."""
    return torch.cat([vae.encode(batch.to(_device(vae)))[0].cpu() for batch in pixels.split(BATCH)])


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _searching(job: Job, vae: SlotVAE, parts: Mapping[str, Images], by_newton: bool = False) -> Inference:
    marginals = SlotMarginals.fit(_encoding(vae)(parts["probe"]).z)

    def infer(images: Images) -> Inferred:
        started = time.perf_counter()
        found = searched(job, vae, images.pixels, marginals, by_newton=by_newton)
        return Inferred(found.z, found.error, time.perf_counter() - started)

    return infer


def searched(
    job: Job, vae: SlotVAE, pixels: Tensor, marginals: SlotMarginals, by_newton: bool = False, **kept: Any
) -> Found:
    """Search as the job says, from the encoder's latents. What is found is on the CPU."""
    config, device = job.search, _device(vae)
    generator = torch.Generator().manual_seed(job.seed)
    init = starts(encoded(vae, pixels), marginals, swapped=config.swapped, drawn=config.drawn, generator=generator)
    problem = vae.decoder, pixels.to(device), init.to(device)
    if by_newton:
        found = newton(*problem, pixels=config.pixels, marginals=marginals, pull=config.pull, **kept)
    else:
        found = search(
            *problem, steps=config.steps, rate=config.rate, pixels=config.pixels, marginals=marginals,
            pull=config.pull, still=config.still, **kept,
        )  # fmt: skip
    return replace(found, **{name: value.cpu() for name, value in vars(found).items() if value is not None})


@torch.no_grad()
def _errors(vae: SlotVAE, z: Tensor, images: Images) -> Tensor:
    pairs = zip(z.split(BATCH), images.pixels.flatten(1, 2).split(BATCH), strict=True)
    decoded = ((vae.decode(slots.to(_device(vae))).cpu(), pixels / 255) for slots, pixels in pairs)
    return torch.cat([(colours - pixels).square().mean((1, 2)) for colours, pixels in decoded])


def _read(
    job: Job,
    inference: str,
    readouts: Mapping[str, Any],
    latents: Mapping[str, Inferred],
    parts: Mapping[str, Images],
    runs: int,
) -> dict[str, Any]:
    scores = {name: per_factor(readouts, latents[name].z, parts[name].values) for name in ("id", "ood")}
    kinds: dict[bool, dict[str, Any]] = {True: {}, False: {}}
    for factor, readout in readouts.items():
        kinds[isinstance(readout, Readout)][factor] = {name: scores[name].get(factor) for name in scores}
    error = {name: float(latents[name].error.mean()) for name in scores}
    judged = [latents[name] for name in scores]
    speed = sum(len(each.z) for each in judged) / sum(each.seconds for each in judged)
    return _entry(job, inference, kinds[True], kinds[False], error, speed, _seconds(job, runs))


def _entry(
    job: Job,
    inference: str,
    accuracy: Mapping[str, Any],
    r2: Mapping[str, Any],
    error: Mapping[str, float | None],
    speed: float,
    train_seconds: float,
) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "method": job.method, "decoder": job.decoder, "inference": inference, "seed": job.seed, "accuracy": accuracy,
        "r2": r2, "mse": error, "images_per_second": speed, "train_seconds": train_seconds,
    }  # fmt: skip
    return entry | ({"encoder": job.encoder} if job.encoder else {})


def _seconds(job: Job, runs: int) -> float:
    """How long the first so many trainings of a job took."""
    return sum(_lasted(config.out) for config in (job.train, job.replay)[:runs] if config is not None)


def _lasted(run: Path) -> float:
    """The seconds of a run's steps, of all the times it was started."""
    rows = read_metrics(run)
    return float(
        sum((row["samples"] - before["samples"]) / row["samples_per_second"] for before, row in pairwise(rows))
    )


# ------------------------------------------------------------------------------------------------ the decoder itself


def _things(readouts: Mapping[str, Readout | Regression]) -> list[int]:
    """The slots that tell where objects are. What they are, a scene's slot may know too, from their company."""
    return sorted(
        {readout.slot for name, readout in readouts.items() if name[:2] in ("x_", "y_") and readout.slot is not None}
    )


def _decoder(job: Job, vae: SlotVAE, images: Images, latents: Mapping[str, Inferred]) -> dict[str, Any]:
    """How much its slots interact, and whether they are objects."""
    z, masks = latents["id"].z[:CURVED].to(_device(vae)), images.masks[:CURVED].to(_device(vae))
    norms = jacobian_norms(vae.decoder, z)
    hessian = block_hessian(vae.decoder, z, generator=torch.Generator(z.device).manual_seed(job.seed))
    by_mask = None
    if hasattr(vae.decoder, "decode_with_masks"):
        by_mask = ari(masks_by_attention(vae.decoder, z), masks, ignore_background=True).nanmean().item()
    return {
        "decoder": job.decoder, "seed": job.seed, "parameters": sum(p.numel() for p in vae.decoder.parameters()),
        "mse": {name: float(latents[name].error.mean()) for name in ("id", "ood")},
        "block_hessian": hessian.across, "block_hessian_share": hessian.share, "jis": jis(norms).nanmean().item(),
        "j_ari": ari(norms.argmax(1), masks, ignore_background=False).nanmean().item(), "fg_ari": by_mask,
    }  # fmt: skip


def _curve(job: Job) -> dict[str, list[float | None]]:
    rows = [row for row in read_metrics(job.train.out) if "loss" in row]
    shown = [rows[place] for place in np.unique(np.linspace(0, len(rows) - 1, POINTS).round().astype(int))]
    return {name: [row.get(name) for row in shown] for name in ("step", "mse", "penalty")}


if __name__ == "__main__":
    measure(Path(sys.argv[1]))
