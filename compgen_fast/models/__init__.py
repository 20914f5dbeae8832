"""Models: what turns images into slots and slots into images."""

from compgen_fast.models.cross_attention_decoder import CrossAttentionDecoder
from compgen_fast.models.slot_attention import SlotAttention

__all__ = ["CrossAttentionDecoder", "SlotAttention"]
