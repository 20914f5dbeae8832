"""The order of samples: a permutation per epoch, random, bounded by its window, the same wherever it is computed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compgen_fast.stream.order import ROUND, Order, Part, key, quotas, shuffled, substitute

sizes = st.lists(st.integers(1, 40), min_size=1, max_size=12).map(tuple)
seeds = st.integers(0, 2**63 - 1)


def visited(order: Order, start: int, stop: int) -> list[int]:
    return order(np.arange(start, stop))[1].tolist()


@given(st.integers(1, 500), seeds)
def test_shuffled_is_a_permutation_of_any_size(size: int, seed: int) -> None:
    found = shuffled(np.arange(size), size, key(seed))
    assert sorted(found.tolist()) == list(range(size))


def test_shuffled_stays_within_a_huge_size_without_making_the_rest() -> None:
    size = 10**15 + 7
    found = shuffled(np.arange(1000), size, key(3))
    assert len(set(found.tolist())) == 1000
    assert found.min() >= 0 and found.max() < size
    assert abs(found.mean() / size - 0.5) < 0.05


@pytest.mark.parametrize("size", [3, 5, 12, 37])
def test_every_sample_is_equally_likely_at_every_place_and_after_every_other(size: int) -> None:
    """Chi-square over many keys, for places and for neighbours; 5 standard deviations of it are allowed."""
    keys = 20_000
    found = shuffled(np.tile(np.arange(size), keys), size, np.repeat(key(7, np.arange(keys)), size)).reshape(keys, size)
    places = np.bincount((np.arange(size) * size + found).ravel(), minlength=size * size)
    neighbours = np.bincount((found[:, :-1] * size + found[:, 1:]).ravel(), minlength=size * size)
    for counts in (places, neighbours.reshape(size, size)[~np.eye(size, dtype=bool)]):
        chi = ((counts - counts.mean()) ** 2 / counts.mean()).sum()
        assert chi < len(counts) + 5 * np.sqrt(2 * len(counts))


@given(sizes, seeds, st.none() | st.integers(1, 5))
def test_each_epoch_visits_every_sample_once(shards: tuple[int, ...], seed: int, window: int | None) -> None:
    order = Order([Part(shards)], seed, window=window)
    for epoch in range(3):
        start = epoch * order.samples
        assert sorted(visited(order, start, start + order.samples)) == list(range(order.samples))


@given(sizes, seeds, st.none() | st.integers(1, 5), st.data())
def test_any_stretch_is_the_same_as_in_the_whole(
    shards: tuple[int, ...], seed: int, window: int | None, data: st.DataObject
) -> None:
    order = Order([Part(shards)], seed, window=window)
    whole = visited(order, 0, 3 * order.samples)
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, len(whole)))
    assert visited(Order([Part(shards)], seed, window=window), start, stop) == whole[start:stop]


def test_epochs_and_seeds_give_different_orders() -> None:
    order = Order([Part((50, 50))], seed=1)
    first, second = visited(order, 0, 100), visited(order, 100, 200)
    assert first != second
    assert visited(Order([Part((50, 50))], seed=2), 0, 100) not in (first, second)
    assert visited(Order([Part((50, 50))], seed=1, shuffle=False), 100, 200) == list(range(100))


def test_a_window_uses_so_many_shards_at_a_time_and_mixes_them() -> None:
    shards = (20,) * 9
    found = np.array(visited(Order([Part(shards)], seed=5, window=3), 0, 180)) // 20
    groups = [set(found[start : start + 60].tolist()) for start in (0, 60, 120)]
    assert [len(group) for group in groups] == [3, 3, 3]
    assert set.union(*groups) == set(range(9))
    assert len(set(found[:15].tolist())) == 3
    assert set(found[:60].tolist()) != set(range(3))


def test_a_windows_samples_change_places_from_epoch_to_epoch() -> None:
    order = Order([Part((20, 20))], seed=5, window=1)
    epochs = [visited(order, start, start + 40) for start in range(0, 400, 40)]
    within = {tuple(sample for sample in epoch if sample < 20) for epoch in epochs}
    assert len(within) == 10
    assert {epoch[0] // 20 for epoch in epochs} == {0, 1}


def test_a_mixture_gives_each_data_set_its_share_in_every_round() -> None:
    order = Order([Part((70,), 3.0), Part((40, 30), 1.0)], seed=0)
    parts, _ = order(np.arange(4 * ROUND))
    for dealt in parts.reshape(4, ROUND):
        assert np.bincount(dealt).tolist() == [750, 250]
    assert np.bincount(parts[:100]).min() > 10  # mixed within a round, not one after the other


def test_a_mixture_goes_through_each_data_set_evenly() -> None:
    order = Order([Part((70,), 1.0), Part((50,), 1.0)], seed=0)
    parts, samples = order(np.arange(7 * ROUND))
    for number, size in enumerate((70, 50)):
        assert np.bincount(samples[parts == number], minlength=size).tolist() == [3500 // size] * size


@pytest.mark.parametrize("weights", [[], [1.0, 0.0], [1.0, -1.0], [1.0, float("nan")], [1.0, 1e-6]])
def test_weights_that_mean_nothing_are_refused(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="weights are"):
        quotas(weights)


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=9))
def test_quotas_fill_a_round(weights: list[float]) -> None:
    found = np.array(quotas(weights))
    assert found.sum() == ROUND
    assert np.abs(found - np.array(weights) / sum(weights) * ROUND).max() < 1


def test_substitutes_are_spread_over_the_data() -> None:
    found = [substitute(sample, attempt, 1000) for sample in range(100) for attempt in range(10)]
    assert len(set(found)) > 550
    assert found[:3] == [substitute(0, attempt, 1000) for attempt in range(3)]
