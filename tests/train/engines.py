"""Small engines for tests of state and checkpoints: a stand-in that lives in the test's process, and DeepSpeed's own in
processes of their own, since DeepSpeed joins only one process group in its life.

`python -m tests.train.engines TASK FOLDER [TASK FOLDER …]` is one rank of such a job, and `launch` starts them all.
"""

import os
import random
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from unittest import mock

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from compgen_fast.train.checkpoints import Checkpoints, DiskFull
from compgen_fast.train.ranks import Ranks, joined
from compgen_fast.train.state import collect, restore

ROOT = Path(__file__).parents[2]
BATCH = 8
STAGES = (0, 1, 2)
CROSSINGS = ((0, 2), (1, 1), (2, 0))
"""Pairs of stages: saved with, loaded into."""


class Small(nn.Module):
    """Sizes that no number of ranks divides, a frozen parameter, a buffer that counts, a weight that stays −0."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.second = nn.Linear(5, 7)
        self.idle = nn.Parameter(torch.full((3,), -0.0))
        self.frozen = nn.Parameter(torch.randn(7), requires_grad=False)
        self.calls: Tensor
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = self.second(torch.tanh(self.first(x))) * self.frozen
        return y.square().mean() + (0 * self.idle).sum()


def adamw(model: nn.Module) -> torch.optim.AdamW:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2, fused=True)


@dataclass
class StandIn:
    """What `collect` and `restore` use of an engine at stage 0, in one process."""

    module: Any
    optimizer: Any
    micro_steps: int = 0
    global_steps: int = 0
    global_samples: int = 0
    skipped_steps: int = 0

    @classmethod
    def fresh(cls, seed: int = 0) -> Self:
        torch.manual_seed(seed)
        model = Small()
        return cls(model, adamw(model))

    def zero_optimization_stage(self) -> int:
        return 0

    def gradient_accumulation_steps(self) -> int:
        return 1

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.module(images(self.global_steps)).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.micro_steps += 1
            self.global_steps += 1
            self.global_samples += BATCH


def images(step: int) -> Tensor:
    return torch.randn(BATCH, 3, generator=torch.Generator().manual_seed(step))


def real_engine(stage: int, ranks: Ranks, seed: int) -> Any:
    import deepspeed

    torch.manual_seed(seed)
    model = Small()
    config = {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": BATCH // ranks.size,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.05,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1 << 30,
    }
    return deepspeed.initialize(model=model, optimizer=adamw(model), config=config)[0]


def train(engine: Any, ranks: Ranks, steps: int) -> None:
    share = BATCH // ranks.size
    for _ in range(steps):
        engine.backward(engine(images(engine.global_steps)[ranks.rank * share :][:share]))
        engine.step()


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether names and bytes agree; −0 is not 0."""
    return one.keys() == other.keys() and all(
        a.dtype == other[name].dtype and a.numpy().tobytes() == other[name].numpy().tobytes() for name, a in one.items()
    )


def launch(size: int, *tasks: tuple[str, Path]) -> None:
    """Runs tasks, one after the other, on so many ranks, and fails with what they printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
    }
    command = [sys.executable, "-m", "tests.train.engines", *(str(word) for task in tasks for word in task)]
    ranks = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        printed = [rank.communicate(timeout=300)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for rank, text in zip(ranks, printed, strict=True):
        assert rank.returncode == 0, text


def draw() -> list[float]:
    """One number from each generator that a checkpoint keeps."""
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def keep(ranks: Ranks, path: Path, engine: Any) -> None:
    """Writes an engine's state down for the test to compare."""
    state = collect(engine)
    if ranks.first:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(state, path)


