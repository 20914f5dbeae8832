"""What a training run is, as typed settings. A recipe returns one, the command line overrides its fields, the run's
folder keeps it. `check` refuses what cannot work before anything is built.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from compgen_fast.generate.config import GeneratorConfig
from compgen_fast.models.config import ModelConfig, ReplayConfig, SlotVAEConfig

NEEDS_TOKENS = (
    "a generator learns tokens of images. Train a tokenizer with `cgf train vae_tokenizer_cpu` (for MaskGIT "
    "vq_tokenizer_cpu), then give its weights: --data.tokenizer runs/vae_tokenizer_cpu/weights"
)

NEEDS_A_VAE = (
    "replay begins with a slot VAE that is trained. Train one with `cgf train frame_vae_cpu`, then give its weights: "
    "--start runs/frame_vae_cpu/weights"
)


@dataclass(frozen=True)
class DataConfig:
    """Packed shards to stream. Without ``shards``, the world named here is packed once under ``cache``; with them, what
    a recipe says of its world is cleared.
    """

    shards: str | None = None
    """A folder made by `cgf pack` or `cgf index`, or its address."""
    validation: str | None = None
    """Shards of images like these that are not trained on. They choose the best checkpoint; without them, and without
    a world, the training loss does."""
    world: str | None = "scenes"
    """Name of the world that is packed where no shards are given."""
    split: str | None = None
    """Split of the world; its first if not given."""
    seen_pairs: int | None = None
    """How many partners each value is seen with; as the split has it if not given."""
    options: tuple[str, ...] = ()
    """What else the world takes, as name=value: variation=0.1 objects=2."""
    size: int = 20_000
    """Training images of the world."""
    validation_size: int = 512
    """Validation images of the world."""
    seed: int = 0
    """Seed of the world's samples."""
    cache: Path = Path("data")
    """Folder in which the world is packed."""
    tokenizer: Path | None = None
    """Exported weights of the tokenizer whose tokens a generator learns. They are made once, beside the images."""
    workers: int = 1
    """Processes per rank that read and decode; 0 does it between steps."""
    budget: float = 1e-3
    """The share of samples that may be bad. Others stand in for them; beyond it the run stops with the list."""


OF_WORLD = ("world", "split", "seen_pairs", "options", "size", "validation_size", "seed")
"""What decides a world's images."""


@dataclass(frozen=True)
class OptimiserConfig:
    """AdamW, a schedule with warm-up, clipping, averaged weights."""

    lr: float = 5e-4
    """Largest step size, reached after the warm-up."""
    warmup: int = 1000
    """Steps over which the rate grows linearly."""
    decay: Literal["constant", "cosine"] = "cosine"
    """What the rate does after the warm-up: stay, or fall to a tenth by the last step along a cosine."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Memory of the gradient's average, and of its square's."""
    weight_decay: float = 0.0
    """Share by which a step of rate 1 would shrink the weights."""
    clip: float = 1.0
    """Largest norm of the gradient; 0 for none."""
    ema: float = 0.999
    """Memory of the averaged weights, which are what is exported; 0 exports the last weights."""


@dataclass(frozen=True)
class CheckpointConfig:
    every: int = 1000
    """Steps between checkpoints; one more is written at the end."""
    keep: int = 2
    """How many of the last ones to keep, besides the best."""


@dataclass(frozen=True)
class GuardConfig:
    stall: float = 20.0
    """Seconds without a sign of life from a rank before the job ends."""
    spike: float = 10.0
    """Warn of a loss this many spreads above its recent median; 0 never warns."""
    skip_audit: bool = False
    """Begin on several ranks without comparing the first step with that of a single process."""


