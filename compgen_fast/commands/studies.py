"""`cgf study`: the papers' studies."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from compgen_fast.commands.common import UsageError, check_cuda, load, refusals


@dataclass(frozen=True)
class PerceptionStudy:
    """Decoders inverted by search and replay, against encoders alone, on combinations they never saw."""

    split: Literal["background", "texture", "object"] = "background"
    """What each object is seen with only few of in training: backgrounds, textures, or other objects."""
    scale: Literal["quick", "cpu", "gpu"] = "quick"
    """quick: minutes; cpu: about an hour on two cores; gpu: the papers' sizes."""
    seeds: int | None = None
    """Repetitions with other seeds; as many as the scale has if not given."""
    out: Path | None = None
    """The folder to write; runs/perception-SPLIT-SCALE if not given."""
    workers: int | None = None
    """Jobs at a time; one per core if not given."""
    vit: Path | None = None
    """A local file of a timm ViT's weights, on which all encoders are then built."""
    dry_run: bool = False
    """Say what would be trained, write all settings, and train nothing."""

    def run(self) -> int:
        if self.seeds is not None and self.seeds < 1:
            raise UsageError(f"--seeds is {self.seeds}; it must be at least 1")
        check_workers(self.workers)
        if self.scale == "gpu" and not self.dry_run:
            check_cuda("--scale gpu")
        study = load("compgen_fast.studies.perception.study")
        out = self.out or Path("runs") / f"perception-{self.split}-{self.scale}"
        with refusals():
            code: int = study.run(
                self.scale, self.split, self.seeds, out, workers=self.workers, vit=self.vit, dry_run=self.dry_run
            )
        return code


@dataclass(frozen=True)
class BumpStudy:
    """Decoders of disentangled (x, y) codes at positions they never saw: that they fail, why, and two remedies."""

    part: Literal["all", "failure", "geometry", "plan-a", "plan-b"] = "all"
    """all; failure: naive decoders; geometry: their layers; plan-a: remedies by architecture and penalty; plan-b: by
    data."""
    scale: Literal["quick", "cpu"] = "quick"
    """quick: one seed, a minute or two; cpu: three seeds, about an hour on two cores."""
    out: Path | None = None
    """The folder to write; runs/bumps-SCALE if not given. Parts share what they trained there."""
    workers: int | None = None
    """Jobs at a time; one per core if not given."""

    def run(self) -> int:
        check_workers(self.workers)
        study = load("compgen_fast.studies.bumps.study")
        with refusals():
            code: int = study.run(self.scale, self.part, self.out or Path("runs") / f"bumps-{self.scale}", self.workers)
        return code


@dataclass(frozen=True)
class GenerationStudy:
    """Which generators make compositions they never saw: objectives, what they are told, JEPA, and circuits."""

    part: Literal["all", "objectives", "conditioning", "jepa", "circuits"] = "all"
    """all; objectives: DiT, MAR, GIVT and MaskGIT; conditioning: what a DiT is told; jepa: MaskGIT with JEPA; circuits:
    its heads left out one by one."""
    scale: Literal["quick", "cpu", "gpu"] = "quick"
    """quick: tiny models, a minute or two; cpu: two seeds, about an hour on two cores; gpu: five seeds, larger."""
    out: Path | None = None
    """The folder to write; runs/generation-SCALE if not given. Parts share what they trained there."""
    workers: int | None = None
    """Jobs at a time; one per core if not given."""

    def run(self) -> int:
        check_workers(self.workers)
        if self.scale == "gpu":
            check_cuda("--scale gpu")
        study = load("compgen_fast.studies.generation.study")
        out = self.out or Path("runs") / f"generation-{self.scale}"
        with refusals():
            code: int = study.run(self.scale, self.part, out, self.workers)
        return code


@dataclass(frozen=True)
class Study:
    """Run a paper's study to a table and a page. Repeat the command to go on after an interruption."""

    study: tyro.conf.OmitSubcommandPrefixes[
        Annotated[PerceptionStudy, tyro.conf.subcommand("perception")]
        | Annotated[BumpStudy, tyro.conf.subcommand("bumps")]
        | Annotated[GenerationStudy, tyro.conf.subcommand("generation")]
    ]

    def run(self) -> int:
        return self.study.run()


def check_workers(workers: int | None) -> None:
    if workers is not None and workers < 1:
        raise UsageError(f"--workers is {workers}; it must be at least 1")
