"""Where a run's images come from: folders that say what is in them, and parts of a split."""

import shutil
import sys
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from compgen_fast.generate.config import DiTConfig, MaskGITConfig
from compgen_fast.generate.latents import TokenStream, fingerprint
from compgen_fast.models.build import build
from compgen_fast.models.config import (
    ConvVAEConfig,
    DecoderConfig,
    EncoderConfig,
    ModelConfig,
    ReplayConfig,
    SlotVAEConfig,
    VQVAEConfig,
)
from compgen_fast.models.io import export, load_model
from compgen_fast.stream import StreamError, manifest, pack, verify
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


def test_of_a_world_only_what_is_not_given_is_packed(tmp_path: Path) -> None:
    config = replace(DATA, cache=tmp_path / "cache", validation="mine")
    assert data.image_shards(config, 16, Ranks.alone()).validation == "mine"
    assert [folder.name for folder in (tmp_path / "cache").iterdir()] == [data.folder_name(DATA, 16, "train")]


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packed images of one's own: 20 of 16×16."""
    folder = tmp_path_factory.mktemp("mine") / "shards"
    pack(Scenes(16).split("background", size=20), folder)
    return folder


@pytest.mark.parametrize("where", ["shards", "validation"])
def test_shards_that_are_not_there_are_refused_before_anything_is_packed(tmp_path: Path, where: str) -> None:
    given: dict[str, Any] = {"cache": tmp_path / "cache", where: str(tmp_path / "nowhere")}
    with pytest.raises(ValueError, match=rf"^data\.{where}: .*nowhere is not there"):
        data.check_sources(TrainConfig(data=replace(DATA, **given)))
    (tmp_path / "nowhere").write_text("a tar")
    with pytest.raises(ValueError, match=rf"^data\.{where}: .*nowhere is a file; expected a folder of shards"):
        data.check_sources(TrainConfig(data=replace(DATA, **given)))


