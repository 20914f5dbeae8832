"""The engine's state, in and out of engines: bit for bit, whatever the stage of ZeRO and the number of ranks.

DeepSpeed's engines run in processes of their own (engines.py), once for all tests here, and leave their states behind.
"""

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from compgen_fast.train.state import collect, random_state, restore, restore_random
from tests.train.engines import CROSSINGS, STAGES, StandIn, draw, launch, same_bits

SIZES = (1, 2)
CPU = torch.device("cpu")


class States:
    """What the engines left, by the number of ranks that made it and by name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, size: int, name: str) -> dict[str, Tensor]:
        return load_file(self.folder / str(size) / f"{name}.safetensors")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> States:
    """Runs on one rank and on two; then the checkpoints of each go to the other."""
    states = States(tmp_path_factory.mktemp("engines"))
    one, two = (states.folder / str(size) for size in SIZES)
    for folder in (one, two):
        folder.mkdir()
    launch(1, ("make", one))
    launch(2, ("make", two), ("cross", one))
    launch(1, ("cross", two))
    return states


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("stage", STAGES)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(made: States, stage: int, size: int) -> None:
    assert same_bits(made(size, f"resumed_{stage}"), made(size, f"straight_{stage}"))
    assert not same_bits(made(size, f"at_4_{stage}"), made(size, f"straight_{stage}"))


@pytest.mark.parametrize("size", SIZES)
def test_a_state_holds_what_was_trained_frozen_and_counted(made: States, size: int) -> None:
    for stage in STAGES:
        state = made(size, f"straight_{stage}")
        assert state["module.first.weight"].shape == (5, 3) and state["exp_avg.second.weight"].shape == (7, 5)
        assert state["exp_avg_sq.second.weight"].gt(0).all()
        assert state["module.calls"] == 6 and "exp_avg.frozen" not in state
        assert all(count == 6 for name, count in state.items() if name.startswith("step."))
        assert (int(state["engine.global_steps"]), int(state["engine.global_samples"])) == (6, 48)


@pytest.mark.parametrize("size", SIZES)
def test_a_negative_zero_stays_negative(made: States, size: int) -> None:
    for stage in STAGES:
        idle = made(size, f"straight_{stage}")["module.idle"]
        assert (idle == 0).all() and idle.signbit().all()


@pytest.mark.parametrize("size", SIZES)
def test_stages_agree_on_what_training_does(made: States, size: int) -> None:
    for stage in (1, 2):
        close(made(size, f"straight_{stage}"), made(size, "straight_0"))


@pytest.mark.parametrize("size", SIZES)
def test_a_state_from_before_the_first_step_starts_over(made: States, size: int) -> None:
    assert made(size, "before")["exp_avg.first.weight"].eq(0).all() and made(size, "before")["step.first.weight"] == 0
    for stage in STAGES:
        assert same_bits(made(size, f"again_{stage}"), made(size, f"straight_{stage}"))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("saved", "stage"), CROSSINGS)
def test_another_number_of_ranks_and_another_stage_take_it_over(
    made: States, size: int, saved: int, stage: int
) -> None:
    where = f"on_{3 - size}"
    assert same_bits(made(size, f"{where}/loaded_{saved}_{stage}"), made(size, f"at_3_{saved}"))
    close(made(size, f"{where}/next_{saved}_{stage}"), made(size, f"at_4_{saved}"))


def close(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    """Sums over ranks and over the tail of a vector are taken in another order: a few units in the last place."""
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=2e-6, atol=2e-7)


@pytest.fixture
def state() -> dict[str, Tensor]:
    engine = StandIn.fresh()
    engine.train(3)
    return collect(engine)


def test_collecting_copies(state: dict[str, Tensor]) -> None:
    engine = StandIn.fresh(seed=1)
    restore(engine, state)
    before = collect(engine)
    engine.train(1)
    assert same_bits(before, state) and not same_bits(collect(engine), state)


def test_weights_in_another_memory_layout_keep_their_values() -> None:
    engine = StandIn.fresh()
    engine.module.second.weight.data = engine.module.second.weight.data.t().contiguous().t()
    engine.train(2)
    state = collect(engine)
    assert torch.equal(state["module.second.weight"], engine.module.second.weight)
    restore(engine, state)
    assert same_bits(collect(engine), state)


def missing(state: dict[str, Tensor]) -> None:
    del state["module.second.bias"]


def unknown(state: dict[str, Tensor]) -> None:
    state["module.third.bias"] = torch.zeros(2)


def untrained(state: dict[str, Tensor]) -> None:
    del state["exp_avg.second.bias"]


def reshaped(state: dict[str, Tensor]) -> None:
    state["exp_avg.second.bias"] = torch.zeros(8)


def halved(state: dict[str, Tensor]) -> None:
    state["module.second.bias"] = state["module.second.bias"].bfloat16()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (missing, "the model has second.bias and the state has not"),
        (unknown, "the state has third.bias and the model has not"),
        (untrained, "the model has AdamW's exp_avg of second.bias and the state has not"),
        (reshaped, r"second.bias is \[8\] torch.float32 in the state and \[7\]"),
        (halved, r"second.bias is \[7\] torch.bfloat16 in the state"),
    ],
)
def test_another_models_state_is_refused_before_anything_changes(
    state: dict[str, Tensor], change: Callable[[dict[str, Tensor]], None], sentence: str
) -> None:
    change(state)
    engine = StandIn.fresh(seed=1)
    engine.train(1)
    before = collect(engine)
    with pytest.raises(ValueError, match=sentence):
        restore(engine, state)
    assert same_bits(collect(engine), before)


class Spread(StandIn):
    """Looks like ZeRO on one rank: one flat tensor per parameter group."""

    def zero_optimization_stage(self) -> int:
        return 1


def spread() -> Spread:
    engine = Spread.fresh()
    optimizer = engine.optimizer
    optimizer.bit16_groups = [group["params"] for group in optimizer.param_groups]
    flats = [torch.cat([p.detach().flatten() for p in params]) for params in optimizer.bit16_groups]
    optimizer.bit16_groups_flat = optimizer.single_partition_of_fp32_groups = flats
    for flat, params in zip(flats, optimizer.bit16_groups, strict=True):
        for parameter, part in zip(params, flat.split([p.numel() for p in params]), strict=True):
            parameter.data = part.view(parameter.shape)
    return engine


def test_unequal_step_counts_do_not_go_into_one_count(state: dict[str, Tensor]) -> None:
    state["step.second.weight"] = torch.tensor(1)
    engine = spread()
    before = engine.module.first.weight.clone()
    with pytest.raises(ValueError, match=r"stepped second.weight 1 times and first.weight 3 times"):
        restore(engine, state)
    assert torch.equal(before, engine.module.first.weight)


def test_a_parameter_that_was_never_stepped_keeps_its_own_count() -> None:
    engine = StandIn.fresh()
    engine.train(2)
    del engine.optimizer.state[engine.module.idle]
    state = collect(engine)
    assert state["step.idle"] == 0 and state["step.first.bias"] == 2
    resumed = StandIn.fresh(seed=1)
    restore(resumed, state)
    assert same_bits(collect(resumed), state)


def test_an_unfinished_step_is_not_collected() -> None:
    engine = StandIn.fresh()
    engine.gradient_accumulation_steps = lambda: 2
    engine.train(1)
    with pytest.raises(ValueError, match="between steps"):
        collect(engine)


def test_an_optimiser_with_more_state_than_adamw_is_refused() -> None:
    engine = StandIn.fresh()
    for group in engine.optimizer.param_groups:
        group["amsgrad"] = True
    engine.train(1)
    with pytest.raises(ValueError, match="max_exp_avg_sq; expected AdamW without amsgrad"):
        collect(engine)


def test_the_generators_go_on_where_they_were() -> None:
    random.gauss(0, 1)  # leaves a second number behind, which is part of the state
    np.random.randn()
    state = random_state(CPU)
    drawn = [draw(), random.gauss(0, 1), np.random.randn()]
    restore_random([state], 0, CPU)
    assert [draw(), random.gauss(0, 1), np.random.randn()] == drawn


def test_a_new_rank_draws_its_own_numbers_and_always_the_same() -> None:
    states = [random_state(CPU)]
    drawn = []
    for rank in (0, 1, 2, 1):
        restore_random(states, rank, CPU)
        drawn.append(tuple(draw()))
    assert len(set(drawn)) == 3 and drawn[1] == drawn[3]
