"""The suite `train`: a slot VAE's training step beside plain torch's, what DeepSpeed's engine adds, and what a second
rank brings.

1. Steps with each penalty: forward, penalty and backward, ours against the same model in eager torch (`train_peers`).
2. The engine: whole steps against plain torch on one rank, and against DDP on two (`train_ranks`).
3. Two ranks against one, with the same batch on each; and what `compgen_fast.train.scaling` predicts.

All of it becomes rows of `harness.Row`. Parts 2 and 3 are about gloo on a CPU, one thread to a rank: with ``--device
cuda`` there is only part 1.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import cast

import torch
from rich.console import Console
from rich.text import Text

from compgen_fast.bench import report, train_ranks
from compgen_fast.bench.harness import Row, Stamp, measure, percentiles, sentence
from compgen_fast.bench.ops.common import backend_of
from compgen_fast.bench.suite import GREEN, IMPOSSIBLE, RED, RESULTS, stamp
from compgen_fast.bench.train_peers import StepSize, case
from compgen_fast.bench.train_ranks import Found, engine_name, plain_name
from compgen_fast.models.config import Penalty, SlotVAEConfig
from compgen_fast.models.summary import training_flops
from compgen_fast.progress import following
from compgen_fast.recipes import slot_vae_cpu, slot_vae_reference
from compgen_fast.tables import Sheet
from compgen_fast.train.config import TrainConfig
from compgen_fast.train.peak import measured_peak

PENALTIES: tuple[tuple[Penalty, int], ...] = (("none", 1), ("attention", 1), ("hessian", 1), ("hessian", 8))
"""And on which part of the pixels."""
# Distance of the engine's weights from plain torch's, as a share of the way those have come. Rounding makes 1e-4 at
# most; ranks that keep their gradients to themselves make about 1.
MOST_DRIFT = 0.01
# What the suite was asked to show: times faster than eager, and the engine's cost on one rank. A look, not a gate.
WANTED_RATIO: dict[tuple[Penalty, int], float] = {("attention", 1): 1.3, ("hessian", 1): 2.5}
WANTED_OVERHEAD = 0.15
MODELLED = "1 rank, modelled"


@dataclass(frozen=True)
class Effort:
    mode: str
    seconds: float
    """Of timing for each size of a step, all contenders together. Checking and compiling come on top."""
    rounds: int
    """Of the engines, on one rank and on two."""
    predicted: tuple[int, ...]
    """ZeRO stages whose two ranks are predicted; each needs processes of its own."""
    calibration_steps: int


QUICK = Effort("quick", seconds=2.5, rounds=6, predicted=(0,), calibration_steps=5)
FULL = Effort("full", seconds=15.0, rounds=20, predicted=train_ranks.STAGES, calibration_steps=15)


def quick_sizes() -> list[StepSize]:
    """Small batches, without torch.compile and contrast, which are slow."""
    return [*demo_sizes(batch=8), reference_size(64, 1, "attention")]


def sizes() -> list[StepSize]:
    demo = [replace(size, compiled=size.part == 1) for size in demo_sizes(slot_vae_cpu().batch_size)]
    small = [replace(reference_size(64, 2, *each), compiled=each == ("attention", 1)) for each in PENALTIES]
    return [
        *demo,
        contrast_size(),
        *small,
        reference_size(128, 1, "attention"),
        reference_size(128, 1, "hessian", 8),
    ]


def demo_sizes(batch: int) -> list[StepSize]:
    """The model of slot_vae_cpu."""
    model = cast(SlotVAEConfig, slot_vae_cpu().model)
    return [StepSize("demo", model, batch, *each) for each in PENALTIES]


def contrast_size() -> StepSize:
    """One image and narrow slots: contrast takes a derivative for every number of every slot."""
    model = replace(cast(SlotVAEConfig, slot_vae_cpu().model), slot_dim=8)
    return StepSize("demo with slots of 8", model, 1, "contrast")


def reference_size(side: int, batch: int, penalty: Penalty, part: int = 1) -> StepSize:
    """The papers' decoder on images of another size."""
    model = replace(cast(SlotVAEConfig, slot_vae_reference().model), image_size=side)
    return StepSize("reference", model, batch, penalty, part)


def run(quick: bool = False, threads: int = 1, json: str | None = None, device: str = "cpu") -> int:
    """Measures everything and writes what was found. Returns 0, 1 if a gate is red, 2 if the device is not there."""
    if device == "cuda" and not torch.cuda.is_available():
        print("--device cuda: torch sees no CUDA or ROCm device here; leave it out to run on the CPU", file=sys.stderr)
        return IMPOSSIBLE
    RESULTS.mkdir(exist_ok=True)
    effort = QUICK if quick else FULL
    people = Console(stderr=json == "-", highlight=False)
    stamped = stamp(threads, effort.mode, device)
    rows = measure_steps(quick_sizes() if quick else sizes(), effort, stamped, device, people)
    report.draw(rows, RESULTS / "train.png")
    if device == "cpu":
        rows += measure_ranks(slot_vae_cpu(), effort, replace(stamped, threads=1), people)
    report.write(rows, RESULTS / "train.csv", json, people, f", chart in {RESULTS / 'train.png'}")
    return RED if any(row.gate for row in rows) else GREEN


