"""`cgf world`, `pack`, `index`, `verify`, `inspect`: images with known factors, and shards of them."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from compgen_fast.commands.common import UsageError, load, refusals, refuse_unknown


@dataclass(frozen=True)
class World:
    """Draw a world's split: seen samples on the left, unseen ones on the right, and which pairs are seen."""

    action: tyro.conf.Positional[Literal["show"]]
    """What to do with it."""
    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME")]
    """scenes, shapes2d, bumps, sprites or additive."""
    split: str | None = None
    """Which split to draw (the world's first if not given)."""
    seen_pairs: int | None = None
    """How many partners each value is seen with (2 if not given)."""
    resolution: int | None = None
    """Pixels of a side, 16 to 256 (the world's own choice if not given)."""
    seed: int = 0
    """Decides the samples, and which pairs are seen."""
    options: tuple[str, ...] = ()
    """What else the world takes, as name=value: objects=2 occlusion=true."""
    out: Path = Path("world.png")
    """Where the picture goes."""

    def run(self) -> int:
        worlds = load("compgen_fast.worlds")
        refuse_unknown((self.name,), "world", worlds.NAMES)
        with refusals():
            world = worlds.open_world(
                self.name,
                split=self.split,
                resolution=self.resolution,
                seed=self.seed,
                **_named(self),
            )
            worlds.show(world, self.split, path=self.out, seen_pairs=self.seen_pairs)
        print(f"drawn in {self.out}")
        return 0


WORLD, FOLDER, HELD_OUT = "a world", "a folder", "a folder with --hold-out"
_MEANT_FOR = {  # what is not named here means something everywhere
    "split": (WORLD,),
    "size": (WORLD,),
    "part": (WORLD, HELD_OUT),
    "seen_pairs": (WORLD, HELD_OUT),
    "seed": (WORLD, HELD_OUT),
    "hold_out": (FOLDER,),
    "adapter": (FOLDER,),
    "subset": (FOLDER,),
    "fit": (FOLDER,),
    "skip_bad": (FOLDER,),
}
_NAMED = 3  # bad images in a message


@dataclass(frozen=True)
class Pack:
    """Write a folder of images, or a world's split, as WebDataset shards with an index."""

    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="FOLDER|WORLD")]
    """A folder of images, with labels or without, or a world's name (./scenes is a folder of that name)."""
    out: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUT")]
    """The folder to write; an interrupted pack in it is completed."""
    resolution: int | None = None
    """Pixels of a side (64 for a folder, a world's own choice, if not given)."""
    fit: Literal["crop", "pad"] | None = None
    """How a folder's images become squares: crop keeps the middle, pad keeps all and adds black (crop if not given)."""
    skip_bad: bool = False
    """Leave out a folder's images that cannot be read, and list them in OUT/plan.json."""
    format: Literal["raw", "png", "jpg", "webp"] = "png"
    """How images are stored: raw and png are exact, raw is fastest to read, jpg and webp are smallest."""
    workers: int = 1
    """Processes that read or render, and encode."""
    shard_size: int = 10_000
    """Samples per shard."""
    split: str | None = None
    """Which split of a world to pack (its first if not given)."""
    part: str | None = None
    """Which part of the split to pack: train, validation, test or ood; some worlds have more (train if not given)."""
    size: int | None = None
    """How many samples to draw from a world (20,000 for train and 2,000 otherwise, in most worlds, if not given)."""
    seen_pairs: int | None = None
    """How many partners each value is seen with, in a world or with --hold-out (2 if not given)."""
    seed: int | None = None
    """Decides a world's samples, and which pairs are seen in it or with --hold-out (0 if not given)."""
    hold_out: tuple[str, str] | None = None
    """Split a folder by two factors of its labels: only some pairs of their values are seen in training."""
    adapter: str | None = None
    """What a folder holds: images (if not given), or a public data set as published: pug-spar, pug-animals, clevr,
    cogent, clevrtex, celeba, shapes3d, kubric or clevrer."""
    subset: str | None = None
    """Which part a public data set itself names, such as CLEVR's val."""
    options: tuple[str, ...] = ()
    """What else the world or the adapter takes, as name=value: objects=2 occlusion=true, table=labels.csv."""

    def run(self) -> int:
        packing = load("compgen_fast.stream.packing")
        with refusals():
            self.refuse_idle()
            packing.check_request(self.out, self.shard_size, self.format, self.workers)
            source, skipped = self.opened()
            manifest = packing.pack(
                source,
                self.out,
                shard_size=self.shard_size,
                format=self.format,
                split=self.split or "",
                workers=self.workers,
                skipped=skipped,
                progress=True,
            )
        shards = f"{manifest.samples:,} samples, {len(manifest.shards):,} shards in {self.out}"
        labels = "" if manifest.schema.factors else ", no factors"
        print(f"{manifest.name}: {shards}{labels}, hash {manifest.hash[:12]}")
        if skipped:
            print(f"{len(skipped):,} skipped, listed in {self.out / packing.PLAN}: {_listed(skipped)}")
        return 0

    @property
    def modes(self) -> tuple[str, ...]:
        """What is asked for; an option must mean something to one of them."""
        if self.adapter is None and (
            self.source in load("compgen_fast.worlds").NAMES or not Path(self.source).is_dir()
        ):
            return (WORLD,)
        return (FOLDER,) if self.hold_out is None else (FOLDER, HELD_OUT)

    def refuse_idle(self) -> None:
        """Refuses every option that would have no effect."""
        if WORLD in self.modes:
            known = (*load("compgen_fast.worlds").NAMES, "a folder of images")
            refuse_unknown((self.source,), "world or folder", known)
        for option, meant in _MEANT_FOR.items():
            if _given(self, option) and not set(meant) & set(self.modes):
                raise UsageError(f"{_flag(option)} has no effect on {self.modes[0]}; it is for {' or '.join(meant)}")

    def opened(self) -> tuple[Any, Mapping[str, str]]:
        """What to pack, and what was left out of it as bad."""
        if WORLD in self.modes:
            return self.of_world(), {}
        source = self.of_folder()
        skipped = self.skipped(source)
        return load("compgen_fast.worlds.adapters").without(source, skipped), skipped

    def of_world(self) -> Any:
        return load("compgen_fast.worlds").open_split(
            self.source,
            split=self.split,
            part=self.part or "train",
            resolution=self.resolution,
            seed=self.seed or 0,
            seen_pairs=self.seen_pairs,
            size=self.size,
            **_named(self),
        )

    def of_folder(self) -> Any:
        adapters, adapter = load("compgen_fast.worlds.adapters"), self.adapter or "images"
        refuse_unknown((adapter,), "adapter", adapters.ADAPTERS)
        for option, needed in (("subset", "part"), ("fit", "fit"), ("skip_bad", "fit")):
            if _given(self, option) and needed not in adapters.taken(adapter):
                raise UsageError(f"{_flag(option)} has no effect on {adapter}; leave it out")
        folder = adapters.open_folder(
            adapter,
            self.source,
            resolution=self.resolution,
            part=self.subset,
            fit=self.fit,
            **_named(self, part="subset"),
        )
        if self.hold_out is None:
            return folder
        seen = 2 if self.seen_pairs is None else self.seen_pairs
        parts = adapters.held_out(folder, self.hold_out, seen=seen, seed=self.seed or 0)._asdict()
        part = self.part or "train"
        if part not in parts:
            raise UsageError(f"--part is {part!r}; with --hold-out it is one of {', '.join(parts)}")
        return parts[part]

    def skipped(self, source: Any) -> Mapping[str, str]:
        """Which images to leave out as bad. A pack that goes on leaves out what it did before."""
        packing = load("compgen_fast.stream.packing")
        before: Mapping[str, str] | None = packing.skipped_in(self.out)
        if before is None:
            return self.bad(source)
        if before and not self.skip_bad:
            raise UsageError(
                f"{self.out} holds a pack that leaves out bad images ({_listed(before)}); go on with --skip-bad, or "
                f"{packing.anew(self.out)}"
            )
        return before

    def bad(self, source: Any) -> Mapping[str, str]:
        adapters = load("compgen_fast.worlds.adapters")
        bad: Mapping[str, str] = adapters.unreadable(source, workers=self.workers, progress=True)
        if bad and not self.skip_bad:
            raise UsageError(
                f"{self.source}: {len(bad):,} of {len(source):,} images cannot be used: {_listed(bad)}; restore or "
                "remove them, or leave them out with --skip-bad"
            )
        if bad and len(bad) == len(source):
            raise UsageError(f"{self.source}: no image can be used: {_listed(bad)}")
        return bad


