"""The softmax over slots of a jet, between the products of pixels with slots and the products of weights with slots.

    products [7 or 2,B,H,S,N] = x·a, x_u·a, x_v·a, x_uv·a, x·a_t, x_u·a_t, x_v·a_t      or x·a, x·a_t
    offsets [2,B,H,S] = c, c_t      side [B,S], 1 where the tangent a_t of a slot is along u, 0 where along v

    s = x·a + c      s_u = x_u·a + side (x·a_t + c_t)      s_v = x_v·a + (1 − side) (x·a_t + c_t)
    s_uv = x_uv·a + side x_v·a_t + (1 − side) x_u·a_t      p = softmax over slots of the jet s

    weights [7,B,H,S,N] = p, p_u, p_v, p_uv, side p, (1 − side) p, side p_v + (1 − side) p_u

and backwards, with everything that has to do with the gradient reversed (see jet.py): p̂ is put together like s,
ŝ = p (p̂ − Σ_s p p̂), and ŝ is taken apart like p, which is read from the weights.

A tile is [BLOCK_N pixels, all slots] of one image and head. Pixels are dense in memory, so that a few slots need no
padding there; everything is read once and written once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from . import jet
from .launch import UNFUSED

TILE = 1024  # elements, 8 for each thread: eleven tiles are in registers at once
WARPS = 4


@triton.jit
def _together(by_value, tangent, tangent_u, tangent_v, side):
    """The product with a jet of slots, from the products with its values and with its tangents."""
    return (
        by_value[0],
        by_value[1] + tl.where(side, tangent, 0.0),
        by_value[2] + tl.where(side, 0.0, tangent),
        by_value[3] + tl.where(side, tangent_v, tangent_u),
    )


@triton.jit
def _load(x, offsets, present):
    return tl.load(x + offsets, mask=present, other=0.0).to(tl.float32)


@triton.jit
def _store(x, offsets, value, present):
    tl.store(x + offsets, value.to(x.dtype.element_ty), mask=present)


@triton.jit
def _tile(N, S: tl.constexpr, H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr):
    """Image and head of this program, where its tile starts, the offsets in it, and which of them exist."""
    tiles = tl.cdiv(N, BLOCK_N)
    group = (tl.program_id(0) // tiles).to(tl.int64)  # 64 bit: a batch may hold more than 2³¹ elements
    first = (tl.program_id(0) % tiles).to(tl.int64) * BLOCK_N
    pixels, slots = tl.arange(0, BLOCK_N)[:, None], tl.arange(0, BLOCK_S)[None, :]
    present = (pixels < N - first) & (slots < S)
    return group // H, group % H, group * (S * N) + first, pixels + slots * N, present


@triton.jit
def _slot_softmax_forward_kernel(
    products,
    offsets,
    side,
    weights,
    N,
    block,  # between the blocks of products and weights
    offset_block,
    MOVED: tl.constexpr,
    S: tl.constexpr,
    H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    b, h, start, tile, present = _tile(N, S, H, BLOCK_N, BLOCK_S)
    slots = tl.arange(0, BLOCK_S)
    alive = slots < S
    along_u = (tl.load(side + b * S + slots, mask=alive, other=0) != 0)[None, :]
    own = offsets + (b * H + h) * S + slots
    c = tl.load(own, mask=alive, other=0.0).to(tl.float32)[None, :]
    c_t = tl.load(own + offset_block, mask=alive, other=0.0).to(tl.float32)[None, :]

    x, x_u, x_v, x_uv = jet.channels(products + start, block)
    value = _load(x, tile, present) + c
    if MOVED:
        t, t_u, t_v, _ = jet.channels(x_uv + block, block)
        by_value = (value, _load(x_u, tile, present), _load(x_v, tile, present), _load(x_uv, tile, present))
        s = _together(
            by_value, _load(t, tile, present) + c_t, _load(t_u, tile, present), _load(t_v, tile, present), along_u
        )
    else:
        zero = tl.zeros([BLOCK_N, BLOCK_S], tl.float32)
        s = _together((value, zero, zero, zero), _load(x_u, tile, present) + c_t, zero, zero, along_u)

    logits = tl.where(alive[None, :], s[0], float("-inf"))
    e = tl.exp(logits - tl.max(logits, 1)[:, None])
    p = e * (1.0 / tl.sum(e, 1))[:, None]
    l_u = s[1] - tl.sum(p * s[1], 1)[:, None]
    l_v = s[2] - tl.sum(p * s[2], 1)[:, None]
    bent = s[3] + l_u * l_v
    p_u = p * l_u
    p_v = p * l_v

    p_uv = p * (bent - tl.sum(p * bent, 1)[:, None])

    w = jet.channels(weights + start, block)
    jet.store(w, tile, (p, p_u, p_v, p_uv), present, 4)
    along = jet.channels(w[3] + block, block)
    _store(along[0], tile, tl.where(along_u, p, 0.0), present)
    _store(along[1], tile, tl.where(along_u, 0.0, p), present)
    _store(along[2], tile, tl.where(along_u, p_v, p_u), present)


@triton.jit
def _slot_softmax_backward_kernel(
    grad,
    weights,
    side,
    grad_products,
    N,
    block,
    MOVED: tl.constexpr,
    S: tl.constexpr,
    H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    b, _, start, tile, present = _tile(N, S, H, BLOCK_N, BLOCK_S)
    slots = tl.arange(0, BLOCK_S)
    along_u = (tl.load(side + b * S + slots, mask=slots < S, other=0) != 0)[None, :]
    p = jet.load(jet.channels(weights + start, block), tile, present, 4)
    g = jet.channels(grad + start, block)
    g_u, g_v, g_uv, _ = jet.channels(g[3] + block, block)
    dp = _together(
        jet.reverse(jet.load(g, tile, present, 4)),
        _load(g_uv, tile, present),
        _load(g_v, tile, present),
        _load(g_u, tile, present),
        along_u,
    )
    ds = jet.multiply(p, jet.subtract(dp, jet.row_sum(jet.multiply(p, dp))))
    tangent = tl.where(along_u, ds[2], ds[1])
    d = jet.channels(grad_products + start, block)
    if MOVED:
        jet.store(d, tile, jet.reverse(ds), present, 4)
        along = jet.channels(d[3] + block, block)
        _store(along[0], tile, tangent, present)
        _store(along[1], tile, tl.where(along_u, 0.0, ds[0]), present)
        _store(along[2], tile, tl.where(along_u, ds[0], 0.0), present)
    else:
        _store(d[0], tile, ds[3], present)
        _store(d[1], tile, tangent, present)


def forward(products: torch.Tensor, offsets: torch.Tensor, side: torch.Tensor) -> torch.Tensor:
    """weights [7,B,H,S,N], dense, in the products' dtype."""
    products, offsets, side = products.contiguous(), offsets.contiguous(), side.contiguous()
    weights = products.new_empty((7, *products.shape[1:]))
    if weights.numel() == 0:
        return weights
    with torch.cuda.device_of(products):
        _slot_softmax_forward_kernel[_grid(products)](
            products,
            offsets,
            side,
            weights,
            products.shape[4],
            products[0].numel(),
            offsets[0].numel(),
            MOVED=len(products) == 7,
            **_shape(products),
        )
    return weights


