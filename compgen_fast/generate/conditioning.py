"""What a generator is told: factors → one condition vector.

A condition is a sum over factors, so what one factor says does not depend on the others. A factor that is left out says
"unknown", which is learned as well. Which factors are told, and how exactly, is `ConditioningConfig`.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compgen_fast.draws import Draws
from compgen_fast.generate.config import ConditioningConfig
from compgen_fast.models.supervised import span
from compgen_fast.worlds.source import Factor

STD = 0.5  # of what one factor says at first: trunks learn slowly from weak conditions


class Conditioning(nn.Module):
    """Factors by name, [B] each → [B, width].

    Args:
        config: which factors, as numbers or by bins, and how often they are left out.
        factors: all factors of the data set.
        width: of a condition.
    """

    def __init__(self, config: ConditioningConfig, factors: Sequence[Factor], width: int) -> None:
        super().__init__()
        told = chosen(factors, config.factors)
        exact = config.kind in ("full", "dropout")
        numbers = tuple(factor for factor in told if exact and not factor.categorical)
        choices = tuple(factor for factor in told if factor not in numbers)
        self.config, self.factors = config, (*numbers, *choices)
        self.numbers = Numbers(numbers, config.octaves, config.hidden, width) if numbers else None
        self.choices = Choices(choices, config.bins, width) if choices else None
        self.unknown = nn.Parameter(STD * torch.randn(len(told), width))

    def forward(self, factors: Mapping[str, Tensor], draws: Draws | None = None) -> Tensor:
        """The condition [B, W]. With draws, as in training, factors are left out as the settings say.

        Args:
            factors: by name, int64 [B] (index into the factor's values) or float [B].
            draws: source of random numbers; None to tell everything.
        """
        values = [self._value(factor, factors) for factor in self.factors]
        known = self._known(len(values[0]), draws)
        split = len(self.numbers.factors) if self.numbers is not None else 0
        condition = (1 - known) @ self.unknown
        if self.numbers is not None:
            condition = condition + self.numbers(torch.stack(values[:split], 1), known[:, :split])
        if self.choices is not None:
            condition = condition + self.choices(values[split:], known[:, split:])
        return condition

    def nothing(self, batch: int) -> Tensor:
        """The condition [batch, W] that tells nothing."""
        if self.config.all_dropout == 0:
            raise ValueError(
                "guidance compares with a condition that tells nothing, which this generator has never seen: "
                "conditioning.all_dropout is 0; set it to 0.1 or so, or sample with guidance=1"
            )
        bias = 0 if self.numbers is None else self.numbers.second.bias
        return (self.unknown.sum(0) + bias).expand(batch, -1)

    def _known(self, batch: int, draws: Draws | None) -> Tensor:
        """[B, factors], 1 for a factor that is told and 0 for one that is left out."""
        known = self.unknown.new_ones(batch, len(self.factors))
        if draws is None:
            return known
        if self.config.kind in ("dropout", "both"):
            known = known * (draws.uniform(known) >= self.config.concept_dropout)
        if self.config.all_dropout > 0:
            known = known * (draws.uniform(known[:, :1]) >= self.config.all_dropout)
        return known

    def _value(self, factor: Factor, given: Mapping[str, Tensor]) -> Tensor:
        """[B]: the index of a category, or the share of a number's range."""
        if factor.name not in given:
            had = ", ".join(given) or "none"
            raise ValueError(f"Conditioning: the factor {factor.name!r} is needed; the factors given are {had}")
        value = given[factor.name]
        if value.dim() != 1 or value.is_floating_point() == factor.categorical:
            expected = "whole numbers" if factor.categorical else "floating-point numbers"
            raise ValueError(
                f"Conditioning: {factor.name!r} is {value.dtype} {list(value.shape)}; expected {expected} [B]"
            )
        if factor.values is not None:
            return checked_choice(factor.name, value, len(factor.values))
        return ((value - factor.low) / span(factor)).to(self.unknown.dtype)


class Numbers(nn.Module):
    """Shares of ranges [B, F] → [B, width], the sum of a small MLP of each; an unknown one adds nothing."""

    def __init__(self, factors: Sequence[Factor], octaves: int, hidden: int, width: int) -> None:
        super().__init__()
        self.factors, inputs = tuple(factors), 1 + 2 * octaves
        self.register_buffer("frequencies", torch.pi * 2.0 ** torch.arange(octaves), persistent=False)
        self.first = nn.Parameter(torch.randn(len(factors), inputs, hidden) * inputs**-0.5)
        self.first_bias = nn.Parameter(torch.zeros(len(factors), 1, hidden))
        self.second = nn.Linear(len(factors) * hidden, width)

    def forward(self, shares: Tensor, known: Tensor) -> Tensor:
        waves = shares.unsqueeze(-1) * self.get_buffer("frequencies")
        features = torch.cat([shares.unsqueeze(-1), waves.sin(), waves.cos()], -1)
        hidden = F.silu(torch.baddbmm(self.first_bias, features.transpose(0, 1), self.first)).transpose(0, 1)
        condition: Tensor = self.second((hidden * known.unsqueeze(-1)).flatten(1))
        return condition


class Choices(nn.Module):
    """Categories, and shares of ranges by their bin, F of [B] → [B, width], the sum of a vector for each value."""

    def __init__(self, factors: Sequence[Factor], bins: int, width: int) -> None:
        super().__init__()
        self.factors, self.bins = tuple(factors), bins
        *first, total = accumulate((len(factor.values) if factor.values else bins for factor in factors), initial=0)
        self.register_buffer("first", torch.tensor(first), persistent=False)
        self.vectors = nn.Parameter(STD * torch.randn(total, width))

    def forward(self, values: Sequence[Tensor], known: Tensor) -> Tensor:
        index = torch.stack([self._index(*each) for each in zip(self.factors, values, strict=True)], 1)
        vectors = F.embedding(index + self.get_buffer("first"), self.vectors)
        return torch.einsum("bfw,bf->bw", vectors, known)

    def _index(self, factor: Factor, value: Tensor) -> Tensor:
        if factor.categorical:
            return value
        return (value * self.bins).floor().clamp(0, self.bins - 1).long()


def checked_choice(name: str, value: Tensor, count: int) -> Tensor:
    """Looked at on the CPU only, since a GPU would have to be waited for."""
    if not value.is_cuda and (value.min() < 0 or value.max() >= count):
        raise ValueError(f"Conditioning: {name!r} has values outside 0 to {count - 1}; it has {count} categories")
    return value


def chosen(factors: Sequence[Factor], names: Sequence[str]) -> tuple[Factor, ...]:
    """The factors of these names; all of them where no name is given."""
    known = {factor.name: factor for factor in factors}
    unknown = [name for name in names if name not in known]
    if unknown or not known:
        asked = f"there is no factor {', '.join(unknown)}" if unknown else "nothing to tell"
        raise ValueError(f"Conditioning: {asked}; the data set has {', '.join(known) or 'no factors'}")
    return tuple(known[name] for name in names) or tuple(factors)
