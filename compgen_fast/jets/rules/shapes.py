"""Ops that move elements: each acts on all channels alike, and on the side.

A negative dimension means the same on the stack of channels as on the value: most rules only make dimensions negative.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from compgen_fast.jets.jet import Jet, aligned, jet_rule, narrowed, padded, same_side, spellings, unsided, varies


def view_of(x: Jet, channels: Tensor, side: Tensor | None) -> Jet:
    """A jet that may share x's memory: neither may be written in place from now on."""
    jet = Jet(channels, side)
    jet.aliased = x.aliased = True
    return jet


def each(x: Jet, move: Callable[[Tensor], Tensor]) -> Jet:
    """Applies ``move``, written with negative dimensions only, to the channels and to the side."""
    return view_of(x, move(x.channels), None if x.side is None else move(x.side))


def negative(x: Jet, dim: int, extra: int = 0) -> int:
    return dim if dim < 0 else dim - x.dim() - extra


def _sizes(given: Sequence[Any]) -> tuple[int, ...]:
    return tuple(given[0]) if len(given) == 1 and isinstance(given[0], Sequence) else tuple(given)


@jet_rule(*spellings("reshape", "view"))
def reshape(x: Jet, *shape: Any, **named: Any) -> Jet:
    sizes = _sizes(shape or (named["shape"],))
    if any(isinstance(size, torch.dtype) for size in sizes):
        raise NotImplementedError("jets: view as another dtype has no derivative")
    channels = x.channels.reshape(len(x.channels), *sizes)
    return view_of(x, channels, None if x.side is None else x.side.reshape(channels.shape[1:]))


@jet_rule(*spellings("view_as", "reshape_as"))
def view_as(x: Any, other: Tensor) -> Any:
    return x.reshape(other.shape)


@jet_rule(*spellings("flatten"))
def flatten(x: Jet, start_dim: int = 0, end_dim: int = -1) -> Jet:
    if x.dim() == 0:
        return reshape(x, 1)
    start, end = start_dim % x.dim(), end_dim % x.dim()
    return reshape(x, *x.shape[:start], x.shape[start : end + 1].numel(), *x.shape[end + 1 :])


@jet_rule(*spellings("unflatten"))
def unflatten(x: Jet, dim: int, sizes: Any) -> Jet:
    return each(x, lambda t: t.unflatten(negative(x, dim), sizes))


@jet_rule(*spellings("permute"))
def permute(x: Jet, *dims: Any, **named: Any) -> Jet:
    order = [d % x.dim() for d in _sizes(dims or (named["dims"],))]
    side = None if x.side is None else x.side.permute(order)
    return view_of(x, x.channels.permute(0, *(d + 1 for d in order)), side)


@jet_rule(*spellings("transpose", "swapaxes", "swapdims"))
def transpose(x: Jet, dim0: int, dim1: int) -> Jet:
    return each(x, lambda t: t.transpose(negative(x, dim0), negative(x, dim1)))


@jet_rule(Tensor.mT.__get__)  # type: ignore[attr-defined]
def matrix_transpose(x: Jet) -> Jet:
    return transpose(x, -2, -1)


@jet_rule(*spellings("t"), Tensor.T.__get__)  # type: ignore[attr-defined]
def reverse_dims(x: Jet) -> Jet:
    return permute(x, *reversed(range(x.dim())))


@jet_rule(*spellings("movedim", "moveaxis"))
def movedim(x: Jet, source: Any, destination: Any) -> Jet:
    source, destination = (
        [negative(x, d) for d in (dims if isinstance(dims, Sequence) else [dims])] for dims in (source, destination)
    )
    return each(x, lambda t: t.movedim(source, destination))


@jet_rule(*spellings("unsqueeze"))
def unsqueeze(x: Jet, dim: int) -> Jet:
    return each(x, lambda t: t.unsqueeze(negative(x, dim, extra=1)))


@jet_rule(*spellings("squeeze"))
def squeeze(x: Jet, dim: Any = None) -> Jet:
    if dim is None:
        dim = tuple(range(x.dim()))
    dims = tuple(negative(x, d) for d in (dim if isinstance(dim, Sequence) else [dim]))
    return each(x, lambda t: t.squeeze(dims))


@jet_rule(*spellings("expand", "broadcast_to"))
def expand(x: Jet, *sizes: Any) -> Jet:
    shape = _sizes(sizes)
    channels = aligned(x.channels, len(shape)).expand(-1, *shape)
    return view_of(x, channels, None if x.side is None else narrowed(x.side).expand(channels.shape[1:]))


@jet_rule(*spellings("expand_as"))
def expand_as(x: Any, other: Tensor) -> Any:
    return x.expand(other.shape)