def backward(grad: torch.Tensor, weights: torch.Tensor, side: torch.Tensor, blocks: int) -> torch.Tensor:
    """The gradient of so many blocks of products, dense."""
    grad, weights, side = grad.contiguous(), weights.contiguous(), side.contiguous()
    grad_products = grad.new_empty((blocks, *grad.shape[1:]))
    if grad_products.numel() == 0:
        return grad_products
    with torch.cuda.device_of(grad):
        _slot_softmax_backward_kernel[_grid(grad)](
            grad, weights, side, grad_products, grad.shape[4], grad[0].numel(), MOVED=blocks == 7, **_shape(grad)
        )
    return grad_products


def _blocks(x: torch.Tensor) -> tuple[int, int]:
    """(BLOCK_N, BLOCK_S) for [blocks,B,H,S,N]."""
    slots = triton.next_power_of_2(x.shape[3])
    return TILE // max(slots, 2), slots


def _grid(x: torch.Tensor) -> tuple[int]:
    return (x.shape[1] * x.shape[2] * triton.cdiv(x.shape[4], _blocks(x)[0]),)


def _shape(x: torch.Tensor) -> dict[str, Any]:
    BLOCK_N, BLOCK_S = _blocks(x)
    return {"S": x.shape[3], "H": x.shape[2], "BLOCK_N": BLOCK_N, "BLOCK_S": BLOCK_S, "num_warps": WARPS, **UNFUSED}
