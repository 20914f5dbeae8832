"""What the kernels share: tiles and products, the tuned configuration, and the sum over pixels in two stages.

A sum over pixels never uses atomics, so two runs give the same bits: each program adds up its own run of pixel tiles
into its own fp32 slice, `partials[split]`, and `sum_partials` adds the slices in a fixed order.

Heads may share a tile ("packed"): its rows are then the slots of PACK heads one after the other and its columns those
of the heads side by side, PACK·S by PACK·D, and what belongs to slots is zero where row and column are of different
heads. Products over such tiles are those of each head alone, in padding that the matrix units calculate with anyway:
two heads of 7 slots fill a tile of 16. It is for heads that do not start at whole sectors of memory (43 columns of bf16
are 86 bytes, in 3 or 4 sectors of 32, and the sectors at both ends are read again for the neighbours), and for a
softmax over several heads.

In every kernel `x_stride` holds the run-time strides of x, of which batch and head are used, and `x_row` the stride
between its rows (pixels or slots) at compile time: it is a constant of the model, and with it the addresses of a tile
become one register plus constants. At an odd head width, where every element is a load, that halves the registers.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

FEWEST_PROGRAMS = 128  # about one per multiprocessor of a large GPU: with fewer, part of it idles
MOST_PROGRAMS = 512  # some for each multiprocessor: with more, adding the partial sums up takes longer than it gains
SECTOR = 32  # bytes that memory moves at a time
WIDEST_TILE = 256  # columns of a tile of several heads
WIDEST_PACK = 256  # bytes of them, where heads share a tile for memory's sake only
MOST_PACKED = 64  # and rows times the bytes of an element: in fp32, without matrix units, rows take more registers
LONG_ROW = 512  # bytes of neighbouring heads that a program walks over: at most 1/16 of the sectors are then shared
FEWEST_PIXELS = 64  # that a program walks over, so that what it reads of the slots is little beside them
LARGEST_SHARE = 16  # partial sums take at most 1/16 of the memory of the tensor they reduce, unless the GPU would idle


class Config(NamedTuple):
    """How one kernel is launched: the tile is [BLOCK_N pixels, BLOCK_D columns], all slots at once."""

    BLOCK_N: int
    BLOCK_D: int
    BLOCK_S: int
    num_warps: int
    num_stages: int

    def options(self) -> dict[str, Any]:
        return self._asdict() | UNFUSED


# A product that is fused with the first addition of a sum over threads is rounded in the neighbour's sum and not in its
# own: threads that should hold the same sum differ in its last bit, and which of them stores it is nobody's choice.
UNFUSED = {"enable_fp_fusion": False}


CONFIGS = Path(__file__).with_name("configs.json")
_chosen: ContextVar[str | None] = ContextVar("architecture", default=None)


@contextlib.contextmanager
def architecture(name: str) -> Iterator[None]:
    """Within the block, launchers use the configurations of this architecture, whatever device they run on."""
    token = _chosen.set(name)
    try:
        yield
    finally:
        _chosen.reset(token)


@functools.cache
def architecture_of(device: torch.device) -> str:
    """The architecture of the table that a device is nearest to; for tensors on no GPU the oldest."""
    if device.type != "cuda":
        return "sm_80"
    if torch.version.hip:
        return "gfx942"
    major, _ = torch.cuda.get_device_capability(device)
    return {9: "sm_90", 10: "sm_100"}.get(major, "sm_80")


@functools.cache
def configurations() -> dict[str, Any]:
    """By architecture: who chose its rows, the rows of each kernel, and their hash.

    compgen_fast/prove/tuning.py writes them; a row is [most slots, widest head, BLOCK_N, BLOCK_D, warps, stages].
    """
    table: dict[str, Any] = json.loads(CONFIGS.read_text())
    for name, entry in table.items():
        if entry["hash"] != configuration_hash(entry["kernels"]):
            raise ValueError(f"{CONFIGS}: the rows of {name} are not those that were chosen; undo, or run `cgf tune`")
    return table


def configuration_hash(kernels: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(kernels, sort_keys=True).encode(), digest_size=8).hexdigest()


def tuned_config(kernel: str, x: torch.Tensor, S: int, D: int) -> Config:
    """How a kernel is launched for S slots and D columns of x's dtype on its device."""
    return looked_up(_chosen.get() or architecture_of(x.device), kernel, x.element_size(), S, D)


