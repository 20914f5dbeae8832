"""Images to slots, as `EncoderConfig` says: features by a CNN or a ViT, slots by Slot Attention, learned queries or a
dense network.

What it is not for: the meaning of a slot's numbers. A VAE asks for twice the slot's width and splits them into mean and
log-variance; the supervised baseline reads factors out of them.
"""

import torch
from torch import Tensor, nn

from compgen_fast.draws import Draws
from compgen_fast.models.cnn import CNN
from compgen_fast.models.config import EncoderConfig
from compgen_fast.models.dense_slots import DenseSlots
from compgen_fast.models.lora import add_lora
from compgen_fast.models.slot_attention import SlotAttention
from compgen_fast.models.slot_queries import SlotQueries
from compgen_fast.models.vit import ViT
from compgen_fast.models.vit_weights import load_vit
from compgen_fast.ops.arguments import MOST_SLOTS


class SlotEncoder(nn.Module):
    """Images [B, 3, image_size, image_size] in [−1, 1] → [B, slots, out_dim].

    Inside, slots are ``config.width`` wide; with a file of weights the features have the file's width. ``checkpoint``
    recomputes the blocks of the ViT and of the slot Transformer in the backward pass.
    """

    def __init__(
        self, config: EncoderConfig, image_size: int, slots: int, out_dim: int, checkpoint: bool = False
    ) -> None:
        super().__init__()
        _refuse_contradictions(config, image_size, slots, out_dim)
        self.image_size, self.num_slots = image_size, slots
        self.features = _features(config, image_size, checkpoint)
        self.to_slots = _to_slots(config, self.features, image_size, slots, checkpoint)
        self.read_out = nn.Linear(config.width, out_dim)

    def forward(self, images: Tensor, draws: Draws) -> Tensor:
        """Slots of the images; ``draws`` is where Slot Attention's starts come from, unless they are learned."""
        self._check(images)
        features = self.features(images)
        if isinstance(self.to_slots, SlotAttention) and self.to_slots.initial == "learned":
            slots, _ = self.to_slots(features)
        elif isinstance(self.to_slots, SlotAttention):
            mean = self.to_slots.slot_mean
            noise = draws.normal(mean.new_empty(len(images), self.num_slots, mean.shape[-1]))
            slots, _ = self.to_slots(features, self.to_slots.slots_from(noise))
        else:
            slots = self.to_slots(features)
        out: Tensor = self.read_out(slots)
        return out

    def _check(self, images: Tensor) -> None:
        size = self.image_size
        if images.shape[1:] != (3, size, size) or not images.is_floating_point():
            raise ValueError(
                f"SlotEncoder: images are {images.dtype} of shape {list(images.shape)}; expected floats in [−1, 1] of "
                f"shape [B, 3, {size}, {size}] (from bytes: images.float() / 127.5 − 1)"
            )


def check_encoder(config: EncoderConfig, image_size: int, slots: int, out_dim: int) -> None:
    """Refuses what `SlotEncoder` would refuse, in the same words; the file of weights is read, nothing is built."""
    with torch.device("meta"):
        SlotEncoder(config, image_size, slots, out_dim)


def _features(config: EncoderConfig, image_size: int, checkpoint: bool) -> CNN | ViT:
    if config.kind == "cnn":
        return CNN(config.width, config.downsample)
    if config.weights is None:
        return ViT(image_size, config.width, config.patch, config.layers, config.heads, checkpoint=checkpoint)
    vit = load_vit(config.weights, image_size, checkpoint=checkpoint)
    if config.lora_rank:
        add_lora(vit, config.lora_rank)
    return vit


def _to_slots(
    config: EncoderConfig, features: CNN | ViT, image_size: int, slots: int, checkpoint: bool
) -> SlotAttention | SlotQueries | DenseSlots:
    width = features.width
    match config.slots_by:
        case "attention":
            return SlotAttention(slots, config.width, config.slot_layers, input_dim=width)
        case "learned_attention":
            return SlotAttention(slots, config.width, config.slot_layers, input_dim=width, initial="learned")
        case "queries":
            return SlotQueries(slots, config.width, width, config.slot_layers, config.slot_heads, checkpoint=checkpoint)
        case "dense":
            count = (image_size // features.downsample) ** 2
            return DenseSlots(slots, config.width, count, width, config.slot_hidden, config.pooled_scene)


def _refuse_contradictions(config: EncoderConfig, image_size: int, slots: int, out_dim: int) -> None:
    """What the parts of the encoder cannot see, each for itself, or would see only after the weights were read."""
    if config.weights is not None and config.kind != "vit":
        raise ValueError(
            f"encoder: weights are for a ViT, but kind is {config.kind!r}; set kind to 'vit' or drop weights"
        )
    if config.lora_rank < 0:
        raise ValueError(f"encoder: lora_rank is {config.lora_rank}; expected 0 (train everything) or a positive rank")
    if config.lora_rank and config.weights is None:
        raise ValueError(
            f"encoder: lora_rank is {config.lora_rank} without weights, so all but the low-rank updates would stay "
            "random; give weights, or set lora_rank to 0"
        )
    if config.kind == "cnn" and config.downsample > 0 and image_size % config.downsample:
        raise ValueError(
            f"encoder: image_size {image_size} is not a multiple of downsample {config.downsample}; change one of them"
        )
    if config.slots_by == "queries" and (config.slot_heads < 1 or config.width % config.slot_heads):
        raise ValueError(
            f"encoder: width {config.width}, which slots have too, cannot be split into "
            f"{config.slot_heads} slot_heads; change one of them"
        )
    if out_dim < 1 or not 1 <= slots <= MOST_SLOTS:
        raise ValueError(
            f"encoder: {slots} slots of {out_dim} numbers; expected 1 to {MOST_SLOTS} slots, of at least 1 number"
        )