# --------------------------------------------------------------------------------------------------- steps


def measure_steps(steps: Sequence[StepSize], effort: Effort, stamped: Stamp, device: str, people: Console) -> list[Row]:
    """Every size's rows; and how much of the machine's peak our steps use, which is measured before and after them,
    since a busy moment would flatter us.
    """
    peaks = [measured_peak(device, torch.float32, stamped.threads)]
    found: list[list[Row]] = []
    with following("measure", len(steps), "sizes") as advance:
        for size in steps:
            advance(0, f"{size}: check, compile, measure")
            found.append(measure(case(size, device), effort.seconds, stamped))
            people.print(report.table(str(size), found[-1]))
            advance()
    peaks.append(measured_peak(device, torch.float32, stamped.threads))
    people.print(report.LEGEND, style="dim")
    people.print(speed_table(steps, found, max(peaks)))
    return [row for rows in found for row in rows]


def speed_table(steps: Sequence[StepSize], found: Sequence[Sequence[Row]], peak: float) -> Sheet:
    """Our steps per second, and what share of ``peak`` (FLOP/s) that is."""
    title = f"ours, forward, penalty and backward; peak {peak / 1e9:,.0f} GFLOP/s, measured"
    table = Sheet("step", "steps/s", "images/s", "GFLOP", "of peak", "eager ÷ ours", title=title)
    for size, rows in zip(steps, found, strict=True):
        eager = next(row for row in rows if row.direction == "full" and row.peer == "eager")
        if eager.ratio is None or eager.our_ms is None:
            table.add_row(str(size), Text("gate", "bold red"), "", "", "", "")
            continue
        rate, flops = 1e3 / eager.our_ms, step_flops(size)
        good = eager.ratio >= WANTED_RATIO.get((size.penalty, size.part), 1.0)
        table.add_row(
            str(size),
            f"{rate:.2f}",
            f"{rate * size.batch:.1f}",
            f"{flops / 1e9:.2f}",
            f"{flops * rate / peak:.0%}",
            _verdict(f"{eager.ratio:.2f}×", good),
        )
    wanted = (f"{penalty} ≥ {ratio}×" for (penalty, _), ratio in WANTED_RATIO.items())
    table.caption = f"wanted: {', '.join(wanted)} on all pixels"
    return table


def step_flops(size: StepSize) -> int:
    """Of a whole batch."""
    return size.batch * training_flops(size.build(), size.model.image_size, size.batch)


# ------------------------------------------------------------------------------------------- engine and ranks


def measure_ranks(recipe: TrainConfig, effort: Effort, stamped: Stamp, people: Console) -> list[Row]:
    """The engine against plain torch and DDP, and two ranks against one."""
    name = f"{recipe.model.image_size} px, batch {recipe.batch_size} per rank"
    try:
        with following("measure", 1, "recipe") as advance:
            advance(0, "engines on one rank and on two")
            jobs = train_ranks.measure(recipe, effort.rounds)
    except RuntimeError as error:
        failed = row(f"engine, {name}", plain_name(1), (), (), stamped, gate=f"gate: {sentence(error)}")
        people.print(failed.gate, style="bold red")
        return [failed]
    engines = [made for job in jobs for made in engine_rows(name, job, stamped)]
    people.print(engine_table(name, engines))
    scaled = [made for stage in train_ranks.STAGES for made in scaling_rows(name, recipe, stage, jobs, effort, stamped)]
    people.print(scaling_table(name, scaled))
    return engines + scaled


def engine_rows(name: str, job: Found, stamped: Stamp) -> list[Row]:
    """Each ZeRO stage against what trains without DeepSpeed on as many ranks."""
    peer = plain_name(job.ranks)
    return [
        row(
            f"engine, {name}, {engine_name(stage)} on {_ranks(job.ranks)}",
            peer,
            job.ms[engine_name(stage)],
            job.ms[peer],
            stamped,
            error=job.drift[engine_name(stage)],
            gate=drift_gate(job, stage),
        )
        for stage in train_ranks.STAGES
    ]


def drift_gate(job: Found, stage: int) -> str:
    """Why a stage's times must not be shown, or an empty string."""
    drift = job.drift[engine_name(stage)]
    if drift <= MOST_DRIFT:
        return ""
    return f"gate: weights are {drift:.1e} of their way apart from {plain_name(job.ranks)}'s; expected {MOST_DRIFT:.0e}"


