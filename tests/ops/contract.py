"""What every slot op promises, as data: its functions, how to make its inputs, the eager code it is measured against.

``tests/ops/test_contract.py`` runs the same checks over every entry of ``OPS``. A new op adds an entry here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compgen_fast.ops import slot_competition, slot_cross_attention
from compgen_fast.ops.slot_competition import reference as competition_reference
from compgen_fast.ops.slot_cross_attention import reference as cross_attention_reference


@dataclass(frozen=True)
class Shape:
    B: int = 2
    N: int = 37
    H: int = 2
    S: int = 7
    D: int = 43


@dataclass(frozen=True)
class Op:
    name: str
    call: Callable[..., tuple[Tensor, Tensor]]  # (q, k, v, slot_mask, scale) -> (values, slot weights)
    oracle: Callable[..., tuple[Tensor, Tensor]]  # the same in plain torch; exact when given fp64
    eager: Callable[..., tuple[Tensor, Tensor]]  # what a user would write, in the dtype it is given
    pixels: tuple[int, ...]  # which of q, k, v are [B,N,H,D]; the others are [B,S,H,D]
    slack: float  # how many times eager's error may be ours
    arguments: tuple[Any, ...]  # what the raw op takes after (q, k, v, slot_mask, scale)

    def inputs(self, shape: Shape, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """q, k, v."""
        counts = [shape.N if i in self.pixels else shape.S for i in range(3)]
        return [torch.randn(shape.B, count, shape.H, shape.D, dtype=dtype) for count in counts]

    def slots(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Those of (q, k, v), or of their gradients, that belong to slots."""
        return [x for i, x in enumerate(tensors) if i not in self.pixels]

    @property
    def raw(self) -> Any:
        return getattr(torch.ops.compgen, self.name).default


def _eager_cross_attention(
    q: Tensor, k: Tensor, v: Tensor, slot_mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    logits = q @ k.transpose(-1, -2) * scale
    if slot_mask is not None:
        logits = logits.masked_fill(~slot_mask[:, None, None], float("-inf"))
    p = logits.softmax(-1)
    return (p @ v).transpose(1, 2), p.mean(1)


def _eager_competition(
    q: Tensor, k: Tensor, v: Tensor, slot_mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    logits = torch.einsum("bnhd,bshd->bnsh", k, q) * scale
    if slot_mask is not None:
        logits = logits.masked_fill(~slot_mask[:, None, :, None], float("-inf"))
    a = logits.flatten(2).softmax(-1).view(logits.shape)
    shares = a if slot_mask is None else a.masked_fill(~slot_mask[:, None, :, None], 0)
    mass = (shares + 1e-8).sum(1, keepdim=True)
    shares = (shares + 1e-8) / mass.masked_fill(mass == 0, 1)
    if slot_mask is not None:
        shares = shares.masked_fill(~slot_mask[:, None, :, None], 0)
    return torch.einsum("bnsh,bnhd->bshd", shares, v), a.sum(-1)


OPS = (
    Op(
        "slot_cross_attention",
        lambda q, k, v, slot_mask=None, scale=0.3: slot_cross_attention(q, k, v, slot_mask, scale),
        lambda q, k, v, slot_mask=None, scale=0.3: cross_attention_reference(q, k, v, slot_mask, scale, True),
        _eager_cross_attention,
        pixels=(0,),
        slack=2,  # another order of addition
        arguments=(True,),
    ),
    Op(
        "slot_competition",
        lambda q, k, v, slot_mask=None, scale=0.3: slot_competition(q, k, v, slot_mask, scale),
        lambda q, k, v, slot_mask=None, scale=0.3: competition_reference(q, k, v, slot_mask, scale, 1e-8, True)[:2],
        _eager_competition,
        pixels=(1, 2),
        slack=16,  # g·v − g·updates cancels when a slot won few inputs, and its two terms are rounded apart
        arguments=(1e-8, True),
    ),
)


def upstream(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Dense gradients for the outputs, the same for every implementation."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in outputs]


def run(
    function: Callable[..., Any], inputs: Sequence[Tensor], slot_mask: Tensor | None, scale: float | None
) -> list[Tensor]:
    """Both outputs and the gradients of q, k and v."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    outputs = function(*leaves, slot_mask, scale)
    return [*outputs, *torch.autograd.grad(outputs, leaves, upstream(outputs))]


def error(found: Tensor, exact: Tensor) -> float:
    """Largest difference, relative to the largest exact value."""
    if exact.numel() == 0:
        return 0.0
    return ((found.double() - exact).abs().max() / exact.abs().max().clamp(min=1e-30)).item()


def assert_as_exact_as_eager(op: Op, inputs: Sequence[Tensor], slot_mask: Tensor | None = None) -> None:
    """Outputs and gradients are at most ``op.slack`` times as far from the fp64 oracle as eager torch.

    Plus 16 roundings: what a sum of a hundred terms makes, for where eager is exact (in fp64 it is the oracle itself).
    """
    dtype, scale = inputs[0].dtype, inputs[0].shape[-1] ** -0.5
    exact = run(op.oracle, [x.double() for x in inputs], slot_mask, scale)
    ours = run(op.call, inputs, slot_mask, scale)
    eager = run(op.eager, inputs, slot_mask, scale)
    for name, found, peer, true in zip(("values", "weights", "dq", "dk", "dv"), ours, eager, exact, strict=True):
        bound = op.slack * error(peer, true) + 16 * torch.finfo(dtype).eps
        assert found.dtype == dtype and found.shape == true.shape
        assert error(found, true) <= bound, f"{op.name} {name}: error {error(found, true):.2e}, bound {bound:.2e}"
