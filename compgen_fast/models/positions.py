"""Where a pixel or a feature lies, as numbers that a network can use."""

import torch
from torch import Tensor


def fourier_features(height: int, width: int, octaves: int, device: torch.device | None = None) -> Tensor:
    """sin and cos of 2^o π times each coordinate in [0, 1], at the middle of each cell: [height · width, 4 · octaves].

    The slowest wave makes half a turn over the image: opposite edges differ.
    """
    rows, columns = ((torch.arange(size, device=device) + 0.5) / size for size in (height, width))
    position = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), -1).view(-1, 2, 1)
    angles = (position * torch.pi * 2.0 ** torch.arange(octaves, device=device)).flatten(1)
    return torch.cat([angles.sin(), angles.cos()], -1)
