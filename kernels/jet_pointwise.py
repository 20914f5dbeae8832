"""GELU and SiLU of a jet.

    y = f(x)      y_u = f′(x) x_u      y_v = f′(x) x_v      y_uv = f′(x) x_uv + f″(x) x_u x_v

    x [3 or 4,…]; with three channels x_uv = 0    y [4,…]

and backwards, with ĝ = (g_uv, g_v, g_u, g) the reversed gradient of y, the jet product f′(x) ĝ, reversed (see jet.py);
the jet f′(x) needs f‴. With φ and Φ the normal density and distribution and σ the logistic function,

    GELU         f = x Φ(x)       f′ = Φ + x φ      f″ = φ (2 − x²)      f‴ = φ x (x² − 4)
    GELU, tanh   f = x σ(z(x))    z = 2 √(2/π) (x + 0.044715 x³), for ½ (1 + tanh(z/2)) = σ(z)
    SiLU         f = x σ(x)

Everything is read once and written once. The factors of σ′ and φ are taken at x cut off where these are zero in fp32,
because a power of x beyond them could overflow, and zero times infinity is NaN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import jet
from .launch import UNFUSED

FLAT_GELU = tl.constexpr(20.0)  # φ and σ′(z) are 0 in fp32 from here on
FLAT_SILU = tl.constexpr(128.0)


@triton.jit
def _cut(x, limit: tl.constexpr):
    return tl.where(x > limit, limit, tl.where(x < -limit, -limit, x))  # NaN stays NaN


@triton.jit
def _gelu(x):
    """f, f′, f″, f‴."""
    c = _cut(x, FLAT_GELU)
    density = 0.3989422804014327 * tl.exp(-0.5 * c * c)
    below = 0.5 + 0.5 * tl.erf(0.7071067811865476 * c)
    return x * below, below + c * density, density * (2.0 - c * c), density * c * (c * c - 4.0)


@triton.jit
def _gelu_tanh(x):
    c = _cut(x, FLAT_GELU)
    z = 1.5957691216057308 * (c + 0.044715 * c * c * c)
    z1 = 1.5957691216057308 * (1.0 + 0.134145 * c * c)
    z2 = 1.5957691216057308 * 0.26829  # z″ = z2 c, z‴ = z2
    s, s1, s2, s3 = _logistic(z)
    t1 = s1 * z1  # the derivatives of σ(z(x))
    t2 = s2 * z1 * z1 + s1 * (z2 * c)
    t3 = s3 * z1 * z1 * z1 + 3.0 * s2 * z1 * (z2 * c) + s1 * z2
    return x * s, s + c * t1, 2.0 * t1 + c * t2, 3.0 * t2 + c * t3


@triton.jit
def _silu(x):
    c = _cut(x, FLAT_SILU)
    s, s1, s2, s3 = _logistic(c)
    return x * s, s + c * s1, 2.0 * s1 + c * s2, 3.0 * s2 + c * s3


@triton.jit
def _logistic(x):
    s = tl.sigmoid(x)
    s1 = s * (1.0 - s)
    return s, s1, s1 * (1.0 - 2.0 * s), s1 * (1.0 - 6.0 * s1)


@triton.jit
def _derivatives(x, FUNCTION: tl.constexpr):
    if FUNCTION == "gelu":
        return _gelu(x)
    elif FUNCTION == "gelu tanh":
        return _gelu_tanh(x)
    else:
        return _silu(x)


@triton.jit
def _pointwise_forward_kernel(
    x,
    y,
    size,
    x_stride,  # between channels
    y_stride,
    CHANNELS: tl.constexpr,
    FUNCTION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = tl.arange(0, BLOCK)
    inside = offsets < size - start
    a = jet.load(jet.channels(x + start, x_stride), offsets, inside, CHANNELS)
    f, f1, f2, _ = _derivatives(a[0], FUNCTION)
    jet.store(jet.channels(y + start, y_stride), offsets, jet.apply(f, f1, f2, a), inside, 4)


@triton.jit
def _pointwise_backward_kernel(
    dy,
    x,
    dx,
    size,
    dy_stride,
    x_stride,
    dx_stride,
    CHANNELS: tl.constexpr,
    FUNCTION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = tl.arange(0, BLOCK)
    inside = offsets < size - start
    a = jet.load(jet.channels(x + start, x_stride), offsets, inside, CHANNELS)
    g = jet.load(jet.channels(dy + start, dy_stride), offsets, inside, 4)
    _, f1, f2, f3 = _derivatives(a[0], FUNCTION)
    da = jet.reverse(jet.multiply(jet.apply(f1, f2, f3, a), jet.reverse(g)))
    jet.store(jet.channels(dx + start, dx_stride), offsets, da, inside, CHANNELS)


BLOCKS = {"BLOCK": 1024, "num_warps": 4, **UNFUSED}


def gelu_forward(x: torch.Tensor, tanh: bool) -> torch.Tensor:
    """y [4,…], dense, in x's dtype."""
    return _forward(x, "gelu tanh" if tanh else "gelu")


def gelu_backward(grad: torch.Tensor, x: torch.Tensor, tanh: bool) -> torch.Tensor:
    """The gradient of x, dense, with as many channels as x."""
    return _backward(grad, x, "gelu tanh" if tanh else "gelu")


def silu_forward(x: torch.Tensor) -> torch.Tensor:
    """y [4,…], dense, in x's dtype."""
    return _forward(x, "silu")


def silu_backward(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The gradient of x, dense, with as many channels as x."""
    return _backward(grad, x, "silu")


def _forward(x: torch.Tensor, function: str) -> torch.Tensor:
    y = x.new_empty((4, *x.shape[1:]))
    if y.numel() == 0:
        return y
    x, size = jet.dense_channels(x), y[0].numel()
    with torch.cuda.device_of(x):
        _pointwise_forward_kernel[(triton.cdiv(size, BLOCKS["BLOCK"]),)](
            x, y, size, x.stride(0), size, CHANNELS=x.shape[0], FUNCTION=function, **BLOCKS
        )
    return y


def _backward(grad: torch.Tensor, x: torch.Tensor, function: str) -> torch.Tensor:
    grad_x = x.new_empty(x.shape)
    if grad_x.numel() == 0:
        return grad_x
    grad, x, size = jet.dense_channels(grad), jet.dense_channels(x), x[0].numel()
    with torch.cuda.device_of(x):
        _pointwise_backward_kernel[(triton.cdiv(size, BLOCKS["BLOCK"]),)](
            grad,
            x,
            grad_x,
            size,
            grad.stride(0),
            x.stride(0),
            size,
            CHANNELS=x.shape[0],
            FUNCTION=function,
            **BLOCKS,
        )
    return grad_x
