"""From settings to modules, and which settings contradict each other. It seeds nothing: weights are the caller's."""

from collections.abc import Sequence

from torch import nn

from compgen_fast.generate import build as generators
from compgen_fast.generate.config import GeneratorConfig
from compgen_fast.models.additive_decoder import AdditiveDecoder
from compgen_fast.models.broadcast_decoder import SpatialBroadcastDecoder
from compgen_fast.models.config import (
    ConvVAEConfig,
    DecoderConfig,
    EncoderConfig,
    LossConfig,
    ModelConfig,
    ReplayConfig,
    SlotVAEConfig,
    SupervisedConfig,
    TokenizerConfig,
    VQVAEConfig,
)
from compgen_fast.models.cross_attention_decoder import CrossAttentionDecoder
from compgen_fast.models.frame_decoder import AdditiveFrameDecoder, FrameDecoder, check_frequencies
from compgen_fast.models.patch_decoder import PatchDecoder
from compgen_fast.models.replay import Replay
from compgen_fast.models.slot_encoder import SlotEncoder, check_encoder
from compgen_fast.models.slot_vae import SlotVAE
from compgen_fast.models.supervised import SupervisedEncoder
from compgen_fast.models.tokenizer import VQVAE, ConvVAE, check_tokenizer
from compgen_fast.ops.arguments import MOST_SLOTS
from compgen_fast.worlds.source import Factor

PROJECTED = ("cross_attention", "patch")  # attend by heads
ATTENTIVE = (*PROJECTED, "frame")  # pixels choose among slots
FRAMED = ("frame", "additive_frame")  # slots have roles


def build(config: ModelConfig, factors: Sequence[Factor] = ()) -> nn.Module:
    """The model of these settings; ``factors`` are the data set's, which a supervised one predicts and a generator is
    told.
    """
    check(config)
    if isinstance(config, GeneratorConfig):
        return generators.build(config, factors)
    if isinstance(config, ReplayConfig):
        return Replay(config, SlotVAE(config.vae, _encoder(config.vae), build_decoder(config.vae)))
    if isinstance(config, SupervisedConfig):
        return SupervisedEncoder(config, _encoder(config), factors)
    if isinstance(config, ConvVAEConfig):
        return ConvVAE(config)
    if isinstance(config, VQVAEConfig):
        return VQVAE(config)
    return SlotVAE(config, _encoder(config), build_decoder(config))


def _encoder(config: SlotVAEConfig | SupervisedConfig) -> SlotEncoder:
    return SlotEncoder(*_encoder_arguments(config), checkpoint=config.checkpoint_activations)


def _encoder_arguments(config: SlotVAEConfig | SupervisedConfig) -> tuple[EncoderConfig, int, int, int]:
    """A VAE's slots come as means and log-variances."""
    out_dim = config.slot_dim if isinstance(config, SupervisedConfig) else 2 * config.slot_dim
    return config.encoder, config.image_size, config.slots, out_dim


def build_decoder(config: SlotVAEConfig) -> nn.Module:
    """The decoder alone."""
    decoder, sizes = config.decoder, (config.slot_dim, config.image_size)
    painter = {"layers": decoder.layers, "width": decoder.query_dim, "octaves": decoder.octaves}
    framed = {"hidden": decoder.slot_hidden, "frequencies": decoder.frequencies}
    match decoder.kind:
        case "cross_attention":
            return CrossAttentionDecoder(*sizes, **_attention(decoder))
        case "patch":
            return PatchDecoder(*sizes, patch=decoder.patch, **_attention(decoder))
        case "frame":
            return FrameDecoder(
                *sizes, config.slots, **framed, features=decoder.features, mixer=decoder.mixer, reads=decoder.reads
            )
        case "additive_frame":
            return AdditiveFrameDecoder(*sizes, config.slots, **framed)
        case "broadcast_cnn":
            return SpatialBroadcastDecoder(*sizes, kind="cnn", **painter)
        case "broadcast_mlp":
            return SpatialBroadcastDecoder(*sizes, kind="mlp", **painter)
        case "additive":
            return AdditiveDecoder(*sizes, kind="mlp", **painter)


def _attention(decoder: DecoderConfig) -> dict[str, int]:
    names = ("layers", "heads", "head_dim", "query_dim", "slot_hidden", "octaves")
    return {name: getattr(decoder, name) for name in names}