def _given(command: object, option: str) -> bool:
    value = getattr(command, option)
    return value is not None and value is not False


def _flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"


def _named(command: Pack | World, **instead: str) -> dict[str, Any]:
    """--options by name, without those that have an option of their own; ``instead`` says which where it is called
    otherwise."""
    found: dict[str, Any] = load("compgen_fast.worlds.options").named(command.options)
    own = {field.name: field.name for field in fields(command)} | instead
    for name in own.keys() & found.keys():
        raise UsageError(f"--options {name}={found[name]}: this has an option of its own, {_flag(own[name])}")
    return found


def _listed(bad: Mapping[str, str]) -> str:
    """The first of them with what is wrong."""
    told = [f"{name}: {what}" for name, what in islice(bad.items(), _NAMED)]
    return ", ".join(told + ["…"] * (len(bad) > _NAMED))


@dataclass(frozen=True)
class Index:
    """Make WebDataset tars of yours streamable: an index and a manifest beside them; the tars stay as they are."""

    tars: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="FOLDER|PATTERN")]
    """A folder of tars, or a pattern such as 'train-{000000..000009}.tar' or 'train-*.tar' for some of them."""
    resolution: int | None = None
    """Pixels of a side, needed where sizes differ: middle squares are cut out and resized as they are read."""
    image: str | None = None
    """Which part of a sample is its image, such as jpg or rgb.png, where samples have several."""

    def run(self) -> int:
        with refusals():
            found = load("compgen_fast.stream").index_tars(
                self.tars, resolution=self.resolution, image=self.image, progress=True
            )
        for sentence in found.left_out:
            print(sentence)
        made = found.manifest
        print(f"{made.samples:,} samples, {len(made.shards):,} tars indexed in {found.folder}, hash {made.hash[:12]}")
        return 0


@dataclass(frozen=True)
class Verify:
    """Check every byte of packed shards and name what is bad."""

    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUT")]
    """A folder made by `cgf pack` or `cgf index`."""

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
    """A folder made by `cgf pack` or `cgf index`."""
    picture: Path | None = None
    """Draw samples into this PNG."""

    def run(self) -> int:
        with refusals():
            load("compgen_fast.stream").inspect(self.folder, self.picture)
        return 0