@jet_rule(torch.broadcast_tensors)
def broadcast_tensors(*tensors: Any) -> tuple[Any, ...]:
    shape = torch.broadcast_shapes(*(x.shape for x in tensors))
    return tuple(x.expand(shape) for x in tensors)


@jet_rule(*spellings("repeat", "tile"))
def repeat(x: Jet, *sizes: Any) -> Jet:
    counts = _sizes(sizes)
    counts = (1,) * (x.dim() - len(counts)) + counts  # only tile may give fewer counts than dimensions
    channels = aligned(x.channels, len(counts)).repeat(1, *counts)
    if x.side is None:
        return Jet(channels)
    side = narrowed(x.side.reshape((1,) * (len(counts) - x.dim()) + tuple(x.shape)))
    side = side.repeat([n if varies(side, d) else 1 for d, n in enumerate(counts)])
    return Jet(channels, side.expand(channels.shape[1:]))


@jet_rule(*spellings("repeat_interleave"))
def repeat_interleave(x: Jet, repeats: Any, dim: int | None = None, *, output_size: int | None = None) -> Jet:
    if dim is None:
        return repeat_interleave(flatten(x), repeats, 0, output_size=output_size)
    return _picked(x, negative(x, dim), lambda t, d: t.repeat_interleave(repeats, d, output_size=output_size))


def _picked(x: Jet, dim: int, pick: Callable[[Tensor, int], Tensor]) -> Jet:
    """Picks along one dimension; the side keeps its stride 0 there where it has it."""
    channels = pick(x.channels, dim)
    if x.side is None:
        return Jet(channels)
    side = narrowed(x.side)
    side = pick(side, dim) if varies(side, dim) else side
    return Jet(channels, side.expand(channels.shape[1:]))


@jet_rule(*spellings("index_select"))
def index_select(x: Jet, dim: int, index: Tensor) -> Jet:
    return _picked(x, negative(x, dim), lambda t, d: t.index_select(d, index))


@jet_rule(*spellings("flip"))
def flip(x: Jet, *dims: Any) -> Jet:
    negatives = [negative(x, d) for d in _sizes(dims)]
    return _kept(x, x.channels.flip(negatives), lambda side: side.flip(negatives), negatives)


@jet_rule(*spellings("roll"))
def roll(x: Jet, shifts: Any, dims: Any) -> Jet:
    shifts, dims = (list(a) if isinstance(a, Sequence) else [a] for a in (shifts, dims))
    negatives = [negative(x, d) for d in dims]
    return _kept(x, x.channels.roll(shifts, negatives), lambda side: side.roll(shifts, negatives), negatives)


def _kept(x: Jet, channels: Tensor, move: Callable[[Tensor], Tensor], dims: Sequence[int]) -> Jet:
    """A reordering along ``dims``: the side needs it only if it varies there."""
    if x.side is None:
        return Jet(channels)
    moves = any(varies(x.side, d) for d in dims)
    return Jet(channels, (move(narrowed(x.side)) if moves else x.side).expand(channels.shape[1:]))


@jet_rule(*spellings("select"))
def select(x: Jet, dim: int, index: int) -> Jet:
    return each(x, lambda t: t.select(negative(x, dim), index))


@jet_rule(*spellings("narrow"))
def narrow(x: Jet, dim: int, start: int, length: int) -> Jet:
    return each(x, lambda t: t.narrow(negative(x, dim), start, length))


def _several(x: Jet, cut: Callable[[Tensor], Sequence[Tensor]]) -> tuple[Jet, ...]:
    channels = cut(x.channels)
    sides = [None] * len(channels) if x.side is None else cut(x.side)
    return tuple(view_of(x, c, side) for c, side in zip(channels, sides, strict=True))


@jet_rule(*spellings("chunk"))
def chunk(x: Jet, chunks: int, dim: int = 0) -> tuple[Jet, ...]:
    return _several(x, lambda t: t.chunk(chunks, negative(x, dim)))


@jet_rule(*spellings("split", "split_with_sizes"))
def split(x: Jet, split_size_or_sections: Any, dim: int = 0) -> tuple[Jet, ...]:
    return _several(x, lambda t: t.split(split_size_or_sections, negative(x, dim)))


@jet_rule(*spellings("unbind"))
def unbind(x: Jet, dim: int = 0) -> tuple[Jet, ...]:
    return _several(x, lambda t: t.unbind(negative(x, dim)))


@jet_rule(Tensor.__iter__)
def iterate(x: Jet) -> Any:
    return iter(unbind(x))


