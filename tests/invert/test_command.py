"""`cgf search` and `cgf replay`: from exported weights and shards to files."""

import html
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from compgen_fast.cli import main
from compgen_fast.invert import command
from compgen_fast.models.build import build
from compgen_fast.models.config import DecoderConfig, EncoderConfig, SlotVAEConfig, SupervisedConfig
from compgen_fast.models.io import export
from compgen_fast.report.page import PAGE
from compgen_fast.report.search import Errors
from compgen_fast.stream import ShardStream, pack
from compgen_fast.worlds import open_split

MODEL = SlotVAEConfig(
    image_size=16,
    slots=2,
    slot_dim=4,
    encoder=EncoderConfig(width=8, downsample=8, slots_by="dense", slot_hidden=16),
    decoder=DecoderConfig(kind="frame", slot_hidden=16, frequencies=3, features=3, mixer=4),
)
IMAGES = 20


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model") / "weights"
    export(build(MODEL).state_dict(), MODEL, folder)
    return folder


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("data") / "shards"
    pack(open_split("scenes", split="background", part="ood", resolution=16, size=IMAGES), folder)
    return str(folder)


def searched(weights: Path, shards: str, out: Path, *more: str) -> dict[str, torch.Tensor]:
    options = ["--out", str(out), "--steps", "6", "--batch", "8", *more]
    assert main(["search", str(weights), shards, *options]) == 0
    return load_file(out / command.LATENTS)


def test_every_image_gets_its_latents_in_the_order_of_the_shards(weights, shards, tmp_path):
    found = searched(weights, shards, tmp_path / "out")
    assert found["z"].shape == (IMAGES, 2, 4) and found["trace"].shape == (IMAGES, 6)
    assert (found["error"] <= found["start_error"] + 1e-7).all()
    with ShardStream(shards, batch_size=IMAGES, epochs=1, shuffle=False) as stream:
        batch = next(iter(stream))
    keys, latents = tmp_path / "out" / command.KEYS, tmp_path / "out" / command.LATENTS
    assert json.loads(keys.read_text()) == list(batch.keys)
    assert latents.stat().st_mode == keys.stat().st_mode  # safetensors would let nobody else read it
    vae = command.load_vae(weights)
    decoded = vae.decode(found["z"]).detach()
    errors = (decoded - batch.images.flatten(1, 2) / 255).square().mean((1, 2))
    torch.testing.assert_close(errors, found["error"], rtol=1e-4, atol=1e-6)


