"""The ops: one contract each, served by Triton, C++ or plain torch. Start with ``slot_cross_attention.py``."""

from compgen_fast.ops.slot_competition import slot_competition
from compgen_fast.ops.slot_cross_attention import slot_cross_attention

__all__ = ["slot_competition", "slot_cross_attention"]
