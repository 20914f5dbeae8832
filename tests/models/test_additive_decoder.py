"""The AdditiveDecoder module. What all decoders must do is in test_build.py."""

from typing import Any

import pytest
import torch

from compgen_fast.jets import interaction_penalty
from compgen_fast.models import AdditiveDecoder

SMALL: dict[str, Any] = {"layers": 2, "width": 8, "octaves": 3}
KINDS = ("mlp", "cnn")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["hessian", "pairs", "triple"])
def test_slots_do_not_interact_at_all(kind: Any, method: Any) -> None:
    decoder, z = AdditiveDecoder(5, 8, kind=kind, **SMALL), torch.randn(2, 4, 5, requires_grad=True)
    penalty = interaction_penalty(decoder, z, method=method)
    assert penalty.item() == 0
    inputs = [z, *decoder.parameters()]
    grads = torch.autograd.grad(penalty, inputs, allow_unused=True, materialize_grads=True)
    assert all((grad == 0).all() for grad in grads)


@pytest.mark.parametrize("kind", KINDS)
def test_an_image_is_the_sum_of_what_each_slot_paints_alone(kind: Any) -> None:
    decoder, z = AdditiveDecoder(5, 8, kind=kind, **SMALL), torch.randn(2, 4, 5)
    torch.testing.assert_close(decoder(z), sum(decoder(z[:, k : k + 1]) for k in range(4)))


def test_slots_that_share_pixels_are_seen_by_the_contrast() -> None:
    """Zero is the answer to curvature across slots, not to every question."""
    assert interaction_penalty(AdditiveDecoder(3, 4, **SMALL), torch.randn(1, 2, 3), method="contrast").item() > 0