def test_a_search_that_was_cut_off_goes_on_and_ends_the_same(weights, shards, tmp_path, monkeypatch):
    whole = searched(weights, shards, tmp_path / "whole", "--swapped", "1", "--seed", "3")
    written = command._write_part

    def cut(*arguments: object) -> None:
        if arguments[-1] == 2:
            raise KeyboardInterrupt
        written(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(command, "_write_part", cut)
    options = ["--out", str(tmp_path / "cut"), "--steps", "6", "--batch", "8", "--swapped", "1", "--seed", "3"]
    assert main(["search", str(weights), shards, *options]) == 130
    assert not (tmp_path / "cut" / command.LATENTS).exists()
    monkeypatch.setattr(command, "_write_part", written)
    again = searched(weights, shards, tmp_path / "cut", "--swapped", "1", "--seed", "3")
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    assert not list((tmp_path / "cut").glob("part-*"))


def test_a_search_tells_how_it_went_and_leaves_a_page_of_errors_and_examples(weights, shards, tmp_path, capsys):
    found = searched(weights, shards, tmp_path / "out")
    told = capsys.readouterr().out.splitlines()
    before, after = (float(found[name].mean()) for name in ("start_error", "error"))
    assert f"20 images: mean squared error per colour {before:.2e} → {after:.2e}" in told[0]
    assert re.search(rf"[\d.]+ images/s; {(found['steps'] == 0).sum()} gave up", told[0])
    assert told[1:] == [f"latents: {tmp_path / 'out' / command.LATENTS}", f"page: {tmp_path / 'out' / PAGE}"]
    page = (tmp_path / "out" / PAGE).read_text()
    assert told[0] in html.unescape(page) and "errors before and after" in page
    titles = ("Least error", "Typical", "Most error")
    assert all(f"<h2>{title}</h2>" in page for title in titles) and page.count("data:image/png") == len(titles)


def test_an_example_shows_the_image_the_guess_and_what_was_found(weights, shards, tmp_path):
    found = searched(weights, shards, tmp_path / "out")
    settings = command.SearchSettings(**json.loads((tmp_path / "out" / command.SETTINGS).read_text()))
    for number in (0, 13, IMAGES - 1):
        image, guess, reached = command._example(command.load_vae(weights), settings, number, found["z"][number]) / 255
        assert ((guess - image) ** 2).mean() == pytest.approx(float(found["start_error"][number]), abs=1e-3)
        assert ((reached - image) ** 2).mean() == pytest.approx(float(found["error"][number]), abs=1e-3)


@pytest.mark.parametrize("images", [1, 2, 5, 40])
def test_no_image_is_an_example_twice(images):
    errors = Errors(torch.ones(images), torch.rand(images), torch.ones(images), 1.0)
    shown = [number for numbers in errors.examples().values() for number in numbers]
    assert len(set(shown)) == len(shown) > 0 and int(errors.found.argmin()) == shown[0]


def test_training_images_keep_latents_where_they_belong(weights, shards, tmp_path):
    free = searched(weights, shards, tmp_path / "free", "--rate", "3")
    kept = searched(weights, shards, tmp_path / "kept", "--rate", "3", "--train", shards, "--pull", "0.5")
    assert kept["z"].abs().amax() < free["z"].abs().amax()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["{weights}", "{shards}", "--drawn", "1"], "drawn starts need marginals"),
        (["{weights}", "nowhere"], "nowhere"),
        (["nowhere", "{shards}"], "config.json"),
    ],
)
def test_what_cannot_be_searched_is_one_sentence(weights, shards, tmp_path, capsys, arguments, sentence):
    given = [each.format(weights=weights, shards=shards) for each in arguments]
    assert main(["search", *given, "--out", str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err
    assert sentence in told and "Traceback" not in told


def test_a_folder_with_another_search_is_left_alone(weights, shards, tmp_path, capsys):
    searched(weights, shards, tmp_path / "out")
    before = (tmp_path / "out" / command.LATENTS).read_bytes()
    assert main(["search", str(weights), shards, "--out", str(tmp_path / "out"), "--steps", "9"]) == 2
    assert "already holds" in capsys.readouterr().err
    assert (tmp_path / "out" / command.LATENTS).read_bytes() == before


def test_an_encoder_alone_cannot_be_searched(shards, tmp_path, capsys):
    config = SupervisedConfig(image_size=16, slots=2, slot_dim=4, encoder=MODEL.encoder, factors=("object_1",))
    factors = open_split("scenes", split="background").factors
    export(build(config, factors).state_dict(), config, tmp_path / "weights", factors)
    assert main(["search", str(tmp_path / "weights"), shards, "--out", str(tmp_path / "out")]) == 2
    assert "has no decoder" in capsys.readouterr().err


def test_composites_are_packed_with_their_slots(weights, shards, tmp_path, capsys):
    out = tmp_path / "composites"
    assert main(["replay", str(weights), shards, "--pack", str(out), "--size", "12", "--bank", "10"]) == 0
    assert "12 composites" in capsys.readouterr().out
    with ShardStream(str(out), batch_size=12, epochs=1, shuffle=False) as stream:
        batch = next(iter(stream))
    z = torch.stack([batch.factors[f"z_{k}_{d}"] for k in (1, 2) for d in (1, 2, 3, 4)], 1).view(12, 2, 4)
    vae = command.load_vae(weights)
    drawn = (vae.decode(z).detach().clamp(0, 1) * 255).round().view(batch.images.shape)
    assert np.abs(drawn.numpy() - batch.images.numpy().astype(float)).max() <= 1
