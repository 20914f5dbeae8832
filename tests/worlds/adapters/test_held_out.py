from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from compgen_fast.worlds.adapters import View, held_out
from compgen_fast.worlds.adapters.columns import Column, Columns
from compgen_fast.worlds.adapters.held_out import HeldOut
from compgen_fast.worlds.source import Factor, Samples


class Grid:
    """A source of ``copies`` samples for each pair of animal (a category) and yaw (a number) that exists."""

    name, slots = "grid", ()

    def __init__(self, animals: int, yaws: int, copies: int = 1, exists: Callable[[int, int], bool] | None = None):
        pairs = [(a, y) for a in range(animals) for y in range(yaws) if exists is None or exists(a, y)]
        shuffled = np.random.default_rng(0).permutation(pairs * copies)
        self.factors = (Factor("animal", tuple(map(str, range(animals)))), Factor("yaw", low=-45, high=45))
        yaw: Column = (shuffled[:, 1] * 7.5 - 45).astype(np.float32)
        self.table: Columns = {"animal": shuffled[:, 0].astype(np.int64), "yaw": yaw}

    def __len__(self) -> int:
        return len(self.table["yaw"])

    def samples(self, indices: NDArray[np.int64]) -> Samples:
        images = np.zeros((len(indices), 1, 1, 3), np.uint8)
        images[:, 0, 0, 0] = indices % 256
        return Samples(images, {name: column[indices] for name, column in self.table.items()})


def pairs_of(view: View) -> set[tuple[int, float]]:
    return set(zip(view.table["animal"].tolist(), view.table["yaw"].tolist(), strict=True))


def seen_by(split: HeldOut, factor: int) -> list[int]:
    values = [pair[factor] for pair in pairs_of(split.train)]
    return [values.count(value) for value in sorted(set(values))]


@settings(max_examples=40, deadline=None)
@given(st.integers(3, 12), st.integers(3, 12), st.integers(1, 5), st.integers(0, 2**31), st.data())
def test_every_value_is_seen_and_no_unseen_pair_is(
    animals: int, yaws: int, copies: int, seed: int, data: st.DataObject
) -> None:
    seen = data.draw(st.integers(2, min(animals, yaws) - 1))
    source = Grid(animals, yaws, copies)
    split = held_out(source, ("animal", "yaw"), seen=seen, seed=seed)
    everything = np.concatenate([part.chosen for part in split])
    assert sorted(everything) == list(range(len(source)))
    train = pairs_of(split.train)
    assert pairs_of(split.validation) | pairs_of(split.test) <= train
    assert not train & pairs_of(split.ood)
    assert len(train) == seen * max(animals, yaws)
    assert {pair[0] for pair in train} == {pair[0] for pair in pairs_of(split.ood)} == set(range(animals))
    assert len({pair[1] for pair in train}) == len({pair[1] for pair in pairs_of(split.ood)}) == yaws
    larger, smaller = (0, 1) if animals >= yaws else (1, 0)
    assert set(seen_by(split, larger)) == {seen}
    assert max(seen_by(split, smaller)) - min(seen_by(split, smaller)) <= 2
    assert linked(train)


def linked(pairs: set[tuple[int, float]]) -> bool:
    """Whether pairs that share a value lead from any pair to any other."""
    left = set(pairs)
    reached = [left.pop()]
    for pair in reached:
        near = {other for other in left if other[0] == pair[0] or other[1] == pair[1]}
        left -= near
        reached.extend(near)
    return not left


@pytest.mark.parametrize(("animals", "yaws", "spread"), [(10, 10, 0), (32, 10, 1), (10, 32, 1), (64, 64, 0)])
def test_the_smaller_factors_values_are_seen_equally_often(animals: int, yaws: int, spread: int) -> None:
    often = seen_by(held_out(Grid(animals, yaws), ("animal", "yaw")), 1 if animals >= yaws else 0)
    assert max(often) - min(often) == spread


def test_a_smaller_number_of_seen_pairs_is_among_a_larger() -> None:
    splits = [held_out(Grid(9, 7), ("animal", "yaw"), seen=seen) for seen in range(2, 7)]
    for fewer, more in pairwise(splits):
        assert pairs_of(fewer.train) < pairs_of(more.train)


def test_the_seed_decides() -> None:
    one, same, other = (held_out(Grid(6, 6, 5), ("animal", "yaw"), seed=seed) for seed in (0, 0, 1))
    for part in range(4):
        np.testing.assert_array_equal(one[part].chosen, same[part].chosen)
    assert pairs_of(one.train) != pairs_of(other.train)


def test_a_tenth_of_every_seen_pair_is_held_back_twice() -> None:
    split = held_out(Grid(5, 4, 51), ("animal", "yaw"))
    for part, expected in ((split.validation, 5), (split.test, 5), (split.train, 41)):
        assert len(part) == 10 * expected
        for pair in pairs_of(split.train):
            found = zip(part.table["animal"].tolist(), part.table["yaw"].tolist(), strict=True)
            assert list(found).count(pair) == expected


def test_views_give_the_samples_of_their_source() -> None:
    source = Grid(4, 4, 3)
    ood = held_out(source, ("yaw", "animal")).ood
    np.testing.assert_array_equal(ood.samples(np.array([5, 2])).images[:, 0, 0, 0], ood.chosen[[5, 2]] % 256)
    assert ood.name == "grid-ood" and ood.factors == source.factors and ood.slots == ()
    with pytest.raises(IndexError, match=f"grid-ood: asked for samples -1 to 3; there are {len(ood)}, from 0"):
        ood.samples(np.array([3, -1]))


def test_views_of_views_split_again() -> None:
    source = Grid(6, 5, 4)
    chosen = View("some", source, np.flatnonzero(source.table["animal"] != 2))
    split = held_out(chosen, ("animal", "yaw"))
    assert {pair[0] for pair in pairs_of(split.train)} == {0, 1, 3, 4, 5}
    np.testing.assert_array_equal(
        split.train.samples(np.array([0])).images[0, 0, 0, 0], chosen.chosen[split.train.chosen[0]] % 256
    )


def test_pairs_that_do_not_occur_are_neither_seen_nor_unseen() -> None:
    source = Grid(8, 6, exists=lambda animal, yaw: (animal + yaw) % 4 != 0)
    split = held_out(source, ("animal", "yaw"), seen=2)
    assert len(pairs_of(split.train)) == 16 and len(pairs_of(split.train) | pairs_of(split.ood)) == len(source)


def test_what_cannot_be_split_is_refused_with_a_sentence() -> None:
    source = Grid(8, 4)
    with pytest.raises(ValueError, match="held_out: grid has no factor 'hue'; it has animal, yaw"):
        held_out(source, ("animal", "hue"))
    for seen in (1, 4):
        with pytest.raises(ValueError, match=f"seen is {seen}; expected at least 2 and fewer than 4, since some value"):
            held_out(source, ("animal", "yaw"), seen=seen)
    with pytest.raises(ValueError, match="yaw takes 1 values in grid; expected 2 to 1024"):
        held_out(Grid(3, 1), ("animal", "yaw"))
    blocks = Grid(8, 8, exists=lambda animal, yaw: animal // 4 == yaw // 4)
    with pytest.raises(ValueError, match="the seen pairs of animal and yaw in grid fall into separate groups"):
        held_out(blocks, ("animal", "yaw"))
