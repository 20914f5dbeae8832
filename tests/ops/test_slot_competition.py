"""What is particular to slot_competition; what it shares with the other ops is in test_contract.py."""

import pytest
import torch

from compgen_fast.ops import slot_competition
from tests.ops.contract import OPS, Shape

OP = OPS[1]


def test_one_slot_alone_takes_the_plain_mean_of_its_inputs() -> None:
    q, k, v = OP.inputs(Shape(S=1, H=1))
    updates, weights = slot_competition(q, k, v)
    torch.testing.assert_close(weights, torch.ones_like(weights))
    torch.testing.assert_close(updates[:, 0], v.mean(1))


def test_equal_values_come_back_unchanged_however_they_are_shared() -> None:
    """A weighted mean of equal things is that thing: fails when the weights are not renormalised over the inputs."""
    q, k, v = OP.inputs(Shape(H=1))
    updates, _ = slot_competition(q, k, torch.ones_like(v))
    torch.testing.assert_close(updates, torch.ones_like(updates))


def test_heads_share_one_softmax() -> None:
    q, k, v = OP.inputs(Shape(H=3))
    _, weights = slot_competition(q, k, v)
    logits = torch.einsum("bnhd,bshd->bnsh", k, q) * q.shape[-1] ** -0.5
    torch.testing.assert_close(weights, logits.flatten(2).softmax(-1).view(logits.shape).sum(-1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_eps_survives_half_precision(dtype: torch.dtype) -> None:
    """Slot 1 loses every input so badly that its weights vanish: it still gets the plain mean, not 0/0."""
    k = torch.ones(1, 9, 1, 16, dtype=dtype)
    q = torch.stack([torch.ones(16), -torch.ones(16)]).view(1, 2, 1, 16).to(dtype) * 200
    v = torch.randn(1, 9, 1, 16).to(dtype)
    updates, weights = slot_competition(q, k, v, scale=1.0)
    assert (weights[..., 1] <= 1e-30).all()
    torch.testing.assert_close(updates[:, 1], v.mean(1), atol=2e-2, rtol=2e-2)


def test_without_weights_the_updates_stand_alone() -> None:
    inputs = OP.inputs(Shape())
    assert torch.equal(slot_competition(*inputs, return_weights=False), slot_competition(*inputs)[0])


def test_negative_eps_is_refused() -> None:
    with pytest.raises(ValueError, match="slot_competition: eps is -1"):
        slot_competition(*OP.inputs(Shape()), eps=-1)