def make(ranks: Ranks, folder: Path) -> None:
    """Six steps in one go; and three, a checkpoint, a fresh engine, and three more. For every stage."""
    for stage in STAGES:
        straight = real_engine(stage, ranks, seed=0)
        if stage == 2:
            keep(ranks, folder / "before.safetensors", straight)
        train(straight, ranks, 6)
        keep(ranks, folder / f"straight_{stage}.safetensors", straight)

        stopped = real_engine(stage, ranks, seed=0)
        train(stopped, ranks, 3)
        saved = Checkpoints(folder / f"stage_{stage}", 1, ranks)
        path = saved.save(stopped, 3, {"position": 24}, tensors={"average": torch.arange(5.0)})
        after = ranks.gather(draw())
        keep(ranks, folder / f"at_3_{stage}.safetensors", stopped)
        train(stopped, ranks, 1)
        keep(ranks, folder / f"at_4_{stage}.safetensors", stopped)

        resumed = real_engine(stage, ranks, seed=1)
        train(resumed, ranks, 2)  # its optimiser has another past, which must not shine through
        loaded = saved.load(resumed, path)
        assert ranks.gather(draw()) == after, "the generators go on elsewhere"
        assert (loaded.step, loaded.extra) == (3, {"position": 24})
        assert torch.equal(loaded.tensors["average"], torch.arange(5.0))
        assert (resumed.global_steps, resumed.micro_steps, resumed.global_samples) == (3, 3, 24)
        train(resumed, ranks, 3)
        keep(ranks, folder / f"resumed_{stage}.safetensors", resumed)
    fail_together(ranks, folder, stopped, path)
    begin_again(ranks, folder)


def fail_together(ranks: Ranks, folder: Path, engine: Any, path: Path) -> None:
    """What rank 0 meets on the disk, and what does not fit, is raised on every rank."""
    full = Checkpoints(folder / "full", 1, ranks)
    told = ""
    with mock.patch.object(shutil, "disk_usage", return_value=mock.Mock(free=10)):
        try:
            full.save(engine, 1, {})
        except DiskFull as error:
            told = str(error)
    assert "10 are free" in told and len(set(ranks.gather(told))) == 1

    other = collect(engine)
    if ranks.first:
        other["module.first.weight"] = torch.zeros(2, 2)
    told = ""
    try:
        restore(engine, other)
    except ValueError as error:
        told = str(error)
    assert "first.weight is [2, 2]" in told and len(set(ranks.gather(told))) == 1


def begin_again(ranks: Ranks, folder: Path) -> None:
    """A state from before the first step: AdamW has none yet, and the engine that takes it has some."""
    early = collect(real_engine(2, ranks, seed=0))
    for stage in STAGES:
        engine = real_engine(stage, ranks, seed=1)
        train(engine, ranks, 2)
        restore(engine, early)
        train(engine, ranks, 6)
        keep(ranks, folder / f"again_{stage}.safetensors", engine)


def cross(ranks: Ranks, folder: Path) -> None:
    """Loads checkpoints of another number of ranks into other stages, and goes one step on."""
    for saved, stage in CROSSINGS:
        engine = real_engine(stage, ranks, seed=1)
        store = Checkpoints(folder / f"stage_{saved}", 1, ranks)
        path = store.latest()
        assert path is not None
        loaded = store.load(engine, path)
        assert torch.equal(loaded.tensors["average"], torch.arange(5.0))
        drawn = ranks.gather(draw())
        assert len({tuple(numbers) for numbers in drawn}) == ranks.size, "two ranks draw the same numbers"
        where = folder / f"on_{ranks.size}"
        keep(ranks, where / f"loaded_{saved}_{stage}.safetensors", engine)
        train(engine, ranks, 1)
        keep(ranks, where / f"next_{saved}_{stage}.safetensors", engine)


def main(words: list[str]) -> None:
    torch.set_num_threads(1)
    with joined("cpu") as ranks:
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
        torch.manual_seed(100 + ranks.rank)
        random.seed(100 + ranks.rank)
        np.random.seed(100 + ranks.rank)
        for task, folder in zip(words[::2], words[1::2], strict=True):
            {"make": make, "cross": cross}[task](ranks, Path(folder))
        # All files are written. gloo's threads are not always gone when it is taken down under load, and then the
        # process dies of it ("terminate called without an active exception"); that is not what is tested here.
        ranks.gather(None)
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
