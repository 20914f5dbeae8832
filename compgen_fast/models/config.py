"""What a model is made of, as typed settings: a recipe holds them, the command line overrides them, a checkpoint
carries them. `compgen_fast.models.build` turns them into modules.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from compgen_fast.generate.config import ObjectiveConfig

Penalty = Literal["none", "hessian", "pairs", "attention", "contrast", "triple"]


@dataclass(frozen=True)
class EncoderConfig:
    """Image → features (``kind``) → slots (``slots_by``)."""

    kind: Literal["cnn", "vit"] = "cnn"
    """cnn: 4 convolutions of 5×5; vit: a Vision Transformer."""
    width: int = 64
    """Channels of the features, and of slots inside the encoder."""
    downsample: int = 4
    """cnn: pixels per feature along a side; 1, 2, 4, 8 or 16."""
    patch: int = 8
    """vit: pixels of a patch along a side."""
    layers: int = 6
    """vit: Transformer blocks."""
    heads: int = 4
    """vit: attention heads."""
    weights: Path | None = None
    """vit: a local file of a timm ViT's weights; its sizes then replace width, patch, layers and heads."""
    lora_rank: int = 0
    """vit with weights: train low-rank updates of this rank and freeze the rest; 0 trains everything."""
    slots_by: Literal["attention", "learned_attention", "queries", "dense"] = "queries"
    """attention: Slot Attention; learned_attention: the same from learned starts, so that slots keep their roles;
    queries: a Transformer with learned slot queries; dense: one network from all features to all slots, which learns
    fastest."""
    slot_layers: int = 3
    """Rounds of Slot Attention, or layers of the slot Transformer."""
    slot_hidden: int = 256
    """dense: width of its hidden layer."""
    pooled_scene: bool = False
    """dense: the first slot sees only the mean of the features, which tells what is there but not where."""
    slot_heads: int = 4
    """Heads of the slot Transformer."""


@dataclass(frozen=True)
class DecoderConfig:
    """Slots → pixels."""

    kind: Literal[
        "cross_attention", "broadcast_cnn", "broadcast_mlp", "additive", "patch", "frame", "additive_frame"
    ] = "cross_attention"
    """broadcast_*: each slot paints an image and a mask, masks compete; additive: the images are summed without
    masks, so slots cannot interact; patch: cross-attention by patches instead of pixels; frame: each slot paints in a
    frame that it places, which learns objects in minutes on a CPU; additive_frame: the same, summed without masks."""
    layers: int = 2
    """Cross-attention layers, or layers of the spatial-broadcast network."""
    heads: int = 12
    """cross_attention and patch: attention heads."""
    head_dim: int = 43
    """cross_attention and patch: width of a head."""
    query_dim: int = 180
    """Width of a pixel's query, or of the broadcast network's hidden layers."""
    slot_hidden: int = 2064
    """cross_attention, patch and frame: hidden width of the slots' MLP."""
    octaves: int = 8
    """Fourier features of a pixel's position, 4 per octave."""
    patch: int = 4
    """patch: pixels of a patch along a side."""
    reads: Literal["own", "all"] = "own"
    """frame: whether a painter reads its own slot, or all of them."""
    frequencies: int = 12
    """frame: waves along a side that a slot paints with."""
    features: int = 8
    """frame: numbers that a slot paints at a pixel."""
    mixer: int = 32
    """frame: hidden width of the network from those numbers to colour."""


@dataclass(frozen=True)
class LossConfig:
    """sigma · squared error (summed over an image) + beta · KL (summed) + alpha · interaction penalty."""

    sigma: float = 1.0
    """Weight of the squared error, which is summed over an image."""
    beta: float = 0.05
    """Weight of the KL divergence to the prior, which is summed over the latents."""
    alpha: float = 0.05
    """Weight of the interaction penalty."""
    penalty: Penalty = "attention"
    """Interaction penalty: attention by the decoder's own weights; hessian, pairs, contrast and triple by derivatives
    of any decoder; none."""
    penalty_pixels: int | None = None
    """Pixels that a derivative penalty looks at, drawn anew each step; all if not given."""
    probes: int = 1
    """Random directions per image of hessian, pairs and triple."""
    alpha_start: int = 0
    """Steps before alpha begins to grow."""
    alpha_warmup: int = 0
    """Steps over which alpha then grows linearly from 0."""
    beta_warmup: int = 0
    """Steps over which beta grows linearly from 0."""


@dataclass(frozen=True)
class SlotVAEConfig:
    """A slot VAE for square images."""

    image_size: int = 128
    """Pixels along a side."""
    slots: int = 7
    """Slots per image, one for each thing that may be in it."""
    slot_dim: int = 32
    """Numbers of a slot."""
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    decoder: DecoderConfig = field(default_factory=DecoderConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    checkpoint_activations: bool = False
    """Recompute the encoder's blocks and the penalty's derivatives in the backward pass: less memory, more time."""


@dataclass(frozen=True)
class SupervisedConfig:
    """The encoder-only baseline: slots of the same encoder, each read out linearly into the factors of its object."""

    image_size: int = 128
    """Pixels along a side."""
    slots: int = 7
    """Slots per image, one for each thing that may be in it."""
    slot_dim: int = 32
    """Numbers of a slot."""
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    factors: tuple[str, ...] = ()
    """Factors to predict, in slot order; all that the data set has if none are given."""
    checkpoint_activations: bool = False
    """Recompute the encoder's blocks in the backward pass: less memory, more time."""


@dataclass(frozen=True)
class ReplayConfig:
    """A trained slot VAE whose encoder learns from what its decoder makes of recombined slots."""

    vae: SlotVAEConfig = field(default_factory=SlotVAEConfig)
    bank: int = 4096
    """Training images whose slots are recombined."""
    jitter: float = 0.0
    """Noise on recombined slots, in deviations of the bank's."""
    seen: float = 1.0
    """Weight of training images, on which the encoder is held to what it said before."""

    @property
    def image_size(self) -> int:
        return self.vae.image_size


@dataclass(frozen=True)
class TokenizerConfig:
    """What tokenizers of square images have in common."""

    image_size: int = 32
    """Pixels along a side of an image."""
    patch: int = 8
    """Pixels of a token along a side: 2, 4, 8, 16 or 32."""
    width: int = 32
    """Channels of the convolutions."""
    blocks: int = 1
    """Residual blocks between tokens, on either side of them."""
    channels: int = 8
    """C, the numbers of a token."""


@dataclass(frozen=True)
class ConvVAEConfig(TokenizerConfig):
    """A convolutional VAE: squared error (summed over an image) + beta · KL (summed)."""

    beta: float = 0.01
    """Weight of the KL divergence to the prior, which is summed over the latents."""
    beta_warmup: int = 0
    """Steps over which beta grows linearly from 0."""


@dataclass(frozen=True)
class VQVAEConfig(TokenizerConfig):
    """A VQ-VAE: squared error (summed over an image) + commitment · squared distance from the codes (summed)."""

    codes: int = 256
    """K, the size of the codebook."""
    commitment: float = 0.25
    """Weight of the squared distance between what the encoder says and its nearest code."""
    decay: float = 0.99
    """Share of the codebook's moving averages that a step keeps."""
    revive_after: int = 50
    """Steps without use after which a code is put elsewhere."""


ModelConfig = SlotVAEConfig | SupervisedConfig | ReplayConfig | ConvVAEConfig | VQVAEConfig | ObjectiveConfig
