"""The transformer that all generators share: a grid of tokens and one condition for all of them.

    x ← x + gate₁ · attention(scale₁ · norm(x) + shift₁)        x ← x + gate₂ · MLP(scale₂ · norm(x) + shift₂)

Shifts, scales and gates of all layers come from the condition by one matrix product (adaLN-zero): gates start at 0, so
each layer starts as the identity. Attention is torch's fused kernel, which does not differentiate twice: what it is not
for is a decoder whose derivatives are penalised.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compgen_fast.generate.config import TrunkConfig
from compgen_fast.models.transformer import checked_heads

EPS = 1e-6
STD = 0.02
PARTS = 6  # shift, scale and gate, of attention and of the MLP

Attend = Callable[[Tensor], Tensor]


class TrunkOutput(NamedTuple):
    tokens: Tensor
    """[B, T, W], after the last layer and its norm."""
    kept: dict[int, Tensor]
    """[B, T, W] after each layer that was asked for, without a norm."""


class Trunk(nn.Module):
    """Tokens [B, side², width] and a condition [B, width] → tokens [B, side², width].

    Args:
        config: sizes; layers are counted from 1.
        side: tokens along a side. Each row and each column has an embedding of its own.
    """

    def __init__(self, config: TrunkConfig, side: int) -> None:
        super().__init__()
        if config.layers < 1 or side < 1:
            raise ValueError(f"Trunk: layers is {config.layers} and side {side}; expected at least 1 of each")
        self.width, self.heads, self.side = config.width, checked_heads(config.width, config.heads), side
        self.rows = nn.Parameter(torch.empty(side, 1, config.width))
        self.columns = nn.Parameter(torch.empty(1, side, config.width))
        self.modulation = nn.Linear(config.width, (PARTS * config.layers + 2) * config.width)
        self.blocks = nn.ModuleList(Block(config.width) for _ in range(config.layers))
        self._start()

    def _start(self) -> None:
        """Normal numbers of deviation 0.02; shifts and gates 0, scales 1 whatever the condition."""
        for parameter in self.parameters():
            nn.init.zeros_(parameter) if parameter.dim() == 1 else nn.init.trunc_normal_(parameter, std=STD)
        nn.init.zeros_(self.modulation.weight)
        with torch.no_grad():
            parts = self.modulation.bias.view(-1, self.width)
            parts[:-2].view(-1, PARTS // 2, self.width)[:, 1] = 1
            parts[-1] = 1

    @property
    def layers(self) -> int:
        return len(self.blocks)

    def forward(
        self,
        tokens: Tensor,
        condition: Tensor,
        *,
        causal: bool = False,
        keep: Sequence[int] = (),
        heads: Tensor | None = None,
    ) -> TrunkOutput:
        """
        Args:
            tokens: [B, T, W], without positions.
            condition: [B, W].
            causal: whether a token sees only itself and those before it.
            keep: layers after which the hidden states are wanted.
            heads: [layers, heads], a factor on what each head adds; 0 takes it out.
        """
        x, kept, modulations = self._run(tokens, condition, causal, keep, heads, self.layers)
        return TrunkOutput(modulated(x, *modulations[-2:]), kept)

    def hidden(self, tokens: Tensor, condition: Tensor, keep: Sequence[int]) -> dict[int, Tensor]:
        """Only the hidden states [B, T, W] after these layers; later ones do not run."""
        return self._run(tokens, condition, False, keep, None, max(keep))[1]

    def reader(self, condition: Tensor, heads: Tensor | None = None) -> "Reader":
        """For tokens that come one by one."""
        return Reader(self, condition, heads)

    def positions(self) -> Tensor:
        """[T, W], row by row."""
        return (self.rows + self.columns).flatten(0, 1)

    def modulations(self, condition: Tensor) -> tuple[Tensor, ...]:
        """Six of each layer, then shift and scale of the last norm; [B, 1, W] each."""
        parts: tuple[Tensor, ...] = self.modulation(F.silu(condition)).unflatten(1, (-1, 1, self.width)).unbind(1)
        return parts

    def _run(
        self,
        tokens: Tensor,
        condition: Tensor,
        causal: bool,
        keep: Sequence[int],
        heads: Tensor | None,
        last: int,
    ) -> tuple[Tensor, dict[int, Tensor], tuple[Tensor, ...]]:
        self._check(tokens, condition, keep, heads)
        modulations, kept, x = self.modulations(condition), {}, tokens + self.positions()
        for layer, block in enumerate(self.blocks[:last]):
            factors = None if heads is None else heads[layer]
            attend = lambda qkv, factors=factors: self._attend(qkv, causal, factors)  # noqa: E731
            x = block(x, modulations[PARTS * layer : PARTS * (layer + 1)], attend)
            if layer + 1 in keep:
                kept[layer + 1] = x
        return x, kept, modulations

    def _attend(self, qkv: Tensor, causal: bool, heads: Tensor | None) -> Tensor:
        q, k, v = split_heads(qkv, self.heads)
        return merged(F.scaled_dot_product_attention(q, k, v, is_causal=causal), heads)

    def _check(self, tokens: Tensor, condition: Tensor, keep: Sequence[int], heads: Tensor | None) -> None:
        expected = (len(tokens), self.side**2, self.width)
        if tokens.shape != expected or condition.shape != (len(tokens), self.width):
            raise ValueError(
                f"Trunk: tokens are {list(tokens.shape)} and the condition {list(condition.shape)}; expected "
                f"[B, {self.side**2}, {self.width}] and [B, {self.width}]"
            )
        if outside := [layer for layer in keep if not 1 <= layer <= self.layers]:
            raise ValueError(f"Trunk: there is no layer {outside[0]}; layers are counted from 1 to {self.layers}")
        if heads is not None and heads.shape != (self.layers, self.heads):
            raise ValueError(
                f"Trunk: heads is {list(heads.shape)}; expected [{self.layers}, {self.heads}], a factor for each layer "
                "and head"
            )


class Block(nn.Module):
    """One layer. Its norms have no weights: scales and shifts are the condition's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, modulation: Sequence[Tensor], attend: Attend) -> Tensor:
        """x [B, T, W]; six modulations [B, 1, W]; ``attend`` takes packed q, k and v [B, T, 3W] to [B, T, W]."""
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = modulation
        x = torch.addcmul(x, gate, self.proj(attend(self.qkv(modulated(x, shift, scale)))))
        return torch.addcmul(x, mlp_gate, self.fc2(F.gelu(self.fc1(modulated(x, mlp_shift, mlp_scale)))))


