"""Models: what turns images into slots and slots into images. `compgen_fast.models.build` makes them from settings."""

from compgen_fast.models.additive_decoder import AdditiveDecoder
from compgen_fast.models.broadcast_decoder import SpatialBroadcastDecoder
from compgen_fast.models.cnn import CNN
from compgen_fast.models.cross_attention_decoder import CrossAttentionDecoder
from compgen_fast.models.dense_slots import DenseSlots
from compgen_fast.models.frame_decoder import AdditiveFrameDecoder, FrameDecoder
from compgen_fast.models.lora import add_lora
from compgen_fast.models.patch_decoder import PatchDecoder
from compgen_fast.models.replay import Replay
from compgen_fast.models.slot_attention import SlotAttention
from compgen_fast.models.slot_encoder import SlotEncoder
from compgen_fast.models.slot_queries import SlotQueries
from compgen_fast.models.slot_vae import SlotVAE
from compgen_fast.models.supervised import SupervisedEncoder
from compgen_fast.models.tokenizer import VQVAE, ConvVAE, Tokenizer
from compgen_fast.models.vit import ViT
from compgen_fast.models.vit_weights import load_vit

__all__ = [
    "CNN",
    "VQVAE",
    "AdditiveDecoder",
    "AdditiveFrameDecoder",
    "ConvVAE",
    "CrossAttentionDecoder",
    "DenseSlots",
    "FrameDecoder",
    "PatchDecoder",
    "Replay",
    "SlotAttention",
    "SlotEncoder",
    "SlotQueries",
    "SlotVAE",
    "SpatialBroadcastDecoder",
    "SupervisedEncoder",
    "Tokenizer",
    "ViT",
    "add_lora",
    "load_vit",
]
