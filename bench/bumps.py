"""The suite `bumps`: what a study of many small decoders spends its time on.

1. **Geometry.** The metric of every layer over the whole 28 × 28 grid of codes, by `layer_geometry` and by what
   torch.func offers. The oracle is a nested `jvp` in fp64. Reverse mode takes one backward per activation and point:
   of its points a few are timed, and scaled, as the note beside its row says.
2. **Training.** One step of AdamW for all of 8 or 24 models of one shape, as one stack and one after another. Before,
   everyone trains a few steps from the same weights; whoever ends elsewhere has no time.

Contenders take turns within a round, ratios are formed inside each round, as everywhere here.
"""

import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import torch
from rich.console import Console, Group
from rich.text import Text
from torch import Tensor, nn
from torch.func import functional_call, jacfwd, jacrev, jvp, stack_module_state, vmap
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from compgen_fast.bench import report
from compgen_fast.bench.clock import Clock, clock_of
from compgen_fast.bench.harness import ALLOWED, FLOOR, PEER_ALLOWED, Direction, Row, Stamp, percentiles, quiet_process
from compgen_fast.bench.ops.common import backend_of
from compgen_fast.bench.search import Lap, time_rounds
from compgen_fast.bench.suite import FULL, GREEN, IMPOSSIBLE, QUICK, RED, RESULTS, stamp
from compgen_fast.measure import grid_metrics, layer_geometry
from compgen_fast.models.stacked import StackedConv2d, StackedLinear
from compgen_fast.progress import following
from compgen_fast.tables import Sheet

Kind = Literal["mlp", "cnn"]
Activation = type[nn.GELU] | type[nn.ReLU]
SIDE, CODE = 28, 56
WANTED = 10.0  # times the loop of jacrev
BATCH, RATE, AGREE_STEPS = 16, 1e-3, 3
TIMED_STEPS = 10  # together: one takes a few milliseconds
MOST_DRIFT = 0.01  # of the way the weights have come; rounding makes 1e-4, another gradient makes about 1
LESS = "no mixed derivative"

# ------------------------------------------------------------------------------------------------ decoders


def linear(seeds: Sequence[int], layer: int, inputs: int, outputs: int) -> nn.Module:
    return StackedLinear(seeds, layer, inputs, outputs) if seeds else nn.Linear(inputs, outputs)


def conv(seeds: Sequence[int], layer: int, inputs: int, outputs: int, up: int = 1) -> nn.Module:
    if seeds:
        return StackedConv2d(seeds, layer, inputs, outputs, kernel=3 if up == 1 else 4, up=up)
    return nn.Conv2d(inputs, outputs, 3, padding=1) if up == 1 else nn.ConvTranspose2d(inputs, outputs, 4, up, 1)


def mlp(widths: Sequence[int], bend: Activation, seeds: Sequence[int] = ()) -> list[nn.Module]:
    """The layers, each with its nonlinearity: plain modules, or a stack of one model for each seed."""
    layers = [linear(seeds, i, *pair) for i, pair in enumerate(pairwise(widths))]
    return [nn.Sequential(layer, bend()) for layer in layers[:-1]] + layers[-1:]


def cnn(channels: int, bend: Activation, seeds: Sequence[int] = ()) -> list[nn.Module]:
    """Dense to 7 × 7, a convolution, up to 14 × 14, a convolution, up to 28 × 28."""
    image = nn.Unflatten(2 if seeds else 1, (channels, 7, 7))
    return [
        nn.Sequential(linear(seeds, 0, CODE, channels * 49), bend(), image),
        nn.Sequential(conv(seeds, 1, channels, channels), bend()),
        nn.Sequential(conv(seeds, 2, channels, channels, up=2), bend()),
        nn.Sequential(conv(seeds, 3, channels, channels), bend()),
        conv(seeds, 4, channels, 1, up=2),
    ]


