"""Each moment of a step has one owner, and the right one."""

import gzip
import io
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.profiler import record_function
from torch.utils.checkpoint import checkpoint

from compgen_fast.jets import interaction_penalty
from compgen_fast.train import profiling
from compgen_fast.train.profiling import Piece, Row, disjoint, profile_steps, tables
from compgen_fast.train.ranks import Ranks
from tests.train.two_ranks import run_two_ranks


class Product(nn.Module):
    """A linear layer, and a large matrix product beside it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.work = nn.Parameter(torch.randn(size, size) / size)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x) + (self.work @ self.work).mean()
        return out


class Model(nn.Module):
    def __init__(self, encoder: nn.Module, decoder: nn.Module, penalty: bool = False) -> None:
        super().__init__()
        self.encoder, self.decoder, self.penalty = encoder, decoder, penalty

    def forward(self, x: Tensor) -> Tensor:
        z = self.encoder(x)
        if self.penalty:
            return interaction_penalty(self.decoder, z.unflatten(1, (4, 2)))
        loss: Tensor = self.decoder(z).square().mean()
        return loss


class Trainer:
    """A stand-in for the loop: the same ranges around the same parts."""

    def __init__(self, model: nn.Module, data_seconds: float = 0.0) -> None:
        self.model, self.ranks, self.data_seconds, self.steps = model, Ranks.alone(), data_seconds, 0

    def step_once(self) -> None:
        self.steps += 1
        with record_function("data"):
            time.sleep(self.data_seconds)
            x = torch.randn(16, 8)
        with record_function("forward"):
            loss = self.model(x)
        with record_function("backward"):
            loss.backward()
        with record_function("optimiser"):
            for parameter in self.model.parameters():
                parameter.grad = None


def shares(rows: list[Row]) -> dict[str, float]:
    return {row.name: row.share for row in rows if row.table == "phase"}


def test_shares_add_up_to_one_and_phases_come_in_the_order_of_a_step(tmp_path: Path) -> None:
    rows = profile_steps(Trainer(Model(nn.Linear(8, 8), nn.Linear(8, 8))), 3, tmp_path)
    assert list(shares(rows)) == [
        "data", "encoder", "decoder", "rest of forward", "encoder backward", "decoder backward", "rest of backward",
        "optimiser", "other",
    ]  # fmt: skip
    assert sum(shares(rows).values()) == pytest.approx(1)


def test_time_spent_waiting_for_data_is_found(tmp_path: Path) -> None:
    rows = profile_steps(Trainer(Model(nn.Linear(8, 8), nn.Linear(8, 8)), data_seconds=0.1), 2, tmp_path)
    assert shares(rows)["data"] > 0.5
    assert next(row.milliseconds for row in rows if row.name == "data") >= 100


@pytest.mark.parametrize(("busy", "idle"), [("encoder", "decoder"), ("decoder", "encoder")])
def test_forward_and_backward_go_to_the_module_that_does_the_work(busy: str, idle: str, tmp_path: Path) -> None:
    found = shares(profile_steps(Trainer(Model(**{busy: Product(500), idle: nn.Linear(8, 8)})), 3, tmp_path))
    assert found[busy] > 3 * found[idle]
    assert found[f"{busy} backward"] > 3 * found[f"{idle} backward"]
    assert found[f"{busy} backward"] > found[busy] > found["rest of forward"]  # two products back for one forth


def test_the_decoder_on_a_jet_is_the_penalty(tmp_path: Path) -> None:
    decoder = nn.Sequential(nn.Flatten(1), nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8))
    found = shares(profile_steps(Trainer(Model(nn.Linear(8, 8), decoder, penalty=True)), 2, tmp_path))
    assert found["penalty"] > 0 and found["penalty backward"] > 0
    assert "decoder" not in found and "decoder backward" not in found


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Product(500)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return out


def test_the_backward_of_recomputed_work_is_its_modules_too(tmp_path: Path) -> None:
    found = shares(profile_steps(Trainer(Model(Recomputed(), nn.Linear(8, 8))), 2, tmp_path))
    assert found["encoder backward"] > 3 * found["rest of backward"]


def test_a_model_without_decoder_is_profiled(tmp_path: Path) -> None:
    model = Model(nn.Linear(8, 8), nn.Identity())
    del model.decoder
    model.decoder = torch.nn.functional.gelu  # type: ignore[assignment]
    assert "decoder" not in shares(profile_steps(Trainer(model), 1, tmp_path))


def test_hooks_are_gone_afterwards_also_when_a_step_fails(tmp_path: Path) -> None:
    trainer = Trainer(Model(nn.Linear(8, 8), nn.Linear(7, 7)))
    with pytest.raises(RuntimeError, match="shapes"):
        profile_steps(trainer, 1, tmp_path)
    for module in (trainer.model.encoder, trainer.model.decoder):
        assert isinstance(module, nn.Module)
        assert not module._forward_hooks and not module._forward_pre_hooks


def test_steps_are_warmed_up_and_counted(tmp_path: Path) -> None:
    trainer = Trainer(Model(nn.Linear(8, 8), nn.Linear(8, 8)))
    rows = profile_steps(trainer, 3, tmp_path)
    assert trainer.steps == 3 + 3
    assert {row.name: row.calls for row in rows}["aten::addmm"] == 2


def test_operators_are_the_longest_by_their_own_time(tmp_path: Path) -> None:
    rows = profile_steps(Trainer(Model(Product(500), nn.Linear(8, 8))), 2, tmp_path)
    operators = [row for row in rows if row.table == "operator"]
    assert operators[0].name == "aten::mm" and operators[0].share > 0.5
    assert operators == sorted(operators, key=lambda row: -row.share) and len(operators) == profiling.TOP
    assert not {row.name for row in operators} & {*profiling.RANGES, profiling.STEP}


def test_the_trace_opens_and_holds_the_phases(tmp_path: Path) -> None:
    profile_steps(Trainer(Model(nn.Linear(8, 8), nn.Linear(8, 8))), 1, tmp_path / "new")
    trace = json.loads(gzip.decompress((tmp_path / "new" / "trace.json.gz").read_bytes()))
    assert {"data", "encoder", "backward", "aten::addmm"} <= {event.get("name") for event in trace["traceEvents"]}


def test_tables_show_every_row(tmp_path: Path) -> None:
    rows = [Row("phase", "data", 1.5, 0.25, None), Row("operator", "aten::mm", 4.0, 0.5, 12.0)]
    page = Console(file=io.StringIO(), width=100)
    with page.capture() as captured:
        page.print(tables(rows))
    phase, operator = (line.split() for line in captured.get().splitlines() if "%" in line)
    assert phase == ["data", "1.50", "25.0%"] and operator == ["aten::mm", "4.00", "50.0%", "12"]


def test_no_steps_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="steps is 0; expected at least 1"):
        profile_steps(Trainer(Model(nn.Linear(8, 8), nn.Linear(8, 8))), 0, tmp_path)


def times(pieces: list[Piece]) -> list[tuple[str, float, float]]:
    return [(piece.phase, piece.start, piece.end) for piece in pieces]


def test_of_nested_pieces_the_inner_one_has_the_time() -> None:
    outer, inner = Piece("forward", 0, 10), Piece("encoder", 2, 6)
    assert times(disjoint([inner, outer])) == [("forward", 0, 2), ("encoder", 2, 6), ("forward", 6, 10)]


def test_a_higher_layer_has_the_time_whoever_began_first() -> None:
    long, short = Piece("kernel", 0, 4, 2), Piece("communication", 3, 9, 1)
    assert times(disjoint([long, short])) == [("kernel", 0, 4 - 1), ("kernel", 3, 4), ("communication", 4, 9)]


def test_time_that_nobody_claims_is_nobodys() -> None:
    assert times(disjoint([Piece("a", 0, 1), Piece("b", 2, 3)])) == [("a", 0, 1), ("b", 2, 3)]


def event(name: str, start: float, end: float, **changes: Any) -> SimpleNamespace:
    """What the profiler tells of one event, on the training thread of a CPU unless said otherwise."""
    settings = {
        "thread": 1, "device": "CPU", "is_user_annotation": name in (*profiling.RANGES, profiling.STEP), "id": 0,
        "is_async": False, "sequence_nr": -1, "fwd_thread": 0, "linked_correlation_id": 0, **changes,
    }  # fmt: skip
    device = SimpleNamespace(name=settings.pop("device"))
    return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=end), device_type=device, **settings)


def test_kernels_belong_to_the_phase_that_launched_them() -> None:
    """Made-up events: nothing here has run on a GPU."""
    node = f"{profiling.NODE}AddmmBackward0"
    events = [
        event(profiling.STEP, 0, 100),
        event("forward", 0, 10),
        event("aten::view", 0.5, 0.6, sequence_nr=40),  # sees the number of the node that addmm will make
        event("encoder", 1, 5),
        event("aten::addmm", 2, 3, id=7, sequence_nr=40),
        event("aten::mean", 6, 7, id=8, sequence_nr=41),
        event("backward", 10, 20),
        event(node, 12, 15, thread=2, sequence_nr=40, fwd_thread=1),
        event("aten::mm", 13, 14, id=9, thread=2),
        event("c10d::allreduce_", 18, 19, id=10),
        event("gemm", 5, 25, device="CUDA", linked_correlation_id=7),
        event("mean", 25, 30, device="CUDA", linked_correlation_id=8),
        event("gemm", 30, 70, device="CUDA", linked_correlation_id=9),
        event("ncclDevKernel_AllReduce", 60, 90, device="CUDA", linked_correlation_id=10),
        event("encoder", 6, 24, device="CUDA"),
    ]
    found: dict[str, float] = {}
    for piece in disjoint(profiling._on_device(events)):
        found[piece.phase] = found.get(piece.phase, 0) + piece.end - piece.start
    assert found == {
        "idle": 5 + 10, "encoder": 20, "rest of forward": 5, "encoder backward": 40, "communication": 90 - 70,
    }  # fmt: skip


RANK = """
    import sys, time
    from pathlib import Path
    import torch
    from torch.profiler import record_function
    from compgen_fast.train.profiling import profile_steps
    from compgen_fast.train.ranks import joined

    class Trainer:
        def __init__(self, ranks):
            self.model, self.ranks = torch.nn.Linear(2, 2), ranks
        def step_once(self):
            with record_function("backward"):
                time.sleep(0.1 * self.ranks.rank)
                torch.distributed.all_reduce(torch.ones(1000))

    with joined("cpu") as ranks:
        rows = profile_steps(Trainer(ranks), 2, Path(sys.argv[1]) / str(ranks.rank))
        share = {row.name: row.share for row in rows}
        assert abs(sum(row.share for row in rows if row.table == "phase") - 1) < 1e-9
        assert share["communication"] > 0.5 if ranks.first else share["rest of backward"] > 0.5, share
"""


def test_waiting_for_another_rank_is_communication(tmp_path: Path) -> None:
    run_two_ranks(RANK, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["0"]
