"""What slots looked like in training, one slot at a time: a Gaussian for pulling a search, samples for starting one.

An image with an unseen combination has slots that were each seen before, in other company. So slots are kept near their
own marginal, never near a joint distribution, which would pull unseen combinations back to seen ones. Not for the
decoder's prior: latents of a trained encoder are not N(0, 1).
"""

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

SEEN = 0.999
"""The part of the fitted slots that lie within a marginal's radius."""


@dataclass(frozen=True, eq=False)
class SlotMarginals:
    """The marginal of each of K slots of D numbers. Made by :meth:`fit`."""

    latents: Tensor  # [n, K, D], what was fitted, to draw from
    mean: Tensor  # [K, D]
    whitening: Tensor  # [K, D, D], lower triangular: whitening · (z − mean) has covariance 1
    radius: Tensor  # [K], the Mahalanobis distance within which almost all fitted slots lie
    exchangeable: bool

    @classmethod
    def fit(cls, latents: Tensor, *, exchangeable: bool = False) -> Self:
        """The marginals of these latents.

        The covariance S is shrunk towards a multiple of 1, (1 − s) S + s tr(S)/D · 1 with s = D / (n + D), so that few
        latents give one that can be inverted.

        Args:
            latents: [n, K, D] of images of the kinds seen in training, n at least 2. Half precision is read as fp32.
            exchangeable: slots have no fixed roles (Slot Attention), so all share one marginal.
        """
        if latents.dim() != 3 or len(latents) < 2 or not latents.dtype.is_floating_point:
            raise ValueError(
                f"SlotMarginals.fit: latents are {latents.dtype} {list(latents.shape)}; expected floating [n, K, D] "
                "with n at least 2, from the encoder on training images"
            )
        if not latents.isfinite().all():
            raise ValueError("SlotMarginals.fit: some latents are not finite; leave those images out")
        latents = latents.detach() if latents.dtype == torch.float64 else latents.detach().float()
        K, D = latents.shape[1:]
        by_slot = latents.double().transpose(0, 1)
        by_slot = by_slot.reshape(1, -1, D) if exchangeable else by_slot
        mean, whitening = _gaussian(by_slot)
        distance = ((by_slot - mean.unsqueeze(1)) @ whitening.mT).norm(dim=-1)
        radius = distance.quantile(SEEN, dim=1)
        mean, whitening, radius = (each.to(latents).expand(K, *each.shape[1:]) for each in (mean, whitening, radius))
        return cls(latents, mean, whitening, radius, exchangeable)

    def to(self, like: Tensor) -> Self:
        """The same in the dtype and on the device of another tensor."""
        moved = {name: getattr(self, name).to(like) for name in ("latents", "mean", "whitening", "radius")}
        return replace(self, **moved)

    @property
    def precision(self) -> Tensor:
        """The second derivative [K · D, K · D] of ½ · Σ_k Mahalanobis distance²: a block for each slot."""
        blocks: Tensor = torch.block_diag(*(self.whitening.mT @ self.whitening))
        return blocks

    def pull(self, z: Tensor, weight: float) -> tuple[Tensor, Tensor]:
        """weight · ½ · Σ_k Mahalanobis distance² of each candidate [C], and its gradient [C, K, D]; z is [C, K, D]."""
        white = self._white(z)
        return weight / 2 * white.square().sum((1, 2)), weight * torch.einsum("kij,cki->ckj", self.whitening, white)

    def confine(self, z: Tensor) -> Tensor:
        """z [C, K, D] with slots that lie beyond their marginal's radius moved straight back to it."""
        distance = self._white(z).norm(dim=-1, keepdim=True)
        within = (self.radius[:, None] / distance.clamp_min(1e-12)).clamp_max(1)
        return torch.where(within < 1, self.mean + within * (z - self.mean), z)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """[n, K, D]: every slot of every row is that of a fitted image of its own, drawn independently."""
        count, K, D = self.latents.shape
        pool, choices = (self.latents.reshape(-1, D), count * K) if self.exchangeable else (self.latents, count)
        device = self.latents.device
        chosen = torch.randint(choices, (n, K), generator=generator, device=device)
        return pool[chosen] if self.exchangeable else pool[chosen, torch.arange(K, device=device)]

    def _white(self, z: Tensor) -> Tensor:
        if z.shape[1:] != self.mean.shape:
            raise ValueError(
                f"SlotMarginals: z has shape {list(z.shape)}; expected [C, K, D] with slots {list(self.mean.shape)}, "
                "as the fitted latents have"
            )
        return torch.einsum("kij,ckj->cki", self.whitening, z - self.mean)


def _gaussian(latents: Tensor) -> tuple[Tensor, Tensor]:
    """Mean [K, D] and the inverse of the covariance's Cholesky factor [K, D, D], of latents [K, n, D]."""
    n, D = latents.shape[1:]
    mean = latents.mean(1)
    centred = latents - mean.unsqueeze(1)
    covariance = centred.mT @ centred / (n - 1)
    unit = torch.eye(D, dtype=latents.dtype, device=latents.device)
    size = covariance.diagonal(dim1=1, dim2=2).mean(1).clamp_min(1e-12)[:, None, None]
    shrunk = n / (n + D) * covariance + D / (n + D) * size * unit
    return mean, torch.linalg.solve_triangular(torch.linalg.cholesky(shrunk), unit.expand_as(shrunk), upper=False)
