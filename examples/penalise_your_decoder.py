"""A decoder and a training loop of your own, penalised: on one process, under DDP and under FSDP2.

python examples/penalise_your_decoder.py
torchrun --nproc-per-node 2 examples/penalise_your_decoder.py     # two ranks train as one does
"""

import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from compgen_fast.draws import Draws
from compgen_fast.jets import interaction_penalty

RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
BATCH, SLOTS, CODE, PIXELS, WIDTH = 8, 4, 6, 32, 16


class Decoder(nn.Module):
    """Any torch modules, as they are: slots [B, K, d] in, pixels [B, N, 3] out."""

    def __init__(self) -> None:
        super().__init__()
        self.pixels, self.slots = nn.Parameter(torch.randn(PIXELS, WIDTH)), nn.Linear(CODE, WIDTH)
        self.layer = nn.TransformerDecoderLayer(WIDTH, 4, 32, dropout=0, activation="gelu", batch_first=True)
        self.colour = nn.Linear(WIDTH, 3)

    def forward(self, z: Tensor) -> Tensor:
        return self.colour(self.layer(self.pixels.expand(len(z), -1, -1), self.slots(z)))


class PenalisedLoss(nn.Module):
    """The whole loss in one forward, which is what to wrap. DDP could wrap the decoder alone; FSDP2 could not, nor its
    layers: its hooks look into what enters and leaves a module, and that would be jets.
    """

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, z: Tensor, image: Tensor, draws: Draws) -> Tensor:
        penalty, drawn = interaction_penalty(self.decoder, z, generator=draws, return_output=True)
        return (drawn - image).square().mean() + 0.1 * penalty


def alone(module: nn.Module) -> nn.Module:
    return module


def sharded(module: nn.Module) -> nn.Module:
    return fully_shard(module, mesh=init_device_mesh("cpu", (RANKS,)))


def train(wrap: Callable[[nn.Module], nn.Module], rank: int = 0, ranks: int = 1) -> list[float]:
    """The losses of the whole batch, step by step."""
    torch.manual_seed(0)
    z, image = torch.randn(BATCH, SLOTS, CODE), torch.rand(BATCH, PIXELS, 3)
    loss_of = wrap(PenalisedLoss(Decoder()))
    optimiser = torch.optim.SGD(loss_of.parameters(), lr=0.05)
    mine = slice(rank * BATCH // ranks, (rank + 1) * BATCH // ranks)
    losses = []
    for step in range(5):
        draws = Draws.at(seed=0, step=step, first=mine.start, total=BATCH)  # one batch's signs, whoever holds its rows
        loss = loss_of(z[mine], image[mine], draws)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(mean_over(ranks, loss.detach()))
    return losses


def mean_over(ranks: int, loss: Tensor) -> float:
    if ranks > 1:
        dist.all_reduce(loss)
    return loss.item() / ranks


def show(how: str, losses: list[float]) -> None:
    if RANK == 0:
        print(f"{how:28}", *(f"{loss:.6f}" for loss in losses))


if __name__ == "__main__":
    show("one process", train(alone))
    if RANKS > 1:
        dist.init_process_group("gloo")
        show(f"DDP, {RANKS} ranks", train(DistributedDataParallel, RANK, RANKS))
        show(f"FSDP2, {RANKS} ranks", train(sharded, RANK, RANKS))
        dist.destroy_process_group()
