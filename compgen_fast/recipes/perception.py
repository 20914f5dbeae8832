"""The runs of the perception study: a slot VAE that learns objects in minutes on a CPU, its replay, encoders without a
decoder, and the papers' sizes for GPUs.

On a CPU all see calm Scenes at 32×32: twenty objects, each with a look of its own, anywhere on ten hazy backgrounds,
each on two of them. They share one encoder.
"""

from dataclasses import replace
from pathlib import Path

from compgen_fast.models.config import (
    DecoderConfig,
    EncoderConfig,
    LossConfig,
    ReplayConfig,
    SlotVAEConfig,
    SupervisedConfig,
)
from compgen_fast.recipes.slot_vae import slot_vae_reference
from compgen_fast.train.config import CheckpointConfig, DataConfig, OptimiserConfig, TrainConfig

ENCODER = EncoderConfig(kind="cnn", width=32, downsample=8, slots_by="dense", slot_hidden=256, pooled_scene=True)
CALM = ("variation=0.1", "own_looks=true", "haze=0.6")
DATA = DataConfig(split="background", seen_pairs=2, options=CALM, size=20_000, validation_size=2_000, workers=0)
OPTIMISER = OptimiserConfig(lr=2e-3, warmup=50, betas=(0.9, 0.99), clip=100.0, ema=0.99)
READ = {
    "background": ("object_1", "background"),
    "texture": ("object_1", "texture_1", "background"),
    "object": ("object_1", "object_2", "background"),
}
"""The categories that each split asks for."""


def frame_vae_cpu() -> TrainConfig:
    """Calm 32×32 Scenes, 2 slots that paint in frames of their own, the attention penalty: objects in minutes."""
    return TrainConfig(
        model=SlotVAEConfig(
            image_size=32,
            slots=2,
            slot_dim=16,
            encoder=ENCODER,
            decoder=DecoderConfig(kind="frame", slot_hidden=256, frequencies=8, features=6, mixer=16),
            loss=LossConfig(
                sigma=5.0,
                beta=0.2,
                beta_warmup=1_000,
                alpha=60.0,
                penalty="attention",
                alpha_start=1_500,
                alpha_warmup=500,
            ),
        ),
        data=DATA,
        optimiser=OPTIMISER,
        checkpoint=CheckpointConfig(every=1_000),
        steps=3_000,
        batch_size=32,
        out=Path("runs/frame_vae_cpu"),
    )


def replay_cpu() -> TrainConfig:
    """Replay of frame_vae_cpu: its encoder learns from recombined slots."""
    return replay_of(frame_vae_cpu(), steps=1_000, out=Path("runs/replay_cpu"))


def replay_of(vae: TrainConfig, *, steps: int, out: Path, bank: int = 4096) -> TrainConfig:
    """The replay of a slot VAE, which begins with its exported weights."""
    assert isinstance(vae.model, SlotVAEConfig)
    return replace(
        vae,
        model=ReplayConfig(vae=vae.model, bank=bank),
        optimiser=replace(vae.optimiser, lr=vae.optimiser.lr / 2),
        steps=steps,
        batch_size=2 * vae.batch_size,
        start=vae.out / "weights",
        out=out,
    )


def supervised_scenes_cpu() -> TrainConfig:
    """The encoder of frame_vae_cpu, trained to name the object and the background; all its slots know places."""
    encoder = replace(ENCODER, pooled_scene=False)
    return TrainConfig(
        model=SupervisedConfig(image_size=32, slots=2, slot_dim=16, encoder=encoder, factors=READ["background"]),
        data=DATA,
        optimiser=replace(OPTIMISER, lr=1e-3),
        checkpoint=CheckpointConfig(every=1_000),
        steps=1_500,
        batch_size=64,
        out=Path("runs/supervised_scenes_cpu"),
    )


def perception_gpu() -> TrainConfig:
    """The papers' decoder and training (slot_vae_reference) on 128×128 Scenes, 2 slots, split by background."""
    reference = slot_vae_reference()
    assert isinstance(reference.model, SlotVAEConfig)
    return replace(
        reference,
        model=replace(reference.model, slots=2, loss=replace(reference.model.loss, alpha_start=25_000)),
        data=DataConfig(split="background", seen_pairs=2, size=20_000, validation_size=2_000, workers=4),
        out=Path("runs/perception_gpu"),
    )


def for_split(config: TrainConfig, split: str, seed: int, *, steps: int, out: Path) -> TrainConfig:
    """The run on another split and seed; of its world too, so that other pairs are seen."""
    objects = 2 if split == "object" else 1
    options = (*config.data.options, *(("objects=2",) if objects == 2 else ()))
    changes: dict[str, object] = {"slots": objects + 1}
    if isinstance(config.model, SupervisedConfig):
        changes["factors"] = READ[split]
    return replace(
        config,
        model=replace(config.model, **changes),  # type: ignore[arg-type]
        data=replace(config.data, split=split, options=options, seed=seed),
        steps=steps,
        seed=seed,
        out=out,
    )
