"""Which slot stands for which object, image by image, by their masks.

For slots without a fixed order, such as Slot Attention's. Where each slot has its role for the whole data set,
`compgen_fast.measure.choose_slot` finds it instead.
"""

import torch
from torch import Tensor

from compgen_fast.models.matching import match_slots

CHUNK = 256  # images whose masks are spread out to one plane per object at a time


def match_by_masks(slot_masks: Tensor, masks: Tensor, objects: int | None = None) -> Tensor:
    """For each object the slot whose mask overlaps it best, int64 [n, M], by intersection over union of soft masks.

    Args:
        slot_masks: [n, K, H, W], the share from 0 to 1 that a slot has in a pixel.
        masks: integers [n, H, W], the number 0 … M − 1 of the object that owns each pixel; 0 is the background, an
            object like any other here.
        objects: M; the largest number in ``masks`` and one more if None. Objects missing in an image get slots that
            are left over.
    """
    if slot_masks.dim() != 4 or masks.shape != (slot_masks.shape[0], *slot_masks.shape[2:]):
        raise ValueError(
            f"match_by_masks: slot_masks have shape {list(slot_masks.shape)} and masks {list(masks.shape)}; expected "
            "[n, K, H, W] and [n, H, W] (unflatten pixels to height and width)"
        )
    if masks.dtype.is_floating_point or (masks.numel() and int(masks.min()) < 0):
        raise ValueError(f"match_by_masks: masks are {masks.dtype}; expected integers from 0, the number of an object")
    largest = int(masks.max()) if masks.numel() else 0
    objects = largest + 1 if objects is None else objects
    if largest >= objects:
        raise ValueError(
            f"match_by_masks: masks hold object {largest}; expected at most {objects - 1}, since "
            f"objects is {objects} (raise it, or leave it out)"
        )
    pairs = zip(slot_masks.detach().split(CHUNK), masks.split(CHUNK), strict=True)
    return match_slots(-torch.cat([_overlap(of_slots, owners, objects) for of_slots, owners in pairs]))


def _overlap(slot_masks: Tensor, masks: Tensor, objects: int) -> Tensor:
    """Intersection over union [n, K, M]; 0 where both are empty."""
    of_slots = slot_masks.flatten(2).double()
    owned = torch.nn.functional.one_hot(masks.flatten(1).long(), objects).double()
    both = of_slots @ owned
    either = of_slots.sum(2)[:, :, None] + owned.sum(1)[:, None] - both
    return both / either.clamp_min(torch.finfo(torch.float64).tiny)
