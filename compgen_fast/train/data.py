"""Where a run's images come from: shards that are there, or a world's split that is packed once and kept."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from compgen_fast.stream import ShardStream, manifest, pack
from compgen_fast.stream.manifest import Schema
from compgen_fast.train.config import DataConfig, TrainConfig
from compgen_fast.train.ranks import Ranks
from compgen_fast.worlds import Factor, Part, open_split
from compgen_fast.worlds.options import named


@dataclass(frozen=True)
class Shards:
    train: str
    validation: str | None


def shards(config: DataConfig, image_size: int, ranks: Ranks) -> Shards:
    """The packed folders to read. Rank 0 packs what is missing; a pack that was cut off goes on."""
    if config.shards is not None:
        return Shards(config.shards, config.validation)
    folders = {name: config.cache / folder_name(config, image_size, name) for name in ("train", "validation")}
    if ranks.first:
        for name, folder in folders.items():
            if not (folder / manifest.FILE).exists():
                _pack(config, image_size, name, folder)
    ranks.barrier()
    return Shards(str(folders["train"]), config.validation or str(folders["validation"]))


def folder_name(config: DataConfig, image_size: int, name: str) -> str:
    """Says all that decides the images, so that two settings never share a folder."""
    seen = "" if config.seen_pairs is None else f"-pairs{config.seen_pairs}"
    options = "".join(f"-{option}" for option in config.options)
    size = config.size if name == "train" else config.validation_size
    return f"{config.world}-{config.split or 'first'}{seen}{options}-{image_size}px-{name}{size}-seed{config.seed}"


def packed(config: TrainConfig) -> Path | None:
    """The folder of the run's training images, if it is on this machine."""
    folder = (
        config.data.cache / folder_name(config.data, config.model.image_size, "train")
        if config.data.shards is None
        else Path(config.data.shards)
    )
    return folder if (folder / manifest.FILE).exists() else None


def factors(config: TrainConfig) -> Sequence[Factor]:
    """Of the run's images, without packing them: a supervised model is as large as the factors it reads."""
    data, folder = config.data, packed(config)
    if folder is not None:
        return manifest.read(folder / manifest.FILE).schema.factors
    size = config.model.image_size
    return part(data, size, "train").factors


def part(config: DataConfig, image_size: int, name: str) -> Part:
    """One part of the split that a run is about: ``train``, ``validation``, or those it never sees."""
    return open_split(
        config.world,
        split=config.split,
        part=name,
        resolution=image_size,
        seed=config.seed,
        seen_pairs=config.seen_pairs,
        size=config.size if name == "train" else config.validation_size,
        **named(config.options),
    )


def _pack(config: DataConfig, image_size: int, name: str, folder: Path) -> None:
    pack(part(config, image_size, name), folder, split=config.split or "", progress=True)


def open_stream(config: TrainConfig, folder: str, ranks: Ranks) -> ShardStream:
    """The endless training stream: one micro-batch of all ranks per step of it."""
    return ShardStream(
        folder,
        batch_size=config.batch_size // config.accumulation,
        seed=config.seed,
        rank=ranks.rank,
        ranks=ranks.size,
        workers=config.data.workers,
        device=ranks.device,
    )


def open_validation(config: TrainConfig, folder: str, ranks: Ranks) -> ShardStream:
    """Each validation image once, in the order they were packed."""
    return ShardStream(
        folder,
        batch_size=config.batch_size // config.accumulation,
        epochs=1,
        shuffle=False,
        rank=ranks.rank,
        ranks=ranks.size,
        device=ranks.device,
    )


def in_order(config: TrainConfig, folder: str) -> Iterator[Tensor]:
    """The training images, batch by batch in the order they were packed, alike on every rank."""
    with ShardStream(folder, batch_size=config.batch_size, epochs=1, shuffle=False) as stream:
        for batch in stream:
            yield batch.images[batch.valid]


def check_fit(config: TrainConfig, schema: Schema) -> None:
    """Refuses shards whose images are not the model's size."""
    size = config.model.image_size
    if (schema.height, schema.width) != (size, size):
        raise ValueError(
            f"the shards hold images of {schema.height}×{schema.width}, the model takes {size}×{size}; pack them with "
            f"--resolution {size}, or set --model.image-size"
        )
