"""Three binary factors of a table, split by how many of them are high."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from compgen_fast.worlds.adapters import FolderError, compositions, open_folder
from compgen_fast.worlds.adapters.columns import Column, Columns
from compgen_fast.worlds.source import Factor, Samples

FACES = ("Male", "Blond", "Smiling")


class Table:
    """Thirty samples of every combination of three attributes; a shape of three kinds, a hue of four numbers."""

    name, slots = "table", ()

    def __init__(self, keep: Callable[[NDArray[np.int64]], Any] = lambda number: number >= 0) -> None:
        number = np.arange(8 * 30 * 12)
        number = number[keep(number)]
        sides = {name: number >> place & 1 for place, name in enumerate(FACES)}
        hue: Column = (np.float32(0.1) * (number // 8 % 4)).astype(np.float32)
        self.table: Columns = {**sides, "shape": number // 32 % 3, "hue": hue}
        absent = ("absent", "present")
        shapes = Factor("shape", ("none", "cube", "ball"))
        self.factors = (*(Factor(name, absent) for name in FACES), shapes, Factor("hue", low=0.0, high=0.3))

    def __len__(self) -> int:
        return len(self.table["hue"])

    def samples(self, indices: NDArray[np.int64]) -> Samples:
        images = np.zeros((len(indices), 1, 1, 3), np.uint8)
        images[:, 0, 0, 0], images[:, 0, 0, 1] = indices % 256, indices // 256
        return Samples(images, {name: column[indices] for name, column in self.table.items()})


def codes(part: Any) -> set[str]:
    return {"".join(map(str, row)) for row in np.stack(list(part.table.values()), 1).tolist()}


def test_parts_are_told_apart_by_how_many_are_high() -> None:
    split = compositions(Table(), FACES)
    assert [codes(part) for part in split] == [
        {"000", "001", "010", "100"}, {"000", "001", "010", "100"}, {"011", "101", "110"}, {"111"},
    ]  # fmt: skip
    assert [len(part) for part in split] == [1296, 144, 1080, 360]
    everything = np.concatenate([part.chosen for part in split])
    assert sorted(everything.tolist()) == list(range(len(Table())))


def test_samples_are_those_of_the_source_with_three_factors_of_two_values() -> None:
    source = Table()
    level2 = compositions(source, FACES).level2
    found = level2.samples(np.array([5, 0]))
    np.testing.assert_array_equal(found.images, source.samples(level2.chosen[[5, 0]]).images)
    assert [factor.name for factor in level2.factors] == list(FACES) == list(found.factors)
    assert all(values.tolist() == [1, 1] for values in found.factors.values())
    for name in FACES:
        np.testing.assert_array_equal(source.table[name][level2.chosen], 1)


def test_the_order_of_attributes_is_that_of_a_composition() -> None:
    split = compositions(Table(), ("Smiling", "Male", "Blond"))
    assert list(split.level1.table) == ["Smiling", "Male", "Blond"]


def test_two_of_many_values_are_chosen_and_the_others_left_out() -> None:
    source = Table()
    split = compositions(source, ("Male", ("shape", "ball", "cube"), ("hue", 0.3, 0.1)))
    chosen = np.concatenate([part.chosen for part in split])
    assert set(source.table["shape"][chosen].tolist()) == {1, 2}
    np.testing.assert_allclose(np.unique(source.table["hue"][chosen]), [0.1, 0.3], rtol=1e-6)
    level2 = split.level2
    assert level2.factors[1] == Factor("shape", ("ball", "cube"))
    np.testing.assert_array_equal(source.table["shape"][level2.chosen], 1)
    np.testing.assert_allclose(source.table["hue"][level2.chosen], 0.1, rtol=1e-6)


@pytest.mark.parametrize(
    ("attributes", "sentence"),
    [
        (("Male", "Bald", "Smiling"), "table has no factor 'Bald'; it has Male, Blond, Smiling, shape, hue"),
        (("Male", "Male", "Smiling"), "the attributes are Male, Male, Smiling; expected three different ones"),
        (
            ("Male", "shape", "Smiling"),
            r"shape takes 3 values in table \(none, cube, ball\); expected two: name .* \('shape', 'none', 'ball'\)",
        ),
        (("Male", ("shape", "cube", "cone"), "Smiling"), "no shape is 'cone' in table; it has none, cube, ball"),
        (("Male", ("hue", 0.1, 0.5), "Smiling"), "no hue is 0.5 in table; it has 0.0, 0.1"),
        (("Male", "hue", "Smiling"), "hue takes 4 values"),
    ],
)
def test_attributes_that_are_not_there_are_named(attributes: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        compositions(Table(), attributes)


def test_a_composition_that_nobody_has_is_named() -> None:
    with pytest.raises(ValueError, match=r"table has no sample of 011, 111 \(Male, Blond, Smiling, 1 for high\)"):
        compositions(Table(lambda number: number % 8 < 6), FACES)


@pytest.mark.parametrize("name", ["celeba", "kubric", "clevrer", "shapes3d"])
def test_a_folder_that_is_not_there_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(FolderError, match="nowhere"):
        open_folder(name, tmp_path / "nowhere")
