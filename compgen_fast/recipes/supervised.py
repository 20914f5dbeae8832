"""Encoder-only baselines: the same encoders, trained to read the factors off the image."""

from pathlib import Path

from compgen_fast.models.config import EncoderConfig, SupervisedConfig
from compgen_fast.train.config import CheckpointConfig, DataConfig, OptimiserConfig, TrainConfig


def supervised_cpu() -> TrainConfig:
    """32×32 Scenes, the encoder of slot_vae_cpu: minutes on two cores."""
    return TrainConfig(
        model=SupervisedConfig(
            image_size=32,
            slots=2,
            slot_dim=32,
            encoder=EncoderConfig(kind="cnn", width=64, downsample=4, slots_by="queries", slot_layers=2),
        ),
        data=DataConfig(size=8_000),
        optimiser=OptimiserConfig(lr=1e-3, warmup=50),
        checkpoint=CheckpointConfig(every=200),
        steps=1_000,
        batch_size=32,
        out=Path("runs/supervised_cpu"),
    )
