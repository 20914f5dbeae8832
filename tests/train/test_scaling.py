"""The formulas give what can be worked out by hand, the messages are those that DeepSpeed sends, and nothing modelled
passes for measured.
"""

import io
import json
import math
import re
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from compgen_fast.models.config import EncoderConfig, SlotVAEConfig, SupervisedConfig
from compgen_fast.stream import pack
from compgen_fast.train import scaling
from compgen_fast.train.config import DataConfig, TrainConfig
from compgen_fast.train.data import folder_name
from compgen_fast.train.scaling import (
    CLUSTERS,
    LOOP,
    Cluster,
    CpuCalibration,
    Link,
    ScaleInputs,
    Timed,
    calibrate_cpu,
    inputs_of,
    messages,
    parse_gpus,
    plan,
    show,
)
from compgen_fast.worlds import open_split
from tests.train.steps import failing_in_the_second, sleeping
from tests.train.two_ranks import run_two_ranks

ROUND = Cluster("round", 1e12, 4e12, 4, Link(100.0, 0.25), Link(10.0, 2.0), start=1.0, achieved=1.0)
SMALL = ScaleInputs(
    parameters=1000, flops_per_image=1e9, batch_per_gpu=8, bytes_per_image=100, gpus=(8,), clusters=(ROUND,),
    utilisation=0.5,
)  # fmt: skip


@pytest.mark.parametrize("gpus", [1, 2, 4, 8, 32, 1024])
@pytest.mark.parametrize(("kind", "passes"), [("all_reduce", 2), ("all_gather", 1)])
def test_a_gpu_sends_what_a_ring_would_have_it_send(kind: Any, passes: int, gpus: int) -> None:
    inside, between = ROUND.sent(kind, 1000.0, gpus)
    assert inside + between == pytest.approx(passes * (gpus - 1) / gpus * 1000)
    assert (between > 0) == (gpus > 4)


def test_an_all_reduce_in_one_node_takes_start_hops_and_transfer() -> None:
    assert ROUND.seconds("all_reduce", 1000, 4) == pytest.approx(1 + 6 * 0.25 + 2 * (3 / 4) * 1000 / 100)


def test_an_all_reduce_over_nodes_meets_in_a_tree() -> None:
    sixteen_in_four = 1 + 6 * 0.25 + 2 * 2 * 2.0 + 2 * (3 / 4) * 1000 / 100 + 2 * (3 / 4) * 250 / 10
    assert ROUND.seconds("all_reduce", 1000, 16) == pytest.approx(sixteen_in_four)


def test_an_all_gather_goes_around_the_ring() -> None:
    eight_in_two = 1 + 6 * 0.25 + 1 * 2.0 + (3 / 4) * 1000 / 100 + (1 / 2) * 250 / 10
    assert ROUND.seconds("all_gather", 1000, 8) == pytest.approx(eight_in_two)


def test_one_gpu_sends_nothing_and_is_fully_efficient() -> None:
    for row in plan(replace(SMALL, gpus=(1,))):
        assert row.efficiency == 1 and row.sent_inside == row.sent_between == row.message_seconds == 0


def test_a_share_of_the_nominal_bandwidth_slows_only_the_transfer() -> None:
    half = replace(ROUND, achieved=0.5)
    nothing = ROUND.seconds("all_reduce", 0, 8)
    assert half.seconds("all_reduce", 0, 8) == nothing
    assert half.seconds("all_reduce", 99, 8) - nothing == pytest.approx(
        2 * (ROUND.seconds("all_reduce", 99, 8) - nothing)
    )


def test_gpus_that_do_not_fill_nodes_are_refused() -> None:
    with pytest.raises(ValueError, match="round: 6 GPUs on nodes of 4; expected at most 4, or a multiple"):
        plan(replace(SMALL, gpus=(6,)))


def test_a_row_is_worked_out_as_by_hand() -> None:
    (row,) = plan(replace(SMALL, stages=(0,)))
    compute = 8 * 1e9 / (4e12 * 0.5)
    sent = ROUND.seconds("all_reduce", 4000, 8) + ROUND.seconds("all_reduce", 4, 8) + ROUND.seconds("all_reduce", 32, 8)
    assert row.compute_seconds == pytest.approx(compute)
    assert row.message_seconds == pytest.approx(sent) and row.hidden_seconds == 0
    assert row.step_seconds == pytest.approx(compute + sent)
    assert row.efficiency == pytest.approx(compute / (compute + sent))
    assert row.batch == 64 and row.images_per_second == pytest.approx(64 / (compute + sent))
    assert row.storage == pytest.approx(100 * row.images_per_second)
    assert row.sent_inside + row.sent_between == pytest.approx(2 * 7 / 8 * (4000 + 4 + 32))
    assert row.basis == "modelled"


