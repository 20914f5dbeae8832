"""The softmax over slots of second-order jets: what stands between two matrix products when pixels look at few slots.

jet_arithmetic.py says what a jet is. Each slot is moved by u or by v, never both, so a slot has a value a, one tangent
a_t and a side. jet_slot_products has multiplied pixels x with both, and slots may have scores c of their own:

    products = x·a, x_u·a, x_v·a, x_uv·a, x·a_t, x_u·a_t, x_v·a_t      or x·a, x·a_t where no slot moves the pixels
    offsets  = c, c_t

The op puts the jet of the scores together, [side] being 1 where a slot is moved by u, and takes its softmax:

    s    = x·a + c                                       s_u = x_u·a + [side] (x·a_t + c_t)
    s_uv = x_uv·a + [side] x_v·a_t + [¬side] x_u·a_t     s_v = x_v·a + [¬side] (x·a_t + c_t)
    l_u  = s_u − Σ p s_u     l_v = s_v − Σ p s_v     l_uv = s_uv − Σ p (s_uv + l_v s_u)     the jet of log p
    p    = softmax(s)        p_u = p l_u             p_v = p l_v             p_uv = p (l_uv + l_u l_v)

It returns p and, for u, v and uv, what multiplies the tangents of values there, as jet_slot_mix takes it:

    weights = p, p_u, p_v, p_uv, [side] p, [¬side] p, [side] p_v + [¬side] p_u

Backward, with ĝ the gradient's channels reversed: p̂ is put together like s, ŝ = p (p̂ − Σ_s p p̂), and ŝ is taken apart
like p. A slot whose own score is the lowest finite number takes no part.

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
        products: [7, B, H, S, N], or [2, B, H, S, N] where no slot moves the pixels.
        offsets: [2, B, H, S], scores of the slots' own and their tangents.
        side: bool [B, S], True where the slot's tangent is along u, False where along v.

    Returns:
        weights [7, B, H, S, N], the first four of which are the jet of p. Derivatives of any order are right; beyond
        the first they run in plain torch.
    """
    _check("jet_slot_softmax", products, offsets, side)
    refuse_forward_mode("jet_slot_softmax", products=products, offsets=offsets)
    return torch.ops.compgen.jet_slot_softmax(products, offsets, side)  # type: ignore[no-any-return]


def _check(op: str, products: Tensor, offsets: Tensor, side: Tensor) -> None:
    check_channels(op, "products", products, (2, 7), "B, H, S, N")
    if products.dim() != 5 or not 1 <= products.shape[3] <= MOST_SLOTS:
        raise ValueError(
            f"{op}: products has shape {list(products.shape)}; expected [2 or 7, B, H, S, N] with S from 1 to "
            f"{MOST_SLOTS}"
        )
    B, S = products.shape[1], products.shape[3]
    expected = (2, *products.shape[1:4])
    if offsets.shape != expected or offsets.dtype != products.dtype or offsets.device != products.device:
        raise ValueError(
            f"{op}: offsets is {offsets.dtype} {list(offsets.shape)} on {offsets.device}; expected {products.dtype} "
            f"[2, B, H, S] = {list(expected)} on {products.device}"
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


def _apart(p: Expansion, side: Tensor) -> tuple[Tensor, Tensor]:
    """What multiplies values [4, …] and, for u, v and uv, tangents [3, …] of slots in a product with a jet of slots."""
    along_u, along_v = _chosen(side, p.x, None), _chosen(~side, p.x, None)
    return torch.stack((p.x, p.u, p.v, p.uv)), torch.stack((along_u, along_v, _chosen(side, p.v, p.u)))


def _softmax(s: Expansion) -> Expansion:
    p = s.x.softmax(SLOTS)
    l_u, l_v = s.u - _total(p * s.u), s.v - _total(p * s.v)
    l_uv = s.uv - _total(p * (s.uv + l_v * s.u))
    return Expansion(p, p * l_u, p * l_v, p * (l_uv + l_u * l_v))


def reference(products: Tensor, offsets: Tensor, side: Tensor) -> Tensor:
    """The op in plain torch."""
    dtype, channels = products.dtype, 4 if len(products) == 7 else 1
    products, offsets = accumulation(products, offsets)
    value, tangent = offsets.unsqueeze(-1)
    zero = torch.zeros_like(products[0])
    if channels == 1:
        by_value, by_tangent = Expansion(products[0] + value, zero, zero, zero), (products[1] + tangent, zero, zero)
    else:
        by_value, by_tangent = Expansion(products[0] + value, *products[1:4]), (products[4] + tangent, *products[5:])
    p = _softmax(_together(by_value, Expansion(*by_tangent, zero), side))
    return torch.cat(_apart(p, side)).to(dtype)


def reference_backward(grad: Tensor, weights: Tensor, side: Tensor, blocks: int) -> Tensor:
    """The gradient of ``blocks`` products in plain torch, p taken from the op's own result.

    By formula and differentiable: second derivatives go through this function.
    """
    dtype = grad.dtype
    grad, weights = accumulation(grad, weights)
    p, of_values = Expansion(*weights[:4]), Expansion(*grad[:4])
    of_tangents = Expansion(torch.zeros_like(grad[0]), *grad[4:])
    dp = _together(of_values.reversed(), of_tangents.reversed(), side)
    ds = p * (dp - (p * dp).each(_total))
    by_value, by_tangent = (part.flip(0) for part in _apart(ds, side))
    if blocks == 2:
        by_value, by_tangent = by_value[:1], by_tangent[:1]
    return torch.cat((by_value, by_tangent)).to(dtype)


def _fake(products: Tensor, offsets: Tensor, side: Tensor) -> Tensor:
    return products.new_empty((7, *products.shape[1:]))


def _fake_backward(grad: Tensor, weights: Tensor, side: Tensor, blocks: int) -> Tensor:
    return grad.new_empty((blocks, *grad.shape[1:]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    products, _, side = inputs
    ctx.blocks = len(products)
    ctx.save_for_backward(output, side)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    of_products = torch.ops.compgen.jet_slot_softmax_backward(grad, *ctx.saved_tensors, ctx.blocks)
    of_offsets = None
    if ctx.needs_input_grad[1]:  # offsets were added to x·a and x·a_t
        of_offsets = torch.stack([of_products[0].sum(-1), of_products[4 if ctx.blocks == 7 else 1].sum(-1)])
    return of_products, of_offsets, None


def _save_backward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    grad, weights, side, ctx.blocks = inputs
    ctx.save_for_backward(grad, weights, side)


def _differentiate_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, side = ctx.saved_tensors
    pulled = pull_back(lambda g, w: (reference_backward(g, w, side, ctx.blocks),), tensors, (grad,))
    return (*pulled, None, None)


define_op(
    "jet_slot_softmax",
    "(Tensor products, Tensor offsets, Tensor side) -> Tensor",
    reference=reference,
    triton="jet_slot_softmax:forward",
    fake=_fake,
    public=True,
)
define_op(
    "jet_slot_softmax_backward",
    "(Tensor grad, Tensor weights, Tensor side, int blocks) -> Tensor",
    reference=reference_backward,
    triton="jet_slot_softmax:backward",
    fake=_fake_backward,
    public=False,
)
torch.library.register_autograd("compgen::jet_slot_softmax", _differentiate, setup_context=_save)
torch.library.register_autograd(
    "compgen::jet_slot_softmax_backward", _differentiate_backward, setup_context=_save_backward
)
