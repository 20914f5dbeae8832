"""Images of slots that never met, as a data set: what a decoder makes of slots recombined at random, with the slots as
their factors.

So replay can be packed to shards and used offline, by any encoder and any program that reads WebDataset. Each sample is
a pure function of (seed, number), whatever is asked for beside it; bytes are those of one machine, since processors
round matrix products differently. What it is not for: replay while training, which `compgen_fast.models.replay` does
without a detour.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compgen_fast.models.config import ReplayConfig
from compgen_fast.models.replay import Replay, has_roles, recombined
from compgen_fast.models.slot_vae import SlotVAE, as_bytes
from compgen_fast.worlds.chance import Chance
from compgen_fast.worlds.source import Factor, Samples

# Samples are decoded in blocks of this many neighbours: a matrix product rounds by the size of the whole.
BLOCK = 16


class Composites:
    """A ``Source``. Its factors are the slots: ``z_2_1`` is the first number of the second slot.

    Args:
        model: whose decoder draws. If its slots are exchangeable, any slot may take any place.
        bank: slots of training images [n, K, D], such as a replay's ``bank``.
        size: how many samples.
        seed: of the samples.
        jitter: noise on recombined slots, in deviations of the bank's.
    """

    name = "composites"
    slots: tuple[str, ...] = ()

    def __init__(self, model: SlotVAE | Replay, bank: Tensor, size: int, seed: int = 0, *, jitter: float = 0.0) -> None:
        vae = model.config.vae if isinstance(model.config, ReplayConfig) else model.config
        if bank.dim() != 3 or not len(bank) or bank.shape[1:] != (vae.slots, vae.slot_dim):
            raise ValueError(
                f"Composites: bank has shape {list(bank.shape)}; expected [n, {vae.slots}, {vae.slot_dim}], the slots "
                "of at least one training image, as this model gives them"
            )
        if size < 1 or seed < 0 or jitter < 0:
            raise ValueError(
                f"Composites: size is {size}, seed {seed} and jitter {jitter}; expected a size of at least 1, a seed "
                "and a jitter of 0 or more"
            )
        self.model, self.bank, self.size, self.jitter = model, bank.detach().float().cpu(), size, jitter
        self.roles, self.image_size, self.chance = has_roles(vae), vae.image_size, Chance(seed)
        self.factors = _factors(self.bank, self.roles)

    def __len__(self) -> int:
        return self.size

    def samples(self, indices: NDArray[np.int64]) -> Samples:
        numbers = np.asarray(indices, dtype=np.int64)
        if len(numbers) and not (numbers.min() >= 0 and numbers.max() < self.size):
            raise IndexError(
                f"composites: indices run from {numbers.min()} to {numbers.max()}; expected 0 to {self.size - 1}"
            )
        images = np.empty((len(numbers), self.image_size, self.image_size, 3), np.uint8)
        for block in np.unique(numbers // BLOCK):
            rows = numbers // BLOCK == block
            images[rows] = self._drawn(block * BLOCK + np.arange(BLOCK))[numbers[rows] % BLOCK]
        by_factor = self.latents(numbers).flatten(1).numpy().T
        return Samples(images, {factor.name: values for factor, values in zip(self.factors, by_factor, strict=True)})

    def latents(self, numbers: NDArray[np.int64]) -> Tensor:
        """The slots [n, K, D] of these samples."""
        _, slots, width = self.bank.shape
        chances = np.stack([self.chance.uniform(f"slot {k}", numbers) for k in range(slots)], 1)
        noise = self.jitter * self._normal(numbers, slots, width) if self.jitter else None
        return recombined(self.bank, torch.from_numpy(chances), self.roles, noise)

    def _normal(self, numbers: NDArray[np.int64], slots: int, width: int) -> Tensor:
        """Standard normal [n, K, D], by the inverse of its distribution. The shift keeps it from 0 and 1."""
        even = np.stack([self.chance.uniform(f"noise {i}", numbers) for i in range(slots * width)], 1)
        normal: Tensor = torch.special.ndtri(torch.from_numpy(even).double() + 2**-25).float()
        return normal.view(-1, slots, width)

    @torch.no_grad()
    def _drawn(self, numbers: NDArray[np.int64]) -> NDArray[np.uint8]:
        device = next(self.model.decoder.parameters()).device
        colours = self.model.decode(self.latents(numbers).to(device))
        images: NDArray[np.uint8] = as_bytes(colours).view(-1, self.image_size, self.image_size, 3).cpu().numpy()
        return images


def _factors(bank: Tensor, roles: bool) -> tuple[Factor, ...]:
    """The numbers of each slot. Their ranges are those of the bank, which jitter may leave a little."""
    low, high = bank.amin(0), bank.amax(0)
    if not roles:
        low, high = low.amin(0).expand_as(low), high.amax(0).expand_as(high)
    slots, width = low.shape
    return tuple(
        Factor(f"z_{k + 1}_{d + 1}", low=low[k, d].item(), high=high[k, d].item())
        for k in range(slots)
        for d in range(width)
    )
