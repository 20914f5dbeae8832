"""JEPA: the target is an average, sees everything and has no gradient."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from compgen_fast.draws import Draws
from compgen_fast.generate.config import JepaConfig
from tests.generate.cases import JEPA, WITH_JEPA, generator, labels, latents

every_kind = pytest.mark.parametrize("kind", WITH_JEPA)


def total(x: Tensor) -> Tensor:
    return x


def moved(model: Any) -> None:
    with torch.no_grad():
        for parameter in (*model.embedding.parameters(), *model.trunk.parameters()):
            parameter.add_(torch.randn_like(parameter))


@every_kind
def test_the_loss_is_the_objectives_plus_the_weighted_sum_over_layers(kind: str) -> None:
    model = generator(kind, jepa=JEPA)
    found = model(latents(kind), labels(), draws=Draws.at(0, 0))
    torch.testing.assert_close(found["jepa"], found["jepa/1"] + found["jepa/3"])
    torch.testing.assert_close(found["loss"], found[model.measure] + JEPA.weight * found["jepa"])


@every_kind
def test_the_objectives_own_loss_does_not_change(kind: str) -> None:
    x, y = latents(kind), labels()
    model = generator(kind, jepa=JEPA)
    plain = model(x, y, draws=Draws.at(0, 0))[model.measure]
    model.jepa = None
    torch.testing.assert_close(model(x, y, draws=Draws.at(0, 0))["loss"], plain)


@every_kind
def test_the_target_has_no_gradient_and_all_else_has(kind: str) -> None:
    model = generator(kind, jepa=JEPA)
    model(latents(kind), labels(), draws=Draws.at(0, 0))["loss"].backward()
    for name, parameter in model.named_parameters():
        is_target = name.startswith("jepa.target")
        assert parameter.requires_grad != is_target and (parameter.grad is None) == is_target, name


def test_the_target_follows_the_weights_at_the_rate_of_the_step() -> None:
    model = generator("maskgit", jepa=JepaConfig(layers=(1,), rate=0.5, rate_steps=2))
    average = [p.clone() for p in (*model.embedding.parameters(), *model.trunk.parameters())]
    model.jepa.target_embedding.load_state_dict(model.embedding.state_dict())
    model.jepa.target_trunk.load_state_dict(model.trunk.state_dict())
    for rate in (0.5, 0.75, 1.0, 1.0):
        moved(model)
        online = [*model.embedding.parameters(), *model.trunk.parameters()]
        average = [rate * old + (1 - rate) * new for old, new in zip(average, online, strict=True)]
        model.end_step(total)
        targets = [*model.jepa.target_embedding.parameters(), *model.jepa.target_trunk.parameters()]
        for target, expected in zip(targets, average, strict=True):
            torch.testing.assert_close(target, expected)


def test_a_forward_does_not_move_the_target() -> None:
    model = generator("maskgit", jepa=JEPA)
    before = {name: value.clone() for name, value in model.jepa.state_dict().items()}
    model(latents("maskgit"), labels(), draws=Draws.at(0, 0))
    for name, value in model.jepa.state_dict().items():
        assert torch.equal(value, before[name])


def test_a_checkpoint_holds_the_target_and_how_far_it_is() -> None:
    model, other = (generator("mar", jepa=JEPA) for _ in range(2))
    for _ in range(3):
        model.end_step(total)
    other.load_state_dict(model.state_dict())
    for each in (model, other):
        torch.manual_seed(1)
        moved(each)
        each.end_step(total)
    for found, expected in zip(other.jepa.parameters(), model.jepa.parameters(), strict=True):
        assert torch.equal(found, expected)


@every_kind
def test_targets_are_normed_states_of_the_whole_latents(kind: str) -> None:
    model, x = generator(kind, jepa=JEPA), latents(kind)
    model.jepa.target_embedding.load_state_dict(model.embedding.state_dict())
    model.jepa.target_trunk.load_state_dict(model.trunk.state_dict())
    condition = model.whole(model.conditioning(labels()))
    kept = model.trunk(model.embedding(x), condition, keep=(1, 3)).kept
    for layer, target in model.jepa.target(x, condition).items():
        torch.testing.assert_close(target, F.layer_norm(kept[layer], (16,), eps=1e-6))


def test_only_hidden_tokens_count() -> None:
    model, x, y = generator("maskgit", jepa=JEPA).eval(), latents("maskgit"), labels()
    found = model(x, y, draws=Draws.at(0, 1))
    condition = model.conditioning(y)
    seen = model.corrupt(x, condition, Draws.at(0, 1))
    states = model.trunk(seen.tokens, condition, keep=(3,)).kept[3]
    places = torch.arange(9).expand(4, 9)
    predicted = model.jepa.predictors["3"](states, places, condition.unsqueeze(1).expand(-1, 9, -1))
    error = (predicted - model.jepa.target(x, condition)[3]).square().mean(-1)[seen.hidden].mean()
    torch.testing.assert_close(found["jepa/3"] / found["scored"], error)


def test_impossible_layers_and_orders_are_refused() -> None:
    with pytest.raises(ValueError, match=r"jepa.layers is \(2, 4\); expected layers from 1 to 3"):
        generator("mar", jepa=JepaConfig(layers=(2, 4)))
    with pytest.raises(ValueError, match="at least one"):
        generator("mar", jepa=JepaConfig(layers=()))
    with pytest.raises(ValueError, match="order is 'causal'"):
        generator("causal givt", jepa=JEPA)
