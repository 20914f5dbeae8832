"""How far decoded candidates are from the images they should explain, and which way to move, in one pass over them.

    loss[c] = Σ_n w Σ_f (y[c,n,f] − x)²      grad[c,n,f] = ∂loss[c]/∂y[c,n,f] = 2 w (y[c,n,f] − x)

with x = x[images[c], pixels[n], f] and w = weights[images[c], pixels[n]]. Many candidates (restarts of a search) share
an image, and neither their copies of it nor the differences y − x ever exist in memory. What it is for: latent search,
where grad goes straight into the decoder's backward pass. What it is not for: a loss whose target is learnt, since x
gets no gradient.

Backward, for gradients g of loss and h of grad: dy = g grad + 2 w h. It is plain torch, and grad carries gradient
itself, so derivatives of any order follow. The function named ``reference`` is the specification, the fp64 oracle of
the tests and the torch backend.
"""

from typing import Any

import torch
from torch import Tensor

from compgen_fast.ops.arguments import DTYPES, refuse_forward_mode
from compgen_fast.ops.backends import define_op

MOST_COLOURS = 16


def recon_error(
    y: Tensor, x: Tensor, weights: Tensor | None = None, *, images: Tensor | None = None, pixels: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Squared error of every candidate and its gradient.

    Args:
        y: decoded candidates [C, N, F], F colours from 1 to 16. Read with its strides where the colours are dense.
        x: target images [I, P, F], uint8 (then value / 255 counts) or floating.
        weights: [I, P] floating, how much each pixel counts, at least 0; 1 when None.
        images: int64 [C], candidate c should explain image images[c]; when None candidate c belongs to image c.
        pixels: int64 [N], y's pixel n is x's pixel pixels[n]; when None y has all pixels. A pixel may come twice.

    Returns:
        loss [C] in fp32 (fp64 when y is) and grad [C, N, F] in y's dtype, dense. Both carry gradient to y, of any
        order. An index beyond the images or pixels is an error on the CPU; on a GPU, where asking would hold up the
        queue, the loss is NaN.
    """
    _check(y, x, weights, images, pixels)
    for name, tensor in (("x", x), ("weights", weights)):
        if tensor is not None and tensor.requires_grad:
            raise ValueError(
                f"recon_error: {name} requires grad, but only y gets a gradient here; pass {name}.detach(), or write "
                "the loss in plain torch to differentiate it"
            )
    refuse_forward_mode("recon_error", y=y, x=x)
    return torch.ops.compgen.recon_error(y, x, weights, images, pixels)  # type: ignore[no-any-return]


def _check(y: Tensor, x: Tensor, weights: Tensor | None, images: Tensor | None, pixels: Tensor | None) -> None:
    if y.dim() != 3 or not 1 <= y.shape[2] <= MOST_COLOURS or y.dtype not in DTYPES:
        raise ValueError(
            f"recon_error: y is {y.dtype} {list(y.shape)}; expected floating [C, N, F] with F from 1 to {MOST_COLOURS}"
        )
    C, N, F = y.shape
    if x.dim() != 3 or x.shape[2] != F or x.dtype not in (torch.uint8, *DTYPES):
        raise ValueError(
            f"recon_error: x is {x.dtype} {list(x.shape)}; expected uint8 or floating [I, P, F] with F = {F} as y has"
        )
    image_count, P, _ = x.shape
    if images is None and image_count != C:
        raise ValueError(
            f"recon_error: x has {image_count} images and y {C} candidates; pass images, int64 [C] = [{C}], to "
            "say which image each candidate should explain"
        )
    if pixels is None and P != N:
        raise ValueError(
            f"recon_error: x has {P} pixels and y {N}; pass pixels, int64 [N] = [{N}], to say which pixels y has"
        )
    for name, index, form, size in (("images", images, "C", C), ("pixels", pixels, "N", N)):
        if index is not None and (index.dtype != torch.int64 or index.shape != (size,)):
            raise ValueError(
                f"recon_error: {name} is {index.dtype} {list(index.shape)}; expected torch.int64 [{form}] = [{size}]"
            )
    if weights is not None and (weights.shape != (image_count, P) or weights.dtype not in DTYPES):
        raise ValueError(
            f"recon_error: weights is {weights.dtype} {list(weights.shape)}; expected floating [I, P] = "
            f"{[image_count, P]}"
        )
    for name, other in (("x", x), ("weights", weights), ("images", images), ("pixels", pixels)):
        if other is not None and other.device != y.device:
            raise ValueError(f"recon_error: {name} is on {other.device} but y is on {y.device}; move one of them")


def _exact(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which y of this dtype is compared and summed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _of_candidates(of_images: Tensor, images: Tensor | None, pixels: Tensor | None, dtype: torch.dtype) -> Tensor:
    """[I, P, …] to [C, N, …] in this dtype."""
    chosen = of_images if images is None else of_images.index_select(0, images)
    return (chosen if pixels is None else chosen.index_select(1, pixels)).to(dtype)


def reference(
    y: Tensor, x: Tensor, weights: Tensor | None, images: Tensor | None, pixels: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The op in plain torch."""
    dtype = _exact(y.dtype)
    target = _of_candidates(x, images, pixels, dtype)
    difference = y.to(dtype) - (target / 255 if x.dtype == torch.uint8 else target)
    pull = difference
    if weights is not None:
        pull = _of_candidates(weights, images, pixels, dtype).unsqueeze(-1) * difference
    return (pull * difference).sum((1, 2)), (2 * pull).to(y.dtype).contiguous()


def _fake(y: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return y.new_empty(y.shape[:1], dtype=_exact(y.dtype)), y.new_empty(y.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, _, weights, images, pixels = inputs
    ctx.save_for_backward(output[1], weights, images, pixels)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, of_loss: Tensor | None, of_grad: Tensor | None) -> tuple[Tensor | None, ...]:
    grad, weights, images, pixels = ctx.saved_tensors
    dtype, parts = _exact(grad.dtype), []
    if of_loss is not None:
        parts.append(of_loss[:, None, None] * grad.to(dtype))
    if of_grad is not None:
        twice = 2 * of_grad.to(dtype)
        if weights is not None:
            twice = _of_candidates(weights, images, pixels, dtype).unsqueeze(-1) * twice
        parts.append(twice)
    return (sum(parts[1:], parts[0]).to(grad.dtype) if parts else None, None, None, None, None)


define_op(
    "recon_error",
    "(Tensor y, Tensor x, Tensor? weights, Tensor? images, Tensor? pixels) -> (Tensor, Tensor)",
    reference=reference,
    triton="recon_error:forward",
    fake=_fake,
    public=True,
)
torch.library.register_autograd("compgen::recon_error", _differentiate, setup_context=_save)
