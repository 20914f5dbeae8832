"""Pre-norm Transformer blocks, for tokens among themselves and for slots that look at tokens.

Parameters carry timm's names (norm1, attn.qkv, ls1.gamma, mlp.fc1, …), so that its weights load without a dictionary.
What it is not for: decoders, whose pixels attend to slots and not to each other.
"""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from compgen_fast.models.attention import cross_attention, self_attention

Activation = Literal["gelu", "gelu_tanh", "quick_gelu"]


class TransformerBlock(nn.Module):
    """x + attention(norm(x)), then x + MLP(norm(x)), on [B, N, dim].

    Args:
        dim: width of a token.
        heads: attention heads; a divisor of dim.
        ratio: hidden width of the MLP, in units of dim.
        activation: of the MLP; gelu_tanh is GELU's approximation by tanh, quick_gelu is x · sigmoid(1.702 x).
        eps: of the norms.
        layer_scale: start of a learned factor per channel on what each branch adds; None for no factor.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        ratio: float = 4,
        *,
        activation: Activation = "gelu",
        eps: float = 1e-6,
        layer_scale: float | None = None,
    ) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim, eps), nn.LayerNorm(dim, eps)
        self.attn = SelfAttention(dim, heads)
        self.mlp = MLP(dim, round(dim * ratio), activation)
        self.ls1, self.ls2 = (nn.Identity() if layer_scale is None else LayerScale(dim, layer_scale) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.ls1(self.attn(self.norm1(x)))
        out: Tensor = x + self.ls2(self.mlp(self.norm2(x)))
        return out


class CrossBlock(nn.Module):
    """Slots attend to each other, then to tokens, then pass an MLP; each pre-norm and residual.

    Slots [B, K, dim] and tokens [B, N, input_dim] → slots [B, K, dim]. Tokens come normed: one norm serves all layers.
    """

    def __init__(self, dim: int, input_dim: int, heads: int, ratio: float = 4) -> None:
        super().__init__()
        self.norm_self, self.norm_cross, self.norm_mlp = (nn.LayerNorm(dim) for _ in range(3))
        self.attn = SelfAttention(dim, heads)
        self.cross = CrossAttention(dim, input_dim, heads)
        self.mlp = MLP(dim, round(dim * ratio))

    def forward(self, slots: Tensor, tokens: Tensor) -> Tensor:
        slots = slots + self.attn(self.norm_self(slots))
        slots = slots + self.cross(self.norm_cross(slots), tokens)
        out: Tensor = slots + self.mlp(self.norm_mlp(slots))
        return out


class SelfAttention(nn.Module):
    """Attention of x [B, N, dim] to itself, with one projection for queries, keys and values."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = checked_heads(dim, heads)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        out: Tensor = self.proj(self_attention(q, k, v).flatten(-2))
        return out


class CrossAttention(nn.Module):
    """Attention of x [B, K, dim] to tokens [B, N, input_dim].

    Keys and values have no bias: one on the keys moves all scores of a query alike, and one on the values only shifts
    the bias of the output.
    """

    def __init__(self, dim: int, input_dim: int, heads: int) -> None:
        super().__init__()
        self.heads = checked_heads(dim, heads)
        self.to_q = nn.Linear(dim, dim)
        self.to_kv = nn.Linear(input_dim, 2 * dim, bias=False)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        q = self.to_q(x).unflatten(-1, (self.heads, -1))
        k, v = self.to_kv(tokens).unflatten(-1, (2, self.heads, -1)).unbind(2)
        out: Tensor = self.proj(cross_attention(q, k, v).flatten(-2))
        return out


class MLP(nn.Module):
    """Two linear layers and an activation between."""

    def __init__(self, dim: int, hidden: int, activation: Activation = "gelu") -> None:
        super().__init__()
        self.activation: Activation = activation
        self.fc1, self.fc2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(activate(self.fc1(x), self.activation))
        return out

    def extra_repr(self) -> str:
        return self.activation


class LayerScale(nn.Module):
    """A learned factor per channel."""

    def __init__(self, dim: int, start: float) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((dim,), start))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


def activate(x: Tensor, activation: Activation) -> Tensor:
    if activation == "quick_gelu":
        return x * (1.702 * x).sigmoid()
    return gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def checked_heads(dim: int, heads: int) -> int:
    if heads < 1 or dim < 1 or dim % heads:
        raise ValueError(f"Transformer: width {dim} cannot be split into {heads} heads; choose a divisor of the width")
    return heads
