"""The harness with contenders of known behaviour. No test looks at a real clock."""

import gc
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from compgen_fast.bench.harness import (
    DIRECTIONS,
    FEWEST_ROUNDS,
    Contender,
    Outputs,
    Problem,
    Row,
    measure,
    sentence,
    time_rounds,
)
from tests.bench.fakes import STAMP, FakeClock, make_case, product


def rows_of(
    *peers: Contender, ours: Contender | None = None, budget: float = 0.0, clock: FakeClock | None = None
) -> list[Row]:
    case = make_case(ours or Contender("ours", product), *peers)
    return measure(case, budget, STAMP, clock)


def by_peer(rows: list[Row], direction: str = "full") -> dict[str, Row]:
    return {row.peer: row for row in rows if row.direction == direction}


def test_contenders_take_turns_in_every_round() -> None:
    clock = FakeClock()
    case = make_case(clock.contender("ours", 1.0), clock.contender("eager", 1.0), clock.contender("other", 1.0))
    problem = Problem(case)
    rounds = time_rounds([problem.runner(c) for c in case.contenders], clock, budget=0.0)
    assert len(rounds) == FEWEST_ROUNDS
    assert clock.log == ["ours", "eager", "other"] * (1 + FEWEST_ROUNDS)  # the first round warms up


def test_rounds_fill_the_budget() -> None:
    clock = FakeClock()
    case = make_case(clock.contender("ours", 1.0), clock.contender("eager", 2.0))
    problem = Problem(case)
    rounds = time_rounds([problem.runner(c) for c in case.contenders], clock, budget=30.0)
    assert len(rounds) == 10  # of 3 seconds each


def test_ratio_is_the_median_over_rounds_of_peer_over_ours() -> None:
    clock = FakeClock()
    untimed = (9.0, 9.0, 9.0)  # the attempt, the memory pass, the warm-up
    ours = clock.contender("ours", *untimed, 1.0, 1.0, 1.0, 10.0, 1.0)
    eager = clock.contender("eager", *untimed, 2.0, 3.0, 4.0, 50.0, 6.0)
    row = by_peer(rows_of(eager, ours=ours, clock=clock))["eager"]
    assert row.rounds == 5
    assert row.ratio == 4.0  # of 2, 3, 4, 5, 6: a slow round for everyone is one round like the others
    assert (row.ratio_low, row.ratio_high) == pytest.approx((2.8, 5.2))
    assert row.our_ms == 1000.0
    assert row.peer_ms == 4000.0


def test_every_direction_and_peer_has_a_row() -> None:
    rows = rows_of(Contender("eager", product), Contender("other", product))
    assert [(row.direction, row.peer) for row in rows] == [(d, p) for d in DIRECTIONS for p in ("eager", "other")]
    assert all(row.ratio is not None for row in rows)


def test_forward_only_case_asks_for_no_gradient() -> None:
    case = replace(make_case(), directions=("forward",))
    (row,) = measure(case, 0.0, STAMP)
    assert row.ratio is not None
    assert row.does_less is None


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> Tensor:
        return grads[0] * 1.001


def wrong_gradient(x: Tensor, y: Tensor) -> Outputs:
    return product(WrongGradient.apply(x), y)


def wrong_output(x: Tensor, y: Tensor) -> Outputs:
    return x * y * 1.001, x + y


def nan_output(x: Tensor, y: Tensor) -> Outputs:
    return x * y, x + y + float("nan")


@pytest.mark.parametrize(("mistake", "name"), [(wrong_gradient, "dx"), (wrong_output, "product"), (nan_output, "sum")])
def test_a_wrong_result_of_ours_closes_the_gate(mistake: object, name: str) -> None:
    rows = rows_of(Contender("eager", product), ours=Contender("ours", mistake))  # type: ignore[arg-type]
    assert rows
    for row in rows:
        assert row.gate is not None
        assert row.gate.startswith(f"gate: error of {name} is ")
        assert row.ratio is row.our_ms is row.peak_ratio is None


def test_nan_is_no_excuse_when_eager_makes_it_too() -> None:
    rows = rows_of(Contender("eager", nan_output), ours=Contender("ours", nan_output))
    assert all(row.gate for row in rows)


