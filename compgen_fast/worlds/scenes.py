"""Scenes: one or two textured, shaded objects with a soft shadow before a background, every cause known.

Made for the questions asked of PUG: is an object known on a background, in a texture or beside an object it was never
seen with? Twenty objects, ten textures and ten backgrounds can be told by shape and pattern alone; position, size,
rotation, colour and light vary freely.

Objects are drawn in a window of the image only, both objects of all images of a batch at once, by looking up tables of
distances (scenes_shapes). Batches are cut so that what is being worked on stays in the cache.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from compgen_fast.worlds.chance import Chance
from compgen_fast.worlds.drawing import Array, Windows, axis, clipped, column, cos_sin, hue_to_rgb, smooth, to_bytes
from compgen_fast.worlds.outlines import interpolated, nearest
from compgen_fast.worlds.scenes_backgrounds import BACKGROUNDS, paint
from compgen_fast.worlds.scenes_shapes import CATEGORIES, tables
from compgen_fast.worlds.scenes_textures import TEXTURES, textured
from compgen_fast.worlds.source import Factor, Samples
from compgen_fast.worlds.splits import Design, check_seen_pairs, crossed, listed_pairs, paired, partners
from compgen_fast.worlds.world import Matrix, Part, Values, World, by_chance, part_size

HALF = np.float32(0.5)
CHUNK_PIXELS = 32 * 64 * 64
SCALES = {1: (0.40, 0.60), 2: (0.34, 0.46)}  # radii by number of objects; half the image's side is 1
MARGIN = 1.06  # how far an object reaches beyond its radius
SPREAD = 0.7  # how far from the middle its centre may be
TILT = 0.6  # radians either way
LOOK_SPREAD = np.float32(0.4)  # how much of the circle of hues a kind with its own look may use
SHADOW_SHIFT, SHADOW_SOFT, SHADOW_DEPTH = 0.17, 0.17, 0.55  # the first two in radii of the object
WINDOW = MARGIN + SHADOW_SHIFT + SHADOW_SOFT  # how far an object and its shadow reach, in its radii


class _Layer(NamedTuple):
    """Objects in their windows: how much of each pixel they cover, how much of what is behind still shows (both
    [m, s, s]), and the light they add [m, 3, s, s]."""

    cover: Array
    left: Array
    light: Array


class Scenes(World):
    """The world. ``objects`` is 1 or 2; with 2, object 1 is to the left of or above object 2.

    Args:
        resolution: pixels of a side, 16 to 256.
        seed: of the samples and of which pairs are seen.
        objects: how many per image; the split ``object`` needs 2.
        occlusion: whether two objects overlap (always) or stand apart (always).
        variation: the part of its range, around the middle, that a number other than a position is drawn from, and of
            the textures, the first, where the split is not about them. Less of it is an easier world.
        own_looks: each kind of object has a texture, where the split is not about textures, and hues of its own.
        haze: how far backgrounds are faded to grey, from 0 to 1.
    """

    name = "scenes"
    splits = ("background", "texture", "object")

    def __init__(
        self,
        resolution: int = 64,
        seed: int = 0,
        objects: int = 1,
        occlusion: bool = False,
        variation: float = 1.0,
        own_looks: bool = False,
        haze: float = 0.0,
    ) -> None:
        super().__init__(resolution, seed)
        if objects not in SCALES:
            raise ValueError(f"scenes: objects is {objects}; expected 1 or 2")
        if occlusion and objects == 1:
            raise ValueError("scenes: occlusion needs two objects; set objects=2, or leave occlusion out")
        if not isinstance(variation, float | int) or not 0 <= variation <= 1:
            raise ValueError(f"scenes: variation is {variation}; expected 0 (none) to 1 (all there is)")
        if not isinstance(haze, float | int) or not 0 <= haze <= 1:
            raise ValueError(f"scenes: haze is {haze}; expected 0 (none) to 1 (backgrounds are plain grey)")
        self.objects, self.occlusion = objects, occlusion
        self.variation, self.own_looks, self.haze = variation, own_looks, haze

    @property
    def factors(self) -> tuple[Factor, ...]:
        low, high = SCALES[self.objects]
        of_objects = tuple(
            factor
            for i in range(1, self.objects + 1)
            for factor in (
                Factor(f"object_{i}", CATEGORIES),
                Factor(f"texture_{i}", TEXTURES),
                Factor(f"x_{i}", low=-SPREAD, high=SPREAD),
                Factor(f"y_{i}", low=-SPREAD, high=SPREAD),
                Factor(f"scale_{i}", low=low, high=high),
                Factor(f"rotation_{i}", low=-TILT, high=TILT),
                Factor(f"hue_{i}"),
            )
        )
        front = (Factor("front", ("object_1", "object_2")),) if self.objects == 2 else ()
        return (
            *of_objects,
            *front,
            Factor("background", BACKGROUNDS),
            Factor("background_x"),
            Factor("background_y"),
            Factor("background_hue", low=-0.05, high=0.05),
            Factor("light", low=0.75, high=1.1),
            Factor("light_angle", low=-np.pi, high=np.pi),
        )

    @property
    def slots(self) -> tuple[str, ...]:
        return ("background", "object_1", "object_2")[: self.objects + 1]

    def split(self, split: str, part: str = "train", *, seen_pairs: int | None = None, size: int | None = None) -> Part:
        """One part of a split, a ``Source``.

        Args:
            split: ``"background"`` holds out pairs of object and background, ``"texture"`` of object and texture,
                ``"object"`` of two objects (which needs ``objects=2``). With two objects, both keep to the rule.
            part: ``"train"``, ``"validation"`` and ``"test"`` show seen pairs, ``"ood"`` unseen ones.
            seen_pairs: how many partners each object is seen with, from 2 (the default) to one less than there are.
            size: how many samples; 20,000 for training and 2,000 otherwise.
        """
        seen = self._design(split, part, seen_pairs)
        design = _unseen(seen, split) if part == "ood" else seen
        pairs = listed_pairs(design, Chance(self.seed), f"{split} pairs")
        return Part(self, split, part, part_size(self.name, part, size), _Draw(self, split, design, pairs))

    def matrix(self, split: str, seen_pairs: int | None = None) -> Matrix:
        seen = self._design(split, "train", seen_pairs)
        level = np.where(seen, 0, np.where(_unseen(seen, split), 1, -1))
        second = {"background": BACKGROUNDS, "texture": TEXTURES, "object": CATEGORIES}[split]
        return Matrix("object", CATEGORIES, "other object" if split == "object" else split, second, level)

    def _design(self, split: str, part: str, seen_pairs: int | None) -> Design:
        self.check(split, part)
        chance = Chance(self.seed)
        if split == "object":
            if self.objects != 2:
                raise ValueError("scenes: the split 'object' is about pairs of objects; set objects=2")
            count = check_seen_pairs(self.name, seen_pairs, len(CATEGORIES) - 1)
            return paired(len(CATEGORIES), count, chance, split)
        second = {"background": BACKGROUNDS, "texture": TEXTURES}[split]
        count = check_seen_pairs(self.name, seen_pairs, len(second))
        return crossed(len(CATEGORIES), len(second), count, chance, split)

    def render(self, values: Values, hidden: tuple[int, ...] = ()) -> Samples:
        """Images and masks of these factor values: one array per factor, all of one length.

        Objects whose slots are ``hidden`` are left out, with their shadows, and all else stays.
        """
        given = self.complete(values)
        count, resolution = len(given["background"]), self.resolution
        images = np.empty((count, resolution, resolution, 3), dtype=np.uint8)
        masks = np.zeros((count, resolution, resolution), dtype=np.uint8)
        for chunk in _chunks(count, resolution):
            part = {name: value[chunk] for name, value in given.items()}
            images[chunk] = self._render(part, masks[chunk], hidden)
        return Samples(images, values, masks)

    def _render(self, values: dict[str, Array], masks: NDArray[np.uint8], hidden: tuple[int, ...]) -> NDArray[np.uint8]:
        image = self._background(values)
        count = len(image)
        stacked, slots = self._back_to_front(values)
        side = min(self.resolution, int(np.ceil(WINDOW * SCALES[self.objects][1] * self.resolution)) + 2)
        windows = Windows(stacked["x"], stacked["y"], side, self.resolution)
        layer = self._objects(stacked, windows)
        if hidden:
            absent = np.isin(slots, hidden)
            layer.cover[absent], layer.left[absent], layer.light[absent] = 0, 1, 0
        for depth in range(self.objects):
            which = slice(depth * count, (depth + 1) * count)
            pixels = windows.cut(image, which)
            pixels *= layer.left[which, None]
            pixels += layer.light[which]
            windows.paste(image, which, pixels)
            owner = windows.cut(masks, which)
            np.copyto(owner, slots[which, None, None], where=layer.cover[which] > 0.5)
            windows.paste(masks, which, owner)
        return to_bytes(image)

    def _background(self, values: dict[str, Array]) -> Array:
        """The place, a little brighter towards the light."""
        phases = values["background_x"], values["background_y"]
        kinds = values["background"].astype(np.int64)
        image = paint(kinds, phases, values["background_hue"], values["light"], self.resolution)
        line = axis(self.resolution) * np.float32(0.14)
        light_x, light_y = cos_sin(values["light_angle"])
        image *= (1 + column(light_y) * line[:, None] + column(light_x) * line)[:, None]
        if self.haze:
            image += np.float32(self.haze) * (HALF - image)
        return image

    def _back_to_front(self, values: dict[str, Array]) -> tuple[dict[str, Array], NDArray[np.uint8]]:
        """The objects' factors [objects · n], those at the back first, and the slots they are."""
        names = ("object", "texture", "x", "y", "scale", "rotation", "hue")
        shared = ("light", "light_angle")
        if self.objects == 1:
            stacked = {name: values[f"{name}_1"] for name in names} | {name: values[name] for name in shared}
            return stacked, np.ones(len(values["light"]), dtype=np.uint8)
        first_in_front = values["front"] == 0
        stacked = {name: np.tile(values[name], 2) for name in shared}
        for name in names:
            first, second = values[f"{name}_1"], values[f"{name}_2"]
            back, front = np.where(first_in_front, second, first), np.where(first_in_front, first, second)
            stacked[name] = np.concatenate([back, front])
        return stacked, np.concatenate([1 + first_in_front, 2 - first_in_front]).astype(np.uint8)

    def _objects(self, values: dict[str, Array], windows: Windows) -> _Layer:
        """All objects at once. (p, q) are pixels in an object's own frame, its radius 1."""
        kinds, scale = column(values["object"]), column(values["scale"])
        c, s = (column(part) for part in cos_sin(values["rotation"]))
        across, down = windows.x / scale, windows.y / scale
        p, q = across * c + down * s, down * c - across * s
        light_x, light_y = (column(part) for part in cos_sin(values["light_angle"]))
        light_p, light_q = light_x * c + light_y * s, light_y * c - light_x * s
        at, distance = interpolated(tables().distance, kinds, p, q)
        cover = clipped(HALF - distance * (scale * np.float32(self.resolution / 2)))
        left = _lit(kinds, p + light_p * np.float32(SHADOW_SHIFT), q + light_q * np.float32(SHADOW_SHIFT))
        left *= np.float32(1) - cover
        facing = tables().slope_x.take(at) * light_p + tables().slope_y.take(at) * light_q
        bright = (np.float32(1) + np.float32(0.45) * facing) * column(values["light"]) * cover
        bright *= np.float32(1) - np.float32(0.8) * tables().ink.take(at)
        light = _coloured(bright, textured(values["texture"].astype(np.int64), p, q), values["hue"])
        light += (np.float32(0.3) * cover * clipped(facing * np.float32(3) - np.float32(1.9)))[:, None]  # a gleam
        return _Layer(cover, left, light)


