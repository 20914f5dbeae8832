"""Images to features by four convolutions of 5×5, the encoder of Slot Attention's paper.

A convolution does not know where it is, so the position of each feature is added at the end. What it is not for:
pretrained features (`vit_weights`).
"""

import torch
from torch import Tensor, nn

from compgen_fast.models.positions import fourier_features

LAYERS = 4
DOWNSAMPLES = (1, 2, 4, 8, 16)
OCTAVES = 6


class CNN(nn.Module):
    """Images [B, 3, H, W] → features [B, H·W / downsample², width], row by row; ``downsample`` must divide H and W.

    Args:
        width: channels of every layer.
        downsample: pixels per feature along a side, a power of 2 up to 16. Strides of 2 come first: later layers then
            work on fewer pixels.
    """

    def __init__(self, width: int, downsample: int) -> None:
        super().__init__()
        if downsample not in DOWNSAMPLES:
            raise ValueError(f"CNN: downsample is {downsample}; expected one of {', '.join(map(str, DOWNSAMPLES))}")
        if width < 1:
            raise ValueError(f"CNN: width is {width}; expected at least 1 channel")
        self.width, self.downsample = width, downsample
        halvings = DOWNSAMPLES.index(downsample)
        layers: list[nn.Module] = []
        for layer in range(LAYERS):
            stride, channels = 2 if layer < halvings else 1, width if layer else 3
            layers += [nn.Conv2d(channels, width, 5, stride, padding=2), nn.ReLU()]
        # Channels last: as fast in fp32 on a CPU, 2.7 times as fast in bf16, and the output needs no transposition.
        self.layers = nn.Sequential(*layers).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.embed_position = nn.Linear(4 * OCTAVES, width)

    def forward(self, images: Tensor) -> Tensor:
        self._check(images)
        maps = self.layers(images.contiguous(memory_format=torch.channels_last))
        height, width = maps.shape[-2:]
        positions = fourier_features(height, width, OCTAVES, images.device).to(self.embed_position.weight.dtype)
        features: Tensor = maps.flatten(2).transpose(1, 2) + self.embed_position(positions)
        return features

    def _check(self, images: Tensor) -> None:
        shape, cell = images.shape, self.downsample
        if len(shape) != 4 or shape[1] != 3 or shape[2] % cell or shape[3] % cell:
            raise ValueError(
                f"CNN: images have shape {list(shape)}; expected [B, 3, H, W] with H and W multiples of "
                f"downsample={cell}: resize the images or choose another downsample"
            )
