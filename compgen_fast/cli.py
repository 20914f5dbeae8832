"""The `compgen` command: parses arguments and hands over. It holds no logic and imports torch only to run a command.

Exit codes: 0 done, 1 a check failed, 2 the user asked for something impossible (one sentence says what), 130
interrupted.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal

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
    """Time our code against its peers, interleaved, after checking that they agree."""

    suite: tyro.conf.Positional[Literal["slots", "jets", "stream", "train", "search", "bumps", "generate"]]
    """What to time."""
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


@dataclass(frozen=True)
class World:
    """Draw a world's split: seen samples on the left, unseen ones on the right, and which pairs are seen."""

    action: tyro.conf.Positional[Literal["show"]]
    """What to do with it."""
    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME")]
    """scenes, shapes2d, bumps, sprites or additive."""
    split: str | None = None
    """Which split; the world's first if not given."""
    seen_pairs: int | None = None
    """How many partners each value is seen with."""
    resolution: int | None = None
    """Pixels of a side, 16 to 256."""
    seed: int = 0
    """Of samples and split."""
    options: tuple[str, ...] = ()
    """What else the world takes, as name=value: objects=2 occlusion=true."""
    out: Path = Path("world.png")
    """Where the picture goes."""

    def run(self) -> int:
        worlds = load("compgen_fast.worlds")
        with refusals():
            world = worlds.open_world(
                self.name,
                split=self.split,
                resolution=self.resolution,
                seed=self.seed,
                **load("compgen_fast.worlds.options").named(self.options),
            )
            worlds.show(world, self.split, path=self.out, seen_pairs=self.seen_pairs)
        print(f"drawn in {self.out}")
        return 0


@dataclass(frozen=True)
class Pack:
    """Write a world's split, or a folder of images, as WebDataset shards with an index."""

    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="WORLD|FOLDER")]
    """A world's name, or with --adapter a folder."""
    out: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUT")]
    """The folder to write; an interrupted pack in it is completed."""
    shard_size: int = 10_000
    """Samples per shard."""
    format: Literal["raw", "png", "jpg", "webp"] = "png"
    """raw and png are exact; raw is fastest to read, jpg and webp are smallest."""
    workers: int = 1
    """Processes that render and encode."""
    split: str | None = None
    """Of a world; its first if not given."""
    part: str = "train"
    """Of a world's split, or of --hold-out: train, validation, test, ood; some worlds have more."""
    seen_pairs: int | None = None
    """How many partners each value is seen with, in a world's split or with --hold-out."""
    size: int | None = None
    """Samples of a world's part."""
    seed: int = 0
    """Of a world's samples and split, or of --hold-out."""
    resolution: int | None = None
    """Pixels of a side."""
    options: tuple[str, ...] = ()
    """What else the world or the adapter takes, as name=value: objects=2 occlusion=true, max_objects=6."""
    adapter: str | None = None
    """What the folder is: images, pug-spar, pug-animals, clevr, cogent, clevrtex, celeba, shapes3d, kubric, clevrer."""
    subset: str | None = None
    """Which part a public data set itself names, such as CLEVR's val."""
    hold_out: tuple[str, str] | None = None
    """Two factors of a folder's table: only some pairs of their values are seen."""

    def run(self) -> int:
        with refusals():
            manifest = load("compgen_fast.stream").pack(
                self.opened(),
                self.out,
                shard_size=self.shard_size,
                format=self.format,
                split=self.split or "",
                workers=self.workers,
                progress=True,
            )
        print(f"{manifest.samples:,} samples, {len(manifest.shards):,} shards in {self.out}, hash {manifest.hash[:12]}")
        return 0

    def opened(self) -> Any:
        if self.adapter is None:
            self.refuse_without_adapter()
            return load("compgen_fast.worlds").open_split(
                self.source,
                split=self.split,
                part=self.part,
                resolution=self.resolution,
                seed=self.seed,
                seen_pairs=self.seen_pairs,
                size=self.size,
                **load("compgen_fast.worlds.options").named(self.options),
            )
        adapters = load("compgen_fast.worlds.adapters")
        options = load("compgen_fast.worlds.options").named(self.options) | {
            "resolution": self.resolution,
            "part": self.subset,
        }
        folder = adapters.open_folder(self.adapter, self.source, **options)
        if self.hold_out is None:
            return folder
        parts = adapters.held_out(folder, self.hold_out, seen=self.seen_pairs or 2, seed=self.seed)._asdict()
        if self.part not in parts:
            raise UsageError(f"--part is {self.part!r}; with --hold-out it is one of {', '.join(parts)}")
        return parts[self.part]

    def refuse_without_adapter(self) -> None:
        if Path(self.source).is_dir():
            raise UsageError(
                f"{self.source} is a folder: say what is in it with --adapter (images for a folder of yours)"
            )
        for option, value in (("--subset", self.subset), ("--hold-out", self.hold_out)):
            if value is not None:
                raise UsageError(f"{option} is for folders opened with --adapter; a world has --split and --part")


