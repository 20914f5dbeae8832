"""A transformer layer whose norms and residuals a condition modulates: the generators' trunk is made of it.

    x ← x + gate₁ · attention(scale₁ · norm(x) + shift₁)        x ← x + gate₂ · MLP(scale₂ · norm(x) + shift₂)

On a CPU, in fp32 and fp64, the layer is one op of C++ with its own backward pass. Everywhere else, under autocast and
without the C++ kernels it is plain torch, whose fused attention and matrix products are the kernels a GPU has for it;
so there is no Triton kernel. Neither differentiates twice: it is not for a decoder whose derivatives are penalised.

`formula` is the specification.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from compgen_fast.ops.arguments import refuse_forward_mode
from compgen_fast.ops.backends import define_op, serving

EPS = 1e-6
PARTS = 6  # shift, scale and gate, of attention and of the MLP
HIDDEN = 4  # the MLP's width, of the layer's
KEPT, KEPT_OF_ROW = 17, 4  # numbers that the forward pass leaves for each token: so many times its width, and so many

Attend = Callable[[Tensor], Tensor]
FUSED = serving("cpu") == "cpp"


class BlockWeights(NamedTuple):
    """Of a layer of width W; q, k and v are packed."""

    qkv: Tensor
    """[3W, W], and its bias [3W]."""
    qkv_bias: Tensor
    proj: Tensor
    """[W, W]."""
    proj_bias: Tensor
    fc1: Tensor
    """[4W, W]."""
    fc1_bias: Tensor
    fc2: Tensor
    """[W, 4W]."""
    fc2_bias: Tensor


def trunk_block(x: Tensor, modulation: Tensor, weights: BlockWeights, heads: int, *, causal: bool = False) -> Tensor:
    """One layer.

    Args:
        x: tokens [B, T, W].
        modulation: [B, 6, W]: shift, scale and gate of attention, then those of the MLP.
        weights: the layer's.
        heads: how many; a divisor of W.
        causal: whether a token sees only itself and those before it.

    Returns:
        [B, T, W]. All tensors get a gradient, which cannot be differentiated again.
    """
    _check(x, modulation, weights, heads)
    refuse_forward_mode("trunk_block", x=x, modulation=modulation)
    if not _is_fused(x, modulation, weights):
        return formula(x, modulation, weights, lambda qkv: attention(qkv, heads, causal))
    return torch.ops.compgen.trunk_block(x, modulation, *weights, heads, causal)[0]  # type: ignore[no-any-return]


def formula(x: Tensor, modulation: Tensor, weights: BlockWeights, attend: Attend) -> Tensor:
    """The layer in plain torch; ``attend`` takes packed q, k and v [B, T, 3W] to [B, T, W]."""
    shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = modulation.unsqueeze(2).unbind(1)
    attended = attend(F.linear(modulated(x, shift, scale), weights.qkv, weights.qkv_bias))
    x = torch.addcmul(x, gate, F.linear(attended, weights.proj, weights.proj_bias))
    hidden = F.gelu(F.linear(modulated(x, mlp_shift, mlp_scale), weights.fc1, weights.fc1_bias))
    return torch.addcmul(x, mlp_gate, F.linear(hidden, weights.fc2, weights.fc2_bias))


def modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """scale · norm(x) + shift."""
    return torch.addcmul(shift, scale, F.layer_norm(x, x.shape[-1:], eps=EPS))


def attention(qkv: Tensor, heads: int, causal: bool) -> Tensor:
    """[B, T, 3W] → [B, T, W]."""
    return merge_heads(F.scaled_dot_product_attention(*split_heads(qkv, heads), is_causal=causal))


def split_heads(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """[B, T, 3W] → three of [B, heads, T, W / heads]."""
    q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in qkv.chunk(3, -1))
    return q, k, v


def merge_heads(out: Tensor) -> Tensor:
    """[B, heads, T, D] → [B, T, heads · D]."""
    return out.transpose(1, 2).flatten(2)


def _is_fused(x: Tensor, modulation: Tensor, weights: BlockWeights) -> bool:
    if not FUSED or x.device.type != "cpu" or x.dtype not in (torch.float32, torch.float64):
        return False
    return not torch.is_autocast_enabled("cpu") and all(each.dtype == x.dtype for each in (modulation, *weights))


def _check(x: Tensor, modulation: Tensor, weights: BlockWeights, heads: int) -> None:
    if x.dim() != 3 or modulation.shape != (len(x), PARTS, x.shape[2]):
        raise ValueError(
            f"trunk_block: x is {list(x.shape)} and modulation {list(modulation.shape)}; expected [B, T, W] and "
            f"[B, {PARTS}, W]"
        )
    W = x.shape[2]
    if heads < 1 or W % heads:
        raise ValueError(f"trunk_block: {heads} heads do not divide a width of {W}; expected a divisor of it")
    expected = ((3 * W, W), (3 * W,), (W, W), (W,), (HIDDEN * W, W), (HIDDEN * W,), (W, HIDDEN * W), (W,))
    for name, each, shape in zip(BlockWeights._fields, weights, expected, strict=True):
        if each.shape != shape:
            raise ValueError(f"trunk_block: {name} is {list(each.shape)}; expected {list(shape)} for a width of {W}")


def _fake(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(x.shape[0] * x.shape[1] * (KEPT * x.shape[2] + KEPT_OF_ROW))


def _fake_backward(grad: Tensor, kept: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(each) for each in inputs[:-2])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.heads, ctx.causal = inputs
    ctx.save_for_backward(output[1], *tensors)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * (2 + len(BlockWeights._fields) + 2)
    if torch.is_grad_enabled():  # create_graph=True
        raise NotImplementedError(
            "trunk_block: its gradient cannot be differentiated again; leave create_graph out, or set "
            "COMPGEN_BACKEND=torch and use an attention that can"
        )
    found: Sequence[Tensor] = torch.ops.compgen.trunk_block_backward(grad, *ctx.saved_tensors, ctx.heads, ctx.causal)
    return (*found, None, None)


_TENSORS = "Tensor x, Tensor modulation, " + ", ".join(f"Tensor {name}" for name in BlockWeights._fields)
define_op(
    "trunk_block",
    f"({_TENSORS}, int heads, bool causal) -> (Tensor, Tensor)",
    reference=None,
    triton=None,
    fake=_fake,
    public=False,
)
define_op(
    "trunk_block_backward",
    f"(Tensor grad, Tensor kept, {_TENSORS}, int heads, bool causal) -> ({', '.join(['Tensor'] * 10)})",
    reference=None,
    triton=None,
    fake=_fake_backward,
    public=False,
)
torch.library.register_autograd("compgen::trunk_block", _differentiate, setup_context=_save)
