"""Which tokens are hidden, in training and in sampling."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compgen_fast.draws import Draws
from compgen_fast.generate.masking import at, decoded_per_round, expected_hidden, hide, random_order


@pytest.mark.parametrize("tokens", [1, 9, 64])
def test_the_number_of_hidden_tokens_is_as_expected(tokens: int) -> None:
    hidden = hide(tokens, torch.empty(20_000), Draws.at(0, 0))
    assert hidden.shape == (20_000, tokens) and hidden.any(1).all()
    assert abs(hidden.sum(1).double().mean() / expected_hidden(tokens) - 1) < 0.01
    by_place = hidden.double().mean(0)
    assert (by_place - by_place.mean()).abs().max() < 0.02


@given(st.integers(1, 300).flatmap(lambda tokens: st.tuples(st.just(tokens), st.integers(1, tokens))))
def test_rounds_decode_every_token_and_at_least_one_each(sizes: tuple[int, int]) -> None:
    tokens, steps = sizes
    counts = decoded_per_round(tokens, steps)
    assert len(counts) == steps and sum(counts) == tokens and min(counts) >= 1


def test_rounds_follow_the_cosine() -> None:
    counts = torch.tensor(decoded_per_round(1000, 10))
    left = 1000 - counts.cumsum(0)
    torch.testing.assert_close(left / 1000, (torch.pi / 2 * torch.arange(1, 11) / 10).cos(), atol=1e-3, rtol=0)


@pytest.mark.parametrize("steps", [0, 10])
def test_more_rounds_than_tokens_are_refused(steps: int) -> None:
    with pytest.raises(ValueError, match=f"steps is {steps}; expected 1 to 9"):
        decoded_per_round(9, steps)


def test_every_row_has_an_order_of_its_own() -> None:
    order = random_order(9, torch.empty(3), Draws.at(0, 0))
    assert torch.equal(order.sort(1).values, torch.arange(9).expand(3, 9))
    assert len(order.unique(dim=0)) == 3


def test_tokens_are_taken_from_their_places() -> None:
    x = torch.arange(12).view(2, 3, 2)
    assert at(x, torch.tensor([[2, 0], [1, 1]])).tolist() == [[[4, 5], [0, 1]], [[8, 9], [8, 9]]]
