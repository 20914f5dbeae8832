"""Which parts of a trunk a generator needs for which factor, by leaving them out one at a time.

A **unit** is an attention head, or one of eight equal groups of an MLP's hidden neurons: what a layer adds to tokens is
the sum of what its units add. The **effect** of a unit on a factor is how much of the probes' margin is lost without
it, by the same noise, on seen compositions:

    effect = mean over images of (margin − margin without the unit) / mean margin

where the margin is the probe's score for the side that was asked for. A unit **matters** to a factor if its effect is
above three of its standard errors; one that matters to several factors is **polysemantic**. The **circuit** of a factor
is the quarter of the units with the largest effects on it, and the **overlap** of two circuits is how many units they
share, of all that are in either (Jaccard); of two circuits by chance it would be 1/7.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import combinations, pairwise
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from compgen_fast.generate.generator import Generator
from compgen_fast.generate.trunk import Block

if TYPE_CHECKING:
    from compgen_fast.studies.generation.runs import Asking

GROUPS = 8  # of an MLP's neurons
ERRORS = 3.0
SHARE = 4  # one in so many units is in a circuit

Unit = tuple[nn.Linear, slice]
"""The columns by which it adds to the tokens."""


def effects(model: Generator, asking: "Asking") -> dict[str, Any]:
    """Effects and their standard errors as lists [layers][units][factors], heads first, and what follows from them."""
    blocks = [block for block in model.trunk.blocks if isinstance(block, Block)]
    whole = _margins(asking, model)
    found = []
    for block in blocks:
        for unit in units(block):
            with left_out(unit):
                found.append(_effect(whole, _margins(asking, model)))
    with ExitStack() as all_heads:
        for block in blocks:
            all_heads.enter_context(left_out((block.proj, slice(None))))
        attentionless = _margins(asking, model)
    effect, error = torch.stack(found).unflatten(0, (len(blocks), -1)).unbind(2)
    return {
        "effects": effect.tolist(),
        "errors": error.tolist(),
        "heads": model.trunk.heads,
        "right": _right(whole),
        "right_without_attention": _right(attentionless),
    } | summary(effect, error, model.trunk.heads)


def units(block: Block) -> list[Unit]:
    """Its heads, then its groups of neurons."""
    heads = _columns(block.proj, block.heads)
    return [*((block.proj, part) for part in heads), *((block.fc2, part) for part in _columns(block.fc2, GROUPS))]


def _columns(layer: nn.Linear, parts: int) -> list[slice]:
    edges = [number * layer.in_features // parts for number in range(parts + 1)]
    return [slice(first, last) for first, last in pairwise(edges)]


@contextmanager
def left_out(unit: Unit) -> Iterator[None]:
    """The unit adds nothing in here."""
    layer, columns = unit
    kept = layer.weight.detach().clone()
    with torch.no_grad():
        layer.weight[:, columns] = 0
    try:
        yield
    finally:
        with torch.no_grad():
            layer.weight.copy_(kept)


def _margins(asking: "Asking", model: Generator) -> Tensor:
    """By how much each factor is on the side that was asked for, by the probes; fp64 [n, factors]."""
    asked = asking.probes.sides(asking.factors)
    scores = asking.probes(asking.images(model)).double()
    return torch.where(asked, scores, -scores)


def _effect(whole: Tensor, without: Tensor) -> Tensor:
    """[2, factors]: the effect and its standard error, of margins [n, factors]."""
    lost = (whole - without) / whole.mean(0)
    return torch.stack([lost.mean(0), lost.std(0) / len(lost) ** 0.5])


def _right(margins: Tensor) -> float:
    """The share of images that have every factor on its side."""
    return float((margins > 0).all(1).double().mean())


def summary(effects: Tensor, errors: Tensor, heads: int) -> dict[str, Any]:
    """Of effects and errors [layers, units, factors]: by layer how many heads and how many units matter, and to several
    factors; and the overlap of circuits.
    """
    matters = effects > ERRORS * errors
    counts = {"mattering": matters.any(-1), "polysemantic": matters.sum(-1) > 1}
    flat = effects.flatten(0, 1)
    circuits = [set(column.topk(len(flat) // SHARE).indices.tolist()) for column in flat.unbind(1)]
    overlaps = [len(a & b) / len(a | b) for a, b in combinations(circuits, 2)]
    return {
        "mattering_heads": counts["mattering"][:, :heads].sum(1).tolist(),
        "mattering": counts["mattering"].sum(1).tolist(),
        "polysemantic": counts["polysemantic"].sum(1).tolist(),
        "overlap": fmean(overlaps),
        "overlaps": overlaps,
    }
