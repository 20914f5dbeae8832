"""No decoder takes flat latents [B, K · D] for slots."""

import pytest
import torch

from compgen_fast.jets import slot_hessian_norms
from compgen_fast.models import (
    AdditiveDecoder,
    CrossAttentionDecoder,
    FrameDecoder,
    PatchDecoder,
    SpatialBroadcastDecoder,
)


@pytest.mark.parametrize(
    "decoder",
    [
        AdditiveDecoder(4, 8, width=8),
        SpatialBroadcastDecoder(4, 8, width=8),
        SpatialBroadcastDecoder(4, 8, kind="cnn", width=8),
        CrossAttentionDecoder(4, 8, heads=1, head_dim=8, query_dim=8, slot_hidden=8),
        PatchDecoder(4, 8, heads=1, head_dim=8, query_dim=8, slot_hidden=8),
        FrameDecoder(4, 8, slots=2, hidden=8, frequencies=2),
    ],
    ids=lambda decoder: type(decoder).__name__,
)
@pytest.mark.parametrize("width", [4, 8])
def test_flat_latents_are_refused_with_the_shape_that_is_meant(decoder: torch.nn.Module, width: int) -> None:
    with pytest.raises(ValueError, match=rf"\[3, {width}\]; expected \[(batch, slots, numbers of a slot|B, 2, 4)\]"):
        decoder(torch.randn(3, width))


def test_the_norms_of_flat_latents_are_refused_too() -> None:
    with pytest.raises(ValueError, match=r"slot_hessian_norms: z is \[8, 24\]; expected"):
        slot_hessian_norms(torch.sin, torch.randn(8, 24))
