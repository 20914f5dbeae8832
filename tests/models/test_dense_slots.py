"""Slots by one network that sees all features."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compgen_fast.models.dense_slots import DenseSlots


@settings(max_examples=20)
@given(st.integers(1, 7), st.integers(1, 9), st.integers(1, 5), st.integers(1, 6), st.integers(0, 3), st.booleans())
def test_features_become_the_wanted_slots(
    slots: int, dim: int, count: int, input_dim: int, batch: int, pooled: bool
) -> None:
    module = DenseSlots(slots + pooled, dim, count, input_dim, hidden=8, pooled_scene=pooled)
    assert module(torch.randn(batch, count, input_dim)).shape == (batch, slots + pooled, dim)


def test_where_a_feature_is_matters() -> None:
    module, features = DenseSlots(3, 8, 10, 6), torch.randn(2, 10, 6)
    assert not torch.allclose(module(features.flip(1)), module(features))


def test_every_slot_has_outputs_of_its_own() -> None:
    module, features = DenseSlots(3, 8, 10, 6), torch.randn(2, 10, 6)
    before = module(features)
    with torch.no_grad():
        module.layers[-1].bias[8:16] += 1
    torch.testing.assert_close(module(features) - before, torch.tensor([0.0, 1.0, 0.0]).view(3, 1).expand(2, 3, 8))


def test_a_pooled_scene_does_not_know_where_things_are() -> None:
    module, features = DenseSlots(3, 8, 10, 6, pooled_scene=True).double(), torch.randn(2, 10, 6, dtype=torch.float64)
    before, after = module(features), module(features.flip(1))
    torch.testing.assert_close(after[:, 0], before[:, 0])
    assert not torch.allclose(after[:, 1], before[:, 1]) and not torch.allclose(after[:, 2], before[:, 2])
    assert not torch.allclose(module(features + 1)[:, 0], before[:, 0])


@pytest.mark.parametrize("pooled", [False, True])
def test_images_do_not_hear_of_each_other(pooled: bool) -> None:
    module, features = DenseSlots(3, 8, 10, 6, pooled_scene=pooled).double(), torch.randn(4, 10, 6).double()
    torch.testing.assert_close(module(features[1:3]), module(features)[1:3])


@pytest.mark.parametrize("pooled", [False, True])
def test_every_parameter_is_trained(pooled: bool) -> None:
    module = DenseSlots(4, 12, 20, 6, pooled_scene=pooled)
    module(torch.randn(2, 20, 6)).pow(3).sum().backward()
    assert all(p.grad is not None and (p.grad != 0).any() for p in module.parameters())


@pytest.mark.parametrize("shape", [(2, 9, 6), (2, 10, 5), (10, 6)])
def test_features_of_another_image_size_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"expected \[B, 10, 6\], those of the image size it was made for"):
        DenseSlots(3, 8, 10, 6)(torch.randn(shape))


@pytest.mark.parametrize(("slots", "hidden", "pooled"), [(0, 8, False), (3, 0, False), (1, 8, True)])
def test_sizes_that_cannot_be_are_refused(slots: int, hidden: int, pooled: bool) -> None:
    with pytest.raises(ValueError, match=f"slots={slots}, hidden={hidden}; expected at least 1 of both, and 2 slots"):
        DenseSlots(slots, 8, 10, 6, hidden, pooled)
