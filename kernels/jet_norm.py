"""LayerNorm and RMSNorm of a jet over its last dimension.

With means over the D columns, calculated as jets (see jet.py),

    z = x − mean(x)   (RMSNorm: z = x)      r = (mean(z²) + eps)^−½      n = z r      y = weight n + bias

    x [3 or 4,…,D]; with three channels x_uv = 0    weight, bias [D]; the bias meets the first channel only    y [4,…,D]

and backwards, with ĝ = weight (g_uv, g_v, g_u, g) the reversed gradient of n, still as jets,

    dx = r (ĝ − mean(ĝ) − n mean(ĝ n)) reversed      (RMSNorm: without mean(ĝ))
    dweight = Σ over rows and channels of g n        dbias = Σ over rows of g

A tile holds whole rows in all channels, so everything is read once and written once, and nothing of the forward pass is
saved. Each program of the backward pass walks over a run of rows and keeps its sums for weight and bias in registers;
`launch.sum_partials` ends the sums.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from . import jet
from .launch import UNFUSED, split_tiles, sum_partials, tuned_config

WIDEST = 4096  # columns: the rows of a tile, in all channels, live in the registers of one program


@triton.jit
def _reciprocal_root(v):
    """v^−½ of a jet of row statistics. v_u, v_v, v_uv first meet r², as a power r⁵ could overflow."""
    r = tl.rsqrt(v[0])
    a_u, a_v, a_uv = r * r * v[1], r * r * v[2], r * r * v[3]
    return r, -0.5 * r * a_u, -0.5 * r * a_v, r * (0.75 * a_u * a_v - 0.5 * a_uv)


@triton.jit
def _normalise(x, present, eps, D: tl.constexpr, CENTRED: tl.constexpr):
    """n [R, D] and r [R, 1]."""
    z = x
    if CENTRED:
        z = jet.where(present, jet.subtract(x, jet.scale(jet.row_sum(x), 1.0 / D)))
    power = jet.scale(jet.row_sum(jet.multiply(z, z)), 1.0 / D)
    r = _reciprocal_root((power[0] + eps, power[1], power[2], power[3]))
    return jet.multiply(z, r), r


@triton.jit
def _norm_forward_kernel(
    x,
    weight,
    bias,
    y,
    eps,
    rows,
    x_stride,  # between channels
    y_stride,
    CHANNELS: tl.constexpr,
    CENTRED: tl.constexpr,
    D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * BLOCK_R
    within = tl.arange(0, BLOCK_R)
    columns = tl.arange(0, BLOCK_D)
    offsets = within[:, None] * D + columns[None, :]
    present = (within < rows - start)[:, None] & (columns < D)[None, :]
    a = jet.load(jet.channels(x + start * D, x_stride), offsets, present, CHANNELS)
    n, _ = _normalise(a, present, eps, D, CENTRED)
    if weight is not None:
        n = jet.scale(n, tl.load(weight + columns, mask=columns < D, other=0.0).to(tl.float32)[None, :])
    if bias is not None:
        n = (n[0] + tl.load(bias + columns, mask=columns < D, other=0.0).to(tl.float32)[None, :], n[1], n[2], n[3])
    jet.store(jet.channels(y + start * D, y_stride), offsets, n, present, 4)


@triton.jit
def _norm_backward_kernel(
    dy,
    x,
    weight,
    dx,
    dweight_partials,  # [splits, D] fp32
    dbias_partials,  # None for RMSNorm
    eps,
    rows,
    tiles_per_split,
    dy_stride,
    x_stride,
    dx_stride,
    CHANNELS: tl.constexpr,
    CENTRED: tl.constexpr,
    D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    split = tl.program_id(0).to(tl.int64)
    within = tl.arange(0, BLOCK_R)
    columns = tl.arange(0, BLOCK_D)
    offsets = within[:, None] * D + columns[None, :]
    dweight = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    dbias = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    first = split * tiles_per_split
    for tile in range(first, min(first + tiles_per_split, tl.cdiv(rows, BLOCK_R))):
        start = tile * BLOCK_R
        present = (within < rows - start)[:, None] & (columns < D)[None, :]
        a = jet.load(jet.channels(x + start * D, x_stride), offsets, present, CHANNELS)
        g = jet.reverse(jet.load(jet.channels(dy + start * D, dy_stride), offsets, present, 4))
        n, r = _normalise(a, present, eps, D, CENTRED)
        dweight += jet.multiply(g, n)[3]
        dbias += g[3]
        if weight is not None:
            g = jet.scale(g, tl.load(weight + columns, mask=columns < D, other=0.0).to(tl.float32)[None, :])
        gn_mean = jet.scale(jet.row_sum(jet.multiply(g, n)), 1.0 / D)
        if CENTRED:
            g = jet.subtract(g, jet.scale(jet.row_sum(g), 1.0 / D))
        da = jet.reverse(jet.multiply(r, jet.subtract(g, jet.multiply(n, gn_mean))))
        jet.store(jet.channels(dx + start * D, dx_stride), offsets, da, present, CHANNELS)

    tl.store(dweight_partials + split * D + columns, tl.sum(dweight, 0), mask=columns < D)
    if dbias_partials is not None:
        tl.store(dbias_partials + split * D + columns, tl.sum(dbias, 0), mask=columns < D)


def layer_norm_forward(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """y [4,…,D], dense, in x's dtype."""
    return _forward(x, weight, bias, eps, centred=True)


