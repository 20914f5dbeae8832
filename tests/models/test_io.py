"""Exported weights: a folder that builds the model again, and what is refused."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from compgen_fast.generate.config import (
    ConditioningConfig,
    DiTConfig,
    GIVTConfig,
    JepaConfig,
    MARConfig,
    MaskGITConfig,
    TrunkConfig,
)
from compgen_fast.models.build import build
from compgen_fast.models.config import (
    DecoderConfig,
    EncoderConfig,
    LossConfig,
    ModelConfig,
    ReplayConfig,
    SlotVAEConfig,
    SupervisedConfig,
)
from compgen_fast.models.io import CONFIG, WEIGHTS, begin_with, check_start, export, load_model, read_settings
from compgen_fast.worlds.source import Factor

ENCODER = EncoderConfig(width=8, slot_layers=1, slot_heads=2)
VAE = SlotVAEConfig(
    image_size=8,
    slots=2,
    slot_dim=4,
    encoder=ENCODER,
    decoder=DecoderConfig(layers=1, heads=2, head_dim=4, query_dim=8, slot_hidden=8, octaves=2),
    loss=LossConfig(penalty="none"),
)
REPLAY = ReplayConfig(VAE, bank=5)
SUPERVISED = SupervisedConfig(image_size=8, slots=2, slot_dim=4, encoder=ENCODER)
TRUNK = TrunkConfig(8, 2, 2)
GENERATORS = (
    DiTConfig(2, TRUNK),
    MaskGITConfig(2, TRUNK, codes=5, jepa=JepaConfig(layers=(1,))),
    MARConfig(2, TRUNK, head_width=8),
    GIVTConfig(2, TRUNK, ConditioningConfig("both")),
)
FACTORS = (Factor("shape", ("disc", "square")), Factor("x", None, -1.0, 1.0))


def exported(config: ModelConfig, folder: Path, seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    state = build(config, FACTORS).state_dict()
    export(state, config, folder, FACTORS)
    return state


@pytest.mark.parametrize(
    "config",
    [VAE, SUPERVISED, REPLAY, *GENERATORS],
    ids=["vae", "supervised", "replay", *(type(config).__name__ for config in GENERATORS)],
)
def test_an_exported_model_comes_back_from_its_folder_alone(tmp_path: Path, config: ModelConfig) -> None:
    state = exported(config, tmp_path / "weights")
    model = load_model(tmp_path / "weights")
    found = model.state_dict()
    assert found.keys() == state.keys() and all(torch.equal(found[name], state[name]) for name in state)
    assert not model.training
    assert sorted(path.name for path in tmp_path.rglob("*")) == [CONFIG, "weights", WEIGHTS]


def test_a_second_export_replaces_the_first(tmp_path: Path) -> None:
    exported(VAE, tmp_path / "weights")
    state = exported(VAE, tmp_path / "weights", seed=1)
    found = load_model(tmp_path / "weights").state_dict()
    assert all(torch.equal(found[name], state[name]) for name in state)


def test_an_export_that_fails_leaves_the_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = exported(VAE, tmp_path / "weights")

    def full(descriptor: int) -> None:
        raise OSError("full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="full"):
            exported(VAE, tmp_path / "weights", seed=1)
    found = load_model(tmp_path / "weights").state_dict()
    assert all(torch.equal(found[name], state[name]) for name in state)
    assert [path.name for path in tmp_path.iterdir()] == ["weights"]


def test_tied_and_strided_weights_are_written_in_full(tmp_path: Path) -> None:
    state = build(VAE).state_dict()
    name, tensor = next((name, tensor) for name, tensor in state.items() if tensor.dim() == 2)
    state[name] = tensor.t().contiguous().t()
    export({**state, "alias": state[name]}, VAE, tmp_path / "weights")
    with pytest.raises(ValueError, match=r"alias is \[.*\] there and missing in the model"):
        load_model(tmp_path / "weights")
    export(state, VAE, tmp_path / "weights")
    assert torch.equal(load_model(tmp_path / "weights").state_dict()[name], tensor)


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    exported(VAE, tmp_path / "weights")
    path = tmp_path / "weights" / CONFIG
    plain = json.loads(path.read_text())
    plain["model"]["slot_dim"] = 5
    path.write_text(json.dumps(plain))
    with pytest.raises(ValueError, match="expected the two files of one export"):
        load_model(tmp_path / "weights")


def test_a_config_with_an_unknown_field_is_refused(tmp_path: Path) -> None:
    exported(VAE, tmp_path / "weights")
    path = tmp_path / "weights" / CONFIG
    plain = json.loads(path.read_text())
    plain["model"]["encoder"]["depth"] = 3
    path.write_text(json.dumps(plain))
    with pytest.raises(ValueError, match=r"config.json.model.encoder has 'depth', which EncoderConfig does not"):
        load_model(tmp_path / "weights")


def test_another_version_and_another_folder_are_refused(tmp_path: Path) -> None:
    exported(VAE, tmp_path / "weights")
    path = tmp_path / "weights" / CONFIG
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 2}))
    with pytest.raises(ValueError, match="has version 2; this program reads version 1"):
        load_model(tmp_path / "weights")
    with pytest.raises(ValueError, match="expected a folder of exported weights"):
        load_model(tmp_path)


def test_settings_that_differ_only_in_the_loss_still_load(tmp_path: Path) -> None:
    exported(replace(VAE, loss=LossConfig(penalty="hessian")), tmp_path / "weights")
    load_model(tmp_path / "weights")


def images(count: int = 5) -> torch.Tensor:
    return torch.randint(0, 256, (count, 8, 8, 3), dtype=torch.uint8)


def test_a_replay_comes_back_with_its_bank_and_decodes(tmp_path: Path) -> None:
    replay: Any = build(REPLAY)
    replay.fill([images()])
    export(replay.state_dict(), REPLAY, tmp_path / "weights")
    found: Any = load_model(tmp_path / "weights")
    assert torch.equal(found.bank, replay.bank)
    assert found.reconstruct(images()).shape == (5, 8, 8, 3)


@pytest.mark.parametrize("config", [VAE, SUPERVISED, REPLAY], ids=["vae", "supervised", "replay"])
def test_a_model_begins_with_the_weights_of_one_like_it(tmp_path: Path, config: ModelConfig) -> None:
    state = exported(config, tmp_path / "weights", seed=1)
    model = build(config, FACTORS)
    begin_with(model, tmp_path / "weights")
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert model.training


def test_replay_begins_with_a_slot_vae(tmp_path: Path) -> None:
    state = exported(VAE, tmp_path / "weights", seed=1)
    model: Any = build(REPLAY)
    bank = model.bank.clone()
    begin_with(model, tmp_path / "weights")
    assert all(torch.equal(value, state[name]) for name, value in model.vae.state_dict().items())
    assert all(torch.equal(value, state[f"encoder.{name}"]) for name, value in model.before.state_dict().items())
    assert torch.equal(model.bank, bank)  # which images fill it is the run's choice


@pytest.mark.parametrize(
    ("given", "taking"),
    [
        (SUPERVISED, REPLAY),
        (REPLAY, VAE),
        (SUPERVISED, VAE),
        (replace(VAE, slot_dim=5), VAE),
        (replace(VAE, slot_dim=5), REPLAY),
        (REPLAY, replace(REPLAY, bank=6)),
    ],
)
def test_other_weights_are_no_beginning(tmp_path: Path, given: ModelConfig, taking: ModelConfig) -> None:
    exported(given, tmp_path / "weights")
    model = build(taking, FACTORS)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    sentence = r"in the model that is to begin with it; expected weights of a model with the same parts and sizes"
    with pytest.raises(ValueError, match=sentence):
        begin_with(model, tmp_path / "weights")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("config", [VAE, REPLAY])
def test_a_folder_without_weights_is_no_beginning(tmp_path: Path, config: ModelConfig) -> None:
    with pytest.raises(ValueError, match="expected a folder of exported weights"):
        begin_with(build(config), tmp_path)


def test_folders_are_named_by_text_as_well_as_by_paths(tmp_path: Path) -> None:
    folder = str(tmp_path / "weights")
    model = build(VAE)
    export(model.state_dict(), VAE, folder)
    assert read_settings(folder).model == VAE
    begin_with(model, folder)
    check_start(VAE, folder)
    found = load_model(folder).state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("config", [VAE, SUPERVISED, REPLAY, *GENERATORS], ids=lambda config: type(config).__name__)
def test_weights_to_begin_with_are_judged_without_reading_them(
    tmp_path: Path, config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = exported(config, tmp_path / "weights")
    monkeypatch.setattr("compgen_fast.models.io.load_file", lambda _: pytest.fail("read"))
    check_start(config, tmp_path / "weights", FACTORS)
    name = next(iter(state))
    export({**state, name: torch.zeros(3, 5, 7)}, config, tmp_path / "weights", FACTORS)
    with pytest.raises(ValueError, match=r"is \[3, 5, 7\] there .* expected weights of a model with the same parts"):
        check_start(config, tmp_path / "weights", FACTORS)


def test_a_vae_that_reads_its_weights_otherwise_is_refused_though_all_shapes_fit(tmp_path: Path) -> None:
    exported(VAE, tmp_path / "weights")
    otherwise = replace(VAE, decoder=replace(VAE.decoder, heads=1, head_dim=8))
    assert {name: t.shape for name, t in build(otherwise).state_dict().items()} == {
        name: t.shape for name, t in build(VAE).state_dict().items()
    }
    with pytest.raises(ValueError, match=r"was trained with model\.decoder\.heads 2, and here it is 1"):
        check_start(otherwise, tmp_path / "weights")
    with pytest.raises(ValueError, match=r"was trained with model\.vae\.decoder\.heads 2, and here it is 1"):
        check_start(ReplayConfig(otherwise), tmp_path / "weights")
    check_start(ReplayConfig(replace(VAE, loss=LossConfig())), tmp_path / "weights")


def test_weights_of_another_kind_of_model_are_refused(tmp_path: Path) -> None:
    exported(SUPERVISED, tmp_path / "weights")
    for config in (VAE, REPLAY):
        with pytest.raises(ValueError, match="holds a model of SupervisedConfig; expected SlotVAEConfig"):
            check_start(config, tmp_path / "weights")


def test_damaged_weights_are_refused_in_a_sentence(tmp_path: Path) -> None:
    exported(VAE, tmp_path / "weights")
    (tmp_path / "weights" / WEIGHTS).write_bytes(b"no tensors")
    with pytest.raises(ValueError, match=r"weights\.safetensors is damaged .* copy it again"):
        load_model(tmp_path / "weights")
