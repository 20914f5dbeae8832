"""Slot cross-attention of second-order jets: how what pixels read bends when two groups of slots move at once.

jet_arithmetic.py says what a jet is. Each slot is moved by u or by v, never both, so slots have one tangent and a side:

    k_u = k_t where side, else 0       k_v = 0 where side, else k_t       k_uv = 0       and v alike

The op is ordinary attention on jets, slots masked out left out of the softmax. s = scale q·k by the product rule, then

    l_u = s_u − Σ p s_u     l_v = s_v − Σ p s_v     l_uv = s_uv − Σ (p s_uv + p_v s_u)     the jet of log p
    p = softmax(s)     p_u = p l_u     p_v = p l_v     p_uv = p (l_uv + l_u l_v)     out = Σ_s p v

Backward, with ĝ the gradient's channels reversed and p recomputed:

    p̂ = ĝ·v     ŝ = p (p̂ − Σ_s p p̂)     q̂ = scale Σ_s ŝ k     k̂ = scale Σ_n ŝ q     v̂ = Σ_n p ĝ

each reversed again; the tangent's gradient is the u channel where side, else the v channel. The functions named
``reference`` are the specification, the fp64 oracle of the tests and the torch backend; only they hold p for all heads.
"""

from typing import Any

import torch
from torch import Tensor

from compgen_fast.ops.arguments import autocast, check_slot_shapes, refuse_forward_mode
from compgen_fast.ops.backends import define_op
from compgen_fast.ops.formulas import accumulation, pull_back, without_masked
from compgen_fast.ops.jet_arithmetic import Expansion, bilinear, check_channels, expansion


