"""What all generators have in common: latents and factors → named losses; factors → latents.

    factors → condition        latents → corrupted tokens → trunk → what the objective makes of it (+ JEPA)

An objective says how it corrupts tokens and how it scores the trunk's output. Losses are sums over the tokens in
question, divided by how many there are on average, so that equal parts of a batch average to the whole, and a token
counts the same in every image. Generators never see images: latents come from a tokenizer.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from compgen_fast.draws import Draws
from compgen_fast.generate.conditioning import Conditioning
from compgen_fast.generate.config import GeneratorConfig
from compgen_fast.generate.jepa import Jepa
from compgen_fast.generate.trunk import Trunk
from compgen_fast.models.slot_vae import UNSEEDED
from compgen_fast.worlds.source import Factor


@dataclass(frozen=True)
class Corrupted:
    """What the trunk sees of a batch, and where its output is asked for."""

    tokens: Tensor
    """[B, T, W], embedded."""
    condition: Tensor
    """[B, W]."""
    hidden: Tensor
    """bool [B, T]: the tokens that are scored."""
    expected: float
    """How many tokens of an image are scored, on average."""
    target: Tensor
    """What the objective wants of each token, [B, T, …]."""

    @cached_property
    def places(self) -> Tensor:
        """The scored tokens [M] by their number in the batch, image by image."""
        return self.hidden.flatten().nonzero().squeeze(1)

    def scored(self, x: Tensor) -> Tensor:
        """The scored tokens [M, …] of x [B, T, …]."""
        return x.flatten(0, 1).index_select(0, self.places)

    def mean(self, errors: Tensor) -> Tensor:
        """Of one error for each scored token, [M]."""
        return errors.sum() / (len(self.tokens) * self.expected)


class Generator(nn.Module, ABC):
    """The frame of a generator; objectives fill in `corrupt`, `score` and `sample`.

    Args:
        config: settings.
        factors: all factors of the data set.
        embedding: latents [B, T, …] → tokens [B, T, W].
    """

    measure: str
    """What the objective's own loss is called."""
    causal = False

    def __init__(self, config: GeneratorConfig, factors: Sequence[Factor], embedding: nn.Module) -> None:
        super().__init__()
        self.tokens, self.factors = config.side**2, tuple(factors)
        self.conditioning = Conditioning(config.conditioning, factors, config.trunk.width)
        self.embedding, self.trunk = embedding, Trunk(config.trunk, config.side)
        self.jepa = Jepa(config.jepa, self.embedding, self.trunk) if config.jepa else None

    @abstractmethod
    def corrupt(self, latents: Tensor, condition: Tensor, draws: Draws) -> Corrupted:
        """Latents as the trunk sees them in training."""

    @abstractmethod
    def score(self, output: Tensor, seen: Corrupted, draws: Draws) -> Tensor:
        """The objective's loss, a scalar, of the trunk's output [B, T, W]."""

    @abstractmethod
    def check(self, latents: Tensor) -> None:
        """Raises a ValueError where latents are not what the objective is for."""

    @abstractmethod
    def blank(self, batch: int) -> Tensor:
        """Latents [batch, T, …] of zeros, on this model's device: what it takes, without a tokenizer."""

    @abstractmethod
    def sample(
        self,
        factors: Mapping[str, Tensor],
        *,
        draws: Draws = UNSEEDED,
        guidance: float = 1.0,
    ) -> Tensor:
        """Latents [B, T, …]; a pure function of factors and draws, and a batch can be drawn in parts.

        Args:
            factors: by name, [B] each.
            draws: source of all random numbers.
            guidance: how much the factors count; 1 for as they were learned.
        """

    def whole(self, condition: Tensor) -> Tensor:
        """The condition [B, W] under which the trunk sees latents that are not corrupted."""
        return condition

    def forward(
        self, latents: Tensor, factors: Mapping[str, Tensor], *, step: int = 0, draws: Draws = UNSEEDED
    ) -> dict[str, Tensor]:
        """The same as `losses`, which is what a trainer calls."""
        return self.losses(latents, factors, step=step, draws=draws)

    def losses(
        self, latents: Tensor, factors: Mapping[str, Tensor], *, step: int = 0, draws: Draws = UNSEEDED
    ) -> dict[str, Tensor]:
        """The loss of a batch, and what it is made of.

        Args:
            latents: continuous tokens [B, T, C] of unit variance, or codes int64 [B, T].
            factors: by name, int64 [B] (index into the factor's values) or float [B].
            step: not used; models with warm-ups take it here.
            draws: source of all random numbers.

        Returns:
            ``loss``, and without gradient: the objective's own part by its name, ``scored`` (how many tokens were
            scored, of the number that is expected), and with JEPA ``jepa`` and ``jepa/7``, … by layer.
        """
        self.check(latents)
        condition = self.conditioning(factors, draws if self.training else None)
        seen = self.corrupt(latents, condition, draws)
        layers = () if self.jepa is None else self.jepa.layers
        output, kept = self.trunk(seen.tokens, seen.condition, causal=self.causal, keep=layers)
        own = self.score(output, seen, draws)
        scored = seen.hidden.sum() / (len(latents) * seen.expected)
        named = {self.measure: own.detach(), "scored": scored}
        if self.jepa is None:
            return {"loss": own} | named
        target = self.jepa.target(latents, self.whole(condition))
        errors = {
            layer: seen.mean(self.jepa.errors(layer, kept[layer], target[layer], seen.condition, seen.places))
            for layer in layers
        }
        jepa = torch.stack([*errors.values()]).sum()
        named |= {"jepa": jepa.detach()} | {f"jepa/{layer}": error.detach() for layer, error in errors.items()}
        return {"loss": own + self.jepa.weight * jepa} | named

    def end_step(self, total: Callable[[Tensor], Tensor]) -> None:
        """JEPA's target follows the weights that a step has left: trainers call this after it (`EndsSteps`).

        ``total`` sums over ranks, and is not used: all ranks have the same weights.
        """
        if self.jepa is not None:
            self.jepa.follow(self.embedding, self.trunk)

    def guide(self, factors: Mapping[str, Tensor], guidance: float) -> "Guide":
        """Conditions to sample under."""
        condition = self.conditioning(factors)
        if guidance == 1:
            return Guide(condition, guidance)
        return Guide(torch.cat([condition, self.conditioning.nothing(len(condition))]), guidance)


@dataclass(frozen=True)
class Guide:
    """Classifier-free guidance: output without a condition + guidance · (output with it − output without it)."""

    condition: Tensor
    """[B, W], or [2B, W] with the conditions that tell nothing after the others."""
    guidance: float

    @property
    def batch(self) -> int:
        return len(self.condition) // (1 if self.guidance == 1 else 2)

    def both(self, x: Tensor) -> Tensor:
        """x [B, …] once for each condition."""
        return x if self.guidance == 1 else torch.cat([x, x])

    def mixed(self, output: Tensor) -> Tensor:
        """Outputs for each condition → the guided output [B, …]."""
        if self.guidance == 1:
            return output
        told, untold = output.chunk(2)
        return torch.lerp(untold, told, self.guidance)


def check_continuous(name: str, latents: Tensor, tokens: int, channels: int) -> None:
    """Raises a ValueError where latents are not [B, tokens, channels]."""
    if not latents.is_floating_point() or latents.shape[1:] != (tokens, channels):
        raise ValueError(
            f"{name}: latents are {latents.dtype} {list(latents.shape)}; expected continuous tokens "
            f"[B, {tokens}, {channels}] (set side to the tokenizer's grid and channels to its width)"
        )
