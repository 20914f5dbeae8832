"""One run on this rank, from its settings to its exit code: what to refuse before any work, and how failures are told."""

import os
import sys

from compgen_fast.models.build import check as check_model
from compgen_fast.train import folder
from compgen_fast.train.audit import AuditFailed
from compgen_fast.train.checkpoints import CheckpointError
from compgen_fast.train.config import TrainConfig, check
from compgen_fast.train.guards import NotFinite
from compgen_fast.train.launch import placed
from compgen_fast.train.loop import Trainer
from compgen_fast.train.ranks import joined

FAILED = 1


def run(config: TrainConfig, resume: bool) -> int:
    """Trains to the end, or until asked to stop: 0. 1 for a failure that is told in a sentence."""
    placement = placed(os.environ)
    refuse_impossible(config, placement.size)
    placement.export()
    with joined(config.device) as ranks:
        folder.claim(config, resume, ranks)
        try:
            with Trainer(config, ranks) as trainer:
                if resume:
                    trainer.resume()
                trainer.train()
        except (NotFinite, AuditFailed, CheckpointError) as failure:  # on all ranks alike
            if ranks.first:
                print(f"compgen: {failure}", file=sys.stderr)
            return FAILED
    return 0


def refuse_impossible(config: TrainConfig, ranks: int) -> None:
    """What can be known to be wrong before anything is made or started."""
    import torch

    check(config, ranks)
    check_model(config.model)
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "device is 'cuda', and torch sees no CUDA or ROCm device here; `compgen env` says what it sees. "
            "--device cpu trains on the processor"
        )
