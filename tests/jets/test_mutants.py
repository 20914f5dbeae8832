"""The oracles can fail: mistakes that are easy to make in jets, each put into a rule's source, each turn them red."""

import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import pytest

from compgen_fast.jets import jet
from compgen_fast.jets.rules import arithmetic, attention, linear, norms, pointwise, reductions
from compgen_fast.ops import jet_linear, jet_norm
from compgen_fast.ops.jet_slot_softmax import _softmax as softmax_over_slots
from compgen_fast.ops.jet_slot_softmax import _together as put_together
from compgen_fast.ops.jet_slot_softmax import reference as jet_slot_softmax_reference
from compgen_fast.ops.projected_slot_attention import fold
from tests.jets import test_rules
from tests.jets.oracles import KINDS

MUTANTS: dict[str, tuple[Callable[..., Any], str, str, str]] = {
    "half of the product rule's mixed term": (
        arithmetic.bilinear,
        "mixed = op(a[1:2], b[2:3]) + op(a[2:3], b[1:2])",
        "mixed = op(a[1:2], b[2:3])",
        "matmul",
    ),
    "no second derivative in the norm": (jet_norm._normalise, "0.75 * r**5", "0 * r", "layer_norm"),
    "u and v swapped where slots meet": (
        jet.unsided,
        "tangent.masked_fill(~x.side, 0), tangent.masked_fill(x.side, 0)",
        "tangent.masked_fill(x.side, 0), tangent.masked_fill(~x.side, 0)",
        "sum",
    ),
    "no covariance in softmax": (
        reductions._log_softmax,
        "bent = -(p * drift[0] * drift[1]).sum(negative, keepdim=True)",
        "bent = 0 * p",
        "softmax",
    ),
    "no second derivative in the chain rule": (pointwise.chain, "bent = bent + moved[2]", "bent = moved[2]", "tanh"),
    "a bias on every channel": (jet_linear.reference, "y[0] += bias", "y += bias", "linear"),
    "a slot's tangent meets the wrong channel": (
        put_together,
        "_chosen(side, by_tangent.v, by_tangent.u)",
        "_chosen(side, by_tangent.u, by_tangent.v)",
        "projected_slot_attention, slots alike",
    ),
    "no second derivative in the softmax over slots": (
        softmax_over_slots,
        "p * (l_uv + l_u * l_v)",
        "p * l_uv",
        "projected_slot_attention, slots alike",
    ),
    "slots' own scores that do not move": (
        jet_slot_softmax_reference,
        "products[4] + tangent",
        "products[4]",
        "projected_slot_attention, slots alike",
    ),
    "a masked slot that is scored": (
        fold,
        "torch.finfo(dtype).min",
        "0.0",
        "projected_slot_attention, slots alike and masked",
    ),
    "a constant on every channel": (arithmetic._AddToPrimal.forward, "channels[0].add_", "channels.add_", "add number"),
}


def mutate(monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any], right: str, wrong: str) -> None:
    source = textwrap.dedent(inspect.getsource(function)).removeprefix("@staticmethod\n")
    assert source.count(right) == 1, f"the line to change is no longer in {function.__qualname__}: {right}"
    made: dict[str, Any] = {}
    exec(source.replace(right, wrong), function.__globals__, made)
    monkeypatch.setattr(function, "__code__", made[function.__name__].__code__)


def judge(case: str) -> None:
    for kind in KINDS:
        test_rules.test_a_rule_gives_the_exact_derivatives(case, kind)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_turns_an_oracle_red(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, right, wrong, case = MUTANTS[mutant]
    # Whatever backend serves an op, its formula is what is mutated here.
    monkeypatch.setattr(linear, "jet_linear", jet_linear.reference)
    monkeypatch.setattr(norms, "jet_layer_norm", jet_norm.layer_norm_reference)
    monkeypatch.setattr(attention, "jet_slot_softmax", jet_slot_softmax_reference)
    assert case in test_rules.CASES
    judge(case)
    mutate(monkeypatch, function, right, wrong)
    with pytest.raises(AssertionError, match="Mismatched elements"):
        judge(case)
