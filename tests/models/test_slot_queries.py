"""Slots by learned queries."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compgen_fast.models.slot_queries import SlotQueries


@settings(max_examples=20)
@given(st.integers(1, 7), st.integers(1, 5), st.integers(1, 3), st.integers(1, 30), st.integers(0, 3))
def test_any_number_of_features_becomes_the_wanted_slots(
    slots: int, input_dim: int, layers: int, count: int, batch: int
) -> None:
    module = SlotQueries(slots, 8, input_dim, layers, heads=2)
    assert module(torch.randn(batch, count, input_dim)).shape == (batch, slots, 8)


def test_the_order_of_features_does_not_matter() -> None:
    module, features = SlotQueries(5, 8, 6).double(), torch.randn(2, 30, 6, dtype=torch.float64)
    torch.testing.assert_close(module(features[:, torch.randperm(30)]), module(features))


def test_the_order_of_queries_is_the_order_of_slots() -> None:
    module, features, order = SlotQueries(5, 8, 6).double(), torch.randn(2, 30, 6).double(), torch.randperm(5)
    before = module(features)
    module.queries.data = module.queries.data[:, order]
    torch.testing.assert_close(module(features), before[:, order])


def test_slots_hear_of_each_other() -> None:
    module, features = SlotQueries(3, 8, 6), torch.randn(1, 10, 6)
    before = module(features)
    with torch.no_grad():
        module.queries[:, 0].normal_()
    assert (module(features)[:, 2] != before[:, 2]).any()


def test_images_do_not_hear_of_each_other() -> None:
    module, features = SlotQueries(3, 8, 6).double(), torch.randn(4, 10, 6, dtype=torch.float64)
    torch.testing.assert_close(module(features[1:3]), module(features)[1:3])


def test_every_parameter_is_trained() -> None:
    module = SlotQueries(4, 12, 6)
    module(torch.randn(2, 20, 6)).pow(3).sum().backward()
    assert all(p.grad is not None and (p.grad != 0).any() for p in module.parameters())


def test_recomputing_layers_gives_the_very_same_gradients() -> None:
    module, features = SlotQueries(4, 12, 6), torch.randn(2, 20, 6, requires_grad=True)

    def gradients() -> tuple[Tensor, ...]:
        return torch.autograd.grad(module(features).pow(3).sum(), [features, *module.parameters()])

    plain = gradients()
    module.checkpoint = True
    assert all(torch.equal(a, b) for a, b in zip(plain, gradients(), strict=True))


def test_the_defaults_are_the_papers() -> None:
    module = SlotQueries(7, 64, 64)
    assert len(module.layers) == 5 and module.layers[0].cross.heads == module.layers[0].attn.heads == 4


def test_it_compiles_as_one_graph() -> None:
    module, features = SlotQueries(3, 8, 6, layers=2), torch.randn(2, 10, 6)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(features), module(features))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="slots=0, layers=5; both must be at least 1"):
        SlotQueries(0, 8, 6)
    with pytest.raises(ValueError, match="width 8 cannot be split into 3 heads"):
        SlotQueries(2, 8, 6, heads=3)
    with pytest.raises(ValueError, match=r"features have shape \[2, 10, 5\]; expected \[B, N, 6\]"):
        SlotQueries(2, 8, 6)(torch.randn(2, 10, 5))
