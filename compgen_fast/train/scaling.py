"""What many GPUs would do with a recipe: a model on paper, from formulas and nominal figures (docs/scaling.md).

    step = compute + messages that nothing hides          compute = FLOPs ÷ (peak × assumed utilisation)

The batch per GPU is kept (weak scaling), so compute is the same for any number of GPUs, and efficiency is compute ÷
step. The messages are those that DeepSpeed 0.19 sends in fp32 mode, which is not always what ZeRO's papers say.

Nothing here was measured on a GPU, and every row says so. The one machine whose figures are measured is the CPU it runs
on: `calibrate_cpu` times its parts and predicts a step of two ranks from them, which `cgf bench` compares with one.
"""

import math
import pickle
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path
from threading import BrokenBarrierError
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from rich.console import Console, Group
from rich.text import Text

from compgen_fast.exits import STOPS
from compgen_fast.tables import Sheet

if TYPE_CHECKING:  # models take seconds to import, and the processes of a calibration do not need them
    from compgen_fast.train.config import TrainConfig

Kind = Literal["all_reduce", "all_gather"]
Precision = Literal["fp32", "bf16"]
STAGES = (0, 1, 2)

FP32 = 4  # bytes: parameters, gradients and messages are fp32, also where the forward pass runs in bf16
BUCKET = 500_000_000  # DeepSpeed's reduce_bucket_size when nobody sets it, in elements
BACKWARD = 2 / 3  # of a step's FLOPs: two products back for one forth
UTILISATION = 0.3
WAIT_SECONDS = 300.0


@dataclass(frozen=True)
class Link:
    """A wire as a GPU sees it."""

    bandwidth: float
    """Bytes per second that one GPU can send while all others send too."""
    hop: float
    """Seconds from one GPU to the next, for a message of no size."""


