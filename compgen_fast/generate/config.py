"""What a generator is made of, as typed settings. `compgen_fast.generate.build` turns them into modules.

All objectives share trunk, conditioning and grid, so that two settings of different classes differ in the objective
only.
"""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class TrunkConfig:
    """The transformer that all generators share."""

    width: int = 256
    """Channels of a token inside the transformer."""
    layers: int = 12
    """Transformer blocks."""
    heads: int = 4
    """Attention heads."""


@dataclass(frozen=True)
class ConditioningConfig:
    """What a generator is told about the image."""

    kind: Literal["full", "quantised", "dropout", "both"] = "full"
    """full: every factor as it is; quantised: numbers only by the bin they fall in; dropout: each factor is left out at
    random in training; both: quantised, and left out at random."""
    factors: tuple[str, ...] = ()
    """Factors to tell; all that the data set has if none are given."""
    bins: int = 2
    """quantised and both: bins of a number's range."""
    concept_dropout: float = 0.1
    """dropout and both: how often one factor is left out in training, each on its own."""
    all_dropout: float = 0.1
    """How often all factors are left out together in training; classifier-free guidance needs it."""
    octaves: int = 4
    """full and dropout: Fourier features of a number, 2 per octave."""
    hidden: int = 64
    """full and dropout: hidden width of a number's MLP."""


@dataclass(frozen=True)
class JepaConfig:
    """An auxiliary loss inside the trunk: hidden states of the corrupted tokens predict those of the whole ones."""

    layers: tuple[int, ...] = (7, 9, 11)
    """Layers of the trunk after which hidden states are predicted, counted from 1."""
    weight: float = 0.6
    """Weight λ of the loss, which is summed over layers."""
    rate: float = 0.996
    """Share of its weights that the target keeps in a step, at first; it grows linearly to 1."""
    rate_steps: int = 10_000
    """Steps until it is 1 and the target stands still: usually the length of training."""


@dataclass(frozen=True)
class GeneratorConfig:
    """What all objectives share."""

    side: int = 4
    """Tokens along a side of the grid."""
    trunk: TrunkConfig = field(default_factory=TrunkConfig)
    conditioning: ConditioningConfig = field(default_factory=ConditioningConfig)
    jepa: JepaConfig | None = None
    image_size: int = 32
    """Pixels along a side of the images whose tokens are made."""


@dataclass(frozen=True)
class DiTConfig(GeneratorConfig):
    """Flow matching on all tokens at once, of a VAE or of a VQ-VAE's code vectors."""

    channels: int = 8
    """Numbers of a token."""


@dataclass(frozen=True)
class MaskGITConfig(GeneratorConfig):
    """Masked codes, each told by a softmax over the codebook."""

    codes: int = 512
    """Size of the codebook."""
    label_smoothing: float = 0.1
    """Share of the target probability that is spread over all codes."""


@dataclass(frozen=True)
class MARConfig(GeneratorConfig):
    """Masked continuous tokens, each drawn by a small flow of its own."""

    channels: int = 8
    """Numbers of a token."""
    head_width: int = 256
    """Hidden width of the MLP that is each token's flow."""
    head_layers: int = 3
    """Layers of that MLP."""


@dataclass(frozen=True)
class GIVTConfig(GeneratorConfig):
    """Continuous tokens, each told by a mixture of Gaussians."""

    channels: int = 8
    """Numbers of a token."""
    components: int = 8
    """Gaussians of a token's mixture."""
    order: Literal["masked", "causal"] = "masked"
    """masked: tokens in random order, many at once; causal: row by row, one after the other."""


ObjectiveConfig = DiTConfig | MaskGITConfig | MARConfig | GIVTConfig