def jet_cross_attention(
    q: Tensor, k: Tensor, v: Tensor, side: Tensor, slot_mask: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """Attention from pixels to slots, of jets, in the projections' own layout.

    Args:
        q: pixel queries [4, B, N, H, D] = (q, q_u, q_v, q_uv), or [1, B, N, H, D] where no slot moves them.
        k, v: slots [2, B, S, H, D] = (value, tangent), S from 1 to 64.
        side: bool [B, S], True where the slot's tangent is along u, False where along v.
        slot_mask: bool [B, S], True where the slot takes part. What a masked slot holds never matters, even NaN. An
            image whose slots are all masked gets zeros.
        scale: factor on q·k; D**-0.5 when None.

    Returns:
        the jet of the attention's output, [4, B, N, H, D]. Derivatives of any order are right; beyond the first they
        run in plain torch, which holds [4, B, H, N, S].
    """
    _check("jet_cross_attention", q, k, v, side, slot_mask)
    refuse_forward_mode("jet_cross_attention", q=q, k=k, v=v)
    q, k, v = autocast(q, k, v)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    return torch.ops.compgen.jet_cross_attention(q, k, v, side, slot_mask, scale)  # type: ignore[no-any-return]


def _check(op: str, q: Tensor, k: Tensor, v: Tensor, side: Tensor, slot_mask: Tensor | None) -> None:
    for name, x, channels, rest in (
        ("q", q, (1, 4), "B, N, H, D"),
        ("k", k, (2,), "B, S, H, D"),
        ("v", v, (2,), "B, S, H, D"),
    ):
        check_channels(op, name, x, channels, rest)
    check_slot_shapes(op, {"q[0]": q[0]}, {"k[0]": k[0], "v[0]": v[0]}, slot_mask)
    if side.dtype != torch.bool or side.shape != k.shape[1:3] or side.device != k.device:
        raise ValueError(
            f"{op}: side is {side.dtype} {list(side.shape)} on {side.device}; expected torch.bool [B, S] = "
            f"{list(k.shape[1:3])} on {k.device}, True where a slot is moved by u"
        )


def _slots(x: Tensor, side: Tensor) -> Expansion:
    """The jet of slots (value, tangent): the tangent is along u where side, else along v."""
    along_u = side[:, :, None, None]
    zero = torch.zeros_like(x[0])
    return Expansion(x[0], torch.where(along_u, x[1], zero), torch.where(along_u, zero, x[1]), zero)


def _slot_grads(adjoint: Expansion, side: Tensor, dtype: torch.dtype) -> Tensor:
    """Gradients of (value, tangent) from k̂ or v̂: the transpose of ``_slots``."""
    grad = adjoint.reversed()
    return torch.stack((grad.x, torch.where(side[:, :, None, None], grad.u, grad.v))).to(dtype)


def _probabilities(q: Expansion, k: Expansion, slot_mask: Tensor | None, scale: float) -> Expansion:
    """The jet of p [B, H, N, S]; zero where masked, also in images without any live slot."""
    s = bilinear(lambda a, b: torch.einsum("bnhd,bshd->bhns", a, b), q, k) * scale
    if slot_mask is None:
        p = s.x.softmax(-1)
    else:
        live = slot_mask[:, None, None, :]
        p = s.x.masked_fill(~live, float("-inf")).softmax(-1).masked_fill(~live, 0)
    l_u, l_v = s.u - _total(p * s.u), s.v - _total(p * s.v)
    l_uv = s.uv - _total(p * (s.uv + l_v * s.u))
    return Expansion(p, p * l_u, p * l_v, p * (l_uv + l_u * l_v))


def _total(x: Tensor) -> Tensor:
    return x.sum(-1, keepdim=True)


def reference(q: Tensor, k: Tensor, v: Tensor, side: Tensor, slot_mask: Tensor | None, scale: float) -> Tensor:
    """The op in plain torch."""
    dtype = q.dtype
    q, k, v = accumulation(q, k, v)
    k, v = without_masked(slot_mask, k, v)
    p = _probabilities(expansion(q), _slots(k, side), slot_mask, scale)
    out = bilinear(lambda a, b: torch.einsum("bhns,bshd->bnhd", a, b), p, _slots(v, side))
    return out.stacked(dtype)


def reference_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, side: Tensor, slot_mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients in plain torch, by formula and differentiable: second derivatives go through this function."""
    dtype, channels = q.dtype, q.shape[0]
    grad, q, k, v = accumulation(grad, q, k, v)
    k, v = without_masked(slot_mask, k, v)
    queries, keys, values, g = expansion(q), _slots(k, side), _slots(v, side), expansion(grad).reversed()
    p = _probabilities(queries, keys, slot_mask, scale)
    dp = bilinear(lambda a, b: torch.einsum("bnhd,bshd->bhns", a, b), g, values)
    ds = p * (dp - (p * dp).each(_total)) * scale
    dq = bilinear(lambda a, b: torch.einsum("bhns,bshd->bnhd", a, b), ds, keys)
    dk = bilinear(lambda a, b: torch.einsum("bhns,bnhd->bshd", a, b), ds, queries)
    dv = bilinear(lambda a, b: torch.einsum("bhns,bnhd->bshd", a, b), p, g)
    return dq.reversed().stacked(dtype, channels), _slot_grads(dk, side, dtype), _slot_grads(dv, side, dtype)


def _fake(q: Tensor, *rest: Any) -> Tensor:
    return q.new_empty((4, *q.shape[1:]))


def _fake_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return (*torch.ops.compgen.jet_cross_attention_backward(grad, *ctx.saved_tensors, ctx.scale), None, None, None)


def _save_backward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def _differentiate_backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, side, slot_mask = ctx.saved_tensors
    pulled = pull_back(
        lambda *x: reference_backward(x[0], x[1], x[2], x[3], side, slot_mask, ctx.scale), tensors, grads
    )
    return (*pulled, None, None, None)


define_op(
    "jet_cross_attention",
    "(Tensor q, Tensor k, Tensor v, Tensor side, Tensor? slot_mask, float scale) -> Tensor",
    reference=reference,
    triton="jet_cross_attention:forward",
    fake=_fake,
    public=True,
)
define_op(
    "jet_cross_attention_backward",
    "(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor side, Tensor? slot_mask, float scale)"
    " -> (Tensor, Tensor, Tensor)",
    reference=reference_backward,
    triton="jet_cross_attention:backward",
    fake=_fake_backward,
    public=False,
)
torch.library.register_autograd("compgen::jet_cross_attention", _differentiate, setup_context=_save)
torch.library.register_autograd(
    "compgen::jet_cross_attention_backward", _differentiate_backward, setup_context=_save_backward
)
