"""Guards: who made the first number that is not finite, when a loss counts as jumping, whether the disk has room."""

import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from compgen_fast.jets import interaction_penalty
from compgen_fast.train.guards import NotFinite, Spike, first_bad_layer, not_finite


class Poison(nn.Module):
    """Identity, but for what its backward makes of a finite gradient: d√(x − x)/dx is infinite at 0, times 0 is nan."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0 * (x - x.detach()).abs().sqrt()


class Model(nn.Module):
    """Two linears with something between them, and a loss of two terms."""

    def __init__(self, between: nn.Module) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 4)
        self.between = between
        self.decoder = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.decoder(self.between(self.encoder(x)))
        recon, size = y.square().mean(), y.abs().mean()
        return {"loss": recon + size, "recon": recon, "size": size}


class Raising(nn.Module):
    """Makes numbers that are not finite of finite ones."""

    def forward(self, x: Tensor) -> Tensor:
        return x / torch.zeros_like(x)


def bad_layer(model: nn.Module, x: Tensor) -> str | None:
    return first_bad_layer(model, lambda: model(x))


def test_a_healthy_step_has_no_bad_layer() -> None:
    model = Model(nn.GELU())
    assert bad_layer(model, torch.randn(3, 4)) is None
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_layer_whose_output_is_not_finite_is_named_not_those_after_it() -> None:
    assert bad_layer(Model(nn.Sequential(nn.GELU(), Raising())), torch.randn(3, 4)) == (
        "the output of between.1 (Raising)"
    )


def test_the_layer_whose_backward_makes_the_gradient_bad_is_named_with_the_operation() -> None:
    found = bad_layer(Model(Poison()), torch.randn(3, 4))
    assert found == "the backward of between (SqrtBackward0)"


def test_a_bad_backward_is_found_behind_checkpointing() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Poison()

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = checkpoint(self.inner, x, use_reentrant=False)
            return result

    assert bad_layer(Model(Checkpointed()), torch.randn(3, 4)) == "the backward of between.inner (SqrtBackward0)"


def test_a_bad_operation_between_modules_is_laid_at_the_door_of_the_module_that_runs_it() -> None:
    class Between(Model):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"loss": self.decoder(self.encoder(x).log() * 0).mean()}

    found = bad_layer(Between(nn.Identity()), -torch.ones(3, 4))
    assert found == "the forward of the model itself, before it calls decoder"


def test_a_parameter_that_was_bad_before_the_step_is_named() -> None:
    model = Model(nn.GELU())
    with torch.no_grad():
        model.decoder.bias[1] = torch.nan
    assert bad_layer(model, torch.randn(3, 4)) == "parameter decoder.bias, already before this step"


def test_a_bad_sample_is_not_blamed_on_a_layer() -> None:
    assert bad_layer(Model(nn.GELU()), torch.full((3, 4), torch.inf)) == "the batch itself"


def test_the_batch_is_searched_in_named_tuples_and_dictionaries() -> None:
    class Pair(NamedTuple):
        name: str
        values: dict[str, Tensor]

    class Takes(nn.Module):
        def forward(self, pair: Pair) -> dict[str, Tensor]:
            return {"loss": pair.values["a"].sum()}

    bad = Pair("factors", {"a": torch.tensor([1.0, torch.nan], requires_grad=True)})
    model = Takes()
    assert first_bad_layer(model, lambda: model(bad)) == "the batch itself"


def test_jets_that_pass_through_modules_are_looked_at() -> None:
    class Penalised(nn.Module):
        def __init__(self, decoder: nn.Module) -> None:
            super().__init__()
            self.decoder = decoder

        def forward(self, z: Tensor) -> dict[str, Tensor]:
            return {"loss": interaction_penalty(self.decoder, z)}

    class Decoder(nn.Module):
        def __init__(self, bad: bool) -> None:
            super().__init__()
            self.mix, self.bad = nn.Linear(6, 5), bad

        def forward(self, z: Tensor) -> Tensor:
            hidden = self.mix(z.flatten(1)).tanh()
            return hidden * torch.full((5,), torch.inf) if self.bad else hidden

    z = torch.randn(2, 3, 2)
    assert bad_layer(Penalised(Decoder(bad=False)), z) is None
    assert bad_layer(Penalised(Decoder(bad=True)), z) == "the output of decoder (Decoder)"


def test_a_compiled_model_is_searched_layer_by_layer() -> None:
    model = Model(Poison())
    model.forward = torch.compile(model.forward)  # type: ignore[method-assign]
    assert bad_layer(model, torch.randn(3, 4)) == "the backward of between (SqrtBackward0)"


def test_neither_gradients_nor_the_hooks_on_them_are_touched() -> None:
    model = Model(Poison())
    fired: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))
    before = torch.ones_like(model.encoder.weight)
    model.encoder.weight.grad = before.clone()
    assert bad_layer(model, torch.randn(3, 4)) is not None
    assert not fired and torch.equal(model.encoder.weight.grad, before)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_the_error_says_step_term_layer_rank_and_checkpoint() -> None:
    what = not_finite({"loss": 1.0, "loss term 'recon'": math.nan})
    assert what == "loss term 'recon' is nan"
    error = str(NotFinite(120, what, [None, "the output of decoder (Linear)"], Path("out/checkpoints/step_00000100")))
    for part in ("step 120", "'recon' is nan", "decoder (Linear) (rank 1)", "step_00000100", "was not taken"):
        assert part in error


def test_the_error_does_not_make_up_a_layer_or_a_checkpoint() -> None:
    error = str(NotFinite(3, "the gradient's norm is inf", [None, None], None))
    assert "not seen again" in error and "there is no checkpoint yet" in error


def test_finite_numbers_need_no_words() -> None:
    assert not_finite({"a": 1.0, "b": -2.0}) is None


def losses(count: int) -> list[float]:
    return (1 + 0.05 * np.random.default_rng(0).standard_normal(count)).tolist()


def warnings_of(spike: Spike, values: list[float]) -> list[int]:
    return [step for step, value in enumerate(values) if spike.see(step, value, ["a"]) is not None]


def test_a_noisy_loss_is_no_spike() -> None:
    assert warnings_of(Spike(window=50, factor=10.0), losses(1000)) == []


def test_a_spike_is_told_once_until_the_loss_is_back() -> None:
    values = losses(200)
    values[100:103] = [5.0, 6.0, 5.0]
    values[150] = 4.0
    assert warnings_of(Spike(window=50, factor=10.0), values) == [100, 150]


def test_nothing_is_told_before_the_window_is_full() -> None:
    values = losses(60)
    values[10] = values[49] = 100.0
    assert warnings_of(Spike(window=50, factor=10.0), values) == []


def test_a_constant_loss_may_rise_a_little() -> None:
    assert warnings_of(Spike(window=10, factor=10.0), [1.0] * 20 + [1.05] + [1.0] * 5 + [1.2]) == [26]


def test_a_loss_that_is_not_finite_is_another_guards_business() -> None:
    spike = Spike(window=10, factor=5.0)
    assert warnings_of(spike, [1.0] * 10 + [math.nan, math.inf]) == []
    assert warnings_of(spike, [9.0]) == [0]


def test_the_warning_names_step_value_and_samples() -> None:
    spike = Spike(window=10, factor=5.0)
    warnings_of(spike, losses(10))
    warning = spike.see(77, 42.5, [f"sample{i}" for i in range(20)])
    assert warning is not None
    for part in ("step 77", "42.5", "sample0", "12 more"):
        assert part in warning


def test_a_resumed_spike_goes_on_where_it_was() -> None:
    values = losses(120)
    values[80:100] = [5.0] * 20
    whole, first, second = (Spike(window=50, factor=10.0) for _ in range(3))
    expected = warnings_of(whole, values)
    found = warnings_of(first, values[:90])
    second.load_state_dict(first.state_dict())
    assert expected == [80] == found + [90 + step for step in warnings_of(second, values[90:])]


def test_a_window_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="window is 0"):
        Spike(window=0)
