"""The peers of the suite `jets`: they compute what we compute, and none of them by our fast way."""

from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import pytest
import torch

from compgen_fast.bench.harness import Outputs
from compgen_fast.bench.jets import TINY
from compgen_fast.bench.ops import interaction_penalty as suite
from compgen_fast.jets.rules import attention as attention_rules
from compgen_fast.models import cross_attention_decoder

USERS_WRITE: dict[str, Callable[..., Outputs]] = {
    "plain-torch jets": partial(suite.by_formula, suite.ours),
    "nested jvp": suite.nested_jvp,
    "reverse over reverse": suite.reverse_over_reverse,
}


def inputs() -> list[torch.Tensor]:
    return [x.double().requires_grad_() for x in TINY.inputs().values()]


def outputs_and_gradients(method: Callable[..., Outputs]) -> list[torch.Tensor]:
    tensors = inputs()
    pixels, penalty = suite.run(TINY.decoder().double(), method, *tensors)
    return [pixels, penalty, *torch.autograd.grad(pixels.square().sum() + 1e3 * penalty, tensors)]


@pytest.mark.parametrize("peer", USERS_WRITE)
def test_a_peer_computes_what_we_compute_without_folding(peer: str) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a peer folds its projections")

    ours = outputs_and_gradients(suite.ours)
    with (
        patch.object(cross_attention_decoder, "projected_slot_attention", refuse),
        patch.object(attention_rules, "jet_slot_softmax", refuse),
    ):
        torch.testing.assert_close(outputs_and_gradients(USERS_WRITE[peer]), ours)


def test_plain_torch_jets_call_none_of_our_kernels() -> None:
    seen: list[str] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Watch():
        outputs_and_gradients(partial(suite.by_formula, suite.ours))
    assert seen and not [name for name in seen if "compgen" in name]
    with Watch():
        outputs_and_gradients(suite.ours)
    assert any("compgen.jet_slot_softmax" in name for name in seen)