def test_precision_chooses_the_peak() -> None:
    bf16, fp32 = (plan(replace(SMALL, precision=precision))[0].compute_seconds for precision in ("bf16", "fp32"))  # type: ignore[arg-type]
    assert fp32 == pytest.approx(4 * bf16)


def test_stages_one_and_two_send_half_as_much_again() -> None:
    zero, one, two = (row.sent_inside + row.sent_between for row in plan(replace(SMALL, parameters=10**9)))
    assert one / zero == pytest.approx(1.5, rel=1e-6) and two == one


def simulated(fill: float, send: float, buckets: int) -> float:
    """A backward pass as DeepSpeed runs it: a bucket may be sent once it is full and the one before has been sent."""
    now = sent = 0.0
    for _ in range(buckets):
        now = max(now + fill, sent)
        sent = now + send
    return sent


@pytest.mark.parametrize("flops", [1e9, 4e13, 1e15])
@pytest.mark.parametrize("bucket", [1000, 500, 125])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_overlap_hides_what_a_simulation_hides(flops: float, bucket: int, micro_batches: int) -> None:
    inputs = replace(SMALL, flops_per_image=flops, bucket=bucket, micro_batches=micro_batches, stages=(2,))
    (row,) = plan(inputs)
    buckets = 1000 // bucket
    backward = 2 / 3 * row.compute_seconds / micro_batches
    send = ROUND.seconds("all_reduce", 4000 / buckets, 8)
    longer = micro_batches * (simulated(backward / buckets, send, buckets) - backward)
    assert micro_batches * buckets * send - row.hidden_seconds == pytest.approx(longer)
    assert row.step_seconds == pytest.approx(row.compute_seconds + row.message_seconds - row.hidden_seconds)


def test_one_bucket_hides_nothing_and_neither_does_stage_zero() -> None:
    assert all(row.hidden_seconds == 0 for row in plan(SMALL))
    hidden = [row.hidden_seconds for row in plan(replace(SMALL, bucket=100))]
    assert hidden[0] == 0 and min(hidden[1:]) > 0
    assert all(row.hidden_seconds == 0 for row in plan(replace(SMALL, bucket=100, overlap=False)))


@pytest.mark.parametrize("cluster", CLUSTERS.values(), ids=CLUSTERS)
def test_more_gpus_are_faster_together_and_less_efficient_each(cluster: Cluster) -> None:
    inputs = ScaleInputs(5_000_000, 10e9, 64, 12_000, clusters=(cluster,), stages=(0,))
    rows = plan(inputs)
    assert [row.gpus for row in rows] == [8, 16, 32, 64, 128, 256, 512, 1024]
    for fewer, more in pairwise(rows):
        assert more.images_per_second > fewer.images_per_second and more.efficiency < fewer.efficiency < 1


def test_a_slower_network_costs_only_between_nodes() -> None:
    fast, slow = CLUSTERS["h100-infiniband"], CLUSTERS["h100-ethernet"]
    inputs = ScaleInputs(5_000_000, 10e9, 64, 12_000, gpus=(8, 16), clusters=(fast, slow), stages=(1,))
    fast_node, fast_two, slow_node, slow_two = (row.efficiency for row in plan(inputs))
    assert fast_node == slow_node and slow_two < 0.9 * fast_two


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("8..1024", (8, 16, 32, 64, 128, 256, 512, 1024)),
        ("8..100", (8, 16, 32, 64)),
        ("6..24", (6, 12, 24)),
        ("4..4", (4,)),
        ("8,16,64", (8, 16, 64)),
        ("8", (8,)),
    ],
)
def test_numbers_of_gpus_are_read(text: str, numbers: tuple[int, ...]) -> None:
    assert parse_gpus(text) == numbers


@pytest.mark.parametrize("text", ["", "many", "8..", "..8", "16..8", "0..8", "8,,16", "8;16", "-8", "8.5", "8..16..32"])
def test_other_numbers_of_gpus_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r"gpus is .*; expected a range by doubling, such as 8\.\.1024, or a list"):
        parse_gpus(text)


@pytest.mark.parametrize(
    "wrong",
    [{"parameters": 0}, {"utilisation": 0}, {"utilisation": 1.5}, {"stages": (3,)}, {"gpus": ()}, {"gpus": (0,)}],
)
def test_inputs_that_make_no_plan_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"ScaleInputs: .*; expected"):
        replace(SMALL, **wrong)