def scaling_rows(
    name: str, recipe: TrainConfig, stage: int, jobs: tuple[Found, Found], effort: Effort, stamped: Stamp
) -> list[Row]:
    """A step of two ranks against a step of one: measured, and predicted. The ratio is the efficiency."""
    title, engine = f"weak scaling, {name}, {engine_name(stage)} on 2 ranks", engine_name(stage)
    one, two = jobs
    gate = drift_gate(one, stage) or drift_gate(two, stage)
    rows = [row(title, "1 rank", two.ms[engine], one.ms[engine], stamped, error=two.drift[engine], gate=gate)]
    if stage not in effort.predicted or gate:
        return rows
    try:
        with following("measure", 1, "prediction") as advance:
            advance(0, f"the parts of a step at {engine}")
            alone, predicted = train_ranks.predict(recipe, stage, effort.calibration_steps)
    except Exception as error:  # the measurement stands without its prediction
        return [*rows, row(title, MODELLED, (), (), stamped, unsupported=sentence(error))]
    return [*rows, row(title, MODELLED, [1e3 * predicted], [1e3 * alone], stamped)]


def row(
    name: str,
    peer: str,
    our_ms: Sequence[float],
    peer_ms: Sequence[float],
    stamped: Stamp,
    *,
    error: float | None = None,
    gate: str = "",
    unsupported: str = "",
) -> Row:
    """Times of the same rounds as a row of the harness."""
    ratios = [] if gate else [theirs / mine for theirs, mine in zip(peer_ms, our_ms, strict=True)]
    low, middle, high = percentiles(ratios)
    peer_low, peer_middle, peer_high = percentiles(peer_ms if ratios else ())
    return Row(
        suite="train",
        case=name,
        direction="full",
        peer=peer,
        ratio=middle,
        ratio_low=low,
        ratio_high=high,
        peak_ratio=None,
        error=error,
        dtype="float32",
        device="cpu",
        does_less=None,
        unsupported=unsupported or None,
        gate=gate or None,
        rounds=len(ratios),
        our_ms=percentiles(our_ms if ratios else ())[1],
        peer_ms_low=peer_low,
        peer_ms=peer_middle,
        peer_ms_high=peer_high,
        peer_error=None,
        our_peak=None,
        peer_peak=None,
        peak_over_io=None,
        backend=backend_of("slot_cross_attention", "cpu"),
        **asdict(stamped),
    )


KEYS = ("engine", "against")


def engine_table(name: str, rows: Sequence[Row]) -> Sheet:
    """What the engine costs over its peer, as a share of the peer's time."""
    title = f"whole steps by DeepSpeed's engine, {name}"
    table = Sheet(*KEYS, "ours ms", "peer ms", "cost", "20–80 %", words=KEYS, title=title)
    for each in rows:
        if each.ratio is None or each.ratio_low is None or each.ratio_high is None:
            table.add_row(_engine_of(each), each.peer, *report.MISSING)
            continue
        cost, low, high = (1 / ratio - 1 for ratio in (each.ratio, each.ratio_high, each.ratio_low))
        good = each.peer != plain_name(1) or cost <= WANTED_OVERHEAD
        numbers = (f"{each.our_ms:.1f}", f"{each.peer_ms:.1f}", _verdict(f"{cost:+.1%}", good))
        table.add_row(_engine_of(each), each.peer, *numbers, f"{low:+.1%} – {high:+.1%}")
    table.caption = "\n".join([*report.reasons(rows), f"wanted on one rank: at most +{WANTED_OVERHEAD:.0%}"])
    return table


def scaling_table(name: str, rows: Sequence[Row]) -> Sheet:
    """Two ranks against one, measured and modelled."""
    title = f"two ranks against one, {name}"
    table = Sheet(*KEYS, "2 ranks ms", "1 rank ms", "efficiency", "20–80 %", words=KEYS, title=title)
    for each in rows:
        if each.ratio is None:
            table.add_row(_engine_of(each), each.peer, *report.MISSING)
            continue
        spread = "" if each.peer == MODELLED else f"{each.ratio_low:.0%} – {each.ratio_high:.0%}"
        numbers = (f"{each.our_ms:.1f}", f"{each.peer_ms:.1f}", f"{each.ratio:.1%}")
        table.add_row(_engine_of(each), each.peer, *numbers, spread)
    modelled = "modelled: the engine's step beside a second process, and gloo's messages, each timed by itself"
    table.caption = "\n".join([*report.reasons(rows), modelled])
    return table


def _engine_of(each: Row) -> str:
    """The last part of the case's name, where the table's title has the others."""
    return each.case.rsplit(", ", 1)[-1]


def _verdict(text: str, good: bool) -> Text:
    return Text(text, style="bold green" if good else "bold red")


def _ranks(count: int) -> str:
    return f"{count} rank{'s' if count > 1 else ''}"
