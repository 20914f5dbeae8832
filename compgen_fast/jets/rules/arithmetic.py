"""Sums, products, quotients and powers, and the one product rule that every bilinear op uses."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from compgen_fast.jets.jet import Jet, aligned, common_side, in_common, jet_rule, padded, resided, spellings
from compgen_fast.jets.rules.pointwise import chain


class _AddToPrimal(Function):
    """channels[0] += constant, in place, without the copy of all channels that autograd's own in-place would make."""

    @staticmethod
    def forward(ctx: Any, channels: Tensor, constant: Tensor) -> Tensor:
        ctx.mark_dirty(channels)
        ctx.shape, ctx.dtype = constant.shape, constant.dtype
        channels[0].add_(constant)
        return channels

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        wanted = ctx.needs_input_grad[1]
        return grad, grad[0].sum_to_size(ctx.shape).to(ctx.dtype) if wanted else None


def add_to_primal(fresh: Tensor, constant: Tensor | None) -> Tensor:
    """Adds a constant to the value; ``fresh`` channels are the caller's own and are overwritten."""
    return fresh if constant is None else _AddToPrimal.apply(fresh, constant)


def bilinear(op: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> Tensor:
    """The product rule. ``op`` multiplies stacks channel by channel and broadcasts a stack of one, which a constant is.
    A sided jet meets its own side only.

    x: a b      x_u: a_u b + a b_u      x_v: a_v b + a b_v      x_uv: a_uv b + a b_uv + a_u b_v + a_v b_u
    """
    if len(a) == 1 or len(b) == 1:
        return op(a, b)
    by_a, by_b = op(a, b[:1]), op(a[:1], b[1:])
    if len(a) == 2:
        return torch.cat([by_a[:1], by_a[1:] + by_b])
    mixed = op(a[1:2], b[2:3]) + op(a[2:3], b[1:2])
    for part in (by_a[3:], by_b[2:]):
        if len(part):
            mixed = mixed + part
    return torch.cat([by_a[:1], by_a[1:3] + by_b[:2], mixed])


def as_constant(x: Any, like: Jet) -> Tensor:
    return x if isinstance(x, Tensor) else torch.as_tensor(x, dtype=like.dtype, device=like.device)


def _add_constant(x: Jet, constant: Any) -> Jet:
    constant = as_constant(constant, x)
    shape = torch.broadcast_shapes(x.shape, constant.shape)
    dtype = torch.result_type(x.primal, constant)
    fresh = aligned(x.channels, len(shape)).expand(-1, *shape).to(dtype, copy=True)
    return resided(aligned_jet(x, len(shape)), add_to_primal(fresh, constant.to(dtype)))


def aligned_jet(x: Jet, ndim: int) -> Jet:
    """x with leading dimensions of size 1, up to ndim of them."""
    if x.channels.dim() - 1 >= ndim:
        return x
    channels = aligned(x.channels, ndim)
    return Jet(channels, None if x.side is None else x.side.reshape(channels.shape[1:]))


@jet_rule(*spellings("add", dunder=True), Tensor.__radd__)
def add(a: Any, b: Any, *, alpha: Any = 1) -> Jet:
    b = b if alpha == 1 else b * alpha
    if not isinstance(b, Jet):
        return _add_constant(a, b)
    if not isinstance(a, Jet):
        return _add_constant(b, a)
    a, b = in_common(a, b)
    ndim, count = max(a.dim(), b.dim()), max(len(a.channels), len(b.channels))
    p, q = (padded(aligned(x.channels, ndim), count) for x in (a, b))
    return Jet(p + q, common_side(a, b))


@jet_rule(*spellings("sub", "subtract"), Tensor.__sub__)
def subtract(a: Any, b: Any, *, alpha: Any = 1) -> Any:
    return a + negative(b if alpha == 1 else b * alpha)


@jet_rule(Tensor.__rsub__, torch.rsub)
def reversed_subtract(a: Any, b: Any, *, alpha: Any = 1) -> Any:
    return subtract(b, a, alpha=alpha)


@jet_rule(*spellings("neg", "negative", dunder=True))
def negative(x: Any) -> Any:
    return Jet(-x.channels, x.side) if isinstance(x, Jet) else -x


@jet_rule(*spellings("positive", dunder=False), Tensor.__pos__)
def positive(x: Jet) -> Jet:
    return x


@jet_rule(*spellings("mul", "multiply", dunder=True), Tensor.__rmul__)
def multiply(a: Any, b: Any) -> Jet:
    if not isinstance(a, Jet):
        a, b = b, a
    if isinstance(b, Jet):
        a, b = in_common(a, b)
        ndim = max(a.dim(), b.dim())
        return Jet(bilinear(torch.mul, aligned(a.channels, ndim), aligned(b.channels, ndim)), common_side(a, b))
    return _scaled(a, b)


def _scaled(x: Jet, factor: Any) -> Jet:
    if not isinstance(factor, Tensor):
        return Jet(x.channels * factor, x.side)
    x = aligned_jet(x, factor.dim())
    return resided(x, x.channels * factor)


@jet_rule(*spellings("div", "divide", "true_divide"), Tensor.__truediv__, Tensor.__div__)
def divide(a: Any, b: Any, *, rounding_mode: str | None = None) -> Any:
    if rounding_mode is not None:
        raise NotImplementedError(
            "jets: div with a rounding_mode has no useful derivative; divide the value, x.detach()"
        )
    if isinstance(b, Jet):
        return torch.reciprocal(b) * a
    if not isinstance(b, Tensor):
        return Jet(a.channels / b, a.side)
    a = aligned_jet(a, b.dim())
    return resided(a, a.channels / b)


@jet_rule(Tensor.__rtruediv__, Tensor.__rdiv__)
def reversed_divide(a: Any, b: Any) -> Any:
    return divide(b, a)


@jet_rule(*spellings("pow", "float_power"), Tensor.__pow__)
def power(base: Any, exponent: Any) -> Any:
    if isinstance(exponent, Jet):
        return torch.exp(exponent * torch.log(as_constant(base, exponent)))
    if isinstance(exponent, Tensor) and exponent.dim():
        return _power_of_each(base.expand(torch.broadcast_shapes(base.shape, exponent.shape)), exponent)
    p = exponent.item() if isinstance(exponent, Tensor) else exponent
    x = base.primal
    return chain(base, x**p, p * x ** (p - 1) if p else torch.zeros_like(x), _second_of_power(x, p))


def _second_of_power(x: Tensor, p: float) -> Tensor | None:
    return None if p in (0, 1) else p * (p - 1) * x ** (p - 2)


def _power_of_each(base: Jet, p: Tensor) -> Jet:
    """An exponent for every element; where a factor is zero the power beside it may be infinite, and does not count."""
    x = base.primal
    slope, bend = ((factor == 0, factor * x**q) for factor, q in ((p, p - 1), (p * (p - 1), p - 2)))
    return chain(base, x**p, slope[1].masked_fill(slope[0], 0), bend[1].masked_fill(bend[0], 0))


@jet_rule(Tensor.__rpow__)
def reversed_power(exponent: Jet, base: Any) -> Any:
    return power(base, exponent)


@jet_rule(*spellings("square"))
def square(x: Jet) -> Jet:
    return multiply(x, x)


@jet_rule(*spellings("addcmul"))
def add_product(x: Any, a: Any, b: Any, *, value: float = 1) -> Any:
    return x + a * b * value


@jet_rule(*spellings("addcdiv"))
def add_quotient(x: Any, a: Any, b: Any, *, value: float = 1) -> Any:
    return x + a / b * value


@jet_rule(*spellings("lerp"))
def interpolate_linearly(start: Any, end: Any, weight: Any) -> Any:
    return start + weight * (end - start)


@jet_rule(*spellings("glu"))
def gated_linear_unit(x: Jet, dim: int = -1) -> Any:
    a, b = x.chunk(2, dim)
    return a * torch.sigmoid(b)
