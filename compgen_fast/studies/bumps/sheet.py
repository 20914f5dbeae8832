"""All that a decoder can be asked for in one world: codes and images of every position, every stripe, and white.

An image is the product of what its factors paint. With one factor it is a stripe, with none, the empty product, white.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from compgen_fast.worlds.bumps import Bumps, Encoding


@dataclass(frozen=True)
class Sheet:
    """n = N² positions, row by row, after them N vertical and N horizontal stripes, and last the white image."""

    size: int
    blank: float
    """Mean squared error of a blank image at the held-out positions."""
    codes: Tensor  # [n + 2N + 1, w]: of x, then of y; zeros for a factor that is not there
    slopes: tuple[Tensor, Tensor]  # [n, w] each: how codes change along x and along y
    images: Tensor  # [n + 2N + 1, N, N]
    held: Tensor  # bool [n]: never shown in training

    @property
    def positions(self) -> int:
        return self.size**2

    @property
    def known(self) -> Tensor:
        """Which rows are positions that training may show."""
        return (~self.held).nonzero()[:, 0]

    @property
    def stripes(self) -> Tensor:
        return torch.arange(self.positions, len(self.codes) - 1)

    @property
    def white(self) -> Tensor:
        return torch.tensor([len(self.codes) - 1])

    def core(self, distance: int) -> Tensor:
        """bool [n]: held out, and so is everything at most ``distance`` away along x or y."""
        held = self.held.view(1, 1, self.size, self.size).float()
        window = 2 * distance + 1
        # Beyond the image there is nothing to learn from, so its border does not count as known.
        apart = -torch.nn.functional.max_pool2d(-held, window, stride=1, padding=distance)
        return apart.flatten().bool()


def open_sheet(size: int, encoding: Encoding, split: str = "square", sigma: float = 1.0) -> Sheet:
    """Everything of the world `Bumps`, in its own positions and codes."""
    world = Bumps(size, sigma=sigma)
    y, x = np.indices((size, size)).reshape(2, -1).astype(np.float32)
    stripes = world.split(split, "stripes").samples(np.arange(2 * size)).factors
    grid = {"kind": np.zeros(size**2, np.int64), "x": x, "y": y}
    values = {name: np.concatenate([grid[name], stripes[name]]) for name in grid}
    slopes = world.codes(encoding)[1]
    none = np.zeros((size**2, slopes.shape[1]), np.float32)
    along = (np.concatenate([slopes[x.astype(int)], none], 1), np.concatenate([none, slopes[y.astype(int)]], 1))
    codes, images = torch.from_numpy(world.encode(values, encoding)), torch.from_numpy(world.pixels(values))
    held = torch.from_numpy(world.held_out(split)).flatten()
    return Sheet(
        size=size,
        blank=float(images[: size**2][held].double().square().mean()),
        codes=torch.cat([codes, torch.zeros_like(codes[:1])]),
        slopes=(torch.from_numpy(along[0]), torch.from_numpy(along[1])),
        images=torch.cat([images, torch.ones_like(images[:1])]),
        held=held,
    )
