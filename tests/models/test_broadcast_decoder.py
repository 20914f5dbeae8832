"""The SpatialBroadcastDecoder module and its painters. What all decoders must do is in test_build.py."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from compgen_fast.models import SpatialBroadcastDecoder
from compgen_fast.models.broadcast_decoder import Broadcast, painter

SMALL: dict[str, Any] = {"layers": 2, "width": 8, "octaves": 3}
KINDS = ("mlp", "cnn")


def outputs_of(module: nn.Module) -> list[Tensor]:
    """Collects what a module returns from now on."""
    seen: list[Tensor] = []
    module.register_forward_hook(lambda module, inputs, output: seen.append(output))
    return seen


@pytest.mark.parametrize("kind", KINDS)
def test_pixels_are_the_slots_colours_weighted_by_masks_that_compete(kind: Any) -> None:
    decoder, z = SpatialBroadcastDecoder(5, 8, kind=kind, **SMALL), 3 * torch.randn(2, 4, 5)
    painted = decoder.painter(z)
    masks = painted[..., 3].exp() / painted[..., 3].exp().sum(1, keepdim=True)
    expected = sum(masks[:, k, :, None] * painted[:, k, :, :3] for k in range(4))
    colours, found = decoder.decode_with_masks(z)
    torch.testing.assert_close(colours, expected)
    torch.testing.assert_close(found, masks)
    torch.testing.assert_close(decoder(z), expected)


def test_masks_cost_no_second_painting() -> None:
    decoder = SpatialBroadcastDecoder(5, 8, **SMALL)
    seen = outputs_of(decoder.painter)
    decoder.decode_with_masks(torch.randn(2, 4, 5))
    assert len(seen) == 1


def test_broadcasting_is_a_linear_map_of_slot_and_position_side_by_side() -> None:
    broadcast, z = Broadcast(5, 4, 8, 3), torch.randn(2, 3, 5)
    weight = torch.cat([broadcast.from_slot.weight, broadcast.from_position.weight], 1)
    beside = torch.cat([z[:, :, None].expand(-1, -1, 16, -1), broadcast.positions.expand(2, 3, -1, -1)], -1)
    torch.testing.assert_close(broadcast(z), nn.functional.linear(beside, weight, broadcast.from_slot.bias))


@pytest.mark.parametrize("kind", KINDS)
def test_a_slot_is_painted_without_a_look_at_the_others(kind: Any) -> None:
    network, z = painter(kind, 5, 8, 4, **SMALL), torch.randn(2, 3, 5)
    torch.testing.assert_close(network(z)[:, 1:2], network(z[:, 1:2]))


def test_the_mlp_paints_only_the_pixels_asked_for() -> None:
    decoder = SpatialBroadcastDecoder(5, 8, kind="mlp", **SMALL)
    seen = outputs_of(decoder.painter.broadcast)
    decoder(torch.randn(2, 3, 5), pixels=torch.tensor([7, 60]))
    assert seen[0].shape == (2, 3, 2, 8)


@settings(max_examples=20)
@given(image_size=st.integers(1, 17), layers=st.integers(1, 5))
def test_convolutions_give_images_of_any_size(image_size: int, layers: int) -> None:
    network = painter("cnn", 2, image_size, 4, layers=layers, width=3, octaves=2)
    assert network(torch.randn(2, 3, 2)).shape == (2, 3, image_size**2, 4)


@pytest.mark.parametrize(("image_size", "layers", "grid"), [(16, 4, 2), (16, 2, 4), (12, 4, 3), (7, 4, 7)])
def test_convolutions_start_from_a_coarse_grid_where_the_size_allows(image_size: int, layers: int, grid: int) -> None:
    assert painter("cnn", 2, image_size, 4, layers=layers, width=3, octaves=2).grid == grid


def test_every_layer_asked_for_is_there() -> None:
    for kind, of in (("mlp", nn.Linear), ("cnn", nn.Conv2d | nn.ConvTranspose2d)):
        layers = painter(kind, 2, 16, 4, layers=5, width=3, octaves=2).layers  # type: ignore[arg-type]
        assert sum(isinstance(layer, of) for layer in layers) == {"mlp": 4 + 1, "cnn": 5 + 1}[kind]


def test_what_is_no_painter_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match="kind is 'rnn'; expected one of cnn, mlp"):
        SpatialBroadcastDecoder(5, 8, kind="rnn")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="layers=0"):
        SpatialBroadcastDecoder(5, 8, layers=0)
