"""The `cgf` command: parses arguments and hands over. It holds no logic and imports torch only to run a command.

exits.py declares what it exits with, and docs/exit_codes.md tells it.
"""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Union

import tyro

from compgen_fast import __version__
from compgen_fast.commands.common import UsageError, load, refusals, refuse_unknown
from compgen_fast.commands.data import Index, Inspect, Pack, Verify, World
from compgen_fast.commands.inversion import Replay, Search
from compgen_fast.commands.machine import Bench, Env, Prove, Tune
from compgen_fast.commands.options import REGISTRY
from compgen_fast.commands.studies import Study
from compgen_fast.exits import Exit


@dataclass(frozen=True)
class WithRecipe:
    """Here for the list of commands only: these are parsed by compgen_fast.train.command, which knows the recipes."""

    def run(self) -> int:
        raise AssertionError("parsed elsewhere")


COMMANDS: dict[str, type] = {
    "env": Env,
    "world": World,
    "pack": Pack,
    "index": Index,
    "verify": Verify,
    "inspect": Inspect,
    "bench": Bench,
    "prove": Prove,
    "tune": Tune,
    "search": Search,
    "replay": Replay,
    "study": Study,
}
RECIPE_COMMANDS = {
    "train": "Train by a recipe.",
    "profile": "Where the time of a recipe's step goes.",
    "model": "A recipe's model: parameters, FLOPs per image, shapes.",
    "scale-plan": "What a recipe would do on many GPUs, modelled.",
}

GO_ON = ("pack", "search", "replay", "study")


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code. Wrong syntax exits 2 inside tyro."""
    given = sys.argv[1:] if arguments is None else arguments
    try:
        return _flushed(lambda: _run(given))
    except UsageError as error:
        print(f"cgf: {error}", file=sys.stderr)
        return Exit.REFUSED
    except KeyboardInterrupt:
        if given and given[0] in GO_ON:
            print("cgf: interrupted; the same command goes on where it stopped", file=sys.stderr)
        return Exit.INTERRUPTED
    except BrokenPipeError:  # `cgf … | head`: nobody reads on, which is no fault
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.READER_GONE


def _flushed(run: Callable[[], int]) -> int:
    """What is still in the buffer of stdout is written here, where a reader that went away can be told apart."""
    try:
        return run()
    finally:
        sys.stdout.flush()


def _run(given: Sequence[str]) -> int:
    if given == ["--version"]:
        print(f"compgen-fast {__version__}")
        return 0
    refuse_unknown(given, "command", [*COMMANDS, *RECIPE_COMMANDS])
    if given and given[0] in RECIPE_COMMANDS:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch complains of hosts without a name
        with refusals():
            code: int = load("compgen_fast.train.command").run(given)
        return code
    code = parse(given).run()
    return code


def parse(given: Sequence[str]) -> Any:
    """The command and its options. Only the command that is asked for is parsed, so that advice is about it alone."""
    name = given[0] if given and given[0] in COMMANDS else None
    return tyro.cli(
        COMMANDS[name] if name else _any_command(),
        prog=f"cgf {name}" if name else "cgf",
        description=None if name else "Train, invert and measure models that generalise by composition.",
        args=given[1:] if name else given,
        config=(tyro.conf.FlagCreatePairsOff,),
        registry=REGISTRY,
    )


def _any_command() -> Any:
    """Every command as a subcommand of its name: what --help lists."""
    parsed_here = [Annotated[kind, tyro.conf.subcommand(name)] for name, kind in COMMANDS.items()]
    parsed_elsewhere = [
        Annotated[WithRecipe, tyro.conf.subcommand(name, description=told)] for name, told in RECIPE_COMMANDS.items()
    ]
    return Union[tuple(parsed_here + parsed_elsewhere)]  # noqa: UP007 made at run time