@dataclass(frozen=True)
class Verify:
    """Check every byte of packed shards and name what is bad."""

    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUT")]
    """A folder made by `compgen pack`."""

    def run(self) -> int:
        problems = load("compgen_fast.stream").verify(self.folder)
        for problem in problems:
            print(problem)
        print(f"{self.folder}: {len(problems)} problems" if problems else f"{self.folder}: good")
        return 1 if problems else 0


@dataclass(frozen=True)
class Inspect:
    """Show what packed shards hold: schema, counts, a picture."""

    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUT")]
    """A folder made by `compgen pack`."""
    picture: Path | None = None
    """Draw samples into this PNG."""

    def run(self) -> int:
        with refusals():
            load("compgen_fast.stream").inspect(self.folder, self.picture)
        return 0


@dataclass(frozen=True)
class Search:
    """Find the latents of images through a trained decoder: gradient steps from the encoder's guess."""

    weights: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="CHECKPOINT")]
    """Exported weights of a slot VAE or of its replay, such as runs/replay_cpu/weights."""
    shards: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="SHARDS")]
    """Packed folders of images to explain."""
    out: Path = Path("runs/search")
    """The folder to write; an interrupted search in it goes on."""
    train: str | None = None
    """Packed training images. Their latents say where slots belong: searched ones are kept there."""
    probes: int = 4096
    """How many training images to look at for that."""
    steps: int = 48
    """Gradient steps."""
    rate: float = 0.2
    """Step size at the start."""
    pull: float = 0.05
    """Weight of the pull towards training latents."""
    still: float = 0.0
    """Gradient below which a latent hardly moves; 1e-3 keeps what pixels do not tell where the encoder had it."""
    swapped: int = 0
    """More starts for each image, with one slot of another image."""
    drawn: int = 0
    """More starts for each image, drawn from the training latents."""
    newton: bool = False
    """Gauss-Newton steps instead of Adam's."""
    batch: int = 256
    """Images per part that is kept when the search is cut off."""
    seed: int = 0
    """Of starts and pixels."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where to run."""

    def run(self) -> int:
        if self.device == "cuda":
            check_cuda()
        if not self.shards:
            raise UsageError("search: no SHARDS were named; expected packed folders of images")
        command = load("compgen_fast.invert.command")
        with refusals():
            settings = command.SearchSettings(
                str(self.weights), self.shards, self.train, self.probes, self.steps, self.rate, self.pull,
                self.still, self.swapped, self.drawn, self.newton, self.batch, self.seed,
            )  # fmt: skip
            found = command.run_search(settings, self.out, self.device)
        print(f"latents in {found}")
        return 0


@dataclass(frozen=True)
class Replay:
    """Pack what a decoder makes of recombined slots of training images; replay while training is a recipe."""

    weights: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="CHECKPOINT")]
    """Exported weights of a slot VAE."""
    shards: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SHARDS")]
    """Packed training images, whose slots are recombined."""
    pack: Path
    """The folder to write."""
    size: int = 20_000
    """How many composites."""
    bank: int = 4096
    """How many training images give slots."""
    jitter: float = 0.0
    """Noise on recombined slots, in deviations of theirs."""
    seed: int = 0
    """Of the recombinations."""

    def run(self) -> int:
        command = load("compgen_fast.invert.command")
        with refusals():
            count = command.run_pack(
                self.weights, self.shards, self.pack, size=self.size, bank=self.bank, jitter=self.jitter, seed=self.seed
            )
        print(f"{count:,} composites in {self.pack}")
        return 0


