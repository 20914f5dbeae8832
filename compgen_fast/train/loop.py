"""The training loop: what happens in a step, and between steps.

    for each step:  micro-batches → forward → backward    (the engine averages gradients over ranks)
                    all finite? → optimiser, averaged weights → metrics, and now and then a checkpoint

A step is a pure function of the weights, (seed, step) and the samples, so a run can stop anywhere and go on, on any
number of ranks.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.profiler import record_function

from compgen_fast.draws import Draws
from compgen_fast.models.build import build
from compgen_fast.models.diagnosed import Diagnosed
from compgen_fast.models.ends_steps import EndsSteps
from compgen_fast.models.io import begin_with, export
from compgen_fast.models.replay import Replay
from compgen_fast.models.summary import training_flops
from compgen_fast.stream import Batch, ShardStream
from compgen_fast.train import data, engine
from compgen_fast.train.audit import AuditFailed, audit
from compgen_fast.train.checkpoints import CheckpointError, Checkpoints
from compgen_fast.train.config import TrainConfig, micro_batch
from compgen_fast.train.ema import Ema
from compgen_fast.train.guards import NotFinite, Spike, first_bad_layer, not_finite
from compgen_fast.train.metrics import Metrics
from compgen_fast.train.peak import measured_peak
from compgen_fast.train.ranks import Ranks
from compgen_fast.train.signals import Stop, Stopped
from compgen_fast.train.watch import Watch

# Seconds without progress before a rank counts as stalled, where it has reason to be slow.
STARTING, SAVING = 600.0, 600.0
# Raised on all ranks alike, at the same point of the run.
SHARED_FAILURES = (AuditFailed, CheckpointError, NotFinite)


class Trainer:
    """A run on this rank: model, engine, stream, and how many steps are done. `train` runs it, of the other parts."""

    def __init__(self, config: TrainConfig, ranks: Ranks, quiet: bool = False) -> None:
        self.config, self.ranks = config, ranks
        folders = data.shards(config, ranks)
        data.check_fit(config, folders.train)
        self.stream = data.open_stream(config, folders.train, ranks)
        self.validation: ShardStream | None = None
        if folders.validation is not None:
            data.check_fit(config, folders.validation)
            self.validation = data.open_validation(config, folders.validation, ranks)
        torch.manual_seed(config.seed)
        self.model: nn.Module = build(config.model, self.stream.schema.factors)
        if config.start is not None:
            begin_with(self.model, config.start)
        if isinstance(self.model, Replay):
            self.model.fill(data.in_order(config, folders.train))
        self.engine = engine.start(self.model, config, ranks)
        self.ema = Ema(self.model, config.optimiser.ema)
        self.checkpoints = Checkpoints(config.out / "checkpoints", config.checkpoint.keep, ranks)
        self.console = Console(stderr=True, quiet=quiet or not ranks.first)
        self.step = 0
        self.rate = self.grad_norm = math.nan  # of the last step, as are its samples' keys
        self.keys: tuple[str, ...] = ()
        self._images: Tensor | None = None  # of the last micro-batch
        self._faulty = False
        self.beat: Callable[..., None] = lambda *phase: None
        self.told: Callable[[int], None] = lambda steps: None  # is told how many steps are done
        self.waiting: Callable[[], AbstractContextManager[None]] = nullcontext
        self._batches: Iterator[Batch] | None = None

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, *_: object) -> None:
        self.stream.close()

    def resume(self) -> None:
        """Goes on from the newest whole checkpoint, if there is one."""
        newest = self.checkpoints.latest()
        if newest is None:
            return
        loaded = self.checkpoints.load(self.engine, newest)
        self.ema.load_state_dict(loaded.tensors)
        self.stream.load_state_dict(loaded.extra["stream"])
        self.step, self._batches = loaded.step, None
        self.console.print(f"going on after step {self.step}, from {newest}", soft_wrap=True, highlight=False)

    def train(self) -> None:
        """Runs to the last step, or to a signal that asks to stop: `Stopped`. Both leave a checkpoint and weights."""
        shared: Exception | None = None
        metrics = self._metrics()
        self.ranks.barrier()  # a signal before ends ranks, one after is kept by all of them: no rank is left alone
        with ExitStack() as around:
            stop = around.enter_context(Stop())
            watch = around.enter_context(Watch(self.ranks, self.config.guard.stall))
            around.enter_context(metrics)
            self.beat, self.waiting = watch.beat, metrics.waiting
            try:
                with watch.allowing(STARTING):
                    self._audit()
                self._steps(stop, watch, metrics)
                with watch.allowing(SAVING):
                    self.export()
            except SHARED_FAILURES as failure:
                shared = failure  # ranks leave the watch in good order: nobody is missing
        if shared is not None:
            raise shared
        self.console.print(metrics.summary())
        if stop.signal is not None and self.step < self.config.steps:
            self.console.print(f"stopped by {stop.signal.name} after step {self.step}; --resume goes on from there")
            raise Stopped(stop.signal)

    def _steps(self, stop: Stop, watch: Watch, metrics: Metrics) -> None:
        spike = Spike(factor=self.config.guard.spike) if self.config.guard.spike else None
        first = self.step
        while self.step < self.config.steps and stop.signal is None:
            number = self.step
            # The first step compiles and fills caches; the second shows how long steps take here.
            with watch.allowing(STARTING, learning=number > first) if number < first + 2 else nullcontext():
                losses = self.step_once()
            agreed = stop.agree(self.ranks, loss=losses["loss"])
            last = stop.signal is not None or self.step == self.config.steps
            saving = last or self.step % self.config.checkpoint.every == 0
            found: dict[str, Tensor] = {}
            with watch.allowing(SAVING) if saving else nullcontext():
                if saving:
                    found = self.diagnose()
                    losses |= self.validate() | found
                # Before the checkpoint: a run killed between the two goes on before this line and writes it again.
                metrics.log(number, losses, self.rate, self.grad_norm, self.stream.position / self.stream.samples)
                if saving:
                    self.save(losses)
            self.told(self.step)
            self._judge(found)
            if spike and (warning := spike.see(number, agreed["loss"], self.keys)):
                self.console.print(warning, style="yellow", soft_wrap=True, highlight=False)

    def step_once(self) -> dict[str, Tensor]:
        """One optimiser step on the next ``batch_size`` images; this rank's means of the named losses."""
        self.rate = engine.learning_rate(self.config.optimiser, self.step, self.config.steps)
        engine.set_learning_rate(self.engine, self.rate)
        batches: list[Batch] = []
        sums: dict[str, Tensor] = {}
        for micro in range(self.config.accumulation):
            self.beat("data", self.step)
            with record_function("data"):
                batches.append(self._next())
            self.beat("forward")
            with record_function("forward"):
                losses = self.losses(self.engine, batches[-1], micro)
            self.beat("backward")
            with record_function("backward"):
                self.engine.backward(losses["loss"])
            sums = {name: sums.get(name, 0) + value.detach() for name, value in losses.items()}
            if micro < self.config.accumulation - 1:
                self.engine.step()  # only counts: the optimiser waits for the last micro-batch
        means = {name: total / self.config.accumulation for name, total in sums.items()}
        self.keys, self._images = tuple(key for batch in batches for key in batch.keys), batches[-1].images
        self.beat("optimiser")
        with record_function("optimiser"):
            self._take(means, batches)
            self.ema.update(self.model)
            if isinstance(self.model, EndsSteps):
                self.model.end_step(self.ranks.total)
        self.step += 1
        return means

    def losses(self, model: Any, batch: Batch, micro: int) -> dict[str, Tensor]:
        """The named losses of a micro-batch. Its draws are those of its rows in the whole batch of this step."""
        rows = micro_batch(self.config, self.ranks.size)
        first = (micro * self.ranks.size + self.ranks.rank) * rows
        draws = Draws.at(
            self.config.seed, self.step, first=first, total=self.config.batch_size, device=self.ranks.device
        )
        losses: dict[str, Tensor] = model(batch.images, batch.factors, step=self.step, draws=draws)
        return losses

    def _next(self) -> Batch:
        if self._batches is None:
            self._batches = iter(self.stream)
        with self.waiting():
            return next(self._batches)

    def _take(self, losses: dict[str, Tensor], batches: Sequence[Batch]) -> None:
        """The optimiser's step, unless the gradient is not finite. It is the same on all ranks, so they agree.

        ZeRO looks at the gradient itself and leaves such a step out; stage 0 does not.
        """
        spread = self.config.zero_stage > 0
        if not spread:
            gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
            self.grad_norm = float(get_total_norm(gradients))
        if spread or math.isfinite(self.grad_norm):
            self.engine.step()
        if spread:
            self.grad_norm = float(self.engine.get_global_grad_norm())
        if not math.isfinite(self.grad_norm):
            self._refuse(losses, batches)

    def _refuse(self, losses: dict[str, Tensor], batches: Sequence[Batch]) -> None:
        bad = not_finite({f"loss term {name!r}": float(value) for name, value in losses.items()})
        layers = (
            first_bad_layer(self.model, lambda: self.losses(self.model, batch, micro))  # noqa: B023 called at once
            for micro, batch in enumerate(batches)
        )
        found = self.ranks.gather((bad, next((layer for layer in layers if layer), None)))
        what = next((bad for bad, _ in found if bad), f"the gradient's norm is {self.grad_norm}")
        raise NotFinite(self.step, what, [layer for _, layer in found], self.checkpoints.latest())

    def save(self, losses: Mapping[str, Tensor]) -> None:
        """A checkpoint, rated by the validation loss, or by this step's where there is no validation data."""
        rated = losses.get("validation_loss", losses["loss"])
        metric = self.ranks.mean({"metric": rated})["metric"]
        extra = {"stream": self.stream.state_dict(), "ranks": self.ranks.size, "zero_stage": self.config.zero_stage}
        self.checkpoints.save(self.engine, self.step, extra, metric, self.ema.state_dict())

    @torch.no_grad()
    def validate(self) -> dict[str, Tensor]:
        """This rank's mean losses on its share of the validation images, by the averaged weights.

        The draws are the same every time, and the losses are weighted as they are at the end of training, so that
        values of different steps can be compared.
        """
        if self.validation is None:
            return {}
        sums: dict[str, Tensor] = {}
        batches = 0
        self.model.eval()
        self.validation.seek(0)
        with self.ema.applied(self.model):
            for batch in self.validation:
                self.beat("validation")
                first = self.ranks.rank * len(batch.images)
                draws = Draws.at(
                    self.config.seed, ~batches, first=first, total=self.validation.batch_size, device=self.ranks.device
                )
                losses = self.model(batch.images, batch.factors, step=self.config.steps, draws=draws)
                sums = {name: sums.get(name, 0) + value for name, value in losses.items()}
                batches += 1
        self.model.train()
        return {f"validation_{name}": total / batches for name, total in sums.items()}

    @torch.no_grad()
    def diagnose(self) -> dict[str, Tensor]:
        """What the losses do not tell, by the averaged weights on a batch of validation images, or of training images
        where there are none.
        """
        images = self._images if self.validation is None else _first(self.validation).images
        if images is None or not isinstance(self.model, Diagnosed):
            return {}
        first, total = self.ranks.rank * len(images), self.ranks.size * len(images)
        self.model.eval()
        with self.ema.applied(self.model):
            draws = Draws.at(self.config.seed, ~0, first=first, total=total, device=self.ranks.device)
            found = self.model.diagnose(images, draws)
        self.model.train()
        return found

    def _judge(self, found: Mapping[str, Tensor]) -> None:
        """Says, once when it begins, what a `diagnose` finds wrong."""
        if not found or not isinstance(self.model, Diagnosed):
            return
        if self.step > self.model.warmed_after or self.step == self.config.steps:
            fault = self.model.fault(self.ranks.mean(found))
            if fault and not self._faulty:
                self.console.print(f"step {self.step}: {fault}", style="yellow", soft_wrap=True, highlight=False)
            self._faulty = fault is not None

    def export(self) -> None:
        """The averaged weights with their settings, for inference: out/weights."""
        with self.ema.applied(self.model):
            if self.ranks.first:
                export(
                    self.model.state_dict(),
                    self.config.model,
                    self.config.out / "weights",
                    self.stream.schema.factors,
                )
        self.ranks.barrier()

    def _audit(self) -> None:
        """On several ranks, before the first step: do they together compute what one process would?"""
        if self.step > 0 or self.ranks.size == 1 or self.config.guard.skip_audit:
            return
        start = self.stream.state_dict()
        batch = self._next()
        audit(
            self.engine,
            self.ranks,
            batch.images,
            batch.factors,
            [key for key, valid in zip(batch.keys, batch.valid.tolist(), strict=True) if valid],
            lambda first, total: Draws.at(self.config.seed, 0, first=first, total=total, device=self.ranks.device),
            step=self.config.steps,
        )
        self.stream.load_state_dict(start)
        self._batches = None

    def _metrics(self) -> Metrics:
        config, first = self.config, self.ranks.first  # only the first rank tells, so only it counts and measures
        dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
        return Metrics(
            config.out,
            steps=config.steps,
            batch_size=config.batch_size,
            flops_per_image=training_flops(self.model, config.model.image_size) if first else 0,
            peak=measured_peak(self.ranks.device, dtype, torch.get_num_threads()) if first else None,
            first_step=self.step,
            ranks=self.ranks,
            every=config.log_every,
            console=self.console,
        )


def _first(stream: ShardStream) -> Batch:
    stream.seek(0)
    return next(iter(stream))
