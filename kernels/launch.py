"""What the kernels share: tiles and products, the tuned configuration, and the sum over pixels in two stages.

A sum over pixels never uses atomics, so two runs give the same bits: each program adds up its own run of pixel tiles
into its own fp32 slice, `partials[split]`, and `sum_partials` adds the slices in a fixed order.

In every kernel `x_stride` holds the run-time strides of x, of which batch and head are used, and `x_row` the stride
between its rows (pixels or slots) at compile time: it is a constant of the model, and with it the addresses of a tile
become one register plus constants. At an odd head width, where every element is a load, that halves the registers.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

FEWEST_PROGRAMS = 128  # about one per multiprocessor of a large GPU: with fewer, part of it idles
MOST_PROGRAMS = 2048  # a few waves: with more, the partial sums cost more than the balance gains
LARGEST_SHARE = 8  # partial sums take at most 1/8 of the memory of the tensor they reduce, unless the GPU would idle


class Config(NamedTuple):
    """How one kernel is launched: the tile is [BLOCK_N pixels, BLOCK_D columns], all slots at once."""

    BLOCK_N: int
    BLOCK_D: int
    BLOCK_S: int
    num_warps: int
    num_stages: int


@functools.cache
def _table() -> Any:
    return json.loads(Path(__file__).with_name("configs.json").read_text())


@functools.cache
def tuned_config(kernel: str, element_size: int, S: int, D: int) -> Config:
    """The first row of the table that has room for S slots and D columns, both padded to what the matrix units take."""
    S, D = _padded(S), _padded(D)
    for most_S, most_D, block_n, block_d, num_warps, num_stages in _table()[kernel][f"{8 * element_size} bit"]:
        if most_S >= S and most_D >= D:
            return Config(block_n, min(block_d, D), S, num_warps, num_stages)
    raise ValueError(f"{kernel}: no launch configuration for {S} slots of width {D}; at most 64 slots of width 256")


def _padded(size: int) -> int:
    """The power of two, at least 16, that holds `size`: what a tile and the matrix units can take."""
    return max(16, 1 << (size - 1).bit_length())


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
def load_slot_mask(slot_mask, mask_stride, b, S, BLOCK_S: tl.constexpr):
    """True where a slot exists and takes part."""
    slots = tl.arange(0, BLOCK_S)
    alive = slots < S
    if slot_mask is not None:
        alive = alive & (tl.load(slot_mask + b * mask_stride[0] + slots, mask=alive, other=0) != 0)
    return alive


@triton.jit
def dot(a, b, accumulator):
    # ieee: full fp32 products of fp32 inputs. tf32 would be faster and change the numbers, which nobody asked for.
    return tl.dot(a, b, accumulator, input_precision="ieee")


@triton.jit
def dot_rows(
    x,
    x_rows,
    x_stride,
    x_inside,
    y,
    y_rows,
    y_stride,
    y_inside,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """x·yᵀ [BLOCK_N, BLOCK_S], BLOCK_D columns at a time; strides are between rows."""
    total = tl.zeros([BLOCK_N, BLOCK_S], tl.float32)
    for d in range(0, D, BLOCK_D):
        columns = d + tl.arange(0, BLOCK_D)
        x_tile = load_tile(x, x_rows, x_stride, x_inside, columns, D)
        y_tile = load_tile(y, y_rows, y_stride, y_inside, columns, D)
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


SUM_BLOCKS = {"BLOCK_P": 8, "BLOCK": 256}


def sum_partials(partials: torch.Tensor, first: torch.Tensor, second: torch.Tensor | None = None) -> None:
    """first = Σ_p partials[0, p] and second = Σ_p partials[1, p], in fp32 and in a fixed order."""
    size, splits = first.numel(), partials.shape[1]
    grid = (triton.cdiv(size, SUM_BLOCKS["BLOCK"]), 1 if second is None else 2)
    _sum_kernel[grid](partials, first, second, size, splits, **SUM_BLOCKS)
