"""Models: what turns images into slots and slots into images."""

from compgen_fast.models.slot_attention import SlotAttention

__all__ = ["SlotAttention"]
