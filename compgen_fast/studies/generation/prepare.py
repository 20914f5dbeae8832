"""What generators stand on: probes of what is generated, and trained tokenizers."""

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from compgen_fast.files import whole_file
from compgen_fast.measure.factor_probes import FactorProbes, fit_probes
from compgen_fast.models.io import load_model
from compgen_fast.models.tokenizer import Tokenizer
from compgen_fast.studies import training
from compgen_fast.studies.generation.plan import CONCEPTS, TokenizerJob
from compgen_fast.studies.queue import Found
from compgen_fast.train import data
from compgen_fast.train.config import TrainConfig
from compgen_fast.worlds.shapes2d import Shapes2D

PROBES = "probes.safetensors"
JUDGED = 200  # real images of each composition that say how well a tokenizer brings them back
SHARES = {"validation": 4, "level1": 3, "level2": 1}
"""How many compositions each part of the split has."""


def fit(config: TrainConfig, out: Path, steps: int) -> None:
    """Teaches the probes on real images of all compositions, once. Those of a quick look may be worse than 99 %."""
    path = out / PROBES
    if path.is_file():
        return
    least = 0.99 if steps >= 1_000 else 0.0
    source = _world(config).split("all", size=8_000)
    taught = fit_probes([source], CONCEPTS, steps=steps, least=least)
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as temporary:
        save_file(taught.state_dict(), temporary)


def probes(config: TrainConfig, out: Path) -> FactorProbes:
    """Those that `fit` left, for images of this run's size."""
    factors = {factor.name: factor for factor in _world(config).factors}
    model = FactorProbes([factors[name] for name in CONCEPTS], config.model.image_size)
    model.load_state_dict(load_file(out / PROBES))
    return model.eval().requires_grad_(False)


def tokenizer(job: TokenizerJob, out: Path) -> Found:
    """Trains one; how many real images, and how many of what it makes of them, show what they should."""
    with training.prepared(job.train.device) as ranks:
        training.run(job.train, ranks, lambda _: None)
    model, judges = load_tokenizer(job.train.out / "weights"), probes(job.train, out)
    images, values = unseen_images(job.train, JUDGED)
    with torch.no_grad():
        back = torch.cat([model.paint(model.encode(some)) for some in images.split(JUDGED)])
    return {
        "tokenizer": job.name,
        "real": judges.judge(images, values).per_composition(),
        "reconstructed": judges.judge(back, values).per_composition(),
        "error": ((back.double() - images.double()) / 255).square().mean().item(),
    }, {}


def load_tokenizer(weights: Path) -> Tokenizer:
    model = load_model(weights)
    assert isinstance(model, Tokenizer)
    return model


def unseen_images(config: TrainConfig, each: int) -> tuple[Tensor, dict[str, Tensor]]:
    """``each`` images of every composition that no training has shown, uint8 [8 · each, H, W, 3], and their factors
    [8 · each]: seen compositions, level 1, level 2.
    """
    world = _world(config)
    parts = [world.split("composition", part, size=count * each) for part, count in SHARES.items()]
    found = [part.samples(np.arange(len(part))) for part in parts]
    factors = {name: np.concatenate([some.factors[name] for some in found]) for name in found[0].factors}
    images = torch.from_numpy(np.concatenate([some.images for some in found]))
    return images, {name: torch.from_numpy(column) for name, column in factors.items()}


def _world(config: TrainConfig) -> Shapes2D:
    world = data.part(config.data, config.model.image_size, "train").world
    assert isinstance(world, Shapes2D)
    return world
