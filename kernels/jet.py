"""Second-order jets in registers: what the jet kernels calculate with. No kernel is launched from here.

A jet is x + ε_u x_u + ε_v x_v + ε_u ε_v x_uv with ε_u² = ε_v² = 0: a value, its derivatives along u and along v, and
the mixed one. In memory its channels are stacked in front, [4,…] = (x, x_u, x_v, x_uv); [3,…] has no x_uv and [1,…] no
tangents, where they are known to be zero. In a kernel a jet is a tuple of four tiles.

The gradient of a jet operation is the ordinary gradient, calculated with jets, of the incoming gradient with its
channels reversed: with ĝ = (g_uv, g_v, g_u, g) and y = f(x) the jet f′(x) ĝ is the gradient of x, reversed as well. For
Σ_c g_c y_c, which the gradient differentiates, is the uv channel of the jet product ĝ y. So every backward kernel reads
the gradient reversed, applies the formula everyone knows, and writes the result reversed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def dense_channels(x: torch.Tensor) -> torch.Tensor:
    """x itself when each of its channels is dense, however far apart they are; else a dense copy."""
    return x if x[0].is_contiguous() else x.contiguous()


@triton.jit
def channels(x, stride):
    """Where the four channels start. Added one by one: three strides may be more than 32 bits hold, one is not."""
    x_u = x + stride
    x_v = x_u + stride
    return x, x_u, x_v, x_v + stride


@triton.jit
def reverse(a):
    return a[3], a[2], a[1], a[0]


@triton.jit
def load(x, offsets, mask, CHANNELS: tl.constexpr):
    """The jet at `offsets` of the channels x, in fp32; of three channels the fourth is zero."""
    value = tl.load(x[0] + offsets, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(x[1] + offsets, mask=mask, other=0.0).to(tl.float32)
    v = tl.load(x[2] + offsets, mask=mask, other=0.0).to(tl.float32)
    uv = tl.zeros_like(value)
    if CHANNELS == 4:
        uv = tl.load(x[3] + offsets, mask=mask, other=0.0).to(tl.float32)
    return value, u, v, uv


@triton.jit
def store(x, offsets, a, mask, CHANNELS: tl.constexpr):
    tl.store(x[0] + offsets, a[0].to(x[0].dtype.element_ty), mask=mask)
    tl.store(x[1] + offsets, a[1].to(x[0].dtype.element_ty), mask=mask)
    tl.store(x[2] + offsets, a[2].to(x[0].dtype.element_ty), mask=mask)
    if CHANNELS == 4:
        tl.store(x[3] + offsets, a[3].to(x[0].dtype.element_ty), mask=mask)


@triton.jit
def multiply(a, b):
    return (
        a[0] * b[0],
        a[1] * b[0] + a[0] * b[1],
        a[2] * b[0] + a[0] * b[2],
        a[3] * b[0] + a[1] * b[2] + a[2] * b[1] + a[0] * b[3],
    )


@triton.jit
def subtract(a, b):
    return a[0] - b[0], a[1] - b[1], a[2] - b[2], a[3] - b[3]


@triton.jit
def scale(a, factor):
    """a times something that does not move."""
    return a[0] * factor, a[1] * factor, a[2] * factor, a[3] * factor


@triton.jit
def where(condition, a):
    """a where the condition holds, elsewhere zero."""
    return (
        tl.where(condition, a[0], 0.0),
        tl.where(condition, a[1], 0.0),
        tl.where(condition, a[2], 0.0),
        tl.where(condition, a[3], 0.0),
    )


@triton.jit
def row_sum(a):
    """[R, C] → [R, 1], channel by channel."""
    return (
        tl.sum(a[0], 1, keep_dims=True),
        tl.sum(a[1], 1, keep_dims=True),
        tl.sum(a[2], 1, keep_dims=True),
        tl.sum(a[3], 1, keep_dims=True),
    )


@triton.jit
def apply(f, f1, f2, a):
    """The jet of a function of a, from its value and first two derivatives at a[0]."""
    return f, f1 * a[1], f1 * a[2], f1 * a[3] + f2 * a[1] * a[2]
