"""Slots compete for inputs: one step of Slot Attention (Locatello et al., 2020), without the recurrent update.

    a[b,n,s,h] = softmax over (s, h) of scale · q[b,s,h,:]·k[b,n,h,:]      each input shares itself out among the slots
    mass[b,s,h] = Σ_n (a + eps)
    updates[b,s,h,:] = Σ_n (a + eps) v[b,n,h,:] / mass                     each slot averages what it got
    weights[b,n,s] = Σ_h a[b,n,s,h]                                        sums to 1 over the slots

Backward, for gradients du and dw of updates and weights, with g = du / mass, and a recomputed from q and k or,
where one head leaves it unrounded in weights, read from there:

    da = g·(v − updates) + dw       dl = a (da − Σ_{s,h} a da)
    dk = scale Σ_s dl q     dv = Σ_s (a + eps) g     dq = scale Σ_n dl k

A masked slot takes no part: no weight, update 0, mass 0. eps is added in fp32 whatever the dtype: 1e-8 is 0 in fp16.
The functions named ``reference`` are the specification, the fp64 oracle of the tests and the torch backend.
"""

from typing import Any, Literal, overload

import torch
from torch import Tensor

from compgen_fast.ops.arguments import autocast, check_slot_shapes, refuse_forward_mode
from compgen_fast.ops.backends import define_op
from compgen_fast.ops.formulas import accumulation, pull_back, without_masked


