"""LayerNorm and RMSNorm of second-order jets (jet_arithmetic.py says what a jet is), in one pass over memory.

Everything is jet arithmetic; means are over the last axis:

    c = x − mean(x)  (RMSNorm: c = x)      r = (mean(c²) + eps)^(-1/2)      n = c r      y = n weight + bias

Backward, with ĝ the gradient's channels reversed and ĝ_n = ĝ weight:

    x̂ = r (ĝ_n − mean(ĝ_n) − n mean(ĝ_n n))      (RMSNorm: without mean(ĝ_n)), reversed again
    grad_weight = Σ over rows and channels of g_c n_c      grad_bias = Σ over rows of g: the bias meets the value alone

torch's nested jvp is silently wrong here (pytorch #196700). The functions named ``reference`` are the specification,
the fp64 oracle of the tests and the torch backend.
"""

from typing import Any

import torch
from torch import Tensor

from compgen_fast.ops.arguments import refuse_forward_mode
from compgen_fast.ops.backends import define_op
from compgen_fast.ops.formulas import accumulation, pull_back
from compgen_fast.ops.jet_arithmetic import Expansion, check_channels, expansion


def jet_layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """LayerNorm of a jet over its last axis.

    Args:
        x: [4, …, D] = (x, x_u, x_v, x_uv), or [3, …, D] where x_uv is zero.
        weight, bias: [D], in x's dtype, or None for ones and zeros.
        eps: added to the variance.

    Returns:
        the jet of layer_norm(x), [4, …, D]. Derivatives of any order are right; beyond the first they run in plain
        torch. Autocast runs it in fp32, as torch's own norm.
    """
    x, weight, bias = _checked("jet_layer_norm", eps, x, weight=weight, bias=bias)
    return torch.ops.compgen.jet_layer_norm(x, weight, bias, float(eps))  # type: ignore[no-any-return]


def jet_rms_norm(x: Tensor, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """RMSNorm of a jet over its last axis; arguments as :func:`jet_layer_norm`, eps that of x's dtype when None."""
    x, weight = _checked("jet_rms_norm", eps, x, weight=weight)
    eps = torch.finfo(x.dtype).eps if eps is None else float(eps)
    return torch.ops.compgen.jet_rms_norm(x, weight, eps)  # type: ignore[no-any-return]


def _checked(op: str, eps: float | None, x: Tensor, **parameters: Tensor | None) -> Any:
    """x and the parameters, cast to fp32 under autocast, once they are known to fit each other."""
    check_channels(op, "x", x, (3, 4), "…, D")
    if x.dim() < 2 or x.shape[-1] < 1:
        raise ValueError(f"{op}: x has shape {list(x.shape)}; expected [3 or 4, …, D] with D at least 1")
    if eps is not None and eps < 0:
        raise ValueError(f"{op}: eps is {eps}; expected 0 or a small positive number such as 1e-5")
    for name, parameter in parameters.items():
        if parameter is not None and parameter.shape != x.shape[-1:]:
            raise ValueError(f"{op}: {name} has shape {list(parameter.shape)}; expected [D] = [{x.shape[-1]}]")
        if parameter is not None and parameter.device != x.device:
            raise ValueError(f"{op}: {name} is on {parameter.device} but x is on {x.device}; move one of them")
    given = {"x": x} | {name: parameter for name, parameter in parameters.items() if parameter is not None}
    refuse_forward_mode(op, **given)
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
        given = {name: tensor.float() for name, tensor in given.items()}
    for name, tensor in given.items():
        if tensor.dtype != given["x"].dtype:
            raise TypeError(f"{op}: {name} is {tensor.dtype} but x is {x.dtype}; cast one, or use autocast")
    return tuple(given.get(name) for name in ("x", *parameters))


def _normalise(x: Expansion, eps: float, centred: bool) -> tuple[Expansion, Expansion]:
    """n [.., D] and r [.., 1]."""
    c = x - x.each(_mean) if centred else x
    power = (c * c).each(_mean)
    r = torch.rsqrt(power.x + eps)
    inverse = power.apply(r, -0.5 * r**3, 0.75 * r**5)
    return c * inverse, inverse


def _mean(channel: Tensor) -> Tensor:
    return channel.mean(-1, keepdim=True)


def _forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centred: bool) -> Tensor:
    dtype = x.dtype
    (x,) = accumulation(x)
    y, _ = _normalise(expansion(x), eps, centred)
    if weight is not None:
        y = y * weight.to(x.dtype)
    if bias is not None:
        y = Expansion(y.x + bias.to(x.dtype), y.u, y.v, y.uv)
    return y.stacked(dtype)


