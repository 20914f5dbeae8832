"""`cgf search` and `cgf replay --pack`: exported weights and packed shards in, files out.

A search leaves a folder: settings.json, report.html, and latents.safetensors with what `Found` holds for every image in
the order of the shards (z, error, start_error, steps, restart, trace), beside keys.json, their names. While it runs,
each batch is a part-….safetensors of its own; a search that was cut off goes on behind the last whole part.
"""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

from compgen_fast.draws import Draws
from compgen_fast.files import LEFTOVERS, whole_file
from compgen_fast.invert.composites import Composites
from compgen_fast.invert.marginals import SlotMarginals
from compgen_fast.invert.newton import newton
from compgen_fast.invert.search import Found, search
from compgen_fast.invert.starts import starts
from compgen_fast.models.io import load_model, save_tensors
from compgen_fast.models.replay import Replay, has_roles
from compgen_fast.models.slot_vae import SlotVAE, as_bytes
from compgen_fast.progress import following
from compgen_fast.report import search as report
from compgen_fast.report.search import Errors
from compgen_fast.stream import ShardStream, pack

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


@dataclass(frozen=True)
class Searched:
    """What a search left, and how it went."""

    latents: Path
    page: Path
    errors: Errors


def run_search(settings: SearchSettings, out: Path, device: str = "cpu") -> Searched:
    """Searches the latents of all images, or goes on with it; the file of latents comes last."""
    vae = load_vae(Path(settings.weights)).to(device)
    if (out / LATENTS).is_file():
        raise ValueError(f"{out} already holds {LATENTS}; name another folder with --out, or remove it")
    _claim(settings, out)
    marginals = _marginals(vae, settings, device)
    with ShardStream(list(settings.shards), batch_size=settings.batch, epochs=1, shuffle=False) as stream:
        total = stream.samples
        done = _whole_parts(out)
        stream.seek(before := min(total, len(done) * settings.batch))
        started = time.perf_counter()
        with following("search", total, "images", done=before) as advance:
            for number, batch in enumerate(stream, len(done)):
                images = batch.images[batch.valid].to(device)
                found = _searched(vae, images, marginals, settings, number)
                names = [key for key, valid in zip(batch.keys, batch.valid.tolist(), strict=True) if valid]
                _write_part(found, names, out, number)
                advance(len(images))
        seconds = time.perf_counter() - started
    tensors, keys = _read_parts(out)
    errors = Errors(tensors["start_error"], tensors["error"], tensors["steps"], (total - before) / seconds)
    examples = {
        title: [_example(vae, settings, number, tensors["z"][number].to(device)) for number in numbers]
        for title, numbers in errors.examples().items()
    }
    page = report.write(out, errors, examples, asdict(settings))
    return Searched(_joined(out, tensors, keys), page, errors)


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
    guess = _guess(vae, images, settings, number)
    generator = torch.Generator(guess.device).manual_seed(settings.seed + number)
    init = starts(guess, marginals, swapped=settings.swapped, drawn=settings.drawn, generator=generator)
    if settings.by_newton:
        return newton(vae.decoder, images, init, marginals=marginals, pull=settings.pull, seed=settings.seed)
    return search(
        vae.decoder, images, init, steps=settings.steps, rate=settings.rate, marginals=marginals, pull=settings.pull,
        still=settings.still, seed=settings.seed, trace=True,
    )  # fmt: skip


@torch.no_grad()
def _guess(vae: SlotVAE, images: Tensor, settings: SearchSettings, number: int) -> Tensor:
    """The encoder's latents of a batch of this number."""
    return vae.encode(images, Draws.at(settings.seed, number, device=images.device))[0]


@torch.no_grad()
def _example(vae: SlotVAE, settings: SearchSettings, number: int, z: Tensor) -> NDArray[np.uint8]:
    """[3, H, W, 3]: image ``number``, what is drawn of the encoder's guess, and of ``z``."""
    batch, place = divmod(number, settings.batch)
    with ShardStream(list(settings.shards), batch_size=settings.batch, epochs=1, shuffle=False) as stream:
        stream.seek(batch * settings.batch)
        given = next(iter(stream))
        images = given.images[given.valid].to(z.device)
    latents = torch.stack([_guess(vae, images, settings, batch)[place], z])
    drawn = as_bytes(vae.decode(latents)).view(2, *images.shape[1:])
    return torch.cat([images[place, None], drawn]).cpu().numpy()


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
    with whole_file(path) as temporary:
        save_tensors(tensors, temporary)


def _read_parts(out: Path) -> tuple[dict[str, Tensor], list[str]]:
    """What was found for all images, and their keys."""
    parts = _whole_parts(out)
    loaded = [load_file(path) for path in parts]
    keys = [key for path in parts for key in json.loads(path.with_suffix(".json").read_text())]
    return {name: torch.cat([part[name] for part in loaded]) for name in loaded[0]}, keys


def _joined(out: Path, found: dict[str, Tensor], keys: list[str]) -> Path:
    """All parts as one file, and the parts removed."""
    (out / KEYS).write_text(json.dumps(keys))
    with whole_file(out / LATENTS) as temporary:
        save_tensors(found, temporary)
    for path in [*out.glob("part-*"), *out.glob(LEFTOVERS)]:  # also of one that was killed while it was written
        path.unlink()
    return out / LATENTS