@dataclass(frozen=True)
class PerceptionStudy:
    """Decoders inverted by search and replay, against encoders alone, on combinations they never saw."""

    split: Literal["background", "texture", "object"] = "background"
    """What each object is seen with few of."""
    scale: Literal["quick", "cpu", "gpu"] = "quick"
    """quick: minutes; cpu: about an hour on two cores; gpu: the papers' sizes."""
    seeds: int | None = None
    """How many; as many as the scale has if not given."""
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
            check_cuda()
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
    """Naive decoders; the geometry of their layers; remedies by architecture and penalty; by data."""
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
    """DiT, MAR, GIVT and MaskGIT; what a DiT is told; MaskGIT with JEPA; its heads left out one by one."""
    scale: Literal["quick", "cpu", "gpu"] = "quick"
    """quick: tiny models, a minute or two; cpu: two seeds, about an hour on two cores; gpu: five seeds, larger."""
    out: Path | None = None
    """The folder to write; runs/generation-SCALE if not given. Parts share what they trained there."""
    workers: int | None = None
    """Jobs at a time; one per core if not given."""

    def run(self) -> int:
        check_workers(self.workers)
        if self.scale == "gpu":
            check_cuda()
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


@contextmanager
def refusals() -> Iterator[None]:
    """What the library refuses with a sentence is the user's to change."""
    errors = load("compgen_fast.stream.faults")
    try:
        yield
    except (errors.StreamError, ValueError, ImportError, OSError) as refusal:
        raise UsageError(str(refusal)) from None


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


@dataclass(frozen=True)
class WithRecipe:
    """Here for the list of commands only: these are parsed by compgen_fast.train.command, which knows the recipes."""

    def run(self) -> int:
        raise AssertionError("parsed elsewhere")


RECIPE_COMMANDS = {
    "train": "Train by a recipe.",
    "profile": "Where the time of a recipe's step goes.",
    "model": "A recipe's model: parameters, FLOPs per image, shapes.",
    "scale-plan": "What a recipe would do on many GPUs, modelled.",
}


Command = (
    Annotated[Env, tyro.conf.subcommand("env")]
    | Annotated[World, tyro.conf.subcommand("world")]
    | Annotated[Pack, tyro.conf.subcommand("pack")]
    | Annotated[Verify, tyro.conf.subcommand("verify")]
    | Annotated[Inspect, tyro.conf.subcommand("inspect")]
    | Annotated[Bench, tyro.conf.subcommand("bench")]
    | Annotated[Prove, tyro.conf.subcommand("prove")]
    | Annotated[Tune, tyro.conf.subcommand("tune")]
    | Annotated[Search, tyro.conf.subcommand("search")]
    | Annotated[Replay, tyro.conf.subcommand("replay")]
    | Annotated[Study, tyro.conf.subcommand("study")]
    | Annotated[WithRecipe, tyro.conf.subcommand("train", description=RECIPE_COMMANDS["train"])]
    | Annotated[WithRecipe, tyro.conf.subcommand("profile", description=RECIPE_COMMANDS["profile"])]
    | Annotated[WithRecipe, tyro.conf.subcommand("model", description=RECIPE_COMMANDS["model"])]
    | Annotated[WithRecipe, tyro.conf.subcommand("scale-plan", description=RECIPE_COMMANDS["scale-plan"])]
)


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code. Wrong syntax exits 2 inside tyro."""
    given = sys.argv[1:] if arguments is None else arguments
    try:
        if given[:1] and given[0] in RECIPE_COMMANDS:
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch complains of hosts without a name
            with refusals():
                code: int = load("compgen_fast.train.command").run(given)
            return code
        command: Env | World | Pack | Verify | Inspect | Bench | Prove | Tune | Search | Replay | Study | WithRecipe = (
            tyro.cli(
                Command,
                prog="compgen",
                description="Train, invert and measure models that generalise by composition.",
                args=given,
                config=(tyro.conf.FlagCreatePairsOff,),
            )
        )
        return command.run()
    except UsageError as error:
        print(f"compgen: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
