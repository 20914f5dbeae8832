"""Which slot stands for which, image by image: the assignment of least total cost, by the Hungarian method.

For slots without a fixed order, such as Slot Attention's. Nothing here carries a gradient: an assignment is a choice.
Matching slots to objects by their masks is compgen_fast/measure/matching.py.
"""

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor


def match_slots(cost: Tensor) -> Tensor:
    """For each of M targets the slot that stands for it, int64 [n, M]; no slot serves twice.

    Args:
        cost: [n, K, M], finite, of giving slot k to target m; K ≥ M. The sum over targets is made least.
    """
    if cost.dim() != 3 or cost.shape[1] < cost.shape[2]:
        raise ValueError(
            f"match_slots: cost has shape {list(cost.shape)}; expected [n, K, M] with a slot for every target, K ≥ M "
            "(use more slots, or match fewer objects)"
        )
    if not cost.isfinite().all():
        raise ValueError("match_slots: cost holds NaN or infinity; expected finite numbers (see what made them)")
    per_target = cost.detach().mT.double().cpu().numpy()
    matched = torch.empty(cost.shape[0], cost.shape[2], dtype=torch.int64)
    for image, of_image in enumerate(per_target):
        matched[image] = torch.from_numpy(linear_sum_assignment(of_image)[1])
    return matched.to(cost.device)


def match_latents(a: Tensor, b: Tensor) -> Tensor:
    """For each slot of b the slot of a nearest to it, int64 [n, K], by squared distance summed over all slots.

    ``take_slots(a, match_latents(a, b))`` is a in the order of b.

    Args:
        a, b: [n, K, d].
    """
    if a.dim() != 3 or a.shape != b.shape:
        raise ValueError(
            f"match_latents: a has shape {list(a.shape)} and b {list(b.shape)}; expected [n, K, d] of both"
        )
    return match_slots((a.detach()[:, :, None] - b.detach()[:, None]).square().sum(-1))


def take_slots(latents: Tensor, matched: Tensor) -> Tensor:
    """Slots [n, K, d] in the order of ``matched`` [n, M]: [n, M, d]. Gradients reach the latents."""
    return latents.take_along_dim(matched[:, :, None], 1)
