"""The softmax over slots of second-order jets: what stands between two matrix products when pixels look at few slots.

jet_arithmetic.py says what a jet is. Each slot is moved by u or by v, never both, so a slot has a value a, one tangent a_t
and a side. Pixels x were multiplied with both, channel by channel, and slots may have scores c of their own:

    products[i] = (x_i·a, x_i·a_t)      offsets = (c, c_t)      first the values of all slots, then their tangents

The op puts the jet of the scores together, [side] being 1 where a slot is moved by u, and takes its softmax:

    s    = x·a + c                                       s_u = x_u·a + [side] (x·a_t + c_t)
    s_uv = x_uv·a + [side] x_v·a_t + [¬side] x_u·a_t     s_v = x_v·a + [¬side] (x·a_t + c_t)
    l_u  = s_u − Σ p s_u     l_v = s_v − Σ p s_v     l_uv = s_uv − Σ p (s_uv + l_v s_u)     the jet of log p
    p    = softmax(s)        p_u = p l_u             p_v = p l_v             p_uv = p (l_uv + l_u l_v)

It returns p beside what multiplies the tangents of values, so that Σ_s p·u is one matrix product too:

    weights = (p, 0), (p_u, [side] p), (p_v, [¬side] p), (p_uv, [side] p_v + [¬side] p_u)

Backward, with ĝ the gradient's channels reversed: p̂ is put together like s, ŝ = p (p̂ − Σ_s p p̂), and ŝ is taken apart
like p. A slot whose score is the lowest finite number takes no part.

Who calls it: the jet rule of ``projected_slot_attention``. The functions named ``reference`` are the specification, the
fp64 oracle of the tests and the torch backend.
"""

from typing import Any

import torch
from torch import Tensor

from compgen_fast.ops.arguments import MOST_SLOTS, refuse_forward_mode
from compgen_fast.ops.backends import define_op
from compgen_fast.ops.formulas import accumulation, pull_back
from compgen_fast.ops.jet_arithmetic import Expansion, check_channels

SLOTS = -2  # the dimension the softmax runs over


def jet_slot_softmax(products: Tensor, offsets: Tensor, side: Tensor) -> Tensor:
    """The jet of a softmax over slots, ready to be multiplied with jets of slots.

    Args:
        products: [4, B, 2, H, S, N], pixels' channels times slots' (value, tangent), or [1, B, 2, H, S, N] where no slot
            moves the pixels. The product of x_uv with tangents is not read.
        offsets: [B, 2, H, S], scores of the slots' own and their tangents.
        side: bool [B, S], True where the slot's tangent is along u, False where along v.

    Returns:
        weights [4, B, 2, H, S, N]: of the slots' values, which are the jet of p, and of their tangents. Derivatives of any
        order are right; beyond the first they run in plain torch.
    """
    _check("jet_slot_softmax", products, offsets, side)
    refuse_forward_mode("jet_slot_softmax", products=products, offsets=offsets)
    return torch.ops.compgen.jet_slot_softmax(products, offsets, side)  # type: ignore[no-any-return]


def _check(op: str, products: Tensor, offsets: Tensor, side: Tensor) -> None:
    check_channels(op, "products", products, (1, 4), "B, 2, H, S, N")
    if products.dim() != 6 or products.shape[2] != 2 or not 1 <= products.shape[4] <= MOST_SLOTS:
        raise ValueError(
            f"{op}: products has shape {list(products.shape)}; expected [1 or 4, B, 2, H, S, N] with S from 1 to "
            f"{MOST_SLOTS}: values, then tangents, of the slots"
        )
    B, S = products.shape[1], products.shape[4]
    if offsets.shape != products.shape[1:5] or offsets.dtype != products.dtype or offsets.device != products.device:
        raise ValueError(
            f"{op}: offsets is {offsets.dtype} {list(offsets.shape)} on {offsets.device}; expected {products.dtype} "
            f"[B, 2, H, S] = {list(products.shape[1:5])} on {products.device}"
        )
    if side.dtype != torch.bool or side.shape != (B, S) or side.device != products.device:
        raise ValueError(
            f"{op}: side is {side.dtype} {list(side.shape)} on {side.device}; expected torch.bool [B, S] = {[B, S]} on "
            f"{products.device}, True where a slot is moved by u"
        )


def _total(x: Tensor) -> Tensor:
    return x.sum(SLOTS, keepdim=True)


