"""Pixels query a few slots, with the projections before and after the attention folded into the slots.

Equal to linear(slot_cross_attention(linear(x, w_q, b_q), k, v), w_out, b_out). With few slots the projections are most
of that work, and per image they can be moved to the slots' side:

    logits[b,h,s,n] = scale · (W_q x_n + b_q)_h · k[b,s,h] = a[b,h,s]·x_n + c[b,h,s]
        a = scale · W_q,hᵀ k[b,s,h]   [Q]        c = scale · b_q,h·k[b,s,h]
    out[b,n] = b_out + Σ_{h,s} p[b,h,s,n] u[b,h,s]        p = softmax_s(logits)
        u = W_out,h v[b,s,h]          [Q_out]

Then neither queries nor heads' outputs [B, N, H·D] exist. Pixels are the last, dense dimension of logits and p: the
softmax over slots runs on whole vectors of pixels, however few slots there are.

What it is not for: many slots, where folding costs more than it saves. ``folding_pays`` decides, and the rest goes to
``slot_cross_attention``.
"""

from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.overrides import handle_torch_function, has_torch_function

from compgen_fast.ops.arguments import autocast, check_slot_shapes
from compgen_fast.ops.formulas import accumulation, without_masked
from compgen_fast.ops.slot_cross_attention import slot_cross_attention

OP = "projected_slot_attention"
DEARER = (
    1.5  # a multiplication of folded attention beside one of a projection: thinner matrices, p passes through memory
)


