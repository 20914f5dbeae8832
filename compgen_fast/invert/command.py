"""`cgf search` and `cgf replay --pack`: exported weights and packed shards in, files out.

A search leaves a folder: settings.json, and latents.safetensors with what `Found` holds for every image in the order
of the shards (z, error, start_error, steps, restart, trace), beside keys.json, their names. While it runs, each batch
is a part-….safetensors of its own; a search that was cut off goes on behind the last whole part.
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.torch import load_file
from torch import Tensor

from compgen_fast.draws import Draws
from compgen_fast.invert.composites import Composites
from compgen_fast.invert.marginals import SlotMarginals
from compgen_fast.invert.newton import newton
from compgen_fast.invert.search import Found, search
from compgen_fast.invert.starts import starts
from compgen_fast.models.replay import Replay, has_roles
from compgen_fast.models.slot_vae import SlotVAE
from compgen_fast.stream import ShardStream, pack
from compgen_fast.train.checkpoints import save_tensors
from compgen_fast.train.export import load_model

SETTINGS, LATENTS, KEYS = "settings.json", "latents.safetensors", "keys.json"


@dataclass(frozen=True)
class SearchSettings:
    """What a search is told by; kept in settings.json."""

    weights: str
    shards: tuple[str, ...]
    train: str | None
    probes: int
    steps: int
    rate: float
    pull: float
    still: float
    swapped: int
    drawn: int
    by_newton: bool
    batch: int
    seed: int


def run_search(settings: SearchSettings, out: Path, device: str = "cpu") -> Path:
    """Searches the latents of all images, or goes on with it, and returns the file of latents."""
    vae = load_vae(Path(settings.weights)).to(device)
    if (out / LATENTS).is_file():
        raise ValueError(f"{out} already holds {LATENTS}; name another folder with --out, or remove it")
    _claim(settings, out)
    marginals = _marginals(vae, settings, device)
    with ShardStream(list(settings.shards), batch_size=settings.batch, epochs=1, shuffle=False) as stream:
        total = stream.samples
        done = _whole_parts(out)
        stream.seek(len(done) * settings.batch)
        with _bar() as bar:
            task = bar.add_task("searching", total=total, completed=min(total, len(done) * settings.batch))
            for number, batch in enumerate(stream, len(done)):
                images = batch.images[batch.valid].to(device)
                found = _searched(vae, images, marginals, settings, number)
                names = [key for key, valid in zip(batch.keys, batch.valid.tolist(), strict=True) if valid]
                _write_part(found, names, out, number)
                bar.advance(task, len(images))
    return _joined(out)


def load_vae(weights: Path) -> SlotVAE:
    """The slot VAE of exported weights; of a replayed one, the VAE with the encoder that replay left."""
    model = load_model(weights)
    vae = model.vae if isinstance(model, Replay) else model
    if not isinstance(vae, SlotVAE):
        raise ValueError(
            f"{weights} holds a {type(model).__name__}, which has no decoder to search through; expected a slot VAE, "
            "or one in replay"
        )
    return vae


def encoded(vae: SlotVAE, shards: Sequence[str] | str, count: int, device: str = "cpu") -> Tensor:
    """The encoder's latents [n, K, D] of the first ``count`` images, or of all if there are fewer."""
    parts, seen = [], 0
    with torch.no_grad(), ShardStream(shards, batch_size=64, epochs=1, shuffle=False) as stream:
        for batch in stream:
            images = batch.images[batch.valid].to(device)
            parts.append(vae.encode(images, Draws.at(0, seen, device=device))[0][: count - seen])
            seen += len(parts[-1])
            if seen == count:
                break
    return torch.cat(parts)


def run_pack(weights: Path, shards: str, out: Path, *, size: int, bank: int, jitter: float, seed: int) -> int:
    """Packs decodes of recombined slots of the images in ``shards``; returns how many."""
    vae = load_vae(weights)
    source = Composites(vae, encoded(vae, shards, bank), size, seed, jitter=jitter)
    return pack(source, out, split="replay", progress=True).samples


def _marginals(vae: SlotVAE, settings: SearchSettings, device: str) -> SlotMarginals | None:
    if settings.train is None:
        return None
    latents = encoded(vae, settings.train, settings.probes, device)
    return SlotMarginals.fit(latents, exchangeable=not has_roles(vae.config))


def _searched(
    vae: SlotVAE, images: Tensor, marginals: SlotMarginals | None, settings: SearchSettings, number: int
) -> Found:
    with torch.no_grad():
        guess = vae.encode(images, Draws.at(settings.seed, number, device=images.device))[0]
    generator = torch.Generator(guess.device).manual_seed(settings.seed + number)
    init = starts(guess, marginals, swapped=settings.swapped, drawn=settings.drawn, generator=generator)
    if settings.by_newton:
        return newton(vae.decoder, images, init, marginals=marginals, pull=settings.pull, seed=settings.seed)
    return search(
        vae.decoder, images, init, steps=settings.steps, rate=settings.rate, marginals=marginals, pull=settings.pull,
        still=settings.still, seed=settings.seed, trace=True,
    )  # fmt: skip


def _claim(settings: SearchSettings, out: Path) -> None:
    """The folder is this search's, or nobody's."""
    path, told = out / SETTINGS, json.dumps(asdict(settings), indent=1) + "\n"
    if path.is_file() and path.read_text() != told:
        raise ValueError(f"{out} holds a search with other settings; repeat its command, or name another --out")
    out.mkdir(parents=True, exist_ok=True)
    path.write_text(told)


def _part(out: Path, number: int) -> Path:
    return out / f"part-{number:06d}.safetensors"


def _whole_parts(out: Path) -> list[Path]:
    return list(_parts(out))


def _parts(out: Path) -> Iterator[Path]:
    number = 0
    while (path := _part(out, number)).is_file() and path.with_suffix(".json").is_file():
        yield path
        number += 1


def _write_part(found: Found, keys: Sequence[str], out: Path, number: int) -> None:
    """Both files are whole or not there; the names come first, so that a part which is there has them."""
    path = _part(out, number)
    told = {field.name: getattr(found, field.name) for field in fields(Found)}
    tensors = {name: value.contiguous().cpu() for name, value in told.items() if value is not None}
    path.with_suffix(".json").write_text(json.dumps(list(keys)))
    temporary = path.with_suffix(f".{os.getpid()}")
    save_tensors(tensors, temporary)
    temporary.replace(path)


def _joined(out: Path) -> Path:
    """All parts as one file, and the parts removed."""
    parts = _whole_parts(out)
    loaded = [load_file(path) for path in parts]
    keys = [key for path in parts for key in json.loads(path.with_suffix(".json").read_text())]
    (out / KEYS).write_text(json.dumps(keys))
    temporary = out / f".{LATENTS}"
    save_tensors({name: torch.cat([part[name] for part in loaded]) for name in loaded[0]}, temporary)
    temporary.replace(out / LATENTS)
    for path in out.glob("part-*"):  # also of one that was killed while it was written
        path.unlink()
    return out / LATENTS


def _bar() -> Progress:
    return Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
