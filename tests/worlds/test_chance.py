"""Random numbers by address: the same wherever they are asked for, and otherwise unrelated."""

import numpy as np

from compgen_fast.worlds.chance import Chance

COUNTERS = np.arange(20_000)


def test_a_number_depends_on_its_address_alone() -> None:
    whole = Chance(3).uniform("x", COUNTERS)
    shuffled = np.random.default_rng(0).permutation(len(COUNTERS))
    np.testing.assert_array_equal(Chance(3).uniform("x", COUNTERS[shuffled]), whole[shuffled])
    np.testing.assert_array_equal(Chance(3).uniform("x", COUNTERS[777:778]), whole[777:778])


def test_seeds_streams_and_neighbours_are_unrelated() -> None:
    first = Chance(0).uniform("x", COUNTERS)
    others = [
        Chance(1).uniform("x", COUNTERS),
        Chance(0).uniform("y", COUNTERS),
        Chance(0).uniform("x", COUNTERS + 1),
        Chance(0).uniform("x", COUNTERS + 2**40),
    ]
    for other in others:
        assert abs(np.corrcoef(first, other)[0, 1]) < 5 / len(COUNTERS) ** 0.5  # five standard deviations


def test_numbers_are_spread_evenly() -> None:
    counts = np.histogram(Chance(0).uniform("x", COUNTERS, -1, 3), bins=20, range=(-1, 3))[0]
    expected = len(COUNTERS) / 20
    assert counts.sum() == len(COUNTERS) and ((counts - expected) ** 2 / expected).sum() < 60  # χ², 19 degrees
    assert set(Chance(0).below(7, "x", COUNTERS)) == set(range(7))


def test_an_order_is_a_permutation() -> None:
    assert sorted(Chance(0).order(50, "x")) == list(range(50))
    assert list(Chance(0).order(50, "x")) != list(Chance(1).order(50, "x"))
