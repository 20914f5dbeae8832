"""Additive: images that are exactly a sum of one function per slot, or miss it by a known term, to test theory on.

    f(z) = ½ + Σ_k Σ_j sin(w_kj · z_k + b_kj) P_kj  +  Σ_{k<l} Σ_{ij} z_ki z_lj Q_klij          P, Q: fixed patterns

``order`` is the n of the function class F_int: 0 gives each slot pixels of its own (P_kj zero elsewhere, no Q), 1 lets
slots share pixels but not interact (no Q), 2 adds the products. Patterns are scaled so that f stays in [0, 1]: nothing
is clipped. ``generator`` is the same f in torch, to differentiate; bytes are rounded only by ``render``.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from compgen_fast.worlds.chance import Chance
from compgen_fast.worlds.drawing import axis
from compgen_fast.worlds.source import Factor, Samples
from compgen_fast.worlds.splits import Design, check_seen_pairs, crossed, listed_pairs
from compgen_fast.worlds.world import Matrix, Part, Values, World, by_chance, part_size

WIDTH = 2  # numbers in a slot's code, from −1 to 1
WAVES = 4  # sines per slot
BINS = 6  # of a slot's first number, whose pairs are held out

Pixels = NDArray[np.float64]


class Additive(World):
    """The world. ``slots`` of two numbers each; ``order`` 0, 1 or 2 as above.

    The split ``pairs`` holds out combinations of slot 1's and slot 2's first number, cut into six bins.
    """

    name = "additive"
    splits = ("pairs",)

    def __init__(self, resolution: int = 32, seed: int = 0, order: int = 1, slot_count: int = 2) -> None:
        super().__init__(resolution, seed)
        if order not in (0, 1, 2):
            raise ValueError(f"additive: order is {order}; expected 0 (no shared pixels), 1 (additive) or 2 (products)")
        if not 2 <= slot_count <= 8:
            raise ValueError(f"additive: slot_count is {slot_count}; expected 2 to 8")
        self.order, self.slot_count = order, slot_count
        self._weight, self._bias = 2 * self._numbers("weight", WAVES, WIDTH), self._numbers("bias", WAVES)
        self._alone, self._together = self._patterns()

    @property
    def factors(self) -> tuple[Factor, ...]:
        return tuple(
            Factor(f"z_{slot}_{i}", low=-1, high=1)
            for slot in range(1, self.slot_count + 1)
            for i in range(1, WIDTH + 1)
        )

    @property
    def slots(self) -> tuple[str, ...]:
        return tuple(f"slot_{slot}" for slot in range(1, self.slot_count + 1))

    def split(self, split: str, part: str = "train", *, seen_pairs: int | None = None, size: int | None = None) -> Part:
        """One part; ``seen_pairs`` is how many bins of slot 2 each bin of slot 1 is seen with, 2 (the default) to 5."""
        self.check(split, part)
        seen = self._design(seen_pairs)
        pairs = listed_pairs(~seen if part == "ood" else seen, Chance(self.seed), "pairs")
        return Part(self, split, part, part_size(self.name, part, size), _Draw(self, pairs))

    def matrix(self, split: str, seen_pairs: int | None = None) -> Matrix:
        self.check(split)
        names = tuple(f"{low:.2f}" for low in np.linspace(-1, 1, BINS, endpoint=False))
        return Matrix("z_1_1 from", names, "z_2_1 from", names, (~self._design(seen_pairs)).astype(np.int64))

    def _design(self, seen_pairs: int | None) -> Design:
        return crossed(BINS, BINS, check_seen_pairs(self.name, seen_pairs, BINS), Chance(self.seed), "pairs")

    def codes(self, values: Values) -> Pixels:
        """Factor values as slots, [n, slots, WIDTH]."""
        given = self.complete(values)
        return (
            np.stack([given[factor.name] for factor in self.factors], -1)
            .reshape(-1, self.slot_count, WIDTH)
            .astype(float)
        )

    def generator(self) -> "Generator":
        """f as a torch module: slots [B, K, 2] in, images [B, 3, height, width] out."""
        weight, bias, alone = (torch.from_numpy(array).float() for array in (self._weight, self._bias, self._alone))
        return Generator(
            weight, bias, alone, None if self._together is None else torch.from_numpy(self._together).float()
        )

    def pixels(self, values: Values) -> Pixels:
        """f in fp64, [n, 3, height, width], before it is rounded to bytes."""
        z = self.codes(values)
        image: Pixels = self._per_slot(z).sum(1)
        if self._together is not None:
            products = z[:, :, None, :, None] * z[:, None, :, None, :]
            image += _weighted(
                products.reshape(len(z), 1, -1), self._together.reshape(1, -1, *self._together.shape[4:])
            )[:, 0]
        return image + 0.5

    def _per_slot(self, z: Pixels) -> Pixels:
        """What each slot adds, [n, slots, 3, height, width]."""
        waves: Pixels = np.sin((z[:, :, None] * self._weight).sum(-1) + self._bias)
        return _weighted(waves, self._alone)

    def render(self, values: Values) -> Samples:
        """Images, and as masks the slot that adds most to each pixel, for better or worse."""
        image = self.pixels(values)
        owner = np.abs(self._per_slot(self.codes(values))).sum(2).argmax(1).astype(np.uint8)
        return Samples((image * 255 + 0.5).astype(np.uint8).transpose(0, 2, 3, 1).copy(), values, owner)

    def _numbers(self, name: str, *shape: int) -> Pixels:
        """Numbers of the world itself, from −π/2 to π/2, a block per slot."""
        count = self.slot_count * int(np.prod(shape))
        drawn = Chance(self.seed).uniform(f"additive {name}", np.arange(count), -np.pi / 2, np.pi / 2)
        return drawn.astype(np.float64).reshape(self.slot_count, *shape)

    def _patterns(self) -> tuple[Pixels, Pixels | None]:
        """P [K, WAVES, 3, h, w] and Q [K, K, WIDTH, WIDTH, 3, h, w] (zero unless k < l), or None."""
        size, count = self.resolution, self.slot_count
        alone = self._blobs("alone", count * WAVES).reshape(count, WAVES, 3, size, size)
        if self.order == 0:
            owner = np.arange(size) * count // size  # each slot has a strip of columns
            alone = alone * (owner == np.arange(count)[:, None])[:, None, None, None, :]
        room = 0.25 if self.order == 2 else 0.5
        alone *= room / np.abs(alone).sum((0, 1)).max()
        if self.order < 2:
            return alone, None
        together = self._blobs("together", count**2 * WIDTH**2).reshape(count, count, WIDTH, WIDTH, 3, size, size)
        together *= np.triu(np.ones((count, count)), 1)[:, :, None, None, None, None, None]
        return alone, together * (room / np.abs(together).sum((0, 1, 2, 3)).max())

    def _blobs(self, name: str, count: int) -> Pixels:
        """Soft coloured blobs, [count, 3, height, width]."""
        chance, number = Chance(self.seed), np.arange(count)
        x, y = (chance.uniform(f"{name} {axis_}", number, -0.8, 0.8).astype(float)[:, None, None] for axis_ in "xy")
        line = axis(self.resolution).astype(float)
        blob = np.exp(-((line - x) ** 2 + (line[:, None] - y) ** 2) / (2 * 0.35**2))
        colour = np.stack([chance.uniform(f"{name} {channel}", number, -1) for channel in "rgb"], -1).astype(float)
        blobs: Pixels = colour[:, :, None, None] * blob[:, None]
        return blobs


def _weighted(weights: Pixels, patterns: Pixels) -> Pixels:
    """Σ_j weights[n, k, j] patterns[k, j, …]: a product of the same size per sample, so that no batch changes a bit."""
    flat = patterns.reshape(*patterns.shape[:2], -1)
    summed = np.matmul(weights[:, :, None, :], flat)
    shaped: Pixels = summed.reshape(*weights.shape[:2], *patterns.shape[2:])
    return shaped


class Generator(nn.Module):
    """f in torch. Its slots meet in sums only (order 0 and 1) or also in products of two (order 2)."""

    weight: Tensor
    bias: Tensor
    alone: Tensor
    together: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor, alone: Tensor, together: Tensor | None) -> None:
        super().__init__()
        for name, value in (("weight", weight), ("bias", bias), ("alone", alone), ("together", together)):
            self.register_buffer(name, value)

    def forward(self, z: Tensor) -> Tensor:
        waves = torch.sin(torch.einsum("bkd,kjd->bkj", z, self.weight) + self.bias)
        image = torch.einsum("bkj,kjchw->bchw", waves, self.alone) + 0.5
        if self.together is not None:
            image = image + torch.einsum("bki,blj,klijchw->bchw", z, z, self.together)
        return image


@dataclass(frozen=True)
class _Draw:
    """The bins of slots 1 and 2 in turn, everything else by chance."""

    world: Additive
    pairs: NDArray[np.int64]

    def __call__(self, numbers: NDArray[np.int64], counters: NDArray[np.int64]) -> Values:
        values = by_chance(self.world.factors, Chance(self.world.seed), counters)
        held: dict[str, NDArray[Any]] = {
            f"z_{slot}_1": ((values[f"z_{slot}_1"] + 1 + 2 * bins) / BINS - 1).astype(np.float32)
            for slot, bins in zip((1, 2), self.pairs[numbers % len(self.pairs)].T, strict=True)
        }
        return values | held
