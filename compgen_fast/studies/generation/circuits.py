"""Which heads a generator needs for which factor, by leaving them out one at a time.

The effect of a head on a factor is how much less the probes believe that images show the side which was asked for, when
the head adds nothing and the noise is the same:

    effect = mean over images of  P(side asked for | all heads) − P(side asked for | without the head)

A head **matters** to a factor if its effect is above 0.01 and above two of its standard errors. A head that matters to
several factors is **polysemantic**. The **circuit** of a factor is the quarter of the heads with the largest effects on
it, and the **overlap** of two circuits is how many heads they share, of all that are in either (Jaccard); of two
circuits by chance it would be 1/7. All on seen compositions, which the generator can make.
"""

from itertools import combinations
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from compgen_fast.generate.generator import Generator

if TYPE_CHECKING:
    from compgen_fast.studies.generation.runs import Asking

LEAST, ERRORS = 0.01, 2.0
SHARE = 4  # one in so many heads is in a circuit


def effects(model: Generator, asking: "Asking") -> dict[str, Any]:
    """Effects and their standard errors as lists [layers][heads][factors], and what follows from them."""
    whole = _belief(asking, asking.images(model))
    layers, heads = model.trunk.layers, model.trunk.heads
    found = torch.empty(2, layers, heads, whole.shape[1], dtype=torch.float64)
    for layer in range(layers):
        for head in range(heads):
            factors = torch.ones(layers, heads)
            factors[layer, head] = 0
            lost = whole - _belief(asking, asking.images(model, factors.to(next(model.parameters()).device)))
            found[:, layer, head] = torch.stack([lost.mean(0), lost.std(0) / len(lost) ** 0.5])
    return {"effects": found[0].tolist(), "errors": found[1].tolist()} | summary(found[0], found[1])


def _belief(asking: "Asking", images: Tensor) -> Tensor:
    """How likely each factor is on the side that was asked for, by the probes; fp64 [n, factors]."""
    asked = asking.probes.sides(asking.factors)
    scores = asking.probes(images).double()
    return torch.where(asked, scores, -scores).sigmoid()


def summary(effects: Tensor, errors: Tensor) -> dict[str, Any]:
    """Of effects and errors [layers, heads, factors]: polysemantic heads by layer, and the overlap of circuits."""
    matters = (effects > LEAST) & (effects > ERRORS * errors)
    some, several = matters.any(-1), matters.sum(-1) > 1
    flat = effects.flatten(0, 1)
    circuits = [set(column.topk(len(flat) // SHARE).indices.tolist()) for column in flat.unbind(1)]
    overlaps = [len(a & b) / len(a | b) for a, b in combinations(circuits, 2)]
    return {
        "mattering": some.sum(1).tolist(),
        "polysemantic": several.sum(1).tolist(),
        "overlap": fmean(overlaps),
        "overlaps": overlaps,
    }
