"""slot_competition, the step of Slot Attention, against what a user would write instead."""

import torch
from torch import Tensor

from compgen_fast.bench.harness import Case, Contender, Outputs
from compgen_fast.bench.ops.common import Shape, backend_of
from compgen_fast.ops import slot_competition
from compgen_fast.ops.slot_competition import reference

EPS = 1e-8
OTHER_SOFTMAX = "its softmax runs over keys; this one runs over queries, renormalised over keys"


def case(shape: Shape, dtype: torch.dtype, device: str) -> Case:
    return Case(
        suite="slots",
        name=f"slot_competition {shape}",
        inputs=lambda: shape.tensors({"q": shape.S, "k": shape.N, "v": shape.N}, dtype, device),
        outputs=("updates", "weights"),
        oracle=lambda q, k, v: reference(q, k, v, None, shape.D**-0.5, EPS, True)[:2],
        ours=Contender("ours", slot_competition, backend=backend_of("slot_competition", device)),
        peers=peers(),
        dtype=dtype,
        device=device,
    )


def peers() -> tuple[Contender, ...]:
    return (
        Contender("eager", eager),
        Contender("torch.compile", torch.compile(eager, dynamic=False, fullgraph=True)),
        *(Contender(name, eager, unsupported=OTHER_SOFTMAX) for name in ("SDPA", "flex_attention", "flash-attn")),
    )


def eager(q: Tensor, k: Tensor, v: Tensor) -> Outputs:
    """Slots first, [B, H, S, N]: the softmax over slots is vectorised over pixels. It is renormalised after the product
    with v, on [S, D] instead of [S, N]. Pixels first takes 1.3 to 1.6 times as long on CPU."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    H, S = q.shape[1:3]
    logits = q * q.shape[-1] ** -0.5 @ k.transpose(-1, -2)
    a = logits.flatten(1, 2).softmax(1).unflatten(1, (H, S))
    weights = a.sum(1).transpose(1, 2)
    a = a + EPS
    return (a @ v / a.sum(-1, keepdim=True)).transpose(1, 2), weights
