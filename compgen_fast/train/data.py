"""Where a run's images come from: shards that are there, or a world's split that is packed once and kept."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from compgen_fast.stream import ShardStream, manifest, pack
from compgen_fast.stream.manifest import Schema
from compgen_fast.train.config import DataConfig, TrainConfig
from compgen_fast.train.ranks import Ranks
from compgen_fast.worlds import Factor, open_split


@dataclass(frozen=True)
class Shards:
    train: str
    validation: str | None


def shards(config: DataConfig, image_size: int, ranks: Ranks) -> Shards:
    """The packed folders to read. Rank 0 packs what is missing; a pack that was cut off goes on."""
    if config.shards is not None:
        return Shards(config.shards, config.validation)
    folders = {part: config.cache / folder_name(config, image_size, part) for part in ("train", "validation")}
    if ranks.first:
        for part, folder in folders.items():
            if not (folder / manifest.FILE).exists():
                _pack(config, image_size, part, folder)
    ranks.barrier()
    return Shards(str(folders["train"]), config.validation or str(folders["validation"]))


def folder_name(config: DataConfig, image_size: int, part: str) -> str:
    """Says all that decides the images, so that two settings never share a folder."""
    seen = "" if config.seen_pairs is None else f"-pairs{config.seen_pairs}"
    size = config.size if part == "train" else config.validation_size
    return f"{config.world}-{config.split or 'first'}{seen}-{image_size}px-{part}{size}-seed{config.seed}"


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
    return open_split(data.world, split=data.split, resolution=size, seen_pairs=data.seen_pairs).factors


def _pack(config: DataConfig, image_size: int, part: str, folder: Path) -> None:
    source = open_split(
        config.world,
        split=config.split,
        part=part,
        resolution=image_size,
        seed=config.seed,
        seen_pairs=config.seen_pairs,
        size=config.size if part == "train" else config.validation_size,
    )
    pack(source, folder, split=config.split or "", progress=True)


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


def check_fit(config: TrainConfig, schema: Schema) -> None:
    """Refuses shards whose images are not the model's size."""
    size = config.model.image_size
    if (schema.height, schema.width) != (size, size):
        raise ValueError(
            f"the shards hold images of {schema.height}×{schema.width}, the model takes {size}×{size}; pack them with "
            f"--resolution {size}, or set --model.image-size"
        )
