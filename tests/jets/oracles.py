"""What jets are judged by, in fp64: reverse over reverse on plain torch, and central differences of exact gradients.

Nothing here uses forward mode, and nothing differentiates torch's layer_norm or batch_norm twice: nested jvp is wrong
through them, and so is the gradient of their second derivative (pytorch #196700).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from compgen_fast.jets import Jet

KINDS = ("full", "uv", "sided by row", "sided by element")


def random_jet(kind: str, shape: Sequence[int], positive: bool = False) -> Jet:
    channels = torch.randn(4, *shape, dtype=torch.float64)
    if positive:
        channels[0] = channels[0].abs() + 0.5
    if kind == "full":
        return Jet(channels)
    if kind == "uv":
        return Jet(channels[:3])
    rows = shape[:1] if kind == "sided by row" else shape
    return Jet(channels[:2], (torch.rand(rows) < 0.5).view(*rows, *(1,) * (len(shape) - len(rows))))


def channels_of(y: Any) -> Tensor:
    """All four channels, zeros where absent; a constant has no tangents. Written out, not taken from what is tested."""
    given = y.channels if isinstance(y, Jet) else y[None]
    zero = torch.zeros_like(given[0])
    if isinstance(y, Jet) and y.side is not None:
        given = torch.stack([given[0], torch.where(y.side, given[1], zero), torch.where(y.side, zero, given[1])])
    return torch.stack([*given, *(zero,) * (4 - len(given))])


def along(y: Tensor, t: Tensor) -> Tensor:
    """dy/dt for a scalar t, by differentiating the pull-back in its seed."""
    seed = torch.zeros_like(y, requires_grad=True)
    (pulled,) = torch.autograd.grad(y, t, seed, create_graph=True, allow_unused=True)
    if pulled is None or not pulled.requires_grad:
        return torch.zeros_like(y)
    found = torch.autograd.grad(pulled, seed, create_graph=True, allow_unused=True)[0]
    return torch.zeros_like(y) if found is None else found


def expanded(f: Callable[..., Tensor], inputs: Sequence[Any]) -> Tensor:
    """The four channels of f: the derivatives in s and t, at 0, of f(x + s x_u + t x_v + s t x_uv)."""
    s, t = (torch.zeros((), dtype=torch.float64, requires_grad=True) for _ in range(2))

    def point(x: Any) -> Any:
        if not isinstance(x, Jet):
            return x
        value, u, v, uv = channels_of(x)
        return value + s * u + t * v + s * t * uv

    y = f(*(point(x) for x in inputs))
    if not y.requires_grad:
        return channels_of(y)
    y_s, y_t = along(y, s), along(y, t)
    return torch.stack([y, y_s, y_t, along(y_s, t) if y_s.requires_grad else torch.zeros_like(y)])


def mixed_derivative(f: Callable[[Tensor], Tensor], z: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """D²f[u, v] by reverse over reverse, differentiable in z and in f's parameters."""
    s, t = (torch.zeros((), dtype=z.dtype, requires_grad=True) for _ in range(2))
    return along(along(f(z + s * u + t * v), s), t)


def mixed_difference(f: Callable[[Tensor], Tensor], z: Tensor, u: Tensor, v: Tensor, seed: Tensor) -> Tensor:
    """⟨seed, D²f[u, v]⟩ by fourth-order central differences of the exact gradient."""

    def slope(step: float) -> Tensor:
        point = (z.detach() + step * v).requires_grad_()
        (gradient,) = torch.autograd.grad(f(point), point, seed)
        return (gradient * u).sum()

    h = 1e-3
    return (8 * (slope(h) - slope(-h)) - (slope(2 * h) - slope(-2 * h))) / (12 * h)


def block_hessian_norms(f: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    """‖H_kl‖² [K, K], mean over the batch, of slots z [B, K, d]: the whole Hessian, by reverse over reverse."""
    hessian = torch.func.jacrev(torch.func.jacrev(lambda slots: f(slots[None])[0]))
    return torch.stack([hessian(sample).square().sum((0, 2, 4)) for sample in z]).mean(0)


def block_hessian_sum(f: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    """Σ_{k≠l} ‖H_kl‖², mean over the batch, of a decoder with one output dimension."""
    blocks = block_hessian_norms(f, z)
    return blocks.sum() - blocks.trace()


def layer_norm(x: Tensor, shape: Sequence[int], weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Tensor:
    """Layer norm by hand, right to any order."""
    dims = tuple(range(-len(shape), 0))
    c = x - x.mean(dims, keepdim=True)
    y = c * (c.square().mean(dims, keepdim=True) + eps).rsqrt()
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


class DecomposedLayerNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    logits = q @ k.mT * q.shape[-1] ** -0.5
    if mask is not None:
        logits = logits.masked_fill(~mask, float("-inf"))
    return logits.softmax(-1) @ v