def _lit(kinds: Array, p: Array, q: Array) -> Array:
    """How much light an object's shadow leaves, soft at its outline."""
    distance = tables().distance.take(nearest(kinds, p, q))
    return np.float32(1) - np.float32(SHADOW_DEPTH) * smooth(HALF - distance * np.float32(0.5 / SHADOW_SOFT))


def _coloured(bright: Array, tone: Array, hue: Array) -> Array:
    """Light of a hue, between its dark and its pale colour by tone."""
    base = hue_to_rgb(hue)
    dark, pale = base * HALF, base * np.float32(0.45) + np.float32(0.55)
    tone *= bright
    light: Array = tone[:, None] * (pale - dark)[:, :, None, None]
    light += bright[:, None] * dark[:, :, None, None]
    return light


def _chunks(count: int, resolution: int) -> Iterator[slice]:
    step = max(1, CHUNK_PIXELS // resolution**2)
    return (slice(start, start + step) for start in range(0, count, step))


def _unseen(seen: Design, split: str) -> Design:
    return ~seen & ~np.eye(len(seen), dtype=np.bool_) if split == "object" else ~seen


@dataclass(frozen=True)
class _Draw:
    """Factor values for sample numbers: the split's pairs in turn, everything else by chance."""

    world: Scenes
    split: str
    design: Design
    pairs: NDArray[np.int64]

    def __call__(self, numbers: NDArray[np.int64], counters: NDArray[np.int64]) -> Values:
        chance = Chance(self.world.seed)
        values = by_chance([_calmed(factor, self.world.variation) for factor in self.world.factors], chance, counters)
        values |= self._held_to_the_split(self.pairs[numbers % len(self.pairs)], values, chance, counters)
        if self.world.own_looks:
            values |= self._own_looks(values, chance)
        return values | self._places(values, chance, counters)

    def _own_looks(self, values: Values, chance: Chance) -> dict[str, NDArray[Any]]:
        """Hues spread evenly over the circle, and textures, in an order that the seed tells."""
        rank, looks = chance.order(len(CATEGORIES), "looks"), {}
        for i in range(1, self.world.objects + 1):
            own = rank[values[f"object_{i}"]]
            middle = (own + HALF) / np.float32(len(CATEGORIES))
            looks[f"hue_{i}"] = (middle + LOOK_SPREAD * (values[f"hue_{i}"] - HALF)).astype(np.float32) % np.float32(1)
            if self.split != "texture":
                looks[f"texture_{i}"] = own % len(TEXTURES)
        return looks

    def _held_to_the_split(
        self, pairs: NDArray[np.int64], values: Values, chance: Chance, counters: NDArray[np.int64]
    ) -> dict[str, NDArray[Any]]:
        """The values that the split is about. A second object is another one, in as good a pair as the first."""
        first, second = pairs.T
        both = self.world.objects == 2
        if self.split == "object":
            return {"object_1": first, "object_2": second}
        if self.split == "background":
            other = _another(partners(self.design.T)[second], first, chance, counters)
            return {"object_1": first, "background": second} | ({"object_2": other} if both else {})
        other = (first + 1 + chance.below(len(CATEGORIES) - 1, "other object", counters)) % len(CATEGORIES)
        choice = partners(self.design)[other]
        texture = choice[np.arange(len(choice)), chance.below(choice.shape[1], "other texture", counters)]
        held = {"object_1": first, "texture_1": second}
        return held | ({"object_2": other, "texture_2": texture} if both else {})

    def _places(self, values: Values, chance: Chance, counters: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """Positions inside the frame."""
        radii = [values[f"scale_{i}"] * np.float32(MARGIN) for i in range(1, self.world.objects + 1)]
        if self.world.objects == 1:
            return {f"{name}_1": values[f"{name}_1"] * _room(1 - radii[0]) for name in "xy"}
        if self.world.occlusion:
            return _overlapping(radii[0], radii[1], chance, counters)
        return _apart(radii[0], radii[1], chance, counters)


def _calmed(factor: Factor, variation: float) -> Factor:
    """The factor as it is drawn in a world of less variation. Which object, where, and before what, stays free."""
    kind = factor.name.rstrip("_12")
    if variation == 1 or kind in ("object", "x", "y", "front", "background"):
        return factor
    if factor.values is not None:
        return replace(factor, values=factor.values[: max(1, math.ceil(variation * len(factor.values)))])
    middle, reach = (factor.low + factor.high) / 2, variation * (factor.high - factor.low) / 2
    return replace(factor, low=middle - reach, high=middle + reach)


def _room(half: Array) -> Array:
    """Factors of a position drawn between its lowest and highest value that bring it within ± half."""
    return half / np.float32(SPREAD)


def _another(
    members: NDArray[np.int64], taken: NDArray[np.int64], chance: Chance, counters: NDArray[np.int64]
) -> NDArray[np.int64]:
    """One of each row of members [n, m], which ascend, but not the one taken."""
    place = chance.below(members.shape[1] - 1, "other object", counters)
    place += place >= (members < taken[:, None]).sum(1)
    return members[np.arange(len(members)), place]


def _apart(r1: Array, r2: Array, chance: Chance, counters: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    """Side by side or one above the other, with the slack shared out: before, between and after."""
    slack = 2 - 2 * (r1 + r2)
    cuts = np.sort([chance.uniform(f"cut {i}", counters) for i in (1, 2)], axis=0)
    along = -1 + r1 + slack * cuts[0], 1 - r2 - slack * (1 - cuts[1])
    across = tuple(chance.uniform(f"across {i}", counters, -1) * (1 - r) for i, r in ((1, r1), (2, r2)))
    beside = chance.below(2, "beside", counters) == 0
    return {
        f"{name}_{i + 1}": np.where(beside == (name == "x"), along[i], across[i]).astype(np.float32)
        for i in (0, 1)
        for name in "xy"
    }


def _overlapping(r1: Array, r2: Array, chance: Chance, counters: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    """Centres closer than two thirds of what would keep the objects apart, the pair anywhere inside the frame."""
    angle = chance.uniform("direction", counters, -np.pi / 4, 3 * np.pi / 4)
    reach = (r1 + r2) * chance.uniform("closeness", counters, 0.3, 0.6) / 2
    places: dict[str, NDArray[Any]] = {}
    for name, half in zip("xy", (reach * part for part in cos_sin(angle)), strict=True):
        low, high = np.maximum(r1 + half, r2 - half) - 1, 1 - np.maximum(r1 - half, r2 + half)
        middle = low + (high - low) * chance.uniform(f"middle {name}", counters)
        places |= {f"{name}_1": middle - half, f"{name}_2": middle + half}
    return places
