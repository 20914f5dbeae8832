"""Averaged weights: an exponential moving average of what is trained, which is smoother than the last weights.

The average lives on every rank, in fp32, beside the model. Buffers and frozen parameters are not averaged.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

WEIGHTS, UPDATES = "weights.", "updates"


class Ema:
    """The moving average of a model's trainable parameters, which starts as a copy of them.

    Update t = 0, 1, … keeps the share d_t = min(decay, (1 + t) / (10 + t)) of the average. So the first weights, which
    are random, are forgotten quickly, and the average needs no correction of its start.

    Args:
        model: whose parameters; all of them fp32.
        decay: from 0 (the average is the last weights) to below 1.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"Ema: decay is {decay}; expected 0 to below 1")
        self.decay, self.updates = decay, 0
        self._weights = {name: parameter.detach().clone() for name, parameter in _trained(model).items()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Moves the average towards the model's weights; call it after each optimiser step."""
        keep = min(self.decay, (1 + self.updates) / (10 + self.updates))
        trained = self._parameters(model)
        torch._foreach_lerp_([self._weights[name] for name in trained], [*trained.values()], 1 - keep)
        self.updates += 1

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """Within the block the model has the averaged weights. They are for looking and exporting, not for
        training or checkpoints.

        The tensors themselves change places, so what comes back afterwards is what was there, also where DeepSpeed
        has laid the weights end to end in one buffer.
        """
        trained = self._parameters(model)
        own = {name: parameter.data for name, parameter in trained.items()}
        try:
            for name, parameter in trained.items():
                parameter.data = self._weights[name]
            yield
        finally:
            for name, parameter in trained.items():
                parameter.data = own[name]

    def state_dict(self) -> dict[str, Tensor]:
        """Everything as named tensors; the average itself, not a copy."""
        weights = {WEIGHTS + name: weight for name, weight in self._weights.items()}
        return {**weights, UPDATES: torch.tensor(self.updates)}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        expected = {name: tensor.shape for name, tensor in self.state_dict().items()}
        for name in [*expected, *(name for name in state if name not in expected)]:
            there, here = state[name].shape if name in state else None, expected.get(name)
            if there != here:
                raise ValueError(
                    f"Ema: {name} is {_shape(there)} in the state and {_shape(here)} in the model; expected the "
                    "averaged weights of the same model"
                )
        for name, weight in self._weights.items():
            weight.copy_(state[WEIGHTS + name])
        self.updates = int(state[UPDATES])

    def _parameters(self, model: nn.Module) -> dict[str, nn.Parameter]:
        trained = _trained(model)
        if trained.keys() != self._weights.keys():
            odd = sorted(trained.keys() ^ self._weights.keys())[0]
            raise ValueError(
                f"Ema: {odd} is trained in only one of this model and the averaged one; give the same model"
            )
        return trained


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    for name, parameter in trained.items():
        if parameter.dtype != torch.float32:
            raise ValueError(f"Ema: {name} is {parameter.dtype}; expected float32, which trained parameters stay in")
    return trained


def _shape(shape: torch.Size | None) -> str:
    return "missing" if shape is None else str(list(shape))
