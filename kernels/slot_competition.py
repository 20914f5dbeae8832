"""Slot competition, the step of Slot Attention: slots are the queries and compete for the inputs.

    l[n,s,h] = scale k[n,h]·q[s,h]      a = softmax of l over slots and heads jointly, per input n
    mass[s,h] = Σ_n (a + eps)           u[s,h] = Σ_n (a + eps) v[n,h] / mass[s,h]         w[n,s] = Σ_h a[n,s,h]

    q, u [B,S,H,D]    k, v [B,N,H,D]    slot_mask [B,S] bool, True = takes part    mass [B,S,H]    w [B,N,S]

and backwards, with du and dw the gradients of u and w,

    da = du·(v − u)/mass + dw      δ[n] = Σ_{s,h} a da                 dl = a (da − δ)
    dk = scale Σ_s dl q            dv = Σ_s (a + eps)/mass du          dq = scale Σ_n dl k

There are at most 64 slots, so a tile [BLOCK_N, BLOCK_S] holds all slots of its inputs for one head. With one head, the
usual case, that is the whole softmax row and one pass over k and v does everything. So it is with several heads that
can be packed into one tile (see launch.py), up to 256 columns of them. Others take two passes: a first kernel,
`_rows_kernel`, walks over the heads with a running maximum and leaves two or three numbers per input (maximum, 1/sum,
δ), from which each head then works alone. a itself is never in memory.

One program owns a head, or all of them packed, and a run of tiles of inputs and adds its sums over n up in registers,
in fp32; a second kernel adds those partial sums in a fixed order. No atomics, so two runs give the same bits. What is
wider than BLOCK_D is read in chunks of columns, a second time for the sums; and where these have more columns than a
program has registers for, each slice of OWN columns has a program of its own that computes a again.

Masked slots get l = −inf, a = 0, no eps, u = 0 and mass = 0, and are never read. eps lives in fp32: 1e-8 is 0 in fp16.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import (
    UNFUSED,
    WIDEST_TILE,
    dot,
    dot_rows,
    load_slot_mask,
    load_slots,
    load_tile,
    padded,
    same_head,
    split_tiles,
    strides,
    sum_partials,
    tuned_config,
    unit_stride,
)

# a + eps is at most 1 + eps, and in fp16 it loses digits below 6e-5: multiplied by 2¹⁴ (exact) before the cast and
# divided by it after the product, it keeps them down to 4e-9, so that a slot which wins next to nothing still gets the
# right mean.
GAIN = tl.constexpr(16384.0)


@triton.jit
def _softmax_row(logits):
    """(maximum, 1/Σ exp(logits − maximum)) of each row; (0, 0) if no slot takes part, which makes a = 0."""
    largest = tl.max(logits, 1)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(tl.exp(logits - largest[:, None]), 1)
    return largest, 1.0 / tl.where(total == 0.0, 1.0, total)


@triton.jit
def _reciprocal(mass):
    return tl.where(mass > 0.0, 1.0 / tl.where(mass > 0.0, mass, 1.0), 0.0)


@triton.jit
def _slot_dot(
    du,
    u,
    du_row,
    alive,
    H: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PACK: tl.constexpr = 1,
):
    """du[s]·u[s] for each slot; u is dense."""
    total = tl.zeros([BLOCK_S], tl.float32)
    for d in range(0, PACK * D, BLOCK_D):
        columns = d + tl.arange(0, BLOCK_D)
        du_tile = load_slots(du, du_row, alive, columns, S, D, BLOCK_S, PACK)
        u_tile = load_slots(u, H * D, alive, columns, S, D, BLOCK_S, PACK)
        total += tl.sum(du_tile.to(tl.float32) * u_tile.to(tl.float32), 1)
    return total


@triton.jit
def _sum_of_heads(a, S: tl.constexpr, BLOCK_S: tl.constexpr, PACK: tl.constexpr):
    """w [BLOCK_N, BLOCK_S], of which the first S columns count: Σ over the packed heads of a."""
    if PACK == 1:
        return a
    else:
        rows, columns = tl.arange(0, BLOCK_S)[:, None], tl.arange(0, BLOCK_S)[None, :]
        chosen = ((rows % S == columns) & (rows < PACK * S)).to(tl.float32)
        return dot(a, chosen, tl.zeros_like(a))


@triton.jit
def _rows_kernel(
    q,
    k,
    v,
    slot_mask,
    w,  # forward only
    du,  # backward only, and so are dw, u, mass and delta
    dw,
    u,
    mass,
    largest,
    inverse,
    delta,
    scale,
    N,
    q_stride,
    k_stride,
    v_stride,
    mask_stride,
    du_stride,
    dw_stride,
    S: tl.constexpr,
    H: tl.constexpr,
    q_row: tl.constexpr,
    k_row: tl.constexpr,
    v_row: tl.constexpr,
    du_row: tl.constexpr,
    dw_row: tl.constexpr,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """For several heads: what the softmax over slots and heads leaves for each input."""
    tiles = tl.cdiv(N, BLOCK_N)
    b = (tl.program_id(0) // tiles).to(tl.int64)
    start = (tl.program_id(0) % tiles).to(tl.int64) * BLOCK_N
    inputs = tl.arange(0, BLOCK_N)
    slots = tl.arange(0, BLOCK_S)
    inside = inputs < N - start
    alive = load_slot_mask(slot_mask, mask_stride, b, S, BLOCK_S)
    q += b * q_stride[0]
    k += b * k_stride[0] + start * k_row

    running = tl.full([BLOCK_N], float("-inf"), tl.float32)  # maximum over the heads so far
    e_sum = tl.zeros([BLOCK_N, BLOCK_S], tl.float32)  # Σ_h exp(logits − running)
    e_da_sum = tl.zeros([BLOCK_N], tl.float32)  # Σ_{s,h} exp(logits − running) da
    for h in range(H):
        k_head, q_head = k + h * k_stride[2], q + h * q_stride[2]
        logits = dot_rows(k_head, k_row, inside, q_head, q_row, alive, S, D, BLOCK_N, BLOCK_S, BLOCK_D)
        logits = tl.where(alive[None, :], logits * scale, float("-inf"))
        now = tl.maximum(running, tl.max(logits, 1))
        safe = tl.where(now == float("-inf"), 0.0, now)
        shrink = tl.exp(running - safe)
        e = tl.exp(logits - safe[:, None])
        e_sum = e_sum * shrink[:, None] + e
        if du is not None:
            v_head = v + b * v_stride[0] + start * v_row + h * v_stride[2]
            du_head = du + b * du_stride[0] + h * du_stride[2]
            u_head = u + b * S * H * D + h * D
            da = dot_rows(v_head, v_row, inside, du_head, du_row, alive, S, D, BLOCK_N, BLOCK_S, BLOCK_D)
            du_u = _slot_dot(du_head, u_head, du_row, alive, H, S, D, BLOCK_S, BLOCK_D)
            mass_row = tl.load(mass + (b * S + slots) * H + h, mask=alive, other=0.0)
            da = (da - du_u[None, :]) * _reciprocal(mass_row)[None, :]
            e_da_sum = e_da_sum * shrink + tl.sum(e * da, 1)
        running = now

    total = tl.sum(e_sum, 1)
    scale_row = 1.0 / tl.where(total == 0.0, 1.0, total)
    a_sum = e_sum * scale_row[:, None]  # Σ_h a, which is w
    row = b * N + start + inputs
    tl.store(largest + row, tl.where(running == float("-inf"), 0.0, running), mask=inside)
    tl.store(inverse + row, scale_row, mask=inside)
    if w is not None:
        tl.store(
            w + (b * N + start) * S + inputs[:, None] * S + slots[None, :],
            a_sum.to(w.dtype.element_ty),
            mask=inside[:, None] & (slots < S)[None, :],
        )
    if du is not None:
        delta_row = e_da_sum * scale_row
        if dw is not None:
            dw_tile = load_tile(dw + b * dw_stride[0] + start * dw_row, inputs, dw_row, inside, slots, S)
            delta_row += tl.sum(a_sum * dw_tile.to(tl.float32), 1)
        tl.store(delta + row, delta_row, mask=inside)


@triton.jit
def _forward_kernel(
    q,
    k,
    v,
    slot_mask,
    largest,  # [B,N], None where a tile holds the whole row
    inverse,
    w,  # None where _rows_kernel writes it
    u_partials,  # [splits,B,S,H,D] fp32
    mass_partials,  # [splits,B,S,H] fp32
    scale,
    eps,
    N,
    B,
    splits,
    tiles_per_split,
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
    PACK: tl.constexpr,
    OWN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # Slice and head change fastest: programs that run together read neighbouring memory.
    WIDTH: tl.constexpr = PACK * D
    SLICES: tl.constexpr = (WIDTH + OWN - 1) // OWN
    GROUPS: tl.constexpr = H // PACK
    WHOLE: tl.constexpr = BLOCK_D >= WIDTH
    program = tl.program_id(0)
    h = program // SLICES % GROUPS * PACK
    split = (program // (SLICES * GROUPS) % splits).to(tl.int64)
    b = (program // (SLICES * GROUPS) // splits).to(tl.int64)  # 64 bit: a batch may hold more than 2³¹ elements
    inputs = tl.arange(0, BLOCK_N)
    rows = tl.arange(0, BLOCK_S)
    own = program % SLICES * OWN + tl.arange(0, OWN)
    alive = load_slot_mask(slot_mask, mask_stride, b, S, BLOCK_S, PACK)
    writes = program % SLICES == 0  # w and mass are the same in all slices
    q += b * q_stride[0] + h * q_stride[2]
    k += b * k_stride[0] + h * k_stride[2]
    v += b * v_stride[0] + h * v_stride[2]

    if WHOLE:  # q stays for all tiles
        q_tile = load_slots(q, q_row, alive, own, S, D, BLOCK_S, PACK)
    a_sum = tl.zeros([BLOCK_N, BLOCK_S], tl.float32)
    av_sum = tl.zeros([BLOCK_S, OWN], tl.float32)
    first = split * tiles_per_split
    for tile in range(first, min(first + tiles_per_split, tl.cdiv(N, BLOCK_N))):
        start = tile * BLOCK_N
        inside = inputs < N - start
        k_rows = k + start * k_row
        if WHOLE:
            k_tile = load_tile(k_rows, inputs, k_row, inside, own, WIDTH)
            logits = dot(k_tile, tl.trans(q_tile), tl.zeros([BLOCK_N, BLOCK_S], tl.float32))
        else:
            logits = dot_rows(k_rows, k_row, inside, q, q_row, alive, S, D, BLOCK_N, BLOCK_S, BLOCK_D, PACK)
        v_tile = load_tile(v + start * v_row, inputs, v_row, inside, own, WIDTH)
        logits = tl.where(alive[None, :], logits * scale, float("-inf"))
        if largest is None:
            row_max, row_inverse = _softmax_row(logits)
        else:
            row_max = tl.load(largest + b * N + start + inputs, mask=inside, other=0.0)
            row_inverse = tl.load(inverse + b * N + start + inputs, mask=inside, other=0.0)
        a = tl.exp(logits - row_max[:, None]) * row_inverse[:, None]
        if w is not None:
            tl.store(
                w + (b * N + start) * S + inputs[:, None] * S + rows[None, :],
                _sum_of_heads(a, S, BLOCK_S, PACK).to(w.dtype.element_ty),
                mask=inside[:, None] & (rows < tl.where(writes, S, 0))[None, :],
            )
        a = tl.where(alive[None, :] & inside[:, None], a + eps, 0.0)
        a_sum += a
        av_sum = dot(tl.trans((a * GAIN).to(v_tile.dtype)), v_tile, av_sum)

    first_slot = (split * B + b) * S
    tl.store(
        mass_partials + (first_slot + rows % S) * H + h + rows // S,
        tl.sum(a_sum, 0),
        mask=rows < tl.where(writes, PACK * S, 0),
    )
    tl.store(
        u_partials + (first_slot * H + h) * D + (rows % S)[:, None] * (H * D) + own[None, :],
        av_sum / GAIN,
        mask=same_head(own, S, D, BLOCK_S, PACK),
    )


@triton.jit
def _normalise_kernel(
    u_partials,  # [splits, rows, D], rows = B·S·H
    mass_partials,  # [splits, rows]
    u,
    mass,
    rows,
    splits,
    D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_D)
    u_sum = tl.zeros([BLOCK_P, BLOCK_D], tl.float32)
    mass_sum = tl.zeros([BLOCK_P], tl.float32)
    for start in range(0, splits, BLOCK_P):
        parts = start + tl.arange(0, BLOCK_P)
        inside = parts < splits
        at = parts.to(tl.int64) * rows + row
        u_sum += load_tile(u_partials, at, D, inside, columns, D)
        mass_sum += tl.load(mass_partials + at, mask=inside, other=0.0)
    total = tl.sum(mass_sum, 0)
    tl.store(mass + row, total)
    tl.store(u + row * D + columns, (tl.sum(u_sum, 0) * _reciprocal(total)).to(u.dtype.element_ty), mask=columns < D)


@triton.jit
def _backward_kernel(
    du,
    dw,
    q,
    k,
    v,
    slot_mask,
    u,
    mass,
    largest,  # [B,N], None where a tile holds the whole row
    inverse,
    delta,
    dk,
    dv,
    dq_partials,  # [splits,B,S,H,D] fp32
    scale,
    eps,
    N,
    B,
    splits,
    tiles_per_split,
    q_stride,
    k_stride,
    v_stride,
    mask_stride,
    du_stride,
    dw_stride,
    S: tl.constexpr,
    H: tl.constexpr,
    q_row: tl.constexpr,
    k_row: tl.constexpr,
    v_row: tl.constexpr,
    du_row: tl.constexpr,
    dw_row: tl.constexpr,
    D: tl.constexpr,
    PACK: tl.constexpr,
    OWN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    WIDTH: tl.constexpr = PACK * D
    SLICES: tl.constexpr = (WIDTH + OWN - 1) // OWN
    GROUPS: tl.constexpr = H // PACK
    WHOLE: tl.constexpr = BLOCK_D >= WIDTH
    program = tl.program_id(0)
    h = program // SLICES % GROUPS * PACK
    split = (program // (SLICES * GROUPS) % splits).to(tl.int64)
    b = (program // (SLICES * GROUPS) // splits).to(tl.int64)
    inputs = tl.arange(0, BLOCK_N)
    rows = tl.arange(0, BLOCK_S)
    own = program % SLICES * OWN + tl.arange(0, OWN)
    alive = load_slot_mask(slot_mask, mask_stride, b, S, BLOCK_S, PACK)
    q += b * q_stride[0] + h * q_stride[2]
    k += b * k_stride[0] + h * k_stride[2]
    v += b * v_stride[0] + h * v_stride[2]
    du += b * du_stride[0] + h * du_stride[2]
    u += b * S * H * D + h * D

    inverse_mass = _reciprocal(tl.load(mass + (b * S + rows % S) * H + h + rows // S, mask=alive, other=0.0))
    du_u = _slot_dot(du, u, du_row, alive, H, S, D, BLOCK_S, BLOCK_D, PACK)
    if WHOLE:  # q and du stay for all tiles
        q_tile = load_slots(q, q_row, alive, own, S, D, BLOCK_S, PACK)
        du_tile = load_slots(du, du_row, alive, own, S, D, BLOCK_S, PACK)
    dq = tl.zeros([BLOCK_S, OWN], tl.float32)
    first = split * tiles_per_split
    for tile in range(first, min(first + tiles_per_split, tl.cdiv(N, BLOCK_N))):
        start = tile * BLOCK_N
        inside = inputs < N - start
        k_rows, v_rows = k + start * k_row, v + start * v_row
        if WHOLE:
            k_tile = load_tile(k_rows, inputs, k_row, inside, own, WIDTH)
            v_tile = load_tile(v_rows, inputs, v_row, inside, own, WIDTH)
            logits = dot(k_tile, tl.trans(q_tile), tl.zeros([BLOCK_N, BLOCK_S], tl.float32))
            da = dot(v_tile, tl.trans(du_tile), tl.zeros([BLOCK_N, BLOCK_S], tl.float32))
        else:
            logits = dot_rows(k_rows, k_row, inside, q, q_row, alive, S, D, BLOCK_N, BLOCK_S, BLOCK_D, PACK)
            da = dot_rows(v_rows, v_row, inside, du, du_row, alive, S, D, BLOCK_N, BLOCK_S, BLOCK_D, PACK)
        logits = tl.where(alive[None, :], logits * scale, float("-inf"))
        if largest is None:
            row_max, row_inverse = _softmax_row(logits)
        else:
            row_max = tl.load(largest + b * N + start + inputs, mask=inside, other=0.0)
            row_inverse = tl.load(inverse + b * N + start + inputs, mask=inside, other=0.0)
        a = tl.exp(logits - row_max[:, None]) * row_inverse[:, None]
        da = (da - du_u[None, :]) * inverse_mass[None, :]
        if dw is not None:
            dw_rows = dw + b * dw_stride[0] + start * dw_row
            exists = inside[:, None] & (rows < PACK * S)[None, :]
            dw_tile = tl.load(dw_rows + inputs[:, None] * dw_row + (rows % S)[None, :], mask=exists, other=0.0)
            da += dw_tile.to(tl.float32)
        if largest is None:
            row_delta = tl.sum(a * da, 1)
        else:
            row_delta = tl.load(delta + b * N + start + inputs, mask=inside, other=0.0)
        dl = (a * (da - row_delta[:, None]) * scale).to(k.dtype.element_ty)
        share = tl.where(alive[None, :], a + eps, 0.0) * (inverse_mass * GAIN)[None, :]  # (a + eps)/mass, at most 1
        if not WHOLE:  # only now: there is no memory to keep them in before
            q_tile = load_slots(q, q_row, alive, own, S, D, BLOCK_S, PACK)
            du_tile = load_slots(du, du_row, alive, own, S, D, BLOCK_S, PACK)
        dk_tile = dot(dl, q_tile, tl.zeros([BLOCK_N, OWN], tl.float32))
        dv_tile = dot(share.to(du.dtype.element_ty), du_tile, tl.zeros([BLOCK_N, OWN], tl.float32)) / GAIN
        to_input = ((b * N + start) * H + h) * D + inputs[:, None] * (H * D) + own[None, :]
        present = inside[:, None] & (own < WIDTH)[None, :]
        tl.store(dk + to_input, dk_tile.to(dk.dtype.element_ty), mask=present)
        tl.store(dv + to_input, dv_tile.to(dv.dtype.element_ty), mask=present)
        if not WHOLE:
            k_tile = load_tile(k_rows, inputs, k_row, inside, own, WIDTH)
        dq = dot(tl.trans(dl), k_tile, dq)

    tl.store(
        dq_partials + ((split * B + b) * S * H + h) * D + (rows % S)[:, None] * (H * D) + own[None, :],
        dq,
        mask=same_head(own, S, D, BLOCK_S, PACK),
    )


MOST_OWNED = 32  # slots of a tile, packed or not, with which a program has registers for u or dq of all columns
NORMALISE_SPLITS = 8  # partial sums _normalise_kernel reads at a time


def _packed_heads(H: int, S: int, D: int, *tensors: torch.Tensor) -> int:
    """All heads, where one tile holds them and they lie side by side; else one."""
    widest = WIDEST_TILE if H * S <= MOST_OWNED else WIDEST_TILE // 2
    fits = H * S <= 64 and widest >= H * D and all(tensor.stride(-2) == D for tensor in tensors)
    return H if fits else 1


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slot_mask: torch.Tensor | None,
    scale: float,
    eps: float,
    return_weights: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """u [B,S,H,D], w [B,N,S] (empty, of shape [0], unless asked for) and mass [B,S,H] in fp32, all dense."""
    q, k, v = unit_stride(q), unit_stride(k), unit_stride(v)
    slot_mask = None if slot_mask is None else unit_stride(slot_mask)
    (B, N, H, D), S = k.shape, q.shape[1]
    w = k.new_empty((B, N, S) if return_weights else (0,))
    if k.numel() == 0:
        return v.new_zeros((B, S, H, D)), w, q.new_zeros((B, S, H), dtype=torch.float32)
    u = v.new_empty((B, S, H, D))
    mass = q.new_empty((B, S, H), dtype=torch.float32)
    pack = _packed_heads(H, S, D, q, k, v)
    config = tuned_config("slot_competition forward", k, pack * S, pack * D)
    own = padded(pack * D) if config.BLOCK_S <= MOST_OWNED else config.BLOCK_D
    tiles = triton.cdiv(N, config.BLOCK_N)
    splits, tiles_per_split = split_tiles(tiles, B * H // pack, u.numel() * 4, k.numel() * k.element_size())
    u_partials = q.new_empty((splits, B, S, H, D), dtype=torch.float32)
    mass_partials = q.new_empty((splits, B, S, H), dtype=torch.float32)
    w_to_write = w if return_weights else None
    largest = inverse = None
    with torch.cuda.device_of(q):
        if pack < H:
            largest, inverse = q.new_empty((2, B, N), dtype=torch.float32)
            _rows_kernel[(B * tiles,)](
                q,
                k,
                v,
                slot_mask,
                w_to_write,
                None,
                None,
                None,
                None,
                largest,
                inverse,
                None,
                scale,
                N,
                q.stride(),
                k.stride(),
                v.stride(),
                strides(slot_mask),
                None,
                None,
                q_row=q.stride(1),
                k_row=k.stride(1),
                v_row=v.stride(1),
                du_row=None,
                dw_row=None,
                S=S,
                H=H,
                D=D,
                **config.options(),
            )
            w_to_write = None
        _forward_kernel[(B * splits * H // pack * triton.cdiv(pack * D, own),)](
            q,
            k,
            v,
            slot_mask,
            largest,
            inverse,
            w_to_write,
            u_partials,
            mass_partials,
            scale,
            eps,
            N,
            B,
            splits,
            tiles_per_split,
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
            PACK=pack,
            OWN=own,
            **config.options(),
        )
        _normalise_kernel[(B * S * H,)](
            u_partials,
            mass_partials,
            u,
            mass,
            B * S * H,
            splits,
            D=D,
            BLOCK_P=NORMALISE_SPLITS,
            **UNFUSED,
            BLOCK_D=triton.next_power_of_2(D),
        )
    return u, w, mass


def backward(
    grad_updates: torch.Tensor,
    grad_weights: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slot_mask: torch.Tensor | None,
    weights: torch.Tensor | None,
    updates: torch.Tensor,
    mass: torch.Tensor,
    scale: float,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of q, k and v, dense and in their dtypes; updates and mass are those of the forward pass.

    So are weights, which the C++ kernels read where they hold a. Here a is computed again: a GPU has products to spare
    next to the memory it reads.
    """
    grad_updates, q, k, v = unit_stride(grad_updates), unit_stride(q), unit_stride(k), unit_stride(v)
    (B, N, H, D), S = k.shape, q.shape[1]
    grad_k, grad_v = k.new_empty((B, N, H, D)), v.new_empty((B, N, H, D))
    if k.numel() == 0:
        return q.new_zeros((B, S, H, D)), grad_k, grad_v
    grad_q = q.new_empty((B, S, H, D))
    updates, mass = updates.contiguous(), mass.contiguous()
    slot_mask = None if slot_mask is None else unit_stride(slot_mask)
    grad_weights = None if grad_weights is None else unit_stride(grad_weights)
    pack = _packed_heads(H, S, D, grad_updates, q, k, v)
    config = tuned_config("slot_competition backward", k, pack * S, pack * D)
    own = padded(pack * D) if config.BLOCK_S <= MOST_OWNED else config.BLOCK_D
    tiles = triton.cdiv(N, config.BLOCK_N)
    splits, tiles_per_split = split_tiles(tiles, B * H // pack, grad_q.numel() * 4, k.numel() * k.element_size())
    partials = q.new_empty((1, splits, B, S, H, D), dtype=torch.float32)
    largest = inverse = delta = None
    with torch.cuda.device_of(q):
        if pack < H:
            largest, inverse, delta = q.new_empty((3, B, N), dtype=torch.float32)
            _rows_kernel[(B * tiles,)](
                q,
                k,
                v,
                slot_mask,
                None,
                grad_updates,
                grad_weights,
                updates,
                mass,
                largest,
                inverse,
                delta,
                scale,
                N,
                q.stride(),
                k.stride(),
                v.stride(),
                strides(slot_mask),
                grad_updates.stride(),
                strides(grad_weights),
                q_row=q.stride(1),
                k_row=k.stride(1),
                v_row=v.stride(1),
                du_row=grad_updates.stride(1),
                dw_row=None if grad_weights is None else grad_weights.stride(1),
                S=S,
                H=H,
                D=D,
                **config.options(),
            )
        _backward_kernel[(B * splits * H // pack * triton.cdiv(pack * D, own),)](
            grad_updates,
            grad_weights,
            q,
            k,
            v,
            slot_mask,
            updates,
            mass,
            largest,
            inverse,
            delta,
            grad_k,
            grad_v,
            *partials,
            scale,
            eps,
            N,
            B,
            splits,
            tiles_per_split,
            q.stride(),
            k.stride(),
            v.stride(),
            strides(slot_mask),
            grad_updates.stride(),
            strides(grad_weights),
            q_row=q.stride(1),
            k_row=k.stride(1),
            v_row=v.stride(1),
            du_row=grad_updates.stride(1),
            dw_row=None if grad_weights is None else grad_weights.stride(1),
            S=S,
            H=H,
            D=D,
            PACK=pack,
            OWN=own,
            **config.options(),
        )
        sum_partials(partials, grad_q)
    return grad_q, grad_k, grad_v
