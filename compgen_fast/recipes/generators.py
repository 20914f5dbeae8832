"""Generators for the generation study: four objectives on one trunk, of 32×32 Shapes2D on a CPU and 64×64 on GPUs.

They see the four compositions of which no two factors are high; the other four are for asking afterwards. All on one
kind of machine differ in the objective only. Train the tokenizer first: `cgf train vae_tokenizer_cpu`, or
vq_tokenizer_cpu for MaskGIT.
"""

from dataclasses import replace
from pathlib import Path

from compgen_fast.generate.config import (
    DiTConfig,
    GIVTConfig,
    JepaConfig,
    MARConfig,
    MaskGITConfig,
    ObjectiveConfig,
    TrunkConfig,
)
from compgen_fast.recipes import tokenizers
from compgen_fast.train.config import CheckpointConfig, OptimiserConfig, TrainConfig

SEEN = replace(tokenizers.DATA, split="composition")
ON_CPU, ON_GPU = TrunkConfig(width=64, layers=12, heads=4), TrunkConfig(width=512, layers=12, heads=8)
STEPS_ON_CPU, STEPS_ON_GPU = 5_000, 200_000


def dit_cpu() -> TrainConfig:
    """Flow matching on all 16 tokens of a 32×32 Shapes2D image at once."""
    return _on_cpu(DiTConfig(trunk=ON_CPU), "dit_cpu")


def maskgit_cpu() -> TrainConfig:
    """Masked codes of 32×32 Shapes2D, each told by a softmax over 512."""
    return _on_cpu(MaskGITConfig(trunk=ON_CPU), "maskgit_cpu")


def maskgit_jepa_cpu() -> TrainConfig:
    """maskgit_cpu whose hidden states also predict those of the whole image (JEPA)."""
    jepa = JepaConfig(rate_steps=STEPS_ON_CPU)
    return _on_cpu(MaskGITConfig(trunk=ON_CPU, jepa=jepa), "maskgit_jepa_cpu")


def mar_cpu() -> TrainConfig:
    """Masked tokens of 32×32 Shapes2D, each drawn by a flow of its own."""
    return _on_cpu(MARConfig(trunk=ON_CPU, head_width=64), "mar_cpu")


def givt_cpu() -> TrainConfig:
    """Masked tokens of 32×32 Shapes2D, each told by a mixture of Gaussians; `--model.order causal` goes row by row."""
    return _on_cpu(GIVTConfig(trunk=ON_CPU), "givt_cpu")


def dit_gpu() -> TrainConfig:
    """dit_cpu of 64×64 images as 8×8 tokens, on a GPU; `--data.shards` for your own images."""
    return _on_gpu(DiTConfig(side=8, trunk=ON_GPU, image_size=64), "dit_gpu")


def maskgit_gpu() -> TrainConfig:
    """maskgit_cpu of 64×64 images as 8×8 tokens out of 1024 codes, on a GPU."""
    return _on_gpu(MaskGITConfig(side=8, trunk=ON_GPU, image_size=64, codes=1024), "maskgit_gpu")


def mar_gpu() -> TrainConfig:
    """mar_cpu of 64×64 images as 8×8 tokens, on a GPU."""
    return _on_gpu(MARConfig(side=8, trunk=ON_GPU, image_size=64, head_width=512), "mar_gpu")


def givt_gpu() -> TrainConfig:
    """givt_cpu of 64×64 images as 8×8 tokens, on a GPU."""
    return _on_gpu(GIVTConfig(side=8, trunk=ON_GPU, image_size=64, components=16), "givt_gpu")


def _on_cpu(model: ObjectiveConfig, name: str) -> TrainConfig:
    return TrainConfig(
        model=model,
        data=replace(SEEN, tokenizer=Path(f"runs/{_tokenizer(model)}_cpu/weights")),
        optimiser=OptimiserConfig(lr=1e-3, warmup=100, betas=(0.9, 0.99), ema=0.995),
        checkpoint=CheckpointConfig(every=1_000),
        steps=STEPS_ON_CPU,
        batch_size=64,
        out=Path("runs") / name,
    )


def _on_gpu(model: ObjectiveConfig, name: str) -> TrainConfig:
    data = replace(SEEN, size=100_000, workers=4, tokenizer=Path(f"runs/{_tokenizer(model)}_gpu/weights"))
    return TrainConfig(
        model=model,
        data=data,
        optimiser=OptimiserConfig(lr=3e-4, warmup=2_000, betas=(0.9, 0.99), weight_decay=0.01, ema=0.9999),
        checkpoint=CheckpointConfig(every=5_000),
        steps=STEPS_ON_GPU,
        batch_size=256,
        precision="bf16",
        device="cuda",
        out=Path("runs") / name,
    )


def _tokenizer(model: ObjectiveConfig) -> str:
    return "vq_tokenizer" if isinstance(model, MaskGITConfig) else "vae_tokenizer"