def test_a_case_without_its_yardstick_is_refused() -> None:
    with pytest.raises(ValueError, match="the yardstick 'eager' is not among the peers"):
        make_case(product, Contender("other", product))


def test_an_exception_of_ours_closes_the_gate() -> None:
    def broken(x: Tensor, y: Tensor) -> Outputs:
        raise RuntimeError("no kernel for Tuesdays. Come back later.")

    rows = rows_of(Contender("eager", product), ours=Contender("ours", broken))
    assert {row.gate for row in rows} == {"gate: we failed: no kernel for Tuesdays"}


@pytest.mark.parametrize(
    ("mistake", "verdict"),
    [
        (lambda x, y: (x * y, (x + y).T), "sum has shape [3, 5], the oracle's [5, 3]"),
        (lambda x, y: (x * y,), "ours returns 1 of 2 outputs"),
    ],
)
def test_outputs_of_ours_must_all_be_there(mistake: object, verdict: str) -> None:
    rows = rows_of(Contender("eager", product), ours=Contender("ours", mistake))  # type: ignore[arg-type]
    assert {row.gate for row in rows} == {f"gate: we failed: {verdict}"}


def test_a_wrong_peer_gets_no_ratio_and_does_not_close_the_gate() -> None:
    rows = by_peer(rows_of(Contender("eager", product), Contender("wrong", wrong_output)))
    assert rows["wrong"].ratio is None
    assert rows["wrong"].unsupported is not None
    assert rows["wrong"].unsupported.startswith("error of product is ")
    assert rows["eager"].ratio is not None


def test_a_peer_that_cannot_is_a_row_with_the_reason() -> None:
    rows = by_peer(rows_of(Contender("eager", product), Contender("absent", product, unsupported="needs CUDA")))
    assert rows["absent"].unsupported == "needs CUDA"
    assert rows["absent"].ratio is None
    assert rows["absent"].our_ms is not None


def test_a_peer_that_cannot_train_is_timed_forward_and_says_so() -> None:
    def inference_only(x: Tensor, y: Tensor) -> Outputs:
        if x.requires_grad:
            raise NotImplementedError("No backward on CPU. Use another device.")
        return product(x, y)

    rows = rows_of(Contender("eager", product), Contender("flex", inference_only))
    forward, full = by_peer(rows, "forward")["flex"], by_peer(rows, "full")["flex"]
    assert forward.ratio is not None
    assert forward.does_less == "no gradient"
    assert full.ratio is None
    assert full.unsupported == "No backward on CPU"


def test_gradients_of_a_peer_that_does_less_go_through_what_it_returns() -> None:
    less = Contender("less", lambda x, y: product(x, y)[:1], does_less="no sum")
    row = by_peer(rows_of(Contender("eager", product), less), "backward")["less"]
    assert row.does_less == "no sum"
    assert row.peer_error is not None
    assert row.peer_error < 1e-6
    assert row.ratio is not None


def test_peak_over_inputs_and_outputs() -> None:
    row = by_peer(rows_of(Contender("eager", product)))["eager"]
    tensor = 5 * 3 * 4
    assert row.our_peak is not None
    assert row.our_peak >= 4 * tensor  # two outputs and two gradients
    assert row.peak_over_io == row.our_peak / (4 * tensor)
    assert row.peak_ratio == 1.0


def test_garbage_collection_and_threads_are_put_back() -> None:
    threads = torch.get_num_threads()
    rows_of(Contender("eager", product))
    assert gc.isenabled()
    assert torch.get_num_threads() == threads


def test_reason_is_the_first_sentence_of_the_first_cause() -> None:
    wrapped = RuntimeError("While compiling:")
    wrapped.__cause__ = ValueError("The head is\n too wide. Use another one.")
    assert sentence(wrapped) == "The head is too wide"
    quoted = RuntimeError("raised exception NotImplementedError('No backward. Sorry.')")
    assert sentence(quoted) == "No backward"
    assert len(sentence(RuntimeError("x" * 500))) == 100
    assert sentence(KeyError()) == "KeyError"
