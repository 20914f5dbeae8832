"""Which slot owns which pixel, and how well that agrees with the true masks: ARI, FG-ARI, J-ARI, mBO.

A segmentation is one number per pixel, int [n, P]; of the decoder's slots by what its pixels attend to, or by what they
depend on. Scores are per image [n]: their mean and spread are the caller's. Not for matching slots to objects one by
one: that is matching.py.
"""

from typing import Any

import torch
import torch.nn.attention
from torch import Tensor

from compgen_fast.jets.penalty import Decoder, uncompiled

MOST_LABELS = 256
CHUNK = 8  # images


def ari(predicted: Tensor, true: Tensor, *, ignore_background: bool) -> Tensor:
    """The adjusted Rand index of each image, fp64 [n]: 1 for the same partition, 0 on average for a random one.

    Args:
        predicted: integers [n, P], the slot of each pixel.
        true: integers [n, P], its object.
        ignore_background: judge only pixels whose true object is not 0: FG-ARI. With one object in the foreground that
            is 1 if one slot holds all of it and 0 otherwise. An image without foreground has no score: NaN.
    """
    table = _table("ari", predicted, true)
    table = table[:, :, 1:] if ignore_background else table
    pixels = table.sum((1, 2))
    together = _pairs(table).sum((1, 2))
    in_predicted, in_true = _pairs(table.sum(2)).sum(1), _pairs(table.sum(1)).sum(1)
    # Of pairs of pixels: how many both partitions keep together, against chance and against the most possible.
    chance = in_predicted * (in_true / _pairs(pixels).clamp_min(1))
    most = (in_predicted + in_true) / 2
    index = (together - chance) / (most - chance)
    # Chance alone reaches the most only where both partitions are one segment, or both are single pixels.
    index = torch.where(most == chance, 1.0, index)
    return torch.where(pixels == 0, torch.nan, index)


def mbo(predicted: Tensor, true: Tensor, *, ignore_background: bool = True) -> Tensor:
    """Mean best overlap of each image, fp64 [n]: for each object in it the best intersection over union of any segment.

    Arguments as of :func:`ari`; an image without objects has no score: NaN. One segment may serve several objects.
    """
    table = _table("mbo", predicted, true)
    either = table.sum(2, keepdim=True) + table.sum(1, keepdim=True) - table
    best = (table / either.clamp_min(1)).amax(1)
    present = table.sum(1) > 0
    if ignore_background:
        best, present = best[:, 1:], present[:, 1:]
    return best.sum(1) / present.sum(1)


def _pairs(count: Tensor) -> Tensor:
    return count * (count - 1) / 2


def _table(what: str, predicted: Tensor, true: Tensor) -> Tensor:
    """How many pixels each slot shares with each object, fp64 [n, slots, objects]."""
    if predicted.dim() != 2 or predicted.shape != true.shape or predicted.shape[1] == 0:
        raise ValueError(
            f"{what}: predicted has shape {list(predicted.shape)} and true {list(true.shape)}; expected [n, P] of both "
            "(flatten height and width)"
        )
    for name, labels in (("predicted", predicted), ("true", true)):
        # Compared as Python's numbers: as uint8, 256 would be 0.
        low, high = (labels.min().item(), labels.max().item()) if len(labels) else (0, 0)
        if labels.dtype.is_floating_point or low < 0 or high >= MOST_LABELS:
            raise ValueError(
                f"{what}: {name} is {labels.dtype}, from {low} to {high}; expected integers from 0 to "
                f"{MOST_LABELS - 1} (take the argmax of soft masks)"
            )
    predicted, true = predicted.long(), true.long().to(predicted.device)
    slots, objects = (int(labels.max()) + 1 if len(labels) else 1 for labels in (predicted, true))
    table = torch.zeros(len(predicted), slots * objects, dtype=torch.float64, device=predicted.device)
    one = table.new_ones(()).expand(predicted.shape)
    table.scatter_add_(1, predicted * objects + true, one)
    return table.view(-1, slots, objects)


@torch.no_grad()
def masks_by_attention(decoder: Any, z: Tensor, *, chunk: int = CHUNK) -> Tensor:
    """The slot with the largest mask at each pixel, int64 [n, P].

    Args:
        decoder: one with ``decode_with_masks(z)`` → pixels, masks [n, K, P].
        z: slots [n, K, d].
        chunk: images decoded at a time.
    """
    if not hasattr(decoder, "decode_with_masks"):
        raise ValueError(
            f"masks_by_attention: {type(decoder).__name__} has no decode_with_masks; expected a decoder with masks "
            "(use masks_by_jacobian, which needs none)"
        )
    masks: list[Tensor] = [decoder.decode_with_masks(part)[1] for part in z.split(chunk)]
    return torch.cat([of_slots.argmax(1) for of_slots in masks])


def masks_by_jacobian(decoder: Decoder, z: Tensor, *, chunk: int = CHUNK) -> Tensor:
    """The slot that each pixel depends on most, int64 [n, P]; `ari` of it is J-ARI. Arguments as of `jacobian_norms`.

    A pixel that depends on no slot counts as slot 0's.
    """
    norms: Tensor = jacobian_norms(decoder, z, chunk=chunk)
    return norms.argmax(1)


@torch.compiler.disable
def jacobian_norms(decoder: Decoder, z: Tensor, *, chunk: int = CHUNK) -> Tensor:
    """‖∂f_p/∂z_k‖ [n, K, P] of every slot k and pixel p, over the pixel's colours and the slot's d numbers; exact.

    The pull-back u → Jᵀu is linear, so its derivative along v is Jv. Its graph is built once, and each of the K · d
    columns of J is one backward pass through it; jets or forward mode would decode again for each.

    Args:
        decoder: slots [n, K, d] → pixels [n, P, colours]; any torch ops that can be differentiated twice.
        z: slots [n, K, d].
        chunk: images at a time; memory holds the graph of so many.
    """
    if z.dim() != 3:
        raise ValueError(f"jacobian_norms: z has shape {list(z.shape)}; expected slots [n, K, d]")
    # Fused attention of torch refuses a second backward pass; its plain version does not.
    plain = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    whole = torch.autocast(z.device.type, enabled=False)
    with torch.inference_mode(False), torch.enable_grad(), plain, whole:
        return torch.cat([_norms(uncompiled(decoder), part) for part in z.split(chunk)])


def _norms(decoder: Decoder, z: Tensor) -> Tensor:
    z = (z if z.dtype == torch.float64 else z.float()).detach().clone().requires_grad_()
    pixels = decoder(z)
    if pixels.dim() != 3:
        raise ValueError(
            f"jacobian_norms: the decoder returned shape {list(pixels.shape)}; expected pixels [n, P, colours] "
            "(wrap it: lambda z: decoder(z).flatten(2).mT)"
        )
    pixels = pixels + (z * 0).sum()  # a decoder that ignores its slots still hangs on z
    seed = torch.zeros_like(pixels, requires_grad=True)
    (pulled,) = torch.autograd.grad(pixels, z, seed, create_graph=True)
    squares = torch.zeros(*z.shape[:2], pixels.shape[1], dtype=pixels.dtype, device=z.device)
    for slot in range(z.shape[1]):
        for number in range(z.shape[2]):
            direction = torch.zeros_like(z)
            direction[:, slot, number] = 1
            (moved,) = torch.autograd.grad(pulled, seed, direction, retain_graph=True)
            squares[:, slot] += moved.square().sum(-1)
    return squares.sqrt()
