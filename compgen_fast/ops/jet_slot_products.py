"""Products of jets of pixels with jets of slots, of which each slot is moved by u or by v: one trilinear form.

Pixels x have channels x, x_u, x_v, x_uv, or x alone where no slot moves them. Slots have a value a and one tangent a_t.
Then a product of the two, or its adjoint, needs of each channel its product with values, and of three of them
(``first`` says from which on) the product with tangents. For weights w, [7, B, M, N] or [2, B, M, N] with x alone:

    F(w, x, a) = Σ_c w[c]·(a x_cᵀ) + Σ_t w[C + t]·(a_t x_{first+t}ᵀ)        C the number of channels

The three ops are the gradients of F, so each is the others' derivative, to any order:

    jet_slot_products   ∂F/∂w  [7 or 2, B, M, N]     scores of pixels against slots (first = 0)
    jet_slot_mix        ∂F/∂x  [C, B or 1, N, Q]     what pixels take of the slots they weigh (first = 1)
    jet_slot_sums       ∂F/∂a  [2, B, M, Q]          sums over pixels, for the slots' gradients

Pixels that are the same for all images, [1, 1, N, Q], meet all slots in one product. M counts slots of all heads.

Who calls them: the jet rule of ``projected_slot_attention``, with jet_slot_softmax in between. They have no Triton
kernels: cuBLAS is the kernel.
"""

from typing import Any

import torch
from torch import Tensor

from compgen_fast.ops.arguments import refuse_forward_mode
from compgen_fast.ops.backends import define_op


def jet_slot_products(pixels: Tensor, slots: Tensor, first: int = 0) -> Tensor:
    """pixels [4, B, N, Q] with slots [2, B, M, Q]: weights [7, B, M, N]; of pixels [1, B or 1, N, Q], [2, B, M, N]."""
    channels, images = pixels.shape[:2] if pixels.dim() == 4 else (0, 0)
    fits = slots.dim() == 4 and len(slots) == 2 and pixels.shape[-1] == slots.shape[-1]
    if not fits or (channels, images) not in ((4, slots.shape[1]), (1, slots.shape[1]), (1, 1)):
        raise ValueError(
            f"jet_slot_products: pixels has shape {list(pixels.shape)} and slots {list(slots.shape)}; "
            "expected [4, B, N, Q] (or [1, B or 1, N, Q] where no slot moves them) and [2, B, M, Q]"
        )
    refuse_forward_mode("jet_slot_products", pixels=pixels, slots=slots)
    return torch.ops.compgen.jet_slot_products(pixels, slots, first)  # type: ignore[no-any-return]


def jet_slot_mix(weights: Tensor, slots: Tensor, first: int = 1) -> Tensor:
    """weights [7, B, M, N] with slots [2, B, M, Q]: pixels [4, B, N, Q]."""
    if weights.dim() != 4 or slots.dim() != 4 or len(weights) != 7 or (2, *weights.shape[1:3]) != slots.shape[:3]:
        raise ValueError(
            f"jet_slot_mix: weights has shape {list(weights.shape)} and slots {list(slots.shape)}; "
            "expected [7, B, M, N] and [2, B, M, Q]"
        )
    refuse_forward_mode("jet_slot_mix", weights=weights, slots=slots)
    return torch.ops.compgen.jet_slot_mix(weights, slots, first, slots.shape[1])  # type: ignore[no-any-return]


def _channels(weights: Tensor) -> int:
    return 1 if len(weights) == 2 else 4


def products_reference(pixels: Tensor, slots: Tensor, first: int) -> Tensor:
    if pixels.shape[1] != slots.shape[1]:
        rows: Tensor = torch.mm(slots.flatten(0, 2), pixels[0, 0].mT).view(*slots.shape[:3], pixels.shape[2])
        return rows
    moved = pixels[first : first + 3] if len(pixels) == 4 else pixels
    return torch.cat([torch.matmul(slots[0], pixels.mT), torch.matmul(slots[1], moved.mT)])


