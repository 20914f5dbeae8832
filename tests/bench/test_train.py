"""The suite `train` at tiny sizes: the eager peer, the gate, rows and tables, and one real run of its processes."""

import io
import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from compgen_fast.bench import harness, train, train_peers, train_ranks
from compgen_fast.bench.harness import Case, Contender, Outputs, Row, measure
from compgen_fast.bench.train_peers import SameDraws, StepSize, case
from compgen_fast.bench.train_ranks import Found, Process, rotated, slowest
from compgen_fast.models.config import DecoderConfig, EncoderConfig, LossConfig, Penalty, SlotVAEConfig
from compgen_fast.recipes import slot_vae_cpu
from compgen_fast.train.launch import Placement
from compgen_fast.train.ranks import Ranks
from tests.bench.fakes import STAMP

TINY = SlotVAEConfig(
    image_size=8,
    slots=3,
    slot_dim=4,
    encoder=EncoderConfig(width=16, downsample=4, slot_layers=1, slot_heads=2),
    decoder=DecoderConfig(layers=2, heads=2, head_dim=5, query_dim=12, slot_hidden=16, octaves=3),
    loss=LossConfig(sigma=5.0, alpha=0.8),
)
RECIPE = replace(slot_vae_cpu(), model=TINY, batch_size=4)
ALL: list[tuple[Penalty, int]] = [*train.PENALTIES, ("contrast", 1)]
EFFORT = train.Effort("quick", seconds=0.0, rounds=2, predicted=(0,), calibration_steps=1)


def tiny(penalty: Penalty, part: int = 1) -> StepSize:
    return StepSize("tiny", TINY, 4, penalty, part)


def loss_and_gradients(call: Callable[..., Outputs], parameters: list[Tensor]) -> list[Tensor]:
    leaves = [parameter.clone().requires_grad_() for parameter in parameters]
    (loss,) = call(*leaves)
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


def black_and_white(size: StepSize) -> Tensor:
    """Colours 0 and 1: the model rounds other ones to fp32, also where all else is fp64."""
    side = size.model.image_size
    return 255 * torch.randint(0, 2, (size.batch, side, side, 3), dtype=torch.uint8)


@pytest.mark.parametrize(("penalty", "part"), ALL)
def test_the_eager_peer_computes_what_we_compute(penalty: Penalty, part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepSize, "images", black_and_white)
    step = case(tiny(penalty, part), "cpu")
    exact = [parameter.detach().double() for parameter in step.inputs().values()]
    expected = loss_and_gradients(step.ours.call, exact)
    for peer in step.peers:
        found = loss_and_gradients(peer.call, exact)
        for ours, theirs in zip(expected, found, strict=True):
            torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-11 * float(ours.abs().max()))


def test_only_a_step_without_penalty_can_use_fused_attention() -> None:
    assert [peer.name for peer in case(tiny("none"), "cpu").peers] == ["eager", "eager, SDPA"]
    assert [peer.name for peer in case(tiny("attention"), "cpu").peers] == ["eager"]


def test_draws_are_the_same_in_every_precision() -> None:
    single, double = (SameDraws.at(0, 0).normal(torch.empty(3, 2, dtype=t)) for t in (torch.float32, torch.float64))
    assert double.dtype == torch.float64
    assert torch.equal(single.double(), double)


def with_peer(step: Case, call: Callable[..., Outputs]) -> Case:
    """The case whose eager peer, and therefore whose oracle, is another."""
    return replace(step, oracle=call, peers=(Contender("eager", call),))


def test_a_right_step_passes_the_gate() -> None:
    rows = measure(case(tiny("attention"), "cpu"), 0.0, STAMP)
    assert [row.direction for row in rows] == ["forward", "backward", "full"]
    assert all(row.gate is None and row.ratio is not None for row in rows)


def test_the_gate_is_red_when_the_weights_of_the_peer_differ() -> None:
    step = case(tiny("attention"), "cpu")

    def other_weights(*parameters: Tensor) -> Outputs:
        *others, last = parameters
        return step.oracle(*others, last + 1e-3)

    rows = measure(with_peer(step, other_weights), 0.0, STAMP)
    assert rows
    assert all(row.gate and row.ratio is None and row.our_ms is None for row in rows)


