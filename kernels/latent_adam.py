"""One step of gradient search for many candidates: Adam, the best so far, going back and giving up, in place.

    1. remember     if loss < best_loss:  best_loss, best_z ← loss, z
                    stalled ← 0 if loss < old best_loss · (1 − tolerance) else stalled + 1
    2. go back      if stalled ≥ patience, or the loss or part of the gradient is not finite:
                    z ← best_z;  moments, steps, stalled ← 0;  rate ← rate · shrink;  active ← False if rate < least,
                    or if there never was a finite loss, when z stays
    3. or step      Adam, its moments divided by 1 − β^steps

    z, first, second, best_z, grad [C,L]      best_loss, rate, steps, stalled, active, loss [C]

A tile is [BLOCK_N candidates, their whole rows]: whether a gradient is finite is known before anything is written. All
is read once and written once, and what an inactive candidate holds is neither.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from .launch import UNFUSED, tuned_config, unit_stride


@triton.jit
def _finite(x):
    return tl.abs(x) < float("inf")  # false for NaN


@triton.jit
def _one_minus_power(log_beta, t):
    """1 − β^t, by its series where the difference would lose digits: six terms of it are exact in fp32 below 1/4."""
    x = -log_beta * t
    series = x * (1 - x / 2 * (1 - x / 3 * (1 - x / 4 * (1 - x / 5 * (1 - x / 6)))))
    return tl.where(x < 0.25, series, 1.0 - tl.exp(-x))


@triton.jit
def _latent_adam_kernel(
    z,
    first,
    second,
    best_z,
    best_loss,
    rate,
    steps,
    stalled,
    active,
    grad,
    loss,
    C,
    grad_row,  # between rows
    loss_stride,
    keep1,  # β₁, and 1 − β₁ as the host rounds it
    take1,
    log_beta1,
    keep2,
    take2,
    log_beta2,
    eps,
    patience,
    needed,  # 1 − tolerance
    shrink,
    least,
    L: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    c = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    alive = (c < C) & (tl.load(active + c, mask=c < C, other=0) != 0)
    columns = tl.arange(0, BLOCK_D)
    inside = alive[:, None] & (columns < L)[None, :]
    at = c[:, None] * L + columns[None, :]
    g = tl.load(grad + c[:, None] * grad_row + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    now = tl.load(loss + c * loss_stride, mask=alive, other=0.0).to(tl.float32)
    best = tl.load(best_loss + c, mask=alive, other=0.0)
    speed = tl.load(rate + c, mask=alive, other=0.0)
    t = tl.load(steps + c, mask=alive, other=0) + 1
    waited = tl.load(stalled + c, mask=alive, other=0) + 1
    old_z = tl.load(z + at, mask=inside, other=0.0)

    known = _finite(now)
    better = known & (now < best)
    waited = tl.where(known & (now < best * needed), 0, waited)
    best = tl.where(better, now, best)

    broken = tl.max((~_finite(g)).to(tl.int32), 1) != 0
    back = (waited >= patience) | ~known | broken
    hopeless = ~_finite(best)
    lower = speed * shrink

    m = keep1 * tl.load(first + at, mask=inside, other=0.0) + take1 * g
    v = keep2 * tl.load(second + at, mask=inside, other=0.0) + take2 * g * g
    step = speed / _one_minus_power(log_beta1, t)
    v_scale = 1.0 / _one_minus_power(log_beta2, t)
    stepped = old_z - step[:, None] * m / (tl.sqrt(v * v_scale[:, None]) + eps)
    # Where a candidate goes back and is not at its best already, its best is read: the one row that others do not need.
    away = (back & ~better & ~hopeless)[:, None]
    gone_back = tl.where(away, tl.load(best_z + at, mask=inside & away, other=0.0), old_z)

    tl.debug_barrier()  # several warps read the numbers of a row: none may write them before the others have read
    tl.store(best_loss + c, best, mask=alive & better)
    tl.store(best_z + at, old_z, mask=inside & better[:, None])
    tl.store(z + at, tl.where(back[:, None], gone_back, stepped), mask=inside)
    tl.store(first + at, tl.where(back[:, None], 0.0, m), mask=inside)
    tl.store(second + at, tl.where(back[:, None], 0.0, v), mask=inside)
    tl.store(rate + c, lower, mask=alive & back)
    tl.store(steps + c, tl.where(back, 0, t), mask=alive)
    tl.store(stalled + c, tl.where(back, 0, waited), mask=alive)
    tl.store(active + c, 0, mask=alive & back & (hopeless | (lower < least)))


def step(
    z: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    best_z: torch.Tensor,
    best_loss: torch.Tensor,
    rate: torch.Tensor,
    steps: torch.Tensor,
    stalled: torch.Tensor,
    active: torch.Tensor,
    grad: torch.Tensor,
    loss: torch.Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    patience: int,
    tolerance: float,
    shrink: float,
    least: float,
) -> None:
    """All candidates one step on; the state is dense."""
    if z.dtype == torch.float64:
        raise ValueError("latent_adam: z is torch.float64, which is for CPU tensors; start from z.float()")
    C, L = z.shape
    if C == 0:
        return
    grad, config = unit_stride(grad), tuned_config("latent_adam", z, 1, L)
    with torch.cuda.device_of(z):
        _latent_adam_kernel[(triton.cdiv(C, config.BLOCK_N),)](
            z,
            first,
            second,
            best_z,
            best_loss,
            rate,
            steps,
            stalled,
            active.view(torch.uint8),
            grad,
            loss,
            C,
            grad.stride(0),
            loss.stride(0),
            beta1,
            1 - beta1,
            _log(beta1),
            beta2,
            1 - beta2,
            _log(beta2),
            eps,
            patience,
            1 - tolerance,
            shrink,
            least,
            L=L,
            BLOCK_N=config.BLOCK_N,
            BLOCK_D=config.BLOCK_D,
            num_warps=config.num_warps,
            **UNFUSED,
        )


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0 else -math.inf
