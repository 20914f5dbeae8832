"""slot_cross_attention against what a user would write or call instead."""

import importlib.util

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from compgen_fast.bench.harness import Case, Contender, Outputs
from compgen_fast.bench.ops.common import Shape, backend_of
from compgen_fast.ops import slot_cross_attention
from compgen_fast.ops.slot_cross_attention import reference

NO_WEIGHTS = "no slot weights"


def case(shape: Shape, dtype: torch.dtype, device: str) -> Case:
    return Case(
        suite="slots",
        name=f"slot_cross_attention {shape}",
        inputs=lambda: shape.tensors({"q": shape.N, "k": shape.S, "v": shape.S}, dtype, device),
        outputs=("out", "weights"),
        oracle=lambda q, k, v: reference(q, k, v, None, shape.D**-0.5, True),
        ours=Contender("ours", slot_cross_attention, backend=backend_of("slot_cross_attention", device)),
        peers=peers(dtype, device),
        dtype=dtype,
        device=device,
    )


def peers(dtype: torch.dtype, device: str) -> tuple[Contender, ...]:
    return (
        Contender("eager", eager),
        Contender("torch.compile", torch.compile(eager, dynamic=False, fullgraph=True)),
        Contender("SDPA", sdpa, does_less=NO_WEIGHTS),
        Contender("flex_attention", flex, does_less=NO_WEIGHTS),
        Contender("flash-attn", flash, does_less=NO_WEIGHTS, unsupported=no_flash(dtype, device)),
    )


def eager(q: Tensor, k: Tensor, v: Tensor) -> Outputs:
    """Slots first, [B, H, S, N], and the scale on the small side.

    The textbook order [B, H, N, S] takes 1.1 to 1.6 times as long on CPU: a softmax over a last axis of 7 is not
    vectorised, one over the axis before 4096 pixels is.
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    p = (k * q.shape[-1] ** -0.5 @ q.transpose(-1, -2)).softmax(-2)
    return (p.transpose(-1, -2) @ v).transpose(1, 2), p.mean(1).transpose(1, 2)


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Outputs:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return (F.scaled_dot_product_attention(q, k, v).transpose(1, 2),)


# Fused only under torch.compile; called bare it holds all the scores. Without fullgraph, dynamo gives up on the
# function for good once it has refused inputs that require gradients, and then runs it bare.
_compiled_flex = torch.compile(flex_attention, dynamic=False, fullgraph=True)


def flex(q: Tensor, k: Tensor, v: Tensor) -> Outputs:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return (_compiled_flex(q, k, v).transpose(1, 2),)


def flash(q: Tensor, k: Tensor, v: Tensor) -> Outputs:
    from flash_attn import flash_attn_func

    return (flash_attn_func(q, k, v),)


def no_flash(dtype: torch.dtype, device: str) -> str:
    """Why flash-attn cannot take part, or an empty string."""
    if device != "cuda":
        return "needs CUDA"
    if dtype not in (torch.float16, torch.bfloat16):
        return "needs fp16 or bf16"
    return "" if importlib.util.find_spec("flash_attn") else "flash-attn is not installed"