@pytest.mark.parametrize(("penalty", "part"), [each for each in ALL if each[0] != "none"])
def test_the_gate_sees_a_penalty_that_is_off_by_a_hundredth(
    penalty: Penalty, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = case(tiny(penalty, part), "cpu")
    monkeypatch.setitem(train_peers.ALPHA, penalty, 1.01 * train_peers.ALPHA[penalty])
    wrong = case(tiny(penalty, part), "cpu")
    verdict = harness.try_all(with_peer(step, wrong.oracle))[2]
    assert verdict.startswith("gate: error of ")


def test_a_name_says_which_pixels_are_penalised() -> None:
    assert str(tiny("hessian", 8)) == "tiny 8 px, batch 4, hessian on 1/8 of pixels"
    assert str(tiny("none")) == "tiny 8 px, batch 4, no penalty"
    assert tiny("hessian", 8).config.loss.penalty_pixels == 8


@pytest.mark.parametrize("listed", [train.sizes, train.quick_sizes])
def test_every_size_has_its_own_name_and_can_be_built(listed: Callable[[], list[StepSize]]) -> None:
    sizes = listed()
    assert len({str(size) for size in sizes}) == len(sizes)
    assert {(size.penalty, size.part) for size in sizes} >= set(train.PENALTIES)
    for size in sizes:
        size.build()


def test_a_quick_run_compiles_nothing() -> None:
    assert not any(size.compiled for size in train.quick_sizes())
    assert any(size.compiled for size in train.sizes())


def job(ranks: int, scale: float = 1.0, drift: float = 1e-6) -> Found:
    """Engines that take 10, 30 and 20 % more than their peer, in rounds of which each is slower than the last."""
    plain, engine = ([scale * ms for ms in rounds] for rounds in ((100.0, 200.0, 400.0), (110.0, 260.0, 480.0)))
    times = {train_ranks.plain_name(ranks): plain, **dict.fromkeys(map(train_ranks.engine_name, (0, 1, 2)), engine)}
    return Found(ranks, times, dict.fromkeys(times, drift))


def shown(table: Table) -> str:
    console = Console(width=160, file=io.StringIO())
    with console.capture() as captured:
        console.print(table)
    return captured.get()


def test_the_cost_of_the_engine_is_formed_within_each_round() -> None:
    rows = train.engine_rows("tiny", job(1), STAMP)
    assert [row.case for row in rows] == [f"engine, tiny, ZeRO {stage} on 1 rank" for stage in (0, 1, 2)]
    assert {row.peer for row in rows} == {"plain torch"}
    for row in rows:
        assert row.ratio == pytest.approx(1 / 1.2)  # the median's round is another one
        assert 1 / 1.3 < row.ratio_low < row.ratio < row.ratio_high < 1 / 1.1
        assert (row.our_ms, row.peer_ms, row.rounds) == pytest.approx((260.0, 200.0, 3))
        assert row.error == 1e-6
    text = shown(train.engine_table("tiny", rows))
    assert "ZeRO 2 on 1 rank" in text
    assert "+20.0%" in text
    assert "+13.8% – +25.8%" in text


def test_an_engine_that_trains_something_else_has_no_times() -> None:
    rows = train.engine_rows("tiny", job(2, drift=0.5), STAMP)
    assert all(row.gate and row.ratio is None and row.our_ms is None and row.peer_ms is None for row in rows)
    assert "gate: weights are 5.0e-01 of their way apart from DDP's" in shown(train.engine_table("tiny", rows))


def test_two_ranks_are_compared_with_one_and_with_the_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_ranks, "predict", lambda recipe, stage, steps: (0.11, 0.12))
    jobs = job(1), job(2, scale=1.25)
    measured, modelled = train.scaling_rows("tiny", RECIPE, 0, jobs, EFFORT, STAMP)
    assert (measured.peer, measured.ratio, measured.rounds) == ("1 rank", pytest.approx(0.8), 3)
    assert (modelled.peer, modelled.ratio) == ("1 rank, modelled", pytest.approx(0.11 / 0.12))
    assert (modelled.our_ms, modelled.peer_ms) == pytest.approx((120.0, 110.0))
    (unpredicted,) = train.scaling_rows("tiny", RECIPE, 1, jobs, EFFORT, STAMP)
    assert unpredicted.peer == "1 rank"
    text = shown(train.scaling_table("tiny", [measured, modelled]))
    assert "80.0%" in text
    assert "91.7%" in text


def test_a_failed_prediction_leaves_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> tuple[float, float]:
        raise OSError("no more processes. Try later.")

    monkeypatch.setattr(train_ranks, "predict", fail)
    measured, modelled = train.scaling_rows("tiny", RECIPE, 0, (job(1), job(2)), EFFORT, STAMP)
    assert measured.ratio is not None
    assert (modelled.ratio, modelled.unsupported, modelled.gate) == (None, "no more processes", None)


@pytest.fixture
def tiny_suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole command on one tiny step, with engines whose times are made up."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "QUICK", EFFORT)
    monkeypatch.setattr(train, "quick_sizes", lambda: [tiny("attention")])
    monkeypatch.setattr(train, "measured_peak", lambda *_: 1e9)
    monkeypatch.setattr(train_ranks, "measure", lambda recipe, rounds: (job(1), job(2)))
    monkeypatch.setattr(train_ranks, "predict", lambda recipe, stage, steps: (0.1, 0.2))