def printed(inputs: ScaleInputs) -> str:
    page = Console(file=io.StringIO(), width=100)
    with page.capture() as captured:
        page.print(show(inputs, plan(inputs)))
    return captured.get()


def test_every_table_says_that_it_is_modelled_and_what_it_assumes() -> None:
    inputs = replace(SMALL, clusters=tuple(CLUSTERS.values()))
    text = printed(inputs)
    assert text.startswith("Modelled, not measured: no GPU was used.")
    for name in CLUSTERS:
        assert f"{name}, modelled: " in text
    assert text.count("at 50% of") == len(CLUSTERS) == text.count("messages at 80% of")
    assert max(map(len, text.splitlines())) <= 100 and "…" not in text


def test_stages_that_do_the_same_share_a_line() -> None:
    same, apart = (
        re.findall(r"^ +8 +(\d(?:, \d)*) ", printed(inputs), re.MULTILINE)
        for inputs in (SMALL, replace(SMALL, micro_batches=2))
    )
    assert same == ["0", "1, 2"] and apart == ["0", "1", "2"]


def test_a_plan_says_when_nothing_can_be_hidden() -> None:
    assert "A smaller reduce_bucket_size would" in printed(SMALL)
    assert "in 10 messages, all but the last" in printed(replace(SMALL, bucket=100))
    assert "overlap_comm is off" in printed(replace(SMALL, overlap=False))


TINY = TrainConfig(
    model=SlotVAEConfig(image_size=16, slots=2, slot_dim=4, encoder=EncoderConfig(width=8)),
    batch_size=16, accumulation=2, precision="bf16",
)  # fmt: skip


def test_a_recipe_gives_its_model_batch_and_settings(tmp_path: Path) -> None:
    inputs = inputs_of(replace(TINY, data=DataConfig(cache=tmp_path)), (8,))
    assert inputs.parameters > 1000 and inputs.flops_per_image > 1e6
    assert inputs.batch_per_gpu == 16 and inputs.micro_batches == 2 and inputs.precision == "bf16" and inputs.overlap
    assert inputs.bytes_per_image == 3 * 16 * 16  # nothing packed yet: at most this


def test_bytes_on_disk_are_those_of_the_shards_that_are_there(tmp_path: Path) -> None:
    data = DataConfig(cache=tmp_path, size=32)
    folder = tmp_path / folder_name(data, 16, "train")
    pack(open_split("scenes", resolution=16, size=32), folder)
    inputs = inputs_of(replace(TINY, data=data), (8,))
    assert inputs.bytes_per_image == sum(tar.stat().st_size for tar in folder.glob("*.tar")) / 32
    assert inputs_of(replace(TINY, data=DataConfig(shards=str(folder))), (8,)) == inputs


def test_a_supervised_recipe_is_planned_too(tmp_path: Path) -> None:
    model = SupervisedConfig(image_size=16, slots=2, slot_dim=4, encoder=EncoderConfig(width=8))
    assert inputs_of(replace(TINY, model=model, data=DataConfig(cache=tmp_path)), (8,)).parameters > 100


def test_the_command_prints_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert scaling.run(replace(TINY, data=DataConfig(cache=tmp_path)), "8,16") == 0
    assert "h100-ethernet, modelled" in capsys.readouterr().out


DEEPSPEED = """
    import json, os, sys, warnings
    os.environ["DS_ACCELERATOR"] = "cpu"
    import torch, torch.distributed as dist

    sent = []
    def record(name):
        call = getattr(dist, name)
        def recorded(*given, **named):
            out = next(value for value in (*given, *named.values()) if isinstance(value, torch.Tensor))
            sent.append((name, out.numel() * out.element_size()))
            return call(*given, **named)
        setattr(dist, name, recorded)
    for name in ("all_reduce", "all_gather_into_tensor", "reduce", "reduce_scatter_tensor", "broadcast"):
        record(name)
    warnings.simplefilter("ignore")
    from compgen_fast.train.engine import imported
    from compgen_fast.train.ranks import joined

    with joined("cpu") as ranks:
        deepspeed = imported(ranks.device)
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
        found = {}
        for stage in (0, 1, 2):
            for bucket in (500_000_000, 8400):
                model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
                weights, biases = ([p for p in model.parameters() if p.dim() == n] for n in (2, 1))
                engine, *_ = deepspeed.initialize(
                    model=model, optimizer=torch.optim.AdamW([{"params": weights}, {"params": biases}]),
                    config={
                        "train_batch_size": 16, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
                        "gradient_clipping": 1.0, "zero_allow_untested_optimizer": True, "steps_per_print": 1 << 62,
                        "zero_optimization": {"stage": stage, "overlap_comm": True, "reduce_bucket_size": bucket},
                    })
                for micro in range(4):
                    if micro == 2:
                        sent.clear()
                    engine.backward(engine(torch.randn(4, 64)).square().mean())
                    engine.step()
                found[f"{stage} {bucket}"] = list(sent)
        if ranks.first:
            print("FOUND", json.dumps(found))
"""


