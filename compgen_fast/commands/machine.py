"""`cgf env`, `bench`, `prove`, `tune`: what runs here, how fast, and how far GPU code is proven without a GPU."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from compgen_fast.commands.common import UsageError, check_cuda, load, refusals


@dataclass(frozen=True)
class Env:
    """Show versions, devices, and which backend serves each op and why."""

    json: bool = False
    """Print one JSON object instead of tables."""

    def run(self) -> int:
        code: int = load("compgen_fast.env").run(as_json=self.json)
        return code


@dataclass(frozen=True)
class Bench:
    """Time our code against its peers, interleaved, after checking that they agree."""

    suite: tyro.conf.Positional[Literal["slots", "jets", "stream", "train", "search", "bumps", "generate"]]
    """What to time."""
    quick: bool = False
    """Few repetitions: a look, not a measurement."""
    threads: int = 1
    """CPU threads for every contestant."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where to run."""
    json: Annotated[str | None, tyro.conf.arg(metavar="PATH|-")] = None
    """Also write the rows as JSON to this file; - prints them, and only them."""

    def run(self) -> int:
        self.check()
        suite = load(f"compgen_fast.bench.{self.suite}")
        code: int = suite.run(quick=self.quick, threads=self.threads, json=self.json, device=self.device)
        return code

    def check(self) -> None:
        if self.threads < 1:
            raise UsageError(f"--threads is {self.threads}; it must be at least 1")
        if self.json not in (None, "-") and not Path(self.json).parent.is_dir():
            raise UsageError(f"--json {self.json}: the folder {Path(self.json).parent} does not exist; create it first")
        if self.device == "cuda":
            check_cuda()


@dataclass(frozen=True)
class Prove:
    """How far each GPU kernel is proven, without a GPU: compiled for four architectures, within budget, emulated."""

    kernel: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """One op's kernels only, such as slot_cross_attention."""
    arch: Annotated[str | None, tyro.conf.arg(metavar="NAME,NAME")] = None
    """Some architectures only, with commas between: sm_80, sm_90, sm_100, gfx942."""
    json: Annotated[str | None, tyro.conf.arg(metavar="PATH|-")] = None
    """Also write everything as JSON to this file; - prints it, and only it."""
    record: bool = False
    """Show how the figures differ from the budgets, and make them the budgets."""
    page: Path | None = None
    """Also write the tables into this page, such as docs/prove.md."""

    def run(self) -> int:
        if self.json not in (None, "-") and not Path(self.json).parent.is_dir():
            raise UsageError(f"--json {self.json}: the folder {Path(self.json).parent} does not exist; create it first")
        prove = load("compgen_fast.prove.command")
        with refusals():
            code: int = prove.run(
                kernel=self.kernel, arch=self.arch, json_path=self.json, record=self.record, page=self.page
            )
        return code


@dataclass(frozen=True)
class Tune:
    """Choose how kernels are launched: by a model of each GPU, or on a real one. Rewrites kernels/configs.json."""

    kernel: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """One op's kernels only, such as slot_cross_attention."""
    arch: Annotated[str | None, tyro.conf.arg(metavar="NAME,NAME")] = None
    """Some architectures only, with commas between; with --device cuda it is that of the device."""
    device: Literal["model", "cuda"] = "model"
    """What judges a configuration: the model of the roofline, or the clock of this machine's GPU."""

    def run(self) -> int:
        if self.device == "cuda":
            check_cuda()
            if self.arch is not None:
                raise UsageError("--arch goes with --device model; with cuda the architecture is the device's")
        with refusals():
            code: int = load("compgen_fast.prove.tune_command").run(self.kernel, self.arch, self.device)
        return code
