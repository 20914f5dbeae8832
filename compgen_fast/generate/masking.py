"""Which tokens are hidden: in training a random share of them, in sampling ever fewer, both by MaskGIT's cosine.

All masked objectives use these, so that they differ in what they say about a hidden token, and in nothing else.
"""

import math

import torch
from torch import Tensor

from compgen_fast.draws import Draws

ROUNDS = 8


def hide(tokens: int, like: Tensor, draws: Draws) -> Tensor:
    """bool [B, T], True where a token is hidden: ⌈T · cos(π/2 · u)⌉ of each row of ``like`` [B, …], u uniform."""
    chances = draws.uniform(torch.empty(len(like), 1, device=like.device))
    count = (tokens * (chances * (math.pi / 2)).cos()).ceil()
    return random_order(tokens, like, draws).argsort(1) < count


def expected_hidden(tokens: int) -> float:
    """How many tokens `hide` hides of a row on average: the sum over n of P(T · cos(π/2 · u) > n)."""
    return sum(math.acos(n / tokens) for n in range(tokens)) * 2 / math.pi


def random_order(tokens: int, like: Tensor, draws: Draws) -> Tensor:
    """int64 [B, T]: an order of the tokens for each row of ``like`` [B, …]."""
    return draws.uniform(torch.empty(len(like), tokens, device=like.device)).argsort(1)


def rounds(tokens: int, steps: int | None) -> int:
    """The rounds asked for; if none are, as many as MaskGIT takes, or one for each token."""
    return min(ROUNDS, tokens) if steps is None else steps


def decoded_per_round(tokens: int, steps: int) -> list[int]:
    """How many tokens each of ``steps`` rounds decodes: few at first, and at least one."""
    if not 1 <= steps <= tokens:
        raise ValueError(f"steps is {steps}; expected 1 to {tokens}, since each round decodes at least one token")
    left = tokens
    counts = []
    for step in range(1, steps + 1):
        hidden = math.floor(tokens * math.cos(math.pi / 2 * step / steps) + 1e-9)
        after = min(max(hidden, steps - step), left - 1)
        counts.append(left - after)
        left = after
    return counts


def at(x: Tensor, places: Tensor) -> Tensor:
    """Tokens [B, n, W] of x [B, T, W] at these places [B, n]."""
    return x.gather(1, places.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