@jet_rule(Tensor.__getitem__)
def getitem(x: Any, index: Any) -> Jet:
    index = index if isinstance(index, tuple) else (index,)
    if any(isinstance(i, Jet) for i in index) or not isinstance(x, Jet):
        raise NotImplementedError("jets: an index cannot depend on the slots; index with x.detach()")
    if not any(isinstance(i, Tensor | list | bool) for i in index):
        return view_of(x, x.channels[(slice(None), *index)], None if x.side is None else x.side[index])
    channels = torch.stack([c[index] for c in x.channels])
    if x.side is None:
        return Jet(channels)
    if len(index) == 1 and isinstance(index[0], Tensor) and index[0].dtype != torch.bool:
        side = narrowed(x.side, range(1, x.dim()))[index]  # the usual gather along dim 0
        return Jet(channels, side.expand(channels.shape[1:]))
    return Jet(channels, x.side[index])


@jet_rule(*spellings("gather", "take_along_dim"))
def gather(x: Jet, dim: int, index: Tensor) -> Jet:
    x = unsided(x)
    return Jet(x.channels.gather(negative(x, dim), index.expand(len(x.channels), *index.shape)))


@jet_rule(*spellings("cat", "concat", "concatenate"))
def cat(tensors: Sequence[Any], dim: int = 0) -> Jet:
    first = next(x for x in tensors if isinstance(x, Jet))
    dim = negative(first, dim)
    tensors = [x for x in tensors if x.dim() > 1 or x.numel()]  # torch allows the empty vector beside anything
    sides = _sides(tensors, dim) if all(x.side is not None for x in tensors if isinstance(x, Jet)) else None
    if sides is None:
        tensors = [unsided(x) if isinstance(x, Jet) else x for x in tensors]
    count = max(len(x.channels) for x in tensors if isinstance(x, Jet))
    channels = torch.cat([padded(x.channels if isinstance(x, Jet) else x[None], count) for x in tensors], dim)
    return Jet(channels, None if sides is None else _joined(sides, dim).expand(channels.shape[1:]))


def _sides(tensors: Sequence[Any], dim: int) -> list[Any]:
    """A side for each tensor; a constant, moved by nothing, takes its neighbour's if that fits, else False."""
    model: Tensor = next(x.side for x in tensors if isinstance(x, Jet))  # type: ignore[assignment]
    fits = not varies(model, dim)
    free = model.narrow(dim, 0, 1) if fits else model.new_zeros(()).expand(model.shape).narrow(dim, 0, 1)
    return [x.side if isinstance(x, Jet) else free.expand(x.shape) for x in tensors]


def _joined(sides: Sequence[Tensor], dim: int) -> Tensor:
    """The sides joined along dim, still of size 1 in the dimensions in which none of them varies."""
    thin = [narrowed(side, [dim]) for side in sides]
    if all(side.shape == thin[0].shape and side.shape[dim] == 1 and same_side(side, thin[0]) for side in thin):
        return thin[0]
    dims = range(-sides[0].dim(), 0)
    flat = [d for d in dims if d != dim and not any(varies(side, d) for side in sides)]
    return torch.cat([narrowed(side, flat) for side in sides], dim)


@jet_rule(*spellings("stack"))
def stack(tensors: Sequence[Any], dim: int = 0) -> Any:
    first = tensors[0]
    dim = dim if dim < 0 else dim - first.dim() - 1
    return cat([x.unsqueeze(dim) for x in tensors], dim)


@jet_rule(torch.hstack)
def hstack(tensors: Sequence[Any]) -> Any:
    return cat(tensors, 0 if tensors[0].dim() == 1 else 1)


@jet_rule(torch.vstack)
def vstack(tensors: Sequence[Any]) -> Any:
    return cat([x if x.dim() > 1 else x.unsqueeze(0) for x in tensors], 0)


@jet_rule(*spellings("contiguous"))
def contiguous(x: Jet, **kwargs: Any) -> Jet:
    return view_of(x, x.channels.contiguous(), x.side)


@jet_rule(*spellings("clone"))
def clone(x: Jet, **kwargs: Any) -> Jet:
    return Jet(x.channels.clone(), x.side)


@jet_rule(Tensor.to)
def to(x: Jet, *args: Any, **kwargs: Any) -> Any:
    args = tuple(a.primal if isinstance(a, Jet) else a for a in args)
    kwargs.pop("memory_format", None)
    channels = x.channels.to(*args, **kwargs)
    return view_of(x, channels, None if x.side is None else x.side.to(channels.device))


def _cast(name: str) -> Callable[..., Jet]:
    def rule(x: Jet, *args: Any, **kwargs: Any) -> Jet:
        channels = getattr(x.channels, name)(*args, **kwargs)
        return view_of(x, channels, None if x.side is None else x.side.to(channels.device))

    return rule


for _name in ("float", "double", "half", "bfloat16", "cpu", "cuda"):
    jet_rule(getattr(Tensor, _name))(_cast(_name))


@jet_rule(Tensor.type_as)
def type_as(x: Any, other: Tensor) -> Any:
    return x.to(other.dtype)