@functools.cache
def looked_up(name: str, kernel: str, element_size: int, S: int, D: int) -> Config:
    """The first row of the table that has room for S slots and D columns, both padded to what the matrix units take."""
    S, D = padded(S), padded(D)
    rows = configurations()[name]["kernels"][kernel][f"{8 * element_size} bit"]
    for most_S, most_D, block_n, block_d, num_warps, num_stages in rows:
        if most_S >= S and most_D >= D:
            return Config(block_n, min(block_d, D), S, num_warps, num_stages)
    raise ValueError(f"{kernel}: no launch configuration for {S} slots of width {D}; at most 64 slots of width 256")


def padded(size: int) -> int:
    """The power of two, at least 16, that holds `size`: what a tile and the matrix units can take."""
    return max(16, 1 << (size - 1).bit_length())


def packed_heads(H: int, S: int, D: int, element_size: int, *tensors: torch.Tensor) -> int:
    """How many heads share a tile: the fewest whose columns are whole sectors, or as many as there is room for.

    One where the heads of a tensor [...,H,D] do not lie side by side.
    """
    room = min(WIDEST_PACK // (D * element_size), WIDEST_TILE // D, MOST_PACKED // (S * element_size))
    fits = [1, *(heads for heads in range(2, room + 1) if H % heads == 0)]
    if any(tensor.stride(-2) != D for tensor in tensors):
        return 1
    whole = [heads for heads in fits if heads * D * element_size % SECTOR == 0]
    return min(whole, default=max(fits))


def neighbouring_heads(H: int, D: int, element_size: int) -> int:
    """How many heads a program walks over: one whose columns are whole sectors, or some that are a long row."""
    if D * element_size % SECTOR == 0:
        return 1
    return min(
        (heads for heads in range(1, H + 1) if H % heads == 0 and heads * D * element_size >= LONG_ROW), default=H
    )


def neighbouring_tiles(config: Config) -> int:
    return max(1, FEWEST_PIXELS // config.BLOCK_N)


def owned_columns(config: Config, width: int, most: int) -> int:
    """How many of a head's columns a program adds sums [slots, columns] up for, `most` elements of each.

    All, if there are registers for them: for any of them it reads all columns of its pixels, BLOCK_D at a time.
    """
    return min(padded(width), max(config.BLOCK_D, most // config.BLOCK_S))


def unit_stride(x: torch.Tensor) -> torch.Tensor:
    """x itself when its last dimension is dense, whatever its other strides; else a dense copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


def strides(x: torch.Tensor | None) -> tuple[int, ...] | None:
    return None if x is None else x.stride()


def split_tiles(tiles: int, groups: int, partial_bytes: int, data_bytes: int) -> tuple[int, int]:
    """(splits, tiles per split) for `groups` independent sums over `tiles` tiles each.

    One split of all groups writes `partial_bytes`; the tensor being reduced has `data_bytes`. The result depends on the
    shape only, not on the device, so that the order of summation is the same everywhere.
    """
    affordable = data_bytes // (LARGEST_SHARE * partial_bytes)
    busy = triton.cdiv(FEWEST_PROGRAMS, groups)
    enough = triton.cdiv(MOST_PROGRAMS, groups)
    splits = min(tiles, max(busy, min(affordable, enough)))
    tiles_per_split = triton.cdiv(tiles, splits)
    return triton.cdiv(tiles, tiles_per_split), tiles_per_split


@triton.jit
def load_tile(x, rows, stride, inside, columns, D):
    """x[rows, columns] with zeros outside; stride is the distance between rows."""
    return tl.load(
        x + rows[:, None] * stride + columns[None, :], mask=inside[:, None] & (columns < D)[None, :], other=0.0
    )


@triton.jit
def load_slot_mask(slot_mask, mask_stride, b, S, BLOCK_S: tl.constexpr, PACK: tl.constexpr = 1):
    """True where a slot exists and takes part."""
    rows = tl.arange(0, BLOCK_S)
    alive = rows < PACK * S
    if slot_mask is not None:
        alive = alive & (tl.load(slot_mask + b * mask_stride[0] + rows % S, mask=alive, other=0) != 0)
    return alive


@triton.jit
def same_head(columns, S: tl.constexpr, D: tl.constexpr, BLOCK_S: tl.constexpr, PACK: tl.constexpr):
    """[BLOCK_S, columns], True where a row of the tile and a column exist and are of the same head."""
    rows = tl.arange(0, BLOCK_S)
    if PACK == 1:
        return (rows < S)[:, None] & (columns < D)[None, :]
    else:
        return ((rows // S)[:, None] == (columns // D)[None, :]) & (rows < PACK * S)[:, None]


@triton.jit
def load_slots(x, stride, alive, columns, S: tl.constexpr, D: tl.constexpr, BLOCK_S: tl.constexpr, PACK: tl.constexpr):
    """A tile [BLOCK_S, columns] of slots [S, PACK·D], whose rows are `stride` apart, zero outside of each head."""
    slots = tl.arange(0, BLOCK_S) % S
    present = alive[:, None] & same_head(columns, S, D, BLOCK_S, PACK)
    return tl.load(x + slots[:, None] * stride + columns[None, :], mask=present, other=0.0)


@triton.jit
def head_sum(x, S: tl.constexpr, BLOCK_S: tl.constexpr, PACK: tl.constexpr):
    """The sum over the slots of a head: [BLOCK_N, 1], or of packed heads [BLOCK_N, BLOCK_S], each column its head's."""
    if PACK == 1:
        return tl.sum(x, 1, keep_dims=True)
    else:
        heads = tl.arange(0, BLOCK_S)[None, :] // S
        total = tl.zeros_like(x)
        for head in tl.static_range(PACK):
            total = tl.where(heads == head, tl.sum(tl.where(heads == head, x, 0.0), 1, keep_dims=True), total)
        return total


@triton.jit
def head_max(x, S: tl.constexpr, BLOCK_S: tl.constexpr, PACK: tl.constexpr):
    """The largest over the slots of a head, as `head_sum`; 0 where no slot takes part and x is −inf in all of them."""
    if PACK == 1:
        largest = tl.max(x, 1, keep_dims=True)
    else:
        heads = tl.arange(0, BLOCK_S)[None, :] // S
        largest = tl.zeros_like(x)
        for head in tl.static_range(PACK):
            of_head = tl.max(tl.where(heads == head, x, float("-inf")), 1, keep_dims=True)
            largest = tl.where(heads == head, of_head, largest)
    return tl.where(largest == float("-inf"), 0.0, largest)


@triton.jit
def dot(a, b, accumulator):
    # ieee: full fp32 products of fp32 inputs. tf32 would be faster and change the numbers, which nobody asked for.
    return tl.dot(a, b, accumulator, input_precision="ieee")


@triton.jit
def dot_rows(
    x,
    x_stride,
    inside,
    y,
    y_stride,
    alive,
    S: tl.constexpr,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PACK: tl.constexpr = 1,
):
    """x·yᵀ [BLOCK_N, BLOCK_S] of pixels x and slots y, BLOCK_D columns at a time; strides are between rows."""
    total = tl.zeros([BLOCK_N, BLOCK_S], tl.float32)
    for d in range(0, PACK * D, BLOCK_D):
        columns = d + tl.arange(0, BLOCK_D)
        x_tile = load_tile(x, tl.arange(0, BLOCK_N), x_stride, inside, columns, PACK * D)
        y_tile = load_slots(y, y_stride, alive, columns, S, D, BLOCK_S, PACK)
        total = dot(x_tile, tl.trans(y_tile), total)
    return total


@triton.jit
def _sum_kernel(
    partials,  # [1 or 2, splits, size]
    first,
    second,
    size,
    splits,
    BLOCK_P: tl.constexpr,
    BLOCK: tl.constexpr,
):
    columns = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    partials += tl.program_id(1).to(tl.int64) * splits * size
    total = tl.zeros([BLOCK_P, BLOCK], tl.float32)
    for start in range(0, splits, BLOCK_P):
        rows = start + tl.arange(0, BLOCK_P)
        addresses = partials + rows[:, None].to(tl.int64) * size + columns[None, :]
        total += tl.load(addresses, mask=(rows < splits)[:, None] & inside[None, :], other=0.0)
    total_sum = tl.sum(total, 0)
    if tl.program_id(1) == 0:
        tl.store(first + columns, total_sum.to(first.dtype.element_ty), mask=inside)
    elif second is not None:
        tl.store(second + columns, total_sum.to(second.dtype.element_ty), mask=inside)


# Few columns: where sums are short, as those of a norm's weights, a program for each few is all there is to share out.
SUM_BLOCKS = {"BLOCK_P": 32, "BLOCK": 64, **UNFUSED}


def sum_partials(partials: torch.Tensor, first: torch.Tensor, second: torch.Tensor | None = None) -> None:
    """first = Σ_p partials[0, p] and second = Σ_p partials[1, p], in fp32 and in a fixed order."""
    size, splits = first.numel(), partials.shape[1]
    grid = (triton.cdiv(size, SUM_BLOCKS["BLOCK"]), 1 if second is None else 2)
    _sum_kernel[grid](partials, first, second, size, splits, **SUM_BLOCKS)
