"""One file per family of ops. In-place spellings come last, since they are derived from the others."""

from compgen_fast.jets.rules import (  # noqa: F401, I001
    arithmetic,
    pointwise,
    linear,
    shapes,
    reductions,
    norms,
    attention,
    constants,
    in_place,
)
