"""`cgf world`, `pack`, `verify`, `inspect`: images with known factors, and shards of them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from compgen_fast.commands.common import UsageError, load, refusals


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
    """A folder made by `cgf pack`."""

    def run(self) -> int:
        problems = load("compgen_fast.stream").verify(self.folder, progress=True)
        for problem in problems:
            print(problem)
        print(f"{self.folder}: {len(problems)} problems" if problems else f"{self.folder}: good")
        return 1 if problems else 0


@dataclass(frozen=True)
class Inspect:
    """Show what packed shards hold: schema, counts, a picture."""

    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUT")]
    """A folder made by `cgf pack`."""
    picture: Path | None = None
    """Draw samples into this PNG."""

    def run(self) -> int:
        with refusals():
            load("compgen_fast.stream").inspect(self.folder, self.picture)
        return 0
