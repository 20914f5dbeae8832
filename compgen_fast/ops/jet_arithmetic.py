"""Second-order mixed Taylor expansions in plain torch: the arithmetic the references of the jet ops are written in.

A jet is x + ε_u x_u + ε_v x_v + ε_u ε_v x_uv with ε_u² = ε_v² = 0: a value, its derivatives along two directions, and
the mixed second derivative. Tensors hold it stacked, [4, …] = (x, x_u, x_v, x_uv). Fewer channels state what is zero by
construction: [3, …] has no x_uv, [1, …] does not depend on the slots at all.

**The adjoint of a jet op is the ordinary adjoint in jet arithmetic, with the gradient's channels reversed.** For a
gradient g of y let ĝ = (g_uv, g_v, g_u, g). Then Σ_c g_c y_c is the ε_u ε_v coefficient of the product ĝ·y, so whatever
moves a factor from y to ĝ in ordinary algebra does so here: for y = f(x), x̂ = f'(x)·ĝ, and x̂ reversed is the gradient
of x. Every backward pass of the jet ops, in torch, C++ and Triton, is its textbook formula on another number type.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Union

import torch
from torch import Tensor

from compgen_fast.ops.arguments import DTYPES


@dataclass(frozen=True)
class Expansion:
    """The four channels of a jet, with + − · and functions of it; a plain tensor or number is a constant."""

    x: Tensor
    u: Tensor
    v: Tensor
    uv: Tensor

    def __add__(self, other: "Expansion") -> "Expansion":
        return Expansion(self.x + other.x, self.u + other.u, self.v + other.v, self.uv + other.uv)

    def __sub__(self, other: "Expansion") -> "Expansion":
        return self + other * -1.0

    def __mul__(self, other: Union["Expansion", Tensor, float]) -> "Expansion":
        if isinstance(other, Expansion):
            return bilinear(torch.mul, self, other)
        return self.each(lambda channel: channel * other)

    def each(self, linear: Callable[[Tensor], Tensor]) -> "Expansion":
        """A linear map of the jet: the same on every channel."""
        return Expansion(linear(self.x), linear(self.u), linear(self.v), linear(self.uv))

    def apply(self, f: Tensor, df: Tensor, ddf: Tensor) -> "Expansion":
        """f of the jet, given f, f' and f'' at x."""
        return Expansion(f, df * self.u, df * self.v, df * self.uv + ddf * self.u * self.v)

    def reversed(self) -> "Expansion":
        """(uv, v, u, x): from a gradient to what multiplies a jet, and back."""
        return Expansion(self.uv, self.v, self.u, self.x)

    def stacked(self, dtype: torch.dtype, channels: int = 4) -> Tensor:
        return torch.stack((self.x, self.u, self.v, self.uv)[:channels]).to(dtype)


def bilinear(product: Callable[[Tensor, Tensor], Tensor], a: Expansion, b: Expansion) -> Expansion:
    """A product of two jets that is linear in each, by the product rule."""
    return Expansion(
        product(a.x, b.x),
        product(a.u, b.x) + product(a.x, b.u),
        product(a.v, b.x) + product(a.x, b.v),
        product(a.uv, b.x) + product(a.u, b.v) + product(a.v, b.u) + product(a.x, b.uv),
    )


def expansion(x: Tensor) -> Expansion:
    """The jet stacked in x [1, 3 or 4, …]; missing channels are zero."""
    zero = torch.zeros_like(x[0])
    channels = [x[c] if c < x.shape[0] else zero for c in range(4)]
    return Expansion(*channels)


def check_channels(op: str, name: str, x: Tensor, channels: tuple[int, ...], rest: str) -> None:
    """Checks that x is floating and has one of the numbers of ``channels`` in dim 0; ``rest`` names its other dims."""
    if x.dtype not in DTYPES:
        raise TypeError(f"{op}: {name} is {x.dtype}; expected one of {', '.join(map(str, DTYPES))}")
    if x.dim() < 1 or x.shape[0] not in channels:
        counts = " or ".join(map(str, channels))
        raise ValueError(
            f"{op}: {name} has shape {list(x.shape)}; expected [{counts}, {rest}], the channels stacked first"
        )
