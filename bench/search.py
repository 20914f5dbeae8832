"""The suite `search`: images a second until latents explain them as well as a plain loop makes them.

All contenders start from the same latents, and are judged by the mean squared error on pixels that none of them was
shown (`search_peers`). For each problem:

1. **The aim.** The plain loop runs a stated number of steps at several rates. Where its best rate ends, it has taken
   some error away. The aim is what is left then, plus 2 % of it or 5 % of what was taken away, whichever is less.
2. **The settings.** For each contender the fewest steps with which the mean error over the images reaches the aim, at
   whichever rate; the loop is looked at after every step, others are run anew with other numbers of steps.
3. **The gate.** Whoever does not reach the aim has no time.
4. **Timing.** Rounds of ours, peer, peer, …, ratios inside each round, as everywhere here. Steps of the loop cost the
   same, so of a long one the first are timed, and scaled.

Errors are means over images; medians stand beside them, so that a few hard images cannot hide the others.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice

import torch
from rich.console import Console, Group
from rich.text import Text
from torch import Tensor

from compgen_fast import invert
from compgen_fast.bench import report
from compgen_fast.bench.clock import Clock, clock_of
from compgen_fast.bench.harness import FEWEST_ROUNDS, MOST_ROUNDS, percentiles, quiet_process, sentence
from compgen_fast.bench.ops.common import backend_of
from compgen_fast.bench.search_peers import Kind, Problem, Size, loop, loss_of, problem
from compgen_fast.bench.suite import FULL, GREEN, IMPOSSIBLE, QUICK, RED, RESULTS, stamp
from compgen_fast.invert.search import frozen
from compgen_fast.progress import following
from compgen_fast.tables import Sheet

RATES: Mapping[Kind, tuple[float, ...]] = {"trained": (0.2, 0.4, 0.8), "reference": (0.05, 0.1, 0.2)}
LOOP_STEPS: Mapping[Kind, int] = {"trained": 60, "reference": 40}
LEFT, TAKEN = 0.02, 0.05  # of the error left and of that taken away: what is still as good
SAME = 1e-3  # how far rounding may carry the same loop in another form beyond the aim
SEARCH_STEPS = (16, 32, 64, 128, 256)
SWAPPED = 3  # starts beside the encoder's where a trained decoder is searched: slots of other images
NEIGHBOURS = 8  # images that it takes for that
NEWTON_STEPS = (1, 2, 4, 8)
TIMED = 5  # steps of a loop, at most
OURS = "search"
WANTED = 8.0  # times the eager loop's images per second


def quick_sizes() -> list[Size]:
    """Few images, and neither torch.compile nor Newton's steps, which are slow."""
    return [
        Size("trained", 32, 2, images=32),
        Size("trained", 64, 2, images=8),
        Size("reference", 64, 7, images=1),
    ]


def sizes() -> list[Size]:
    """First what users have, then how it grows: with pixels, images, starts and slots."""
    return [
        Size("trained", 128, 2, images=64, everyone=True),
        Size("reference", 128, 7, images=1, everyone=True),
        Size("trained", 32, 2, images=128, everyone=True),
        Size("trained", 64, 2, images=64),
        Size("reference", 64, 7, images=2),
        Size("reference", 32, 7, images=4),
        *(Size("trained", 32, 2, images=count) for count in (16, 32, 64, 256)),
        *(Size("trained", 32, 2, images=32, starts=count) for count in (2, 4)),
        *(Size("reference", 32, slots, images=4) for slots in (2, 3)),
    ]


# ------------------------------------------------------------------------------------------------ contenders


@dataclass(frozen=True)
class Setting:
    steps: int
    rate: float = 0.0
    """Zero where there is no such thing."""


@dataclass(frozen=True)
class Contender:
    """Someone who finds latents [I, K, D] of a problem's images."""

    name: str
    find: Callable[[Problem, Setting], Tensor]
    steps: tuple[int, ...] = ()
    """Those to try. Empty: it is the loop in some form, whose settings it shares, and all its steps cost alike."""
    has_rate: bool = True


def contenders(size: Size) -> list[Contender]:
    """Ours first, then the loop, then the loop by someone who freezes the decoder, and perhaps compiles it."""
    alone = size.kind == "reference" or size.starts > 1 or size.images < NEIGHBOURS
    ours = Contender(OURS, search if alone else restarted_search, SEARCH_STEPS)
    found = [ours, Contender("eager", eager_loop), Contender("frozen", frozen_loop)]
    if size.everyone:
        found.append(Contender("compiled", CompiledLoop()))
    if size.everyone and size.kind == "trained":  # the other one's hundreds of latents are not what it is for
        found.append(Contender("newton", newton, NEWTON_STEPS, has_rate=False))
    return found


