"""Slots to pixels by a sum: f(z) = Σ_k g(z_k). No slot can change what another paints, so nothing interacts.

The class of functions that the interaction penalty pulls other decoders towards, and the control for it: here the
penalty is zero by structure, and training it costs nothing. Objects that hide each other cannot be drawn this way.
"""

from torch import Tensor, nn

from compgen_fast.models.broadcast_decoder import Kind, painter


class AdditiveDecoder(nn.Module):
    """Slots [B, K, slot_dim] → pixels [B, N, 3], N = image_size²; arguments as of `SpatialBroadcastDecoder`."""

    def __init__(
        self, slot_dim: int, image_size: int, *, kind: Kind = "mlp", layers: int = 4, width: int = 64, octaves: int = 8
    ) -> None:
        super().__init__()
        self.num_pixels = image_size**2
        self.painter = painter(kind, slot_dim, image_size, 3, layers=layers, width=width, octaves=octaves)

    def forward(self, z: Tensor, pixels: Tensor | None = None) -> Tensor:
        """Decodes all pixels, or those whose flat indices are given: [B, len(pixels), 3]."""
        painted: Tensor = self.painter(z, pixels)
        return painted.sum(1)
