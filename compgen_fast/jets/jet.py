"""A tensor that carries how it moves: x + ε_u x_u + ε_v x_v + ε_u ε_v x_uv with ε_u² = ε_v² = 0.

Run a decoder on slots whose tangents are u and v, and x_uv of its output is the mixed second derivative D²f[u, v],
exact and differentiable. ``Jet`` looks like its value x to ordinary code and holds its channels in ``.channels``:

    full    [4, …]  x, x_u, x_v, x_uv
    uv      [3, …]  x, x_u, x_v           x_uv is zero
    sided   [2, …]  x, x_t, and ``side``  each element is moved by u (side True) or by v (False), never by both

Channels that are zero by structure are absent, not computed. Slots start sided, since each slot is moved by u or by v,
and stay so, at half the work, until slots meet. A plain tensor beside a jet is a constant. ``side`` has the shape of x,
with stride 0 along the dimensions in which it does not vary; that is how a rule knows which dimensions it may mix.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import resolve_name

Rule = Callable[..., Any]
AnyRule = TypeVar("AnyRule", bound=Rule)
RULES: dict[Any, Rule] = {}


def jet_rule(*functions: Any) -> Callable[[AnyRule], AnyRule]:
    """Registers a rule for torch functions: it is called with the function's own arguments when one of them is a jet.

        @jet_rule(torch.foo, torch.Tensor.foo)
        def foo(x: Jet) -> Jet: ...

    A rule may call torch functions on jets (whatever has rules composes) or work on ``x.channels``.
    """

    def register(rule: AnyRule) -> AnyRule:
        for function in functions:
            RULES[function] = rule
        return rule

    return register


class Jet(Tensor):
    """See the module's docstring. Made by ``Jet(channels)`` or, for slots, ``Jet(channels, side)``."""

    channels: Tensor
    side: Tensor | None
    aliased: bool

    @staticmethod
    def __new__(cls, channels: Tensor, side: Tensor | None = None) -> "Jet":
        if channels.dim() < 1 or len(channels) not in ((3, 4) if side is None else (2,)):
            expected = "3 or 4 channels, or 2 with a side"
            raise ValueError(f"Jet: channels have shape {list(channels.shape)}; expected [C, …] with {expected}")
        shape = channels.shape[1:]
        jet = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=channels.dtype, device=channels.device)
        jet.channels, jet.aliased = channels, False
        jet.side = None if side is None else side.expand(shape)
        return jet

    @classmethod
    @torch.compiler.disable  # traced, rules that write in place come out wrong, and dynamo does not say so
    def __torch_function__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        rule = RULES.get(func)
        if rule is None:
            raise NotImplementedError(_no_rule(func))
        return rule(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> Any:
        raise NotImplementedError(_no_rule(func))

    @property
    def primal(self) -> Tensor:
        """The value x, a plain tensor."""
        return self.channels[0]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        kind = "sided" if self.side is not None else {3: "uv", 4: "full"}[len(self.channels)]
        return f"Jet({kind}, shape={list(self.shape)}, dtype={self.dtype}, device={self.device})"

    __str__ = __repr__


def _no_rule(func: Any) -> str:
    name = resolve_name(func) or str(func)
    return (
        f"jets: no rule for {name}. Rewrite the decoder with ops that have one, or register your own:\n"
        f"    from compgen_fast.jets import Jet, jet_rule\n"
        f"    @jet_rule({name})  # and its other spellings: torch.foo, torch.nn.functional.foo, torch.Tensor.foo\n"
        f"    def rule(x: Jet, *args, **kwargs) -> Jet: ...  # compose torch functions, or use x.channels"
    )


def varies(side: Tensor, dim: int) -> bool:
    """Whether side may differ along dim, judged by its stride alone (no look at the data, no synchronisation)."""
    return side.shape[dim] > 1 and side.stride(dim) != 0


def narrowed(side: Tensor, dims: Iterable[int] | None = None) -> Tensor:
    """side with the dimensions in which it does not vary (of ``dims``, when given) cut to size 1."""
    for dim in range(side.dim()) if dims is None else dims:
        if not varies(side, dim) and side.shape[dim] > 1:
            side = side.narrow(dim, 0, 1)
    return side


def same_side(a: Tensor, b: Tensor) -> bool:
    """Whether two sides of one shape are one view of one memory. Equal copies count as different: dearer, not wrong."""
    strides = [(p, q) for p, q, size in zip(a.stride(), b.stride(), a.shape, strict=True) if size > 1]
    return a.data_ptr() == b.data_ptr() and all(p == q for p, q in strides)


def unsided(x: Jet) -> Jet:
    """The same jet with its u and v channels apart."""
    if x.side is None:
        return x
    value, tangent = x.channels
    return Jet(torch.stack([value, tangent.masked_fill(~x.side, 0), tangent.masked_fill(x.side, 0)]))


def mixable(x: Jet, dims: Iterable[int]) -> Jet:
    """x, unsided if its side varies along one of ``dims``: what a rule that mixes those dimensions starts from."""
    if x.side is None or not any(varies(x.side, dim) for dim in dims):
        return x
    return unsided(x)


def resided(x: Jet, channels: Tensor) -> Jet:
    """A jet of x's kind from channels that differ in shape only where x's side does not vary."""
    return Jet(channels, None if x.side is None else narrowed(x.side).expand(channels.shape[1:]))


def aligned(channels: Tensor, ndim: int) -> Tensor:
    """Channels with dimensions of size 1 put after the stack, so that values of ``ndim`` dimensions broadcast."""
    missing = ndim - (channels.dim() - 1)
    return channels if missing <= 0 else channels.reshape(len(channels), *(1,) * missing, *channels.shape[1:])


def padded(channels: Tensor, count: int) -> Tensor:
    """Channels with zeros for the absent ones."""
    missing = count - len(channels)
    if not missing:
        return channels
    return torch.cat([channels, channels.new_zeros(missing, *channels.shape[1:])])


def in_common(a: Jet, b: Jet) -> tuple[Jet, Jet]:
    """Two jets that are to meet element by element: both sided by one side, or both unsided."""
    if a.side is not None and b.side is not None:
        shape = torch.broadcast_shapes(a.shape, b.shape)
        if same_side(a.side.expand(shape), b.side.expand(shape)):
            return a, b
    return unsided(a), unsided(b)


def common_side(a: Jet, b: Jet) -> Tensor | None:
    """The side of what two jets in common make."""
    return None if a.side is None else a.side.expand(torch.broadcast_shapes(a.shape, b.shape))


def spellings(*names: str, dunder: bool = False) -> list[Any]:
    """Every function torch spells by one of these names: torch.f, torch.nn.functional.f, torch.Tensor.f (and __f__)."""
    homes = (torch, torch.nn.functional, torch.special, torch.Tensor)
    found = [getattr(home, name) for name in names for home in homes if hasattr(home, name)]
    if dunder:
        found += [getattr(Tensor, f"__{name}__") for name in names if hasattr(Tensor, f"__{name}__")]
    if not found:
        raise ValueError(f"torch has no function named {names}")
    return found