def search(given: Problem, setting: Setting) -> Tensor:
    return invert.search(given.decoder, given.images, given.init, steps=setting.steps, rate=setting.rate).z


def restarted_search(given: Problem, setting: Setting) -> Tensor:
    """With starts of its own, made of the slots that all contenders are given; making them is timed."""
    generator = torch.Generator().manual_seed(0)
    init = invert.starts(given.init[:, 0], swapped=SWAPPED, generator=generator)
    return invert.search(given.decoder, given.images, init, steps=setting.steps, rate=setting.rate).z


def newton(given: Problem, setting: Setting) -> Tensor:
    return invert.newton(given.decoder, given.images, given.init, steps=setting.steps).z


def eager_loop(given: Problem, setting: Setting) -> Tensor:
    """The decoder as it is: its parameters get gradients that nobody wants."""
    return given.best(last(islice(loop(given, setting.rate), setting.steps)))


def frozen_loop(given: Problem, setting: Setting) -> Tensor:
    with frozen(given.decoder):
        return eager_loop(given, setting)


class CompiledLoop:
    """The frozen loop, with torch.compile around decoder and loss."""

    def __init__(self) -> None:
        self.given: Problem | None = None

    def __call__(self, given: Problem, setting: Setting) -> Tensor:
        if self.given is not given:
            torch.compiler.reset()  # torch.compile falls back to eager, silently, after 8 shapes of one function
            self.given, self.loss = given, torch.compile(loss_of(given), dynamic=False)
        with frozen(given.decoder):
            return given.best(last(islice(loop(given, setting.rate, self.loss), setting.steps)))


def last(steps: Iterator[Tensor]) -> Tensor:
    *_, z = steps
    return z


# ------------------------------------------------------------------------------------------------ aim and settings


@dataclass(frozen=True)
class Aim:
    """Where the loop began, how far it came, and the error that counts as equally good."""

    start: Tensor  # [I], errors of the first starts
    end: float  # mean error of the loop after all its steps, at its best rate

    @property
    def bound(self) -> float:
        return self.end + max(0.0, min(LEFT * self.end, TAKEN * (float(self.start.mean()) - self.end)))


@dataclass(frozen=True)
class Reached:
    """How a contender got to the aim, and the errors [I] there."""

    setting: Setting
    errors: Tensor


def aim_of(given: Problem, kind: Kind) -> tuple[Aim, Setting]:
    """The aim, and how the loop gets there soonest."""
    courses = {rate: course(given, rate, LOOP_STEPS[kind]) for rate in RATES[kind]}
    aim = Aim(given.errors(given.init[:, 0]), min(errors[-1] for errors in courses.values()))
    there = [
        Setting(1 + next(step for step, error in enumerate(errors) if error <= aim.bound), rate)
        for rate, errors in courses.items()
        if min(errors) <= aim.bound
    ]
    return aim, min(there, key=lambda setting: (setting.steps, courses[setting.rate][setting.steps - 1]))


def course(given: Problem, rate: float, steps: int) -> list[float]:
    """The loop's mean error after each step."""
    with frozen(given.decoder):
        return [float(given.errors(given.best(z)).mean()) for z in islice(loop(given, rate), steps)]


