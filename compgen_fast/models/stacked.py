"""Many small models of one shape as one: every weight has a leading dimension that counts the models.

A small model is all overhead: a step of one costs nearly what a step of eight costs. Activations are [M, B, …], M
models on B samples each; what one model computes does not depend on the others, so the gradient of the sum of their
losses is each one's own. Weights are drawn from each model's own seed, as torch draws them: a model comes out the same
alone and in any company, up to rounding.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def drawn(seeds: Sequence[int], layer: int, fan_in: int, *shape: int) -> nn.Parameter:
    """[M, *shape], uniform within ±1/√fan_in as in `nn.Linear`, of each model's seed and the layer's number."""
    bound = 1 / math.sqrt(fan_in)
    each = [
        torch.empty(shape).uniform_(-bound, bound, generator=torch.Generator().manual_seed(1_000 * seed + layer))
        for seed in seeds
    ]
    return nn.Parameter(torch.stack(each))


class StackedLinear(nn.Module):
    """x [M, B, inputs] → [M, B, outputs]."""

    def __init__(self, seeds: Sequence[int], layer: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = drawn(seeds, layer, inputs, inputs, outputs)
        self.bias = drawn(seeds, layer + 500, inputs, 1, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return torch.baddbmm(self.bias, x, self.weight)


class StackedConv2d(nn.Module):
    """x [M, B, C, H, W] → [M, B, outputs, H·up, W·up]: a convolution, or with ``up`` a transposed one.

    The models are the groups of one convolution.
    """

    def __init__(
        self, seeds: Sequence[int], layer: int, inputs: int, outputs: int, kernel: int = 3, up: int = 1
    ) -> None:
        super().__init__()
        self.up, self.kernel = up, kernel
        fan_in = inputs * kernel**2 // up**2
        shape = (outputs, inputs) if up == 1 else (inputs, outputs)
        self.weight = drawn(seeds, layer, fan_in, *shape, kernel, kernel)
        self.bias = drawn(seeds, layer + 500, fan_in, outputs)

    def forward(self, x: Tensor) -> Tensor:
        models = len(self.bias)
        grouped = x.movedim(0, 1).flatten(1, 2)
        weight, bias, padding = self.weight.flatten(0, 1), self.bias.flatten(), (self.kernel - self.up) // 2
        if self.up == 1:
            grouped = F.conv2d(grouped, weight, bias, padding=padding, groups=models)
        else:
            grouped = F.conv_transpose2d(grouped, weight, bias, stride=self.up, padding=padding, groups=models)
        stacked: Tensor = grouped.unflatten(1, (models, -1))
        return stacked.movedim(1, 0)
