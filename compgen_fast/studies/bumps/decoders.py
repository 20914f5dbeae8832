"""What is trained: stacks of decoders, codes [M, B, w] → images [M, B, N, N].

- `mlp`: the code through dense layers;
- `cnn`: a dense layer to maps of a quarter of the side, convolutions there and at half of it, each twice as large by a
  transposed convolution;
- `rendering`: a dense layer paints two whole images, and convolutions that are the same everywhere combine them.

A decoder is a fold over its ``layers``; what comes out of each is what the geometry is measured on.
"""

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F

from compgen_fast.models.stacked import StackedConv2d, StackedLinear

Activation = Callable[[Tensor], Tensor]
SUMMED = 8  # maps that add up to the image: a grouped convolution to a single map is many times slower in oneDNN


class Layer(nn.Module):
    """An affine map, then its nonlinearity; ``shape`` says what the features of a sample are afterwards."""

    def __init__(
        self, affine: nn.Module, activation: Activation | None, shape: tuple[int, ...] = (), summed: bool = False
    ) -> None:
        super().__init__()
        self.affine, self.activation, self.shape, self.summed = affine, activation, shape, summed

    def forward(self, x: Tensor) -> Tensor:
        x = self.affine(x)
        if self.activation is not None:
            x = self.activation(x)
        if self.shape:
            x = x.unflatten(2, self.shape)
        return x.sum(2) if self.summed else x


class Decoder(nn.Module):
    """A stack of decoders."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, code: Tensor) -> Tensor:
        for layer in self.layers:
            code = layer(code)
        return code


def mlp(
    seeds: Sequence[int], inputs: int, size: int, depth: int, width: int = 256, activation: Activation = F.relu
) -> Decoder:
    """``depth`` dense layers."""
    sizes = [inputs, *[width] * (depth - 1), size**2]
    layers = [
        Layer(StackedLinear(seeds, number, sizes[number], sizes[number + 1]), activation) for number in range(depth - 1)
    ]
    return Decoder([*layers, Layer(StackedLinear(seeds, depth - 1, width, size**2), None, (size, size))])


def cnn(seeds: Sequence[int], inputs: int, size: int, depth: int, channels: int = 16) -> Decoder:
    """``depth`` layers; with two of them the second makes maps four times as large at once."""
    if size % 4:
        raise ValueError(f"cnn: images have a side of {size}; expected a multiple of 4, since maps are doubled twice")
    seed = StackedLinear(seeds, 0, inputs, channels * (size // 4) ** 2)
    first = Layer(seed, F.relu, (channels, size // 4, size // 4))
    convolution = partial(StackedConv2d, seeds, inputs=channels)
    if depth == 2:
        return Decoder([first, Layer(convolution(1, outputs=1, kernel=8, up=4), None, summed=True)])
    doubled = (depth - 2) // 2 + 1
    middle = [
        convolution(number, outputs=channels, kernel=4, up=2)
        if number == doubled
        else convolution(number, outputs=channels)
        for number in range(1, depth - 1)
    ]
    last = convolution(depth - 1, outputs=1, kernel=4, up=2)
    return Decoder([first, *(Layer(each, F.relu) for each in middle), Layer(last, None, summed=True)])


def rendering(seeds: Sequence[int], inputs: int, size: int, painted: int = 2, channels: int = 16) -> Decoder:
    """Two painted images and three convolutions 3 × 3.

    What is painted starts white, since an image is the product of its factors: a factor then learns what it takes away,
    at every pixel, from its stripe alone. From black it would learn what it adds, and two of them have to be told from
    one by the bumps that are shown.
    """
    paint = StackedLinear(seeds, 0, inputs, painted * size**2)
    nn.init.ones_(paint.bias)
    return Decoder([Layer(paint, F.relu, (painted, size, size)), *combining(seeds, painted, channels)])


def combining(seeds: Sequence[int], painted: int, channels: int) -> list[Layer]:
    """Convolutions that make one image of some [M, B, painted, N, N], by the same rule at every pixel."""
    return [
        Layer(StackedConv2d(seeds, 1, painted, channels), F.relu),
        Layer(StackedConv2d(seeds, 2, channels, channels), F.relu),
        Layer(StackedConv2d(seeds, 3, channels, SUMMED), None, summed=True),
    ]
