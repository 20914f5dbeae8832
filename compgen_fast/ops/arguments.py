"""Checks shared by the ops: each failure names the op, what was given, what was expected and what to do."""

import torch
from torch import Tensor
from torch.autograd import forward_ad

MOST_SLOTS = 64
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def check_slot_shapes(op: str, pixels: dict[str, Tensor], slots: dict[str, Tensor], slot_mask: Tensor | None) -> None:
    """Checks [B,N,H,D] pixel tensors, [B,S,H,D] slot tensors, given by name, and the [B,S] mask against each other."""
    tensors = pixels | slots
    for name, x in tensors.items():
        count = "N" if name in pixels else "S"
        if x.dim() != 4:
            raise ValueError(f"{op}: {name} has shape {list(x.shape)}; expected [B, {count}, H, D]")
    _check_alike(op, tensors)
    for group in (pixels, slots):
        _check_equal_shapes(op, group)
    slot_name, any_slots = next(iter(slots.items()))
    pixel_name, any_pixels = next(iter(pixels.items()))
    B, S, H, D = any_slots.shape
    if (any_pixels.shape[0], *any_pixels.shape[2:]) != (B, H, D):
        raise ValueError(
            f"{op}: {pixel_name} {list(any_pixels.shape)} and {slot_name} {list(any_slots.shape)} must agree in batch, "
            "heads and head width; expand or reshape one of them"
        )
    if not 1 <= S <= MOST_SLOTS:
        raise ValueError(f"{op}: {slot_name} has {S} slots; expected 1 to {MOST_SLOTS} (more keys: use SDPA)")
    if H < 1 or D < 1:
        raise ValueError(
            f"{op}: {slot_name} has shape {list(any_slots.shape)}; heads and head width must be at least 1"
        )
    if slot_mask is not None:
        _check_mask(op, slot_mask, B, S, any_slots.device)


def _check_alike(op: str, tensors: dict[str, Tensor]) -> None:
    (first_name, first), *rest = tensors.items()
    if first.dtype not in DTYPES:
        raise TypeError(f"{op}: {first_name} is {first.dtype}; expected one of {', '.join(map(str, DTYPES))}")
    for name, x in rest:
        if x.dtype != first.dtype:
            raise TypeError(f"{op}: {name} is {x.dtype} but {first_name} is {first.dtype}; cast one, or use autocast")
        if x.device != first.device:
            raise ValueError(f"{op}: {name} is on {x.device} but {first_name} is on {first.device}; move one of them")


def _check_equal_shapes(op: str, group: dict[str, Tensor]) -> None:
    (first_name, first), *rest = group.items()
    for name, x in rest:
        if x.shape != first.shape:
            raise ValueError(f"{op}: {name} {list(x.shape)} and {first_name} {list(first.shape)} must have one shape")


def _check_mask(op: str, slot_mask: Tensor, B: int, S: int, device: torch.device) -> None:
    if slot_mask.dtype != torch.bool:
        raise TypeError(f"{op}: slot_mask is {slot_mask.dtype}; expected torch.bool, True where a slot takes part")
    if slot_mask.shape != (B, S):
        raise ValueError(f"{op}: slot_mask has shape {list(slot_mask.shape)}; expected [B, S] = [{B}, {S}]")
    if slot_mask.device != device:
        raise ValueError(f"{op}: slot_mask is on {slot_mask.device} but the slots are on {device}; move one of them")


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Casts floating tensors to the autocast dtype of their device when autocast is on, as torch's attention does."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    return tuple(x.to(torch.get_autocast_dtype(device)) if x.dtype != torch.float64 else x for x in tensors)


def refuse_forward_mode(op: str, **tensors: Tensor) -> None:
    """torch.library ops drop forward-mode tangents without a word; this says so instead."""
    if torch.compiler.is_compiling():  # compiled code has no dual tensors
        return
    for name, x in tensors.items():
        if forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError(
                f"{op}: {name} carries a forward-mode tangent, which this op does not propagate; "
                "use reverse mode, or compgen_fast.jets for forward derivatives"
            )
