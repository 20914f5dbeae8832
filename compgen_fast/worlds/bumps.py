"""Bumps: a Gaussian bump at a whole position (x, y) of an N × N image, with a square of positions held out.

The smallest world in which a decoder must compose two factors: image = stripe_x · stripe_y. ``encode`` gives the codes
that decoders are fed, x and y always apart; the part ``stripes`` shows one factor alone. A blank image already has a
mean squared error of about πσ²/N² (``blank_error``): print it beside any error out of distribution.
"""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from compgen_fast.worlds.chance import Chance
from compgen_fast.worlds.drawing import Array
from compgen_fast.worlds.source import Factor, Samples
from compgen_fast.worlds.world import PARTS, Matrix, Part, Values, World, part_size

Encoding = Literal["bump", "ramp", "one-hot", "thermometer", "fourier"]
KINDS = ("bump", "vertical stripe", "horizontal stripe")
_HELD = {"square": (6 / 28, 22 / 28), "corner": (12 / 32, 1.0)}  # shares of the side, first and last position


class Bumps(World):
    """The world. N is ``resolution``; ``sigma`` is the bump's width in pixels."""

    name = "bumps"
    splits = ("square", "corner")
    parts = (*PARTS, "stripes")

    def __init__(self, resolution: int = 28, seed: int = 0, sigma: float = 1.0) -> None:
        super().__init__(resolution, seed)
        if not sigma > 0:
            raise ValueError(f"bumps: sigma is {sigma}; expected a width above 0 pixels")
        self.sigma = sigma
        place = np.arange(resolution)
        self._gauss = np.exp(-((place - place[:, None]) ** 2) / (2 * sigma**2)).astype(np.float32)

    @property
    def factors(self) -> tuple[Factor, ...]:
        last = self.resolution - 1
        return Factor("kind", KINDS), Factor("x", low=0, high=last), Factor("y", low=0, high=last)

    @property
    def slots(self) -> tuple[str, ...]:
        return "background", "bump"

    @property
    def blank_error(self) -> float:
        """The mean squared error of a blank image, averaged over positions."""
        return float(np.square(self._gauss.astype(np.float64)).sum() / self.resolution**2) ** 2

    def split(self, split: str, part: str = "train", *, seen_pairs: int | None = None, size: int | None = None) -> Part:
        """One part of a split; positions come in a shuffled order, each once before any comes again.

        Args:
            split: ``"square"`` holds out the inner square ([6, 22]² for N = 28), ``"corner"`` what has both x and y at
                12 or more (for N = 32); both grow with N.
            part: ``"validation"`` and ``"test"`` have a tenth of the other positions each, ``"train"`` the rest;
                ``"stripes"`` is N vertical and N horizontal stripes.
            size: how many samples; by default each position once.
        """
        self.check(split, part)
        self.refuse_pairs(seen_pairs)
        drawn = self._stripes() if part == "stripes" else self._positions(split, part)
        count = len(drawn) if size is None else part_size(self.name, part, size)
        return Part(self, split, part, count, _Draw(drawn))

    def held_out(self, split: str) -> NDArray[np.bool_]:
        """[y, x], True where the split's training never has a bump."""
        self.check(split)
        first, last = (round(share * self.resolution) for share in _HELD[split])
        inside = (np.arange(self.resolution) >= first) & (np.arange(self.resolution) <= last)
        return inside & inside[:, None]

    def matrix(self, split: str, seen_pairs: int | None = None) -> Matrix:
        self.refuse_pairs(seen_pairs)
        names = tuple(str(place) for place in range(self.resolution))
        return Matrix("y", names, "x", names, self.held_out(split).astype(np.int64))

    def _positions(self, split: str, part: str) -> NDArray[np.int64]:
        held = self.held_out(split)
        places = np.argwhere(held if part == "ood" else ~held)
        places = places[Chance(self.seed).order(len(places), f"{split} positions")]
        tenth = len(places) // 10
        chosen = {"validation": slice(0, tenth), "test": slice(tenth, 2 * tenth), "train": slice(2 * tenth, None)}
        y, x = places[chosen.get(part, slice(None))].T
        return np.stack([np.zeros_like(x), x, y], -1)

    def _stripes(self) -> NDArray[np.int64]:
        place = np.arange(self.resolution)
        none = np.zeros_like(place)
        return np.concatenate([np.stack([none + 1, place, none], -1), np.stack([none + 2, none, place], -1)])

    def pixels(self, values: Values) -> Array:
        """The images as numbers from 0 to 1, [n, N, N], before they are rounded to bytes."""
        across, down = self._profiles(values, missing=1.0)
        return across[:, None, :] * down[:, :, None]

    def encode(self, values: Values, encoding: Encoding = "bump") -> Array:
        """The codes of x and of y, side by side; a stripe's missing factor is all zeros.

        Of one factor: ``"bump"`` [N] is a Gaussian round the position, ``"one-hot"`` [N] the position itself,
        ``"thermometer"`` [N] is 1 up to the position, ``"ramp"`` [1] the position as a share of N − 1, ``"fourier"``
        [2 ⌈log₂ N⌉] its sines and cosines, with half a period over the image and then twice as many each.
        """
        codes, _ = self.codes(encoding)
        kind, x, y = self._whole(values)
        return np.concatenate([codes[x] * (kind != 2)[:, None], codes[y] * (kind != 1)[:, None]], axis=1)

    def codes(self, encoding: Encoding) -> tuple[Array, Array]:
        """The code of each position of one factor [N, w], and how it changes there.

        One-hot and thermometer are no functions of positions in between: their change is half of that between the
        neighbours.
        """
        N, place = self.resolution, np.arange(self.resolution, dtype=np.float64)
        if encoding == "bump":
            code = self._gauss.astype(np.float64)
            slope = (place - place[:, None]) / self.sigma**2 * code
        elif encoding == "ramp":
            code = place[:, None] / (N - 1)
            slope = np.full((N, 1), 1 / (N - 1))
        elif encoding == "fourier":
            rate = np.pi / N * 2 ** np.arange(np.ceil(np.log2(N)))
            phase = place[:, None] * rate
            code = np.concatenate([np.sin(phase), np.cos(phase)], axis=1)
            slope = np.concatenate([np.cos(phase) * rate, -np.sin(phase) * rate], axis=1)
        elif encoding in ("one-hot", "thermometer"):
            code = np.eye(N) if encoding == "one-hot" else np.tri(N)
            slope = np.asarray(np.gradient(code, axis=0))
        else:
            raise ValueError(f"bumps: encoding is {encoding!r}; expected one of {', '.join(get_args(Encoding))}")
        return code.astype(np.float32), slope.astype(np.float32)

    def render(self, values: Values) -> Samples:
        pixels = self.pixels(values)
        grey = (pixels * np.float32(255) + np.float32(0.5)).astype(np.uint8)
        return Samples(np.repeat(grey[..., None], 3, axis=-1), values, (pixels > 0.5).astype(np.uint8))

    def _profiles(self, values: Values, missing: float) -> tuple[Array, Array]:
        """The bump's cross-sections in x and y, [n, N] each."""
        kind, x, y = self._whole(values)
        across, down = self._gauss[x], self._gauss[y]
        across[kind == 2] = down[kind == 1] = missing
        return across, down

    def _whole(self, values: Values) -> tuple[NDArray[np.int64], ...]:
        given = self.complete(values)
        for name in ("x", "y"):
            if (given[name] % 1 != 0).any():
                raise ValueError(f"bumps: {name!r} holds a position between pixels; expected whole numbers")
        return tuple(given[name].astype(np.int64) for name in ("kind", "x", "y"))


@dataclass(frozen=True)
class _Draw:
    """The part's (kind, x, y) in turn."""

    drawn: NDArray[np.int64]

    def __call__(self, numbers: NDArray[np.int64], counters: NDArray[np.int64]) -> Values:
        kind, x, y = self.drawn[numbers % len(self.drawn)].T
        values: dict[str, NDArray[Any]] = {"kind": kind, "x": x.astype(np.float32), "y": y.astype(np.float32)}
        return values
