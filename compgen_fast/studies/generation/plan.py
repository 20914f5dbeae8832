"""The jobs of each scale.

Everything was chosen by how well seen compositions are generated: widths, rates and lengths until all objectives reach
them. Level 1 chooses the best step of a run, level 2 is only reported.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from compgen_fast.generate.config import (
    ConditioningConfig,
    DiTConfig,
    GIVTConfig,
    JepaConfig,
    MARConfig,
    MaskGITConfig,
    ObjectiveConfig,
    TrunkConfig,
)
from compgen_fast.models.config import ConvVAEConfig, VQVAEConfig
from compgen_fast.recipes import vae_tokenizer_cpu, vae_tokenizer_gpu, vq_tokenizer_cpu, vq_tokenizer_gpu
from compgen_fast.train.config import CheckpointConfig, DataConfig, OptimiserConfig, TrainConfig

ScaleName = Literal["quick", "cpu", "gpu"]
PartName = Literal["all", "objectives", "conditioning", "jepa", "circuits"]
TokenizerName = Literal["vae", "vq"]
ObjectiveName = Literal["dit-vae", "dit-vq", "mar", "givt", "maskgit"]
Told = Literal["full", "quantised", "dropout", "both"]

CONCEPTS = ("shape", "colour", "size")
"""The factors that compositions are made of. The place of a shape is told as well, and not judged."""


@dataclass(frozen=True)
class Variation:
    """What differs between generators."""

    objective: ObjectiveName
    told: Told = "full"
    jepa: tuple[int, ...] = ()
    """Layers; none for no JEPA."""

    @property
    def name(self) -> str:
        layers = "".join(f"-{layer}" for layer in self.jepa)
        return f"{self.objective}-{self.told}" + (f"-jepa{layers}" if layers else "")

    @property
    def tokenizer(self) -> TokenizerName:
        return "vq" if self.objective in ("dit-vq", "maskgit") else "vae"


@dataclass(frozen=True)
class TokenizerJob:
    """The job that trains one."""

    name: TokenizerName
    train: TrainConfig
    part: str = "tokenizers"


@dataclass(frozen=True)
class Run:
    """The job that trains a generator, and asks it for all compositions along the way."""

    variation: Variation
    train: TrainConfig
    every: int
    """Steps between the times it is asked."""
    images: int
    """Of each composition, each time."""
    ablated: bool
    """Whether its heads and neurons are left out in turn at the end."""
    part: str = "generators"

    @property
    def name(self) -> str:
        return f"{self.variation.name}-seed{self.train.seed}"


@dataclass(frozen=True)
class Scale:
    """How much of everything."""

    seeds: int
    size: int
    """Training images."""
    probe_steps: int
    tokenizer_steps: int
    trunk: TrunkConfig
    steps: int
    batch_size: int
    rate: float
    every: int
    images: int
    objectives: tuple[ObjectiveName, ...]
    told: tuple[Told, ...]
    jepa: tuple[tuple[int, ...], ...]
    """Sets of layers; the first is compared seed by seed, the others with one seed."""
    device: Literal["cpu", "cuda"] = "cpu"


PAPERS_LAYERS = (7, 9, 11)
# On a CPU tokenizers are trained longer than by their recipe: after its 2,500 steps a VQ-VAE brings 96 % of seen
# compositions back such that probes can tell them, after 6,000 99 %.
SCALES = {
    "quick": Scale(
        seeds=1, size=4_000, probe_steps=400, tokenizer_steps=400, trunk=TrunkConfig(48, 4, 2), steps=300,
        batch_size=32, rate=3e-3, every=100, images=8, objectives=("dit-vae", "maskgit"), told=("full",),
        jepa=((2, 4),),
    ),
    "cpu": Scale(
        seeds=3, size=20_000, probe_steps=1_500, tokenizer_steps=6_000, trunk=TrunkConfig(64, 12, 4), steps=4_000,
        batch_size=64, rate=2e-3, every=400, images=48, objectives=get_args(ObjectiveName), told=get_args(Told),
        jepa=(PAPERS_LAYERS, (6,), (3, 5, 7)),
    ),
    "gpu": Scale(
        seeds=5, size=100_000, probe_steps=3_000, tokenizer_steps=50_000, trunk=TrunkConfig(384, 12, 6), steps=50_000,
        batch_size=256, rate=3e-4, every=2_500, images=256, objectives=get_args(ObjectiveName), told=get_args(Told),
        jepa=(PAPERS_LAYERS, (6,), (3, 5, 7), (2, 4, 6, 8, 10, 12)), device="cuda",
    ),
}  # fmt: skip


def tokenizers(scale: ScaleName, out: Path) -> list[TokenizerJob]:
    """Those of the recipes."""
    chosen = SCALES[scale]
    recipes = (vae_tokenizer_gpu(), vq_tokenizer_gpu()) if scale == "gpu" else (vae_tokenizer_cpu(), vq_tokenizer_cpu())
    return [
        TokenizerJob(
            name,
            replace(
                recipe,
                data=replace(recipe.data, size=chosen.size, cache=out / "data"),
                steps=chosen.tokenizer_steps,
                out=out / "tokenizers" / name,
            ),
        )
        for name, recipe in zip(get_args(TokenizerName), recipes, strict=True)
    ]


def plan(scale: ScaleName, part: PartName, out: Path) -> list[Run]:
    """Seed by seed, so that a study that is cut off has something to compare; last, what only one seed is spent on."""
    chosen = SCALES[scale]
    wanted = variations(chosen, part)
    repeated = [each for each in wanted if each.jepa in ((), chosen.jepa[0])]
    return [
        *(_run(each, seed, scale, out) for seed in range(chosen.seeds) for each in repeated),
        *(_run(each, 0, scale, out) for each in wanted if each not in repeated),
    ]


def variations(scale: Scale, part: PartName) -> list[Variation]:
    """What a part compares."""
    jepa = [Variation("maskgit", jepa=layers) for layers in scale.jepa]
    objectives = [Variation(objective) for objective in scale.objectives]
    told = [Variation("dit-vae", kind) for kind in scale.told]
    compared = {
        "objectives": objectives,
        "conditioning": told,
        "jepa": [Variation("maskgit"), *jepa],
        "circuits": [Variation("maskgit"), jepa[0]],
    }
    return list(dict.fromkeys([*jepa, *objectives, *told] if part == "all" else compared[part]))


def _run(variation: Variation, seed: int, scale: ScaleName, out: Path) -> Run:
    chosen = SCALES[scale]
    (tokenizer,) = (each.train for each in tokenizers(scale, out) if each.name == variation.tokenizer)
    train = TrainConfig(
        model=model(variation, chosen, tokenizer),
        data=DataConfig(
            world="shapes2d", split="composition", options=("continuous=true",), size=chosen.size,
            validation_size=4 * chosen.batch_size, cache=out / "data", workers=0, tokenizer=tokenizer.out / "weights",
        ),
        optimiser=OptimiserConfig(lr=chosen.rate, warmup=chosen.steps // 40, betas=(0.9, 0.99), ema=0.995),
        checkpoint=CheckpointConfig(every=chosen.every),
        steps=chosen.steps,
        batch_size=chosen.batch_size,
        precision="bf16" if chosen.device == "cuda" else "fp32",
        device=chosen.device,
        seed=seed,
        log_every=50,
        out=out / "runs" / f"{variation.name}-seed{seed}",
    )  # fmt: skip
    ablated = variation in variations(chosen, "circuits")
    return Run(variation, train, chosen.every, chosen.images, ablated)


def model(variation: Variation, scale: Scale, tokenizer: TrainConfig) -> ObjectiveConfig:
    """The generator of a variation, on the tokens of a tokenizer."""
    tokens = tokenizer.model
    assert isinstance(tokens, ConvVAEConfig | VQVAEConfig)
    shared = {
        "image_size": tokens.image_size,
        "side": tokens.image_size // tokens.patch,
        "trunk": scale.trunk,
        "conditioning": ConditioningConfig(kind=variation.told),
        "jepa": JepaConfig(layers=variation.jepa, rate_steps=scale.steps) if variation.jepa else None,
    }
    match variation.objective:
        case "maskgit":
            assert isinstance(tokens, VQVAEConfig)
            # Without smoothing: of what it gives to wrong codes, sampling draws one in ten. With the usual 0.1, 94 % of
            # seen compositions came out.
            return MaskGITConfig(codes=tokens.codes, label_smoothing=0.0, **shared)  # type: ignore[arg-type]
        case "mar":
            return MARConfig(channels=tokens.channels, head_width=2 * scale.trunk.width, **shared)  # type: ignore[arg-type]
        case "givt":
            return GIVTConfig(channels=tokens.channels, **shared)  # type: ignore[arg-type]
        case "dit-vae" | "dit-vq":
            return DiTConfig(channels=tokens.channels, **shared)  # type: ignore[arg-type]
