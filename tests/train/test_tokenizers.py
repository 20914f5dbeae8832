"""Tokenizers by `cgf train`: what they keep without gradients survives a resume and does not depend on ranks."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from compgen_fast.generate.latents import fingerprint
from compgen_fast.models.io import load_model
from compgen_fast.models.tokenizer import Tokenizer
from tests.train.runs import finish, losses, start_recipe

SETTINGS = """
    --model.image-size 16 --model.patch 4 --model.width 8 --model.channels 3 --data.size 64 --data.validation-size 16
    --batch-size 8 --log-every 1 --optimiser.warmup 2 --optimiser.decay constant
    --model.codes 12 --model.revive-after 2
"""
KEPT = {"codebook", "counts", "sums", "idle", "latent_mean", "latent_deviation"}


def run(out: Path, *settings: str, steps: int = 6) -> str:
    places = ("--out", str(out), "--data.cache", str(out.parent / "data"), "--steps", str(steps))
    return finish(start_recipe("vq_tokenizer_cpu", *SETTINGS.split(), *places, *settings))


def state(out: Path) -> dict[str, Tensor]:
    """The model's, in the run's newest checkpoint: as trained, not averaged."""
    newest = sorted((out / "checkpoints").glob("step_*"))[-1]
    tensors, prefix = load_file(newest / "state.safetensors"), "state.module."
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "straight"
    run(out)
    return out


def test_a_codebook_resumes_bit_for_bit(straight: Path) -> None:
    out = straight.parent / "resumed"
    run(out, steps=3)
    run(out, "--resume")
    assert losses(out) == losses(straight) and len(losses(out)) == 6
    found, wanted = state(out), state(straight)
    assert KEPT <= wanted.keys() == found.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    models = [load_model(folder / "weights") for folder in (out, straight)]
    assert all(isinstance(model, Tokenizer) for model in models)
    assert fingerprint(models[0]) == fingerprint(models[1])  # type: ignore[arg-type]


def test_two_ranks_with_accumulation_keep_the_codebook_of_one_process(straight: Path) -> None:
    out = straight.parent / "two"
    printed = run(out, "--nproc", "2", "--accumulation", "2")
    assert "audit: 2 ranks agree" in printed
    assert losses(out) == pytest.approx(losses(straight), rel=1e-3)
    found, wanted = state(out), state(straight)
    assert KEPT <= wanted.keys() == found.keys()
    for name in wanted:
        assert torch.allclose(found[name].float(), wanted[name].float(), rtol=1e-3, atol=1e-4), name
