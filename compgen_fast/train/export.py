"""Trained weights as a folder of their own: what is needed to use a model, and nothing of the run that made it.

    weights/weights.safetensors    parameters and buffers
            config.json            the model's settings, and the factors of its data set

`load_model` builds the model from the folder alone. The exception is an encoder that began as a file of ViT weights:
its sizes are read off that file, which must still be where the settings say.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor, nn

from compgen_fast.models.build import build
from compgen_fast.models.config import ModelConfig, SlotVAEConfig
from compgen_fast.models.replay import Replay
from compgen_fast.train.checkpoints import save_tensors, whole_folder
from compgen_fast.train.settings import from_json, to_json
from compgen_fast.train.state import copied
from compgen_fast.worlds.source import Factor

WEIGHTS, CONFIG = "weights.safetensors", "config.json"
VERSION = 1


@dataclass(frozen=True)
class Exported:
    """The settings in an exported folder."""

    version: int
    model: ModelConfig
    factors: tuple[Factor, ...]


def export(
    model_state: Mapping[str, Tensor], config: ModelConfig, folder: Path, factors: Sequence[Factor] = ()
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
    with whole_folder(folder) as filling:
        save_tensors(weights, filling / WEIGHTS)
        (filling / CONFIG).write_text(to_json(Exported(VERSION, config, tuple(factors))))


def load_model(folder: Path) -> nn.Module:
    """The model of an exported folder, on the CPU, set to evaluation."""
    settings = read_settings(folder)
    model = build(settings.model, settings.factors)
    model.load_state_dict(_weights(model, folder, f"in the model of {CONFIG}; expected the two files of one export"))
    return model.eval()


def begin_with(model: nn.Module, folder: Path) -> None:
    """Gives a model the weights of an exported one like it; a model in replay takes those of a slot VAE too."""
    of_vae = isinstance(read_settings(folder).model, SlotVAEConfig)
    advice = "in the model that is to begin with it; expected weights of a model with the same parts and sizes"
    if isinstance(model, Replay) and of_vae:
        model.begin_with(_weights(model.vae, folder, advice))
    else:
        model.load_state_dict(_weights(model, folder, advice))


def _weights(model: nn.Module, folder: Path, advice: str) -> dict[str, Tensor]:
    """The weights of an exported folder, if they are those of a model like this."""
    weights = load_file(folder / WEIGHTS)
    expected = {name: tensor.shape for name, tensor in model.state_dict().items()}
    for name in [*expected, *(name for name in weights if name not in expected)]:
        there, here = weights[name].shape if name in weights else None, expected.get(name)
        if there != here:
            raise ValueError(f"{folder / WEIGHTS}: {name} is {_shape(there)} there and {_shape(here)} {advice}")
    return weights


def read_settings(folder: Path) -> Exported:
    """The settings of an exported folder."""
    path = folder / CONFIG
    if not path.is_file() or not (folder / WEIGHTS).is_file():
        raise ValueError(f"{folder} does not hold {CONFIG} and {WEIGHTS}; expected a folder of exported weights")
    settings = from_json(Exported, path.read_text(), str(path))
    if settings.version != VERSION:
        raise ValueError(f"{path} has version {settings.version}; this program reads version {VERSION}")
    return settings


def _shape(shape: Sequence[int] | None) -> str:
    return "missing" if shape is None else str(list(shape))
