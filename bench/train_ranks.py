"""Whole training steps in real processes: what DeepSpeed's engine costs, and what a second rank brings.

Two jobs live at once, one of a single rank and one of two (gloo, one thread each). Every process holds all contenders:
plain torch, or its DistributedDataParallel on two ranks, and the engine at each ZeRO stage. The jobs take turns, and in
a turn the contenders do: one step each, so that a slow moment of the machine hits them all. A step is forward, penalty,
backward, clipping, AdamW, and the loss told to all ranks. Streaming, averaged weights and metrics are not in it.

`python -m compgen_fast.bench.train_ranks FOLDER` is one rank, as `measure` starts it.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import Store
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from compgen_fast.draws import Draws
from compgen_fast.models.build import build
from compgen_fast.models.summary import WARMED_UP
from compgen_fast.settings import from_json, to_json
from compgen_fast.train import engine
from compgen_fast.train.config import TrainConfig
from compgen_fast.train.launch import Placement, placed
from compgen_fast.train.ranks import Ranks, joined
from compgen_fast.train.scaling import calibrate_cpu

STAGES = (0, 1, 2)
WARM = 3  # untimed steps, after which all contenders must have arrived at the same weights
POLL_SECONDS = 0.02
START_SECONDS = 300.0  # DeepSpeed's import and start, on a busy machine
TURN_SECONDS = 600.0

Step = Callable[[int], Tensor]


@dataclass(frozen=True)
class Job:
    """``ranks`` processes that make ``rounds`` turns; the recipe's batch is each rank's own."""

    recipe: TrainConfig
    ranks: int
    rounds: int
    turns_port: int
    """Of the store through which turns are given."""


@dataclass(frozen=True)
class Found:
    """What a job measured, by contender."""

    ranks: int
    ms: Mapping[str, Sequence[float]]
    """Of each round, the slowest rank's."""
    drift: Mapping[str, float]
    """After the untimed steps: the distance to plain torch's weights, as a share of the way those have come."""


def plain_name(ranks: int) -> str:
    return "plain torch" if ranks == 1 else "DDP"


def engine_name(stage: int) -> str:
    return f"ZeRO {stage}"


# ---------------------------------------------------------------------------------------------- the side that asks


def measure(recipe: TrainConfig, rounds: int) -> tuple[Found, Found]:
    """The jobs of one rank and of two; raises a RuntimeError with a rank's last words if one fails."""
    turns = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    jobs = [Job(recipe, ranks, rounds, turns.port) for ranks in (1, 2)]
    with tempfile.TemporaryDirectory(prefix="compgen-bench-") as scratch:
        folders = [Path(scratch) / f"{job.ranks}" for job in jobs]
        with started(jobs, folders) as processes:
            for job in jobs:
                _await(turns, _done(job, 0), processes, START_SECONDS)
            for turn in range(1, rounds + 1):
                for job in jobs:
                    turns.set(_go(job, turn), "")
                    _await(turns, _done(job, turn), processes, TURN_SECONDS)
            for process in processes:
                process.wait(TURN_SECONDS)
        one, two = (Found(**json.loads((folder / "found.json").read_text())) for folder in folders)
        return one, two


def predict(recipe: TrainConfig, stage: int, steps: int) -> tuple[float, float]:
    """Seconds of the engine's step on one rank, measured, and on two, modelled."""
    parameters = sum(parameter.numel() for parameter in fresh(recipe).parameters() if parameter.requires_grad)
    parts = calibrate_cpu(partial(lone_step, recipe, stage), parameters, steps=steps)
    return parts.step_alone, parts.predict(stage, bucket=engine.BUCKET)


@contextmanager
def started(jobs: Sequence[Job], folders: Sequence[Path]) -> Iterator[list["Process"]]:
    """All ranks of all jobs; none of them outlives the block."""
    processes: list[Process] = []
    try:
        for job, folder in zip(jobs, folders, strict=True):
            folder.mkdir()
            (folder / "job.json").write_text(to_json(job))
            port = placed({}).port
            processes += [
                Process(Placement(rank, job.ranks, rank, "127.0.0.1", port), folder) for rank in range(job.ranks)
            ]
        yield processes
    finally:
        for process in processes:
            process.end()


class Process:
    """One rank, and what it prints."""

    def __init__(self, placement: Placement, folder: Path) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        placement.export(environment)
        self.name = f"rank {placement.rank} of {placement.size}"
        self.log = folder / f"rank_{placement.rank}.log"
        with self.log.open("wb") as log:
            command = [sys.executable, "-m", "compgen_fast.bench.train_ranks", str(folder)]
            self.process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )

    def check(self) -> None:
        if self.process.poll():
            said = self.log.read_text(errors="replace").split("\n")
            last = next((line.strip() for line in reversed(said) if line.strip()), "nothing")
            raise RuntimeError(f"{self.name} ended with code {self.process.returncode}; it said last: {last}")

    def wait(self, seconds: float) -> None:
        self.process.wait(seconds)
        self.check()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def _await(turns: Store, key: str, processes: Sequence[Process], seconds: float) -> None:
    """Until a job has set the key."""
    latest = time.monotonic() + seconds
    while not turns.check([key]):
        for process in processes:
            process.check()
        if time.monotonic() > latest:
            raise RuntimeError(f"the ranks did not answer within {seconds:.0f} s ({key})")
        time.sleep(POLL_SECONDS)


def _go(job: Job, turn: int) -> str:
    return f"{job.ranks} ranks, turn {turn}"


def _done(job: Job, turn: int) -> str:
    """Turn 0 is being ready."""
    return f"{_go(job, turn)}, done"


