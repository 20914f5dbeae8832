"""Where a search begins: at the encoder's latents, and at guesses for when the encoder is far off.

An encoder is wrong on unseen combinations in some slots, rarely in all. So beside its own answer there are rows that
keep most of it and take one slot from another image, and rows drawn from the marginals alone. Which start was good, the
search finds out: nothing here looks at an image.
"""

import torch
from torch import Tensor

from compgen_fast.invert.marginals import SlotMarginals


def starts(
    encoded: Tensor,
    marginals: SlotMarginals | None = None,
    *,
    swapped: int = 0,
    drawn: int = 0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Starts [I, R, K, D] for I images, R = 1 + swapped + drawn.

    Args:
        encoded: the encoder's latents [I, K, D]; row 0 of each image.
        marginals: to draw from; only ``drawn`` needs them.
        swapped: rows with one slot, chosen at random, taken from another image of the batch, at the same place.
        drawn: rows from the marginals.
        generator: of the choices, on the device of ``encoded``.
    """
    _check(encoded, marginals, swapped, drawn)
    images, slots, width = encoded.shape
    rows = [encoded.unsqueeze(1)]
    if swapped:
        rows.append(_swapped(encoded, swapped, generator))
    if drawn and marginals is not None:
        rows.append(marginals.sample(images * drawn, generator).to(encoded).view(images, drawn, slots, width))
    return torch.cat(rows, 1)


def _swapped(encoded: Tensor, rows: int, generator: torch.Generator | None) -> Tensor:
    images, slots, _ = encoded.shape
    device, shape = encoded.device, (images, rows)
    away = torch.randint(1, images, shape, generator=generator, device=device)  # never the image itself
    other = (torch.arange(images, device=device)[:, None] + away) % images
    slot = torch.randint(slots, shape, generator=generator, device=device)
    swap = torch.arange(slots, device=device) == slot[..., None]
    return torch.where(swap[..., None], encoded[other], encoded.unsqueeze(1))


def _check(encoded: Tensor, marginals: SlotMarginals | None, swapped: int, drawn: int) -> None:
    if encoded.dim() != 3 or not encoded.dtype.is_floating_point:
        raise ValueError(
            f"starts: encoded is {encoded.dtype} {list(encoded.shape)}; expected the encoder's floating latents "
            "[I, K, D]"
        )
    if swapped < 0 or drawn < 0:
        raise ValueError(f"starts: swapped is {swapped} and drawn {drawn}; expected 0 or more of each")
    if swapped and len(encoded) < 2:
        raise ValueError(
            f"starts: {swapped} swapped starts need slots of other images, and there is one image; "
            "search more images at once, or set swapped to 0"
        )
    if drawn and marginals is None:
        raise ValueError(f"starts: {drawn} drawn starts need marginals; fit SlotMarginals on training latents")
    if drawn and marginals is not None and marginals.mean.shape != encoded.shape[1:]:
        raise ValueError(
            f"starts: marginals have slots {list(marginals.mean.shape)} and encoded {list(encoded.shape[1:])}; "
            "expected the same; fit them on latents of this encoder"
        )
