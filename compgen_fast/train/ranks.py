"""The processes of a run, and what they tell each other outside of the engine.

`joined` makes the process group from the environment that a launcher left (see launch.py for who sets it) and hands it
to DeepSpeed, which takes an existing group over. One process is a group of one: there is no second code path.
"""

import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from compgen_fast.exits import STOPS

# Nobody waits for these in practice: the watch (watch.py) ends a run with a stalled rank long before.
GROUP_TIMEOUT = timedelta(hours=2)
START_TIMEOUT = timedelta(minutes=5)


@dataclass(frozen=True)
class Ranks:
    """This process among ``size``: its number, its number on this machine, its device, and the store all share."""

    rank: int
    size: int
    local: int
    device: torch.device
    store: Store

    @classmethod
    def alone(cls, device: str = "cpu") -> "Ranks":
        """One process without a process group."""
        return cls(0, 1, 0, torch.device(device), HashStore())

    @property
    def first(self) -> bool:
        return self.rank == 0

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()

    def mean(self, values: Mapping[str, Tensor]) -> dict[str, float]:
        """The mean over ranks of scalars that each of them has under the same names; one message for all of them."""
        packed = torch.stack([value.detach().double() for value in values.values()])
        if self.size > 1:
            dist.all_reduce(packed)
        return dict(zip(values, (packed / self.size).tolist(), strict=True))

    def total(self, tensor: Tensor) -> Tensor:
        """The tensor with its sum over ranks in place, bit for bit the same on each of them."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in order, on every rank; for small things."""
        if self.size == 1:
            return [value]
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, value)
        return gathered


def leave(ranks: Ranks, code: int) -> NoReturn:
    """Ends this process once all ranks are done, its output written and nothing torn down.

    Now and then gloo's threads are still there when the interpreter ends, and abort the process: a run that was
    complete then counts as failed.
    """
    ranks.barrier()
    if code in STOPS.values() and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        _ask_torchrun_to_stop(ranks)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _ask_torchrun_to_stop(ranks: Ranks) -> None:
    """It would start ranks anew that end with any code but 0, and the run would go on; unless it is asked itself."""
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)  # it passes on what it gets
    ranks.barrier()
    if ranks.local == 0:
        os.kill(os.getppid(), signal.SIGTERM)
    ranks.barrier()


@contextmanager
def joined(device: str) -> Iterator[Ranks]:
    """Joins the process group that the environment names (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT)."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    where = torch.device("cuda", local) if device == "cuda" else torch.device(device)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    store, rank, size = next(iter(rendezvous("env://", timeout=START_TIMEOUT)))
    backend = "nccl" if where.type == "cuda" else "gloo"
    dist.init_process_group(
        backend, store=PrefixStore("group", store), rank=rank, world_size=size, timeout=GROUP_TIMEOUT
    )
    try:
        yield Ranks(rank, size, local, where, store)
    finally:
        dist.destroy_process_group()