@overload
def projected_slot_attention(
    x: Tensor, k: Tensor, v: Tensor, w_q: Tensor, b_q: Tensor | None, w_out: Tensor, b_out: Tensor | None,
    slot_mask: Tensor | None = ..., scale: float | None = ..., *, return_weights: Literal[False],
) -> Tensor: ...  # fmt: skip
@overload
def projected_slot_attention(
    x: Tensor, k: Tensor, v: Tensor, w_q: Tensor, b_q: Tensor | None, w_out: Tensor, b_out: Tensor | None,
    slot_mask: Tensor | None = ..., scale: float | None = ..., return_weights: Literal[True] = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def projected_slot_attention(
    x: Tensor,
    k: Tensor,
    v: Tensor,
    w_q: Tensor,
    b_q: Tensor | None,
    w_out: Tensor,
    b_out: Tensor | None,
    slot_mask: Tensor | None = None,
    scale: float | None = None,
    return_weights: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention from pixels to slots, from before the queries' projection to after the outputs'.

    Args:
        x: pixels [B, N, Q], or [1, N, Q] where they are the same for all images, which is not computed B times.
        k, v: slots [B, S, H, D], S from 1 to 64.
        w_q, b_q: the queries' projection [H·D, Q] and its bias [H·D] or None.
        w_out, b_out: the outputs' projection [Q_out, H·D] and its bias [Q_out] or None.
        slot_mask: bool [B, S], True where the slot takes part. What a masked slot holds never matters, even NaN. An
            image whose slots are all masked gets the bias alone.
        scale: factor on q·k; D**-0.5 when None.
        return_weights: whether to return the slot weights too.

    Returns:
        out [B, N, Q_out] and weights [B, N, S], the mean over heads, which sum to 1 over the slots; both carry
        gradient. Without ``return_weights``, out alone.
    """
    tensors = (x, k, v, w_q, b_q, w_out, b_out)
    if has_torch_function(tensors):
        handle: Any = handle_torch_function  # its types know no overloads
        return handle(projected_slot_attention, tensors, *tensors, slot_mask, scale, return_weights)  # type: ignore[no-any-return]
    x, k, v, w_q, w_out = autocast(x, k, v, w_q, w_out)
    b_q, b_out = (None if bias is None else autocast(bias)[0] for bias in (b_q, b_out))
    projections = Projections(w_q, b_q, w_out, b_out)
    check(x, k, v, projections, slot_mask)
    scale = k.shape[-1] ** -0.5 if scale is None else float(scale)
    with torch.autocast(x.device.type, enabled=False):  # what is folded is already in the precision it should have
        attend = folded if folding_pays(x, k, w_out) else unfolded
        out, weights = attend(x, k, v, projections, slot_mask, scale, return_weights)
    return out if weights is None else (out, weights)


class Projections(NamedTuple):
    """Before the attention w_q [H·D, Q] and b_q [H·D], after it w_out [Q_out, H·D] and b_out [Q_out]."""

    w_q: Tensor
    b_q: Tensor | None
    w_out: Tensor
    b_out: Tensor | None


def check(x: Tensor, k: Tensor, v: Tensor, projections: Projections, slot_mask: Tensor | None) -> None:
    for name, slots in (("k", k), ("v", v)):
        if slots.dim() != 4:
            raise ValueError(f"{OP}: {name} has shape {list(slots.shape)}; expected [B, S, H, D]")
    check_slot_shapes(OP, {"k": k}, {"k": k, "v": v}, slot_mask)
    B, _, H, D = k.shape
    if x.dim() != 3 or x.shape[0] not in (1, B):
        raise ValueError(f"{OP}: x has shape {list(x.shape)}; expected [B, N, Q] with B = {B} images, or 1 for all")
    Q, out = x.shape[-1], projections.w_out.shape[0] if projections.w_out.dim() else 0
    expected = {"w_q": (H * D, Q), "b_q": (H * D,), "w_out": (out, H * D), "b_out": (out,)}
    for name, tensor in {"x": x, **projections._asdict()}.items():
        if tensor is None:
            continue
        if name in expected and tuple(tensor.shape) != expected[name]:
            letters = {"w_q": "[H·D, Q]", "b_q": "[H·D]", "w_out": "[Q_out, H·D]", "b_out": "[Q_out]"}[name]
            raise ValueError(
                f"{OP}: {name} has shape {list(tensor.shape)}; expected {letters} = {list(expected[name])} "
                f"for x {list(x.shape)} and k {list(k.shape)}"
            )
        if tensor.dtype != k.dtype:
            raise TypeError(f"{OP}: {name} is {tensor.dtype} but k is {k.dtype}; cast one, or use autocast")
        if tensor.device != k.device:
            raise ValueError(f"{OP}: {name} is on {tensor.device} but k is on {k.device}; move one of them")


def folding_pays(x: Tensor, k: Tensor, w_out: Tensor) -> bool:
    """Whether folding saves multiplications, and enough of them that it saves time.

    Per head, of B images with N pixels each, X of them different:

        folded       B S (Q + Q_out) to score and to mix, for each pixel; the same D times to fold
        unfolded     X D Q to project x, and B D (2 S + Q_out) to attend and to project the result, for each pixel
    """
    (X, N, Q), (B, S, _, D), Q_out = x.shape, k.shape, w_out.shape[0]
    return bool(DEARER * B * S * (Q + Q_out) * (N + D) < N * D * (X * Q + B * (2 * S + Q_out)))


def unfolded(
    x: Tensor,
    k: Tensor,
    v: Tensor,
    projections: Projections,
    slot_mask: Tensor | None,
    scale: float,
    return_weights: bool,
) -> tuple[Tensor, Tensor | None]:
    """The op as its three parts."""
    w_q, b_q, w_out, b_out = projections
    q = linear(x, w_q, b_q).unflatten(-1, k.shape[2:]).expand(len(k), -1, -1, -1)
    if not return_weights:
        return linear(
            slot_cross_attention(q, k, v, slot_mask, scale, return_weights=False).flatten(-2), w_out, b_out
        ), None
    seen, weights = slot_cross_attention(q, k, v, slot_mask, scale)
    return linear(seen.flatten(-2), w_out, b_out), weights


def folded(
    x: Tensor,
    k: Tensor,
    v: Tensor,
    projections: Projections,
    slot_mask: Tensor | None,
    scale: float,
    return_weights: bool,
) -> tuple[Tensor, Tensor | None]:
    """The op with its projections folded into the slots. Made of torch functions that have jet rules."""
    a, c, u = fold(k, v, projections, slot_mask, scale)
    if len(x) == len(k):
        logits = torch.baddbmm(c.flatten(1).unsqueeze(-1), a.flatten(1, 2), x.mT).unflatten(1, a.shape[1:3])
    else:
        logits = torch.addmm(c.flatten().unsqueeze(-1), a.flatten(0, 2), x[0].mT).unflatten(0, a.shape[:3])
    p = accumulation(logits)[0].softmax(2)
    weights, values = p.to(x.dtype).flatten(1, 2).mT, u.flatten(1, 2)
    bias = projections.b_out
    out = torch.bmm(weights, values) if bias is None else torch.baddbmm(bias[None], weights, values)
    return out, mean_over_heads(p, slot_mask).to(x.dtype) if return_weights else None


def mean_over_heads(p: Tensor, slot_mask: Tensor | None) -> Tensor:
    """Slot weights [B, N, S] from p [B, H, S, N]; zero where masked, also in images without any live slot."""
    weights = p.mean(1).mT
    return weights if slot_mask is None else weights.masked_fill(~slot_mask.unsqueeze(1), 0)


class FoldedSlots(NamedTuple):
    """What the slots become when the projections are folded into them."""

    a: Tensor  # [B, H, S, Q]
    c: Tensor  # [B, H, S]
    u: Tensor  # [B, H, S, Q_out]


def fold(k: Tensor, v: Tensor, projections: Projections, slot_mask: Tensor | None, scale: float) -> FoldedSlots:
    """Slots [B, S, H, D] with the projections folded into them.

    A masked slot has the lowest finite score and nothing to give, so its pixels need no mask: it takes part only where
    no slot does, and then all of them give nothing.
    """
    dtype, heads = k.dtype, k.shape[2:]
    k, v, w_q, w_out = accumulation(k, v, projections.w_q, projections.w_out)
    k, v = without_masked(slot_mask, k, v)
    k = k * scale
    a = torch.einsum("bshd,hdq->bhsq", k, w_q.unflatten(0, heads)).to(dtype)
    u = torch.einsum("bshd,qhd->bhsq", v, w_out.unflatten(1, heads)).to(dtype)
    if projections.b_q is None:
        c = k.select(-1, 0).transpose(1, 2) * 0
    else:
        c = torch.einsum("bshd,hd->bhs", k, accumulation(projections.b_q)[0].unflatten(0, heads))
    c = c.to(dtype)
    if slot_mask is not None:
        c = c.masked_fill(~slot_mask.unsqueeze(1), torch.finfo(dtype).min)
    return FoldedSlots(a, c, u)
