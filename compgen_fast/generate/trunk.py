"""The transformer that all generators share: a grid of tokens and one condition for all of them.

Layers are `compgen_fast.ops.trunk_block`. Their shifts, scales and gates come from the condition by one matrix product
(adaLN-zero): gates start at 0, so each layer starts as the identity.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compgen_fast.generate.config import TrunkConfig
from compgen_fast.models.transformer import checked_heads
from compgen_fast.ops.trunk_block import (
    HIDDEN,
    PARTS,
    Attend,
    BlockWeights,
    formula,
    merge_heads,
    modulated,
    split_heads,
    trunk_block,
)

STD = 0.02


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
        self.blocks = nn.ModuleList(Block(config.width, config.heads) for _ in range(config.layers))
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
    ) -> TrunkOutput:
        """
        Args:
            tokens: [B, T, W], without positions.
            condition: [B, W].
            causal: whether a token sees only itself and those before it.
            keep: layers after which the hidden states are wanted.
        """
        x, kept, modulations = self._run(tokens, condition, causal, keep, self.layers)
        return TrunkOutput(self.finish(x, modulations), kept)

    def hidden(self, tokens: Tensor, condition: Tensor, keep: Sequence[int]) -> dict[int, Tensor]:
        """Only the hidden states [B, T, W] after these layers; later ones do not run."""
        return self._run(tokens, condition, False, keep, max(keep))[1]

    def reader(self, condition: Tensor) -> "Reader":
        """For tokens that come one by one."""
        return Reader(self, condition)

    def positions(self) -> Tensor:
        """[T, W], row by row."""
        return (self.rows + self.columns).flatten(0, 1)

    def modulations(self, condition: Tensor) -> tuple[Tensor, ...]:
        """[B, 6, W] of each layer, then shift and scale of the last norm [B, 2, W]."""
        parts: Tensor = self.modulation(F.silu(condition)).unflatten(1, (-1, self.width))
        return torch.split(parts, [*[PARTS] * self.layers, 2], 1)

    def finish(self, x: Tensor, modulations: Sequence[Tensor]) -> Tensor:
        """The last norm, of x [B, T, W]."""
        shift, scale = modulations[-1].unsqueeze(2).unbind(1)
        return modulated(x, shift, scale)

    def _run(
        self,
        tokens: Tensor,
        condition: Tensor,
        causal: bool,
        keep: Sequence[int],
        last: int,
    ) -> tuple[Tensor, dict[int, Tensor], tuple[Tensor, ...]]:
        self._check(tokens, condition, keep)
        modulations, kept, x = self.modulations(condition), {}, tokens + self.positions()
        for layer, block in enumerate(self.blocks[:last]):
            x = block(x, modulations[layer], causal=causal)
            if layer + 1 in keep:
                kept[layer + 1] = x
        return x, kept, modulations

    def _check(self, tokens: Tensor, condition: Tensor, keep: Sequence[int]) -> None:
        expected = (len(tokens), self.side**2, self.width)
        if tokens.shape != expected or condition.shape != (len(tokens), self.width):
            raise ValueError(
                f"Trunk: tokens are {list(tokens.shape)} and the condition {list(condition.shape)}; expected "
                f"[B, {self.side**2}, {self.width}] and [B, {self.width}]"
            )
        if outside := [layer for layer in keep if not 1 <= layer <= self.layers]:
            raise ValueError(f"Trunk: there is no layer {outside[0]}; layers are counted from 1 to {self.layers}")


class Block(nn.Module):
    """One layer. Its norms have no weights: scales and shifts are the condition's."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, HIDDEN * width), nn.Linear(HIDDEN * width, width)

    def forward(self, x: Tensor, modulation: Tensor, *, causal: bool = False, attend: Attend | None = None) -> Tensor:
        """x [B, T, W]; modulation [B, 6, W]; ``attend`` where attention is the caller's: q, k and v [B, T, 3W] to
        [B, T, W].
        """
        layers = (self.qkv, self.proj, self.fc1, self.fc2)
        weights = BlockWeights(*(each for layer in layers for each in (layer.weight, layer.bias)))
        if attend is not None:
            return formula(x, modulation, weights, attend)
        return trunk_block(x, modulation, weights, self.heads, causal=causal)


class Reader:
    """Takes a sequence token by token, and keeps keys and values of those it has seen, so that each costs one token.

    What it returns is what a causal `Trunk` would, without gradient.
    """

    @torch.no_grad()
    def __init__(self, trunk: Trunk, condition: Tensor) -> None:
        self.trunk, self.seen = trunk, 0
        self.modulations, self.positions = trunk.modulations(condition), trunk.positions()
        shape = (2, trunk.layers, len(condition), trunk.heads, trunk.side**2, trunk.width // trunk.heads)
        self.keys, self.values = condition.new_empty(shape)

    @torch.no_grad()
    def __call__(self, token: Tensor) -> Tensor:
        """The next token's output [B, W], of the token [B, W]."""
        x = (token + self.positions[self.seen]).unsqueeze(1)
        for layer, block in enumerate(self.trunk.blocks):
            attend = lambda qkv, layer=layer: self._attend(qkv, layer)  # noqa: E731
            x = block(x, self.modulations[layer], attend=attend)
        self.seen += 1
        return self.trunk.finish(x, self.modulations).squeeze(1)

    def _attend(self, qkv: Tensor, layer: int) -> Tensor:
        q, k, v = split_heads(qkv, self.trunk.heads)
        self.keys[layer, :, :, self.seen], self.values[layer, :, :, self.seen] = k[:, :, 0], v[:, :, 0]
        keys, values = (kept[layer, :, :, : self.seen + 1] for kept in (self.keys, self.values))
        return merge_heads(F.scaled_dot_product_attention(q, keys, values))
