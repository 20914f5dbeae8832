"""Naive decoders: what they make of held-out positions, what a few shots there mend, how layers bend the factors."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compgen_fast.measure.geometry import LayerGeometry, factorization, grid_metrics, layer_geometry, volume
from compgen_fast.studies.bumps.decoders import Decoder, cnn, mlp
from compgen_fast.studies.bumps.fitting import Fit, decoded, draws, errors, optimise, squared
from compgen_fast.studies.bumps.sheet import Sheet, open_sheet
from compgen_fast.worlds.bumps import Encoding

Found = tuple[dict[str, Any], dict[str, NDArray[Any]]]
"""What a job leaves: numbers for results.json, and arrays for the page."""

SIZE = 28
DECODERS: dict[str, Callable[..., Decoder]] = {"mlp": mlp, "cnn": cnn}
SIGMAS_AWAY = 2  # from any known position, along x or y: there a bump has nothing to lean on
TUNED = 2  # neurons of a layer whose tuning curves are kept: those that vary most


@dataclass(frozen=True)
class Naive:
    """One decoder on one encoding, the positions outside the square, and all that is then known of it."""

    part: ClassVar[str] = "failure"
    decoder: Literal["mlp", "cnn"]
    depth: int
    encoding: Encoding
    seeds: tuple[int, ...]
    fit: Fit
    channels: int = 16
    """Of a cnn."""

    @property
    def name(self) -> str:
        return f"{self.decoder}{self.depth}-{self.encoding}"

    def run(self) -> Found:
        sheet = open_sheet(SIZE, self.encoding)
        wider = {"channels": self.channels} if self.decoder == "cnn" else {}
        decoder = DECODERS[self.decoder](self.seeds, sheet.codes.shape[1], SIZE, self.depth, **wider)
        rows = draws([[sheet.known]] * len(self.seeds), self.seeds, self.fit)
        optimise(decoder, squared(decoder, sheet.codes, sheet.images), rows, self.fit)
        found = errors(decoder, sheet, len(self.seeds))
        geometry = _geometry(decoder, sheet, len(self.seeds))
        arrays = {"errors": found.view(-1, SIZE, SIZE).numpy()} | _pictures(decoder, sheet, len(self.seeds))
        return _levels(found, sheet) | _by_layer(decoder, sheet, geometry, len(self.seeds)), arrays | _maps(geometry)


@dataclass(frozen=True)
class FewShot:
    """The same with a few bumps inside the square, all numbers of them in one stack; judged at the others."""

    part: ClassVar[str] = "failure"
    decoder: Literal["mlp", "cnn"]
    depth: int
    encoding: Encoding
    shots: tuple[int, ...]
    seeds: tuple[int, ...]
    fit: Fit

    @property
    def name(self) -> str:
        return f"shots-{self.decoder}{self.depth}-{self.encoding}"

    def run(self) -> Found:
        sheet = open_sheet(SIZE, self.encoding)
        pairs = list(product(self.shots, self.seeds))
        seeds = [seed for _, seed in pairs]
        shown = [chosen(sheet.held.nonzero()[:, 0], count, seed) for count, seed in pairs]
        decoder = DECODERS[self.decoder](seeds, sheet.codes.shape[1], SIZE, self.depth)
        rows = draws([[torch.cat([sheet.known, each])] for each in shown], seeds, self.fit)
        optimise(decoder, squared(decoder, sheet.codes, sheet.images), rows, self.fit)
        found = errors(decoder, sheet, len(pairs))
        curve = [
            {"shots": count, "seed": seed, "ood": at_others(found[model], sheet.held, each)}
            for model, ((count, seed), each) in enumerate(zip(pairs, shown, strict=True))
        ]
        maps = found.view(len(self.shots), len(self.seeds), SIZE, SIZE)[:, 0]
        return {"blank": sheet.blank, "curve": curve}, {"errors": maps.numpy()}


def chosen(rows: Tensor, count: int, seed: int) -> Tensor:
    """Some of the rows. Of one seed, more of them hold all of fewer."""
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:count]]


def at_others(found: Tensor, held: Tensor, shown: Tensor) -> float:
    """The mean error [n] at held-out positions that were not shown."""
    asked = held.clone()
    asked[shown] = False
    return float(found[asked].mean())


def _levels(found: Tensor, sheet: Sheet) -> dict[str, Any]:
    """Errors per model, and the error of a blank image at the same positions."""
    where = {"id": ~sheet.held, "ood": sheet.held, "core": sheet.core(SIGMAS_AWAY)}
    blank = sheet.images[: sheet.positions].square().mean((1, 2))
    levels: dict[str, Any] = {name: found[:, rows].mean(1).tolist() for name, rows in where.items()}
    return levels | {"blank": {name: float(blank[rows].mean()) for name, rows in where.items()}}


def _geometry(decoder: Decoder, sheet: Sheet, models: int) -> list[LayerGeometry]:
    code, along_x, along_y = (
        each[: sheet.positions].expand(models, -1, -1) for each in (sheet.codes, *sheet.slopes)
    )  # fmt: skip
    found: list[LayerGeometry] = layer_geometry(list(decoder.layers), code, (along_x, along_y), leading=2)
    return found


def _by_layer(decoder: Decoder, sheet: Sheet, geometry: Sequence[LayerGeometry], models: int) -> dict[str, Any]:
    """Of the input and of each layer, per model: exact, and by differences between neighbours as the paper has it."""
    on_grid = [grid_metrics(each.unflatten(1, (SIZE, SIZE))) for each in _activations(decoder, sheet, models)]
    return {
        "factorization": [factorization(layer.metric).tolist() for layer in geometry],
        "factorization_on_grid": [factorization(metric).tolist() for metric in on_grid],
    }


@torch.no_grad()
def _activations(decoder: Decoder, sheet: Sheet, models: int) -> list[Tensor]:
    """Of the input and of each layer, [M, n, features]."""
    x = sheet.codes[: sheet.positions].expand(models, -1, -1)
    found = [x]
    for layer in decoder.layers:
        x = layer(x)
        found.append(x.flatten(2))
    return found


def _maps(geometry: Sequence[LayerGeometry]) -> dict[str, NDArray[Any]]:
    """log10 of the volume, of the first model: [layers + 1, N, N]."""
    return {"volume": np.stack([volume(layer.metric[0]).view(SIZE, SIZE).numpy() for layer in geometry])}


def _pictures(decoder: Decoder, sheet: Sheet, models: int) -> dict[str, NDArray[Any]]:
    """Of the first model: images at a few held-out positions, and neurons' responses over the grid, by layer."""
    asked = [SIZE * y + x for x, y in ((14, 14), (9, 18), (18, 9), (11, 11))]
    made = decoded(decoder, sheet.codes[asked], models)[0]
    tuning: Mapping[str, NDArray[Any]] = {
        f"tuning/{number}": activity[0][:, activity[0].var(0).topk(TUNED).indices].T.reshape(TUNED, SIZE, SIZE).numpy()
        for number, activity in enumerate(_activations(decoder, sheet, models)[1:-1])
    }
    return {"made": made.numpy(), "asked": sheet.images[asked].numpy(), **tuning}
