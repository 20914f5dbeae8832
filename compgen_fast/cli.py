"""The `compgen` command: parses arguments and hands over. It holds no logic and imports torch only to run a command.

Exit codes: 0 done, 2 the user asked for something impossible (one sentence says what), 130 interrupted.
"""

import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Annotated, Literal

import tyro


class UsageError(Exception):
    """The request cannot be met, and its message tells the user what to change."""


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
    """Time our kernels against their peers, interleaved, after checking that they agree."""

    suite: tyro.conf.Positional[Literal["slots", "jets"]]
    """Which kernels."""
    quick: bool = False
    """Few repetitions: a look, not a measurement."""
    threads: int = 1
    """CPU threads for every contestant."""
    json: Annotated[str | None, tyro.conf.arg(metavar="PATH|-")] = None
    """Also write the rows as JSON to this file; - prints them, and only them."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where to run."""

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


def load(module: str) -> ModuleType:
    """Import what a command needs. The ops refuse a wrong COMPGEN_BACKEND while they are imported."""
    try:
        return import_module(module)
    except ValueError as refusal:
        raise UsageError(str(refusal)) from None


def check_cuda() -> None:
    import torch

    if not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no CUDA or ROCm device here; `compgen env` says what it sees")


Command = Annotated[Env, tyro.conf.subcommand("env")] | Annotated[Bench, tyro.conf.subcommand("bench")]


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code. Wrong syntax exits 2 inside tyro."""
    command: Env | Bench = tyro.cli(
        Command,
        prog="compgen",
        description="Train, invert and measure models that generalise by composition.",
        args=arguments,
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    try:
        return command.run()
    except UsageError as error:
        print(f"compgen: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