def check(config: ModelConfig) -> None:
    """Raises a ValueError that says what to change where settings cannot work, or not together."""
    if isinstance(config, ReplayConfig):
        check(config.vae)
        _at_least_one(bank=config.bank)
        if config.jitter < 0 or config.seen < 0:
            raise ValueError(f"jitter is {config.jitter} and seen {config.seen}; expected 0 or more")
        return
    if isinstance(config, TokenizerConfig):
        check_tokenizer(config)
        return
    if isinstance(config, GeneratorConfig):
        generators.check(config)
        return
    if not 1 <= config.slots <= MOST_SLOTS:
        raise ValueError(f"slots is {config.slots}; expected 1 to {MOST_SLOTS}")
    _at_least_one(image_size=config.image_size, slot_dim=config.slot_dim)
    check_encoder(*_encoder_arguments(config))
    if isinstance(config, SlotVAEConfig):
        _check_decoder(config.decoder, config.image_size)
        _check_weights(config.loss)
        _check_penalty(config)
    _check_roles(config)


def _at_least_one(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"{name} is {value}; expected at least 1")


def _check_roles(config: SlotVAEConfig | SupervisedConfig) -> None:
    if config.encoder.slots_by != "attention":
        return
    if isinstance(config, SupervisedConfig) or config.decoder.kind in FRAMED:
        why = "a supervised encoder reads each factor from a slot of its own"
        if isinstance(config, SlotVAEConfig):
            why = f"a decoder of kind {config.decoder.kind!r} gives each slot a role"
        raise ValueError(
            f"slots_by is 'attention', whose slots come in random order, but {why}; set slots_by to "
            "'learned_attention', 'queries' or 'dense'"
        )


def _check_decoder(decoder: DecoderConfig, image_size: int) -> None:
    _at_least_one(layers=decoder.layers, query_dim=decoder.query_dim, octaves=decoder.octaves)
    if decoder.kind in PROJECTED:
        _at_least_one(heads=decoder.heads, head_dim=decoder.head_dim, slot_hidden=decoder.slot_hidden)
    if decoder.kind in FRAMED:
        _at_least_one(slot_hidden=decoder.slot_hidden, features=decoder.features, mixer=decoder.mixer)
        check_frequencies(decoder.frequencies, image_size)
    if decoder.kind == "patch" and (decoder.patch < 1 or image_size % decoder.patch):
        raise ValueError(
            f"patch is {decoder.patch}, which does not divide image_size {image_size}; choose a divisor of {image_size}"
        )


def _check_weights(loss: LossConfig) -> None:
    for name in ("sigma", "beta", "alpha", "alpha_start", "alpha_warmup", "beta_warmup"):
        if getattr(loss, name) < 0:
            raise ValueError(f"{name} is {getattr(loss, name)}; expected 0 or more")


def _check_penalty(config: SlotVAEConfig) -> None:
    loss, kind = config.loss, config.decoder.kind
    if loss.penalty == "attention" and kind not in ATTENTIVE:
        raise ValueError(
            f"penalty 'attention' needs a decoder with attention to slots, and {kind!r} has none; "
            f"use penalty 'hessian', or decoder kind {', '.join(ATTENTIVE)}"
        )
    _at_least_one(probes=loss.probes)
    if loss.probes > 1 and loss.penalty in ("attention", "contrast"):
        raise ValueError(f"probes is {loss.probes}, but penalty {loss.penalty!r} draws no directions; set probes to 1")
    if loss.penalty_pixels is not None:
        _check_penalty_pixels(config, loss.penalty_pixels)


def _check_penalty_pixels(config: SlotVAEConfig, count: int) -> None:
    penalty, decoder, total = config.loss.penalty, config.decoder, config.image_size**2
    if penalty in ("none", "attention"):
        raise ValueError(f"penalty_pixels is {count}, but penalty {penalty!r} takes no derivatives; leave it out")
    if decoder.kind == "broadcast_cnn":
        raise ValueError(
            f"penalty_pixels is {count}, but decoder 'broadcast_cnn' decodes all pixels at once, so fewer would cost "
            "more; leave it out, or use decoder kind 'broadcast_mlp'"
        )
    if not 1 <= count <= total:
        raise ValueError(f"penalty_pixels is {count}; expected 1 to {total}, the pixels of an image")
    if decoder.kind == "patch" and count % decoder.patch**2:
        whole = decoder.patch**2
        raise ValueError(
            f"penalty_pixels is {count}, but pixels decode in patches of {whole}; choose a multiple of {whole}"
        )
