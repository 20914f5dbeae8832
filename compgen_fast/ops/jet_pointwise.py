"""GELU and SiLU of second-order jets (jet_arithmetic.py says what a jet is), in one pass over memory.

    y = f(x)     y_u = f' x_u     y_v = f' x_v     y_uv = f' x_uv + f'' x_u x_v

Backward, with ĝ the gradient's channels reversed: x̂ = f'(x)·ĝ in jet arithmetic, reversed again; this needs f'''.

    gelu          f = x Φ(x)    Φ the distribution function of the normal distribution
    gelu, tanh    f = x σ(h)    h = 2 √(2/π) (x + 0.044715 x³), which is x (1 + tanh(h/2)) / 2
    silu          f = x σ(x)

The functions named ``reference`` are the specification, the fp64 oracle of the tests and the torch backend.
"""

import math
from typing import Any, Literal

import torch
from torch import Tensor

from compgen_fast.ops.arguments import refuse_forward_mode
from compgen_fast.ops.backends import define_op
from compgen_fast.ops.formulas import accumulation, pull_back
from compgen_fast.ops.jet_arithmetic import check_channels, expansion

Derivatives = tuple[Tensor, Tensor, Tensor, Tensor]  # f, f', f'', f'''


def jet_gelu(x: Tensor, approximate: Literal["none", "tanh"] = "none") -> Tensor:
    """GELU of a jet.

    Args:
        x: [4, …] = (x, x_u, x_v, x_uv), or [3, …] where x_uv is zero.
        approximate: as torch.nn.functional.gelu: "none" for the exact form, "tanh" for the approximation.

    Returns:
        the jet of gelu(x), [4, …]. Derivatives of any order are right; beyond the first they run in plain torch.
    """
    check_channels("jet_gelu", "x", x, (3, 4), "…")
    if approximate not in ("none", "tanh"):
        raise ValueError(f"jet_gelu: approximate is {approximate!r}; expected 'none' or 'tanh'")
    refuse_forward_mode("jet_gelu", x=x)
    return torch.ops.compgen.jet_gelu(x, approximate == "tanh")  # type: ignore[no-any-return]


def jet_silu(x: Tensor) -> Tensor:
    """SiLU of a jet: x [4, …] = (x, x_u, x_v, x_uv), or [3, …] where x_uv is zero, to the jet of x σ(x), [4, …].

    Derivatives of any order are right; beyond the first they run in plain torch.
    """
    check_channels("jet_silu", "x", x, (3, 4), "…")
    refuse_forward_mode("jet_silu", x=x)
    return torch.ops.compgen.jet_silu(x)  # type: ignore[no-any-return]


def _gated(x: Tensor, gate: Tensor, slope: Tensor, second: Tensor, third: Tensor) -> Derivatives:
    """The derivatives of x · gate(x), given those of the gate."""
    return x * gate, gate + x * slope, 2 * slope + x * second, 3 * second + x * third


def _gelu(x: Tensor, tanh: bool) -> Derivatives:
    if not tanh:
        density = torch.exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi))
        return _gated(x, torch.special.ndtr(x), density, -x * density, (x * x - 1) * density)
    c, a = 2 * math.sqrt(2 / math.pi), 0.044715
    slope, second, third = c + 3 * a * c * x * x, 6 * a * c * x, 6 * a * c  # of h = c x + a c x³
    s, ds, dds, ddds = _sigmoid(c * x + a * c * x * x * x)
    return _gated(
        x,
        s,
        ds * slope,
        dds * slope * slope + ds * second,
        ddds * slope * slope * slope + 3 * dds * slope * second + ds * third,
    )


def _sigmoid(x: Tensor) -> Derivatives:
    s = torch.sigmoid(x)
    ds = s * (1 - s)
    return s, ds, ds * (1 - 2 * s), ds * (1 - 6 * ds)


def _silu(x: Tensor) -> Derivatives:
    return _gated(x, *_sigmoid(x))


def _apply(f: Derivatives, x: Tensor, dtype: torch.dtype) -> Tensor:
    return expansion(x).apply(*f[:3]).stacked(dtype)


def _apply_backward(f: Derivatives, grad: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    slope = expansion(x).apply(*f[1:])
    return (slope * expansion(grad).reversed()).reversed().stacked(dtype, x.shape[0])


def gelu_reference(x: Tensor, tanh: bool) -> Tensor:
    """The op in plain torch."""
    (exact,) = accumulation(x)
    return _apply(_gelu(exact[0], tanh), exact, x.dtype)


def gelu_reference_backward(grad: Tensor, x: Tensor, tanh: bool) -> Tensor:
    """The gradient in plain torch, by formula and differentiable: second derivatives go through this function."""
    exact_grad, exact = accumulation(grad, x)
    return _apply_backward(_gelu(exact[0], tanh), exact_grad, exact, x.dtype)


def silu_reference(x: Tensor) -> Tensor:
    """The op in plain torch."""
    (exact,) = accumulation(x)
    return _apply(_silu(exact[0]), exact, x.dtype)


def silu_reference_backward(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient in plain torch, by formula and differentiable: second derivatives go through this function."""
    exact_grad, exact = accumulation(grad, x)
    return _apply_backward(_silu(exact[0]), exact_grad, exact, x.dtype)


def _fake(x: Tensor, *rest: Any) -> Tensor:
    return x.new_empty((4, *x.shape[1:]))


def _fake_backward(grad: Tensor, x: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(x.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, *ctx.rest = inputs
    ctx.save_for_backward(x)


def _save_backward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    grad, x, *ctx.rest = inputs
    ctx.save_for_backward(grad, x)


def _define(name: str, form: str, reference: Any, reference_backward: Any) -> None:
    """Registers jet_name and its backward; ``form`` is the schema of the arguments after x."""

    def differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        backward = getattr(torch.ops.compgen, f"jet_{name}_backward")
        return (backward(grad, x, *ctx.rest), *(None for _ in ctx.rest))

    def differentiate_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        pulled = pull_back(lambda g, x: (reference_backward(g, x, *ctx.rest),), ctx.saved_tensors, (grad,))
        return (*pulled, *(None for _ in ctx.rest))

    define_op(
        f"jet_{name}",
        f"(Tensor x{form}) -> Tensor",
        reference=reference,
        triton=f"jet_pointwise:{name}_forward",
        fake=_fake,
        public=True,
    )
    define_op(
        f"jet_{name}_backward",
        f"(Tensor grad, Tensor x{form}) -> Tensor",
        reference=reference_backward,
        triton=f"jet_pointwise:{name}_backward",
        fake=_fake_backward,
        public=False,
    )
    torch.library.register_autograd(f"compgen::jet_{name}", differentiate, setup_context=_save)
    torch.library.register_autograd(
        f"compgen::jet_{name}_backward", differentiate_backward, setup_context=_save_backward
    )


_define("gelu", ", bool tanh", gelu_reference, gelu_reference_backward)
_define("silu", "", silu_reference, silu_reference_backward)
