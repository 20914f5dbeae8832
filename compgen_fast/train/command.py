"""The commands that take a recipe: `cgf train`, `profile`, `scale-plan`, `model`.

A recipe is a subcommand whose options are the fields of its config, with the recipe's values as defaults. This module
parses; loop.py, profiling.py, scaling.py and models/summary.py do the work.
"""

import os
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Union

import tyro

from compgen_fast.commands.common import refuse_unknown
from compgen_fast.commands.options import REGISTRY
from compgen_fast.exits import ended_by_ctrl_c
from compgen_fast.recipes import RECIPES
from compgen_fast.train.config import TrainConfig, check, settled
from compgen_fast.train.given import given, refuse_idle, without

LAUNCHING = ("nproc", "hostfile")
Settings = Annotated[TrainConfig, tyro.conf.arg(name="")]


@dataclass(frozen=True)
class Train:
    """Train by a recipe. Any of its settings can be changed on the command line."""

    config: Settings = field(default_factory=TrainConfig)
    resume: bool = False
    """Go on from the newest checkpoint in --out, or start if there is none."""
    nproc: int = 1
    """Processes on this machine: one per GPU, or several on a CPU."""
    hostfile: Path | None = None
    """Run on the machines listed in this file (`host slots=8`), by DeepSpeed's launcher."""

    def run(self, arguments: list[str]) -> int:
        with ended_by_ctrl_c():
            from compgen_fast.train import folder, launch, run
            from compgen_fast.train.data import fitted

        options = given(arguments)
        of_ranks = without(arguments, LAUNCHING)
        if "RANK" in os.environ or launch.placed(os.environ).size > 1:  # a launcher started this process
            for name in LAUNCHING:
                if name in options:
                    raise ValueError(f"--{name} has no effect on a process that a launcher has started; leave it out")
            return run.run(self.config, self.resume)
        if self.hostfile is not None:
            if "nproc" in options:
                raise ValueError("--nproc has no effect with --hostfile, whose slots= count processes; leave it out")
            check(self.config, sum(launch.read_hostfile(self.hostfile).values()))
            return launch.run_hosts(self.hostfile, of_ranks)
        if self.nproc != 1:
            run.refuse_impossible(self.config, self.nproc)
            folder.check(fitted(self.config), self.resume)
            return launch.run_ranks([sys.executable, "-m", "compgen_fast", *of_ranks], self.nproc)
        return run.run(self.config, self.resume)


@dataclass(frozen=True)
class Profile:
    """Where a step's time goes: a table, and a trace to open in Perfetto."""

    config: Settings = field(default_factory=TrainConfig)
    profiled: int = 5
    """Steps to record, after two to warm up."""

    def run(self, arguments: list[str]) -> int:
        with ended_by_ctrl_c():
            from compgen_fast.train import run

        if self.profiled < 1:
            raise ValueError(f"profiled is {self.profiled}; expected at least 1 step")
        return run.profile(self.config, self.profiled)


@dataclass(frozen=True)
class ScalePlan:
    """What many GPUs would do: bytes moved, data rate, efficiency. A model, not a measurement."""

    config: Settings = field(default_factory=TrainConfig)
    gpus: str = "8..1024"
    """Numbers of GPUs: a range by doubling (8..1024) or a list (8,16,64)."""

    def run(self, arguments: list[str]) -> int:
        from compgen_fast.models.build import check as check_model
        from compgen_fast.train import scaling

        check(self.config, 1)
        check_model(self.config.model)
        return scaling.run(self.config, self.gpus)


@dataclass(frozen=True)
class Model:
    """A recipe's model: parameters, FLOPs per image, shapes."""

    config: Settings = field(default_factory=TrainConfig)

    def run(self, arguments: list[str]) -> int:
        from rich.console import Console

        from compgen_fast.models import build, summary
        from compgen_fast.train.data import factors

        build.check(self.config.model)
        summary.show(summary.of_config(self.config.model, factors(self.config)), Console())
        return 0


COMMANDS: dict[str, type[Any]] = {"train": Train, "profile": Profile, "scale-plan": ScalePlan, "model": Model}


def run(arguments: list[str]) -> int:
    """Runs `cgf` with these arguments, the first of which is one of COMMANDS."""
    refuse_unknown(arguments[1:], "recipe", RECIPES)
    code: int = parse(arguments[0], arguments[1:]).run(arguments)
    return code


def parse(name: str, arguments: list[str]) -> Any:
    """The command called ``name`` with its recipe and settings; wrong syntax exits 2 with a sentence.

    Only the recipe that is asked for is parsed, so that advice is about it alone.
    """
    command = COMMANDS[name]
    config = (tyro.conf.FlagCreatePairsOff, tyro.conf.AvoidSubcommands)
    recipe = arguments[0] if arguments and arguments[0] in RECIPES else None
    if recipe is None:
        prog, told = f"cgf {name}", command.__doc__
        return tyro.cli(
            _any_recipe(command), prog=prog, description=told, args=arguments, config=config, registry=REGISTRY
        )
    make = RECIPES[recipe]
    default, prog = command(config=make()), f"cgf {name} {recipe}"
    asked = tyro.cli(
        command, default=default, prog=prog, description=make.__doc__, args=arguments[1:], config=config,
        registry=REGISTRY,
    )  # fmt: skip
    refuse_idle(name, asked.config, given(arguments))
    return replace(asked, config=settled(asked.config))


def _any_recipe(command: type[Any]) -> Any:
    """Every recipe as a subcommand of its name: what --help lists."""
    recipes = tuple(
        Annotated[command, tyro.conf.subcommand(recipe, default=command(config=make()), description=make.__doc__)]
        for recipe, make in RECIPES.items()
    )
    return Union[recipes]  # noqa: UP007 made at run time