# -------------------------------------------------------------------------------------------------- one rank of a job


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    job = from_json(Job, (folder / "job.json").read_text(), "job.json")
    patience = timedelta(seconds=TURN_SECONDS)
    turns = dist.TCPStore("127.0.0.1", job.turns_port, is_master=False, timeout=patience)  # type: ignore[attr-defined]
    with joined("cpu") as ranks:
        contenders = all_contenders(job.recipe, ranks)
        drift = warm_up(contenders, ranks)
        _tell(job, ranks, turns, 0)
        ms: dict[str, list[float]] = {contender.name: [] for contender in contenders}
        for turn in range(1, job.rounds + 1):
            turns.wait([_go(job, turn)])
            for contender in rotated(contenders, turn):
                ms[contender.name].append(1e3 * seconds(contender.step, WARM + turn, ranks))
            _tell(job, ranks, turns, turn)
        found = Found(ranks.size, slowest(ranks.gather(ms)), drift)
        if ranks.first:
            (folder / "found.json").write_text(json.dumps(asdict(found)))


def rotated(contenders: Sequence["Trained"], turn: int) -> list["Trained"]:
    """Another one begins in every turn: the first finds the caches as the other job left them."""
    first = turn % len(contenders)
    return [*contenders[first:], *contenders[:first]]


def slowest(ms: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """Of all ranks' times, by contender and round."""
    return {name: [max(times) for times in zip(*(each[name] for each in ms), strict=True)] for name in ms[0]}


def _tell(job: Job, ranks: Ranks, turns: Store, turn: int) -> None:
    """That all ranks have done their turn."""
    ranks.barrier()
    if ranks.first:
        turns.set(_done(job, turn), "")


def seconds(step: Step, number: int, ranks: Ranks) -> float:
    """Of one step that all ranks begin together."""
    ranks.barrier()
    begun = time.perf_counter()
    ranks.mean({"loss": step(number)})
    return time.perf_counter() - begun


@dataclass(frozen=True)
class Trained:
    """A contender: its model, and what takes a step of it and returns the loss."""

    name: str
    model: nn.Module
    step: Step


def all_contenders(recipe: TrainConfig, ranks: Ranks) -> list[Trained]:
    return [plain(recipe, ranks), *(by_engine(recipe, ranks, stage) for stage in STAGES)]


def plain(recipe: TrainConfig, ranks: Ranks) -> Trained:
    """As one would train without DeepSpeed."""
    model = fresh(recipe)
    optimiser = engine.adamw(model, recipe.optimiser)
    # Our buffers are constants, so DDP is spared from sending them.
    parallel = DistributedDataParallel(model, broadcast_buffers=False) if ranks.size > 1 else model
    batch = Batch(recipe, ranks)

    def step(number: int) -> Tensor:
        loss: Tensor = batch.forward(parallel, number)
        loss.backward()
        if recipe.optimiser.clip:
            clip_grad_norm_(model.parameters(), recipe.optimiser.clip)
        optimiser.step()
        optimiser.zero_grad()
        return loss

    return Trained(plain_name(ranks.size), model, step)


def by_engine(recipe: TrainConfig, ranks: Ranks, stage: int) -> Trained:
    """As our trainer does."""
    whole = replace(recipe, zero_stage=stage, batch_size=recipe.batch_size * ranks.size)
    model = fresh(recipe)
    started: Any = engine.start(model, whole, ranks)
    batch = Batch(recipe, ranks)

    def step(number: int) -> Tensor:
        loss = batch.forward(started, number)
        started.backward(loss)
        started.step()
        return loss

    return Trained(engine_name(stage), model, step)


def fresh(recipe: TrainConfig) -> nn.Module:
    """The same weights for every contender and rank."""
    torch.manual_seed(recipe.seed)
    return build(recipe.model)


class Batch:
    """This rank's images: noise, the same in every step."""

    def __init__(self, recipe: TrainConfig, ranks: Ranks) -> None:
        side, self.seed = recipe.model.image_size, recipe.seed
        self.first, self.total = ranks.rank * recipe.batch_size, ranks.size * recipe.batch_size
        generator = torch.Generator().manual_seed(ranks.rank)
        shape = (recipe.batch_size, side, side, 3)
        self.images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)

    def forward(self, model: Callable[..., Any], number: int) -> Tensor:
        draws = Draws.at(self.seed, number, first=self.first, total=self.total)
        loss: Tensor = model(self.images, step=WARMED_UP, draws=draws)["loss"]
        return loss


def warm_up(contenders: Sequence[Trained], ranks: Ranks) -> dict[str, float]:
    """Takes the untimed steps; how far each contender then is from the first, on the rank where it is farthest."""
    reference = contenders[0].model
    start = [parameter.detach().clone() for parameter in reference.parameters()]
    for number in range(WARM):
        for contender in contenders:
            contender.step(number)
    way = distance(reference.parameters(), start)
    drifts = {c.name: distance(c.model.parameters(), reference.parameters()) / way for c in contenders}
    return {name: max(each[name] for each in ranks.gather(drifts)) for name in drifts}


def distance(parameters: Any, others: Any) -> float:
    with torch.no_grad():
        squares = [(p.double() - q.double()).square().sum() for p, q in zip(parameters, others, strict=True)]
        return float(torch.stack(squares).sum().sqrt())


def lone_step(recipe: TrainConfig, stage: int) -> Callable[[], object]:
    """The engine's training on a single rank, in a process of its own; the process group ends with it."""
    placed({}).export()
    ranks = joined("cpu").__enter__()
    contender = by_engine(recipe, ranks, stage)
    numbers = iter(range(1 << 62))
    return lambda: ranks.mean({"loss": contender.step(next(numbers))})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
