"""How far decoded candidates are from the images they should explain, and the gradient of that.

    loss[c] = Σ_n w Σ_f (y[c,n,f] − x)²      grad[c,n,f] = 2 w (y[c,n,f] − x)

    y [C,N,F], x [I,P,F] at images[c], pixels[n], w [I,P] there (1 when left out); bytes of x count as value / 255

A candidate's N·F numbers are read as one row, so that three colours need no padding and y and grad are moved 128 bits
at a time; F is known at compile time, and the division by it that finds a number's pixel is a multiplication. y is read
once and grad written once. The loss is a sum over pixels in two stages (see launch.py): no atomics, the same bits each
time. Where pixels are chosen, a program takes a few candidates one after the other: the list of pixels is as large as
y, and neighbouring candidates are mostly restarts for one image. An index beyond the images or pixels reads nothing and
makes the loss NaN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import FEWEST_PROGRAMS, UNFUSED, split_tiles, sum_partials


@triton.jit
def _recon_error_kernel(
    y,
    x,
    weights,
    images,
    pixels,
    partials,  # [splits, C], the loss itself where there is one split
    grad,
    C,
    size,  # N·F
    image_count,
    P,
    y_stride,  # between candidates
    y_row,  # between pixels
    tiles_per_split,
    F: tl.constexpr,
    DENSE: tl.constexpr,  # the pixels of a candidate lie side by side
    CANDIDATES: tl.constexpr,  # of a program
    BLOCK: tl.constexpr,
):
    groups = tl.cdiv(C, CANDIDATES)
    split = tl.program_id(0) // groups
    first = tl.program_id(0) % groups * CANDIDATES
    for member in range(min(CANDIDATES, C - first)):
        c = first.to(tl.int64) + member  # 64 bit: all candidates may hold more than 2³¹ numbers
        image = c
        if images is not None:
            image = tl.load(images + c)
        reach = tl.where((image >= 0) & (image < image_count), size, 0)  # of the image, which may not exist
        total = tl.zeros([BLOCK], tl.float32)
        for tile in range(split * tiles_per_split, (split + 1) * tiles_per_split):
            at = tile * BLOCK + tl.arange(0, BLOCK)
            inside = at < size
            n = at // F
            pixel, from_x, present = n, at, at < reach
            if pixels is not None:
                pixel = tl.load(pixels + n, mask=inside, other=0)
                present = present & (pixel >= 0) & (pixel < P)
                from_x = pixel * F + at % F
            from_y = at
            if not DENSE:
                from_y = n.to(tl.int64) * y_row + at % F
            target = tl.load(x + image * P * F + from_x, mask=present, other=0).to(tl.float32)
            if x.dtype.element_ty == tl.uint8:
                target = tl.div_rn(target, 255.0)
            difference = tl.load(y + c * y_stride + from_y, mask=inside, other=0.0).to(tl.float32) - target
            difference = tl.where(present, difference, float("nan"))
            pull = difference
            if weights is not None:
                pull *= tl.load(weights + image * P + pixel, mask=present, other=0.0).to(tl.float32)
            total += tl.where(inside, pull * difference, 0.0)
            tl.store(grad + c * size + at, (2.0 * pull).to(grad.dtype.element_ty), mask=inside)
        tl.store(partials + split.to(tl.int64) * C + c, tl.sum(total, 0))


BLOCKS = {"BLOCK": 1024, "num_warps": 4, **UNFUSED}
MOST_CANDIDATES = 16  # of a program


def _candidates(C: int, tiles: int) -> int:
    """Of a program, where pixels are chosen: as many as leave work for the whole GPU."""
    fits = [1, *(count for count in (2, 4, 8, MOST_CANDIDATES) if triton.cdiv(C, count) * tiles >= FEWEST_PROGRAMS)]
    return max(fits)


def forward(
    y: torch.Tensor,
    x: torch.Tensor,
    weights: torch.Tensor | None,
    images: torch.Tensor | None,
    pixels: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """loss [C] in fp32 and grad [C,N,F], dense, in y's dtype."""
    if y.dtype == torch.float64:
        raise ValueError("recon_error: y is torch.float64, which is for CPU tensors; pass y.float()")
    C, N, F = y.shape
    grad = y.new_empty(y.shape)
    if grad.numel() == 0:
        return y.new_zeros(C, dtype=torch.float32), grad
    y = y if F == 1 or y.stride(2) == 1 else y.contiguous()
    tiles = triton.cdiv(N * F, BLOCKS["BLOCK"])
    candidates = 1 if pixels is None else _candidates(C, tiles)
    groups = triton.cdiv(C, candidates)
    splits, tiles_per_split = split_tiles(tiles, groups, C * 4, y.numel() * y.element_size())
    loss = y.new_empty(C, dtype=torch.float32)
    partials = loss if splits == 1 else y.new_empty(1, splits, C, dtype=torch.float32)
    with torch.cuda.device_of(y):
        _recon_error_kernel[(groups * splits,)](
            y,
            x.contiguous(),
            None if weights is None else weights.contiguous(),
            None if images is None else images.contiguous(),
            None if pixels is None else pixels.contiguous(),
            partials,
            grad,
            C,
            N * F,
            x.shape[0],
            x.shape[1],
            y.stride(0),
            y.stride(1),
            tiles_per_split,
            F=F,
            DENSE=y.stride(1) == F,
            CANDIDATES=candidates,
            **BLOCKS,
        )
        if splits > 1:
            sum_partials(partials, loss)
    return loss, grad
