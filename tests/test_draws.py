"""Random numbers of a batch: the same however many ranks share it."""

from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from compgen_fast.draws import Draws

CPU = torch.device("cpu")


def all_draws(draws: Draws, like: Tensor) -> list[Tensor]:
    """Some of everything: what is drawn for each row, and in between what is drawn once for the batch."""
    return [
        draws.normal(like),
        draws.permutation(7, CPU),
        draws.signs(like),
        draws.uniform(like),
        draws.permutation(5, CPU),
        draws.normal(like),
    ]


@given(first=st.integers(0, 8), last=st.integers(0, 8), seed=st.integers(0, 2**40), step=st.integers(0, 2**40))
def test_a_rank_draws_its_rows_of_the_whole_batch(first: int, last: int, seed: int, step: int) -> None:
    first, last = sorted((first, last))
    like = torch.empty(8, 2, 3)
    whole = all_draws(Draws.at(seed, step), like)
    part = all_draws(Draws.at(seed, step, first=first, total=8), like[first:last])
    for of_all, of_some in zip(whole, part, strict=True):
        assert torch.equal(of_some, of_all if of_all.dim() == 1 else of_all[first:last])


def test_a_step_can_be_drawn_again_and_no_other_step_or_seed_draws_the_same() -> None:
    like = torch.empty(4, 3)
    draw = lambda seed, step: Draws.at(seed, step).normal(like)  # noqa: E731
    assert torch.equal(draw(1, 2), draw(1, 2))
    drawn = [draw(*at) for at in ((1, 2), (1, 3), (2, 2), (2, 1), (12, 0), (1, 20))]
    assert not any(torch.equal(one, other) for one, other in combinations(drawn, 2))


def test_two_draws_of_one_step_differ() -> None:
    draws, like = Draws.at(0, 0), torch.empty(4, 3)
    assert not torch.equal(draws.normal(like), draws.normal(like))


def test_each_kind_has_its_distribution_and_the_precision_asked_for() -> None:
    draws, like = Draws.at(0, 0), torch.empty(400, 50, dtype=torch.float64)
    normal, uniform, signs = draws.normal(like), draws.uniform(like), draws.signs(like)
    assert normal.dtype == uniform.dtype == signs.dtype == torch.float64
    assert abs(normal.mean()) < 0.03 and abs(normal.std() - 1) < 0.03
    assert uniform.min() >= 0 and uniform.max() < 1 and abs(uniform.mean() - 0.5) < 0.01
    assert set(signs.unique().tolist()) == {-1.0, 1.0} and abs(signs.mean()) < 0.03
    assert draws.permutation(50, CPU).sort().values.tolist() == list(range(50))


def test_without_a_generator_torchs_own_is_used() -> None:
    torch.manual_seed(3)
    expected = torch.randn(4, 3)
    torch.manual_seed(3)
    assert torch.equal(Draws().normal(torch.empty(4, 3)), expected)


def test_rows_outside_the_batch_are_refused_in_words() -> None:
    with pytest.raises(ValueError, match="rows 6 to 9 of a batch of 8; expected rows inside the batch"):
        Draws.at(0, 0, first=6, total=8).normal(torch.empty(3, 2))
