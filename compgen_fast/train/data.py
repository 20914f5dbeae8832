"""Where a run's samples come from: shards that are there, or a world's split that is packed once and kept.

A generator learns tokens. Where the shards hold images, a tokenizer turns them into tokens once, kept beside them.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from compgen_fast.generate.config import GeneratorConfig, MaskGITConfig, ObjectiveConfig
from compgen_fast.generate.latents import Kind, Layout, TokenStream, cache, check_maker, fingerprint, layout_at
from compgen_fast.models.config import ModelConfig, ReplayConfig, TokenizerConfig, VQVAEConfig
from compgen_fast.models.io import WEIGHTS, check_start, load_model, read_settings
from compgen_fast.models.tokenizer import Tokenizer
from compgen_fast.stream import ShardStream, StreamError, manifest, pack
from compgen_fast.stream.remote import Local, place
from compgen_fast.train.config import NEEDS_A_VAE, NEEDS_TOKENS, DataConfig, TrainConfig
from compgen_fast.train.ranks import Ranks
from compgen_fast.worlds import Factor, Part, open_split
from compgen_fast.worlds.options import named


@dataclass(frozen=True)
class Shards:
    train: str
    validation: str | None


def shards(config: TrainConfig, ranks: Ranks) -> Shards:
    """The packed folders to read: of images, or of their tokens where a tokenizer is given. Rank 0 makes what is
    missing.
    """
    tokenizer = open_tokenizer(config)
    found = image_shards(config.data, config.model.image_size, ranks)
    if tokenizer is None:
        return found
    train = _tokens(config, tokenizer, found.train, ranks)
    validation = None if found.validation is None else _tokens(config, tokenizer, found.validation, ranks)
    ranks.barrier()
    return Shards(train, validation)


def image_shards(config: DataConfig, image_size: int, ranks: Ranks) -> Shards:
    """The packed folders of images, or those given. Rank 0 packs what is missing; a pack that was cut off goes on."""
    if config.shards is not None:
        return Shards(config.shards, config.validation)
    folders = {name: config.cache / folder_name(config, image_size, name) for name in packed_parts(config)}
    if ranks.first:
        for name, folder in folders.items():
            if not (folder / manifest.FILE).exists():
                _pack(config, image_size, name, folder)
    ranks.barrier()
    return Shards(str(folders["train"]), config.validation or str(folders["validation"]))


def packed_parts(config: DataConfig) -> Sequence[str]:
    """Which parts of the world are packed."""
    if config.shards is not None:
        return ()
    return ("train", "validation") if config.validation is None else ("train",)


def folder_name(config: DataConfig, image_size: int, name: str) -> str:
    """Says all that decides the images, so that two settings never share a folder."""
    seen = "" if config.seen_pairs is None else f"-pairs{config.seen_pairs}"
    options = "".join(f"-{option}" for option in config.options)
    size = config.size if name == "train" else config.validation_size
    return f"{config.world}-{config.split or 'first'}{seen}{options}-{image_size}px-{name}{size}-seed{config.seed}"


def token_folder(config: TrainConfig, images: str, tokenizer: Tokenizer) -> Path:
    """Where the tokens of a folder of images are kept: beside it, or of one at an address under ``cache``. Its name
    changes with the images and the tokenizer, so that no stale tokens are read.
    """
    where, found = place(images), _manifest(images)
    beside = where.folder if isinstance(where, Local) else config.data.cache / "fetched"
    return beside.with_name(f"{beside.name}.{kind_of(config.model)}-{fingerprint(tokenizer)}-{found.hash[:8]}")


def kind_of(model: ModelConfig) -> Kind:
    """Which tokens a generator of these settings learns. A VQ-VAE's latents are its code vectors."""
    return "codes" if isinstance(model, MaskGITConfig) else "latents"


def open_tokenizer(config: TrainConfig) -> Tokenizer | None:
    """The one whose tokens the run learns, if it is given."""
    check_tokenizer(config)
    if config.data.tokenizer is None:
        return None
    tokenizer = load_model(config.data.tokenizer)
    assert isinstance(tokenizer, Tokenizer)
    return tokenizer


