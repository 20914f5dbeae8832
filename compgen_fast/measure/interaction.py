"""How much the slots of a trained decoder interact, in numbers that compare decoders of different scale.

By first derivatives, whether one slot has a pixel to itself (JIS); by second derivatives, whether what one slot draws
depends on another (the Hessian's blocks across slots). Not a loss: `compgen_fast.jets.interaction_penalty` is, and has
gradients.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from compgen_fast.jets import slot_hessian_norms
from compgen_fast.jets.penalty import Decoder


def jis(norms: Tensor) -> Tensor:
    """The Jacobian interaction score of each image, [n]: 1 where each pixel depends on one slot, 0 where on all alike.

        (mean over pixels of max_k s_k − 1/K) / (1 − 1/K)        s_k = ‖∂f_p/∂z_k‖ / Σ_l ‖∂f_p/∂z_l‖

    Args:
        norms: [n, K, P], of `jacobian_norms`. Pixels that depend on no slot are left out of the mean; an image of
            nothing else has no score: NaN.
    """
    if norms.dim() != 3 or norms.shape[1] < 2:
        raise ValueError(f"jis: norms have shape {list(norms.shape)}; expected [n, K, P] of at least 2 slots")
    slots, total = norms.shape[1], norms.sum(1)
    alive = total > 0
    largest = torch.where(alive, norms.amax(1) / total, 0).sum(1) / alive.sum(1)
    return (largest - 1 / slots) / (1 - 1 / slots)


@dataclass(frozen=True)
class BlockHessian:
    """The norms ‖H_kl‖ [K, K] of the Hessian's slot blocks, root mean square over images; symmetric."""

    norms: Tensor

    @property
    def across(self) -> float:
        """√Σ_{k≠l} ‖H_kl‖²: its square is what `interaction_penalty` estimates. Exactly 0 for additive decoders."""
        return float(torch.linalg.vector_norm(self.norms - self.norms.diag().diag()))

    @property
    def within(self) -> float:
        """√Σ_k ‖H_kk‖²: how curved the decoder is in each slot by itself."""
        return float(torch.linalg.vector_norm(self.norms.diag()))

    @property
    def share(self) -> float:
        """across² / (across² + within²), from 0 (additive) to 1: the share of all curvature that lies across slots.

        Free of scale: f → c·f multiplies every block by c, and z → z/c by c². ‖H‖/‖J‖² would change with both. A
        decoder without any curvature has share 0: it is linear, hence additive.
        """
        across, within = self.across**2, self.within**2
        return across / (across + within) if across else 0.0


def block_hessian(
    decoder: Decoder, z: Tensor, *, probes: int | None = 8, chunk: int = 64, generator: torch.Generator | None = None
) -> BlockHessian:
    """The Hessian's slot blocks of a decoder at the slots of some images; takes no gradient along.

    Args:
        decoder: as in `interaction_penalty`.
        z: slots [n, K, …].
        probes: random directions per pair of slots, each one jet; the squared norms have no bias. None for the exact
            norms, by K²d²/2 jets: for small codes.
        chunk: images at a time.
        generator: source of the directions, on z's device.
    """
    if z.dim() < 3 or len(z) == 0 or (probes is not None and probes < 1):
        raise ValueError(
            f"block_hessian: z has shape {list(z.shape)} and probes is {probes}; expected slots [n, K, …] of at least "
            "one image, and at least 1 probe (or None, for the exact norms)"
        )
    z = z.detach() if z.dtype == torch.float64 else z.detach().float()
    with torch.autocast(z.device.type, enabled=False):
        parts = [
            slot_hessian_norms(decoder, part, probes=probes, generator=generator).square() * len(part)
            for part in z.split(chunk)
        ]
    return BlockHessian((torch.stack(parts).sum(0) / len(z)).sqrt())
