"""Attention: one fused op where queries meet sided slots, and the plain composition everywhere else."""

import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from compgen_fast.jets.jet import Jet, jet_rule, narrowed, padded, same_side, unsided, varies
from compgen_fast.jets.rules.arithmetic import add_to_primal
from compgen_fast.ops import slot_competition, slot_cross_attention  # noqa: F401  (defines the ops named below)
from compgen_fast.ops.arguments import MOST_SLOTS
from compgen_fast.ops.jet_cross_attention import jet_cross_attention
from compgen_fast.ops.jet_slot_products import jet_slot_mix, jet_slot_products
from compgen_fast.ops.jet_slot_softmax import jet_slot_softmax
from compgen_fast.ops.projected_slot_attention import (
    FoldedSlots,
    Projections,
    check,
    fold,
    folded,
    folding_pays,
    mean_over_heads,
    projected_slot_attention,
    unfolded,
)
from compgen_fast.ops.slot_competition import reference as competition
from compgen_fast.ops.slot_cross_attention import reference as cross_attention


@jet_rule(torch.ops.compgen.slot_cross_attention)
def slot_cross_attention_rule(q: Any, k: Any, v: Any, slot_mask: Any, scale: float, return_weights: bool) -> Any:
    """Fused without weights. Their jet needs every head's softmax in memory, which is the plain composition."""
    side = None if return_weights else _side_of_slots(k, v, slots_dim=1)
    if side is None:
        return cross_attention(q, k, v, slot_mask, scale, return_weights)
    return _fused(q, k, v, side, slot_mask, scale), None


@jet_rule(projected_slot_attention)
def projected_slot_attention_rule(
    x: Any,
    k: Any,
    v: Any,
    w_q: Any,
    b_q: Any,
    w_out: Any,
    b_out: Any,
    slot_mask: Any,
    scale: float | None,
    return_weights: bool,
) -> Any:
    """Matrix products and one fused op between them where pixels meet sided slots; else the op's own formulas."""
    dtype = next(t.dtype for t in (x, k, v, w_q, w_out, b_q, b_out) if isinstance(t, Jet))
    # A half-precision weight is read in the jet's precision, as by linear's rule.
    w_q, b_q, w_out, b_out = (None if w is None else w.to(dtype) for w in (w_q, b_q, w_out, b_out))
    projections = Projections(w_q, b_q, w_out, b_out)
    check(x, k, v, projections, slot_mask)
    scale = k.shape[-1] ** -0.5 if scale is None else float(scale)
    side = _side_of_slots(k, v, slots_dim=1)
    if not folding_pays(x, k, w_out):
        out, weights = unfolded(x, k, v, projections, slot_mask, scale, return_weights)
    elif side is None or not (varies(side, 0) or varies(side, 1)) or any(isinstance(w, Jet) for w in projections):
        # A side that nowhere varies is a first-order jet, which the formulas carry in two channels instead of four.
        out, weights = folded(x, k, v, projections, slot_mask, scale, return_weights)
    else:
        slots = fold(k, v, projections, slot_mask, scale)
        out, weights = _fused_projected(x, slots, side, projections.b_out, slot_mask, return_weights)
    return out if weights is None else (out, weights)


def _fused_projected(
    x: Any, slots: FoldedSlots, side: Tensor, bias: Tensor | None, slot_mask: Tensor | None, return_weights: bool
) -> tuple[Jet, Tensor | None]:
    a, c, u = (cast(Jet, slot).channels for slot in slots)
    pixels = padded(unsided(x).channels, 4) if isinstance(x, Jet) else x[None]
    products = jet_slot_products(pixels, a.flatten(2, 3)).unflatten(2, a.shape[2:4])
    p = jet_slot_softmax(products, c, side)
    out = Jet(add_to_primal(jet_slot_mix(p.flatten(2, 3), u.flatten(2, 3)), bias))
    return out, mean_over_heads(Jet(p[:4]), slot_mask) if return_weights else None


@jet_rule(torch.ops.compgen.slot_competition)
def slot_competition_rule(*args: Any) -> Any:
    return competition(*args)


def _side_of_slots(k: Any, v: Any, slots_dim: int) -> Tensor | None:
    """The side [B, S] of keys and values that are sided alike, by sample and slot only; else None."""
    if not (isinstance(k, Jet) and isinstance(v, Jet)) or k.side is None or v.side is None or k.shape != v.shape:
        return None
    others = [d for d in range(1, 4) if d != slots_dim]
    if any(varies(k.side, d) for d in others) or not same_side(k.side, v.side):
        return None
    side = narrowed(k.side, others)
    for d in reversed(others):
        side = side.select(d, 0)
    return side


