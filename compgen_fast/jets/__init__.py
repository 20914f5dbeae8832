"""Second derivatives across slots, exact and differentiable, of a decoder as it stands. Start with docs/jets.md."""

from compgen_fast.jets import rules  # noqa: F401  (registers the rules)
from compgen_fast.jets.diagnostics import plot_slot_hessian_norms, slot_hessian_norms
from compgen_fast.jets.jet import Jet, jet_rule
from compgen_fast.jets.penalty import interaction_penalty

__all__ = ["Jet", "interaction_penalty", "jet_rule", "plot_slot_hessian_norms", "slot_hessian_norms"]
