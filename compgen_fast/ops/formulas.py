"""What the plain-torch formulas of the ops share: precision, masked slots, and second derivatives through them.

A backward kernel is an op of its own; its gradient is found by differentiating the reference formula of that backward
with autograd. The formula is made of ordinary torch ops, so third and higher derivatives follow by themselves.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def accumulation(*tensors: Tensor) -> list[Tensor]:
    """Half precision is computed in fp32, everything else in its own precision."""
    return [x.float() if x.dtype in (torch.float16, torch.bfloat16) else x for x in tensors]


def without_masked(slot_mask: Tensor | None, *slots: Tensor) -> list[Tensor]:
    """Slot tensors [B, S, H, D] with masked slots set to zero, so that 0 · NaN cannot leak."""
    return [x if slot_mask is None else x.masked_fill(~slot_mask[:, :, None, None], 0) for x in slots]


def pull_back(
    formula: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor | None], grads: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Vector-Jacobian product of ``formula`` at ``inputs``, itself differentiable where grad mode is on.

    An input that is None or needs no gradient gets None, and so does every input when no output has a gradient.
    """
    result: list[Tensor | None] = [None] * len(inputs)
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # view_as gives each input a node of its own: the graph of the product hangs below it, the caller's above it.
        local = [None if x is None else x.view_as(x) for x in inputs]
        wanted = {i: x for i, x in enumerate(local) if x is not None and x.requires_grad}
        pairs = [(out, grad) for out, grad in zip(formula(*local), grads, strict=True) if grad is not None]
        pairs = [(out, grad) for out, grad in pairs if out.requires_grad]
        if wanted and pairs:
            outputs, grad_outputs = zip(*pairs, strict=True)
            found = torch.autograd.grad(
                outputs, list(wanted.values()), grad_outputs, create_graph=create_graph, allow_unused=True
            )
            for i, grad in zip(wanted, found, strict=True):
                result[i] = grad
    return result