def check_tokenizer(config: TrainConfig) -> None:
    """Refuses a tokenizer that is not there, or not the generator's; looks at settings alone."""
    folder, model = config.data.tokenizer, config.model
    if folder is None or not isinstance(model, GeneratorConfig):
        return
    try:
        found = read_settings(folder).model
    except ValueError as error:
        raise ValueError(f"data.tokenizer: {error}; {NEEDS_TOKENS}") from None
    if not isinstance(found, TokenizerConfig):
        raise ValueError(f"data.tokenizer: {folder} holds a model of {type(found).__name__}; {NEEDS_TOKENS}")
    if found.image_size != model.image_size:
        raise ValueError(
            f"model.image_size is {model.image_size}, and the tokenizer in {folder} takes images of "
            f"{found.image_size}×{found.image_size}; set --model.image-size {found.image_size}"
        )
    if kind_of(model) == "codes" and not isinstance(found, VQVAEConfig):
        raise ValueError(
            f"data.tokenizer: {folder} holds a VAE, which has no codes; MaskGIT learns codes. Train a VQ-VAE with "
            "`cgf train vq_tokenizer_cpu`, then give --data.tokenizer runs/vq_tokenizer_cpu/weights"
        )
    _check_layout(model, Layout.of_config(found, kind_of(model)), f"the tokenizer in {folder} makes")


def _tokens(config: TrainConfig, tokenizer: Tokenizer, folder: str, ranks: Ranks) -> str:
    """The folder of the tokens of a folder of images; one that holds this tokenizer's tokens already is itself."""
    if (layout := layout_at(folder)) is not None:
        check_maker(layout, tokenizer, folder)
        return folder
    made = token_folder(config, folder, tokenizer)
    if ranks.first and not (made / manifest.FILE).exists():
        cache(tokenizer.to(ranks.device), folder, made, kind=kind_of(config.model), progress=True)
    return str(made)


def packed(config: TrainConfig) -> Path | None:
    """The folder that the run trains on, if it is on this machine: of images, or of a generator's tokens."""
    folder = _given(config)
    if folder is None or not isinstance(config.model, GeneratorConfig) or layout_at(folder) is not None:
        return folder
    if config.data.tokenizer is None or not (config.data.tokenizer / WEIGHTS).exists():
        return None
    tokenizer = open_tokenizer(config)
    assert tokenizer is not None
    made = token_folder(config, str(folder), tokenizer)
    return made if (made / manifest.FILE).exists() else None


def _given(config: TrainConfig) -> Path | None:
    """The folder that is packed from the world, or given as shards, if it is on this machine."""
    folder = (
        config.data.cache / folder_name(config.data, config.model.image_size, "train")
        if config.data.shards is None
        else Path(config.data.shards)
    )
    return folder if (folder / manifest.FILE).exists() else None


def factors(config: TrainConfig) -> Sequence[Factor]:
    """Of the run's images, without packing them: some models are as large as the factors they predict or are told."""
    folder = config.data.shards or _given(config)
    if folder is not None:
        with _naming("data.shards"):
            return _manifest(folder).schema.factors
    return part(config.data, config.model.image_size, "train").factors


def check_sources(config: TrainConfig) -> None:
    """Refuses shards that are not there or do not fit, and a world without such images, before anything is packed."""
    for name in packed_parts(config.data):
        part(config.data, config.model.image_size, name)
    for name, folder in (("shards", config.data.shards), ("validation", config.data.validation)):
        if folder is not None:
            with _naming(f"data.{name}"):
                check_fit(config, folder)
    if config.start is not None:
        with _naming("start", f"; {NEEDS_A_VAE}" if isinstance(config.model, ReplayConfig) else ""):
            read_settings(config.start)
        with _naming("start"):
            check_start(config.model, config.start, factors(config))


def fitted(config: TrainConfig) -> TrainConfig:
    """The settings with those that the data limit: replay's bank holds no image twice."""
    if not isinstance(config.model, ReplayConfig):
        return config
    images = config.data.size if config.data.shards is None else _manifest(config.data.shards).samples
    return replace(config, model=replace(config.model, bank=min(config.model.bank, images)))