@pytest.mark.usefixtures("tiny_suite")
def test_a_green_run_leaves_rows_of_one_schema(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train.run(quick=True, json="-") == 0
    captured = capsys.readouterr()
    rows = json.loads(captured.out)
    assert {tuple(row) for row in rows} == {tuple(field.name for field in fields(Row))}
    assert len(rows) == 3 + 2 * 3 + 3 + 1  # directions of the step; stages on 1 and 2 ranks; scaling; one prediction
    assert len((tmp_path / "bench-results" / "train.csv").read_text().splitlines()) == 1 + len(rows)
    assert (tmp_path / "bench-results" / "train.png").exists()
    for heading in ("of peak", "whole steps by DeepSpeed's engine", "two ranks against one"):
        assert heading in captured.err


@pytest.mark.usefixtures("tiny_suite")
def test_a_failing_rank_is_a_red_gate_with_its_last_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(*_: object) -> tuple[Found, Found]:
        raise RuntimeError("rank 1 of 2 ended with code 1; it said last: out of luck")

    monkeypatch.setattr(train_ranks, "measure", fail)
    assert train.run(quick=True, json="rows.json") == 1
    *_, last = json.loads((tmp_path / "rows.json").read_text())
    assert last["gate"] == "gate: rank 1 of 2 ended with code 1; it said last: out of luck"
    assert last["ratio"] is None


@pytest.mark.usefixtures("tiny_suite")
def test_a_red_gate_of_a_step_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(size: StepSize, device: str) -> Case:
        step = case(size, device)
        return replace(step, ours=Contender("ours", lambda *p: (step.ours.call(*p)[0] * 1.001,)))

    monkeypatch.setattr(train, "case", wrong)
    assert train.run(quick=True) == 1


def test_share_of_the_peak_is_flops_over_time_over_peak() -> None:
    size = tiny("attention")
    rows = [replace(row, our_ms=10.0, ratio=1.5) for row in measure(case(size, "cpu"), 0.0, STAMP)]
    peak = 4 * train.step_flops(size) / 0.01
    text = shown(train.speed_table([size], [rows], peak))
    assert "100.00" in text  # steps a second
    assert "400.0" in text  # images a second
    assert "25%" in text


def test_another_contender_begins_each_turn() -> None:
    contenders = [train_ranks.Trained(name, torch.nn.Identity(), lambda number: torch.zeros(())) for name in "abc"]
    orders = ["".join(each.name for each in rotated(contenders, turn)) for turn in (1, 2, 3)]
    assert orders == ["bca", "cab", "abc"]


def test_a_step_takes_as_long_as_its_slowest_rank() -> None:
    assert slowest([{"DDP": [1.0, 5.0]}, {"DDP": [3.0, 2.0]}]) == {"DDP": [3.0, 5.0]}


def test_weights_trained_otherwise_count_as_drift() -> None:
    faster = replace(RECIPE, optimiser=replace(RECIPE.optimiser, lr=1.1 * RECIPE.optimiser.lr))
    ranks = Ranks.alone()
    same, other = (train_ranks.plain(recipe, ranks) for recipe in (RECIPE, faster))
    other = replace(other, name="faster")
    drift = train_ranks.warm_up([train_ranks.plain(RECIPE, ranks), replace(same, name="same"), other], ranks)
    assert drift["same"] == 0
    assert 0.05 < drift["faster"] < 0.2
    assert drift["faster"] > train.MOST_DRIFT


def test_a_rank_that_ends_badly_is_named_with_its_last_words(tmp_path: Path) -> None:
    process = Process(Placement(0, 1, 0, "127.0.0.1", 1), tmp_path)  # there is no job.json
    with pytest.raises(RuntimeError, match=r"rank 0 of 1 ended with code 1; it said last: FileNotFoundError"):
        process.wait(120)


def test_engines_on_one_rank_and_on_two_train_alike_and_are_timed() -> None:
    one, two = train_ranks.measure(RECIPE, rounds=2)
    for found, ranks, plain in ((one, 1, "plain torch"), (two, 2, "DDP")):
        assert found.ranks == ranks
        assert list(found.ms) == [plain, "ZeRO 0", "ZeRO 1", "ZeRO 2"]
        assert all(len(times) == 2 and min(times) > 0 for times in found.ms.values())
        assert found.drift[plain] == 0
        assert max(found.drift.values()) <= train.MOST_DRIFT
    rows: list[Row] = [row for found in (one, two) for row in train.engine_rows("tiny", found, STAMP)]
    assert all(row.ratio is not None for row in rows)
