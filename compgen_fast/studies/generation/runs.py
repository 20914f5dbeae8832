"""A generator: trained by the same trainer as all models, and asked for all compositions along the way.

It is asked with its averaged weights and the same noise every time, for the factors of images that no training has
shown. Probes then say of each image whether shape, colour and size are on the side that was asked for.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compgen_fast.draws import Draws
from compgen_fast.files import write_whole
from compgen_fast.generate.generator import Generator
from compgen_fast.measure.factor_probes import FactorProbes
from compgen_fast.models.tokenizer import Tokenizer
from compgen_fast.studies import training
from compgen_fast.studies.generation import circuits, prepare
from compgen_fast.studies.generation.plan import Run
from compgen_fast.studies.queue import Found
from compgen_fast.train.loop import Trainer

CURVE = "curve.json"
AT_ONCE = 128  # images that are sampled together
SHOWN = 6  # images of each composition for the page


@dataclass(frozen=True)
class Point:
    """What a generator did after so many steps: shares of images."""

    step: int
    compositions: Mapping[str, float]
    """All three factors right, by composition."""
    factors: Mapping[str, Mapping[str, float]]
    """By composition, each factor right."""


@dataclass(frozen=True)
class Asking:
    """Asks generators for images of every composition, and has them judged."""

    tokenizer: Tokenizer
    probes: FactorProbes
    factors: Mapping[str, Tensor]
    """By name, [n] each."""

    def first(self, count: int) -> "Asking":
        """Only for the first images."""
        return replace(self, factors={name: values[:count] for name, values in self.factors.items()})

    def images(self, model: Generator) -> Tensor:
        """uint8 [n, H, W, 3], by the same noise whatever the weights."""
        count = len(next(iter(self.factors.values())))
        device = next(model.parameters()).device
        drawn = []
        for first in range(0, count, AT_ONCE):
            some = {name: values[first : first + AT_ONCE].to(device) for name, values in self.factors.items()}
            draws = Draws.at(0, 0, first=first, total=count, device=device)
            drawn.append(self.tokenizer.paint(model.sample(some, draws=draws).cpu()))
        return torch.cat(drawn)

    def point(self, step: int, images: Tensor) -> Point:
        found = self.probes.judge(images, self.factors)
        names = ["".join(str(int(side)) for side in sides) for sides in found.wanted.tolist()]
        among = {name: torch.tensor([each == name for each in names]) for name in sorted(set(names))}
        return Point(
            step,
            found.per_composition(),
            {
                name: dict(zip(found.factors, found.right[rows].double().mean(0).tolist(), strict=True))
                for name, rows in among.items()
            },
        )


def run(job: Run, out: Path) -> Found:
    """Trains the generator, or goes on; its curve, and the images it ends with."""
    tokenizer = prepare.load_tokenizer(out / "tokenizers" / job.variation.tokenizer / "weights")
    _, factors = prepare.unseen_images(job.train, job.images)
    asking = Asking(tokenizer, prepare.probes(job.train, out), factors)
    last: dict[str, Any] = {}
    with training.prepared(job.train.device) as ranks:
        training.run(job.train, ranks, lambda trainer: _ask(trainer, job, asking, last))
    arrays = {"samples": shown(last["images"], job.images)}
    numbers: dict[str, Any] = {
        "name": job.variation.name,
        "objective": job.variation.objective,
        "told": job.variation.told,
        "jepa": list(job.variation.jepa),
        "seed": job.train.seed,
        "curve": json.loads((job.train.out / CURVE).read_text()),
    }
    if job.ablated:
        numbers["circuits"] = last["circuits"]
    return numbers, arrays


def _ask(trainer: Trainer, job: Run, asking: Asking, last: dict[str, Any]) -> None:
    """Adds a point to the run's curve where one is due. A run that was cut off before it wrote one asks again."""
    step, path = trainer.step, job.train.out / CURVE
    if step == 0 or (step % job.every and step != job.train.steps):
        return
    curve = json.loads(path.read_text()) if path.is_file() else []
    kept = [point for point in curve if point["step"] < step]
    model = trainer.model
    assert isinstance(model, Generator)
    with trainer.ema.applied(model):
        model.eval()
        images = asking.images(model)
        if step == job.train.steps:
            last["images"] = images
            if job.ablated:
                last["circuits"] = circuits.effects(model, asking.first(prepare.SHARES["validation"] * job.images))
        model.train()
    write_whole(path, json.dumps([*kept, asdict(asking.point(step, images))]))


def shown(images: Tensor, each: int) -> NDArray[np.uint8]:
    """The first images of each composition, uint8 [8, SHOWN, H, W, 3], in the order of `prepare.SHARES`."""
    counts = prepare.SHARES.values()
    parts = zip(images.split([count * each for count in counts]), counts, strict=True)
    shown = [part.unflatten(0, (each, count)).transpose(0, 1)[:, :SHOWN] for part, count in parts]
    return torch.cat(shown).numpy()