@dataclass(frozen=True)
class TrainConfig:
    """One run."""

    model: ModelConfig = field(default_factory=SlotVAEConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimiser: OptimiserConfig = field(default_factory=OptimiserConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    steps: int = 10_000
    """Optimiser steps of the whole run."""
    batch_size: int = 64
    """Images per optimiser step, over all ranks and micro-batches together."""
    out: Path = Path("runs/run")
    """The run's folder: settings, metrics, checkpoints, weights and a page."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where to train; cuda is one GPU for each process."""
    seed: int = 0
    """Seed of the weights, the order of samples and the noise."""
    accumulation: int = 1
    """Micro-batches per optimiser step."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16: the forward runs under autocast; weights, derivative penalties and sums stay fp32."""
    zero_stage: int = 0
    """What DeepSpeed spreads over ranks: 0 nothing, 1 the optimiser's state, 2 also gradients."""
    log_every: int = 10
    """Steps between lines in metrics.jsonl."""
    start: Path | None = None
    """Exported weights to begin with, of the same model; replay begins with those of a slot VAE."""


def settled(config: TrainConfig) -> TrainConfig:
    """The settings as they are to be kept: with shards, a recipe's world is none of the run's."""
    if config.data.shards is None:
        return config
    nothing = DataConfig(world=None)
    return replace(config, data=replace(config.data, **{name: getattr(nothing, name) for name in OF_WORLD}))


def micro_batch(config: TrainConfig, ranks: int) -> int:
    """Images per rank and micro-batch."""
    return config.batch_size // (config.accumulation * ranks)


def check(config: TrainConfig, ranks: int) -> None:
    """Refuses settings that are wrong or contradict each other. The model's own are checked where it is built."""
    data = config.data
    packs = data.shards is None
    validates = packs and data.validation is None
    for name, value, least in (
        ("nproc", ranks, 1),
        ("steps", config.steps, 1),
        ("batch_size", config.batch_size, 1),
        ("accumulation", config.accumulation, 1),
        ("log_every", config.log_every, 1),
        ("checkpoint.every", config.checkpoint.every, 1),
        ("checkpoint.keep", config.checkpoint.keep, 1),
        ("optimiser.warmup", config.optimiser.warmup, 0),
        ("data.workers", data.workers, 0),
        ("data.size", data.size, 1),
        ("data.validation_size", data.validation_size, config.batch_size if validates else 0),
    ):
        if value < least:
            raise ValueError(f"{name} is {value}; expected at least {least}")
    if not all(0 <= beta < 1 for beta in config.optimiser.betas) or config.optimiser.weight_decay < 0:
        raise ValueError(
            f"optimiser.betas is {config.optimiser.betas} and weight_decay {config.optimiser.weight_decay}; expected "
            "betas from 0 to below 1, weight_decay of 0 or more"
        )
    if config.optimiser.lr <= 0 or config.optimiser.clip < 0 or not 0 <= config.optimiser.ema < 1:
        raise ValueError(
            f"optimiser.lr is {config.optimiser.lr}, clip {config.optimiser.clip}, ema {config.optimiser.ema}; "
            "expected lr above 0, clip of 0 or more, ema from 0 to below 1"
        )
    if not 0 <= config.data.budget < 1:
        raise ValueError(f"data.budget is {config.data.budget}; expected a share of samples, from 0 to below 1")
    if config.batch_size % (ranks * config.accumulation):
        raise ValueError(
            f"batch_size is {config.batch_size}, split over {ranks} ranks × {config.accumulation} micro-batches; "
            f"expected a multiple of {ranks * config.accumulation}"
        )
    if config.zero_stage == 3:
        raise ValueError(
            "zero_stage is 3; expected 0, 1 or 2. Stage 3 takes weights away between uses, while a derivative penalty "
            "uses them again in its backward pass; these models fit without it"
        )
    if config.zero_stage not in (0, 1, 2):
        raise ValueError(f"zero_stage is {config.zero_stage}; expected 0, 1 or 2")
    if config.guard.stall < 1 or config.guard.spike < 0:
        raise ValueError(
            f"guard.stall is {config.guard.stall} and guard.spike {config.guard.spike}; expected at least 1 second and "
            "0 or more spreads"
        )
    if isinstance(config.model, ReplayConfig) and config.start is None:
        raise ValueError(f"start is missing; {NEEDS_A_VAE}")
    generates = isinstance(config.model, GeneratorConfig)
    if data.tokenizer is not None and not generates:
        raise ValueError(
            f"data.tokenizer is {data.tokenizer}, but {type(config.model).__name__} is a model of images; leave "
            "it out, or train a generator"
        )
    if generates and data.tokenizer is None and packs:
        raise ValueError(f"data.tokenizer is missing; {NEEDS_TOKENS}")
