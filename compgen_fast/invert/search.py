"""Latents that explain images, found by gradient steps on the reconstruction error of a frozen decoder.

    z* = argmin_z ‖x − f(z)‖² + pull · ½ Mahalanobis²(z)        from z⁰ = the encoder's latents, or from several starts

Many images are searched at once. What makes it cheap: steps look at some of the pixels only, others at every step, and
get smaller, so that their gradients average to that of the image; a long search ends with more pixels, up to all of
them. Of several starts the better half is kept, again and again. And candidates that no longer improve are dropped from
the batch.

Some pixels are held out: no gradient ever comes from them. Every few steps they judge which starts to keep, and when a
candidate has gone astray or is done: it goes back to where they saw the least error, slows down, and at last gives up.
All candidates look at the same pixels, which the seed alone tells, so an image's result does not depend on the images
beside it.

What it is not for: decoders whose pixels depend on each other are searched rightly, but gain nothing from subsets. And
error is all it knows: whether the latents found mean the right thing is the study's question.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor, nn

from compgen_fast.draws import Draws
from compgen_fast.invert.marginals import SlotMarginals
from compgen_fast.jets.penalty import Decoder
from compgen_fast.ops import Latents, latent_adam, recon_error

FEWEST = 256  # pixels of the first steps: things are small, and a few dozen pixels would miss them
SMALL = 32 * 32  # pixels of an image up to which half are looked at: much of the work is in the slots there
GROWTH = 4  # pixels of a stage over those of the one before
POLISH = 0.25  # work of a stage over that of the one before: smaller steps tell as much as more pixels, for less
JUDGES = 256  # held-out pixels at most: more would not judge better
BETAS, EPS = (0.8, 0.95), 1e-8  # of Adam; a short memory, since a search has tens of steps
FLAT = 0.5  # the part of the steps after which the step size falls
LAST_RATE = 0.1  # step size at the end over that at the start; below it a candidate gives up
SHRINK, TOLERANCE = 0.3, 1e-4  # of latent_adam: what going back does to the rate, and what counts as progress
RETIRED = 0.25  # the part of a batch that has given up when it is worth copying the others together
LOOK = 8  # steps between two judgements, and between two looks at who gave up, which wait for the device
ASTRAY = 1.5  # how much worse than at its best the judges must find the last place for the search to go back there
Progress = Callable[[int, int], None]


@dataclass(frozen=True, eq=False)
class Found:
    """What was found for I images.

    z: the best latents [I, K, D].
    error: their mean squared error over all pixels and colours [I]; never above start_error.
    start_error: that of the first start [I].
    steps: int64 [I], steps that led to z; 0 where nothing was better than the first start.
    restart: int64 [I], which start won.
    trace: [I, steps], mean squared error on the held-out pixels of the image's best candidate before each step, as it
        was judged last, and NaN while all have given up, which a stage with more pixels may end. None unless asked for.
    paths: [chosen, steps, K, D], where the first start of each image chosen was before each step, NaN while it has
        given up and once it was dropped. None unless asked for.
    """

    z: Tensor
    error: Tensor
    start_error: Tensor
    steps: Tensor
    restart: Tensor
    trace: Tensor | None = None
    paths: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Settings:
    """How each step is made."""

    rate: float
    steps: int
    pull: float
    patience: int
    still: float
    marginals: SlotMarginals | None

    def rate_at(self, step: int) -> float:
        """The step size of a candidate that never went back."""
        fallen = max(0.0, (step / self.steps - FLAT) / (1 - FLAT))
        return self.rate * math.pow(LAST_RATE, fallen)


def search(
    decoder: Decoder,
    images: Tensor,
    init: Tensor,
    *,
    steps: int = 48,
    rate: float = 0.2,
    pixels: int | None = None,
    marginals: SlotMarginals | None = None,
    pull: float = 0.05,
    held_out: float = 0.125,
    chunk: int = 128,
    patience: int = 32,
    still: float = 0.0,
    seed: int = 0,
    trace: bool = False,
    paths: Sequence[int] = (),
    progress: Progress | None = None,
) -> Found:
    """The latents of images.

    Args:
        decoder: z [C, K, D], pixels=index or None → colours [C, N, 3] in [0, 1]. Its parameters are frozen meanwhile.
        images: uint8 [I, H, W, 3].
        init: starts [I, K, D], or several for each image [I, R, K, D], as `starts` makes them. Half precision is read
            as fp32; fp64 stays fp64, for a decoder in fp64.
        steps: gradient steps of all stages together.
        rate: step size of Adam, in the units of the latents; in the second half of the steps it falls to a tenth.
        pixels: of the first stage, beside those held out; if None, 256, or half of an image of up to 1,024. Later
            stages have four times as many each, and a quarter of the work, which a short search leaves out.
        marginals: of training latents. If given, slots are pulled towards them and kept within what was seen.
        pull: weight of that pull beside the squared error summed over an image, as beta over sigma in a VAE's loss.
        held_out: the part of the pixels that judge only, 256 at most; with 0, a stage's steps all look at the same
            pixels, which judge too.
        chunk: candidates decoded at a time.
        patience: steps without progress on the held-out pixels after which a candidate goes back to its best place and
            slows down; the second or third time it gives up. They are few, so their word in a few steps means little.
        still: gradient of the mean squared error below which a number moves in proportion to it, not at full rate. 0 is
            Adam as it is, which moves all numbers alike, also those that pixels hardly depend on; 1e-3 leaves these as
            the start had them, and takes more steps.
        seed: of the choice of pixels.
        trace: keep the errors of all steps.
        paths: numbers of images whose latents are kept at every step.
        progress: called with (images done, images).
    """
    inits = check_problem("search", decoder, images, init, marginals)
    check_settings("search", len(images), steps, chunk, pull, held_out, paths)
    _check_steps(rate, patience, still)
    total, starts = images.shape[1:3].numel(), inits.shape[1]
    stages = plan(total, steps, first_pixels("search", total, pixels), held_out, seed, images.device, starts)
    marginals = None if marginals is None else marginals.to(inits)
    settings = Settings(rate, steps, pull, patience, still, marginals)
    parts = []
    with frozen(decoder):
        for part in chunks(len(images), max(1, chunk // starts), progress):
            chosen = [number - part.start for number in sorted(paths) if part.start <= number < part.stop]
            run = _Run(decoder, images[part].flatten(1, 2), inits[part], settings, chosen, trace)
            parts.append(run.found(stages))
    return joined(parts, paths)


def chunks(images: int, size: int, progress: Progress | None) -> Iterator[slice]:
    """The images, so many at a time; says how many are done after each."""
    for first in range(0, images, size):
        last = min(first + size, images)
        yield slice(first, last)
        if progress is not None:
            progress(last, images)


def joined(parts: Sequence[Found], paths: Sequence[int] = ()) -> Found:
    """Results of several chunks as one. A chunk's paths are in order of images; the whole's, as they were asked for."""
    whole = {field.name: _cat([getattr(part, field.name) for part in parts]) for field in fields(Found)}
    if whole["paths"] is not None:
        place = {number: place for place, number in enumerate(sorted(paths))}
        whole["paths"] = whole["paths"][[place[number] for number in paths]]
    return Found(**whole)  # type: ignore[arg-type]


def _cat(parts: Sequence[Tensor | None]) -> Tensor | None:
    there = [part for part in parts if part is not None]
    return torch.cat(there) if there else None


# ------------------------------------------------------------------------------------------------------ stages


@dataclass(frozen=True, eq=False)
class Stage:
    """Steps on one number of pixels."""

    shown: Tensor  # int64 [steps, pixels], those that the gradient of each step comes from
    judges: Tensor  # int64, held-out pixels; empty: those shown judge
    first: int  # number of its first step


def first_pixels(where: str, total: int, pixels: int | None) -> int:
    """How many pixels the first stage looks at."""
    if pixels is not None and not 1 <= pixels <= total:
        raise ValueError(f"{where}: pixels is {pixels}; expected 1 to {total}, the pixels of an image")
    return pixels or min(total, max(FEWEST, total // 2 if total <= SMALL else 0))


def plan(
    total: int,
    steps: int,
    first: int,
    held_out: float,
    seed: int,
    device: torch.device,
    starts: int = 1,
    polish: float = POLISH,
) -> list[Stage]:
    """Stages of ``first`` pixels, until the starts are halved to one; then of GROWTH times as many each, up to all that
    are not held out, each with ``polish`` times the work of the one before. Those that get no step are left out.
    """
    held = min(round(held_out * total), total - 1, JUDGES)
    order = Draws.at(seed, 0).permutation(total, torch.device("cpu"))
    halvings = (starts - 1).bit_length()
    sizes, work = [first] * (halvings + 1), [1.0] * (halvings + 1)
    while sizes[-1] < total:
        sizes.append(min(GROWTH * sizes[-1], total))
        work.append(polish * work[-1])
    stages, done = [], 0
    for place, (size, count) in enumerate(zip(sizes, _shares(steps, sizes, work, starts), strict=True)):
        rows = _rows(order[held:], min(size, total - held), count, held == 0, Draws.at(seed, 1 + place))
        stages.append(Stage(rows.to(device), order[:held].to(device), done))
        done += count
    return [stage for stage in stages if len(stage.shown)]


def _shares(steps: int, sizes: Sequence[int], work: Sequence[float], starts: int) -> list[int]:
    """Steps of each stage: as many as take its share of the work, of pixels times candidates."""
    candidates = [math.ceil(starts / 2**place) for place in range(len(sizes))]
    weights = [share / (size * count) for share, size, count in zip(work, sizes, candidates, strict=True)]
    ends = [round(steps * sum(weights[: place + 1]) / sum(weights)) for place in range(len(sizes))]
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]


def _rows(pool: Tensor, size: int, count: int, fixed: bool, draws: Draws) -> Tensor:
    """Pixels [count, size] of so many steps: of the pool in random order, all of them before one comes again."""
    if fixed or size == len(pool):
        return pool[:size].expand(count, size)
    rounds = math.ceil(count * size / len(pool))
    orders = [pool[draws.permutation(len(pool), torch.device("cpu"))] for _ in range(rounds)]
    return torch.cat([pool[:0], *orders])[: count * size].view(count, size)


# ------------------------------------------------------------------------------------------------------ one chunk


class _Run:
    """The search of some images. Candidates are rows: all starts of the first image, then of the second, …"""

    def __init__(
        self,
        decoder: Decoder,
        x: Tensor,
        inits: Tensor,
        settings: Settings,
        chosen: Sequence[int],
        trace: bool,
    ) -> None:
        (images, starts), steps = inits.shape[:2], settings.steps
        self.decoder, self.x, self.inits, self.settings = decoder, x, inits, settings
        self.image = torch.arange(images, device=x.device).repeat_interleave(starts)
        self.start = torch.arange(starts, device=x.device).repeat(images)
        self.latents = Latents.start(inits.flatten(2).flatten(0, 1), settings.rate)
        self.spent = torch.zeros_like(self.image)
        self.trace = inits.new_full((images, steps), torch.nan) if trace else None
        self.chosen = torch.tensor(chosen, dtype=torch.int64, device=x.device)
        self.paths = inits.new_full((len(chosen), steps, *inits.shape[2:]), torch.nan) if chosen else None

    def found(self, stages: Sequence[Stage]) -> Found:
        for place, stage in enumerate(stages):
            if place:
                self._keep_better_half()
                self._wake(stage)
            self._descend(stage)
            last = self._judge_all(stage)
        astray = last > ASTRAY * self.latents.best_loss
        z = torch.where(astray[:, None], self.latents.best_z, self.latents.z).view(-1, *self.inits.shape[2:])
        settings, candidates = self.settings, Candidates(z, self.image, self.start, self.spent)
        chosen = best(self.decoder, self.x, self.inits[:, 0], candidates, settings.marginals, settings.pull)
        return replace(chosen, trace=self.trace, paths=self.paths)

    def _judge_all(self, stage: Stage) -> Tensor:
        """The losses [C] where candidates are now, which are remembered where they are the best."""
        old, step = self.latents, Step(self, stage, torch.arange(len(self.image), device=self.x.device))
        loss = step.judge().nan_to_num(torch.inf)
        lower = loss < old.best_loss
        self.latents = replace(
            old,
            best_z=torch.where(lower[:, None], old.z, old.best_z),
            best_loss=torch.where(lower, loss, old.best_loss),
        )
        return loss

    def _keep_better_half(self) -> None:
        rows = better_half(self.latents.best_loss, len(self.x))
        self.latents = self.latents.keep(rows)
        self.image, self.start, self.spent = self.image[rows], self.start[rows], self.spent[rows]

    def _wake(self, stage: Stage) -> None:
        """Those who gave up on fewer pixels go on."""
        old = self.latents
        self.latents = replace(
            old,
            # Where nothing is held out, the pixels shown judge, and another number of them tells another loss.
            best_loss=old.best_loss if len(stage.judges) else torch.full_like(old.best_loss, torch.inf),
            rate=torch.full_like(old.rate, self.settings.rate_at(stage.first)),
            active=torch.ones_like(old.active),
        )

    def _descend(self, stage: Stage) -> None:
        """The steps of one stage on those who have not given up; who has is left out when they are many."""
        rows = self.latents.active.nonzero().flatten()
        step = Step(self, stage, rows)
        between = min(LOOK, self.settings.patience)
        for number, pixels in enumerate(stage.shown, stage.first):
            if not len(rows):
                return
            self._record_place(number, rows, step)
            judged = (number - stage.first) % between == 0
            step(pixels, judged, self.settings.rate_at(number + 1) / self.settings.rate_at(number))
            self._record_error(number, rows, step)
            if judged and step.latents.active.sum() <= (1 - RETIRED) * len(rows):
                self._write_back(rows, step)
                rows = rows[step.latents.active]
                step = Step(self, stage, rows)
        self._write_back(rows, step)

    def _write_back(self, rows: Tensor, step: "Step") -> None:
        for whole, part in zip(self.latents.tensors(), step.latents.tensors(), strict=True):
            whole.index_copy_(0, rows, part)
        self.spent.index_copy_(0, rows, step.spent)

    def _record_place(self, number: int, rows: Tensor, step: "Step") -> None:
        if self.paths is None:
            return
        mine = (self.image[rows][:, None] == self.chosen) & ((self.start[rows] == 0) & step.latents.active)[:, None]
        row, place = mine.nonzero().unbind(1)
        self.paths[place, number] = step.latents.z[row].view(-1, *self.paths.shape[2:])

    def _record_error(self, number: int, rows: Tensor, step: "Step") -> None:
        if self.trace is None:
            return
        errors = torch.where(step.was_active, step.error, torch.inf)
        lowest = torch.full_like(self.trace[:, number], torch.inf).scatter_reduce(0, self.image[rows], errors, "amin")
        self.trace[:, number] = torch.where(lowest.isinf(), torch.nan, lowest)


class Step:
    """One gradient step of some of a run's candidates, in place, over and over.

    On CUDA the first call runs as it is and the second is captured as a graph, which all later ones replay: a step is
    dozens of small kernels, and starting them would take longer than running them. A decoder that cannot be captured
    goes on without.
    """

    def __init__(self, run: _Run, stage: Stage, rows: Tensor) -> None:
        self.decoder, self.x, self.settings = run.decoder, run.x, run.settings
        self.shape, self.images = run.inits.shape[2:], run.image[rows]
        self.latents, self.spent = run.latents.keep(rows), run.spent[rows]
        self.pixels = stage.shown[0].clone()  # overwritten at every step
        self.judges = stage.judges if len(stage.judges) else stage.shown[0]
        self.loss, self.error = torch.zeros_like(self.latents.rate), torch.zeros_like(self.latents.rate)
        self.was_active = self.latents.active.clone()
        self.decay = torch.ones_like(self.latents.rate[:1])
        self.calls = 0
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, pixels: Tensor, judged: bool, decay: float) -> None:
        """A step on these pixels, after which rates are multiplied with decay."""
        self.pixels.copy_(pixels)
        self.decay.fill_(decay)
        self.loss.copy_(self.judge() if judged else self.latents.best_loss)  # its own best loss is no progress
        if self.x.is_cuda and self.calls == 1:
            self.graph = self._captured()
        if self.graph is None:
            self._advance()
        else:
            self.graph.replay()
        self.calls += 1

    @torch.no_grad()
    def judge(self) -> Tensor:
        """The losses [C] as the judges see them, with the pull; their mean squared errors are kept."""
        y = self.decoder(self.latents.z.view(-1, *self.shape), pixels=self.judges)
        error, _ = recon_error(y, self.x, images=self.images, pixels=self.judges)
        self.error.copy_(error / (3 * len(self.judges)))
        return self.error * self.x.shape[1:].numel() + self._pull()[0]

    def _pull(self) -> tuple[Tensor | float, Tensor | float]:
        """The pull towards the marginals [C], and its gradient [C, L]."""
        marginals = self.settings.marginals
        if marginals is None:
            return 0.0, 0.0
        pulled, towards = marginals.pull(self.latents.z.view(-1, *self.shape), self.settings.pull)
        return pulled, towards.flatten(1)

    def _captured(self) -> torch.cuda.CUDAGraph | None:
        """The step as a graph; nothing is computed meanwhile."""
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self._advance()
        except RuntimeError:
            return None
        return graph

    def _advance(self) -> None:
        settings, latents, marginals = self.settings, self.latents, self.settings.marginals
        grad = self._gradient() + self._pull()[1]
        self.was_active.copy_(latents.active)
        self.spent.add_(latents.active)
        latent_adam(
            latents,
            grad,
            self.loss,
            betas=BETAS,
            eps=max(EPS, settings.still * self.x.shape[1:].numel()),
            patience=settings.patience,
            tolerance=TOLERANCE,
            shrink=SHRINK,
            least=LAST_RATE * settings.rate,
        )
        latents.rate.mul_(self.decay)
        if marginals is not None:
            latents.z.copy_(marginals.confine(latents.z.view(-1, *self.shape)).flatten(1))

    def _gradient(self) -> Tensor:
        """The gradient [C, L] of the squared error summed over an image, as the pixels shown tell it."""
        with torch.enable_grad():
            z = self.latents.z.detach().requires_grad_()
            y = self.decoder(z.view(-1, *self.shape), pixels=self.pixels)
        _, slope = recon_error(y.detach(), self.x, images=self.images, pixels=self.pixels)
        (grad,) = torch.autograd.grad(y, z, slope)
        return grad * (self.x.shape[1] / len(self.pixels))


# ------------------------------------------------------------------------------------------- shared with newton


@dataclass(frozen=True, eq=False)
class Candidates:
    """Latents z [C, K, D], as many for each image, in order of images; the image, start and steps int64 [C] of each."""

    z: Tensor
    image: Tensor
    start: Tensor
    spent: Tensor


def better_half(losses: Tensor, images: int) -> Tensor:
    """Rows of the better half of each image's candidates, rounded up, by their losses [C]; in the order they had."""
    by_image = losses.view(images, -1)
    count = by_image.shape[1]
    kept = by_image.argsort(dim=1, stable=True)[:, : (count + 1) // 2].sort(1).values
    return (kept + count * torch.arange(images, device=kept.device)[:, None]).flatten()


def best(
    decoder: Decoder,
    x: Tensor,
    start: Tensor,
    candidates: Candidates,
    marginals: SlotMarginals | None,
    pull: float,
) -> Found:
    """For each image x [I, P, 3] the best candidate of those with less error than its start [I, K, D]; else that."""
    images, z = len(x), candidates.z
    error, start_error = errors(decoder, x, z, candidates.image), errors(decoder, x, start)
    loss = error * x.shape[1:].numel()
    if marginals is not None:
        loss = loss + marginals.pull(z, pull)[0]
    lower = error.isfinite() & ~(error >= start_error[candidates.image])
    lowest, which = torch.where(lower, loss, torch.inf).view(images, -1).min(1)
    row, better = which + torch.arange(images, device=x.device) * (len(z) // images), lowest.isfinite()
    return Found(
        z=torch.where(better[:, None, None], z[row], start),
        error=torch.where(better, error[row], start_error),
        start_error=start_error,
        steps=torch.where(better, candidates.spent[row], 0),
        restart=torch.where(better, candidates.start[row], 0),
    )


@torch.no_grad()
def errors(decoder: Decoder, x: Tensor, z: Tensor, images: Tensor | None = None) -> Tensor:
    """Mean squared errors [C] over all pixels of x [I, P, 3], of latents z [C, K, D] for images [C]."""
    loss, _ = recon_error(decoder(z), x, images=images)
    return loss / x.shape[1:].numel()


@contextmanager
def frozen(decoder: Decoder) -> Iterator[None]:
    """No parameter of the decoder asks for gradient meanwhile: nothing is kept for a gradient nobody wants."""
    module = getattr(decoder, "__self__", decoder)  # of a method such as SlotVAE.decode
    trained = [each for each in module.parameters() if each.requires_grad] if isinstance(module, nn.Module) else []
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


def check_problem(
    where: str, decoder: Decoder, images: Tensor, init: Tensor, marginals: SlotMarginals | None
) -> Tensor:
    """Starts [I, R, K, D] in fp32 or fp64; refuses what does not fit together."""
    if images.dtype != torch.uint8 or images.dim() != 4 or images.shape[3] != 3 or not len(images):
        raise ValueError(
            f"{where}: images are {images.dtype} {list(images.shape)}; expected torch.uint8 [I, H, W, 3] with at least "
            "one image, as data sets give them"
        )
    expected, pixels = getattr(decoder, "num_pixels", None), images.shape[1] * images.shape[2]
    if expected is not None and expected != pixels:
        raise ValueError(
            f"{where}: images have {images.shape[1]}×{images.shape[2]} = {pixels} pixels and the decoder draws "
            f"{expected}; expected images of the size it was trained on"
        )
    shaped = init.dim() in (3, 4) and len(init) == len(images) and 0 not in init.shape
    if not shaped or not init.dtype.is_floating_point:
        raise ValueError(
            f"{where}: init is {init.dtype} {list(init.shape)} and there are {len(images)} images; expected floating "
            f"[I, K, D] or [I, R, K, D] with I = {len(images)}; flat latents are init.unflatten(1, (slots, -1))"
        )
    if init.device != images.device:
        raise ValueError(f"{where}: init is on {init.device} but images are on {images.device}; move one of them")
    bad = (~init.isfinite().flatten(1).all(1)).nonzero().flatten()
    if len(bad):
        raise ValueError(
            f"{where}: init of image {int(bad[0])} is not finite ({len(bad)} such images); expected finite latents; "
            "look at the encoder, or start from marginals.sample"
        )
    if marginals is not None and marginals.mean.shape != init.shape[-2:]:
        raise ValueError(
            f"{where}: marginals have slots {list(marginals.mean.shape)} and init {list(init.shape[-2:])}; expected "
            "the same; fit them on latents of this encoder"
        )
    inits = (init.unsqueeze(1) if init.dim() == 3 else init).detach()
    return inits if inits.dtype == torch.float64 else inits.float()


def check_settings(
    where: str, images: int, steps: int, chunk: int, pull: float, held_out: float, paths: Sequence[int] = ()
) -> None:
    """Refuses settings that make no sense."""
    for name, value, right, expected in (
        ("steps", steps, steps >= 1, "at least one step"),
        ("chunk", chunk, chunk >= 1, "at least one candidate"),
        ("pull", pull, 0 <= pull < math.inf, "a weight, 0 or more"),
        ("held_out", held_out, 0 <= held_out < 1, "a part of the pixels, from 0 to below 1"),
        ("paths", list(paths), all(0 <= each < images for each in paths), f"numbers of images, 0 to {images - 1}"),
        ("paths", list(paths), len(set(paths)) == len(paths), "each image once"),
    ):
        if not right:
            raise ValueError(f"{where}: {name} is {value}; expected {expected}")


def _check_steps(rate: float, patience: int, still: float) -> None:
    if not 0 < rate < math.inf:
        raise ValueError(f"search: rate is {rate}; expected a positive step size such as 0.2")
    if patience < 1:
        raise ValueError(f"search: patience is {patience}; expected at least one step")
    if not 0 <= still < math.inf:
        raise ValueError(f"search: still is {still}; expected a gradient of the mean squared error, such as 1e-3, or 0")
