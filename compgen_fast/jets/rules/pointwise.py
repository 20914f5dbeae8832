"""Functions of one number: f, f' and f'' are all a rule needs.

    y = f(x)     y_u = f' x_u     y_v = f' x_v     y_uv = f' x_uv + f'' x_u x_v

GELU and SiLU of unsided jets run as one fused op each. A function with a kink (relu, abs, clamp) takes torch's
derivative there and has f'' = 0, as autograd has.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from compgen_fast.jets.jet import Jet, jet_rule, spellings
from compgen_fast.jets.rules.stores import stored
from compgen_fast.ops.jet_pointwise import jet_gelu, jet_silu

Derivatives = tuple[Tensor, Tensor, Tensor | None]  # f, f', f''; None where f'' is zero everywhere


def chain(x: Jet, f: Tensor, df: Tensor, ddf: Tensor | None) -> Jet:
    """The jet of f(x)."""
    moved = x.channels[1:] * df
    if x.side is not None or (ddf is None and len(x.channels) == 3):
        return Jet(torch.cat([f[None], moved]), x.side)
    if ddf is None:
        return Jet(torch.cat([f[None], moved]))
    bent = ddf * x.channels[1] * x.channels[2]
    if len(moved) == 3:
        bent = bent + moved[2]
    return Jet(torch.cat([f[None], moved[:2], bent[None]]))


def pointwise(*names: str) -> Callable[[Callable[..., Derivatives]], Callable[..., Derivatives]]:
    """Registers a function x, … → (f, f', f'') as the rule of every torch function of these names."""

    def register(derivatives: Callable[..., Derivatives]) -> Callable[..., Derivatives]:
        @jet_rule(*spellings(*names))
        def rule(x: Jet, *args: Any, inplace: bool = False, **kwargs: Any) -> Jet:
            if args and isinstance(args[-1], bool):  # nn.LeakyReLU and nn.ELU give it by position
                *args, inplace = args  # type: ignore[assignment]
            return stored(x, chain(x, *derivatives(x.primal, *args, **kwargs)), inplace)

        return derivatives

    return register


@jet_rule(*spellings("gelu"))
def gelu(x: Jet, approximate: str = "none") -> Jet:
    if x.side is None:
        return Jet(jet_gelu(x.channels, approximate))  # type: ignore[arg-type]
    return chain(x, *_gelu(x.primal, approximate))


@jet_rule(*spellings("silu"))
def silu(x: Jet, inplace: bool = False) -> Jet:
    y = Jet(jet_silu(x.channels)) if x.side is None else chain(x, *_silu(x.primal))
    return stored(x, y, inplace)


def _gelu(x: Tensor, approximate: str) -> Derivatives:
    """First order only: sided jets have no x_uv."""
    if approximate == "none":
        phi = torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
        return torch.nn.functional.gelu(x), torch.special.ndtr(x) + x * phi, None
    c, a = math.sqrt(2 / math.pi), 0.044715
    t = torch.tanh(c * (x + a * x**3))
    return 0.5 * x * (1 + t), 0.5 * (1 + t + x * (1 - t * t) * c * (1 + 3 * a * x * x)), None


def _silu(x: Tensor) -> Derivatives:
    s = torch.sigmoid(x)
    return x * s, s + x * s * (1 - s), None


@pointwise("relu")
def relu(x: Tensor) -> Derivatives:
    return torch.relu(x), (x > 0).to(x.dtype), None


@pointwise("leaky_relu")
def leaky_relu(x: Tensor, negative_slope: float = 0.01) -> Derivatives:
    slope = torch.full_like(x, negative_slope).masked_fill(x > 0, 1)
    return x * slope, slope, None


@pointwise("relu6")
def relu6(x: Tensor) -> Derivatives:
    return clamp(x, 0, 6)


@pointwise("hardtanh")
def hardtanh(x: Tensor, min_val: float = -1.0, max_val: float = 1.0) -> Derivatives:
    return x.clamp(min_val, max_val), ((x > min_val) & (x < max_val)).to(x.dtype), None


@pointwise("elu")
def elu(x: Tensor, alpha: float = 1.0) -> Derivatives:
    below = alpha * torch.exp(x.clamp(max=0))
    above = x > 0
    return torch.nn.functional.elu(x, alpha), torch.where(above, 1.0, below), below.masked_fill(above, 0)


@pointwise("celu")
def celu(x: Tensor, alpha: float = 1.0) -> Derivatives:
    below, above = torch.exp(x.clamp(max=0) / alpha), x > 0
    return torch.nn.functional.celu(x, alpha), torch.where(above, 1.0, below), (below / alpha).masked_fill(above, 0)


@pointwise("selu")
def selu(x: Tensor) -> Derivatives:
    scale, alpha = 1.0507009873554804934193349852946, 1.6732632423543772848170429916717
    y, slope, bend = elu(x, alpha)
    assert bend is not None
    return scale * y, scale * slope, scale * bend


@pointwise("hardswish")
def hardswish(x: Tensor) -> Derivatives:
    inside, above = (x.abs() < 3).to(x.dtype), (x >= 3).to(x.dtype)
    return torch.nn.functional.hardswish(x), inside * (2 * x + 3) / 6 + above, inside / 3


@pointwise("softplus")
def softplus(x: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Derivatives:
    s, linear = torch.sigmoid(beta * x), beta * x > threshold
    y = torch.nn.functional.softplus(x, beta, threshold)
    return y, s.masked_fill(linear, 1), (beta * s * (1 - s)).masked_fill(linear, 0)


@pointwise("mish")
def mish(x: Tensor) -> Derivatives:
    s, t = torch.sigmoid(x), torch.tanh(torch.nn.functional.softplus(x))
    ds, dt = s * (1 - s), s * (1 - t * t)
    ddt = ds * (1 - t * t) - 2 * s * t * dt
    return x * t, t + x * dt, 2 * dt + x * ddt


@pointwise("logsigmoid")
def logsigmoid(x: Tensor) -> Derivatives:
    s = torch.sigmoid(x)
    return torch.nn.functional.logsigmoid(x), 1 - s, -s * (1 - s)


@pointwise("tanh")
def tanh(x: Tensor) -> Derivatives:
    t = torch.tanh(x)
    slope = 1 - t * t
    return t, slope, -2 * t * slope


@pointwise("sigmoid", "expit")
def sigmoid(x: Tensor) -> Derivatives:
    s = torch.sigmoid(x)
    slope = s * (1 - s)
    return s, slope, slope * (1 - 2 * s)


@pointwise("softsign")
def softsign(x: Tensor) -> Derivatives:
    r = 1 / (1 + x.abs())
    return x * r, r * r, -2 * x.sign() * r**3


@pointwise("exp")
def exp(x: Tensor) -> Derivatives:
    y = torch.exp(x)
    return y, y, y


@pointwise("expm1")
def expm1(x: Tensor) -> Derivatives:
    y = torch.exp(x)
    return torch.expm1(x), y, y


@pointwise("log")
def log(x: Tensor) -> Derivatives:
    return torch.log(x), 1 / x, -1 / (x * x)


@pointwise("exp2")
def exp2(x: Tensor) -> Derivatives:
    y = torch.exp2(x)
    return y, math.log(2) * y, math.log(2) ** 2 * y


@pointwise("log2")
def log2(x: Tensor) -> Derivatives:
    slope = 1 / (math.log(2) * x)
    return torch.log2(x), slope, -slope / x


@pointwise("log10")
def log10(x: Tensor) -> Derivatives:
    slope = 1 / (math.log(10) * x)
    return torch.log10(x), slope, -slope / x


@pointwise("log1p")
def log1p(x: Tensor) -> Derivatives:
    r = 1 / (1 + x)
    return torch.log1p(x), r, -r * r


@pointwise("sin")
def sin(x: Tensor) -> Derivatives:
    y = torch.sin(x)
    return y, torch.cos(x), -y


@pointwise("cos")
def cos(x: Tensor) -> Derivatives:
    y = torch.cos(x)
    return y, -torch.sin(x), -y


@pointwise("sinh")
def sinh(x: Tensor) -> Derivatives:
    y = torch.sinh(x)
    return y, torch.cosh(x), y


@pointwise("cosh")
def cosh(x: Tensor) -> Derivatives:
    y = torch.cosh(x)
    return y, torch.sinh(x), y


@pointwise("erf")
def erf(x: Tensor) -> Derivatives:
    slope = 2 / math.sqrt(math.pi) * torch.exp(-x * x)
    return torch.erf(x), slope, -2 * x * slope


@pointwise("atan", "arctan")
def atan(x: Tensor) -> Derivatives:
    slope = 1 / (1 + x * x)
    return torch.atan(x), slope, -2 * x * slope * slope


@pointwise("sqrt")
def sqrt(x: Tensor) -> Derivatives:
    y = torch.sqrt(x)
    return y, 0.5 / y, -0.25 / (x * y)


@pointwise("rsqrt")
def rsqrt(x: Tensor) -> Derivatives:
    y = torch.rsqrt(x)
    return y, -0.5 * y**3, 0.75 * y**5


@pointwise("reciprocal")
def reciprocal(x: Tensor) -> Derivatives:
    y = torch.reciprocal(x)
    return y, -y * y, 2 * y**3


@pointwise("abs", "absolute")
def absolute(x: Tensor) -> Derivatives:
    return x.abs(), x.sign(), None


@pointwise("clamp", "clip")
def clamp(x: Tensor, min: Any = None, max: Any = None) -> Derivatives:
    kept = torch.ones_like(x, dtype=torch.bool)
    kept = kept if min is None else kept & (x >= min)
    kept = kept if max is None else kept & (x <= max)
    return x.clamp(min, max), kept.to(x.dtype), None


@pointwise("clamp_min")
def clamp_min(x: Tensor, min: Any) -> Derivatives:
    return clamp(x, min=min)


@pointwise("clamp_max")
def clamp_max(x: Tensor, max: Any) -> Derivatives:
    return clamp(x, max=max)
