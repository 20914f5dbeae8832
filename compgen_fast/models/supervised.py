"""The supervised baseline: an encoder without a decoder, each slot read out linearly into the factors of its object.

A factor's name decides which slot it is read from. ``shape_2`` and ``z_2_1`` (procedural worlds count objects from 1)
and ``object1_shape`` (data sets on disk count from 0) all belong to the second object, which is slot 1. A factor
without a number (background, light) belongs to the slot after the last object. So slots need an order of their own,
which learned queries have and sampled slots have not.
"""

import re
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compgen_fast.draws import Draws
from compgen_fast.models.config import SupervisedConfig
from compgen_fast.models.slot_vae import UNSEEDED, in_full, scaled
from compgen_fast.worlds.source import Factor

_COUNTED_FROM = {re.compile(r"_(\d+)(?:_|$)"): 1, re.compile(r"^object(\d+)_"): 0}


class SupervisedEncoder(nn.Module):
    """Predicts factors from slots.

    Args:
        config: sizes, and which of the factors to predict.
        encoder: images [B, 3, H, W] in [−1, 1], Draws → [B, slots, slot_dim].
        factors: all factors of the data set.
    """

    def __init__(self, config: SupervisedConfig, encoder: nn.Module, factors: Sequence[Factor]) -> None:
        super().__init__()
        self.config, self.encoder = config, encoder
        self.factors = chosen(factors, config.factors)
        self.slot_of = slots_of(self.factors, factors, config.slots)
        self.readouts = nn.ModuleList(nn.Linear(config.slot_dim, len(f.values or (f,))) for f in self.factors)

    def forward(
        self,
        images: Tensor,
        factors: Mapping[str, Tensor] | None = None,
        *,
        step: int = 0,
        draws: Draws = UNSEEDED,
    ) -> dict[str, Tensor]:
        """The loss of a batch, and what it is made of.

        Args:
            images: uint8 [B, H, W, 3].
            factors: by name, int64 [B] (index into the factor's values) or float [B].
            step: not used; models with warm-ups take it here.
            draws: source of all random numbers.

        Returns:
            ``loss``, the sum over factors of cross-entropy (categories) or squared error (numbers, scaled to [0, 1]),
            mean over the batch; and without gradient, by factor: ``cross_entropy/…`` and ``accuracy/…``, or
            ``squared_error/…``.
        """
        outputs = self._outputs(images, draws)
        losses, metrics = [], {}
        for factor, output in zip(self.factors, outputs, strict=True):
            target = self._target(factor, factors, len(images)).to(output.device)
            if factor.categorical:
                losses.append(F.cross_entropy(output, target))
                metrics[f"cross_entropy/{factor.name}"] = losses[-1]
                metrics[f"accuracy/{factor.name}"] = (output.argmax(1) == target).to(output.dtype).mean()
            else:
                losses.append((output.squeeze(1) - (target - factor.low) / span(factor)).square().mean())
                metrics[f"squared_error/{factor.name}"] = losses[-1]
        return {"loss": torch.stack(losses).sum()} | {name: value.detach() for name, value in metrics.items()}

    @torch.no_grad()
    def predict(self, images: Tensor, draws: Draws = UNSEEDED) -> dict[str, Tensor]:
        """By name, int64 [B] (index into the factor's values) or float [B], in the factor's own range."""
        outputs = zip(self.factors, self._outputs(images, draws), strict=True)
        return {
            factor.name: output.argmax(1)
            if factor.categorical
            else output.squeeze(1).clamp(0, 1) * span(factor) + factor.low
            for factor, output in outputs
        }

    def encode(self, images: Tensor, draws: Draws = UNSEEDED) -> Tensor:
        """The slots [B, slots, slot_dim] of images uint8 [B, H, W, 3]."""
        slots: Tensor = self.encoder(scaled(images, self.config.image_size, self.encoder), draws)
        return slots

    def _outputs(self, images: Tensor, draws: Draws) -> list[Tensor]:
        """For each factor the scores of its values [B, values], or the number as a share of its range [B, 1]."""
        slots = self.encode(images, draws)
        pairs = zip(self.readouts, self.slot_of, strict=True)
        return [in_full(readout(slots[:, slot])) for readout, slot in pairs]

    def _target(self, factor: Factor, given: Mapping[str, Tensor] | None, batch: int) -> Tensor:
        if given is None or factor.name not in given:
            had = "no factors" if given is None else f"the factors {', '.join(given)}"
            raise ValueError(f"SupervisedEncoder: {had} were given; {factor.name!r} is needed as well (see `factors`)")
        target = given[factor.name]
        if target.shape != (batch,) or target.is_floating_point() == factor.categorical:
            expected = "whole numbers" if factor.categorical else "floating-point numbers"
            raise ValueError(
                f"SupervisedEncoder: {factor.name!r} is {target.dtype} {list(target.shape)}; expected {expected} "
                f"[{batch}], one for each image"
            )
        return target


def chosen(factors: Sequence[Factor], names: Sequence[str]) -> tuple[Factor, ...]:
    """The factors of these names; all of them where no name is given."""
    known = {factor.name: factor for factor in factors}
    unknown = [name for name in names if name not in known]
    if unknown or not known:
        asked = f"there is no factor {', '.join(unknown)}" if unknown else "nothing to predict"
        raise ValueError(f"SupervisedEncoder: {asked}; the data set has {', '.join(known) or 'no factors'}")
    return tuple(known[name] for name in names) or tuple(factors)


def slots_of(predicted: Sequence[Factor], factors: Sequence[Factor], slots: int) -> tuple[int, ...]:
    """The slot of each predicted factor. Objects are counted over all factors of the data set."""
    objects = [object_of(factor.name) for factor in factors]
    after_last = max((number + 1 for number in objects if number is not None), default=0)
    found = [object_of(factor.name) for factor in predicted]
    wanted = tuple(after_last if number is None else number for number in found)
    if max(wanted) >= slots:
        name = predicted[wanted.index(max(wanted))].name
        raise ValueError(
            f"SupervisedEncoder: the factor {name!r} is read from slot {max(wanted) + 1}, but there are {slots} slots; "
            f"set slots to {max(wanted) + 1} or more, or predict fewer factors"
        )
    return wanted


def object_of(name: str) -> int | None:
    """The object a factor's name speaks of, from 0; None where it speaks of none."""
    for pattern, first in _COUNTED_FROM.items():
        if match := pattern.search(name):
            number = int(match[1]) - first
            if number < 0:
                raise ValueError(f"SupervisedEncoder: the factor {name!r} counts objects from 0; expected from 1")
            return number
    return None


def span(factor: Factor) -> float:
    """The length of a number's range; 1 where it has but one value, which is then predicted as 0."""
    return factor.high - factor.low or 1.0
