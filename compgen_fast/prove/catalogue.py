"""Every launcher of a kernel, with shapes to call it at: the one place that knows how each is called.

A `Case` is one call. It is compiled from meta tensors (`launches`), and emulated or traced on CPU tensors whose values
depend on nothing but the case. There are three lists:

- `REAL`: the shapes users have, in every dtype, called plainly;
- `shipped(architecture)`: for every row of the tuned configurations a shape that selects it, at the row's limits, with
  all options in use: slots masked, weights asked for, k and v the halves of one projection;
- `RAGGED`: small odd shapes, one for each op, direction, variant and dtype, to be compared with the formula in fp64.

To add a kernel, add its op to `SIZES`, a function that makes its arguments to `ARGUMENTS`, and its shapes to the lists.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from compgen_fast.prove.ahead_of_time import TARGETS, Launch, identity, recorded_launches

KERNELS = Path(importlib.import_module("compgen_fast.kernels").__file__ or "").parent
Direction = Literal["forward", "backward", "step"]
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
DTYPES = (BF16, FP16, FP32)
SHORT = {BF16: "bf16", FP16: "fp16", FP32: "fp32", torch.float64: "fp64"}
# What a case's sizes are called: pixels N, heads H, slots S, width D; candidates C, latents L; N of P pixels.
SIZES = {
    "slot_cross_attention": "BNHSD",
    "slot_competition": "BNHSD",
    "jet_cross_attention": "BNHSD",
    "jet_pointwise": "ND",
    "jet_norm": "ND",
    "jet_slot_softmax": "BHSN",
    "recon_error": "CNP",
    "latent_adam": "CL",
}
OPS = tuple(SIZES)
SCALE, EPS = 0.15, 1e-8
COLOURS = 3
SETTINGS = (0.9, 0.99, 1e-8, 5, 0.01, 0.5, 1e-3)  # of latent_adam
STATE = 9  # tensors of latent_adam that a step changes

# Largest error allowed, relative to the largest value of the tensor, as for the interpreter: a few roundings of what
# enters the sums.
TOLERANCE = {FP32: 4e-6, FP16: 3e-3, BF16: 2e-2}
# Times that: second-order channels of jets partly cancel, and so do gradients of shares that add up to one.
SLACK = {"jet_cross_attention": 5.0, "jet_pointwise": 5.0, "jet_norm": 5.0, "jet_slot_softmax": 5.0}
SLACK_OF_COMPETING_GRADIENTS = 4.0


class Maker:
    """Makes a case's tensors: meta tensors, or with values numbers drawn from a seed that counts the tensors."""

    def __init__(self, dtype: torch.dtype, values: bool) -> None:
        self.dtype, self.values, self.count = dtype, values, 0

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        if not self.values:
            return torch.empty(shape, dtype=dtype or self.dtype, device="meta")
        self.count += 1
        return torch.randn(shape, generator=torch.Generator().manual_seed(self.count)).to(dtype or self.dtype)

    def integers(self, *shape: int, below: int, dtype: torch.dtype) -> Tensor:
        if not self.values:
            return torch.empty(shape, dtype=dtype, device="meta")
        self.count += 1
        generator = torch.Generator().manual_seed(self.count)
        return torch.randint(0, below, shape, generator=generator).to(dtype)

    def flags(self, *shape: int) -> Tensor:
        """Two of three are true."""
        if not self.values:
            return torch.empty(shape, dtype=torch.bool, device="meta")
        size = functools.reduce(int.__mul__, shape, 1)
        return (torch.arange(size) % 3 != 2).view(shape)

    def projected(self, *shape: int) -> tuple[Tensor, Tensor]:
        """Two tensors [B,N,H,D] that are the halves of one projection, so that neither is dense."""
        *leading, heads, width = shape
        both = self.normal(*leading, 2, heads, width)
        return both.select(-3, 0), both.select(-3, 1)


