"""Whole training steps of a generator, from stored data to updated weights, for the suite `generate`.

Ours is a `Trainer`'s step: tokens that were encoded once are streamed, and forward, backward, clipping, AdamW and the
averaged weights follow, by DeepSpeed's engine. A straightforward one has the eager model of `generate_peers`, torch's
AdamW as it comes, and averages weights one by one. It either reads images as webdataset's documentation has it and
encodes them in every step, or has all latents in memory and reads nothing at all, which is the most it could do.

All three live in one process of its own, since an engine brings a process group, and take turns step by step.
"""

import copy
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from compgen_fast.bench import stream_peers
from compgen_fast.bench.generate_peers import AWAKE, EagerGenerator, Ours, SameDraws, StepSize, encoded
from compgen_fast.bench.harness import FEWEST_ROUNDS, MOST_ROUNDS, quiet_process
from compgen_fast.generate.build import build
from compgen_fast.generate.config import ObjectiveConfig
from compgen_fast.generate.latents import TokenStream, cache
from compgen_fast.models.tokenizer import VQVAE, ConvVAE
from compgen_fast.recipes import generators
from compgen_fast.stream import Batch, ShardStream, pack
from compgen_fast.train import data
from compgen_fast.train.config import DataConfig, TrainConfig
from compgen_fast.train.launch import placed
from compgen_fast.train.loop import Trainer
from compgen_fast.train.ranks import Ranks, joined
from compgen_fast.worlds.source import Factor

IMAGES = 512
SHARD = 64
WARM = 3  # untimed steps
# webdataset's shuffle buffer reads two samples for each that it gives until it holds 1000: these batches fill it.
FILLING = 16

Latents = tuple[Tensor, Mapping[str, Tensor]]
"""Of a batch, and its factors."""


@dataclass(frozen=True)
class Found:
    """What was measured, by contender; ours is called ``ours``."""

    ms: Mapping[str, Sequence[float]]
    """Of each round."""
    errors: Mapping[str, float]
    """Of the loss of the first images, before any step, against fp64."""
    absent: Mapping[str, str]
    """Who could not take part, and why."""


# ---------------------------------------------------------------------------------------------- the side that asks


@contextmanager
def process(threads: int) -> Iterator[Callable[[StepSize, float], Found]]:
    """What measures a size for so many seconds, in a process that ends with the block."""
    with ProcessPoolExecutor(1, get_context("spawn"), _join, (threads,)) as pool:
        yield lambda size, seconds: pool.submit(_measure, size, seconds, threads).result()


# ------------------------------------------------------------------------------------------ the process that measures

_ranks: Ranks
_group: AbstractContextManager[Ranks]  # held: one that nobody holds is left at once


def _join(threads: int) -> None:
    """The process group ends with the process."""
    global _ranks, _group
    torch.set_num_threads(threads)
    placed({}).export()
    _group = joined("cpu")
    _ranks = _group.__enter__()


def _measure(size: StepSize, seconds: float, threads: int) -> Found:
    with tempfile.TemporaryDirectory(prefix="compgen-bench-") as scratch, quiet_process(threads):
        stored = Stored.of(size, Path(scratch))
        with Trainer(stored.config, _ranks, quiet=True) as trainer:
            awaken(trainer.model)
            return measure(trainer, stored, seconds)


@dataclass(frozen=True)
class Stored:
    """Packed images, and a run of the study's on their tokens."""

    images: Path
    tokenizer: ConvVAE | VQVAE
    config: TrainConfig

    @classmethod
    def of(cls, size: StepSize, folder: Path) -> Self:
        """In this folder, with a new tokenizer."""
        if size.batch != stream_peers.BATCH:
            raise ValueError(f"whole steps: batch is {size.batch}; expected {stream_peers.BATCH}, webdataset's here")
        recipe, tokenizer = generators.dit_cpu(), size.tokenizer()
        side, images, tokens = tokenizer.config.image_size, folder / "images", folder / "tokens"
        pack(data.part(replace(recipe.data, size=IMAGES), side, "train"), images, shard_size=SHARD)
        cache(tokenizer, images, tokens, kind=data.kind_of(size.config))
        config = replace(
            recipe,
            model=replace(size.config, image_size=side),
            data=DataConfig(shards=str(tokens), workers=0),
            batch_size=size.batch,
            out=folder / "run",
        )
        return cls(images, tokenizer, config)

    def batches(self) -> Iterator[tuple[Batch, Batch]]:
        """Of images and of their tokens, in the order they were packed."""
        assert self.config.data.shards is not None
        options: dict[str, Any] = {"batch_size": self.config.batch_size, "epochs": 1, "shuffle": False}
        tokens = TokenStream(self.config.data.shards, **options)
        yield from zip(ShardStream(self.images, **options), tokens, strict=True)


