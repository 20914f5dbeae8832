"""From settings to generators, and which settings contradict each other. It seeds nothing: weights are the caller's."""

from collections.abc import Sequence

from compgen_fast.generate.config import (
    ConditioningConfig,
    DiTConfig,
    GIVTConfig,
    JepaConfig,
    MARConfig,
    MaskGITConfig,
    ObjectiveConfig,
)
from compgen_fast.generate.dit import DiT
from compgen_fast.generate.generator import Generator
from compgen_fast.generate.givt import CausalGIVT, MaskedGIVT
from compgen_fast.generate.mar import MAR
from compgen_fast.generate.maskgit import MaskGIT
from compgen_fast.worlds.source import Factor


def build(config: ObjectiveConfig, factors: Sequence[Factor]) -> Generator:
    """The generator of these settings; ``factors`` are the data set's."""
    check(config)
    match config:
        case DiTConfig():
            return DiT(config, factors)
        case MaskGITConfig():
            return MaskGIT(config, factors)
        case MARConfig():
            return MAR(config, factors)
        case GIVTConfig():
            return CausalGIVT(config, factors) if config.order == "causal" else MaskedGIVT(config, factors)


def check(config: ObjectiveConfig) -> None:
    """Raises a ValueError that says what to change where settings cannot work, or not together."""
    match config:
        case DiTConfig():
            _at_least(1, channels=config.channels)
        case MaskGITConfig():
            _at_least(2, codes=config.codes)
            _share(label_smoothing=config.label_smoothing)
        case MARConfig():
            _at_least(1, channels=config.channels, head_width=config.head_width, head_layers=config.head_layers)
        case GIVTConfig():
            _at_least(1, channels=config.channels, components=config.components)
    _at_least(1, image_size=config.image_size)
    _check_conditioning(config.conditioning)
    if config.jepa is not None:
        _check_jepa(config.jepa)
        if isinstance(config, GIVTConfig) and config.order == "causal":
            raise ValueError(
                "jepa predicts hidden tokens from those around them, but order is 'causal', which hides none; set "
                "order to 'masked' or jepa to None"
            )


def _check_conditioning(config: ConditioningConfig) -> None:
    _at_least(2, bins=config.bins)
    _at_least(0, octaves=config.octaves)
    _at_least(1, hidden=config.hidden)
    _share(concept_dropout=config.concept_dropout, all_dropout=config.all_dropout)


def _check_jepa(config: JepaConfig) -> None:
    _at_least(0, weight=config.weight)
    _at_least(1, rate_steps=config.rate_steps)
    if not 0 <= config.rate <= 1:
        raise ValueError(f"rate is {config.rate}; expected 0 to 1")


def _at_least(least: int, **values: float) -> None:
    for name, value in values.items():
        if value < least:
            raise ValueError(f"{name} is {value}; expected at least {least}")


def _share(**values: float) -> None:
    for name, value in values.items():
        if not 0 <= value < 1:
            raise ValueError(f"{name} is {value}; expected 0 to below 1")