@dataclass(frozen=True)
class Case:
    """One call of a launcher. ``variant`` says which function, or which options; ``sizes`` are named in `SIZES`."""

    op: str
    direction: Direction
    variant: str
    dtype: torch.dtype
    sizes: tuple[int, ...]

    @property
    def shape(self) -> str:
        return " ".join(f"{name}{size}" for name, size in zip(SIZES[self.op], self.sizes, strict=True))

    @property
    def name(self) -> str:
        parts = (self.op, self.direction, self.variant, SHORT[self.dtype], self.shape)
        return " ".join(part for part in parts if part)

    @property
    def use(self) -> Use:
        return Use(self.op, self.direction, SHORT[self.dtype])

    @property
    def tolerance(self) -> float:
        """Largest error allowed, relative to the largest value. latent_adam's state is fp32 whatever the gradient."""
        if self.op == "slot_competition" and self.direction == "backward":
            return SLACK_OF_COMPETING_GRADIENTS * TOLERANCE[self.dtype]
        return SLACK.get(self.op, 1.0) * TOLERANCE[FP32 if self.op == "latent_adam" else self.dtype]

    def arguments(self, values: bool) -> tuple[Any, ...]:
        """The launcher's arguments: CPU tensors with values, or meta tensors."""
        return ARGUMENTS[self.op](self, Maker(self.dtype, values))

    def inputs(self, arguments: tuple[Any, ...]) -> list[Tensor]:
        """The tensors among the arguments, all of which have their values before the launch."""
        return [each for each in arguments if isinstance(each, Tensor)]

    def launch(self, arguments: tuple[Any, ...]) -> tuple[Tensor, ...]:
        """What the launcher computes; of a step, the state that it has changed."""
        kernels = importlib.import_module(f"compgen_fast.kernels.{self.op}")
        prefix = f"{self.function}_" if self.function else ""
        return self._results(getattr(kernels, f"{prefix}{self.direction}"), arguments)

    def results_on_meta(self) -> tuple[Tensor, ...]:
        """The results without values."""
        with recorded_launches():
            return self.launch(self.arguments(values=False))

    def reference(self, arguments: tuple[Any, ...]) -> tuple[Tensor, ...]:
        """The same by the op's formula, in fp64; the arguments stay as they are."""
        formulas = importlib.import_module(f"compgen_fast.ops.{self.op}")
        prefix = f"{self.function}_" if self.function else ""
        suffix = "_backward" if self.direction == "backward" else ""
        exact = tuple(_exact(each) for each in arguments)
        if self.op == "slot_competition" and suffix:  # weights, updates and mass are computed again
            exact = exact[:6] + exact[9:]
        return self._results(getattr(formulas, f"{prefix}reference{suffix}"), exact)

    @property
    def function(self) -> str:
        """The first part of the launcher's name, where a file has several."""
        if self.op == "jet_pointwise":
            return self.variant.split()[0].strip(",")
        return f"{self.variant.split()[0].strip(',')}_norm" if self.op == "jet_norm" else ""

    def _results(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[Tensor, ...]:
        results = function(*arguments)
        if self.direction == "step":
            return arguments[:STATE]
        return results if isinstance(results, tuple) else (results,)


def _exact(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.to(torch.float64) if value.is_floating_point() else value.clone()  # a copy in either case


def _attention(case: Case, make: Maker) -> tuple[Any, ...]:
    """q, k, v and what follows them, of all three ops that compare pixels with slots."""
    B, N, H, S, D = case.sizes
    masked = case.variant == "masked"
    mask = make.flags(B, S) if masked else None
    if case.op == "slot_competition":
        q = make.normal(B, S, H, D)
        k, v = make.projected(B, N, H, D) if masked else (make.normal(B, N, H, D), make.normal(B, N, H, D))
        return q, k, v, mask
    if case.op == "jet_cross_attention":
        q, rows = make.normal(1 if case.variant == "still" else 4, B, N, H, D), (2, B, S, H, D)
        k, v = make.projected(*rows) if masked else (make.normal(*rows), make.normal(*rows))
        return q, k, v, make.flags(S, B).t().contiguous(), mask
    q = make.projected(B, N, H, D)[0] if masked else make.normal(B, N, H, D)
    k, v = make.projected(B, S, H, D) if masked else (make.normal(B, S, H, D), make.normal(B, S, H, D))
    return q, k, v, mask


def _slot_cross_attention(case: Case, make: Maker) -> tuple[Any, ...]:
    B, N, H, S, D = case.sizes
    inputs, weights = _attention(case, make), case.variant == "masked"
    if case.direction == "forward":
        return *inputs, SCALE, weights
    return make.normal(B, N, H, D), make.normal(B, N, S) if weights else None, *inputs, SCALE


def _slot_competition(case: Case, make: Maker) -> tuple[Any, ...]:
    B, N, H, S, D = case.sizes
    inputs, weights = _attention(case, make), case.variant == "masked"
    if case.direction == "forward":
        return *inputs, SCALE, EPS, weights
    formulas = importlib.import_module("compgen_fast.ops.slot_competition")
    updates, _, mass = formulas.reference(*inputs, SCALE, EPS, False)
    grads = make.normal(B, S, H, D), make.normal(B, N, S) if weights else None
    return *grads, *inputs, None, updates, mass.to(FP32), SCALE, EPS


def _jet_cross_attention(case: Case, make: Maker) -> tuple[Any, ...]:
    B, N, H, _, D = case.sizes
    inputs = _attention(case, make)
    return (*inputs, SCALE) if case.direction == "forward" else (make.normal(4, B, N, H, D), *inputs, SCALE)


def _jet_rows(case: Case, make: Maker) -> tuple[Any, ...]:
    """The gradient, if any, and x of the ops that take rows of jets."""
    x = make.normal(3 if "3 channels" in case.variant else 4, *case.sizes)
    return (x,) if case.direction == "forward" else (make.normal(4, *case.sizes), x)


def _jet_pointwise(case: Case, make: Maker) -> tuple[Any, ...]:
    tanh = ("tanh" in case.variant,) if case.function == "gelu" else ()
    return *_jet_rows(case, make), *tanh


def _jet_norm(case: Case, make: Maker) -> tuple[Any, ...]:
    rows, width = _jet_rows(case, make), case.sizes[-1]
    weight = None if "no weight" in case.variant else make.normal(width)
    if case.direction == "backward" or case.function == "rms_norm":
        return *rows, weight, 1e-5
    return *rows, weight, None if weight is None else make.normal(width), 1e-5


def _jet_slot_softmax(case: Case, make: Maker) -> tuple[Any, ...]:
    B, H, S, N = case.sizes
    blocks = 2 if case.variant == "still" else 7
    side = make.flags(S, B).t().contiguous()
    if case.direction == "forward":
        return make.normal(blocks, B, H, S, N), make.normal(2, B, H, S), side
    return make.normal(7, B, H, S, N), make.normal(7, B, H, S, N).abs() / 5, side, blocks


def _recon_error(case: Case, make: Maker) -> tuple[Any, ...]:
    C, N, P = case.sizes
    chosen = case.variant == "chosen"
    images = max(1, C // 16) if chosen else C
    y, x = make.normal(C, N, COLOURS), make.integers(images, P, COLOURS, below=256, dtype=torch.uint8)
    if not chosen:
        return y, x, None, None, None
    which = torch.arange(C, device=y.device) * images // C  # restarts for one image are neighbours, as in search
    where = make.integers(N, below=P, dtype=torch.int64)
    return y, x, make.normal(images, P, dtype=FP32).abs(), which, where


def _latent_adam(case: Case, make: Maker) -> tuple[Any, ...]:
    C, L = case.sizes
    rows = [make.normal(C, L, dtype=FP32).abs() for _ in range(4)]
    numbers = [make.normal(C, dtype=FP32).abs() for _ in range(2)]
    counts = [make.integers(C, below=5, dtype=torch.int32) for _ in range(2)]
    return *rows, *numbers, *counts, make.flags(C), make.normal(C, L), make.normal(C, dtype=FP32).abs(), *SETTINGS


ARGUMENTS: dict[str, Callable[[Case, Maker], tuple[Any, ...]]] = {
    "slot_cross_attention": _slot_cross_attention,
    "slot_competition": _slot_competition,
    "jet_cross_attention": _jet_cross_attention,
    "jet_pointwise": _jet_pointwise,
    "jet_norm": _jet_norm,
    "jet_slot_softmax": _jet_slot_softmax,
    "recon_error": _recon_error,
    "latent_adam": _latent_adam,
}


def directions(op: str) -> tuple[Direction, ...]:
    if op == "latent_adam":
        return ("step",)
    return ("forward",) if op == "recon_error" else ("forward", "backward")


def _cases(
    op: str, variants: tuple[str, ...], shapes: tuple[tuple[int, ...], ...], dtypes: tuple[torch.dtype, ...] = DTYPES
) -> tuple[Case, ...]:
    return tuple(
        Case(op, direction, variant, dtype, sizes)
        for variant, sizes, direction, dtype in itertools.product(variants, shapes, directions(op), dtypes)
    )


REAL = (
    *_cases("slot_cross_attention", ("plain",), ((1, 16384, 12, 7, 43), (4, 4096, 4, 7, 64))),
    *_cases("slot_cross_attention", ("plain",), ((4, 4096, 4, 7, 32),), (BF16,)),
    *_cases(
        "slot_competition",
        ("plain",),
        ((8, 4096, 1, 7, 64), (8, 16384, 1, 7, 43), (8, 4096, 2, 7, 43), (8, 4096, 2, 7, 64), (8, 4096, 4, 7, 64)),
    ),
    *_cases("slot_competition", ("plain",), ((8, 4096, 1, 7, 32),), (BF16,)),
    *_cases("jet_cross_attention", ("plain",), ((1, 16384, 12, 7, 43), (4, 4096, 4, 7, 64))),
    *_cases("jet_pointwise", ("gelu", "gelu tanh", "silu"), ((16384, 360),)),
    *_cases("jet_norm", ("layer", "rms"), ((16384, 180),)),
    *_cases("jet_slot_softmax", ("moved",), ((1, 12, 7, 16384),)),
    *_cases("recon_error", ("whole",), ((256, 4096, 4096),)),
    *_cases("recon_error", ("chosen",), ((1024, 1024, 16384),)),
    *_cases("latent_adam", ("",), ((4096, 448), (4096, 64))),
)

RAGGED = (
    *_cases("slot_cross_attention", ("plain", "masked"), ((2, 37, 2, 7, 43),)),
    *_cases(
        "slot_competition",
        ("plain", "masked"),
        ((2, 37, 1, 7, 43), (2, 37, 2, 7, 43), (2, 37, 4, 7, 43), (2, 37, 7, 7, 43)),  # seven heads take two passes
    ),
    *_cases("jet_cross_attention", ("plain", "masked", "still"), ((2, 37, 2, 7, 43),)),
    *_cases("jet_pointwise", ("gelu", "gelu tanh", "silu", "silu, 3 channels"), ((11, 181),)),
    *_cases("jet_norm", ("layer", "layer, 3 channels", "rms", "rms, no weight"), ((11, 180),)),
    *_cases("jet_slot_softmax", ("moved", "still"), ((2, 2, 7, 37),)),
    *_cases("recon_error", ("whole",), ((5, 37, 37),)),
    *_cases("recon_error", ("chosen",), ((5, 37, 64),)),
    *_cases("latent_adam", ("",), ((9, 50),)),
)


class ShippedRow(NamedTuple):
    """One row of the tuned configurations: the most slots and the widest head it is for, and what it sets."""

    kernel: str  # op, direction and, of some, a kind: "jet_cross_attention backward, odd width"
    bits: int
    S: int
    D: int
    BLOCK_N: int
    BLOCK_D: int
    num_warps: int
    num_stages: int

    def cases(self) -> tuple[Case, ...]:
        """Calls at the row's limits, which select it."""
        op, _, rest = self.kernel.partition(" ")
        name, _, kind = rest.partition(", ")
        direction: Direction = "backward" if name == "backward" else "forward"
        dtype, D = {16: BF16, 32: FP32}[self.bits], self.D - 1 if kind == "odd width" else self.D
        if op == "latent_adam":
            return (Case(op, "step", "", dtype, (1024, D)),)
        if op == "jet_norm":
            return (Case(op, direction, "layer", dtype, (4096, D)),)
        if kind == "packed":  # two heads in a tile
            return (Case(op, direction, "masked", dtype, (1, 4096, 2, self.S // 2, self.D // 2 - 1)),)
        whole = Case(op, direction, "masked", dtype, (1, 4096, 5, self.S, D))  # five heads share no tile
        if op != "slot_competition":
            return (whole,)
        packed = replace(whole, sizes=(1, 4096, 4, self.S // 4, D // 4))
        return whole, replace(whole, sizes=(1, 4096, 1, self.S, D)), *((packed,) if self.S <= 32 else ())


@functools.cache
def shipped_rows(architecture: str) -> tuple[ShippedRow, ...]:
    launch = importlib.import_module("compgen_fast.kernels.launch")
    return tuple(
        ShippedRow(kernel, int(bits.split()[0]), *row)
        for kernel, by_size in launch.configurations()[architecture]["kernels"].items()
        for bits, rows in by_size.items()
        for row in rows
    )


def shipped(architecture: str) -> tuple[Case, ...]:
    """Every tuned configuration, and the kernels without one at the limits of their tiles."""
    return (
        *(case for row in shipped_rows(architecture) for case in row.cases()),
        *_cases("jet_slot_softmax", ("moved",), ((1, 2, 1, 4096), (1, 2, 64, 4096)), (BF16, FP32)),
    )


def configured(architecture: str) -> contextlib.AbstractContextManager[None]:
    """Within it, launchers use the configurations tuned for this architecture."""
    launch = importlib.import_module("compgen_fast.kernels.launch")
    context: contextlib.AbstractContextManager[None] = launch.architecture(architecture)
    return context


@functools.cache
def launches(case: Case, architecture: str) -> tuple[Launch, ...]:
    """What the case launches on this architecture, on meta tensors."""
    arguments = case.arguments(values=False)
    with configured(architecture), recorded_launches() as recorded:
        case.launch(arguments)
    return tuple(recorded)


class Use(NamedTuple):
    """What climbs the ladder: an op in one direction and dtype."""

    op: str
    direction: Direction
    dtype: str


@dataclass(frozen=True)
class Compilation:
    """One kernel to compile: a launch that no earlier case makes alike."""

    name: str  # the case's and the kernel's
    case: Case
    launch: Launch
    users: frozenset[Use]  # all that launch it: several ops add up partial sums with one kernel


@functools.cache
def compilations(architecture: str) -> dict[str, Compilation]:
    """All that is compiled of `REAL` and `shipped`, by name, each once."""
    found: dict[str, tuple[str, Case, Launch, set[Use]]] = {}
    for case in dict.fromkeys((*REAL, *shipped(architecture))):
        names: list[str] = []
        for launch in launches(case, architecture):
            names.append(launch.name)
            again = f" {names.count(launch.name)}" if names.count(launch.name) > 1 else ""
            first = f"{case.name}: {launch.name}{again}", case, launch, set[Use]()
            found.setdefault(identity(launch, TARGETS[architecture]), first)[3].add(case.use)
    return {name: Compilation(name, case, launch, frozenset(uses)) for name, case, launch, uses in found.values()}
