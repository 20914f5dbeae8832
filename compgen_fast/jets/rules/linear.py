"""Linear maps act on every channel at once, their bias on the value alone; two jets multiply by the product rule."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from compgen_fast.jets.jet import Jet, aligned, jet_rule, mixable, narrowed, resided, same_side, spellings, unsided
from compgen_fast.jets.rules.arithmetic import add_to_primal, bilinear
from compgen_fast.jets.rules.shapes import squeeze
from compgen_fast.ops.jet_linear import jet_linear


def refuse_jet(op: str, *parameters: Any) -> None:
    if any(isinstance(p, Jet) for p in parameters):
        raise NotImplementedError(
            f"jets: {op} whose weights depend on the slots has no rule; write it as matmul or einsum"
        )


@jet_rule(F.linear)
def linear(x: Any, weight: Any, bias: Any = None) -> Any:
    if isinstance(weight, Jet) or isinstance(bias, Jet):
        y = x @ weight.mT
        return y if bias is None else y + bias
    x = mixable(x, [-1])
    # A half-precision weight is read in the jet's precision: the second-order channel does not survive 8 bits.
    return resided(x, jet_linear(x.channels, weight.to(x.dtype), None if bias is None else bias.to(x.dtype)))


def _convolution(op: Callable[..., Tensor], dims: int) -> Callable[..., Jet]:
    def rule(x: Jet, weight: Any, bias: Any = None, *args: Any, **kwargs: Any) -> Jet:
        refuse_jet(op.__name__, weight, bias)
        x = mixable(x, range(-dims - 1, 0))
        batched = x.dim() == dims + 2
        y = op(x.channels.flatten(0, 1) if batched else x.channels, weight.to(x.dtype), None, *args, **kwargs)
        y = y.unflatten(0, (len(x.channels), -1)) if batched else y
        return resided(x, add_to_primal(y, None if bias is None else bias.to(x.dtype).view(-1, *(1,) * dims)))

    return rule


for _dims in (1, 2, 3):
    for _name in (f"conv{_dims}d", f"conv_transpose{_dims}d"):
        jet_rule(*spellings(_name))(_convolution(getattr(F, _name), _dims))


@jet_rule(*spellings("matmul", "bmm", "mm", "mv"), Tensor.__matmul__)
def matmul(a: Any, b: Any) -> Jet:
    """[…, n, m] @ […, m, k]; vectors are taken as matrices, as torch takes them."""
    if a.dim() == 1:
        return squeeze(matmul(a.unsqueeze(0), b), -2 if b.dim() > 1 else 0)
    if b.dim() == 1:
        return squeeze(matmul(a, b.unsqueeze(-1)), -1)
    a, b = _contracted(a, -1), _contracted(b, -2)
    if isinstance(a, Jet) and isinstance(b, Jet):
        a, b = _matched(a, b)
    ndim = max(a.dim(), b.dim())
    p, q = (aligned(x.channels if isinstance(x, Jet) else x[None], ndim) for x in (a, b))
    y = bilinear(torch.matmul, p, q)
    return Jet(y, _side_of_product(a, b, y.shape[1:]))


def _contracted(x: Any, dim: int) -> Any:
    return mixable(x, [dim]) if isinstance(x, Jet) else x


def _matched(a: Jet, b: Jet) -> tuple[Jet, Jet]:
    """Two jets whose rows and columns meet: still sided if one batch of matrices is moved by u, another by v."""
    if a.side is not None and b.side is not None:
        p, q = narrowed(a.side), narrowed(b.side)
        if p.shape[-2:] == q.shape[-2:] == (1, 1) and p.dim() == q.dim() and p.shape == q.shape and same_side(p, q):
            return a, b
    return unsided(a), unsided(b)


def _side_of_product(a: Any, b: Any, shape: torch.Size) -> Tensor | None:
    x = a if isinstance(a, Jet) else b
    return None if x.side is None else narrowed(x.side).expand(shape)


@jet_rule(Tensor.__rmatmul__)
def reversed_matmul(b: Any, a: Any) -> Any:
    return matmul(a, b)


@jet_rule(*spellings("baddbmm", "addmm", "addbmm", "addmv"))
def add_matmul(x: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    product = torch.matmul(a, b) * alpha
    if x.dim() < product.dim() - 1:
        raise NotImplementedError("jets: addbmm that sums over the batch has no rule; use bmm(…).sum(0)")
    return product if beta == 0 else product + x * beta


@jet_rule(torch.einsum)
def einsum(equation: str, *operands: Any) -> Jet:
    operands = tuple(operands[0]) if len(operands) == 1 and isinstance(operands[0], list | tuple) else operands
    equation = equation.replace(" ", "")
    inputs, _, output = _explicit(equation).partition("->")
    terms = inputs.split(",")
    jets = [i for i, x in enumerate(operands) if isinstance(x, Jet)]
    if len(jets) > 2 or "." in equation or any(len(set(term)) < len(term) for term in terms):
        raise NotImplementedError(
            f"jets: einsum {equation!r} has {len(jets)} operands that depend on the slots; "
            "at most two, without ellipsis and repeated letters, have a rule: split it"
        )
    if len(jets) == 2:
        moved = {i: unsided(operands[i]) for i in jets}
    else:
        moved = {i: mixable(operands[i], [d for d, c in enumerate(terms[i]) if c not in output]) for i in jets}
    stack = "Z"  # one more letter for the stack; torch.einsum broadcasts a stack of one
    stacked = ",".join(stack + term if i in jets else term for i, term in enumerate(terms)) + "->" + stack + output

    def contract(*channels: Tensor) -> Tensor:
        given = dict(zip(jets, channels, strict=True))
        return torch.einsum(stacked, *(given.get(i, x) for i, x in enumerate(operands)))

    if len(jets) == 2:
        return Jet(bilinear(contract, *(moved[i].channels for i in jets)))
    y = contract(moved[jets[0]].channels)
    return Jet(y, _side_of_einsum(moved[jets[0]].side, terms[jets[0]], output, y.shape[1:]))


def _explicit(equation: str) -> str:
    if "->" in equation:
        return equation
    letters = equation.replace(",", "")
    return equation + "->" + "".join(sorted(c for c in set(letters) if letters.count(c) == 1))


def _side_of_einsum(side: Tensor | None, term: str, output: str, shape: torch.Size) -> Tensor | None:
    if side is None:
        return None
    side = narrowed(side)
    for dim in reversed([d for d, c in enumerate(term) if c not in output]):
        side = side.select(dim, 0)
    term = "".join(c for c in term if c in output)
    side = side.permute([term.index(c) for c in output if c in term])
    for dim, letter in enumerate(output):
        if letter not in term:
            side = side.unsqueeze(dim)
    return side.expand(shape)


def _folded(op: Callable[..., Tensor], dims: Callable[[Jet], range]) -> Callable[..., Jet]:
    """The rule of a linear op on images [B, …]: the stack joins the batch."""

    def rule(x: Jet, *args: Any, **kwargs: Any) -> Jet:
        x = mixable(x, dims(x))
        y = op(x.channels.flatten(0, 1), *args, **kwargs).unflatten(0, (len(x.channels), -1))
        return resided(x, y)

    return rule


def _all_but_batch(x: Jet) -> range:
    return range(1, x.dim())


_IMAGE_OPS = (
    "avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d interpolate upsample "
    "pixel_shuffle pixel_unshuffle unfold"
)
for _name in _IMAGE_OPS.split():
    jet_rule(getattr(F, _name))(_folded(getattr(F, _name), _all_but_batch))


@jet_rule(F.pad)
def pad(x: Jet, pad: Any, mode: str = "constant", value: float | None = None) -> Jet:
    if mode != "constant":
        return _folded(F.pad, _all_but_batch)(x, pad, mode)
    x = mixable(x, [-1 - i // 2 for i, width in enumerate(pad) if width])
    y = F.pad(x.channels, pad)
    if value:
        y = add_to_primal(y, F.pad(torch.zeros_like(x.primal), pad, value=value))
    return resided(x, y)