def _chosen(side: Tensor, of_u: Tensor, of_v: Tensor | None) -> Tensor:
    """[side] of_u + [¬side] of_v for [B, H, S, N]."""
    return torch.where(side[:, None, :, None], of_u, torch.zeros_like(of_u) if of_v is None else of_v)


def _together(by_value: Expansion, by_tangent: Expansion, side: Tensor) -> Expansion:
    """The product with a jet of slots, from the products with its values and with its tangents."""
    return Expansion(
        by_value.x,
        by_value.u + _chosen(side, by_tangent.x, None),
        by_value.v + _chosen(~side, by_tangent.x, None),
        by_value.uv + _chosen(side, by_tangent.v, by_tangent.u),
    )


def _apart(p: Expansion, side: Tensor, dtype: torch.dtype) -> Tensor:
    """What multiplies values and tangents of slots in a product with a jet of slots, [4, B, 2, H, S, N]."""
    by_value = torch.stack((p.x, p.u, p.v, p.uv))
    along_u, along_v = _chosen(side, p.x, None), _chosen(~side, p.x, None)
    by_tangent = torch.stack((torch.zeros_like(p.x), along_u, along_v, _chosen(side, p.v, p.u)))
    return torch.stack((by_value, by_tangent), 2).to(dtype)


def _expansion(products: Tensor, block: int) -> Expansion:
    zero = torch.zeros_like(products[0, :, block])
    return Expansion(*(products[c, :, block] if c < len(products) else zero for c in range(4)))


def _softmax(s: Expansion) -> Expansion:
    p = s.x.softmax(SLOTS)
    l_u, l_v = s.u - _total(p * s.u), s.v - _total(p * s.v)
    l_uv = s.uv - _total(p * (s.uv + l_v * s.u))
    return Expansion(p, p * l_u, p * l_v, p * (l_uv + l_u * l_v))


def reference(products: Tensor, offsets: Tensor, side: Tensor) -> Tensor:
    """The op in plain torch."""
    dtype = products.dtype
    products, offsets = accumulation(products, offsets)
    value = products[:1] + offsets.unsqueeze(-1)
    products = torch.cat([value, products[1:]])
    return _apart(_softmax(_together(_expansion(products, 0), _expansion(products, 1), side)), side, dtype)


def reference_backward(grad: Tensor, weights: Tensor, side: Tensor, channels: int) -> Tensor:
    """The products' gradient in plain torch, by formula and differentiable: second derivatives go through it.

    p is taken from the op's own result. Reversed channels exchange what is put together with what is taken apart: what
    multiplied p with tangents, channel by channel, is what the gradient's channels are products with, reversed.
    """
    dtype = grad.dtype
    grad, weights = accumulation(grad, weights)
    p = _expansion(weights, 0)
    dp = _together(_expansion(grad, 0).reversed(), _expansion(grad, 1).reversed(), side)
    ds = p * (dp - (p * dp).each(_total))
    return _apart(ds, side, dtype).flip(0)[:channels].contiguous()


def _fake(products: Tensor, offsets: Tensor, side: Tensor) -> Tensor:
    return products.new_empty((4, *products.shape[1:]))


def _fake_backward(grad: Tensor, weights: Tensor, side: Tensor, channels: int) -> Tensor:
    return grad.new_empty((channels, *grad.shape[1:]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    products, _, side = inputs
    ctx.channels = len(products)
    ctx.save_for_backward(output, side)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    of_products = torch.ops.compgen.jet_slot_softmax_backward(grad, *ctx.saved_tensors, ctx.channels)
    return of_products, of_products[0].sum(-1) if ctx.needs_input_grad[1] else None, None


def _save_backward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    grad, weights, side, ctx.channels = inputs
    ctx.save_for_backward(grad, weights, side)


def _differentiate_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, side = ctx.saved_tensors
    pulled = pull_back(lambda g, w: (reference_backward(g, w, side, ctx.channels),), tensors, (grad,))
    return (*pulled, None, None)


define_op(
    "jet_slot_softmax",
    "(Tensor products, Tensor offsets, Tensor side) -> Tensor",
    reference=reference,
    triton=None,
    fake=_fake,
    public=True,
)
define_op(
    "jet_slot_softmax_backward",
    "(Tensor grad, Tensor weights, Tensor side, int channels) -> Tensor",
    reference=reference_backward,
    triton=None,
    fake=_fake_backward,
    public=False,
)
torch.library.register_autograd("compgen::jet_slot_softmax", _differentiate, setup_context=_save)
torch.library.register_autograd(
    "compgen::jet_slot_softmax_backward", _differentiate_backward, setup_context=_save_backward
)