@overload
def slot_competition(
    q: Tensor, k: Tensor, v: Tensor, slot_mask: Tensor | None = ..., scale: float | None = ..., eps: float = ..., *,
    return_weights: Literal[False],
) -> Tensor: ...  # fmt: skip
@overload
def slot_competition(
    q: Tensor, k: Tensor, v: Tensor, slot_mask: Tensor | None = ..., scale: float | None = ..., eps: float = ...,
    return_weights: Literal[True] = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def slot_competition(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slot_mask: Tensor | None = None,
    scale: float | None = None,
    eps: float = 1e-8,
    return_weights: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """The attention of Slot Attention: softmax over slots and heads, then a weighted mean over inputs.

    Args:
        q: slots [B, S, H, D], S from 1 to 64.
        k, v: inputs [B, N, H, D], any strides.
        slot_mask: bool [B, S], True where the slot takes part. What a masked slot holds never matters, even NaN.
        scale: factor on q·k; D**-0.5 when None.
        eps: added to every weight before the mean over inputs: a slot that lost everywhere gets their plain mean.
        return_weights: whether to return the attention maps too.

    Returns:
        updates [B, S, H, D] and weights [B, N, S], the sum over heads, which sum to 1 over the slots; both carry
        gradient. Without ``return_weights``, updates alone.

    Derivatives of any order are right; beyond the first they run in plain torch, which holds [B, N, S, H].
    """
    check_slot_shapes("slot_competition", {"k": k, "v": v}, {"q": q}, slot_mask)
    if eps < 0:
        raise ValueError(f"slot_competition: eps is {eps}; expected 0 or a small positive number such as 1e-8")
    refuse_forward_mode("slot_competition", q=q, k=k, v=v)
    q, k, v = autocast(q, k, v)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    updates, weights, _ = torch.ops.compgen.slot_competition(q, k, v, slot_mask, scale, eps, return_weights)
    return (updates, weights) if return_weights else updates


def _compete(q: Tensor, k: Tensor, slot_mask: Tensor | None, scale: float, eps: float) -> tuple[Tensor, Tensor]:
    """a [B, N, S, H] and a + eps; both zero for masked slots."""
    logits = torch.einsum("bnhd,bshd->bnsh", k, q) * scale
    if slot_mask is None:
        a = logits.flatten(2).softmax(-1).view(logits.shape)
        return a, a + eps
    dead = ~slot_mask[:, None, :, None]
    a = logits.masked_fill(dead, float("-inf")).flatten(2).softmax(-1).view(logits.shape).masked_fill(dead, 0)
    return a, (a + eps).masked_fill(dead, 0)


def _mean_over_inputs(shares: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Σ_n shares v / mass [B, S, H, D] and mass [B, S, H]; 0 where there is no mass."""
    mass = shares.sum(1)
    divisor = mass.masked_fill(mass == 0, 1)
    return torch.einsum("bnsh,bnhd->bshd", shares, v) / divisor.unsqueeze(-1), mass


def reference(
    q: Tensor, k: Tensor, v: Tensor, slot_mask: Tensor | None, scale: float, eps: float, return_weights: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The op in plain torch: updates, weights, mass (fp32, or fp64 for fp64 inputs)."""
    dtype = q.dtype
    q, k, v = accumulation(q, k, v)
    (q,) = without_masked(slot_mask, q)
    a, shares = _compete(q, k, slot_mask, scale, eps)
    updates, mass = _mean_over_inputs(shares, v)
    weights = a.sum(-1).to(dtype) if return_weights else q.new_empty(0, dtype=dtype)
    return updates.to(dtype).contiguous(), weights.contiguous(), mass


def reference_backward(
    grad_updates: Tensor,
    grad_weights: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slot_mask: Tensor | None,
    scale: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients in plain torch, by formula and differentiable: second derivatives go through this function."""
    dtype = q.dtype
    grad_updates, q, k, v = accumulation(grad_updates, q, k, v)
    (q,) = without_masked(slot_mask, q)
    a, shares = _compete(q, k, slot_mask, scale, eps)
    updates, mass = _mean_over_inputs(shares, v)
    g = grad_updates / mass.masked_fill(mass == 0, 1).unsqueeze(-1)
    da = torch.einsum("bshd,bnhd->bnsh", g, v) - (g * updates).sum(-1).unsqueeze(1)
    if grad_weights is not None:
        da = da + grad_weights.unsqueeze(-1).to(da.dtype)
    dl = a * (da - (a * da).sum((2, 3), keepdim=True)) * scale
    dq = torch.einsum("bnsh,bnhd->bshd", dl, k)
    dk = torch.einsum("bnsh,bshd->bnhd", dl, q)
    dv = torch.einsum("bnsh,bshd->bnhd", shares, g)
    return dq.to(dtype).contiguous(), dk.to(dtype).contiguous(), dv.to(dtype).contiguous()


def _reference_backward_op(
    grad_updates: Tensor,
    grad_weights: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slot_mask: Tensor | None,
    weights: Tensor | None,
    updates: Tensor,
    mass: Tensor,
    scale: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The backward op's signature: kernels are given outputs of the forward, the formula computes its own."""
    return reference_backward(grad_updates, grad_weights, q, k, v, slot_mask, scale, eps)


def _fake(
    q: Tensor, k: Tensor, v: Tensor, slot_mask: Any, scale: float, eps: float, return_weights: bool
) -> tuple[Tensor, Tensor, Tensor]:
    B, S, H, _ = q.shape
    exact = torch.float64 if q.dtype == torch.float64 else torch.float32
    weights = q.new_empty((B, k.shape[1], S) if return_weights else (0,))
    return q.new_empty(q.shape), weights, q.new_empty((B, S, H), dtype=exact)


def _fake_backward(
    grad_updates: Tensor, grad_weights: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, slot_mask, ctx.scale, ctx.eps, return_weights = inputs
    updates, weights, mass = output
    weights_are_a = return_weights and q.shape[2] == 1 and mass.dtype == q.dtype
    ctx.save_for_backward(q, k, v, slot_mask, weights if weights_are_a else None, updates, mass)
    ctx.mark_non_differentiable(mass)
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any, grad_updates: Tensor | None, grad_weights: Tensor | None, _: None
) -> tuple[Tensor | None, ...]:
    if grad_updates is None and grad_weights is None:
        return (None,) * 7
    q, k, v, slot_mask, weights, updates, mass = ctx.saved_tensors
    grad_updates = torch.zeros_like(q) if grad_updates is None else grad_updates
    grads = torch.ops.compgen.slot_competition_backward(
        grad_updates, grad_weights, q, k, v, slot_mask, weights, updates, mass, ctx.scale, ctx.eps
    )
    return (*grads, None, None, None, None)


def _save_backward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, _, _, _, ctx.scale, ctx.eps = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def _differentiate_backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    grad_updates, grad_weights, q, k, v, slot_mask = ctx.saved_tensors

    def formula(
        grad_updates: Tensor, grad_weights: Tensor | None, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, ...]:
        return reference_backward(grad_updates, grad_weights, q, k, v, slot_mask, ctx.scale, ctx.eps)

    pulled = pull_back(formula, [grad_updates, grad_weights, q, k, v], grads)
    # weights, updates and mass are functions of q, k and v, and the formula differentiates them as such.
    return (*pulled, None, None, None, None, None, None)


define_op(
    "slot_competition",
    "(Tensor q, Tensor k, Tensor v, Tensor? slot_mask, float scale, float eps, bool return_weights)"
    " -> (Tensor, Tensor, Tensor)",
    reference=reference,
    triton="slot_competition:forward",
    fake=_fake,
    public=True,
)
define_op(
    "slot_competition_backward",
    "(Tensor grad_updates, Tensor? grad_weights, Tensor q, Tensor k, Tensor v, Tensor? slot_mask,"
    " Tensor? weights, Tensor updates, Tensor mass, float scale, float eps) -> (Tensor, Tensor, Tensor)",
    reference=_reference_backward_op,
    triton="slot_competition:backward",
    fake=_fake_backward,
    public=False,
)
torch.library.register_autograd("compgen::slot_competition", _differentiate, setup_context=_save)
torch.library.register_autograd(
    "compgen::slot_competition_backward", _differentiate_backward, setup_context=_save_backward
)
