"""Pixels query a few slots: cross-attention that also returns which slot each pixel looked at.

    p[b,h,n,s] = softmax_s(scale · q[b,n,h,:]·k[b,s,h,:])      slots masked out are left out of the softmax
    out[b,n,h,:] = Σ_s p[b,h,n,s] v[b,s,h,:]                   weights[b,n,s] = mean_h p[b,h,n,s]

Backward, for gradients do and dw of the two outputs, with p recomputed from q and k:

    dp = do·v + dw/H        ds = p (dp − Σ_s p dp)
    dq = scale Σ_s ds k     dk = scale Σ_n ds q     dv = Σ_n p do

The functions named ``reference`` are the specification, the fp64 oracle of the tests and the torch backend. They are
the only ones that hold p for all heads at once; the C++ and Triton kernels never do.
"""

from typing import Any, Literal, overload

import torch
from torch import Tensor

from compgen_fast.ops.arguments import autocast, check_slot_shapes, refuse_forward_mode
from compgen_fast.ops.backends import define_op
from compgen_fast.ops.formulas import accumulation, pull_back, without_masked


@overload
def slot_cross_attention(
    q: Tensor, k: Tensor, v: Tensor, slot_mask: Tensor | None = ..., scale: float | None = ..., *,
    return_weights: Literal[False],
) -> Tensor: ...  # fmt: skip
@overload
def slot_cross_attention(
    q: Tensor, k: Tensor, v: Tensor, slot_mask: Tensor | None = ..., scale: float | None = ...,
    return_weights: Literal[True] = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def slot_cross_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slot_mask: Tensor | None = None,
    scale: float | None = None,
    return_weights: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention from pixels to slots, in the projections' own layout.

    Args:
        q: pixel queries [B, N, H, D], any strides (an expanded batch is not copied).
        k, v: slots [B, S, H, D], S from 1 to 64.
        slot_mask: bool [B, S], True where the slot takes part. What a masked slot holds never matters, even NaN. An
            image whose slots are all masked gets zeros.
        scale: factor on q·k; D**-0.5 when None.
        return_weights: whether to return the slot weights too.

    Returns:
        out [B, N, H, D] and weights [B, N, S], the mean over heads, which sum to 1 over the slots; both carry gradient.
        Without ``return_weights``, out alone.

    Derivatives of any order are right; beyond the first they run in plain torch, which holds [B, H, N, S].
    """
    check_slot_shapes("slot_cross_attention", {"q": q}, {"k": k, "v": v}, slot_mask)
    refuse_forward_mode("slot_cross_attention", q=q, k=k, v=v)
    q, k, v = autocast(q, k, v)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    out, weights = torch.ops.compgen.slot_cross_attention(q, k, v, slot_mask, scale, return_weights)
    return (out, weights) if return_weights else out


def _probabilities(q: Tensor, k: Tensor, slot_mask: Tensor | None, scale: float) -> Tensor:
    """p [B, H, N, S]; zero where masked, also in images without any live slot."""
    logits = torch.einsum("bnhd,bshd->bhns", q, k) * scale
    if slot_mask is None:
        return logits.softmax(-1)
    live = slot_mask[:, None, None, :]
    return logits.masked_fill(~live, float("-inf")).softmax(-1).masked_fill(~live, 0)


def reference(
    q: Tensor, k: Tensor, v: Tensor, slot_mask: Tensor | None, scale: float, return_weights: bool
) -> tuple[Tensor, Tensor]:
    """The op in plain torch."""
    dtype = q.dtype
    q, k, v = accumulation(q, k, v)
    k, v = without_masked(slot_mask, k, v)
    p = _probabilities(q, k, slot_mask, scale)
    out = torch.einsum("bhns,bshd->bnhd", p, v).to(dtype).contiguous()
    return out, (p.mean(1).to(dtype) if return_weights else q.new_empty(0, dtype=dtype))


def reference_backward(
    grad_out: Tensor,
    grad_weights: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slot_mask: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients in plain torch, by formula and differentiable: second derivatives go through this function."""
    dtype = q.dtype
    grad_out, q, k, v = accumulation(grad_out, q, k, v)
    k, v = without_masked(slot_mask, k, v)
    p = _probabilities(q, k, slot_mask, scale)
    dp = torch.einsum("bnhd,bshd->bhns", grad_out, v)
    if grad_weights is not None:
        dp = dp + grad_weights[:, None].to(dp.dtype) / q.shape[2]
    ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * scale
    dq = torch.einsum("bhns,bshd->bnhd", ds, k)
    dk = torch.einsum("bhns,bnhd->bshd", ds, q)
    dv = torch.einsum("bhns,bnhd->bshd", p, grad_out)
    return dq.to(dtype).contiguous(), dk.to(dtype).contiguous(), dv.to(dtype).contiguous()


def _fake(q: Tensor, k: Tensor, v: Tensor, slot_mask: Tensor | None, scale: float, return_weights: bool) -> Any:
    shape = (*q.shape[:2], k.shape[1]) if return_weights else (0,)
    return q.new_empty(q.shape), q.new_empty(shape)


def _fake_backward(
    grad_out: Tensor, grad_weights: Any, q: Tensor, k: Tensor, v: Tensor, slot_mask: Any, scale: float
) -> Any:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    q, k, v, slot_mask, ctx.scale, _ = inputs
    ctx.save_for_backward(q, k, v, slot_mask)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad_out: Tensor | None, grad_weights: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, slot_mask = ctx.saved_tensors
    if grad_out is None and grad_weights is None:
        return (None,) * 6
    grad_out = torch.zeros_like(q) if grad_out is None else grad_out
    grads = torch.ops.compgen.slot_cross_attention_backward(grad_out, grad_weights, q, k, v, slot_mask, ctx.scale)
    return (*grads, None, None, None)


def _save_backward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def _differentiate_backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    grad_out, grad_weights, q, k, v, slot_mask = ctx.saved_tensors

    def formula(grad_out: Tensor, grad_weights: Tensor | None, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return reference_backward(grad_out, grad_weights, q, k, v, slot_mask, ctx.scale)

    pulled = pull_back(formula, [grad_out, grad_weights, q, k, v], grads)
    return (*pulled, None, None)


define_op(
    "slot_cross_attention",
    "(Tensor q, Tensor k, Tensor v, Tensor? slot_mask, float scale, bool return_weights) -> (Tensor, Tensor)",
    reference=reference,
    triton="slot_cross_attention:forward",
    fake=_fake,
    public=True,
)
define_op(
    "slot_cross_attention_backward",
    "(Tensor grad_out, Tensor? grad_weights, Tensor q, Tensor k, Tensor v, Tensor? slot_mask, float scale)"
    " -> (Tensor, Tensor, Tensor)",
    reference=reference_backward,
    triton="slot_cross_attention:backward",
    fake=_fake_backward,
    public=False,
)
torch.library.register_autograd("compgen::slot_cross_attention", _differentiate, setup_context=_save)
torch.library.register_autograd(
    "compgen::slot_cross_attention_backward", _differentiate_backward, setup_context=_save_backward
)