def _backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, eps: float, centred: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = x.dtype
    grad, x = accumulation(grad, x)
    n, r = _normalise(expansion(x), eps, centred)
    g = expansion(grad).reversed()
    grad_weight, grad_bias = (per_row.reshape(-1, x.shape[-1]).sum(0) for per_row in ((g * n).uv, g.uv))
    if weight is not None:
        g = g * weight.to(x.dtype)
    inner = g - g.each(_mean) if centred else g
    grad_x = r * (inner - n * (g * n).each(_mean))
    return grad_x.reversed().stacked(dtype, x.shape[0]), grad_weight.to(dtype), grad_bias.to(dtype)


def layer_norm_reference(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """The op in plain torch."""
    return _forward(x, weight, bias, eps, centred=True)


def layer_norm_reference_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients in plain torch, by formula and differentiable: second derivatives go through this function."""
    return _backward(grad, x, weight, eps, centred=True)


def rms_norm_reference(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """The op in plain torch."""
    return _forward(x, weight, None, eps, centred=False)


def rms_norm_reference_backward(grad: Tensor, x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """The gradients in plain torch, by formula and differentiable: second derivatives go through this function."""
    return _backward(grad, x, weight, eps, centred=False)[:2]


def _fake(x: Tensor, *rest: Any) -> Tensor:
    return x.new_empty((4, *x.shape[1:]))


def _fake_layer_norm_backward(grad: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[-1:]), x.new_empty(x.shape[-1:])


def _fake_rms_norm_backward(grad: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[-1:])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, *parameters, ctx.eps = inputs
    ctx.given = [parameter is not None for parameter in parameters]
    ctx.save_for_backward(x, parameters[0])


def _save_backward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.eps = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def _define(name: str, bias: str, outputs: str, reference: Any, reference_backward: Any, fake_backward: Any) -> None:
    """Registers jet_name and its backward; ``bias`` and ``outputs`` are what their schemas do not share."""

    def differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_x, *grads = getattr(torch.ops.compgen, f"jet_{name}_backward")(grad, x, weight, ctx.eps)
        return (grad_x, *(g if given else None for g, given in zip(grads, ctx.given, strict=True)), None)

    def differentiate_backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return (*pull_back(lambda *inputs: reference_backward(*inputs, ctx.eps), ctx.saved_tensors, grads), None)

    define_op(
        f"jet_{name}",
        f"(Tensor x, Tensor? weight{bias}, float eps) -> Tensor",
        reference=reference,
        triton=f"jet_norm:{name}_forward",
        fake=_fake,
        public=True,
    )
    define_op(
        f"jet_{name}_backward",
        f"(Tensor grad, Tensor x, Tensor? weight, float eps) -> {outputs}",
        reference=reference_backward,
        triton=f"jet_norm:{name}_backward",
        fake=fake_backward,
        public=False,
    )
    torch.library.register_autograd(f"compgen::jet_{name}", differentiate, setup_context=_save)
    torch.library.register_autograd(
        f"compgen::jet_{name}_backward", differentiate_backward, setup_context=_save_backward
    )


_define(
    "layer_norm",
    ", Tensor? bias",
    "(Tensor, Tensor, Tensor)",
    layer_norm_reference,
    layer_norm_reference_backward,
    _fake_layer_norm_backward,
)
_define("rms_norm", "", "(Tensor, Tensor)", rms_norm_reference, rms_norm_reference_backward, _fake_rms_norm_backward)
