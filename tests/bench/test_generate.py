"""The suite `generate` at tiny sizes: the straightforward step is the same step, and whole steps take turns."""

import math
from dataclasses import replace

import pytest
import torch

from compgen_fast.bench import generate
from compgen_fast.bench.generate_peers import Ours, PlainGenerator, SameDraws, StepSize, case
from compgen_fast.bench.generate_training import Found
from compgen_fast.bench.harness import FEWEST_ROUNDS, measure
from compgen_fast.generate.config import DiTConfig, JepaConfig, ObjectiveConfig, TrunkConfig
from compgen_fast.ops import trunk_block
from tests.bench.fakes import STAMP

DIT, MASKGIT_JEPA = generate.OBJECTIVES[0][1], generate.OBJECTIVES[2][1]
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


def test_a_case_passes_the_gate_and_is_timed_against_all_peers() -> None:
    rows = measure(case(tiny(generate.OBJECTIVES[1][1]), "cpu"), 0.0, STAMP)
    assert {row.peer for row in rows} == {"eager", "eager, encoding", "SDPA"}
    assert all(row.ratio is not None and row.gate is None for row in rows)


def test_the_peer_with_plain_layers_leaves_ours_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    size, asked = tiny(DIT), []
    monkeypatch.setattr(trunk_block, "FUSED", True)
    monkeypatch.setattr(trunk_block, "_is_fused", lambda *_: asked.append(trunk_block.FUSED))
    draws, latents = SameDraws.at(0, 0), torch.randn(size.batch, size.config.side**2, DiTConfig().channels)
    for of in (PlainGenerator, Ours):
        of(size.build())(latents, size.factors(), draws)
    layers = size.config.trunk.layers
    assert asked == [False] * layers + [True] * layers


def test_whole_steps_are_timed_in_turns_after_their_losses_agree() -> None:
    """One process serves both sizes: DeepSpeed's engine starts twice in it."""
    sizes = [replace(tiny(config), batch=64) for config in (DIT, MASKGIT_JEPA)]
    rows = generate.measure_training(sizes, 0.0, STAMP)
    assert [(row.case, row.peer) for row in rows] == [
        (f"training, {size}", peer) for size in sizes for peer in ("eager", "eager, encoding")
    ]
    for row in rows:
        assert row.gate is None
        assert row.error is not None and row.error < generate.MOST_ERROR
        timed = row.unsupported is None
        assert (row.ratio is not None) == timed and row.rounds == (FEWEST_ROUNDS if timed else 0)


def test_a_wrong_loss_closes_the_gate() -> None:
    ms = {"ours": (1.0, 1.0), "eager": (2.0, 4.0)}
    right, wrong = (Found(ms, {"ours": error, "eager": 0.0}, {}) for error in (1e-7, 1e-3))
    (shown,) = generate.training_rows(tiny(DIT), right, STAMP)
    assert (shown.ratio, shown.our_ms, shown.peer_ms, shown.gate) == (3.0, 1.0, 3.0, None)
    (hidden,) = generate.training_rows(tiny(DIT), wrong, STAMP)
    assert hidden.gate == "gate: the first loss of ours is 1e-03 off the fp64 one"
    assert hidden.ratio is None and hidden.our_ms is None and hidden.peer_ms is None


def test_a_loss_that_is_not_a_number_closes_the_gate() -> None:
    (row,) = generate.training_rows(tiny(DIT), Found({"ours": (1.0,), "eager": (1.0,)}, {"ours": math.nan}, {}), STAMP)
    assert row.gate is not None


def test_a_peer_that_is_not_installed_has_a_row_that_says_so() -> None:
    found = Found({"ours": (1.0,), "eager": (1.0,)}, {"ours": 0.0, "eager": 0.0}, {"eager, encoding": "not there"})
    rows = generate.training_rows(tiny(DIT), found, STAMP)
    assert [(row.peer, row.ratio, row.unsupported) for row in rows] == [
        ("eager", 1.0, None),
        ("eager, encoding", None, "not there"),
    ]
    assert len(generate.training_table(rows).rows) == 2
