"""Tokenizers for the generation study: on a CPU of 32×32 Shapes2D, on GPUs of larger images.

They are trained on images of all compositions, without labels, also of those that generators never see, so that what a
generator gets wrong is its own doing. `--data.split composition` trains on seen compositions alone; unseen ones then
come back less exactly (docs/tokenizers.md has both).
"""

from dataclasses import replace
from pathlib import Path

from compgen_fast.models.config import ConvVAEConfig, VQVAEConfig
from compgen_fast.train.config import CheckpointConfig, DataConfig, OptimiserConfig, TrainConfig

DATA = DataConfig(
    world="shapes2d", split="all", options=("continuous=true",), size=20_000, validation_size=1_000, workers=0
)
OPTIMISER = OptimiserConfig(lr=2e-3, warmup=50, betas=(0.9, 0.99), clip=100.0, ema=0.99)


def vae_tokenizer_cpu() -> TrainConfig:
    """32×32 Shapes2D as 4×4 tokens of 8 numbers: two minutes on a core."""
    return _on_cpu(ConvVAEConfig(width=48, beta=0.001), Path("runs/vae_tokenizer_cpu"))


def vq_tokenizer_cpu() -> TrainConfig:
    """32×32 Shapes2D as 4×4 tokens out of 512 codes: two minutes on a core."""
    return _on_cpu(VQVAEConfig(width=48, codes=512), Path("runs/vq_tokenizer_cpu"))


def _on_cpu(model: ConvVAEConfig | VQVAEConfig, out: Path) -> TrainConfig:
    return TrainConfig(
        model=model,
        data=DATA,
        optimiser=OPTIMISER,
        checkpoint=CheckpointConfig(every=1_000),
        steps=2_500,
        batch_size=64,
        out=out,
    )


def vae_tokenizer_gpu() -> TrainConfig:
    """64×64 images as 8×8 tokens of 8 numbers, on a GPU; `--data.shards` for CelebA or Kubric."""
    return _on_gpu(ConvVAEConfig(image_size=64, width=128, blocks=2, beta=0.001), Path("runs/vae_tokenizer_gpu"))


def vq_tokenizer_gpu() -> TrainConfig:
    """64×64 images as 8×8 tokens out of 1024 codes, on a GPU; `--data.shards` for CelebA or Kubric."""
    return _on_gpu(
        VQVAEConfig(image_size=64, width=128, blocks=2, codes=1024, revive_after=200), Path("runs/vq_tokenizer_gpu")
    )


def _on_gpu(model: ConvVAEConfig | VQVAEConfig, out: Path) -> TrainConfig:
    return TrainConfig(
        model=model,
        data=replace(DATA, size=100_000, workers=4),
        optimiser=OptimiserConfig(lr=5e-4, warmup=1_000, betas=(0.9, 0.99), clip=100.0, ema=0.999),
        checkpoint=CheckpointConfig(every=5_000),
        steps=50_000,
        batch_size=256,
        precision="bf16",
        device="cuda",
        out=out,
    )
