from pathlib import Path

import numpy as np
import pytest

from compgen_fast.worlds.adapters.pug import pug_animals, pug_spar
from compgen_fast.worlds.source import Factor
from tests.worlds.adapters.folders import Damage, check_refused, noise, replace, truncate, write_image

SPAR = """filename,world_name,character_name,character2_name,character_texture,character2_texture,\
character1_pos,character2_pos
0.png,Desert,Cat,blank,Default,Default,left,right
1.png,Arena,Cat,Bear,Blue,Red,bottom,top
"""
ANIMALS = """filename,world_name,character_name,character_scale,camera_yaw,character_texture
0.png,Desert,Cat,0.7,45,Default
0b.png,Arena,Bear,1.0,-45,Grass
"""


@pytest.fixture
def spar(tmp_path: Path) -> Path:
    (tmp_path / "labels.csv").write_text(SPAR)
    for seed in range(2):
        write_image(tmp_path / f"{seed}.png", noise(seed))
    return tmp_path


def test_spar_has_its_factors_and_images(spar: Path) -> None:
    source = pug_spar(spar, resolution=8)
    assert source.factors == (
        Factor("world_name", ("Arena", "Desert")),
        Factor("character_name", ("Cat",)),
        Factor("character2_name", ("Bear", "blank")),
        Factor("character1_pos", ("bottom", "left")),
        Factor("character2_pos", ("right", "top")),
        Factor("character_texture", ("Blue", "Default")),
        Factor("character2_texture", ("Default", "Red")),
    )
    samples = source.samples(np.array([0, 1]))
    np.testing.assert_array_equal(samples.images, np.stack([noise(0), noise(1)]))
    assert {name: column.tolist() for name, column in samples.factors.items()} == {
        "world_name": [1, 0],
        "character_name": [0, 0],
        "character2_name": [1, 0],
        "character1_pos": [1, 0],
        "character2_pos": [0, 1],
        "character_texture": [1, 0],
        "character2_texture": [0, 1],
    }


@pytest.mark.parametrize("table", ["labels_pug_animal.csv", "labels.csv"])
@pytest.mark.parametrize("places", [("", ""), ("Cat", "Bear"), ("Desert", "Arena"), ("images", "images")])
def test_animals_are_found_where_they_have_been_seen(tmp_path: Path, table: str, places: tuple[str, str]) -> None:
    (tmp_path / table).write_text(ANIMALS)
    for seed, (place, name) in enumerate(zip(places, ("0.png", "0b.png"), strict=True)):
        write_image(tmp_path / place / name, noise(seed))
    source = pug_animals(tmp_path, resolution=8)
    np.testing.assert_array_equal(source.samples(np.array([1, 0])).images, np.stack([noise(1), noise(0)]))
    assert [factor.name for factor in source.factors if not factor.categorical] == ["character_scale", "camera_yaw"]
    assert source.table["camera_yaw"].tolist() == [45, -45]


def test_images_whose_line_was_dropped_are_left_out(spar: Path) -> None:
    write_image(spar / "goldfish.png", noise(5))
    assert len(pug_spar(spar)) == 2


@pytest.mark.parametrize(
    ("damage", "file", "what"),
    [
        (lambda f: (f / "labels.csv").unlink(), "labels.csv", "there is no such file"),
        (lambda f: (f / "1.png").unlink(), "1.png", r"there is no such image, though labels\.csv lists it"),
        (lambda f: replace(f / "labels.csv", "character2_pos", "pos"), "labels.csv", "no column 'character2_pos'"),
    ],
)
def test_an_odd_spar_folder_is_refused_with_a_sentence(spar: Path, damage: Damage, file: str, what: str) -> None:
    damage(spar)
    check_refused(lambda: pug_spar(spar), file, what, "PUG_SPAR/")


def test_a_missing_animals_table_is_named_with_its_other_name(tmp_path: Path) -> None:
    check_refused(lambda: pug_animals(tmp_path), "labels_pug_animal.csv", r"\(nor labels\.csv\)", "PUG_ANIMAL/")


def test_opening_decodes_nothing(spar: Path) -> None:
    truncate(spar / "1.png")
    source = pug_spar(spar, resolution=8)
    source.samples(np.array([0]))
    with pytest.raises(ValueError, match=r"1\.png: the image cannot be read"):
        source.samples(np.array([1]))
