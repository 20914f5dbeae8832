"""Slot cross-attention: pixels are the queries, slots are the keys and values.

    s[n,s] = scale q[n]·k[s]        p = softmax over slots of s, per head
    o[n]   = Σ_s p[n,s] v[s]        w[n,s] = mean over heads of p[n,s]

    q, o [B,N,H,D]    k, v [B,S,H,D]    slot_mask [B,S] bool, True where the slot takes part    w [B,N,S]

and backwards, with do and dw the gradients of o and w,

    dp = do·vᵀ + dw/H      ds = p (dp − Σ_s p dp)      dq = scale ds k      dk = scale dsᵀ q      dv = pᵀ do

There are at most 64 slots, so a tile [BLOCK_N, BLOCK_S] holds the whole softmax row of its pixels: no running maximum,
no rescaling, and p is cheaper to compute again in the backward pass than to save. Slots are padded to a power of two;
padded and masked slots get −inf and are never read, so what lies in them cannot leak. An image whose slots are all
masked gets o = 0 and w = 0.

Forward: one program walks over a few tiles of pixels and all heads, so the mean over heads stays in registers.
Backward: w enters only through dw, which every head can read, so one program owns a head, or PACK heads in one tile
(see launch.py), and a run of pixel tiles, keeps k and v, and adds dk and dv up in registers; `launch.sum_partials` ends
the sum.

A head wider than BLOCK_D is read in chunks of columns. Forward walks over them; backward gives each chunk of the
gradients a program of its own, which computes p again.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import (
    dot,
    dot_rows,
    head_max,
    head_sum,
    load_slot_mask,
    load_slots,
    load_tile,
    neighbouring_tiles,
    packed_heads,
    same_head,
    split_tiles,
    strides,
    sum_partials,
    tuned_config,
    unit_stride,
)


@triton.jit
def _softmax_over_slots(s, alive, S: tl.constexpr, BLOCK_S: tl.constexpr, PACK: tl.constexpr):
    """p; zero, not NaN, where no slot takes part."""
    s = tl.where(alive[None, :], s, float("-inf"))
    e = tl.exp(s - head_max(s, S, BLOCK_S, PACK))
    total = head_sum(e, S, BLOCK_S, PACK)
    return e * (1.0 / tl.where(total == 0.0, 1.0, total))


@triton.jit
def _forward_kernel(
    q,
    k,
    v,
    slot_mask,
    o,
    w,
    scale,
    N,
    q_stride,
    k_stride,
    v_stride,
    mask_stride,
    S: tl.constexpr,
    H: tl.constexpr,
    q_row: tl.constexpr,
    k_row: tl.constexpr,
    v_row: tl.constexpr,
    D: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    runs = tl.cdiv(N, TILES * BLOCK_N)
    b = (tl.program_id(0) // runs).to(tl.int64)  # 64 bit: a batch may hold more than 2³¹ elements
    run = (tl.program_id(0) % runs).to(tl.int64)
    pixels = tl.arange(0, BLOCK_N)
    slots = tl.arange(0, BLOCK_S)
    columns = tl.arange(0, BLOCK_D)
    alive = load_slot_mask(slot_mask, mask_stride, b, S, BLOCK_S)
    k += b * k_stride[0]
    v += b * v_stride[0]
    for tile in range(TILES):
        start = (run * TILES + tile) * BLOCK_N
        inside = pixels < N - start
        q_rows, o_rows = q + b * q_stride[0] + start * q_row, o + (b * N + start) * H * D
        w_sum = tl.zeros([BLOCK_N, BLOCK_S], tl.float32)
        for h in range(H):
            q_head, k_head = q_rows + h * q_stride[2], k + h * k_stride[2]
            s = dot_rows(q_head, q_row, inside, k_head, k_row, alive, S, D, BLOCK_N, BLOCK_S, BLOCK_D)
            p = _softmax_over_slots(s * scale, alive, S, BLOCK_S, 1)
            w_sum += p
            for d in range(0, D, BLOCK_D):
                v_tile = load_slots(v + h * v_stride[2], v_row, alive, d + columns, S, D, BLOCK_S, 1)
                o_tile = dot(p.to(v_tile.dtype), v_tile, tl.zeros([BLOCK_N, BLOCK_D], tl.float32))
                tl.store(
                    o_rows + pixels[:, None] * (H * D) + h * D + (d + columns)[None, :],
                    o_tile.to(o.dtype.element_ty),
                    mask=inside[:, None] & (d + columns < D)[None, :],
                )
        if w is not None:
            tl.store(
                w + (b * N + start) * S + pixels[:, None] * S + slots[None, :],
                (w_sum / H).to(w.dtype.element_ty),
                mask=inside[:, None] & (slots < S)[None, :],
            )


@triton.jit
def _backward_kernel(
    do,
    dw,
    q,
    k,
    v,
    slot_mask,
    dq,
    dk_partials,  # [splits, B, S, H, D] fp32
    dv_partials,
    scale,
    N,
    B,
    splits,
    tiles_per_split,
    do_stride,
    dw_stride,
    q_stride,
    k_stride,
    v_stride,
    mask_stride,
    S: tl.constexpr,
    H: tl.constexpr,
    do_row: tl.constexpr,
    dw_row: tl.constexpr,
    q_row: tl.constexpr,
    k_row: tl.constexpr,
    v_row: tl.constexpr,
    D: tl.constexpr,
    PACK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # Chunk and head change fastest: programs that run together read neighbouring memory.
    WIDTH: tl.constexpr = PACK * D
    CHUNKS: tl.constexpr = (WIDTH + BLOCK_D - 1) // BLOCK_D
    GROUPS: tl.constexpr = H // PACK
    program = tl.program_id(0)
    own = program % CHUNKS * BLOCK_D + tl.arange(0, BLOCK_D)
    h = program // CHUNKS % GROUPS * PACK
    split = (program // (CHUNKS * GROUPS) % splits).to(tl.int64)
    b = (program // (CHUNKS * GROUPS) // splits).to(tl.int64)
    slots = tl.arange(0, BLOCK_S) % S
    alive = load_slot_mask(slot_mask, mask_stride, b, S, BLOCK_S, PACK)
    do += b * do_stride[0] + h * do_stride[2]
    q += b * q_stride[0] + h * q_stride[2]
    k += b * k_stride[0] + h * k_stride[2]
    v += b * v_stride[0] + h * v_stride[2]
    dq += b * N * H * D + h * D

    k_tile = load_slots(k, k_row, alive, own, S, D, BLOCK_S, PACK)  # k and v stay for all tiles
    v_tile = load_slots(v, v_row, alive, own, S, D, BLOCK_S, PACK)
    dk = tl.zeros([BLOCK_S, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_S, BLOCK_D], tl.float32)
    first = split * tiles_per_split
    for tile in range(first, min(first + tiles_per_split, tl.cdiv(N, BLOCK_N))):
        start = tile * BLOCK_N
        pixels = tl.arange(0, BLOCK_N)
        inside = pixels < N - start
        q_tile = load_tile(q + start * q_row, pixels, q_row, inside, own, WIDTH)
        do_tile = load_tile(do + start * do_row, pixels, do_row, inside, own, WIDTH)
        if CHUNKS == 1:
            s = dot(q_tile, tl.trans(k_tile), tl.zeros([BLOCK_N, BLOCK_S], tl.float32))
            dp = dot(do_tile, tl.trans(v_tile), tl.zeros([BLOCK_N, BLOCK_S], tl.float32))
        else:
            q_rows, do_rows = q + start * q_row, do + start * do_row
            s = dot_rows(q_rows, q_row, inside, k, k_row, alive, S, D, BLOCK_N, BLOCK_S, BLOCK_D, PACK)
            dp = dot_rows(do_rows, do_row, inside, v, v_row, alive, S, D, BLOCK_N, BLOCK_S, BLOCK_D, PACK)
        p = _softmax_over_slots(s * scale, alive, S, BLOCK_S, PACK)
        if dw is not None:
            dw_rows = dw + b * dw_stride[0] + start * dw_row
            present = inside[:, None] & (tl.arange(0, BLOCK_S) < PACK * S)[None, :]
            dw_tile = tl.load(dw_rows + pixels[:, None] * dw_row + slots[None, :], mask=present, other=0.0)
            dp += dw_tile.to(tl.float32) / H
        ds = p * (dp - head_sum(p * dp, S, BLOCK_S, PACK)) * scale
        ds = ds.to(q_tile.dtype)
        dq_tile = dot(ds, k_tile, tl.zeros([BLOCK_N, BLOCK_D], tl.float32))
        tl.store(
            dq + start * H * D + pixels[:, None] * (H * D) + own[None, :],
            dq_tile.to(dq.dtype.element_ty),
            mask=inside[:, None] & (own < WIDTH)[None, :],
        )
        dk = dot(tl.trans(ds), q_tile, dk)
        dv = dot(tl.trans(p.to(do_tile.dtype)), do_tile, dv)

    to_slot = ((split * B + b) * S * H + h) * D + slots[:, None] * (H * D) + own[None, :]
    present = same_head(own, S, D, BLOCK_S, PACK)
    tl.store(dk_partials + to_slot, dk, mask=present)
    tl.store(dv_partials + to_slot, dv, mask=present)


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slot_mask: torch.Tensor | None,
    scale: float,
    return_weights: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o [B,N,H,D] and w [B,N,S] in q's dtype, both dense; w is empty, of shape [0], unless it is asked for."""
    q, k, v = unit_stride(q), unit_stride(k), unit_stride(v)
    (B, N, H, D), S = q.shape, k.shape[1]
    o = q.new_empty((B, N, H, D))
    w = q.new_empty((B, N, S) if return_weights else (0,))
    if o.numel() == 0:
        return o, w
    slot_mask = None if slot_mask is None else unit_stride(slot_mask)
    config = tuned_config("slot_cross_attention forward", q, S, D)
    tiles = neighbouring_tiles(config)
    with torch.cuda.device_of(q):
        _forward_kernel[(B * triton.cdiv(N, tiles * config.BLOCK_N),)](
            q,
            k,
            v,
            slot_mask,
            o,
            w if return_weights else None,
            scale,
            N,
            q.stride(),
            k.stride(),
            v.stride(),
            strides(slot_mask),
            q_row=q.stride(1),
            k_row=k.stride(1),
            v_row=v.stride(1),
            S=S,
            H=H,
            D=D,
            TILES=tiles,
            **config.options(),
        )
    return o, w