@pytest.mark.parametrize(
    ("model", "option"),
    [(SlotVAEConfig(image_size=32), "--model.image-size"), (ReplayConfig(), "--model.vae.image-size")],
)
def test_images_of_another_size_are_refused_with_the_option_that_the_model_has(
    mine: Path, model: ModelConfig, option: str
) -> None:
    config = TrainConfig(model=model, data=DataConfig(shards=str(mine)))
    with pytest.raises(ValueError, match=rf"images of 16×16, the model takes .* --resolution .*, or set {option}$"):
        data.check_sources(config)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"world": "scens"}, "there is no world 'scens'; did you mean scenes"),
        ({"split": "backgrund"}, "there is no split 'backgrund'; did you mean background"),
        ({"options": ("haze=2",)}, "haze is 2"),
        ({"world": None}, r"data\.world and data\.shards are missing"),
    ],
)
def test_a_world_without_such_images_is_refused(changed: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        data.check_sources(TrainConfig(data=replace(DATA, **changed)))


def test_a_generator_may_be_given_images_of_its_tokenizers_size(tokenizers: Path, mine: Path) -> None:
    given = DataConfig(shards=str(mine), tokenizer=tokenizers / "vae")
    data.check_sources(TrainConfig(model=DIT, data=given))
    with pytest.raises(ValueError, match=r"^data\.shards: .* 16×16, the model takes 32×32"):
        data.check_sources(TrainConfig(model=replace(DIT, image_size=32), data=given))


def test_replay_begins_with_weights_of_its_own_vae_and_is_told_where_they_come_from(
    tokenizers: Path, mine: Path, tmp_path: Path
) -> None:
    replay = TrainConfig(model=ReplayConfig(SLOTS), data=DataConfig(shards=str(mine)))
    replay = replace(replay, model=replace(replay.model, vae=replace(SLOTS, image_size=16)))
    with pytest.raises(ValueError, match=r"^start: .* replay begins with a slot VAE .* `cgf train frame_vae_cpu`"):
        data.check_sources(replace(replay, start=tmp_path))
    with pytest.raises(ValueError, match=r"^start: .* holds a model of ConvVAEConfig; expected SlotVAEConfig"):
        data.check_sources(replace(replay, start=tokenizers / "vae"))
    with pytest.raises(ValueError, match=r"with model\.vae\.image_size 8, and here it is 16; give it as it was"):
        data.check_sources(replace(replay, start=tokenizers / "slots"))


@pytest.mark.parametrize(("bank", "kept"), [(4096, 20), (20, 20), (7, 7)])
def test_replays_bank_is_no_larger_than_its_data(mine: Path, bank: int, kept: int) -> None:
    model = ReplayConfig(bank=bank)
    for source in (DATA, DataConfig(shards=str(mine))):
        assert data.fitted(TrainConfig(model=model, data=source)).model == replace(model, bank=kept)


@pytest.mark.parametrize("batch", [1, 7, 64])
def test_images_come_in_the_order_they_were_packed_and_none_twice(tmp_path: Path, batch: int) -> None:
    part = Scenes(16).split("background", size=20)
    pack(part, tmp_path / "shards", shard_size=6)
    batches = [*data.in_order(TrainConfig(batch_size=batch), str(tmp_path / "shards"))]
    np.testing.assert_array_equal(torch.cat(batches).numpy(), part.samples(np.arange(20)).images)


TOKENIZERS = {
    "vae": ConvVAEConfig(image_size=16, patch=4, width=8, channels=3),
    "vq": VQVAEConfig(image_size=16, patch=4, width=8, channels=3, codes=12),
}
DIT, MASKGIT = DiTConfig(image_size=16, channels=3), MaskGITConfig(image_size=16, codes=12)

SLOTS = SlotVAEConfig(8, 2, 4, EncoderConfig(width=8, slot_heads=2), DecoderConfig(heads=2, head_dim=4, query_dim=8))


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Exported weights in ``vae``, ``vq`` and, of other weights, ``other``; in ``slots`` those of a slot VAE."""
    folder = tmp_path_factory.mktemp("tokenizers")
    for seed, (name, config) in enumerate([*TOKENIZERS.items(), ("other", TOKENIZERS["vae"]), ("slots", SLOTS)]):
        torch.manual_seed(seed)
        export(build(config).state_dict(), config, folder / name)
    return folder


def generating(model: ModelConfig, tokenizer: Path | None, cache: Path) -> TrainConfig:
    return TrainConfig(model=model, data=replace(DATA, cache=cache, tokenizer=tokenizer), batch_size=4)


@pytest.mark.parametrize(("model", "name"), [(DIT, "vae"), (DIT, "vq"), (MASKGIT, "vq")])
def test_a_generator_is_given_the_tokens_of_the_worlds_images(
    tokenizers: Path, tmp_path: Path, model: ModelConfig, name: str
) -> None:
    config = generating(model, tokenizers / name, tmp_path)
    found = data.shards(config, Ranks.alone())
    assert found.validation is not None and data.packed(config) == Path(found.train)
    tokenizer: Any = load_model(tokenizers / name)
    images = data.part(config.data, 16, "validation").samples(np.arange(8))
    expected = tokenizer.codes if model is MASKGIT else tokenizer.encode
    stream = data.open_validation(config, found.validation, Ranks.alone())
    data.check_fit(config, found.validation)
    batches = [*stream]
    torch.testing.assert_close(
        torch.cat([batch.images for batch in batches]), expected(torch.from_numpy(images.images)).detach()
    )
    told = torch.cat([batch.factors["background"] for batch in batches])
    np.testing.assert_array_equal(told.numpy(), images.factors["background"])
    assert data.factors(config) == data.part(config.data, 16, "train").factors == stream.schema.factors


def test_tokens_are_made_once_and_anew_for_other_tokenizers_and_images(tokenizers: Path, tmp_path: Path) -> None:
    config = generating(DIT, tokenizers / "vae", tmp_path)
    first = data.shards(config, Ranks.alone())
    written = (Path(first.train) / "manifest.json").stat().st_mtime_ns
    assert data.shards(config, Ranks.alone()) == first
    assert (Path(first.train) / "manifest.json").stat().st_mtime_ns == written
    images = data.image_shards(config.data, 16, Ranks.alone())
    assert first.train.startswith(f"{images.train}.latents-{fingerprint(load_tokenizer(tokenizers / 'vae'))}")
    others = [replace(config.data, tokenizer=tokenizers / "other"), replace(config.data, tokenizer=tokenizers / "vq")]
    for other in others:
        assert data.shards(replace(config, data=other), Ranks.alone()).train != first.train
    shutil.rmtree(images.train)
    pack(Scenes(16, seed=7).split("background", size=20), images.train)
    assert data.shards(config, Ranks.alone()).train != first.train


def load_tokenizer(folder: Path) -> Any:
    return load_model(folder)


def test_a_cache_of_tokens_that_was_cut_off_goes_on(
    tokenizers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = generating(DIT, tokenizers / "vae", tmp_path)
    data.image_shards(config.data, 16, Ranks.alone())
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "write", lambda *_: sys.exit("cut off"))
        with pytest.raises(SystemExit, match="cut off"):
            data.shards(config, Ranks.alone())
    assert data.packed(config) is None
    found = data.shards(config, Ranks.alone())
    assert verify(found.train) == [] and data.packed(config) == Path(found.train)


def test_tokens_given_as_shards_are_read_as_they_are(tokenizers: Path, tmp_path: Path) -> None:
    made = data.shards(generating(DIT, tokenizers / "vae", tmp_path), Ranks.alone())
    for tokenizer in (None, tokenizers / "vae"):
        given = DataConfig(shards=made.train, validation=made.validation, tokenizer=tokenizer)
        config = TrainConfig(model=DIT, data=given, batch_size=4)
        assert data.shards(config, Ranks.alone()) == made and data.packed(config) == Path(made.train)
        assert isinstance(data.open_stream(config, made.train, Ranks.alone()), TokenStream)
    with pytest.raises(StreamError, match="cache the tokens again, or load the weights that made"):
        data.shards(replace(config, data=replace(given, tokenizer=tokenizers / "other")), Ranks.alone())


@pytest.mark.parametrize(
    ("model", "name", "sentence"),
    [
        (DIT, "none", r"none does not hold config.json .* Train a tokenizer with `cgf train vae_tokenizer_cpu`"),
        (DIT, "slots", "holds a model of SlotVAEConfig; a generator learns tokens of images"),
        (
            replace(DIT, image_size=32),
            "vae",
            "model.image_size is 32, .* set --model.image-size 16",
        ),
        (
            replace(DIT, side=3),
            "vae",
            "makes 16 tokens of 3 numbers, .* learns 9 tokens of 3 numbers",
        ),
        (replace(DIT, channels=8), "vq", "makes 16 tokens of 3 numbers, .* set --model.side 4 --model.channels 3"),
        (replace(MASKGIT, codes=9), "vq", "makes 16 codes out of 12, .* 16 codes out of 9; set .* --model.codes 12"),
        (MASKGIT, "vae", "vae holds a VAE, which has no codes; MaskGIT learns codes. Train a VQ-VAE"),
    ],
)
def test_a_tokenizer_that_does_not_fit_is_refused_before_anything_is_packed(
    tokenizers: Path, tmp_path: Path, model: ModelConfig, name: str, sentence: str
) -> None:
    config = generating(model, tokenizers / name, tmp_path / "data")
    for refuse in (lambda: data.check_tokenizer(config), lambda: data.shards(config, Ranks.alone())):
        with pytest.raises(ValueError, match=sentence):
            refuse()
    assert not (tmp_path / "data").exists()


def test_shards_that_the_model_cannot_learn_are_refused(tokenizers: Path, tmp_path: Path) -> None:
    config = generating(DIT, tokenizers / "vae", tmp_path)
    tokens, images = data.shards(config, Ranks.alone()), data.image_shards(config.data, 16, Ranks.alone())
    for model, folder, sentence in (
        (DIT, images.train, "the shards hold images, and data.tokenizer is missing; a generator learns tokens"),
        (replace(DIT, side=2), tokens.train, "the shards hold 16 tokens of 3 numbers, .* learns 4 tokens of 3 numbers"),
        (MASKGIT, tokens.train, "the shards hold 16 tokens of 3 numbers, .* learns 16 codes out of 12"),
        (TOKENIZERS["vae"], tokens.train, "hold 16 tokens .* and ConvVAEConfig is a model of images"),
        (replace(TOKENIZERS["vae"], image_size=32), images.train, "images of 16×16, the model takes 32×32"),
    ):
        asked = TrainConfig(model=model, batch_size=4)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=sentence):
            data.check_fit(asked, folder)
