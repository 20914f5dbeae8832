"""Slot cross-attention of jets: how pixels attend to slots, and how that changes as slots move along u or along v.

Calculated as jets (see jet.py), with x·y the product over the head's columns,

    s[n,s] = scale q[n]·k[s]        p = softmax over slots of s, per head        o[n] = Σ_s p[n,s] v[s]

    q [4,B,N,H,D], or [1,B,N,H,D] where the queries do not move    o [4,B,N,H,D]
    k, v [2,B,S,H,D] = (k, k_t)    side [B,S] bool    slot_mask [B,S] bool, True where the slot takes part

A slot moves along u (side True) or along v, never both, so one tangent k_t is enough: k_u = k_t where side, k_v = k_t
elsewhere, and k_uv = 0. With A = [side] and B = [not side] the jets spelled out are

    s_u  = q_u·k + A q·k_t          s_v = q_v·k + B q·k_t          s_uv = q_uv·k + A q_v·k_t + B q_u·k_t
    p_u  = p (s_u − Σ p s_u)        p_v likewise                   p_uv = p (c − Σ p c)
    o_u  = p_u v + A p v_t          o_v = p_v v + B p v_t          o_uv = p_uv v + (A p_v + B p_u) v_t

where c = s_uv + (s_u − Σ p s_u)(s_v − Σ p s_v). And backwards, with ĝ the reversed gradient of o,

    p̂ = ĝ·v        ŝ = p (p̂ − Σ_s p p̂)        q̂ = scale ŝ k        k̂ = scale Σ_n ŝ q        v̂ = Σ_n p ĝ

each then reversed; the gradient of k_t is that of k_u or k_v, whichever moves the slot. All five products are of three
kinds: pixels with slots (s and p̂), weights with slots (o and q̂), and weights with pixels (k̂ and v̂).

As in slot_cross_attention.py a tile [BLOCK_N, BLOCK_S] holds the whole softmax row, padded and masked slots are never
read, and an image without slots gets o = 0. Forward one program walks over a few tiles and neighbouring heads; backward
it owns a head, or PACK heads in one tile (see launch.py), walks over a run of pixel tiles, keeps dk and dv in
registers, and `launch.sum_partials` ends the sum. A head wider than BLOCK_D is read in chunks of columns, backward a
second time for the gradients; and where these have more columns than a program has registers for, each slice of OWN
columns has a program of its own, which computes p again.

`x_head`, the stride between heads, is known at compile time as `x_row` is (see launch.py): heads of 8, 24 or 40 columns
are then seen to start at whole 16 bytes, which of a run-time stride is known for multiples of 16 only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import jet
from .launch import (
    dot,
    head_max,
    head_sum,
    load_slot_mask,
    load_slots,
    load_tile,
    neighbouring_heads,
    neighbouring_tiles,
    owned_columns,
    packed_heads,
    same_head,
    split_tiles,
    strides,
    sum_partials,
    tuned_config,
    unit_stride,
)


@triton.jit
def _load_pixels(
    x, row: tl.constexpr, inside, columns, CHANNELS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr
):
    """A tile of each channel; of one channel, four times the same, and the last three are not to be used."""
    pixels = tl.arange(0, BLOCK_N)
    value = load_tile(x[0], pixels, row, inside, columns, WIDTH)
    if CHANNELS == 1:
        return value, value, value, value
    else:
        u = load_tile(x[1], pixels, row, inside, columns, WIDTH)
        v = load_tile(x[2], pixels, row, inside, columns, WIDTH)
        return value, u, v, load_tile(x[3], pixels, row, inside, columns, WIDTH)


@triton.jit
def _scores(x, k, k_t, side, s, CHANNELS: tl.constexpr):
    """Pixels with slots: s + x·k [BLOCK_N, BLOCK_S]."""
    k, k_t = tl.trans(k), tl.trans(k_t)
    zero = tl.zeros_like(s[0])
    moved = dot(x[0], k_t, zero)
    s_u = s[1] + tl.where(side, moved, 0.0)
    s_v = s[2] + tl.where(side, 0.0, moved)
    s_uv = s[3]
    if CHANNELS == 4:
        s_u = dot(x[1], k, s_u)
        s_v = dot(x[2], k, s_v)
        s_uv = dot(x[3], k, s_uv + tl.where(side, dot(x[2], k_t, zero), dot(x[1], k_t, zero)))
    return dot(x[0], k, s[0]), s_u, s_v, s_uv


@triton.jit
def _scores_of_rows(
    x,  # where the pixels' rows start, in each channel
    x_row: tl.constexpr,
    inside,
    k,  # where the slots' rows start
    k_t,
    k_row: tl.constexpr,
    alive,
    side,
    CHANNELS: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    PACK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """x·k over the whole width, BLOCK_D columns at a time."""
    zero = tl.zeros([BLOCK_N, BLOCK_S], tl.float32)
    s = (zero, zero, zero, zero)
    for d in range(0, PACK * D, BLOCK_D):
        columns = d + tl.arange(0, BLOCK_D)
        x_tile = _load_pixels(x, x_row, inside, columns, CHANNELS, PACK * D, BLOCK_N)
        k_tile = load_slots(k, k_row, alive, columns, S, D, BLOCK_S, PACK)
        k_t_tile = load_slots(k_t, k_row, alive, columns, S, D, BLOCK_S, PACK)
        s = _scores(x_tile, k_tile, k_t_tile, side, s, CHANNELS)
    return s


@triton.jit
def _head_sums(a, S: tl.constexpr, BLOCK_S: tl.constexpr, PACK: tl.constexpr):
    """The sum over the slots of a head, channel by channel."""
    return (
        head_sum(a[0], S, BLOCK_S, PACK),
        head_sum(a[1], S, BLOCK_S, PACK),
        head_sum(a[2], S, BLOCK_S, PACK),
        head_sum(a[3], S, BLOCK_S, PACK),
    )


@triton.jit
def _softmax(s, alive, S: tl.constexpr, BLOCK_S: tl.constexpr, PACK: tl.constexpr):
    """The jet p from the jet s; zero, not NaN, where no slot takes part."""
    logits = tl.where(alive[None, :], s[0], float("-inf"))
    e = tl.exp(logits - head_max(logits, S, BLOCK_S, PACK))
    total = head_sum(e, S, BLOCK_S, PACK)
    p = e * (1.0 / tl.where(total == 0.0, 1.0, total))
    c_u = s[1] - head_sum(p * s[1], S, BLOCK_S, PACK)
    c_v = s[2] - head_sum(p * s[2], S, BLOCK_S, PACK)
    c_uv = s[3] + c_u * c_v
    return p, p * c_u, p * c_v, p * (c_uv - head_sum(p * c_uv, S, BLOCK_S, PACK))


@triton.jit
def _mix(p, v, v_t, side, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """Weights with slots: the jet Σ_s p v [BLOCK_N, BLOCK_D]."""
    zero = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    o_u = dot(tl.where(side, p[0], 0.0).to(v.dtype), v_t, zero)  # all of v_t, then all of v: one is in registers
    o_v = dot(tl.where(side, 0.0, p[0]).to(v.dtype), v_t, zero)
    o_uv = dot(tl.where(side, p[2], p[1]).to(v.dtype), v_t, zero)
    o = dot(p[0].to(v.dtype), v, zero)
    o_u = dot(p[1].to(v.dtype), v, o_u)
    o_v = dot(p[2].to(v.dtype), v, o_v)
    o_uv = dot(p[3].to(v.dtype), v, o_uv)
    return o, o_u, o_v, o_uv


@triton.jit
def _gather(p, x, side, dk, dk_t, CHANNELS: tl.constexpr):
    """Weights with pixels: adds k̂ = Σ_n p x, reversed, to dk and dk_t [BLOCK_S, BLOCK_D]."""
    dtype = x[0].dtype
    dk = dot(tl.trans(p[3].to(dtype)), x[0], dk)
    dk_t = dot(tl.trans(tl.where(side, p[2], p[1]).to(dtype)), x[0], dk_t)
    if CHANNELS == 4:
        dk = dot(tl.trans(p[2].to(dtype)), x[1], dk)
        dk_t = dot(tl.trans(tl.where(side, 0.0, p[0]).to(dtype)), x[1], dk_t)
        dk = dot(tl.trans(p[1].to(dtype)), x[2], dk)
        dk_t = dot(tl.trans(tl.where(side, p[0], 0.0).to(dtype)), x[2], dk_t)
        dk = dot(tl.trans(p[0].to(dtype)), x[3], dk)
    return dk, dk_t


@triton.jit
def _jet_forward_kernel(
    q,
    k,
    v,
    side,
    slot_mask,
    o,
    scale,
    N,
    q_stride,
    k_stride,
    v_stride,
    side_stride,
    mask_stride,
    o_stride,
    CHANNELS: tl.constexpr,
    S: tl.constexpr,
    H: tl.constexpr,
    q_row: tl.constexpr,
    k_row: tl.constexpr,
    v_row: tl.constexpr,
    q_head: tl.constexpr,
    k_head: tl.constexpr,
    v_head: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    GROUPS: tl.constexpr = H // HEADS  # change fastest: programs that run together read neighbouring memory
    runs = tl.cdiv(N, TILES * BLOCK_N)
    first_head = tl.program_id(0) % GROUPS * HEADS
    b = (tl.program_id(0) // GROUPS // runs).to(tl.int64)  # 64 bit: a batch may hold more than 2³¹ elements
    run = (tl.program_id(0) // GROUPS % runs).to(tl.int64)
    pixels = tl.arange(0, BLOCK_N)
    alive = load_slot_mask(slot_mask, mask_stride, b, S, BLOCK_S)
    by_u = load_slot_mask(side, side_stride, b, S, BLOCK_S)[None, :]
    for step in range(TILES * HEADS):
        start = (run * TILES + step // HEADS) * BLOCK_N
        h = first_head + step % HEADS
        inside = pixels < N - start
        q_rows = jet.channels(q + b * q_stride[1] + h * q_head + start * q_row, q_stride[0])
        o_rows = jet.channels(o + b * o_stride[1] + h * D + start * (H * D), o_stride[0])
        k_rows = k + b * k_stride[1] + h * k_head
        v_rows = v + b * v_stride[1] + h * v_head
        s = _scores_of_rows(
            q_rows,
            q_row,
            inside,
            k_rows,
            k_rows + k_stride[0],
            k_row,
            alive,
            by_u,
            CHANNELS,
            S,
            D,
            1,
            BLOCK_N,
            BLOCK_S,
            BLOCK_D,
        )
        p = _softmax(jet.scale(s, scale), alive, S, BLOCK_S, 1)
        for d in range(0, D, BLOCK_D):
            columns = d + tl.arange(0, BLOCK_D)
            v_tile = load_slots(v_rows, v_row, alive, columns, S, D, BLOCK_S, 1)
            v_t_tile = load_slots(v_rows + v_stride[0], v_row, alive, columns, S, D, BLOCK_S, 1)
            offsets = pixels[:, None] * (H * D) + columns[None, :]
            present = inside[:, None] & (columns < D)[None, :]
            jet.store(o_rows, offsets, _mix(p, v_tile, v_t_tile, by_u, BLOCK_N, BLOCK_D), present, 4)


@triton.jit
def _jet_backward_kernel(
    do,
    q,
    k,
    v,
    side,
    slot_mask,
    dq,
    dk_partials,  # [splits, 2, B, S, H, D] fp32
    dv_partials,
    scale,
    N,
    B,
    splits,
    tiles_per_split,
    do_stride,
    q_stride,
    k_stride,
    v_stride,
    side_stride,
    mask_stride,
    dq_stride,
    CHANNELS: tl.constexpr,
    S: tl.constexpr,
    H: tl.constexpr,
    do_row: tl.constexpr,
    do_head: tl.constexpr,
    q_row: tl.constexpr,
    k_row: tl.constexpr,
    v_row: tl.constexpr,
    q_head: tl.constexpr,
    k_head: tl.constexpr,
    v_head: tl.constexpr,
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
    own = (program % SLICES * OWN).to(tl.int64) + tl.arange(0, OWN)  # 64 bit, as addresses are: one register for all
    h = program // SLICES % GROUPS * PACK
    split = (program // (SLICES * GROUPS) % splits).to(tl.int64)
    b = (program // (SLICES * GROUPS) // splits).to(tl.int64)
    pixels = tl.arange(0, BLOCK_N)
    alive = load_slot_mask(slot_mask, mask_stride, b, S, BLOCK_S, PACK)
    by_u = load_slot_mask(side, side_stride, b, S, BLOCK_S, PACK)[None, :]
    do += b * do_stride[1] + h * do_head
    q += b * q_stride[1] + h * q_head
    k += b * k_stride[1] + h * k_head
    v += b * v_stride[1] + h * v_head
    dq += b * dq_stride[1] + h * D

    k_t, v_t = k + k_stride[0], v + v_stride[0]
    if WHOLE:  # k and v stay for all tiles
        k_tile = load_slots(k, k_row, alive, own, S, D, BLOCK_S, PACK)
        k_t_tile = load_slots(k_t, k_row, alive, own, S, D, BLOCK_S, PACK)
        v_tile = load_slots(v, v_row, alive, own, S, D, BLOCK_S, PACK)
        v_t_tile = load_slots(v_t, v_row, alive, own, S, D, BLOCK_S, PACK)
    zero = tl.zeros([BLOCK_N, BLOCK_S], tl.float32)
    zeros = (zero, zero, zero, zero)
    dk = tl.zeros([BLOCK_S, OWN], tl.float32)
    dk_t = tl.zeros([BLOCK_S, OWN], tl.float32)
    dv = tl.zeros([BLOCK_S, OWN], tl.float32)
    dv_t = tl.zeros([BLOCK_S, OWN], tl.float32)
    first = split * tiles_per_split * BLOCK_N
    # Of chunks addresses are calculated again for each tile: kept, there are more of them than registers.
    for start in tl.range(first, min(first + tiles_per_split * BLOCK_N, N), BLOCK_N, disable_licm=not WHOLE):
        inside = pixels < N - start
        q_rows = jet.channels(q + start * q_row, q_stride[0])
        do_rows = jet.reverse(jet.channels(do + start * do_row, do_stride[0]))
        if WHOLE:
            q_tile = _load_pixels(q_rows, q_row, inside, own, CHANNELS, WIDTH, BLOCK_N)
            s = _scores(q_tile, k_tile, k_t_tile, by_u, zeros, CHANNELS)
            p = _softmax(jet.scale(s, scale), alive, S, BLOCK_S, PACK)
            do_tile = _load_pixels(do_rows, do_row, inside, own, 4, WIDTH, BLOCK_N)
            dp = _scores(do_tile, v_tile, v_t_tile, by_u, zeros, 4)
            dv, dv_t = _gather(p, do_tile, by_u, dv, dv_t, 4)  # now, and the registers of do_tile are free
        else:
            s = _scores_of_rows(
                q_rows, q_row, inside, k, k_t, k_row, alive, by_u, CHANNELS, S, D, PACK, BLOCK_N, BLOCK_S, BLOCK_D
            )
            p = _softmax(jet.scale(s, scale), alive, S, BLOCK_S, PACK)
            dp = _scores_of_rows(
                do_rows, do_row, inside, v, v_t, v_row, alive, by_u, 4, S, D, PACK, BLOCK_N, BLOCK_S, BLOCK_D
            )
        p_dp = _head_sums(jet.multiply(p, dp), S, BLOCK_S, PACK)
        ds = jet.scale(jet.multiply(p, jet.subtract(dp, p_dp)), scale)
        if not WHOLE:  # only now: there are no registers to keep them in before
            q_tile = _load_pixels(q_rows, q_row, inside, own, CHANNELS, WIDTH, BLOCK_N)
            do_tile = _load_pixels(do_rows, do_row, inside, own, 4, WIDTH, BLOCK_N)
            dv, dv_t = _gather(p, do_tile, by_u, dv, dv_t, 4)
        dk, dk_t = _gather(ds, q_tile, by_u, dk, dk_t, CHANNELS)
        if not WHOLE:
            k_tile = load_slots(k, k_row, alive, own, S, D, BLOCK_S, PACK)
            k_t_tile = load_slots(k_t, k_row, alive, own, S, D, BLOCK_S, PACK)
        dq_rows = jet.channels(dq + start * (H * D), dq_stride[0])
        offsets = pixels[:, None] * (H * D) + own[None, :]
        present = inside[:, None] & (own < WIDTH)[None, :]
        dq_tile = jet.reverse(_mix(ds, k_tile, k_t_tile, by_u, BLOCK_N, OWN))
        if CHANNELS == 4:
            jet.store(dq_rows, offsets, dq_tile, present, 4)
        else:
            tl.store(dq_rows[0] + offsets, dq_tile[0].to(dq.dtype.element_ty), mask=present)

    row = (tl.arange(0, BLOCK_S) % S)[:, None] * (H * D) + own[None, :]
    to_slot = ((split * 2 * B + b) * S * H + h) * D + row
    to_tangent = (((split * 2 + 1) * B + b) * S * H + h) * D + row
    present = same_head(own, S, D, BLOCK_S, PACK)
    tl.store(dk_partials + to_slot, dk, mask=present)
    tl.store(dk_partials + to_tangent, dk_t, mask=present)
    tl.store(dv_partials + to_slot, dv, mask=present)
    tl.store(dv_partials + to_tangent, dv_t, mask=present)


MOST_SUMMED = 1024  # elements of each of dk, dk_t, dv and dv_t that a program adds up, for each packed head


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    side: torch.Tensor,
    slot_mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """o [4,B,N,H,D] in q's dtype, dense."""
    q, k, v, side = unit_stride(q), unit_stride(k), unit_stride(v), unit_stride(side)
    slot_mask = None if slot_mask is None else unit_stride(slot_mask)
    (channels, B, N, H, D), S = q.shape, k.shape[2]
    o = q.new_empty((4, B, N, H, D))
    if o.numel() == 0:
        return o
    config = tuned_config("jet_cross_attention forward", q, S, D)
    heads, tiles = neighbouring_heads(H, D, q.element_size()), neighbouring_tiles(config)
    with torch.cuda.device_of(q):
        _jet_forward_kernel[(B * triton.cdiv(N, tiles * config.BLOCK_N) * (H // heads),)](
            q,
            k,
            v,
            side,
            slot_mask,
            o,
            scale,
            N,
            q.stride(),
            k.stride(),
            v.stride(),
            side.stride(),
            strides(slot_mask),
            o.stride(),
            CHANNELS=channels,
            q_row=q.stride(2),
            k_row=k.stride(2),
            v_row=v.stride(2),
            q_head=q.stride(3),
            k_head=k.stride(3),
            v_head=v.stride(3),
            S=S,
            H=H,
            D=D,
            HEADS=heads,
            TILES=tiles,
            **config.options(),
        )
    return o


def backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    side: torch.Tensor,
    slot_mask: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of q, k and v, dense and in their shapes; nothing of the forward pass is needed but its inputs."""
    grad, q, k, v, side = unit_stride(grad), unit_stride(q), unit_stride(k), unit_stride(v), unit_stride(side)
    slot_mask = None if slot_mask is None else unit_stride(slot_mask)
    (channels, B, N, H, D), S = q.shape, k.shape[2]
    grad_q = q.new_empty((channels, B, N, H, D))
    if grad_q.numel() == 0:
        return grad_q, k.new_zeros((2, B, S, H, D)), v.new_zeros((2, B, S, H, D))
    grad_k, grad_v = k.new_empty((2, B, S, H, D)), v.new_empty((2, B, S, H, D))
    pack = packed_heads(H, S, D, q.element_size(), grad, q, k, v)
    # Where rows are not whole 16 bytes, every element is a load and a tile takes more registers.
    odd = "backward, odd width" if D * q.element_size() % 16 else "backward"
    kind = odd if pack == 1 else "backward, packed"
    config = tuned_config(f"jet_cross_attention {kind}", q, pack * S, pack * D)
    splits, tiles_per_split = split_tiles(
        triton.cdiv(N, config.BLOCK_N), B * H // pack, 2 * grad_k.numel() * 4, grad.numel() * q.element_size()
    )
    own = owned_columns(config, pack * D, pack * MOST_SUMMED)
    partials = q.new_empty((2, splits, 2, B, S, H, D), dtype=torch.float32)
    with torch.cuda.device_of(q):
        _jet_backward_kernel[(B * splits * H // pack * triton.cdiv(pack * D, own),)](
            grad,
            q,
            k,
            v,
            side,
            slot_mask,
            grad_q,
            *partials,
            scale,
            N,
            B,
            splits,
            tiles_per_split,
            grad.stride(),
            q.stride(),
            k.stride(),
            v.stride(),
            side.stride(),
            strides(slot_mask),
            grad_q.stride(),
            CHANNELS=channels,
            do_row=grad.stride(2),
            do_head=grad.stride(3),
            q_row=q.stride(2),
            k_row=k.stride(2),
            v_row=v.stride(2),
            q_head=q.stride(3),
            k_head=k.stride(3),
            v_head=v.stride(3),
            S=S,
            H=H,
            D=D,
            PACK=pack,
            OWN=own,
            **config.options(),
        )
        sum_partials(partials, grad_k, grad_v)
    return grad_q, grad_k, grad_v
