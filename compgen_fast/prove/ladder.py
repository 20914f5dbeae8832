"""The proof ladder: how high each op, in each direction and dtype, has climbed on each architecture, and why no higher.

1. the formula in fp64, gradcheck; 2. C++ and torch against it; 3. the Triton source in the interpreter: reached where
   the test files that prove them are there (`TESTS`), which `make test` runs;
4. compiled ahead of time, within its budget (see `budgets`);
5. the compiled code executed by the emulator on a ragged shape, in agreement with the formula in fp64; at real shapes
   some of its blocks are traced as well, for what they move (see `roofline`);
6. measured on a GPU, which nothing here can do.

Compiling and emulating run in two processes. What they found is kept in ~/.cache/compgen_fast/prove, or below
$XDG_CACHE_HOME, under a name made of all that it depends on: the source with its configuration, the tools, Triton.
"""

from __future__ import annotations

import functools
import hashlib
import json
import multiprocessing
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import triton
from rich.console import Console

from compgen_fast.files import write_whole
from compgen_fast.progress import following
from compgen_fast.prove.ahead_of_time import TARGETS, Figures, cost, identity
from compgen_fast.prove.catalogue import (
    FP16,
    KERNELS,
    RAGGED,
    REAL,
    Case,
    Compilation,
    Use,
    compilations,
    configured,
    launches,
)
from compgen_fast.prove.chips import CHIPS, Occupancy, occupancy
from compgen_fast.prove.emulate import emulated
from compgen_fast.prove.emulator import Fault
from compgen_fast.prove.roofline import Work, work

PROCESSES = 2
PACKAGE = Path(__file__).parents[1]
ROOT = PACKAGE.parent
EMULATED = ("sm_80", "sm_90")
TRACED = "sm_80"
# What machine code of the matrix units of newer chips, and of their copies of whole tiles, is made of.
BEYOND = {"HGMMA": "wgmma", "UTCHMMA": "tcgen05", "UTCQMMA": "tcgen05", "UTCOMMA": "tcgen05", "UTMALDG": "TMA"}
NOT_EXECUTED = "it uses {}, which the emulator does not execute"
_CONTRACT, _JETS, _LAUNCHERS = (
    "tests/ops/test_contract.py",
    "tests/ops/test_jet_ops.py",
    "tests/kernels/test_launchers.py",
)
_SOFTMAX, _JET_LAUNCHERS = "tests/ops/test_jet_slot_softmax.py", "tests/kernels/test_jet_launchers.py"
_RECON, _ADAM = "tests/ops/test_recon_error.py", "tests/ops/test_latent_adam.py"
# The files that prove rungs 1, 2 and 3. Those of tests/ops run once more with the kernels in the interpreter.
TESTS: dict[str, tuple[str, str, str]] = {
    "slot_cross_attention": (_CONTRACT, _CONTRACT, _LAUNCHERS),
    "slot_competition": (_CONTRACT, _CONTRACT, _LAUNCHERS),
    "jet_cross_attention": (_JETS, _JETS, _JET_LAUNCHERS),
    "jet_pointwise": (_JETS, _JETS, _JET_LAUNCHERS),
    "jet_norm": (_JETS, _JETS, _JET_LAUNCHERS),
    "jet_slot_softmax": (_SOFTMAX, _SOFTMAX, _JET_LAUNCHERS),
    "recon_error": (_RECON, _RECON, _RECON),
    "latent_adam": (_ADAM, _ADAM, _ADAM),
}


@dataclass(frozen=True)
class Row:
    """One compiled kernel on one architecture."""

    name: str
    architecture: str
    case: Case
    kernel: str
    real: bool  # at a shape users have; else at the limits of a shipped configuration
    options: dict[str, Any]
    figures: Figures
    users: frozenset[Use]

    @property
    def occupancy(self) -> Occupancy:
        return occupancy(CHIPS[self.architecture], self.figures.registers, self.figures.shared, self.warps)

    @property
    def warps(self) -> int:
        return int(self.options.get("num_warps", 4))

    @property
    def config(self) -> dict[str, int]:
        """The tile and how it is launched."""
        shown = ("BLOCK", "num_")
        return {name: value for name, value in self.options.items() if name.startswith(shown)}


@dataclass(frozen=True)
class Failure:
    """A kernel that was not compiled, and why."""

    name: str
    architecture: str
    users: frozenset[Use]
    why: str


@dataclass(frozen=True)
class Emulated:
    """One ragged case in the emulator. ``error`` is the largest as a share of what is allowed, ``why`` empty if all
    is well.
    """

    case: Case
    architecture: str
    error: float | None
    why: str


@dataclass(frozen=True)
class Ladder:
    rows: tuple[Row, ...]
    failures: tuple[Failure, ...]
    emulations: tuple[Emulated, ...]
    works: tuple[tuple[Case, Work], ...] = ()  # of the shapes users have


class Step(NamedTuple):
    """How high a use has climbed on one architecture, and why no higher."""

    rung: int
    why: str