def _fused(q: Any, k: Jet, v: Jet, side: Tensor, slot_mask: Tensor | None, scale: float | None) -> Jet:
    q = padded(unsided(q).channels, 4) if isinstance(q, Jet) else q[None]
    return Jet(jet_cross_attention(q, k.channels, v.channels, side, slot_mask, scale))


@jet_rule(F.scaled_dot_product_attention)
def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    if attn_mask is None and not dropout_p and not is_causal and _slot_shaped(query, key, value):
        side = _side_of_slots(key, value, slots_dim=2)
        if side is not None:
            q, k, v = (x.transpose(1, 2) for x in (query, key, value))
            return _fused(q, k, v, side, None, scale).transpose(1, 2)
    logits = (query * (query.shape[-1] ** -0.5 if scale is None else scale)) @ key.transpose(-2, -1)
    p = torch.softmax(_masked(logits, attn_mask, is_causal), -1)
    return F.dropout(p, dropout_p) @ value if dropout_p else p @ value


def _slot_shaped(query: Tensor, key: Tensor, value: Tensor) -> bool:
    alike = query.dim() == 4 and key.dim() == 4 and query.shape[:2] == key.shape[:2]
    return alike and query.shape[-1] == key.shape[-1] == value.shape[-1] and key.shape[2] <= MOST_SLOTS


def _masked(logits: Any, mask: Tensor | None, is_causal: bool) -> Any:
    if is_causal:
        mask = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).tril()
    if mask is None:
        return logits
    return logits.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else logits + mask


@jet_rule(F.multi_head_attention_forward)
def multi_head_attention_forward(
    query: Any,
    key: Any,
    value: Any,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Any,
    in_proj_bias: Any,
    bias_k: Any,
    bias_v: Any,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Any,
    out_proj_bias: Any,
    training: bool = True,
    key_padding_mask: Any = None,
    need_weights: bool = True,
    attn_mask: Any = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Any = None,
    k_proj_weight: Any = None,
    v_proj_weight: Any = None,
    static_k: Any = None,
    static_v: Any = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Any, Any]:
    """nn.MultiheadAttention without its rarer options; [L, B, E] as that function is called."""
    unusual = (bias_k, bias_v, static_k, static_v, add_zero_attn or None)
    if any(option is not None for option in unusual) or query.dim() != 3:
        raise NotImplementedError(
            "jets: nn.MultiheadAttention has a rule for batches, without add_bias_kv, add_zero_attn or static keys"
        )
    separate = (q_proj_weight, k_proj_weight, v_proj_weight)
    weights = separate if use_separate_proj_weight else in_proj_weight.chunk(3)
    biases = (None,) * 3 if in_proj_bias is None else in_proj_bias.chunk(3)
    projected = (F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))
    q, k, v = (x.unflatten(-1, (num_heads, -1)).permute(1, 2, 0, 3) for x in projected)
    mask = _attention_mask(attn_mask, key_padding_mask, num_heads)
    dropout_p = dropout_p if training else 0.0
    if need_weights:
        logits = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
        p = F.dropout(torch.softmax(_masked(logits, mask, False), -1), dropout_p)
        out = p @ v
    else:
        p, out = None, F.scaled_dot_product_attention(q, k, v, mask, dropout_p)
    out = F.linear(out.permute(2, 0, 1, 3).flatten(2), out_proj_weight, out_proj_bias)
    return out, p.mean(1) if p is not None and average_attn_weights else p


def _attention_mask(attn_mask: Tensor | None, key_padding_mask: Tensor | None, num_heads: int) -> Tensor | None:
    """One mask to add to the logits [B, H, L, S]."""
    parts = []
    if attn_mask is not None:
        parts.append(attn_mask if attn_mask.dim() == 2 else attn_mask.unflatten(0, (-1, num_heads)))
    if key_padding_mask is not None:
        parts.append(key_padding_mask[:, None, None, :])
    # nn.MultiheadAttention's True means "leave out"
    added = [
        torch.zeros_like(m, dtype=torch.float).masked_fill(m, -math.inf) if m.dtype == torch.bool else m for m in parts
    ]
    return added[0] + added[1] if len(added) == 2 else (added[0] if added else None)