def awaken(model: nn.Module) -> None:
    """Noise on new weights, as in `StepSize.build`."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(AWAKE * torch.randn_like(parameter))


def measure(trainer: Trainer, stored: Stored, seconds: float) -> Found:
    """Losses of the same images by all, then the steps, in turns."""
    supplies, absent = {"eager": in_memory(stored)}, {}
    if why := stream_peers.missing("webdataset + PIL"):
        absent["eager, encoding"] = why
    else:
        supplies["eager, encoding"] = from_images(stored, trainer.stream.schema.factors)
    peers = {name: Straightforward(trainer, supply) for name, supply in supplies.items()}
    errors = first_errors(trainer.model, {name: peer.of for name, peer in peers.items()}, stored)
    steps: dict[str, Callable[[], object]] = {"ours": trainer.step_once}
    steps |= {name: peer.step for name, peer in peers.items()}
    return Found(in_turns(steps, seconds), errors, absent)


def in_turns(steps: Mapping[str, Callable[[], object]], seconds: float) -> dict[str, list[float]]:
    """Milliseconds of each contender's step in each round; another one begins in every round."""
    for _ in range(WARM):
        for step in steps.values():
            step()
    found: dict[str, list[float]] = {name: [] for name in steps}
    names, spent, rounds = [*steps], 0.0, 0
    while rounds < FEWEST_ROUNDS or (spent < seconds and rounds < MOST_ROUNDS):
        for name in (names[(rounds + turn) % len(names)] for turn in range(len(names))):
            begun = time.perf_counter()
            steps[name]()
            found[name].append(1e3 * (time.perf_counter() - begun))
            spent += found[name][-1] / 1e3
        rounds += 1
    return found


@torch.no_grad()
def first_errors(model: nn.Module, peers: Mapping[str, Ours], stored: Stored) -> dict[str, float]:
    """How far each one's loss of the first images is from the fp64 one, as a share of it."""
    images, tokens = next(stored.batches())
    latents, factors = tokens.images, tokens.factors
    wide = latents.double() if latents.is_floating_point() else latents
    expected = copy.deepcopy(peers["eager"]).double()(wide, factors, _draws(0))
    losses = {"ours": model(latents, factors, draws=_draws(0))["loss"]}
    for name, peer in peers.items():
        found = encoded(stored.tokenizer, images.images) if name == "eager, encoding" else latents
        losses[name] = peer(found, images.factors, _draws(0))
    return {name: abs(float(loss / expected) - 1) for name, loss in losses.items()}


def _draws(step: int) -> SameDraws:
    return SameDraws.at(0, step)


# ------------------------------------------------------------------------------------------ as one would write it first


class Straightforward:
    """Trains a copy of the trainer's model."""

    def __init__(self, trainer: Trainer, supply: Iterator[Latents]) -> None:
        optimiser = trainer.config.optimiser
        self.model = model = build(cast(ObjectiveConfig, trainer.config.model), trainer.stream.schema.factors)
        model.load_state_dict(trainer.model.state_dict())
        self.of, self.supply, self.steps = EagerGenerator(model), supply, 0
        self.trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.average = [parameter.detach().clone() for parameter in self.trained]
        self.optimiser = torch.optim.AdamW(
            self.trained, lr=optimiser.lr, betas=optimiser.betas, weight_decay=optimiser.weight_decay
        )
        self.clip, self.keep = optimiser.clip, optimiser.ema

    def step(self) -> None:
        latents, factors = next(self.supply)
        self.optimiser.zero_grad()
        self.of(latents, factors, _draws(self.steps)).backward()
        clip_grad_norm_(self.trained, self.clip)
        self.optimiser.step()
        with torch.no_grad():
            for average, parameter in zip(self.average, self.trained, strict=True):
                average.mul_(self.keep).add_(parameter, alpha=1 - self.keep)
        self.model.end_step(lambda total: total)
        self.steps += 1


def in_memory(stored: Stored) -> Iterator[Latents]:
    """The same batches again and again."""
    batches = [(tokens.images, tokens.factors) for _, tokens in stored.batches()]
    while True:
        yield from batches


def from_images(stored: Stored, factors: Sequence[Factor]) -> Iterator[Latents]:
    """By webdataset and Pillow, and a pass of the tokenizer for every batch."""
    read = stream_peers.webdataset_pil(stored.images, "png", 0)
    for _ in range(FILLING):
        next(read)
    for images, described in read:
        told = {factor.name: torch.tensor([each[factor.name] for each in described]) for factor in factors}
        yield encoded(stored.tokenizer, images), told