def mix_reference(weights: Tensor, slots: Tensor, first: int, images: int) -> Tensor:
    if images != slots.shape[1]:
        return torch.mm(weights.flatten(0, 2).mT, slots.flatten(0, 2))[None, None]
    channels = _channels(weights)
    pixels = torch.matmul(weights[:channels].mT, slots[0])
    pixels[first : first + 3 if channels == 4 else 1] += torch.matmul(weights[channels:].mT, slots[1])
    return pixels


def sums_reference(weights: Tensor, pixels: Tensor, first: int) -> Tensor:
    if pixels.shape[1] != weights.shape[1]:
        rows: Tensor = torch.mm(weights.flatten(0, 2), pixels[0, 0]).view(*weights.shape[:3], pixels.shape[3])
        return rows
    channels = len(pixels)
    moved = pixels[first : first + 3] if channels == 4 else pixels
    parts = ((weights[:channels], pixels), (weights[channels:], moved))
    return torch.stack([torch.matmul(w, x).sum(0) for w, x in parts])


def _fake_products(pixels: Tensor, slots: Tensor, first: int) -> Tensor:
    return pixels.new_empty((7 if len(pixels) == 4 else 2, *slots.shape[1:3], pixels.shape[2]))


def _fake_mix(weights: Tensor, slots: Tensor, first: int, images: int) -> Tensor:
    return weights.new_empty((_channels(weights), images, weights.shape[3], slots.shape[3]))


def _fake_sums(weights: Tensor, pixels: Tensor, first: int) -> Tensor:
    return weights.new_empty((2, *weights.shape[1:3], pixels.shape[3]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    a, b, ctx.first, *_ = inputs
    ctx.save_for_backward(a, b)


def _differentiate_products(ctx: Any, weights: Tensor) -> tuple[Tensor | None, ...]:
    (pixels, slots), (of_pixels, of_slots, _) = ctx.saved_tensors, ctx.needs_input_grad
    ops, first = torch.ops.compgen, ctx.first
    return (
        ops.jet_slot_mix(weights, slots, first, pixels.shape[1]) if of_pixels else None,
        ops.jet_slot_sums(weights, pixels, first) if of_slots else None,
        None,
    )


def _differentiate_mix(ctx: Any, pixels: Tensor) -> tuple[Tensor | None, ...]:
    (weights, slots), (of_weights, of_slots, *_) = ctx.saved_tensors, ctx.needs_input_grad
    ops, first = torch.ops.compgen, ctx.first
    return (
        ops.jet_slot_products(pixels, slots, first) if of_weights else None,
        ops.jet_slot_sums(weights, pixels, first) if of_slots else None,
        None,
        None,
    )


def _differentiate_sums(ctx: Any, slots: Tensor) -> tuple[Tensor | None, ...]:
    (weights, pixels), (of_weights, of_pixels, _) = ctx.saved_tensors, ctx.needs_input_grad
    ops, first = torch.ops.compgen, ctx.first
    return (
        ops.jet_slot_products(pixels, slots, first) if of_weights else None,
        ops.jet_slot_mix(weights, slots, first, pixels.shape[1]) if of_pixels else None,
        None,
    )


for _name, _schema, _reference, _fake, _differentiate in (
    (
        "products",
        "(Tensor pixels, Tensor slots, int first)",
        products_reference,
        _fake_products,
        _differentiate_products,
    ),
    ("mix", "(Tensor weights, Tensor slots, int first, int images)", mix_reference, _fake_mix, _differentiate_mix),
    ("sums", "(Tensor weights, Tensor pixels, int first)", sums_reference, _fake_sums, _differentiate_sums),
):
    define_op(f"jet_slot_{_name}", f"{_schema} -> Tensor", reference=_reference, triton=None, fake=_fake, public=False)
    torch.library.register_autograd(f"compgen::jet_slot_{_name}", _differentiate, setup_context=_save)