def soonest(contender: Contender, given: Problem, kind: Kind, bound: float) -> Reached:
    """The fewest steps that reach the bound: the contender's numbers in turn at all rates, then two halvings of the way
    back to the number before, at the rate that got there. If none get there, the most steps at the best rate.
    """
    below = 0
    for steps in contender.steps:
        rates = RATES[kind] if contender.has_rate else (0.0,)
        tried = [tried_at(contender, given, Setting(steps, rate)) for rate in rates]
        best = min(tried, key=lambda found: float(found.errors.mean()))
        if best.errors.mean() <= bound:
            break
        below = steps
    else:
        return best
    for _ in range(2):
        between = Setting((below + best.setting.steps) // 2, best.setting.rate)
        if between.steps == below:
            break
        found = tried_at(contender, given, between)
        if found.errors.mean() <= bound:
            best = found
        else:
            below = between.steps
    return best


def tried_at(contender: Contender, given: Problem, setting: Setting) -> Reached:
    return Reached(setting, given.errors(contender.find(given, setting)))


# ------------------------------------------------------------------------------------------------ measuring


@dataclass(frozen=True)
class Row:
    """One contender on one problem. The fields are the columns of the CSV and the keys of the JSON."""

    suite: str
    case: str
    kind: str
    side: int
    slots: int
    images: int
    starts: int
    contender: str
    images_per_second: float | None
    """Median over rounds, of all steps that the aim takes."""
    ratio: float | None
    """The contender's time ÷ ours, median over rounds; above 1 we are faster."""
    ratio_low: float | None
    """20th percentile over rounds; ``ratio_high`` is the 80th."""
    ratio_high: float | None
    rate: float | None
    steps: int | None
    error: float | None
    """Mean over images of the error on pixels shown to nobody; ``error_median`` is the median."""
    error_median: float | None
    start_error: float
    """The same of the first starts."""
    start_median: float
    loop_error: float
    """What the loop comes to after ``loop_steps`` steps at its best rate; ``bound`` counts as equally good."""
    loop_steps: int
    bound: float
    unsupported: str | None
    gate: str | None
    rounds: int
    device: str
    backend: str
    threads: int
    mode: str
    hardware: str
    version: str
    torch: str
    commit: str | None
    timestamp: str


@dataclass(frozen=True)
class Outcome:
    """What a contender made of a problem: how it reached the aim, or why it has no time."""

    contender: Contender
    reached: Reached | None
    unsupported: str = ""
    gate: str = ""


def measure(
    size: Size,
    given: Problem,
    among: Sequence[Contender],
    budget: float,
    stamped: Mapping[str, object],
    device: str,
    clock: Clock | None = None,
) -> list[Row]:
    """A row for each contender, ours first."""
    aim, by_loop = aim_of(given, size.kind)
    outcomes = [outcome(contender, given, size.kind, aim, by_loop) for contender in among]
    times: dict[str, list[float]] = {}
    if not outcomes[0].gate:
        laps = {
            each.contender.name: lap(each.contender, given, each.reached.setting)
            for each in outcomes
            if each.reached is not None and not each.unsupported and not each.gate
        }
        times = time_rounds(laps, clock or clock_of(device), budget)
    return [row(size, aim, each, outcomes[0].gate, times, stamped, device) for each in outcomes]


def outcome(contender: Contender, given: Problem, kind: Kind, aim: Aim, by_loop: Setting) -> Outcome:
    try:
        found = soonest(contender, given, kind, aim.bound) if contender.steps else tried_at(contender, given, by_loop)
    except Exception as refusal:  # whatever a peer raises is its reason for not taking part
        if contender.name == OURS:
            raise
        return Outcome(contender, None, unsupported=sentence(refusal))
    error = float(found.errors.mean())
    if error <= aim.bound * (1 if contender.steps else 1 + SAME):
        return Outcome(contender, found)
    missed = f"the error is {error:.3e} after {found.setting.steps} steps, and the aim {aim.bound:.3e}"
    if contender.steps and contender.name != OURS:
        return Outcome(contender, found, unsupported=missed)
    return Outcome(contender, found, gate=f"gate: {missed}")


def row(
    size: Size,
    aim: Aim,
    found: Outcome,
    our_gate: str,
    times: Mapping[str, Sequence[float]],
    stamped: Mapping[str, object],
    device: str,
) -> Row:
    took, ours, reached = times.get(found.contender.name, ()), times.get(OURS, ()), found.reached
    low, middle, high = percentiles([theirs / mine for theirs, mine in zip(took, ours, strict=False)])
    return Row(
        suite="search",
        case=str(size),
        kind=size.kind,
        side=size.side,
        slots=size.slots,
        images=size.images,
        starts=size.starts,
        contender=found.contender.name,
        images_per_second=percentiles([size.images / seconds for seconds in took])[1],
        ratio=middle,
        ratio_low=low,
        ratio_high=high,
        rate=None if reached is None else reached.setting.rate or None,
        steps=None if reached is None else reached.setting.steps,
        error=None if reached is None else float(reached.errors.mean()),
        error_median=None if reached is None else float(reached.errors.median()),
        start_error=float(aim.start.mean()),
        start_median=float(aim.start.median()),
        loop_error=aim.end,
        loop_steps=LOOP_STEPS[size.kind],
        bound=aim.bound,
        unsupported=found.unsupported or None,
        gate=found.gate or our_gate or None,
        rounds=len(took),
        device=device,
        backend=backend_of("recon_error", device),
        **stamped,  # type: ignore[arg-type]
    )


Lap = tuple[Callable[[], object], float]
"""What is timed, and what its time is multiplied with."""


def lap(contender: Contender, given: Problem, setting: Setting) -> Lap:
    steps = setting.steps if contender.steps else min(setting.steps, TIMED)
    return lambda: contender.find(given, Setting(steps, setting.rate)), setting.steps / steps


def time_rounds(laps: Mapping[str, Lap], clock: Clock, budget: float) -> dict[str, list[float]]:
    """Seconds of each contender by round. Rounds stop once they took ``budget`` seconds in all."""
    found: dict[str, list[float]] = {name: [] for name in laps}
    rounds, spent = 0, 0.0
    while rounds < FEWEST_ROUNDS or (spent < budget and rounds < MOST_ROUNDS):
        for name, (call, factor) in laps.items():
            clock.ready()
            start = clock.mark()
            call()
            seconds = clock.seconds(start, clock.mark())
            found[name].append(factor * seconds)
            spent += seconds
        rounds += 1
    return found


# ------------------------------------------------------------------------------------------------ the command


def run(quick: bool = False, threads: int = 1, json: str | None = None, device: str = "cpu") -> int:
    """Measures all problems and writes what was found. Returns 0, 1 if a gate is red, 2 if the device is not there."""
    if device == "cuda" and not torch.cuda.is_available():
        print("--device cuda: torch sees no CUDA or ROCm device here; leave it out to run on the CPU", file=sys.stderr)
        return IMPOSSIBLE
    RESULTS.mkdir(exist_ok=True)
    effort = QUICK if quick else FULL
    people = Console(stderr=json == "-", highlight=False)
    stamped = asdict(stamp(threads, effort.mode, device))
    rows: list[Row] = []
    wanted = quick_sizes() if quick else sizes()
    with following("measure", len(wanted), "problems") as advance:
        for size in wanted:
            advance(0, f"{size}: aim, settings, timing")
            with quiet_process(threads):
                found = measure(size, problem(size, device, RESULTS), contenders(size), effort.seconds, stamped, device)
            rows += found
            people.print(table(found))
            advance()
    people.print(summary(rows))
    people.print(LEGEND, style="dim")
    report.write(rows, RESULTS / "search.csv", json, people)
    return RED if any(row.gate for row in rows) else GREEN


LEGEND = (
    "images/s: until the mean error on pixels shown to nobody reaches the aim. ratio: the contender's time ÷ that of "
    "search, above 1 search is faster, with the 20th and 80th percentile over interleaved rounds. error: mean and "
    "median over images, in 1e-4. frozen: the loop without gradients of parameters; compiled: that by torch.compile."
)


def table(rows: Sequence[Row]) -> Group:
    """One problem: a line for each contender that got there, and why the others did not."""
    first = rows[0]
    start, left, bound = (f"{1e4 * error:.2f}" for error in (first.start_error, first.loop_error, first.bound))
    way = f"error {start} at the start, {left} after {first.loop_steps} steps of the loop; the aim is {bound}"
    lines = Sheet("contender", "rate", "steps", "images/s", "ratio", "20–80 %", "error", "median")
    for row in rows:
        if row.ratio is None:
            continue
        peer = row.contender != OURS
        lines.add_row(
            row.contender,
            "" if row.rate is None else f"{row.rate:g}",
            f"{row.steps}",
            f"{row.images_per_second:.3g}",
            _verdict(row) if peer else "",
            f"{row.ratio_low:.2f}–{row.ratio_high:.2f}" if peer else "",
            *(f"{1e4 * error:.2f}" for error in (row.error, row.error_median) if error is not None),
        )
    notes = [f"{row.contender}: {_reason(row)}" for row in rows if row.ratio is None]
    return Group(Text(first.case, "bold"), way, lines, *(Text(note, "bold red") for note in notes), "")


def summary(rows: Sequence[Row]) -> Group:
    """Ours against the eager loop, by problem."""
    found = Sheet("problem", "loop images/s", "ours images/s", "ratio", "20–80 %")
    for eager in (row for row in rows if row.contender == "eager"):
        ours = next(row for row in rows if row.contender == OURS and row.case == eager.case)
        if eager.ratio is None:
            found.add_row(eager.case, "", "", Text("gate", "bold red"), "")
            continue
        speeds = (f"{row.images_per_second:.3g}" for row in (eager, ours))
        found.add_row(eager.case, *speeds, _verdict(eager), f"{eager.ratio_low:.2f}–{eager.ratio_high:.2f}")
    return Group(Text("against the eager loop", "bold"), f"wanted: {WANTED:g}×", found)


def _reason(row: Row) -> str:
    return row.gate or f"unsupported: {row.unsupported}"


def _verdict(row: Row) -> Text:
    good = WANTED if row.contender == "eager" else 1.0
    return Text(f"{row.ratio:.2f}×", style="bold green" if (row.ratio or 0.0) >= good else "bold red")
