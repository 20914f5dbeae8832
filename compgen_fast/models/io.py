"""Trained weights as a folder of their own: what is needed to use a model, and nothing of the run that made it.

    weights/weights.safetensors    parameters and buffers
            config.json            the model's settings, and the factors of its data set

`load_model` builds the model from the folder alone. The exception is an encoder that began as a file of ViT weights:
its sizes are read off that file, which must still be where the settings say.
"""

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from compgen_fast.files import whole_folder
from compgen_fast.models.build import build
from compgen_fast.models.config import ModelConfig, ReplayConfig, SlotVAEConfig
from compgen_fast.models.replay import Replay
from compgen_fast.settings import changes, from_json, to_json
from compgen_fast.worlds.source import Factor

WEIGHTS, CONFIG = "weights.safetensors", "config.json"
VERSION = 1
TO_BEGIN_WITH = "in the model that is to begin with it; expected weights of a model with the same parts and sizes"
# What a slot VAE is trained by, and where it once began: its weights mean the same without.
OF_TRAINING = ("loss", "checkpoint_activations", "encoder.weights")


@dataclass(frozen=True)
class Exported:
    """The settings in an exported folder."""

    version: int
    model: ModelConfig
    factors: tuple[Factor, ...]


def export(
    model_state: Mapping[str, Tensor], config: ModelConfig, folder: str | Path, factors: Sequence[Factor] = ()
) -> None:
    """Writes a model's ``state_dict()`` and its settings; one process calls it. The folder appears, or is replaced,
    as a whole.

    Args:
        model_state: parameters and buffers by name.
        config: what the model was built from.
        folder: where to.
        factors: of the data set, which a supervised model is built from.
    """
    weights = {name: copied(tensor) for name, tensor in model_state.items()}
    with whole_folder(Path(folder)) as filling:
        save_tensors(weights, filling / WEIGHTS)
        (filling / CONFIG).write_text(to_json(Exported(VERSION, config, tuple(factors))))


def load_model(folder: str | Path) -> nn.Module:
    """The model of an exported folder, on the CPU, set to evaluation."""
    folder = Path(folder)
    settings = read_settings(folder)
    model = build(settings.model, settings.factors)
    model.load_state_dict(_weights(model, folder, f"in the model of {CONFIG}; expected the two files of one export"))
    return model.eval()


def begin_with(model: nn.Module, folder: str | Path) -> None:
    """Gives a model the weights of an exported one like it; a model in replay takes those of a slot VAE too."""
    folder = Path(folder)
    taker = _taker(model, read_settings(folder).model)
    weights = _weights(taker, folder, TO_BEGIN_WITH)
    if taker is model:
        model.load_state_dict(weights)
    else:
        assert isinstance(model, Replay)
        model.begin_with(weights)


def check_start(config: ModelConfig, folder: str | Path, factors: Sequence[Factor] = ()) -> None:
    """Refuses weights that a model of these settings cannot `begin_with`: not there, of another model, or of a slot VAE
    that does otherwise with weights of the same shapes. Reads no weights.
    """
    folder, prefix = Path(folder), "model"
    found, wanted = read_settings(folder).model, config
    if isinstance(config, ReplayConfig) and not isinstance(found, ReplayConfig):
        wanted, prefix = config.vae, "model.vae"
    if type(found) is not type(wanted):
        raise ValueError(f"{folder} holds a model of {type(found).__name__}; expected {type(wanted).__name__}")
    if isinstance(found, SlotVAEConfig):
        for name, there, here in changes(found, wanted, prefix):
            if not name.removeprefix(f"{prefix}.").startswith(OF_TRAINING):
                raise ValueError(
                    f"{folder} was trained with {name} {there!r}, and here it is {here!r}; give it as it was"
                )
    with torch.device("meta"):
        model = build(config, factors)
    _check_shapes(_taker(model, found), folder, TO_BEGIN_WITH)


def _taker(model: nn.Module, found: ModelConfig) -> nn.Module:
    """The part of a model that takes the weights of a model of these settings."""
    return model.vae if isinstance(model, Replay) and isinstance(found, SlotVAEConfig) else model


def _weights(model: nn.Module, folder: Path, advice: str) -> dict[str, Tensor]:
    """The weights of an exported folder, if they are those of a model like this."""
    _check_shapes(model, folder, advice)
    return load_file(folder / WEIGHTS)


def _check_shapes(model: nn.Module, folder: Path, advice: str) -> None:
    try:
        with safe_open(folder / WEIGHTS, "pt") as file:
            found = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 no mapping
    except SafetensorError as error:
        raise ValueError(f"{folder / WEIGHTS} is damaged ({error}); export it again, or copy it again") from None
    expected = {name: [*tensor.shape] for name, tensor in model.state_dict().items()}
    for name in [*expected, *(name for name in found if name not in expected)]:
        there, here = found.get(name, "missing"), expected.get(name, "missing")
        if there != here:
            raise ValueError(f"{folder / WEIGHTS}: {name} is {there} there and {here} {advice}")


def read_settings(folder: str | Path) -> Exported:
    """The settings of an exported folder."""
    folder = Path(folder)
    path = folder / CONFIG
    if not path.is_file() or not (folder / WEIGHTS).is_file():
        raise ValueError(f"{folder} does not hold {CONFIG} and {WEIGHTS}; expected a folder of exported weights")
    settings = from_json(Exported, path.read_text(), str(path))
    if settings.version != VERSION:
        raise ValueError(f"{path} has version {settings.version}; this program reads version {VERSION}")
    return settings


def copied(tensor: Tensor) -> Tensor:
    """On the CPU, in memory of its own, without gaps."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Contiguous CPU tensors to a safetensors file; what the disk objects to is an OSError."""
    try:
        save_file(dict(tensors), path)
    except SafetensorError as error:
        code = re.search(r"\(os error (\d+)\)", str(error))
        if code is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from error
    _open_to_readers(path)


def _open_to_readers(path: Path) -> None:
    """safetensors makes files that only their owner can read; gives them the rights that any new file has."""
    ordinary = path.with_name(f".{path.name}.rights")
    ordinary.touch()
    shutil.copymode(ordinary, path)
    ordinary.unlink()
