"""Features to slots by a Transformer whose queries are learned, one per slot.

Each slot has its own start, so slots can take fixed roles; nothing is drawn. What it is not for: exchangeable slots, or
a number of slots that changes from image to image (`SlotAttention`).
"""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recomputed

from compgen_fast.models.transformer import CrossBlock


class SlotQueries(nn.Module):
    """Features [B, N, input_dim] → slots [B, slots, dim], normed. The order of the features does not matter.

    Args:
        slots: how many slots.
        dim: width of a slot.
        input_dim: width of the features.
        layers: rounds of self-attention among slots, cross-attention to the features, and an MLP.
        heads: of both attentions; a divisor of ``dim``.
        checkpoint: recompute each layer in the backward pass.
    """

    def __init__(
        self, slots: int, dim: int, input_dim: int, layers: int = 5, heads: int = 4, *, checkpoint: bool = False
    ) -> None:
        super().__init__()
        if slots < 1 or layers < 1:
            raise ValueError(f"SlotQueries: slots={slots}, layers={layers}; both must be at least 1")
        self.input_dim, self.checkpoint = input_dim, checkpoint
        self.queries = nn.Parameter(torch.randn(1, slots, dim) * dim**-0.5)
        self.norm_features = nn.LayerNorm(input_dim)
        self.layers = nn.ModuleList(CrossBlock(dim, input_dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)

    def forward(self, features: Tensor) -> Tensor:
        if features.dim() != 3 or features.shape[-1] != self.input_dim:
            raise ValueError(
                f"SlotQueries: features have shape {list(features.shape)}; expected [B, N, {self.input_dim}] "
                "(flatten image features over height and width)"
            )
        tokens, slots = self.norm_features(features), self.queries.expand(len(features), -1, -1)
        for layer in self.layers:
            if self.checkpoint:
                slots = recomputed(layer, slots, tokens, use_reentrant=False, preserve_rng_state=False)
            else:
                slots = layer(slots, tokens)
        out: Tensor = self.norm(slots)
        return out
