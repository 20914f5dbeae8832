"""Slot VAEs on the Scenes world: for a laptop, for one GPU, and at the papers' sizes."""

from pathlib import Path

from compgen_fast.models.config import DecoderConfig, EncoderConfig, LossConfig, SlotVAEConfig
from compgen_fast.train.config import CheckpointConfig, DataConfig, OptimiserConfig, TrainConfig


def slot_vae_cpu() -> TrainConfig:
    """32×32 Scenes, 2 slots (object and background): minutes on two cores."""
    return TrainConfig(
        model=SlotVAEConfig(
            image_size=32,
            slots=2,
            slot_dim=32,
            encoder=EncoderConfig(kind="cnn", width=64, downsample=4, slots_by="queries", slot_layers=2),
            decoder=DecoderConfig(layers=2, heads=4, head_dim=32, query_dim=64, slot_hidden=256, octaves=6),
            loss=LossConfig(sigma=5.0, beta=0.05, alpha=0.8, penalty="attention", alpha_warmup=200),
        ),
        data=DataConfig(size=8_000),
        optimiser=OptimiserConfig(lr=1e-3, warmup=50),
        checkpoint=CheckpointConfig(every=200),
        steps=1_000,
        batch_size=32,
        out=Path("runs/slot_vae_cpu"),
    )


def slot_vae_small() -> TrainConfig:
    """64×64 Scenes, a ViT encoder, the exact Hessian penalty on an eighth of the pixels: hours on one GPU."""
    return TrainConfig(
        model=SlotVAEConfig(
            image_size=64,
            slots=3,
            slot_dim=32,
            encoder=EncoderConfig(kind="vit", width=192, patch=8, layers=6, heads=6, slots_by="queries"),
            decoder=DecoderConfig(layers=2, heads=8, head_dim=32, query_dim=128, slot_hidden=1024),
            loss=LossConfig(
                sigma=5.0, beta=0.05, alpha=1e-4, penalty="hessian", penalty_pixels=512, alpha_warmup=5_000
            ),
        ),
        optimiser=OptimiserConfig(warmup=1_000),
        steps=100_000,
        precision="bf16",
        device="cuda",
        out=Path("runs/slot_vae_small"),
    )


def slot_vae_reference() -> TrainConfig:
    """The papers' sizes (SCIENCE.md §1): 128×128, 7 slots, 12 heads of 43, the attention penalty, 500,000 steps."""
    return TrainConfig(
        model=SlotVAEConfig(
            image_size=128,
            slots=7,
            slot_dim=64,
            encoder=EncoderConfig(kind="cnn", width=64, downsample=4, slots_by="queries", slot_layers=5, slot_heads=4),
            decoder=DecoderConfig(),
            # the authors sum attention weights over 12 heads, we average: their 0.05 is our 0.05 · 12²
            loss=LossConfig(sigma=1.0, beta=0.05, alpha=7.2, penalty="attention", alpha_warmup=25_000),
        ),
        optimiser=OptimiserConfig(lr=5e-4, warmup=10_000),
        checkpoint=CheckpointConfig(every=5_000),
        steps=500_000,
        precision="bf16",
        device="cuda",
        out=Path("runs/slot_vae_reference"),
    )
