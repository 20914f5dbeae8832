"""DeepSpeed's engine around a model: the one place that knows how DeepSpeed wants to be told things.

The engine holds parameters, gradients and the optimiser in fp32; bf16 is autocast in the model's forward. DeepSpeed's
own bf16 mode would round the weights that a derivative penalty differentiates through, and its stage 0 counts AdamW's
first step twice.
"""

import logging
import math
import os
import warnings
from typing import Any

import torch
from torch import nn

from compgen_fast.exits import ended_by_ctrl_c
from compgen_fast.train.config import OptimiserConfig, TrainConfig, micro_batch
from compgen_fast.train.ranks import Ranks

# Gradients per message, 4 MB. DeepSpeed's 500 million would hold a whole model of ours, which could then be sent only
# after the backward pass, not during it.
BUCKET = 1 << 20


def start(model: nn.Module, config: TrainConfig, ranks: Ranks) -> Any:
    """The engine for ``model``, which is moved to this rank's device and made equal on all ranks."""
    deepspeed = imported(ranks.device)
    deepspeed.init_distributed(dist_backend="nccl" if ranks.device.type == "cuda" else "gloo", verbose=False)
    model = model.to(ranks.device)
    for parameter in model.parameters():  # DeepSpeed sends them as bytes, which other layouts do not allow
        parameter.data = parameter.data.contiguous()
    if config.precision == "bf16":  # on the model itself: around the engine, DeepSpeed switches autocast off
        model.forward = torch.autocast(ranks.device.type, torch.bfloat16)(model.forward)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=adamw(model, config.optimiser), config=settings(config, ranks.size)
    )
    return engine


def imported(device: torch.device) -> Any:
    """DeepSpeed, quiet, and without the shared-memory extension that it would compile for 95 s on a CPU's first start
    and use only for inference.
    """
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with warnings.catch_warnings(), ended_by_ctrl_c():
        warnings.simplefilter("ignore")  # about optional parts of its own that are not installed
        import deepspeed
    warnings.filterwarnings("ignore", "`torch.distributed.*deprecated", FutureWarning)  # names that it uses
    deepspeed.utils.logger.setLevel(logging.WARNING)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def adamw(model: nn.Module, config: OptimiserConfig) -> torch.optim.Optimizer:
    """AdamW in one fused kernel, with weight decay on matrices only."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=config.lr, betas=config.betas, fused=True
    )


def settings(config: TrainConfig, ranks: int) -> dict[str, Any]:
    """What DeepSpeed is configured with."""
    return {
        "train_batch_size": config.batch_size,
        "train_micro_batch_size_per_gpu": micro_batch(config, ranks),
        "gradient_accumulation_steps": config.accumulation,
        "gradient_clipping": config.optimiser.clip,
        "zero_optimization": {
            "stage": config.zero_stage,
            "overlap_comm": config.device == "cuda",
            "reduce_bucket_size": BUCKET,
        },
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1 << 62,
    }


def learning_rate(config: OptimiserConfig, step: int, steps: int) -> float:
    """Of the given step out of ``steps``: linear warm-up, then constant or a cosine down to a tenth."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    if config.decay == "constant":
        return config.lr
    done = (step - config.warmup) / max(1, steps - config.warmup)
    return config.lr * (0.55 + 0.45 * math.cos(math.pi * done))


def set_learning_rate(engine: Any, rate: float) -> None:
    for group in engine.optimizer.param_groups:
        group["lr"] = rate