def layer_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of x, weight and bias, the last two also where there is no weight or bias."""
    grad_x, grad_weight, grad_bias = _backward(grad, x, weight, eps, centred=True)
    assert grad_bias is not None
    return grad_x, grad_weight, grad_bias


def rms_norm_forward(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """y [4,…,D], dense, in x's dtype."""
    return _forward(x, weight, None, eps, centred=False)


def rms_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of x and weight, the latter also where there is no weight."""
    grad_x, grad_weight, _ = _backward(grad, x, weight, eps, centred=False)
    return grad_x, grad_weight


def _tile(direction: str, x: torch.Tensor) -> dict[str, Any]:
    D = x.shape[-1]
    if D > WIDEST:
        raise ValueError(f"jet norm: rows of {D} columns; at most {WIDEST} fit the registers of one program")
    config = tuned_config(f"jet_norm {direction}", x, 1, D)
    return {
        "D": D,
        "BLOCK_R": config.BLOCK_N,
        "BLOCK_D": config.BLOCK_D,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        **UNFUSED,
    }


def _forward(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, centred: bool
) -> torch.Tensor:
    y = x.new_empty((4, *x.shape[1:]))
    if y.numel() == 0:
        return y
    x, tile = jet.dense_channels(x), _tile("forward", x)
    rows = y[0].numel() // tile["D"]
    with torch.cuda.device_of(x):
        _norm_forward_kernel[(triton.cdiv(rows, tile["BLOCK_R"]),)](
            x,
            None if weight is None else weight.contiguous(),
            None if bias is None else bias.contiguous(),
            y,
            eps,
            rows,
            x.stride(0),
            y.stride(0),
            CHANNELS=x.shape[0],
            CENTRED=centred,
            **tile,
        )
    return y


def _backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, eps: float, centred: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    grad_x = x.new_empty(x.shape)
    if grad_x.numel() == 0:
        return grad_x, x.new_zeros(x.shape[-1:]), x.new_zeros(x.shape[-1:])
    grad_weight = x.new_empty(x.shape[-1:])
    grad_bias = x.new_empty(x.shape[-1:]) if centred else None
    grad, x, tile = jet.dense_channels(grad), jet.dense_channels(x), _tile("backward", x)
    rows, D = grad_x[0].numel() // tile["D"], tile["D"]
    splits, tiles_per_split = split_tiles(
        triton.cdiv(rows, tile["BLOCK_R"]), 1, 2 * D * 4, grad_x.numel() * x.element_size()
    )
    partials = x.new_empty((2 if centred else 1, splits, D), dtype=torch.float32)
    with torch.cuda.device_of(x):
        _norm_backward_kernel[(splits,)](
            grad,
            x,
            None if weight is None else weight.contiguous(),
            grad_x,
            partials[0],
            partials[1] if centred else None,
            eps,
            rows,
            tiles_per_split,
            grad.stride(0),
            x.stride(0),
            grad_x.stride(0),
            CHANNELS=x.shape[0],
            CENTRED=centred,
            **tile,
        )
        sum_partials(partials, grad_weight, grad_bias)
    return grad_x, grad_weight, grad_bias