def backward(
    grad_out: torch.Tensor,
    grad_weights: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slot_mask: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of q, k and v, dense and in their dtypes; nothing of the forward pass is needed but its inputs."""
    grad_out, q, k, v = unit_stride(grad_out), unit_stride(q), unit_stride(k), unit_stride(v)
    (B, N, H, D), S = q.shape, k.shape[1]
    grad_q = q.new_empty((B, N, H, D))
    if grad_q.numel() == 0:
        return grad_q, k.new_zeros((B, S, H, D)), v.new_zeros((B, S, H, D))
    grad_k, grad_v = k.new_empty((B, S, H, D)), v.new_empty((B, S, H, D))
    slot_mask = None if slot_mask is None else unit_stride(slot_mask)
    grad_weights = None if grad_weights is None else unit_stride(grad_weights)
    pack = packed_heads(H, S, D, q.element_size(), q, k, v, grad_out)
    config = tuned_config("slot_cross_attention backward", q, pack * S, pack * D)
    splits, tiles_per_split = split_tiles(
        triton.cdiv(N, config.BLOCK_N), B * H // pack, 2 * grad_k.numel() * 4, grad_q.numel() * q.element_size()
    )
    partials = q.new_empty((2, splits, B, S, H, D), dtype=torch.float32)
    with torch.cuda.device_of(q):
        _backward_kernel[(B * splits * H // pack * triton.cdiv(pack * D, config.BLOCK_D),)](
            grad_out,
            grad_weights,
            q,
            k,
            v,
            slot_mask,
            grad_q,
            *partials,
            scale,
            N,
            B,
            splits,
            tiles_per_split,
            grad_out.stride(),
            strides(grad_weights),
            q.stride(),
            k.stride(),
            v.stride(),
            strides(slot_mask),
            do_row=grad_out.stride(1),
            q_row=q.stride(1),
            k_row=k.stride(1),
            v_row=v.stride(1),
            dw_row=None if grad_weights is None else grad_weights.stride(1),
            S=S,
            H=H,
            D=D,
            PACK=pack,
            **config.options(),
        )
        sum_partials(partials, grad_k, grad_v)
    return grad_q, grad_k, grad_v
