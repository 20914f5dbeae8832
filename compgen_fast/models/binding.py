"""Whether slots are bound: each owns pixels of its own. A model whose slots all hold the whole image reconstructs no
worse, and its loss falls as well, so a run has to be asked.

    overlap = mean over pixels of (1 − Σ_k w_k²) / (1 − 1/K)        w_k: how much the pixel looks at slot k, Σ_k w_k = 1

It is 0 where each pixel looks at one slot and 1 where all look at all slots alike: the attention penalty over its
maximum (1 − 1/K) / 2.
"""

from collections.abc import Mapping

from torch import Tensor

ALIKE = 0.9
"""Overlap above which the largest weight says nothing."""
LEAST_SHARE = 0.01
"""Of an image's pixels, for a slot to own any."""


def binding(masks: Tensor) -> dict[str, Tensor]:
    """``overlap`` of masks [B, K, N], and for each slot the share of images in which it owns at least `LEAST_SHARE` of
    the pixels, ``slot_0_owns`` and so on. A pixel is owned by the slot of its largest mask.
    """
    slots = masks.shape[1]
    overlap = (1 - masks.square().sum(1)).mean() / (1 - 1 / slots)
    owner = masks.argmax(1)
    owns = {f"slot_{k}_owns": ((owner == k).float().mean(1) >= LEAST_SHARE).float().mean() for k in range(slots)}
    return {"overlap": overlap, **owns}


def unbound(found: Mapping[str, float]) -> str | None:
    """What is wrong with slots of this `binding`, in words; None if nothing is."""
    slots = len(found) - 1
    if found["overlap"] >= ALIKE:
        penalty, most = found["overlap"] * (1 - 1 / slots) / 2, (1 - 1 / slots) / 2
        return (
            f"slots are not bound: pixels look at all {slots} slots alike, so each slot holds the whole image (the "
            f"attention penalty of these masks is {penalty:.3g} of at most {most:.3g})"
        )
    idle = [str(k) for k in range(slots) if found[f"slot_{k}_owns"] == 0]
    if idle:
        who = f"slot {idle[0]} owns" if len(idle) == 1 else f"slots {', '.join(idle)} own"
        return f"slots are not bound: {who} nothing, under {LEAST_SHARE:.0%} of the pixels in every image"
    return None
