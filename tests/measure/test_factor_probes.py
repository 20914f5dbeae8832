"""Factor probes: they know real images, judge by sides, and refuse to be poor judges."""

import numpy as np
import pytest
import torch
from torch import Tensor

from compgen_fast.measure.factor_probes import FactorProbes, fit_probes, side
from compgen_fast.worlds import Factor, Shapes2D
from compgen_fast.worlds.world import Part

NAMES = ("shape", "colour", "size")
EASY = ("colour", "size")  # learned in a second, also at 16×16


def part(name: str = "train", split: str = "all", seed: int = 0, size: int = 4_000) -> Part:
    return Shapes2D(16, seed=seed).split(split, name, size=size)


@pytest.fixture(scope="module")
def probes() -> FactorProbes:
    return fit_probes([part()], EASY, images=1_000, steps=100)


def real(count: int = 400, seed: int = 5) -> tuple[Tensor, dict[str, Tensor]]:
    samples = part(seed=seed).samples(np.arange(count))
    return torch.from_numpy(samples.images), {n: torch.from_numpy(v) for n, v in samples.factors.items()}


def test_real_images_that_nobody_taught_are_told_right(probes: FactorProbes) -> None:
    found = probes.judge(*real())
    assert found.accuracy >= 0.99 and list(found.per_factor()) == ["colour", "size"]
    assert list(found.per_composition()) == ["00", "01", "10", "11"]


def test_an_image_is_right_if_all_factors_are(probes: FactorProbes) -> None:
    images, wanted = real()
    swapped = wanted | {"colour": 1 - wanted["colour"]}
    before, after = probes.judge(images, wanted), probes.judge(images, swapped)
    assert after.accuracy == 0 and set(after.per_composition().values()) == {0}
    assert after.per_factor()["colour"] == pytest.approx(1 - before.per_factor()["colour"])
    assert after.per_factor()["size"] == before.per_factor()["size"]


def test_compositions_are_scored_apart(probes: FactorProbes) -> None:
    images, wanted = real()
    blue = wanted["colour"] == 1
    images[blue] = 128  # grey says nothing
    found = probes.judge(images, wanted).per_composition()
    assert min(found["00"], found["01"]) > 0.95 and found["10"] + found["11"] <= 1
    half = probes.judge(images[blue], {name: values[blue] for name, values in wanted.items()})
    assert list(half.per_composition()) == ["10", "11"]


def test_numbers_are_judged_by_their_half() -> None:
    values = {"size": np.array([0.0, 0.49, 0.5, 1.0], np.float32), "x": np.array([-0.4, 0.1, 0.0, -0.1])}
    assert side(Factor("size"), values).tolist() == [False, False, True, True]
    assert side(Factor("x", low=-0.45, high=0.45), values).tolist() == [False, True, True, False]
    assert side(Factor("shape", ("disc", "triangle")), {"shape": np.array([0, 1])}).tolist() == [False, True]
    with pytest.raises(ValueError, match="no values of the factor 'hue'; expected it among size, x"):
        side(Factor("hue"), values)


def test_fitting_twice_gives_the_same_probes() -> None:
    first, second = (fit_probes([part()], NAMES, images=200, steps=3, least=0) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first.parameters(), second.parameters(), strict=True))


def test_poor_probes_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"of 40 real images .* are told right .*worst is composition .*expected 99.00%"
    ):
        fit_probes([part()], NAMES, images=200, steps=2)


def test_probes_of_seen_compositions_alone_are_refused() -> None:
    with pytest.raises(ValueError, match="the images show 4 of the 8 compositions of shape, colour, size"):
        fit_probes([part(split="composition")], NAMES, images=200, steps=2)
    parts = [part(name, "composition") for name in ("train", "level1", "level2")]
    fit_probes(parts, NAMES, images=300, steps=2, least=0)


def test_what_cannot_be_judged_is_refused(probes: FactorProbes) -> None:
    with pytest.raises(ValueError, match="has no factor 'hue'; it has shape, colour, size, x, y"):
        fit_probes([part()], ("hue",), steps=1)
    with pytest.raises(ValueError, match="hue has 3 values; expected two, or a number"):
        FactorProbes([Factor("hue", ("a", "b", "c"))], 16)
    with pytest.raises(ValueError, match=r"images are torch.float32 \[1, 16, 16, 3\]; expected torch.uint8"):
        probes.judge(torch.zeros(1, 16, 16, 3), {name: torch.zeros(1) for name in EASY})
    with pytest.raises(ValueError, match="3 images and 2 values; expected one for each"):
        probes.judge(real(3)[0], real(2)[1])
