"""The suite `bumps` at tiny sizes: contenders agree, mistakes have no time, few points stand for all, a real run."""

import io
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from compgen_fast.bench import bumps
from compgen_fast.bench.bumps import Found, Grid, Kind, Method, Trainer
from compgen_fast.bench.harness import Row
from compgen_fast.bench.suite import GREEN
from compgen_fast.measure import factorization, layer_geometry
from tests.bench.fakes import STAMP, FakeClock


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoders of few numbers: reverse mode takes a pass for each of them."""
    whole_mlp, whole_cnn = bumps.mlp, bumps.cnn
    monkeypatch.setattr(bumps, "mlp", lambda widths, *rest: whole_mlp((widths[0], 6, 6, widths[-1]), *rest))
    monkeypatch.setattr(bumps, "cnn", lambda channels, *rest: whole_cnn(1, *rest))
    monkeypatch.setattr(bumps, "BATCH", 2)


def shown(rows: list[Row]) -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(bumps.table(rows))
    return console.export_text()


# ------------------------------------------------------------------------------------------------ geometry


def test_codes_have_a_bump_for_each_factor_and_the_slopes_of_their_own() -> None:
    code, x, y = bumps.bump_codes()
    point = 5 * 28 + 9  # x = 5, y = 9
    assert code.shape == x.shape == y.shape == (784, 56)
    assert code[point, 5] == code[point, 28 + 9] == 1
    torch.testing.assert_close(code[point, [6, 28 + 11]], torch.tensor([-0.5, -2.0]).double().exp())
    torch.testing.assert_close(x[point, [4, 5, 6]], torch.tensor([-1.0, 0.0, 1.0]).double() * code[point, 6])
    assert (x[:, 28:] == 0).all() and (y[:, :28] == 0).all() and (y[:, 28:] != 0).any()
    (found,) = layer_geometry([], code, (x, y))
    assert factorization(found.metric) == 1


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_all_ways_to_the_metric_agree_with_the_oracle(kind: Kind) -> None:
    grid = bumps.decoder_grid(kind, nn.GELU, "cpu").at(slice(None, None, 300))
    expected = bumps.exact(grid)
    for method in (method for method in bumps.methods(kind) if not method.inexact):
        found = method.find(grid)
        assert bumps.error(found, expected) < 1e-5, method.name
        assert bool(found[1]) == (not method.does_less)
    assert expected[1][-1].min() > 0


def test_an_error_of_one_layer_is_seen_and_so_is_a_nan() -> None:
    true: Found = [torch.ones(2, 2, 2), torch.full((2, 2, 2), 100.0)], [torch.ones(2), torch.ones(2)]
    assert bumps.error(true, true) == 0
    assert bumps.error(([true[0][0], true[0][1] + 1], []), true) == pytest.approx(0.01)
    assert bumps.error((true[0], [true[1][0], true[1][1] * 3]), true) == pytest.approx(2)
    assert math.isnan(bumps.error(([true[0][0], true[0][1] * math.nan], []), true))
    (row,) = judged([Method("ours", lambda grid: _scaled(grid, math.nan)), Method("nested jvp", bumps.nested_jvp)])
    assert row.gate and row.ratio is None


def _scaled(grid: Grid, factor: float) -> Found:
    metric, mixed = bumps.ours(grid)
    return [factor * each for each in metric], mixed


def judged(among: list[Method], clock: FakeClock | None = None) -> list[Row]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bumps, "methods", lambda kind: among)
        return bumps.measure_geometry("mlp", nn.ReLU, 0.0, STAMP, "cpu", clock)


def test_our_mistake_closes_the_gate_and_a_peers_costs_it_its_time() -> None:
    peer = Method("nested jvp", bumps.nested_jvp)
    (row,) = judged([Method("ours", lambda grid: _scaled(grid, 1.01)), peer])
    assert row.gate and row.ratio is None and "gate" in shown([row])
    wrong, right = judged([Method("ours", bumps.ours), Method("off", lambda grid: _scaled(grid, 1.01)), peer])
    assert wrong.unsupported and wrong.ratio is None and not wrong.gate
    assert right.ratio is not None and "unsupported: off" in shown([wrong, right])


def test_central_differences_are_timed_with_their_error_beside_them() -> None:
    among = [method for method in bumps.methods("mlp") if method.name in ("ours", "nested jvp", "central differences")]
    _, central = judged(among)
    assert central.peer == "central differences" and central.ratio is not None
    assert 0.1 < (central.peer_error or 0) < 1 and "wrong by design" in (central.does_less or "")


def test_few_points_stand_for_all() -> None:
    clock = FakeClock()

    def taking(seconds: float) -> Callable[[Grid], Found]:
        def find(grid: Grid) -> Found:
            clock.spend(seconds * len(grid.code))
            return bumps.ours(grid)

        return find

    among = [Method("ours", taking(1)), Method("few", taking(3), "less", 8), Method("nested jvp", taking(2))]
    few, every = judged(among, clock)
    assert few.ratio == pytest.approx(3) and every.ratio == pytest.approx(2)
    assert few.does_less == "less; 8 of 784 points timed, and scaled"
    assert few.our_ms == pytest.approx(784e3) and every.does_less is None


# ------------------------------------------------------------------------------------------------ training


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_all_ways_to_train_come_to_the_same_weights(kind: Kind) -> None:
    among = bumps.trainers(kind, 3, "cpu")
    start = [trainer.weights() for trainer in among]
    for weights in start[1:]:
        torch.testing.assert_close(weights, start[0], rtol=0, atol=0)
    assert len(torch.unique(start[0], dim=0)) == 3
    assert all(drift < 1e-3 for drift in bumps.drifts(among).values())
    assert all((trainer.weights() != start[0]).any(1).all() for trainer in among)


def test_another_gradient_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = bumps.plain

    def mirrored(kind: Kind, weights: Tensor, codes: Tensor, images: Tensor) -> Trainer:
        return plain(kind, weights, codes, -images)

    monkeypatch.setattr(bumps, "plain", mirrored)
    rows = bumps.measure_training("mlp", 2, 0.0, STAMP, "cpu")
    assert all(row.gate and row.ratio is None for row in rows)


def test_a_step_of_everyone_is_timed_against_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    among = [Trainer(name, lambda s=s: clock.spend(s), lambda: torch.ones(1, 1)) for name, s in
             (("ours", 2.0), ("plain modules, in turn", 3.0))]  # fmt: skip
    monkeypatch.setattr(bumps, "trainers", lambda *_: among)
    monkeypatch.setattr(bumps, "drifts", lambda among: dict.fromkeys((one.name for one in among), 0.0))
    (row,) = bumps.measure_training("mlp", 2, 0.0, STAMP, "cpu", clock)
    assert row.ratio == pytest.approx(1.5) and (row.our_ms, row.peer_ms) == pytest.approx((2e3, 3e3))


def test_a_quick_run_writes_rows_and_shows_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bumps, "TIMED_STEPS", 1)
    monkeypatch.setattr(bumps, "QUICK", bumps.QUICK.__class__("quick", 0.0))
    assert bumps.run(quick=True, json="rows.json") == GREEN
    rows = json.loads(Path("rows.json").read_text())
    assert len({row["case"] for row in rows}) == 4 and all(row["ratio"] > 0 for row in rows)
    assert "20–80 %" in capsys.readouterr().out and Path("bench-results/bumps.csv").exists()
