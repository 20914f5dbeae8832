"""A linear map of a jet (jet_arithmetic.py says what a jet is): the same map on every channel, the bias on the value.

    y_c = W x_c        y_0 += bias

One GEMM of the library on the stacked channels, on every device. The map is its own adjoint with W transposed, so its
gradient is the op again, and derivatives of any order follow.

Who calls it: the rule of ``torch.nn.functional.linear``. It has no Triton kernel: cuBLAS is the kernel.
"""

from typing import Any

import torch
from torch import Tensor

from compgen_fast.ops.arguments import refuse_forward_mode
from compgen_fast.ops.backends import define_op


def jet_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [C, …, I], weight [O, I] and bias [O], all of one dtype, to [C, …, O]."""
    if weight.dim() != 2 or x.shape[-1] != weight.shape[1] or (bias is not None and bias.shape != weight.shape[:1]):
        given = "no bias" if bias is None else f"bias {list(bias.shape)}"
        raise ValueError(
            f"linear of a jet: the value has shape {list(x.shape[1:])}, weight {list(weight.shape)} and {given}; "
            "expected […, I], [O, I] and [O]"
        )
    refuse_forward_mode("jet_linear", x=x, weight=weight)
    return torch.ops.compgen.jet_linear(x, weight, bias)  # type: ignore[no-any-return]


def reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y = torch.nn.functional.linear(x, weight)
    if bias is not None:
        y[0] += bias
    return y


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, _ = inputs
    ctx.save_for_backward(x, weight)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    of_x, of_weight, of_bias = ctx.needs_input_grad
    return (
        jet_linear(grad, weight.t()) if of_x else None,
        grad.flatten(0, -2).t() @ x.flatten(0, -2) if of_weight else None,
        grad[0].reshape(-1, len(weight)).sum(0) if of_bias else None,
    )


define_op(
    "jet_linear",
    "(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    reference=reference,
    triton=None,
    fake=_fake,
    public=False,
)
torch.library.register_autograd("compgen::jet_linear", _differentiate, setup_context=_save)
