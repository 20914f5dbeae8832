"""Small decoders of the kinds people have, in fp64: slots [B, K, d] in, pixels out."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compgen_fast.models import CrossAttentionDecoder
from compgen_fast.ops import projected_slot_attention, slot_cross_attention

WIDTH, CODE, HEADS = 8, 6, 2


def slots(B: int = 2, K: int = 4) -> Tensor:
    return torch.randn(B, K, CODE, dtype=torch.float64)


class Additive(nn.Module):
    """Σ_k MLP(z_k), with a LayerNorm inside each slot's branch."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nn.Linear(CODE, WIDTH),
            nn.LayerNorm(WIDTH),
            nn.GELU(),
            nn.Linear(WIDTH, WIDTH),
            nn.SiLU(),
            nn.Linear(WIDTH, 5),
        )

    def forward(self, z: Tensor) -> Tensor:
        return self.branch(z).sum(1)


class Bent(Additive):
    """A function of all slots together."""

    def forward(self, z: Tensor) -> Tensor:
        return torch.tanh(super().forward(z))


class AdditiveConvolutional(nn.Module):
    """Σ_k CNN(z_k), as a spatial broadcast decoder makes images."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(CODE, 4 * 2 * 2)
        self.up = nn.ConvTranspose2d(4, 4, 4, stride=2, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.each_pixel = nn.LayerNorm(4)
        self.out = nn.Conv2d(4, 3, 3, padding=1)

    def branch(self, codes: Tensor) -> Tensor:
        x = self.start(codes).unflatten(1, (4, 2, 2))
        x = F.relu(self.norm(self.up(x)))
        x = self.each_pixel(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.out(F.interpolate(F.gelu(x), scale_factor=2, mode="bilinear"))

    def forward(self, z: Tensor) -> Tensor:
        B, K, _ = z.shape
        return self.branch(z.flatten(0, 1)).unflatten(0, (B, K)).sum(1)


class Convolutional(nn.Module):
    """All slots into one CNN with transposed convolutions and GroupNorm."""

    def __init__(self, K: int = 4) -> None:
        super().__init__()
        self.start = nn.Linear(K * CODE, 4 * 2 * 2)
        self.layers = nn.Sequential(
            nn.GroupNorm(2, 4),
            nn.SiLU(),
            nn.ConvTranspose2d(4, 4, 4, stride=2, padding=1),
            nn.GroupNorm(2, 4),
            nn.LeakyReLU(0.1, inplace=True),
            nn.Conv2d(4, 3, 3, padding=1),
            nn.Sigmoid(),
        )

    def forward(self, z: Tensor) -> Tensor:
        return self.layers(self.start(z.flatten(1)).view(-1, 4, 2, 2))


class Layer(nn.Module):
    """Cross-attention to the slots and a feed-forward, both after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_q, self.norm_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.to_q, self.to_out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.to_kv = nn.Linear(WIDTH, 2 * WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.unflatten(-1, (HEADS, -1)).transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    def forward(self, x: Tensor, s: Tensor) -> Tensor:
        k, v = self.to_kv(s).chunk(2, -1)
        x = x + self.to_out(self.attend(self.to_q(self.norm_q(x)), k, v))
        return x + self.mlp(self.norm_mlp(x))


class SlotLayer(Layer):
    """The same with this project's op."""

    return_weights = False

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.unflatten(-1, (HEADS, -1)) for x in (q, k, v))
        if self.return_weights:
            return slot_cross_attention(q, k, v)[0].flatten(2)
        return slot_cross_attention(q, k, v, return_weights=False).flatten(2)


class Transformer(nn.Module):
    """Pixels query slots, as in the reference decoder; plain torch modules."""

    layer: type[Layer] = Layer
    num_pixels = 7

    def __init__(self) -> None:
        super().__init__()
        self.slots = nn.Sequential(nn.Linear(CODE, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH))
        self.queries = nn.Parameter(torch.randn(self.num_pixels, WIDTH))
        self.layers = nn.ModuleList(self.layer() for _ in range(2))
        self.out = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3))

    def forward(self, z: Tensor, pixels: Tensor | None = None) -> Tensor:
        s = self.slots(z)
        queries = self.queries if pixels is None else self.queries[pixels]
        x = queries.expand(len(z), -1, -1)
        for layer in self.layers:
            x = layer(x, s)
        return self.out(x)


class SlotTransformer(Transformer):
    layer = SlotLayer


class ProjectedLayer(Layer):
    """The same with both projections in one op: two heads, so wide that folding them into the slots pays."""

    def __init__(self) -> None:
        super().__init__()
        width = 3 * WIDTH
        self.to_q, self.to_out = nn.Linear(WIDTH, width), nn.Linear(width, WIDTH)
        self.to_kv = nn.Linear(WIDTH, 2 * width)

    def forward(self, x: Tensor, s: Tensor) -> Tensor:
        k, v = (slots.unflatten(-1, (HEADS, -1)) for slots in self.to_kv(s).chunk(2, -1))
        projections = self.to_q.weight, self.to_q.bias, self.to_out.weight, self.to_out.bias
        x = x + projected_slot_attention(self.norm_q(x), k, v, *projections, return_weights=False)
        return x + self.mlp(self.norm_mlp(x))


class ProjectedTransformer(Transformer):
    layer = ProjectedLayer


class Reference(CrossAttentionDecoder):
    """This project's decoder, whose first pixels are one set for all images."""

    def __init__(self) -> None:
        super().__init__(CODE, 3, heads=HEADS, head_dim=16, query_dim=WIDTH, slot_hidden=WIDTH, octaves=2)


class SelfAttending(nn.Module):
    """torch's own transformer layer over the slots: nn.MultiheadAttention inside."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(CODE, 2, 12, dropout=0.0, batch_first=True, activation="gelu")

    def forward(self, z: Tensor) -> Tensor:
        return self.layer(z)


DECODERS = (Bent, Convolutional, Transformer, SlotTransformer, ProjectedTransformer, Reference, SelfAttending)
