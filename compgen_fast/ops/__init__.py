"""The ops: one contract each, served by Triton, C++ or plain torch. Start with ``slot_cross_attention.py``."""

from compgen_fast.ops.jet_cross_attention import jet_cross_attention
from compgen_fast.ops.jet_norm import jet_layer_norm, jet_rms_norm
from compgen_fast.ops.jet_pointwise import jet_gelu, jet_silu
from compgen_fast.ops.jet_slot_softmax import jet_slot_softmax
from compgen_fast.ops.latent_adam import Latents, latent_adam
from compgen_fast.ops.projected_slot_attention import projected_slot_attention
from compgen_fast.ops.recon_error import recon_error
from compgen_fast.ops.slot_competition import slot_competition
from compgen_fast.ops.slot_cross_attention import slot_cross_attention

__all__ = [
    "Latents",
    "jet_cross_attention",
    "jet_gelu",
    "jet_layer_norm",
    "jet_rms_norm",
    "jet_silu",
    "jet_slot_softmax",
    "latent_adam",
    "projected_slot_attention",
    "recon_error",
    "slot_competition",
    "slot_cross_attention",
]
