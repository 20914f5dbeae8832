"""Splits: seen and unseen pairs share nothing, and no single factor tells them apart."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from compgen_fast.worlds import Additive, Part, Scenes, Sprites, World
from compgen_fast.worlds.chance import Chance
from compgen_fast.worlds.splits import crossed, paired
from compgen_fast.worlds.sprites import cell_of

SEEDS = st.integers(0, 2**31)
ID = ("train", "validation", "test")


def pairs_of(part: Part, first: str, second: str, count: int = 2_000) -> NDArray[np.int64]:
    values = part.values(np.arange(count))
    return np.stack([values[first], values[second]], -1).astype(np.int64)


def as_set(pairs: NDArray[np.int64]) -> set[tuple[int, ...]]:
    return {tuple(pair) for pair in pairs.tolist()}


@given(seed=SEEDS, seen=st.integers(2, 9))
def test_every_value_of_a_crossed_design_is_seen_equally_often(seed: int, seen: int) -> None:
    design = crossed(20, 10, seen, Chance(seed), "test")
    assert (design.sum(1) == seen).all() and (design.sum(0) == 2 * seen).all()


@given(seed=SEEDS, seen=st.integers(2, 18))
def test_every_value_of_a_paired_design_has_as_many_partners(seed: int, seen: int) -> None:
    design = paired(20, seen, Chance(seed), "test")
    assert (design.sum(1) == seen).all() and (design == design.T).all() and not design.diagonal().any()


@given(seed=SEEDS, seen=st.integers(2, 8))
def test_more_pairs_keep_the_ones_there_were(seed: int, seen: int) -> None:
    chance = Chance(seed)
    assert (crossed(20, 10, seen, chance, "a") <= crossed(20, 10, seen + 1, chance, "a")).all()
    assert (paired(20, seen, chance, "a") <= paired(20, seen + 1, chance, "a")).all()


@given(seed=SEEDS)
def test_from_two_pairs_on_everything_is_linked(seed: int) -> None:
    """Else an object could be confounded with a group of backgrounds that it alone is seen with."""
    design = paired(20, 2, Chance(seed), "a")
    assert (np.linalg.matrix_power(design.astype(float) + np.eye(20), 20) > 0).all()
    block = crossed(10, 10, 2, Chance(seed), "a").astype(float)
    assert (np.linalg.matrix_power(block @ block.T, 10) > 0).all()


def test_another_seed_shows_other_pairs() -> None:
    assert (crossed(20, 10, 2, Chance(0), "a") != crossed(20, 10, 2, Chance(1), "a")).any()
    assert (paired(20, 2, Chance(0), "a") != paired(20, 2, Chance(1), "a")).any()


SPLITS = {
    "background": ("object_1", "background", 9),
    "texture": ("object_1", "texture_1", 9),
    "object": ("object_1", "object_2", 18),
}


@pytest.mark.parametrize("split", SPLITS)
@given(seed=SEEDS, share=st.floats(0, 1))
def test_scenes_parts_are_balanced_and_disjoint(split: str, seed: int, share: float) -> None:
    first, second, most = SPLITS[split]
    seen = 2 + round(share * (most - 2))
    world = Scenes(16, seed, objects=2 if split == "object" else 1)
    level = world.matrix(split, seen).level
    for part in (*ID, "ood"):
        wanted = as_set(np.argwhere(level == (part == "ood")))
        pairs = pairs_of(world.split(split, part, seen_pairs=seen), first, second, count=len(wanted))
        assert as_set(pairs) == wanted  # a full round shows each pair once …
        for column in pairs.T:  # … and so each value of either factor equally often
            assert len(set(np.bincount(column))) == 1


@pytest.mark.parametrize(("split", "second"), [("background", "background"), ("texture", "texture_2")])
@pytest.mark.parametrize("part", ["train", "ood"])
def test_a_second_object_keeps_to_the_split_too(split: str, second: str, part: str) -> None:
    world = Scenes(16, 5, objects=2)
    source = world.split(split, part, seen_pairs=3)
    pairs = pairs_of(source, "object_2", second)
    assert as_set(pairs) <= as_set(np.argwhere(world.matrix(split, 3).level == (part == "ood")))
    values = source.values(np.arange(2_000))
    assert (values["object_1"] != values["object_2"]).all()
    counts = np.bincount(pairs[:, 0], minlength=20)
    assert ((counts - 100) ** 2 / 100).sum() < 60  # χ², 19 degrees: every object as often


@pytest.mark.parametrize("split", ["background", "texture", "object"])
def test_what_the_split_is_not_about_is_the_same_on_both_sides(split: str) -> None:
    world = Scenes(16, objects=2)
    seen, unseen = (world.split(split, part).values(np.arange(2_000)) for part in ("train", "ood"))
    for factor in world.factors:
        for values in (seen[factor.name], unseen[factor.name]):
            assert values.min() >= factor.low and (factor.values or values.max() <= factor.high)
        both = np.concatenate([seen[factor.name], unseen[factor.name]])
        apart = abs(seen[factor.name].mean() - unseen[factor.name].mean())
        assert apart < 5 * both.std() * (2 / 2_000) ** 0.5, factor.name


def test_parts_share_no_sample() -> None:
    world = Scenes(16)
    drawn = [world.split("background", part).values(np.arange(500))["x_1"] for part in ID]
    assert len(np.unique(np.concatenate(drawn))) > 1_490  # fp32 has a few ties by itself


@given(seed=SEEDS, seen=st.integers(2, 5))
def test_sprites_keep_to_their_splits(seed: int, seen: int) -> None:
    world = Sprites(16, seed, objects=3)
    for split in world.splits:
        level = world.matrix(split, seen).level
        for part in ("train", "ood"):
            values = world.split(split, part, seen_pairs=seen).values(np.arange(60))
            for i in (1, 2, 3):
                x, y = (values[f"{name}_{i}"].astype(np.float32) for name in "xy")
                other = values[f"colour_{i}"].astype(np.int64) if split == "colour" else cell_of(x, y)
                assert (level[values[f"shape_{i}"].astype(np.int64), other] == (part == "ood")).all()


@given(seed=SEEDS, seen=st.integers(2, 5))
def test_additive_keeps_to_its_split(seed: int, seen: int) -> None:
    world = Additive(16, seed)
    level = world.matrix("pairs", seen).level
    for part in ("train", "ood"):
        values = world.split("pairs", part, seen_pairs=seen).values(np.arange(60))
        one, two = (np.clip((values[f"z_{slot}_1"].astype(float) + 1) * 3 - 1e-6, 0, 5).astype(int) for slot in (1, 2))
        assert (level[one, two] == (part == "ood")).all()


@pytest.mark.parametrize(
    ("world", "split", "most"),
    [(Scenes(16), "texture", 9), (Scenes(16, objects=2), "object", 18), (Sprites(16), "colour", 5)],
)
def test_too_few_or_too_many_pairs_are_refused(world: World, split: str, most: int) -> None:
    world.split(split, seen_pairs=most)
    for seen in (1, most + 1):
        with pytest.raises(ValueError, match=f"seen_pairs is {seen}; expected 2 to {most}"):
            world.split(split, seen_pairs=seen)