def bump_codes(sigma: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """The codes [784, 56] of all positions in fp64, and their derivatives along x and along y."""
    places = torch.arange(SIDE, dtype=torch.float64)
    offsets = torch.cat([places - at[:, None] for at in torch.cartesian_prod(places, places).T], 1)
    code = torch.exp(-(offsets**2) / (2 * sigma**2))
    slope, is_x = code * offsets / sigma**2, torch.arange(CODE) < SIDE
    return code, slope * is_x, slope * ~is_x


# ------------------------------------------------------------------------------------------------ 1. geometry

Found = tuple[list[Tensor], list[Tensor]]
"""The metric [n, 2, 2] of the code and each layer; then ‖∂_x ∂_y h‖² [n] of each, or nothing."""


@dataclass(frozen=True)
class Grid:
    """A decoder's layers and the points to look at: codes and their derivatives, [n, 56]."""

    layers: Sequence[nn.Module]
    code: Tensor
    along: tuple[Tensor, Tensor]

    def at(self, points: slice) -> "Grid":
        x, y = self.along
        return Grid(self.layers, self.code[points], (x[points], y[points]))

    def activations(self, code: Tensor) -> tuple[Tensor, ...]:
        found = [code]
        for layer in self.layers:
            found.append(layer(found[-1]))
        return tuple(found)

    def at_one(self, take: Callable[..., Any]) -> Callable[..., Any]:
        """Of one point: the derivatives of all activations by (x, y), as ``take`` takes Jacobians."""

        def derivatives(code: Tensor, x: Tensor, y: Tensor) -> Any:
            return take(lambda t: self.activations((code + t[0] * x + t[1] * y)[None]))(code.new_zeros(2))

        return derivatives


@dataclass(frozen=True)
class Method:
    """A way to the metric. ``points`` is how many are timed, for ways that take too long for all."""

    name: str
    find: Callable[[Grid], Found]
    does_less: str = ""
    points: int | None = None
    inexact: bool = False
    """By design: it is timed all the same, with its error beside it."""

    @property
    def note(self) -> str:
        scaled = "" if self.points is None else f"{self.points} of {SIDE**2} points timed, and scaled"
        return "; ".join(filter(None, (self.does_less, scaled)))

    @property
    def part(self) -> slice:
        """Its points, spread over the grid."""
        return slice(None) if self.points is None else slice(None, None, -(-(SIDE**2) // self.points))


def ours(grid: Grid) -> Found:
    found = layer_geometry(grid.layers, grid.code, grid.along)
    return [layer.metric for layer in found], [layer.mixed for layer in found]


def nested_jvp(grid: Grid) -> Found:
    """The specification: the derivative along y of the derivative along x."""
    x, y = grid.along
    twice: Any = jvp(lambda code: jvp(grid.activations, (code,), (x,)), (grid.code,), (y,))
    (_, h_x), (h_y, h_xy) = twice
    return [gram(*each) for each in zip(h_x, h_y, strict=True)], [each.flatten(1).square().sum(1) for each in h_xy]


def jvp_twice(grid: Grid) -> Found:
    by_x, by_y = (jvp(grid.activations, (grid.code,), (direction,))[1] for direction in grid.along)
    return [gram(*each) for each in zip(by_x, by_y, strict=True)], []


def forward_mode(grid: Grid) -> Found:
    return _grams(vmap(grid.at_one(jacfwd))(grid.code, *grid.along)), []


def reverse_mode(grid: Grid) -> Found:
    return _grams(vmap(grid.at_one(jacrev))(grid.code, *grid.along)), []


def reverse_loop(grid: Grid) -> Found:
    each = [grid.at_one(jacrev)(*point) for point in zip(grid.code, *grid.along, strict=True)]
    return _grams([torch.stack(layer) for layer in zip(*each, strict=True)]), []


def central(grid: Grid) -> Found:
    return [grid_metrics(each.view(SIDE, SIDE, -1)) for each in grid.activations(grid.code)], []


def _grams(jacobians: Sequence[Tensor]) -> list[Tensor]:
    """Of [n, 1, …, 2] for each layer."""
    return [gram(*jacobian.unbind(-1)) for jacobian in jacobians]


def gram(x: Tensor, y: Tensor) -> Tensor:
    moved = torch.stack([x.flatten(1), y.flatten(1)], 1)
    return moved @ moved.mT


def methods(kind: Kind) -> list[Method]:
    """Ours first. Reverse mode through convolutions takes most of a second for a point."""
    loop, batch = (8, 16) if kind == "mlp" else (1, 2)
    return [
        Method("ours", ours),
        Method("loop of jacrev", reverse_loop, LESS, loop),
        Method("vmap(jacrev)", reverse_mode, LESS, batch),
        Method("vmap(jacfwd)", forward_mode, LESS),
        Method("jvp twice", jvp_twice, LESS),
        Method("nested jvp", nested_jvp),
        Method("central differences", central, f"wrong by design, {LESS}", inexact=True),
    ]


def decoder_grid(kind: Kind, bend: Activation, device: str) -> Grid:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = mlp((CODE, 256, 256, 256, SIDE**2), bend) if kind == "mlp" else cnn(16, bend)
    frozen = [layer.requires_grad_(False).to(device) for layer in layers]  # or peers record gradients of weights
    code, *along = (each.float().to(device) for each in bump_codes())
    return Grid(frozen, code, (along[0], along[1]))


def exact(grid: Grid) -> Found:
    """The oracle's answer, in fp64."""
    x, y = (direction.double() for direction in grid.along)
    return nested_jvp(Grid([copy.deepcopy(layer).double() for layer in grid.layers], grid.code.double(), (x, y)))


def error(found: Found, expected: Found) -> float:
    """The largest difference of any layer's numbers, over the largest of those numbers."""
    pairs = [*zip(found[0], expected[0], strict=True), *zip(found[1], expected[1], strict=False)]
    each = [(mine - true).abs().max() / true.abs().max().clamp_min(1e-30) for mine, true in pairs]
    return float(torch.stack(each).max())  # a NaN stays one


def measure_geometry(
    kind: Kind, bend: Activation, budget: float, stamped: Stamp, device: str, clock: Clock | None = None
) -> list[Row]:
    """A row for each peer."""
    grid, among = decoder_grid(kind, bend, device), methods(kind)
    errors = {method.name: error(method.find(grid.at(method.part)), exact(grid.at(method.part))) for method in among}
    yardstick, floor = errors["nested jvp"], FLOOR * torch.finfo(torch.float32).eps
    gate = "" if errors["ours"] <= ALLOWED * yardstick + floor else f"gate: our error is {errors['ours']:.1e}"
    wrong = {
        method.name: f"its error is {errors[method.name]:.1e}"
        for method in among
        if not (method.inexact or errors[method.name] <= PEER_ALLOWED * yardstick + floor)
    }
    right = [method for method in among[1:] if method.name not in wrong]
    found: dict[str, Mapping[str, Sequence[float]]] = {}
    for slow in (False, True):  # in rounds of their own: slow ones would leave the others with few
        group = [method for method in right if bool(method.points) is slow]
        laps = {method.name: _lap(method, grid) for method in (among[0], *group)}
        times = {} if gate else time_rounds(laps, clock or clock_of(device), budget)
        found |= dict.fromkeys((method.name for method in group), times)
    case = f"geometry, {kind} {bend.__name__}, {SIDE} × {SIDE} points"
    return [
        row(case, "forward", method.name, found.get(method.name, {}), stamped, device, gate=gate, note=method.note,
            errors=errors, unsupported=wrong.get(method.name, ""))
        for method in among[1:]
    ]  # fmt: skip


def _lap(method: Method, grid: Grid) -> Lap:
    part = grid.at(method.part)
    return lambda: method.find(part), len(grid.code) / len(part.code)


# ------------------------------------------------------------------------------------------------ 2. training


@dataclass(frozen=True)
class Trainer:
    """Takes one step with all models; ``weights`` are [M, parameters of one], in the order of plain modules."""

    name: str
    step: Callable[[], object]
    weights: Callable[[], Tensor]


def stack_of(kind: Kind, seeds: Sequence[int]) -> nn.Sequential:
    layers = mlp((CODE, 128, 128, SIDE**2), nn.ReLU, seeds) if kind == "mlp" else cnn(8, nn.ReLU, seeds)
    return nn.Sequential(*layers, nn.Flatten(2 if seeds else 1))


def stack_weights(stack: nn.Module) -> Tensor:
    parts = []
    for layer in stack.modules():
        if isinstance(layer, StackedLinear | StackedConv2d):
            weight = layer.weight.mT if isinstance(layer, StackedLinear) else layer.weight
            parts += [weight.flatten(1), layer.bias.flatten(1)]
    return torch.cat(parts, 1).detach().clone()


def plain_models(kind: Kind, weights: Tensor) -> list[nn.Sequential]:
    """Plain modules with these weights."""
    models = [stack_of(kind, ()).to(weights.device) for _ in weights]
    for model, vector in zip(models, weights, strict=True):
        vector_to_parameters(vector, model.parameters())
    return models


def adamw(parameters: Iterator[nn.Parameter] | list[Tensor]) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=RATE, fused=True)


def stepping(forward: Callable[[], Tensor], images: Tensor, optimiser: torch.optim.Optimizer) -> Callable[[], None]:
    """A step on the sum of the models' mean squared errors; images are [M, B, pixels] or one model's [B, pixels]."""

    def step() -> None:
        optimiser.zero_grad()
        ((forward() - images).square().mean((-2, -1)).sum()).backward()
        optimiser.step()

    return step


def stacked(kind: Kind, seeds: Sequence[int], codes: Tensor, images: Tensor) -> Trainer:
    stack = stack_of(kind, seeds).to(codes.device)
    step = stepping(lambda: stack(codes), images, adamw(stack.parameters()))
    return Trainer("ours", step, lambda: stack_weights(stack))


def stacks_of_one(kind: Kind, seeds: Sequence[int], codes: Tensor, images: Tensor) -> Trainer:
    each = [stacked(kind, [seed], codes[[i]], images[[i]]) for i, seed in enumerate(seeds)]
    return Trainer(
        "stacks of one, in turn",
        lambda: [one.step() for one in each],
        lambda: torch.cat([one.weights() for one in each]),
    )


def plain(kind: Kind, weights: Tensor, codes: Tensor, images: Tensor) -> Trainer:
    models = plain_models(kind, weights)
    steps = [
        stepping(lambda model=model, code=code: model(code), image, adamw(model.parameters()))  # type: ignore[misc]
        for model, code, image in zip(models, codes, images, strict=True)
    ]
    return Trainer(
        "plain modules, in turn",
        lambda: [step() for step in steps],
        lambda: torch.stack([parameters_to_vector(model.parameters()).detach() for model in models]),
    )


def vmapped(kind: Kind, weights: Tensor, codes: Tensor, images: Tensor) -> Trainer:
    models = plain_models(kind, weights)
    parameters, _ = stack_module_state(models)

    def one(given: dict[str, Tensor], code: Tensor) -> Tensor:
        return functional_call(models[0], given, (code,))  # type: ignore[no-any-return]

    def forward() -> Tensor:
        return vmap(one)(parameters, codes)

    def flat() -> Tensor:
        return torch.cat([each.detach().flatten(1) for each in parameters.values()], 1)

    step = stepping(forward, images, adamw(list(parameters.values())))
    return Trainer("stack_module_state + vmap", step, flat)


def trainers(kind: Kind, models: int, device: str) -> list[Trainer]:
    """Ours first; all start from the same weights, each model with a batch of its own."""
    seeds = range(models)
    generator = torch.Generator().manual_seed(0)
    codes = torch.rand(models, BATCH, CODE, generator=generator).to(device)
    images = torch.rand(models, BATCH, SIDE**2, generator=generator).to(device)
    weights = stack_weights(stack_of(kind, seeds)).to(device)
    return [
        stacked(kind, seeds, codes, images),
        stacks_of_one(kind, seeds, codes, images),
        plain(kind, weights, codes, images),
        vmapped(kind, weights, codes, images),
    ]


def drifts(among: Sequence[Trainer]) -> dict[str, float]:
    """After a few steps of everyone: distance of the weights from the plain modules', over the way those have come."""
    start = among[0].weights()
    for trainer in among:
        for _ in range(AGREE_STEPS):
            trainer.step()
    end = next(trainer.weights() for trainer in among if trainer.name.startswith("plain"))
    return {trainer.name: float((trainer.weights() - end).norm() / (end - start).norm()) for trainer in among}


def measure_training(
    kind: Kind, models: int, budget: float, stamped: Stamp, device: str, clock: Clock | None = None
) -> list[Row]:
    """A row for each peer."""
    among = trainers(kind, models, device)
    apart = drifts(among)
    gate = "" if apart["ours"] <= MOST_DRIFT else f"gate: our weights are {apart['ours']:.1e} of their way off"
    wrong = {name: f"weights {drift:.1e} of their way off" for name, drift in apart.items() if not drift <= MOST_DRIFT}
    laps = {trainer.name: _steps(trainer) for trainer in among if trainer.name not in wrong}
    times = {} if gate else time_rounds(laps, clock or clock_of(device), budget)
    case = f"a step of {models} models, {kind}, batch {BATCH} each"
    return [
        row(case, "full", trainer.name, times, stamped, device, gate=gate, errors=apart,
            unsupported=wrong.get(trainer.name, ""))
        for trainer in among[1:]
    ]  # fmt: skip


def _steps(trainer: Trainer) -> Lap:
    return lambda: [trainer.step() for _ in range(TIMED_STEPS)], 1 / TIMED_STEPS


# ------------------------------------------------------------------------------------------------ rows and the command


def row(
    case: str,
    direction: Direction,
    peer: str,
    times: Mapping[str, Sequence[float]],
    stamped: Stamp,
    device: str,
    *,
    gate: str,
    unsupported: str,
    errors: Mapping[str, float],
    note: str = "",
) -> Row:
    """A peer's times beside ours of the same rounds, as a row of the harness."""
    theirs, mine = ([1e3 * seconds for seconds in times.get(name, ())] for name in (peer, "ours"))
    ratios = [their / my for their, my in zip(theirs, mine, strict=True)] if theirs else []
    low, middle, high = percentiles(ratios)
    peer_low, peer_middle, peer_high = percentiles(theirs)
    return Row(
        suite="bumps",
        case=case,
        direction=direction,
        peer=peer,
        ratio=middle,
        ratio_low=low,
        ratio_high=high,
        peak_ratio=None,
        error=errors["ours"],
        dtype="float32",
        device=device,
        does_less=note or None,
        unsupported=unsupported or None,
        gate=gate or None,
        rounds=len(ratios),
        our_ms=percentiles(mine)[1],
        peer_ms_low=peer_low,
        peer_ms=peer_middle,
        peer_ms_high=peer_high,
        peer_error=errors[peer],
        our_peak=None,
        peer_peak=None,
        peak_over_io=None,
        backend=backend_of("jet_gelu", device),
        **asdict(stamped),
    )


def run(quick: bool = False, threads: int = 1, json: str | None = None, device: str = "cpu") -> int:
    """Measures both tables and writes what was found. Returns 0, 1 if a gate is red, 2 if the device is not there."""
    if device == "cuda" and not torch.cuda.is_available():
        print("--device cuda: torch sees no CUDA or ROCm device here; leave it out to run on the CPU", file=sys.stderr)
        return IMPOSSIBLE
    RESULTS.mkdir(exist_ok=True)
    effort = QUICK if quick else FULL
    people = Console(stderr=json == "-", highlight=False)
    common = (effort.seconds, stamp(threads, effort.mode, device), device)
    rows: list[Row] = []
    wanted = jobs(quick)
    with following("measure", len(wanted), "cases") as advance:
        for measured in wanted:
            with quiet_process(threads):
                found = measured(*common)
            rows += found
            people.print(table(found))
            advance(1, f"{found[0].case} is done")
    people.print(LEGEND, style="dim")
    report.write(rows, RESULTS / "bumps.csv", json, people)
    return RED if any(row.gate for row in rows) else GREEN


def jobs(quick: bool) -> list[Callable[[float, Stamp, str], list[Row]]]:
    kinds: tuple[Kind, ...] = ("mlp", "cnn")
    bends: tuple[Activation, ...] = (nn.GELU,) if quick else (nn.GELU, nn.ReLU)
    counts = (8,) if quick else (8, 24)
    return [
        *(partial(measure_geometry, kind, bend) for kind in kinds for bend in bends),
        *(partial(measure_training, kind, models) for kind in kinds for models in counts),
    ]


LEGEND = (
    "ratio: peer's time ÷ ours, above 1 we are faster, with the 20th and 80th percentile over interleaved rounds. "
    "error: of geometry, the worst against the fp64 oracle; of a step, distance of the weights from the plain modules' "
    "after a few steps, over their way."
)


def table(rows: Sequence[Row]) -> Group:
    """One case: a line for each peer with a time, and why the others have none."""
    first = rows[0]
    lines = Sheet("peer", "ours ms", "peer ms", "ratio", "20–80 %", "error")
    for each in rows:
        if each.ratio is not None:
            times, spread = (
                (f"{each.our_ms:,.1f}", f"{each.peer_ms:,.1f}"),
                f"{each.ratio_low:.2f}–{each.ratio_high:.2f}",
            )
            name = each.peer + ("*" if each.does_less else "")
            lines.add_row(name, *times, _verdict(each), spread, f"{each.peer_error:.0e}")
    took = first.gate or f"our error {first.error:.0e}"
    heading = Text.assemble((first.case, "bold"), "\n", (took, "bold red" if first.gate else ""))
    return Group(heading, lines, Text("\n".join(report.notes(rows)), style="dim"), "")


def _verdict(each: Row) -> Text:
    wanted = WANTED if each.peer == "loop of jacrev" else 1.0
    return Text(f"{each.ratio:.2f}×", style="bold green" if (each.ratio or 0.0) >= wanted else "bold red")