class Reader:
    """Takes a sequence token by token, and keeps keys and values of those it has seen, so that each costs one token.

    What it returns is what a causal `Trunk` would, without gradient.
    """

    @torch.no_grad()
    def __init__(self, trunk: Trunk, condition: Tensor, heads: Tensor | None) -> None:
        self.trunk, self.heads, self.seen = trunk, heads, 0
        self.modulations, self.positions = trunk.modulations(condition), trunk.positions()
        shape = (2, trunk.layers, len(condition), trunk.heads, trunk.side**2, trunk.width // trunk.heads)
        self.keys, self.values = condition.new_empty(shape)

    @torch.no_grad()
    def __call__(self, token: Tensor) -> Tensor:
        """The next token's output [B, W], of the token [B, W]."""
        x = (token + self.positions[self.seen]).unsqueeze(1)
        for layer, block in enumerate(self.trunk.blocks):
            attend = lambda qkv, layer=layer: self._attend(qkv, layer)  # noqa: E731
            x = block(x, self.modulations[PARTS * layer : PARTS * (layer + 1)], attend)
        self.seen += 1
        return modulated(x, *self.modulations[-2:]).squeeze(1)

    def _attend(self, qkv: Tensor, layer: int) -> Tensor:
        q, k, v = split_heads(qkv, self.trunk.heads)
        self.keys[layer, :, :, self.seen], self.values[layer, :, :, self.seen] = k[:, :, 0], v[:, :, 0]
        keys, values = (kept[layer, :, :, : self.seen + 1] for kept in (self.keys, self.values))
        out = F.scaled_dot_product_attention(q, keys, values)
        return merged(out, None if self.heads is None else self.heads[layer])


def modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """scale · norm(x) + shift."""
    return torch.addcmul(shift, scale, F.layer_norm(x, x.shape[-1:], eps=EPS))


def split_heads(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """[B, T, 3W] → three of [B, heads, T, W / heads]."""
    q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in qkv.chunk(3, -1))
    return q, k, v


def merged(out: Tensor, heads: Tensor | None) -> Tensor:
    """[B, heads, T, D] → [B, T, heads · D], each head times its factor."""
    if heads is not None:
        out = out * heads[:, None, None]
    return out.transpose(1, 2).flatten(2)