class Job(NamedTuple):
    kind: Literal["compile", "emulate", "trace"]
    architecture: str
    name: str  # of a compilation or of a case


_named = {case.name: case for case in (*RAGGED, *REAL)}


def climb(architectures: Sequence[str], ops: Sequence[str], console: Console | None = None) -> Ladder:
    """Compile, emulate and trace all that the catalogue has of these ops, or remember what it came to. The console, if
    given, is told how far it is.
    """
    jobs = [
        *(Job("trace", TRACED, case.name) for case in _of(REAL, ops) if TRACED in architectures and case.dtype != FP16),
        *(Job("emulate", name, case.name) for name in architectures if name in EMULATED for case in _of(RAGGED, ops)),
        *(
            Job("compile", name, compilation.name)
            for name in architectures
            for compilation in compilations(name).values()
            if any(use.op in ops for use in compilation.users)
        ),
    ]
    known = {job: found for job in jobs if (found := _remembered(job)) is not None}
    missing = [job for job in jobs if job not in known]
    with following(
        "compile and emulate", len(jobs), "cases", done=len(known), show=console is not None, console=console
    ) as advance:
        for job, result in in_processes(missing):
            known[job] = result
            advance()
    return _assembled([(job, known[job]) for job in jobs])


def _of(cases: Iterable[Case], ops: Sequence[str]) -> Iterator[Case]:
    return (case for case in cases if case.op in ops)


def _assembled(results: list[tuple[Job, dict[str, Any]]]) -> Ladder:
    rows, failures, emulations, works = [], [], [], []
    for job, result in results:
        if job.kind == "emulate":
            emulations.append(Emulated(_named[job.name], job.architecture, **result))
            continue
        if job.kind == "trace":
            works.append((_named[job.name], Work.restored(result)))
            continue
        compilation = compilations(job.architecture)[job.name]
        if "why" in result:
            failures.append(Failure(job.name, job.architecture, compilation.users, result["why"]))
        else:
            rows.append(row(compilation, job.architecture, _figures(result)))
    return Ladder(tuple(rows), tuple(failures), tuple(emulations), tuple(works))


def row(compilation: Compilation, architecture: str, figures: Figures) -> Row:
    case, launch = compilation.case, compilation.launch
    options = launch.options
    return Row(
        compilation.name, architecture, case, launch.name, case in REAL, options, figures, compilation.users
    )  # fmt: skip


def compiled(compilation: Compilation, architecture: str) -> Row:
    """The row of one compilation, from the cache or compiled here."""
    job = Job("compile", architecture, compilation.name)
    result = _remembered(job) or perform(job)
    if "why" in result:
        raise RuntimeError(f"{compilation.name} on {architecture}: {result['why']}")
    return row(compilation, architecture, _figures(result))


# ------------------------------------------------------------------------------------------ one job


def perform(job: Job) -> dict[str, Any]:
    """Compile, emulate or trace, and keep the result for the next time unless it is a failure to compile."""
    if job.kind == "compile":
        result = _compile(job)
    elif job.kind == "emulate":
        result = emulate(_named[job.name], job.architecture)
    else:
        result = asdict(work(_named[job.name], job.architecture))
    if job.kind != "compile" or "why" not in result:
        path = _cache() / _key(job)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(result))
    return result


def _compile(job: Job) -> dict[str, Any]:
    launch = compilations(job.architecture)[job.name].launch
    try:
        return asdict(cost(launch, TARGETS[job.architecture]))
    except Exception as error:  # whatever a compiler says is an answer
        return {"why": f"not compiled: {_sentence(error)}"}


def emulate(case: Case, architecture: str) -> dict[str, Any]:
    """The case in the emulator against its formula in fp64: the error as a share of what is allowed, what is wrong."""
    arguments = case.arguments(values=True)
    expected = case.reference(arguments)
    try:
        with configured(architecture), emulated(case.inputs(arguments), target=architecture):
            results = case.launch(arguments)
    except Fault as fault:
        return {"error": None, "why": f"the emulator found a fault: {fault}"}
    except Exception as refusal:  # an instruction that it does not know is met in many places
        beyond = _beyond(cost(launch, TARGETS[architecture]) for launch in launches(case, architecture))
        return {"error": None, "why": NOT_EXECUTED.format(beyond) if beyond else f"not emulated: {_sentence(refusal)}"}
    error = max(_error(*each) for each in zip(results, expected, strict=True)) / case.tolerance
    wrong = "" if error <= 1 else f"emulated, it is {error:.1f} times as far from the formula as allowed"
    return {"error": error, "why": wrong}