@dataclass(frozen=True)
class Cluster:
    """Nodes of ``per_node`` GPUs: ``inside`` a node, ``between`` nodes."""

    name: str
    fp32: float
    """FLOP/s of a GPU at most."""
    bf16: float
    per_node: int
    inside: Link
    between: Link
    start: float = 15e-6
    """Seconds to start any collective."""
    achieved: float = 0.8
    """Of the nominal bandwidth, by a large message."""

    def nodes(self, gpus: int) -> int:
        if gpus > self.per_node and gpus % self.per_node:
            raise ValueError(
                f"{self.name}: {gpus} GPUs on nodes of {self.per_node}; expected at most {self.per_node}, or a multiple"
            )
        return max(1, gpus // self.per_node)

    def sent(self, kind: Kind, size: float, gpus: int) -> tuple[float, float]:
        """Bytes that one GPU sends inside its node and to other nodes, for a message of ``size`` bytes.

        With g GPUs in each of m nodes: an all-gather needs (g−1)/g · size inside and 1/g · (m−1)/m · size between. An
        all-reduce is a reduce-scatter and an all-gather, twice that. The sum is the ring's (n−1)/n · size, or twice.
        """
        nodes = self.nodes(gpus)
        local = gpus // nodes
        passes = 2 if kind == "all_reduce" else 1
        return passes * size * (local - 1) / local, passes * size * (nodes - 1) / (nodes * local)

    def seconds(self, kind: Kind, size: float, gpus: int) -> float:
        """Of one message. Nodes meet in a tree for an all-reduce; an all-gather goes around the whole ring."""
        if gpus == 1:
            return 0.0
        nodes = self.nodes(gpus)
        inside, between = self.sent(kind, size, gpus)
        transfer = (inside / self.inside.bandwidth + between / self.between.bandwidth) / self.achieved
        if kind == "all_reduce":
            hops = 2 * (gpus // nodes - 1) * self.inside.hop + 2 * math.ceil(math.log2(nodes)) * self.between.hop
        else:
            hops = (gpus - nodes) * self.inside.hop + (nodes - 1) * self.between.hop
        return self.start + hops + transfer


# Vendor nominal: dense FLOP/s, half of the two-way NVLink or Infinity Fabric figure, one network port per GPU, or one
# for the node. Hops, the start and the achieved share are assumptions, of the size that NCCL assumes when it tunes.
_NVLINK, _INFINIBAND, _ETHERNET = 2e-6, 5e-6, 20e-6
CLUSTERS = {
    cluster.name: cluster
    for cluster in (
        # 8 × H100 SXM, NVLink 4 (900 GB/s two-way), 8 ports of 400 Gb/s NDR InfiniBand
        Cluster("h100-infiniband", 67e12, 989e12, 8, Link(450e9, _NVLINK), Link(50e9, _INFINIBAND)),
        # the same, with one port of 100 Gb/s Ethernet per node
        Cluster("h100-ethernet", 67e12, 989e12, 8, Link(450e9, _NVLINK), Link(12.5e9 / 8, _ETHERNET)),
        # 8 × A100 SXM, NVLink 3 (600 GB/s two-way), 8 ports of 200 Gb/s HDR InfiniBand
        Cluster("a100-infiniband", 19.5e12, 312e12, 8, Link(300e9, _NVLINK), Link(25e9, _INFINIBAND)),
        # 8 × MI300X, Infinity Fabric (896 GB/s two-way), 8 ports of 400 Gb/s InfiniBand
        Cluster("mi300x-infiniband", 163.4e12, 1307e12, 8, Link(448e9, _NVLINK), Link(50e9, _INFINIBAND)),
    )
}


@dataclass(frozen=True)
class Message:
    """``count`` collectives per step of ``size`` bytes each; ``early`` ones can start before the backward pass ends."""

    kind: Kind
    size: float
    count: int
    early: bool = False


def messages(
    parameters: int, stage: int, *, micro_batches: int = 1, parameter_groups: int = 2, bucket: int = BUCKET
) -> list[Message]:
    """What DeepSpeed sends in one optimiser step, in fp32 mode with its own settings otherwise.

    Stage 0 all-reduces gradients. So do stages 1 and 2: DeepSpeed's "reduce-scatter" is an all-reduce of which each
    rank keeps its part (``use_multi_rank_bucket_allreduce``). They then all-gather the parameters, one message for each
    group of the optimiser. Stage 2 reduces after every micro-batch. Each adds the gradient's norm, a few bytes. Only
    stages 1 and 2 know a ``bucket``, and fill it as far as whole parameters go: there may be more messages than this.
    """
    buckets = math.ceil(parameters / (BUCKET if stage == 0 else bucket))
    reductions = micro_batches if stage == 2 else 1
    gradients = Message("all_reduce", FP32 * parameters / buckets, buckets * reductions, early=True)
    if stage == 0:
        return [gradients, Message("all_reduce", FP32, 1)]
    gathered = Message("all_gather", FP32 * parameters / parameter_groups, parameter_groups)
    return [gradients, Message("all_reduce", FP32, parameter_groups), gathered]


# Each step the loop asks all ranks for the loss, and of each signal whether it asked them to stop, in fp64.
LOOP = Message("all_reduce", 8 * (1 + len(STOPS)), 1)


@dataclass(frozen=True)
class ScaleInputs:
    """What is planned."""

    parameters: int
    """That are trained."""
    flops_per_image: float
    """Of a training step."""
    batch_per_gpu: int
    bytes_per_image: float
    """On disk."""
    gpus: tuple[int, ...] = (8, 16, 32, 64, 128, 256, 512, 1024)
    clusters: tuple[Cluster, ...] = tuple(CLUSTERS.values())
    stages: tuple[int, ...] = STAGES
    precision: Precision = "bf16"
    utilisation: float = UTILISATION
    """Share of the peak that a GPU reaches without any message: an assumption, to be replaced by a measurement."""
    micro_batches: int = 1
    parameter_groups: int = 2
    """Of the optimiser: with and without weight decay."""
    bucket: int = BUCKET
    """Gradients, in elements, that are reduced in one message."""
    overlap: bool = True
    """DeepSpeed's overlap_comm, which stage 0 does not have."""

    def __post_init__(self) -> None:
        for name in ("parameters", "flops_per_image", "batch_per_gpu", "micro_batches", "parameter_groups", "bucket"):
            if getattr(self, name) <= 0:
                raise ValueError(f"ScaleInputs: {name} is {getattr(self, name)}; expected more than 0")
        if not 0 < self.utilisation <= 1:
            raise ValueError(f"ScaleInputs: utilisation is {self.utilisation}; expected a share above 0, at most 1")
        if not set(self.stages) <= set(STAGES):
            raise ValueError(f"ScaleInputs: stages are {self.stages}; expected some of 0, 1 and 2")
        if min(self.gpus, default=0) < 1:
            raise ValueError(f"ScaleInputs: gpus are {self.gpus}; expected numbers of at least 1")


@dataclass(frozen=True)
class ScaleRow:
    """One cluster, one number of GPUs, one ZeRO stage; per step."""

    cluster: str
    gpus: int
    stage: int
    batch: int
    """Images of all GPUs together."""
    compute_seconds: float
    message_seconds: float
    """Of all messages, hidden or not."""
    hidden_seconds: float
    """Of the messages, behind the backward pass."""
    step_seconds: float
    efficiency: float
    images_per_second: float
    sent_inside: float
    """Bytes that one GPU sends inside its node."""
    sent_between: float
    """Bytes that one GPU sends to other nodes."""
    storage: float
    """Bytes per second that all GPUs together read."""
    basis: Literal["modelled"] = field(default="modelled")


def plan(inputs: ScaleInputs) -> list[ScaleRow]:
    """A row for each cluster, number of GPUs and stage. Modelled, all of it."""
    return [
        _row(inputs, cluster, gpus, stage)
        for cluster in inputs.clusters
        for gpus in inputs.gpus
        for stage in inputs.stages
    ]


def _row(inputs: ScaleInputs, cluster: Cluster, gpus: int, stage: int) -> ScaleRow:
    compute = inputs.batch_per_gpu * inputs.flops_per_image / (_peak(inputs, cluster) * inputs.utilisation)
    sends = [
        *messages(
            inputs.parameters, stage, micro_batches=inputs.micro_batches, parameter_groups=inputs.parameter_groups,
            bucket=inputs.bucket,
        ),
        LOOP,
    ]  # fmt: skip
    told = sum(message.count * cluster.seconds(message.kind, message.size, gpus) for message in sends)
    hidden = 0.0
    if inputs.overlap and stage > 0:
        hidden = sum(_hidden(inputs, cluster, gpus, compute, message) for message in sends if message.early)
    step = compute + told - hidden
    traffic = [(message.count, cluster.sent(message.kind, message.size, gpus)) for message in sends]
    images = gpus * inputs.batch_per_gpu / step
    return ScaleRow(
        cluster=cluster.name,
        gpus=gpus,
        stage=stage,
        batch=gpus * inputs.batch_per_gpu,
        compute_seconds=compute,
        message_seconds=told,
        hidden_seconds=hidden,
        step_seconds=step,
        efficiency=compute / step,
        images_per_second=images,
        sent_inside=sum(count * inside for count, (inside, _) in traffic),
        sent_between=sum(count * between for count, (_, between) in traffic),
        storage=images * inputs.bytes_per_image,
    )


def _hidden(inputs: ScaleInputs, cluster: Cluster, gpus: int, compute: float, message: Message) -> float:
    """Seconds of the gradients' messages that run while the backward pass goes on.

    DeepSpeed holds two buckets: one is filled while the other is sent. It waits for the message before it sends the
    next, and nothing hides the last. So a backward pass of k buckets takes fill + (k − 1) · max(fill, send) + send, and
    with one bucket, which is the default for less than half a billion parameters, nothing is hidden at all.
    """
    buckets = math.ceil(inputs.parameters / inputs.bucket)
    fill = BACKWARD * compute / inputs.micro_batches / buckets
    send = cluster.seconds(message.kind, message.size, gpus)
    return message.count / buckets * (buckets - 1) * min(fill, send)


def parse_gpus(text: str) -> tuple[int, ...]:
    """``"8..1024"``: 8, doubled up to 1024. ``"8,16,64"``: these."""
    first, dots, last = text.partition("..")
    try:
        numbers = [int(number) for number in ((first, last) if dots else text.split(","))]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1 or (dots and numbers[0] > numbers[1]):
        raise ValueError(f"gpus is {text!r}; expected a range by doubling, such as 8..1024, or a list, such as 8,16,64")
    if not dots:
        return tuple(numbers)
    return tuple(numbers[0] << power for power in range((numbers[1] // numbers[0]).bit_length()))


def inputs_of(config: "TrainConfig", gpus: tuple[int, ...]) -> ScaleInputs:
    """What a recipe gives: its model, its batch on each GPU, its precision, and what the engine sets in DeepSpeed."""
    from compgen_fast.models.summary import of_config
    from compgen_fast.train.data import factors
    from compgen_fast.train.engine import settings

    model = of_config(config.model, factors(config))
    zero = settings(replace(config, device="cuda"), 1)["zero_optimization"]
    return ScaleInputs(
        parameters=model.trainable,
        flops_per_image=model.step_flops,
        batch_per_gpu=config.batch_size,
        bytes_per_image=_bytes_on_disk(config),
        gpus=gpus,
        precision=config.precision,
        micro_batches=config.accumulation,
        bucket=int(zero.get("reduce_bucket_size", BUCKET)),
        overlap=bool(zero.get("overlap_comm", False)),
    )


def run(config: "TrainConfig", gpus: str) -> int:
    """`cgf scale-plan`: prints the plan of a recipe."""
    inputs = inputs_of(config, parse_gpus(gpus))
    Console().print(show(inputs, plan(inputs)))
    return 0


def show(inputs: ScaleInputs, rows: Iterable[ScaleRow]) -> Group:
    """A table per cluster, under what was assumed."""
    clusters = {cluster.name: cluster for cluster in inputs.clusters}
    assumed = (
        f"Modelled, not measured: no GPU was used. {inputs.batch_per_gpu} images on each GPU, storage that keeps up.\n"
        f"{inputs.parameters:,} trained parameters, {inputs.flops_per_image / 1e9:,.1f} GFLOP per image in a step, "
        f"{inputs.bytes_per_image / 1e3:,.1f} kB per image on disk.\n{_overlap_sentence(inputs)}"
    )
    by_cluster = groupby(rows, lambda row: row.cluster)
    return Group(Text(assumed), *(_table(inputs, clusters[name], list(group)) for name, group in by_cluster))


def _overlap_sentence(inputs: ScaleInputs) -> str:
    buckets = math.ceil(inputs.parameters / inputs.bucket)
    if not inputs.overlap:
        return "Messages are not sent during the backward pass (overlap_comm is off)."
    if buckets == 1:
        return (
            f"Gradients are one message: a bucket holds {inputs.bucket:,}. A smaller reduce_bucket_size would let "
            "stages 1 and 2 send during the backward pass."
        )
    return f"Stages 1 and 2 send gradients in {buckets} messages, all but the last during the backward pass."


def _table(inputs: ScaleInputs, cluster: Cluster, rows: Sequence[ScaleRow]) -> Sheet:
    title = (
        f"\n{cluster.name}, modelled: {1e3 * rows[0].compute_seconds:.2f} ms of compute at {inputs.utilisation:.0%} of "
        f"{_peak(inputs, cluster) / 1e12:,.0f} TFLOP/s {inputs.precision};\n"
        f"messages at {cluster.achieved:.0%} of {cluster.inside.bandwidth / 1e9:,.0f} GB/s in a node and "
        f"{cluster.between.bandwidth / 1e9:.3g} GB/s per GPU out of it"
    )
    table = Sheet(
        "GPUs", "ZeRO", "messages ms", "hidden ms", "step ms", "efficiency", "images/s", "sent in node MB",
        "sent out MB", "storage GB/s", words=(), keys=2, title=title,
    )  # fmt: skip
    for gpus, same in groupby(rows, lambda row: row.gpus):
        # Without micro-batches stages 1 and 2 send the same, and share a line.
        for cells, stages in groupby(same, _cells):
            table.add_row(f"{gpus}", ", ".join(f"{row.stage}" for row in stages), *cells)
        table.add_section()
    return table


def _cells(row: ScaleRow) -> tuple[str, ...]:
    seconds = (row.message_seconds, row.hidden_seconds, row.step_seconds)
    return (
        *(f"{1e3 * value:.2f}" for value in seconds), f"{row.efficiency:.1%}", f"{row.images_per_second:,.0f}",
        f"{row.sent_inside / 1e6:.1f}", f"{row.sent_between / 1e6:.1f}", f"{row.storage / 1e9:.3g}",
    )  # fmt: skip


def _peak(inputs: ScaleInputs, cluster: Cluster) -> float:
    return cluster.bf16 if inputs.precision == "bf16" else cluster.fp32


def _bytes_on_disk(config: "TrainConfig") -> float:
    """Per image, of the shards if they are here already; else of its colours without compression, which is more than
    they will be, also for tokens.
    """
    from compgen_fast.stream import manifest
    from compgen_fast.train.data import packed

    folder = packed(config)
    if folder is None:
        return 3.0 * config.model.image_size**2
    found = manifest.read(folder / manifest.FILE)
    return found.bytes / found.samples


@dataclass(frozen=True)
class Timed:
    """A kind of message between two processes, measured: seconds for nothing, and for each byte."""

    start: float
    per_byte: float

    def seconds(self, size: float) -> float:
        return self.start + size * self.per_byte


@dataclass(frozen=True)
class CpuCalibration:
    """Two single-threaded ranks on this machine: their parts, measured."""

    parameters: int
    step_alone: float
    """Seconds of a single rank's step, with the other core idle."""
    step_beside: float
    """The same with a second, independent process at it too, the slower of the two: ranks wait for the slowest."""
    all_reduce: Timed
    all_gather: Timed

    @property
    def contention(self) -> float:
        """What it costs to share caches and memory bandwidth with a second rank; 1 for nothing."""
        return self.step_beside / self.step_alone

    def predict(self, stage: int, *, bucket: int, micro_batches: int = 1, parameter_groups: int = 2) -> float:
        """Seconds of a step of two ranks, each with the batch of the single one. gloo hides nothing.

        Args: as of `messages`; the bucket is the engine's.
        """
        sends = messages(
            self.parameters, stage, micro_batches=micro_batches, parameter_groups=parameter_groups, bucket=bucket
        )
        timed = {"all_reduce": self.all_reduce, "all_gather": self.all_gather}
        return self.step_beside + sum(each.count * timed[each.kind].seconds(each.size) for each in (*sends, LOOP))


Step = Callable[[], object]


def calibrate_cpu(make_step: Callable[[], Step], parameters: int, *, steps: int = 20) -> CpuCalibration:
    """Times one rank's step alone and beside another one, and gloo's messages between two processes.

    Args:
        make_step: builds a single rank's training in a fresh process and returns what runs one step of it. A function
            of a module, or `functools.partial` of one: it is sent to another process by its name.
        parameters: that are trained; messages are timed at their size.
        steps: timed each way, in turns, so that a slow moment of the machine hits both.
    """
    if steps < 1 or parameters < 1:
        raise ValueError(f"calibrate_cpu: steps={steps}, parameters={parameters}; expected at least 1 of each")
    try:
        pickle.dumps(make_step)
    except Exception as error:
        raise ValueError(
            f"calibrate_cpu: make_step cannot be sent to another process ({error}); expected a function that a module "
            "defines, or functools.partial of one"
        ) from None
    (alone, first), (_, second) = _in_two_processes(_time_steps, make_step, steps)
    with tempfile.TemporaryDirectory() as folder:
        reduced, gathered = _in_two_processes(_time_messages, str(Path(folder) / "store"), FP32 * parameters)[0]
    together = [max(pair) for pair in zip(first, second, strict=True)]
    return CpuCalibration(parameters, statistics.median(alone), statistics.median(together), reduced, gathered)


def _in_two_processes(work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """``work(rank, barrier, *arguments)`` in two fresh processes at once; what each returned, or its own error."""
    context = get_context("spawn")
    with ProcessPoolExecutor(2, context, _keep_barrier, (context.Barrier(2),)) as pool:
        futures = [pool.submit(_with_barrier, work, rank, arguments) for rank in range(2)]
        errors = [future.exception() for future in futures]
    for error in sorted(filter(None, errors), key=lambda error: isinstance(error, BrokenBarrierError)):
        raise error  # a broken barrier only tells that the other process has failed
    return [future.result() for future in futures]


_barrier: Any = None


def _keep_barrier(barrier: Any) -> None:
    """A barrier reaches a process only at its start."""
    global _barrier
    _barrier = barrier


def _with_barrier(work: Callable[..., Any], rank: int, arguments: tuple[Any, ...]) -> Any:
    torch.set_num_threads(1)
    try:
        return work(rank, _barrier, *arguments)
    except BaseException:
        _barrier.abort()  # or the other process waits for this one
        raise


def _time_steps(rank: int, barrier: Any, make_step: Callable[[], Step], steps: int) -> tuple[list[float], list[float]]:
    """Seconds of steps alone (rank 0 only) and of steps that both ranks begin together, as training does."""
    step = make_step()
    for _ in range(3):
        step()
    alone, beside = [], []
    for _ in range(steps):
        barrier.wait(WAIT_SECONDS)
        if rank == 0:
            alone.append(_seconds(step))
        barrier.wait(WAIT_SECONDS)
        beside.append(_seconds(step))
    return alone, beside


def _time_messages(rank: int, barrier: Any, store: str, size: int) -> tuple[Timed, Timed]:
    """gloo between two processes: messages of a few bytes, and of ``size``."""
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=2)

    def seconds(kind: Kind, elements: int) -> float:
        part = torch.ones(math.ceil(elements / 2))
        whole = torch.ones(2 * len(part))
        send = {"all_reduce": lambda: dist.all_reduce(whole), "all_gather": lambda: dist.all_gather_single(whole, part)}
        times = []
        for _ in range(13):
            barrier.wait(WAIT_SECONDS)
            times.append(_seconds(send[kind]))
        return statistics.median(times[3:])

    found = []
    for kind in ("all_reduce", "all_gather"):
        start = seconds(kind, 1)
        found.append(Timed(start, max(0.0, seconds(kind, size // FP32) - start) / size))
    dist.destroy_process_group()
    return found[0], found[1]


def _seconds(run: Step) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started
