"""Where a run's images come from: folders that say what is in them, and parts of a split."""

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch

from compgen_fast.stream import pack
from compgen_fast.train import data
from compgen_fast.train.config import DataConfig, TrainConfig
from compgen_fast.train.ranks import Ranks
from compgen_fast.worlds import Scenes

DATA = DataConfig(split="background", size=20, validation_size=8)


def test_settings_that_change_images_change_the_folder() -> None:
    settings = [
        DATA,
        replace(DATA, options=("variation=0.1",)),
        replace(DATA, options=("variation=0.2",)),
        replace(DATA, options=("variation=0.1", "objects=2")),
        replace(DATA, options=("a=bc",)),
        replace(DATA, options=("ab=c",)),
        replace(DATA, seen_pairs=3),
        replace(DATA, split="texture"),
        replace(DATA, seed=1),
        replace(DATA, size=21),
    ]
    for one, other in combinations(settings, 2):
        assert data.folder_name(one, 16, "train") != data.folder_name(other, 16, "train"), (one, other)
    assert data.folder_name(DATA, 16, "train") != data.folder_name(DATA, 32, "train")
    assert data.folder_name(DATA, 16, "train") != data.folder_name(DATA, 16, "validation")


def test_options_reach_the_world() -> None:
    calm = replace(DATA, options=("variation=0.1", "objects=2"), seed=3)
    found = data.part(calm, 16, "ood")
    expected = Scenes(16, seed=3, objects=2, variation=0.1).split("background", "ood", size=8)
    assert len(found) == 8 and len(data.part(calm, 16, "train")) == 20
    np.testing.assert_array_equal(found.samples(np.arange(8)).images, expected.samples(np.arange(8)).images)
    factors = data.factors(TrainConfig(data=replace(calm, cache=Path("nowhere"))))
    assert factors == expected.factors


def test_what_is_no_option_is_refused() -> None:
    for options, sentence in (
        (("variation",), "--options variation: expected name=value"),
        (("legs=4",), "scenes: there is no option 'legs'"),
        (("variation=2",), "variation is 2; expected 0"),
    ):
        with pytest.raises(ValueError, match=sentence):
            data.part(replace(DATA, options=options), 16, "train")


def test_a_world_is_packed_once_with_its_options(tmp_path: Path) -> None:
    config = replace(DATA, options=("variation=0.1",), cache=tmp_path)
    folders = data.image_shards(config, 16, Ranks.alone())
    images = torch.cat([*data.in_order(TrainConfig(data=config, batch_size=8), folders.train)])
    expected = Scenes(16, variation=0.1).split("background", "train", size=20).samples(np.arange(20)).images
    np.testing.assert_array_equal(images.numpy(), expected)
    manifest = Path(folders.train) / "manifest.json"
    written = manifest.stat().st_mtime_ns
    assert data.image_shards(config, 16, Ranks.alone()) == folders and manifest.stat().st_mtime_ns == written


@pytest.mark.parametrize("batch", [1, 7, 64])
def test_images_come_in_the_order_they_were_packed_and_none_twice(tmp_path: Path, batch: int) -> None:
    part = Scenes(16).split("background", size=20)
    pack(part, tmp_path / "shards", shard_size=6)
    batches = [*data.in_order(TrainConfig(batch_size=batch), str(tmp_path / "shards"))]
    np.testing.assert_array_equal(torch.cat(batches).numpy(), part.samples(np.arange(20)).images)