def _error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest error relative to the largest value; infinite where there is a NaN."""
    if not expected.numel():
        return 0.0
    off = (result.double() - expected.double()).abs().max().item() / max(expected.double().abs().max().item(), 1e-2)
    return off if off == off else float("inf")


def _beyond(figures: Iterable[Figures]) -> str:
    used = {feature for each in figures for opcode, feature in BEYOND.items() if opcode in each.instructions}
    return " and ".join(sorted(used))


def _sentence(error: Exception) -> str:
    unknown = re.search(r"does not know '(\w+)", str(error))
    if unknown:  # where and with which registers is not to the point
        return f"the emulator does not know {unknown.group(1)}"
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1] if lines else 'no reason given'}"


# ------------------------------------------------------------------------------------------ many jobs


Performer = Callable[[Job], dict[str, Any]]


def in_processes(jobs: list[Job], perform: Performer = perform) -> Iterator[tuple[Job, dict[str, Any]]]:
    """All jobs in processes of their own. A compiler that crashes takes its process along, and all that wait for it:
    what is then left runs one at a time, so that it is seen which job it was.
    """
    left = dict.fromkeys(jobs)
    try:
        for job, result in _through_pool(list(left), PROCESSES, perform):
            del left[job]
            yield job, result
    except BrokenProcessPool:
        for job in list(left):
            try:
                yield from _through_pool([job], 1, perform)
            except BrokenProcessPool:
                yield (
                    job,
                    {"why": "not compiled: the compiler crashed", **({"error": None} if job.kind == "emulate" else {})},
                )


def _through_pool(jobs: list[Job], processes: int, perform: Performer) -> Iterator[tuple[Job, dict[str, Any]]]:
    if not jobs:
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        futures: dict[Future[dict[str, Any]], Job] = {pool.submit(perform, job): job for job in jobs}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


# ------------------------------------------------------------------------------------------ what is remembered


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "compgen_fast" / "prove"


def _remembered(job: Job) -> dict[str, Any] | None:
    path = _cache() / _key(job)
    return json.loads(path.read_text()) if path.exists() else None


def _key(job: Job) -> str:
    """A name made of all that the result of a job depends on."""
    target, files = TARGETS[job.architecture], ["prove/ahead_of_time.py"]
    if job.kind == "compile":
        launched = [compilations(job.architecture)[job.name].launch]
    else:
        case = _named[job.name]
        launched = list(launches(case, job.architecture))
        launchers = [f"kernels/{name}.py" for name in ("launch", "jet", case.op)]
        files += ["prove/catalogue.py", "prove/emulate.py", "prove/roofline.py", "prove/emulator", "ops", *launchers]
    parts = (str(job), triton.__version__, _content(tuple(files)), *(identity(launch, target) for launch in launched))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


@functools.cache
def _content(names: tuple[str, ...]) -> str:
    """Of files of the package, and of folders their Python files."""
    found = hashlib.sha256()
    for name in names:
        folder, _, inside = name.partition("/")  # kernels lie elsewhere than where they are installed
        place = KERNELS / inside if folder == "kernels" else PACKAGE / name
        for path in sorted(place.glob("*.py")) if place.is_dir() else [place]:
            found.update(path.read_bytes())
    return found.hexdigest()


def _figures(stored: dict[str, Any]) -> Figures:
    widths = {kind: {int(bits): count for bits, count in stored[kind].items()} for kind in ("loads", "stores")}
    return Figures(**(stored | widths))


# ------------------------------------------------------------------------------------------ rungs


def steps(ladder: Ladder, broken: frozenset[tuple[str, str]]) -> dict[Use, dict[str, Step]]:
    """How high each use has climbed on each architecture. ``broken`` holds (kernel's name, architecture) of budgets."""
    cases = [*(row.case for row in ladder.rows), *(each.case for each in ladder.emulations)]
    uses = dict.fromkeys(case.use for case in cases)
    architectures = dict.fromkeys(row.architecture for row in ladder.rows)
    return {use: {name: _step(ladder, broken, use, name) for name in architectures} for use in uses}


def _step(ladder: Ladder, broken: frozenset[tuple[str, str]], use: Use, architecture: str) -> Step:
    for rung, file in enumerate(TESTS[use.op], start=1):
        if not (ROOT / file).exists():
            return Step(rung - 1, f"{file} is not here")
    failed = [each for each in ladder.failures if each.architecture == architecture and use in each.users]
    if failed:
        return Step(3, failed[0].why)
    rows = [row for row in ladder.rows if row.architecture == architecture and use in row.users]
    over = [row.kernel for row in rows if (row.name, architecture) in broken]
    if over:
        return Step(3, f"{over[0]} breaks its budget")
    return Step(*_emulated(ladder, rows, use, architecture))


def _emulated(ladder: Ladder, rows: list[Row], use: Use, architecture: str) -> tuple[int, str]:
    if architecture not in EMULATED:
        if CHIPS[architecture].warp_size == 64:
            return 4, "not emulated: its instructions are not PTX"
        beyond = _beyond(row.figures for row in rows)
        return 4, NOT_EXECUTED.format(beyond) if beyond else "not emulated: code for sm_80 is"
    mine = [each for each in ladder.emulations if each.architecture == architecture and each.case.use == use]
    wrong = [each.why for each in mine if each.why] if mine else ["there is no ragged case of it"]
    return (4, wrong[0]) if wrong else (5, "no GPU has run it")
