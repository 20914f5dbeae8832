"""Generators by `cgf train`: tokens are made once, every objective trains, and JEPA's target survives a resume."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from compgen_fast.draws import Draws
from compgen_fast.generate.generator import Generator
from compgen_fast.models.build import build
from compgen_fast.models.config import ConvVAEConfig, VQVAEConfig
from compgen_fast.models.io import export, load_model
from compgen_fast.models.tokenizer import Tokenizer
from compgen_fast.report.page import PAGE
from tests.train.runs import finish, lines, losses, start_recipe
from tests.train.test_tokenizers import state

VAE = ConvVAEConfig(image_size=16, patch=4, width=8, channels=3)
VQ = VQVAEConfig(image_size=16, patch=4, width=8, channels=3, codes=12)
SETTINGS = """
    --model.image-size 16 --model.codes 12 --model.trunk.width 16 --model.trunk.layers 3 --model.trunk.heads 2
    --model.jepa.layers 1 3 --model.jepa.rate 0.5 --model.jepa.rate-steps 8
    --data.size 64 --data.validation-size 16 --batch-size 8 --log-every 1 --optimiser.warmup 2
    --optimiser.decay constant
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two tokenizers: ``vae`` and ``vq``."""
    folder = tmp_path_factory.mktemp("runs")
    for name, config in (("vae", VAE), ("vq", VQ)):
        torch.manual_seed(0)
        export(build(config).state_dict(), config, folder / name)
    return folder


def run(out: Path, *settings: str, steps: int = 6) -> str:
    """maskgit_jepa_cpu, as small as it gets."""
    beside = out.parent
    places = ("--out", str(out), "--data.cache", str(beside / "data"), "--data.tokenizer", str(beside / "vq"))
    given = (*SETTINGS.split(), *places, "--steps", str(steps), *settings)
    return finish(start_recipe("maskgit_jepa_cpu", *given))


@pytest.fixture(scope="module")
def straight(place: Path) -> Path:
    printed = run(place / "straight")
    assert "codes-16x12" in printed
    return place / "straight"


def test_a_generator_with_jepa_resumes_bit_for_bit(straight: Path) -> None:
    out = straight.parent / "resumed"
    run(out, steps=3)
    printed = run(out, "--resume")
    assert "pack" not in printed  # the tokens are there
    assert losses(out) == losses(straight) and len(losses(out)) == 6
    found, wanted = state(out), state(straight)
    assert {"jepa.steps", "jepa.target_trunk.modulation.weight"} <= wanted.keys() == found.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    found, wanted = (load_file(folder / "weights" / "weights.safetensors") for folder in (out, straight))
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_the_target_is_exported_as_it_is_and_what_it_follows_averaged(straight: Path) -> None:
    model = load_model(straight / "weights")
    assert isinstance(model, Generator) and model.jepa is not None
    trained, exported = state(straight), model.state_dict()
    assert int(model.jepa.get_buffer("steps")) == 6
    for name in ("target_trunk.modulation.weight", "target_embedding.weight"):
        assert torch.equal(exported[f"jepa.{name}"], trained[f"jepa.{name}"])
        assert not torch.equal(exported[name.removeprefix("target_")], trained[name.removeprefix("target_")])
        assert not torch.equal(trained[f"jepa.{name}"], trained[name.removeprefix("target_")])


def test_two_ranks_with_accumulation_and_zero_train_the_generator_of_one_process(straight: Path) -> None:
    out = straight.parent / "two"
    printed = run(out, "--nproc", "2", "--accumulation", "2", "--zero-stage", "1")
    assert "audit: 2 ranks agree" in printed
    assert losses(out) == pytest.approx(losses(straight), rel=1e-4)
    found, wanted = state(out), state(straight)
    for name in wanted:
        assert torch.allclose(found[name].float(), wanted[name].float(), rtol=1e-3, atol=1e-4), name


RUNS = """
    import os, sys
    from pathlib import Path
    from compgen_fast.generate.config import DiTConfig, GIVTConfig, MARConfig, TrunkConfig
    from compgen_fast.train import folder
    from compgen_fast.train.config import DataConfig, OptimiserConfig, TrainConfig
    from compgen_fast.train.launch import placed
    from compgen_fast.train.loop import Trainer
    from compgen_fast.train.ranks import joined
    from compgen_fast.train.run import refuse_impossible, write_report

    place = Path(sys.argv[1])
    shared = dict(trunk=TrunkConfig(16, 2, 2), image_size=16, channels=3)
    world = DataConfig(
        world="shapes2d", options=("continuous=true",), size=64, validation_size=16, workers=0, cache=place / "data",
        tokenizer=place / "vae",
    )
    placed(os.environ).export()
    with joined("cpu") as ranks:
        for name, model in (
            ("mar", MARConfig(**shared, head_width=16)),
            ("givt", GIVTConfig(**shared)),
            ("causal", GIVTConfig(**shared, order="causal")),
            ("dit", DiTConfig(**shared)),
            ("direct", DiTConfig(**shared)),
        ):
            data = world
            if name == "direct":
                train, validation = (
                    str(next((place / "data").glob(f"*{part}*latents*"))) for part in ("train64", "validation16")
                )
                data = DataConfig(shards=train, validation=validation, workers=0)
            config = TrainConfig(
                model=model, data=data, optimiser=OptimiserConfig(lr=1e-2, warmup=1, decay="constant", ema=0.5),
                steps=40, batch_size=16, log_every=1, out=place / name,
            )
            refuse_impossible(config, 1)
            folder.claim(config, False, ranks)
            with Trainer(config, ranks, quiet=True) as trainer:
                trainer.train()
                write_report(trainer)
"""


@pytest.fixture(scope="module")
def trained(place: Path) -> Path:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(RUNS), str(place)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return place


@pytest.mark.parametrize("name", ["dit", "mar", "givt", "causal"])
def test_each_objective_learns_and_its_exported_weights_make_images(trained: Path, name: str) -> None:
    rows = lines(trained / name)
    assert len(rows) == 40 and rows[39]["validation_loss"] < rows[0]["loss"]
    model, tokenizer = load_model(trained / name / "weights"), load_model(trained / "vae")
    assert isinstance(model, Generator) and isinstance(tokenizer, Tokenizer)
    factors = {factor.name: torch.full((3,), factor.low) for factor in model.factors}
    drawn = [model.sample(factors, draws=Draws.at(0, 0)) for _ in range(2)]
    assert torch.equal(drawn[0], drawn[1])
    assert tokenizer.paint(drawn[0]).shape == (3, 16, 16, 3)
    assert (trained / name / PAGE).exists()


def test_tokens_given_directly_train_the_same_without_a_tokenizer(trained: Path) -> None:
    assert losses(trained / "direct") == losses(trained / "dit")
    assert (trained / "direct" / PAGE).exists()
