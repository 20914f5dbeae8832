"""Sums and means (linear), choices along a dimension, and masks that do not depend on the slots."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from compgen_fast.jets.jet import (
    Jet,
    aligned,
    common_side,
    in_common,
    jet_rule,
    mixable,
    narrowed,
    padded,
    spellings,
)
from compgen_fast.jets.rules.arithmetic import as_constant
from compgen_fast.jets.rules.shapes import to
from compgen_fast.jets.rules.stores import stored


def _dims(x: Jet, dim: Any) -> tuple[int, ...]:
    if dim is None or dim == ():
        return tuple(range(-x.dim(), 0))
    return tuple(d if d < 0 else d - x.dim() for d in (dim if isinstance(dim, Sequence) else [dim]))


def _reduced(x: Jet, channels: Tensor, dims: tuple[int, ...], keepdim: bool) -> Jet:
    """The jet of a reduction along dims in which x's side does not vary."""
    if x.side is None:
        return Jet(channels)
    side = narrowed(x.side)
    return Jet(channels, side if keepdim else side.squeeze(dims))


@jet_rule(*spellings("sum"))
def total(x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Jet:
    dims = _dims(x, dim)
    x = mixable(x, dims)
    return _reduced(x, x.channels.sum(dims, keepdim, dtype=dtype) if dims else x.channels, dims, keepdim)


@jet_rule(*spellings("mean"))
def mean(x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    count = 1
    for d in _dims(x, dim):
        count *= x.shape[d]
    return total(x, dim, keepdim, dtype=dtype) / count


@jet_rule(*spellings("var"))
def variance(x: Any, dim: Any = None, unbiased: Any = None, keepdim: bool = False, *, correction: Any = None) -> Any:
    if isinstance(dim, bool):  # x.var(False)
        dim, unbiased = None, dim
    correction = (1 if unbiased is None else int(unbiased)) if correction is None else correction
    dims = _dims(x, dim)
    count = 1
    for d in dims:
        count *= x.shape[d]
    centred = x - mean(x, dims, True)
    return total(centred * centred, dims, keepdim) / (count - correction)


@jet_rule(*spellings("std"))
def deviation(x: Any, *args: Any, **kwargs: Any) -> Any:
    return torch.sqrt(variance(x, *args, **kwargs))


@jet_rule(torch.linalg.norm)
def vector_or_matrix_norm(x: Any, ord: Any = None, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
    if ord is not None and len(_dims(x, dim)) == 2:
        raise NotImplementedError("jets: norms of matrices have no rule; use torch.linalg.vector_norm for Frobenius")
    return norm(x, ord, dim, keepdim, **kwargs)


@jet_rule(*spellings("norm"), torch.linalg.vector_norm)
def norm(x: Any, p: Any = 2, dim: Any = None, keepdim: bool = False, *, ord: Any = None, dtype: Any = None) -> Any:
    if (p if ord is None else ord) not in (2, 2.0, "fro", None):
        raise NotImplementedError(f"jets: only the Euclidean norm has a rule, not p={p if ord is None else ord}")
    return torch.sqrt(total(x * x, dim, keepdim))


@jet_rule(F.normalize)
def normalize(x: Any, p: float = 2.0, dim: int = 1, eps: float = 1e-12, **_: Any) -> Any:
    return x / norm(x, p, dim, True).clamp_min(eps)


@jet_rule(F.mse_loss)
def mse_loss(x: Any, target: Any, reduction: str = "mean", **_: Any) -> Any:
    error = torch.square(x - target)
    return error if reduction == "none" else getattr(error, reduction)()


@jet_rule(*spellings("cumsum"))
def cumsum(x: Jet, dim: int) -> Jet:
    (negative,) = _dims(x, dim)
    x = mixable(x, [negative])
    return Jet(x.channels.cumsum(negative), x.side)


def _chosen(x: Jet, index: Tensor, dim: int, keepdim: bool) -> Any:
    """The elements of x at index [… 1 …] along dim."""
    y = torch.gather(x, dim, index)
    return y if keepdim else y.squeeze(dim)


def _extreme(name: str) -> Any:
    def rule(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
        if isinstance(dim, Tensor):
            larger = torch.detach(x) >= torch.detach(dim)
            return torch.where(larger if name == "max" else ~larger, x, dim)
        if dim is None:
            flat = x.flatten()
            return _chosen(flat, getattr(flat.primal, name)(0, True).indices, -1, False)
        (negative,) = _dims(x, dim)
        index = getattr(x.primal, name)(negative, True).indices
        value = _chosen(x, index, negative, keepdim)
        return getattr(torch.return_types, name)((value, index if keepdim else index.squeeze(negative)))

    return rule


jet_rule(*spellings("max"), torch.maximum, Tensor.maximum)(_extreme("max"))
jet_rule(*spellings("min"), torch.minimum, Tensor.minimum)(_extreme("min"))


def _extreme_over(name: str) -> Any:
    def rule(x: Any, dim: Any = (), keepdim: bool = False) -> Any:
        for d in _dims(x, dim):
            x = _extreme(name)(x, d, True)[0]
        return x if keepdim else x.squeeze(_dims(x, dim))

    return rule


jet_rule(*spellings("amax"))(_extreme_over("max"))
jet_rule(*spellings("amin"))(_extreme_over("min"))


@jet_rule(*spellings("where"))
def where(condition: Any, a: Any = None, b: Any = None) -> Any:
    if isinstance(condition, Jet):  # x.where(condition, other)
        condition, a = a, condition
    like = a if isinstance(a, Jet) else b
    if isinstance(a, Jet) and isinstance(b, Jet):
        a, b = in_common(a, b)
        ndim, count = max(a.dim(), b.dim()), max(len(a.channels), len(b.channels))
        side = common_side(a, b)
        p, q = (padded(aligned(x.channels, ndim), count) for x in (a, b))
    else:
        side = like.side
        ndim, count = max(condition.dim(), a.dim() if isinstance(a, Tensor) else 0, like.dim()), len(like.channels)
        p, q = (_stacked(x, like, ndim, count) for x in (a, b))
    y = torch.where(condition, p, q)
    return Jet(y, None if side is None else narrowed(side).expand(y.shape[1:]))


def _stacked(x: Any, like: Jet, ndim: int, count: int) -> Tensor:
    """Channels of a jet, or of a constant whose tangents are zero."""
    if isinstance(x, Jet):
        return aligned(x.channels, ndim)
    return padded(aligned(as_constant(x, like).to(like.dtype)[None], ndim), count)


@jet_rule(*spellings("masked_fill"))
def masked_fill(x: Any, mask: Tensor, value: Any) -> Any:
    if isinstance(value, Jet) or not isinstance(x, Jet):
        return torch.where(mask, value, x)
    shape = torch.broadcast_shapes(x.shape, mask.shape)
    channels = aligned(x.channels, len(shape)).expand(-1, *shape)
    channels = torch.cat([channels[:1].masked_fill(mask, value), channels[1:].masked_fill(mask, 0)])
    return Jet(channels, None if x.side is None else narrowed(x.side).expand(shape))


def _triangle(name: str) -> Any:
    def rule(x: Jet, diagonal: int = 0) -> Jet:
        return Jet(getattr(x.channels, name)(diagonal), x.side)

    return rule


for _name in ("tril", "triu"):
    jet_rule(*spellings(_name))(_triangle(_name))


def _dropout(name: str) -> Any:
    """One mask for the value and its tangents: the derivative of the network that was drawn."""
    drop = getattr(F, name)

    def rule(x: Jet, p: float = 0.5, training: bool = True, inplace: bool = False) -> Jet:
        if not training or p == 0:
            return x
        return stored(x, Jet(x.channels * drop(torch.ones_like(x.primal), p, True), x.side), inplace)

    return rule


for _name in ("dropout", "dropout1d", "dropout2d", "dropout3d"):
    jet_rule(*spellings(_name))(_dropout(_name))


@jet_rule(*spellings("softmax"), torch.softmax)
def softmax(x: Jet, dim: int, _stacklevel: int = 3, dtype: Any = None) -> Jet:
    """p_u = p (u − E u)     p_uv = p (x_uv − E x_uv + (u − E u)(v − E v) − Cov(u, v))     E over p"""
    x, p, drift, bent = _log_softmax(x, dim, dtype)
    moved = p * drift
    if bent is None:
        return Jet(torch.cat([p[None], moved]), x.side)
    return Jet(torch.cat([p[None], moved, (p * (bent + drift[0] * drift[1]))[None]]))


@jet_rule(*spellings("log_softmax"), torch.log_softmax)
def log_softmax(x: Jet, dim: int, _stacklevel: int = 3, dtype: Any = None) -> Jet:
    """y_u = u − E u     y_uv = x_uv − E x_uv − Cov(u, v)"""
    x, _, drift, bent = _log_softmax(x, dim, dtype)
    y = torch.log_softmax(x.primal, dim)[None]
    return Jet(torch.cat([y, drift] if bent is None else [y, drift, bent[None]]), x.side)


def _log_softmax(x: Jet, dim: int, dtype: Any) -> tuple[Jet, Tensor, Tensor, Tensor | None]:
    """x ready to be mixed along dim, p = softmax(x), the tangents of log p, and its x_uv (None for sided jets)."""
    (negative,) = _dims(x, dim)
    x = mixable(x if dtype is None else to(x, dtype), [negative])
    p = x.primal.softmax(negative)
    first = x.channels[1:3]
    drift = first - (p * first).sum(negative, keepdim=True)
    if x.side is not None:
        return x, p, drift, None
    bent = -(p * drift[0] * drift[1]).sum(negative, keepdim=True)
    if len(x.channels) == 3:
        return x, p, drift, bent.expand(x.shape)
    return x, p, drift, x.channels[3] - (p * x.channels[3]).sum(negative, keepdim=True) + bent


@jet_rule(*spellings("logsumexp"))
def logsumexp(x: Any, dim: Any, keepdim: bool = False) -> Any:
    dims = _dims(x, dim)
    highest = torch.detach(x).amax(dims, keepdim=True)
    y = torch.log(total(torch.exp(x - highest), dims, True)) + highest
    return y if keepdim else y.squeeze(dims)


@jet_rule(F.softmin)
def softmin(x: Any, dim: int, **_: Any) -> Any:
    return softmax(-x, dim)
