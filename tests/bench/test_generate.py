"""The suite `generate` at tiny sizes: the straightforward step is the same step."""

from dataclasses import replace

import pytest
import torch

from compgen_fast.bench import generate
from compgen_fast.bench.generate_peers import StepSize, case
from compgen_fast.bench.harness import measure
from compgen_fast.generate.config import JepaConfig, ObjectiveConfig, TrunkConfig
from tests.bench.fakes import STAMP

NAMES = [f"{name}{' with JEPA' if config.jepa else ''}" for name, config in generate.OBJECTIVES]


def tiny(config: ObjectiveConfig) -> StepSize:
    jepa = JepaConfig(layers=(1, 2)) if config.jepa else None
    return StepSize("tiny", replace(config, side=3, trunk=TrunkConfig(16, 2, 2), jepa=jepa), batch=32)


@pytest.mark.parametrize("config", [config for _, config in generate.OBJECTIVES], ids=NAMES)
def test_both_versions_have_the_same_loss_and_gradients(config: ObjectiveConfig) -> None:
    made = case(tiny(config), "cpu")
    inputs = [parameter.detach().double().requires_grad_() for parameter in made.inputs().values()]
    ours, theirs = (torch.autograd.grad(call(*inputs)[0], inputs) for call in (made.ours.call, made.oracle))
    torch.testing.assert_close(made.ours.call(*inputs), made.oracle(*inputs))
    for name, found, expected in zip(made.inputs(), ours, theirs, strict=True):
        assert expected.abs().max() > 0, name
        torch.testing.assert_close(found, expected, msg=lambda why, name=name: f"{name}: {why}")


def test_a_case_passes_the_gate_and_is_timed_against_both_peers() -> None:
    rows = measure(case(tiny(generate.OBJECTIVES[1][1]), "cpu"), 0.0, STAMP)
    assert {row.peer for row in rows} == {"eager", "eager, encoding"}
    assert all(row.ratio is not None and row.gate is None for row in rows)
