"""Attention without a mask for the encoders: many tokens, or a few slots that look at many tokens.

The kernel is flash-attn's where it is installed and can serve the call, torch's scaled_dot_product_attention elsewhere.
Neither differentiates twice. Under ``torch.nn.attention.sdpa_kernel(SDPBackend.MATH)`` both stand back, and derivatives
of any order are right. What it is not for: pixels that look at a few slots (`slot_cross_attention`), slots that compete
(`slot_competition`).
"""

import functools
import importlib.util
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from compgen_fast.ops.arguments import autocast

MOST_HEAD_WIDTH = 256
"""What flash-attn's kernels hold in one tile."""
HALF = (torch.float16, torch.bfloat16)


class AttentionBackend(NamedTuple):
    name: str
    reason: str


def self_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q kᵀ / √D) v per head, [B, N, H, D] each; the result too."""
    if q.dim() != 4 or not q.shape == k.shape == v.shape:
        raise ValueError(
            f"self_attention: q, k and v have shapes {list(q.shape)}, {list(k.shape)} and {list(v.shape)}; "
            "expected one shape [B, N, H, D] for all three (for other keys than queries, use cross_attention)"
        )
    return _attend(q, k, v)


def cross_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same from queries q [B, M, H, D] to k and v [B, N, H, D]: [B, M, H, D]."""
    fits = q.dim() == k.dim() == 4 and k.shape == v.shape and (len(q), *q.shape[2:]) == (len(k), *k.shape[2:])
    if not fits:
        raise ValueError(
            f"cross_attention: q, k and v have shapes {list(q.shape)}, {list(k.shape)} and {list(v.shape)}; "
            "expected q [B, M, H, D] and k, v [B, N, H, D] with one batch, one number of heads and one head width"
        )
    return _attend(q, k, v)


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = autocast(q, k, v)
    if flash_serves(q):
        from flash_attn import flash_attn_func

        out: Tensor = flash_attn_func(q, k, v, deterministic=torch.are_deterministic_algorithms_enabled())
        return out
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v).transpose(1, 2)


def flash_serves(q: Tensor) -> bool:
    """Whether flash-attn takes queries like these."""
    fits = q.is_cuda and q.dtype in HALF and q.shape[-1] <= MOST_HEAD_WIDTH
    # A compiled graph is never differentiated twice, and dynamo cannot read this switch.
    once = torch.compiler.is_compiling() or torch.backends.cuda.flash_sdp_enabled()
    return fits and once and not flash_missing()


@torch.compiler.assume_constant_result
def flash_missing() -> str:
    """Why flash-attn cannot run on this machine's GPU, or an empty string."""
    if not torch.cuda.is_available():
        return "no CUDA or ROCm device"
    if not flash_installed():
        return "flash-attn is not installed (pip install --no-build-isolation flash-attn)"
    if not torch.version.hip and torch.cuda.get_device_capability() < (8, 0):
        return "flash-attn needs compute capability 8.0 or newer"
    return ""


@functools.cache
def flash_installed() -> bool:
    return importlib.util.find_spec("flash_attn") is not None


def attention_backend(device: str | torch.device) -> AttentionBackend:
    """Which kernel serves self-attention on a device, and why."""
    if torch.device(device).type != "cuda":
        return AttentionBackend("torch", "flash-attn has no CPU kernels")
    if missing := flash_missing():
        return AttentionBackend("torch", missing)
    return AttentionBackend(
        "flash-attn", f"installed; fp16 and bf16, heads up to {MOST_HEAD_WIDTH} wide, torch serves the rest"
    )