def test_the_messages_are_those_that_deepspeed_sends() -> None:
    printed = run_two_ranks(DEEPSPEED)[0]
    found = json.loads(printed.split("FOUND", 1)[1])
    parameters = 4 * (64 * 64 + 64)
    assert len(found) == 6
    for case, sent in found.items():
        stage, bucket = map(int, case.split())
        modelled = messages(parameters, stage, micro_batches=2, parameter_groups=2, bucket=bucket)
        for kind, call in (("all_reduce", "all_reduce"), ("all_gather", "all_gather_into_tensor")):
            sizes = [size for name, size in sent if name == call]
            assert len(sizes) == sum(message.count for message in modelled if message.kind == kind), case
            assert sum(sizes) == sum(message.count * message.size for message in modelled if message.kind == kind), case
        assert {name for name, _ in sent} <= {"all_reduce", "all_gather_into_tensor"}, case


NEVER_RUN = partial(sleeping, 0.0, Path("unused"))


def test_a_prediction_adds_the_measured_parts() -> None:
    measured = CpuCalibration(1000, 2.0, 3.0, all_reduce=Timed(0.5, 1e-3), all_gather=Timed(0.25, 1e-4))
    assert measured.contention == 1.5
    small = 0.5 + 4e-3
    loop = 0.5 + LOOP.size * 1e-3
    assert measured.predict(0, bucket=500) == pytest.approx(3 + (0.5 + 4) + small + loop)
    assert measured.predict(1, bucket=1000) == pytest.approx(3 + (0.5 + 4) + 2 * small + loop + 2 * 0.25 + 0.4)
    assert measured.predict(1, bucket=500) == pytest.approx(measured.predict(1, bucket=1000) + 0.5)
    assert measured.predict(2, bucket=1000, micro_batches=3) == pytest.approx(
        measured.predict(1, bucket=1000) + 2 * (0.5 + 4)
    )


def test_a_step_of_two_ranks_waits_for_the_slower_one(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = Timed(0.1, 0.0)
    told = iter([[([1.0, 1.0, 7.0], [2.0, 5.0, 3.0]), ([], [4.0, 2.0, 3.5])], [(timed, timed)] * 2])
    monkeypatch.setattr(scaling, "_in_two_processes", lambda *_: next(told))
    measured = calibrate_cpu(NEVER_RUN, 10)
    assert measured.step_alone == 1.0 and measured.step_beside == 4.0  # of 4, 5 and 3.5


def test_calibration_measures_steps_and_messages(tmp_path: Path) -> None:
    measured = calibrate_cpu(partial(sleeping, 0.02, tmp_path / "marks"), 500_000, steps=3)
    assert len((tmp_path / "marks").read_text()) == 2 * 3 + 3 + 2 * 3  # warm-up of both, rank 0 alone, both together
    assert measured.step_alone >= 0.02 and measured.step_beside >= 0.02
    for timed in (measured.all_reduce, measured.all_gather):
        assert timed.start > 0 and timed.per_byte >= 0
        assert 1e-5 < timed.seconds(2_000_000) < 10
    assert measured.predict(1, bucket=10**6) > measured.predict(0, bucket=10**6) > measured.step_beside


def test_an_error_in_one_process_is_told_and_the_other_does_not_wait() -> None:
    with pytest.raises(RuntimeError, match="no such recipe"):
        scaling._in_two_processes(failing_in_the_second)


def test_a_step_that_cannot_be_sent_to_a_process_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cannot be sent to another process .*; expected a function that a module"):
        calibrate_cpu(lambda: lambda: None, 10)


@pytest.mark.parametrize("wrong", [{"parameters": 0}, {"parameters": 1, "steps": 0}])
def test_a_calibration_of_nothing_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="expected at least 1 of each"):
        calibrate_cpu(NEVER_RUN, **wrong)


def test_nominal_figures_are_in_order() -> None:
    for cluster in CLUSTERS.values():
        assert cluster.bf16 > cluster.fp32 > 1e12
        assert cluster.inside.bandwidth > cluster.between.bandwidth > 1e9
        assert math.log10(cluster.inside.hop) < -5
