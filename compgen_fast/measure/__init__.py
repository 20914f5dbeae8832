"""What studies measure: readouts, matched slots, masks, interaction, geometry of layers; factor probes of generated
images, and distances between sets of images. Start with docs/measures.md.

Nothing here trains a network, but for the factor probes.
"""

from compgen_fast.measure.factor_probes import FactorProbes, Judgement, fit_probes
from compgen_fast.measure.frechet import frechet_distance, random_net_frechet
from compgen_fast.measure.geometry import LayerGeometry, factorization, grid_metrics, layer_geometry, volume
from compgen_fast.measure.interaction import BlockHessian, block_hessian, jis
from compgen_fast.measure.matching import match_by_masks
from compgen_fast.measure.probes import (
    PERIODS,
    Readout,
    Regression,
    choose_slot,
    fit_factors,
    fit_readout,
    fit_regression,
    per_factor,
)
from compgen_fast.measure.segmentation import ari, jacobian_norms, masks_by_attention, masks_by_jacobian, mbo
from compgen_fast.models.matching import match_latents, match_slots, take_slots

__all__ = [
    "PERIODS",
    "BlockHessian",
    "FactorProbes",
    "Judgement",
    "LayerGeometry",
    "Readout",
    "Regression",
    "ari",
    "block_hessian",
    "choose_slot",
    "factorization",
    "fit_factors",
    "fit_probes",
    "fit_readout",
    "fit_regression",
    "frechet_distance",
    "grid_metrics",
    "jacobian_norms",
    "jis",
    "layer_geometry",
    "masks_by_attention",
    "masks_by_jacobian",
    "match_by_masks",
    "match_latents",
    "match_slots",
    "mbo",
    "per_factor",
    "random_net_frechet",
    "take_slots",
    "volume",
]