@contextmanager
def _naming(setting: str, advice: str = "") -> Iterator[None]:
    """Says which setting a refusal is about, and adds advice."""
    try:
        yield
    except (StreamError, ValueError) as error:
        raise ValueError(f"{setting}: {error}{advice}") from None


def _manifest(folder: str | Path) -> manifest.Manifest:
    """Of a packed folder, or one at an address."""
    where = place(folder)
    if isinstance(where, Local) and where.folder.is_file():
        raise ValueError(f"{folder} is a file; expected a folder of shards with {manifest.FILE}")
    return manifest.read(where.file(manifest.FILE), where.origin)


def part(config: DataConfig, image_size: int, name: str) -> Part:
    """One part of the split that a run is about: ``train``, ``validation``, or those it never sees."""
    if config.world is None:
        raise ValueError("data.world and data.shards are missing; name the world whose images to pack, or give shards")
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
    return _stream(
        folder,
        batch_size=config.batch_size // config.accumulation,
        seed=config.seed,
        rank=ranks.rank,
        ranks=ranks.size,
        workers=config.data.workers,
        budget=config.data.budget,
        device=ranks.device,
    )


def open_validation(config: TrainConfig, folder: str, ranks: Ranks) -> ShardStream:
    """Each validation sample once, in the order they were packed."""
    return _stream(
        folder,
        batch_size=config.batch_size // config.accumulation,
        epochs=1,
        shuffle=False,
        rank=ranks.rank,
        ranks=ranks.size,
        budget=config.data.budget,
        device=ranks.device,
    )


def _stream(folder: str, **options: Any) -> ShardStream:
    return ShardStream(folder, **options) if layout_at(folder) is None else TokenStream(folder, **options)


def in_order(config: TrainConfig, folder: str) -> Iterator[Tensor]:
    """The training images, batch by batch in the order they were packed, alike on every rank."""
    budget = config.data.budget
    with ShardStream(folder, batch_size=config.batch_size, epochs=1, shuffle=False, budget=budget) as stream:
        for batch in stream:
            yield batch.images[batch.valid]


def check_fit(config: TrainConfig, folder: str) -> None:
    """Refuses shards that do not hold what the model takes: images of its size, or for a generator its tokens or images
    to make them of.
    """
    found, model = _manifest(folder), config.model
    layout, schema = Layout.read(found.name), found.schema
    if isinstance(model, GeneratorConfig) and layout is not None:
        _check_layout(model, layout, "the shards hold")
    elif isinstance(model, GeneratorConfig) and config.data.tokenizer is None:
        raise ValueError(f"the shards hold images, and data.tokenizer is missing; {NEEDS_TOKENS}")
    elif layout is not None:
        raise ValueError(
            f"the shards hold {_described(layout)}, which are for generators, and {type(model).__name__} is a "
            "model of images; give the shards that the tokens were made of"
        )
    elif (schema.height, schema.width) != (model.image_size, model.image_size):
        again = "index" if schema.format == manifest.AS_FOUND else "pack"
        option = "--model.vae.image-size" if isinstance(model, ReplayConfig) else "--model.image-size"
        raise ValueError(
            f"the shards hold images of {schema.height}×{schema.width}, the model takes {model.image_size}×"
            f"{model.image_size}; {again} them with --resolution {model.image_size}, or set {option}"
        )


def _check_layout(model: ObjectiveConfig, layout: Layout, found: str) -> None:
    """``found``: who holds or makes tokens of this layout, for the error."""
    size = model.codes if isinstance(model, MaskGITConfig) else model.channels
    expected = replace(layout, kind=kind_of(model), tokens=model.side**2, size=size)
    if layout == expected:
        return
    if layout.kind != expected.kind:
        advice = "MaskGIT learns codes, the other generators latents; cache the tokens that it learns"
    else:
        numbers = "codes" if layout.kind == "codes" else "channels"
        advice = f"set --model.side {round(layout.tokens**0.5)} --model.{numbers} {layout.size}"
    raise ValueError(f"{found} {_described(layout)}, and the generator learns {_described(expected)}; {advice}")


def _described(layout: Layout) -> str:
    if layout.kind == "codes":
        return f"{layout.tokens} codes out of {layout.size}"
    return f"{layout.tokens} tokens of {layout.size} numbers"
