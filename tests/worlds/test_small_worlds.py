"""Shapes2D, Bumps, Sprites: what each of them is for."""

from typing import get_args

import numpy as np
import pytest

from compgen_fast.worlds import Bumps, Shapes2D, Sprites
from compgen_fast.worlds.bumps import Encoding
from compgen_fast.worlds.shapes2d import COMPOSITIONS
from compgen_fast.worlds.sprites import SHAPES

SHOWN = {
    "train": {"000", "001", "010", "100"},
    "validation": {"000", "001", "010", "100"},
    "level1": {"011", "101", "110"},
    "level2": {"111"},
    "ood": {"011", "101", "110", "111"},
}


@pytest.mark.parametrize("continuous", [False, True])
@pytest.mark.parametrize("part", SHOWN)
def test_shapes2d_shows_the_compositions_of_its_levels(part: str, continuous: bool) -> None:
    world = Shapes2D(16, continuous=continuous)
    values = world.split("composition", part).values(np.arange(240))
    codes = world.composition(values)
    assert {COMPOSITIONS[code] for code in codes} == SHOWN[part]
    assert len({(codes == code).sum() for code in set(codes.tolist())}) == 1  # each as often


@pytest.mark.parametrize("part", ["train", "validation", "test"])
def test_the_split_all_of_shapes2d_holds_nothing_out(part: str) -> None:
    world = Shapes2D(16)
    codes = world.composition(world.split("all", part).values(np.arange(240)))
    assert np.bincount(codes).tolist() == [30] * len(COMPOSITIONS)
    assert not world.matrix("all").level.any() and world.matrix("composition").level.max() == 2


def test_continuous_factors_keep_clear_of_the_middle() -> None:
    values = Shapes2D(16, continuous=True).split("composition").values(np.arange(1_000))
    for name in ("shape", "colour", "size"):
        assert (np.abs(values[name] - 0.5) >= 0.099).all() and len(np.unique(values[name])) > 900


def test_each_factor_of_shapes2d_does_what_it_is_called() -> None:
    world = Shapes2D(64, continuous=True)
    low_high, low = np.array([0, 1], dtype=np.float32), np.zeros(2, dtype=np.float32)
    middle = {"x": low, "y": low}
    sizes = world.render({**middle, "shape": low, "colour": low, "size": low_high}).masks
    shapes = world.render({**middle, "shape": low_high, "colour": low, "size": low + 1}).masks
    colours = world.render({**middle, "shape": low, "colour": low_high, "size": low + 1}).images[:, 32, 32]
    assert sizes is not None and shapes is not None
    assert sizes[1].sum() > 4 * sizes[0].sum()
    assert (shapes[0] == shapes[0, ::-1]).all() and not (shapes[1] == shapes[1, ::-1]).all()
    assert colours[0].argmax() == 0 and colours[1].argmax() == 2


@pytest.mark.parametrize("size", [28, 32, 48])
@pytest.mark.parametrize("split", ["square", "corner"])
def test_bumps_are_never_trained_on_in_the_held_out_square(size: int, split: str) -> None:
    world = Bumps(size)
    held = world.held_out(split)
    parts = {part: world.split(split, part) for part in ("train", "validation", "test", "ood")}
    places = {}
    for name, part in parts.items():
        values = part.values(np.arange(len(part)))
        x, y = values["x"].astype(int), values["y"].astype(int)
        assert (held[y, x] == (name == "ood")).all()
        places[name] = set(zip(x.tolist(), y.tolist(), strict=True))
        assert len(places[name]) == len(part)  # each position once
    assert sum(map(len, places.values())) == len(set.union(*places.values())) == size**2


def test_the_held_out_squares_are_those_of_the_papers() -> None:
    square, corner = Bumps(28).held_out("square"), Bumps(32).held_out("corner")
    assert square[6:23, 6:23].all() and square.sum() == 17**2
    assert corner[12:, 12:].all() and corner.sum() == 20**2


def test_a_bump_is_the_product_of_its_two_stripes() -> None:
    world = Bumps(28)
    x, y = np.array([5.0]), np.array([9.0])
    bump, across, down = (world.pixels({"kind": np.array([kind]), "x": x, "y": y}) for kind in range(3))
    np.testing.assert_array_equal(bump, across * down)
    assert bump[0].argmax() == 9 * 28 + 5 and (across[0] == across[0, 0]).all() and (down[0] == down[0, :, :1]).all()


def test_the_blank_level_is_what_a_blank_image_scores() -> None:
    for sigma in (1.0, 1.5):
        world = Bumps(28, sigma=sigma)
        x, y = (place.ravel().astype(float) for place in np.meshgrid(np.arange(28), np.arange(28)))
        pixels = world.pixels({"kind": np.zeros(784, dtype=np.int64), "x": x, "y": y})
        np.testing.assert_allclose(world.blank_error, np.square(pixels).mean(), rtol=1e-5)
        assert world.blank_error == pytest.approx(np.pi * sigma**2 / 28**2, rel=0.15)


def test_codes_hold_the_position_and_a_stripe_lacks_one() -> None:
    world = Bumps(28)
    values = {"kind": np.array([0, 1, 2]), "x": np.array([3.0, 3, 3]), "y": np.array([20.0, 20, 20])}
    for encoding in get_args(Encoding):
        code = world.encode(values, encoding)
        width = {"ramp": 2, "fourier": 20}.get(encoding, 56)
        assert code.shape == (3, width) and code.dtype == np.float32
        x, y = code[:, : width // 2], code[:, width // 2 :]
        assert (x[2] == 0).all() and (y[1] == 0).all() and (x[0] == x[1]).all() and (y[0] == y[2]).all()
        if encoding in ("bump", "one-hot"):
            assert x[0].argmax() == 3 and y[0].argmax() == 20
    np.testing.assert_allclose(world.encode(values, "ramp")[0], [3 / 27, 20 / 27], rtol=1e-6)
    assert (world.encode(values, "one-hot").sum(1) == [2, 1, 1]).all()
    assert (world.encode(values, "thermometer").sum(1) == [4 + 21, 4, 21]).all()


@pytest.mark.parametrize("encoding", get_args(Encoding))
def test_codes_tell_positions_apart_and_slopes_are_their_change(encoding: Encoding) -> None:
    code, slope = Bumps(28, sigma=3.0).codes(encoding)
    assert len(np.unique(code, axis=0)) == 28 and code.dtype == slope.dtype == np.float32
    slow = [0, 1, 2, 5, 6, 7] if encoding == "fourier" else slice(None)  # a pixel is a small part of their period
    np.testing.assert_allclose(np.gradient(code, axis=0)[1:-1, slow], slope[1:-1, slow], atol=0.03)


def test_the_stripes_are_one_of_each() -> None:
    part = Bumps(20).split("square", "stripes")
    values = part.values(np.arange(len(part)))
    assert len(part) == 40 and (np.bincount(values["kind"].astype(int)) == [0, 20, 20]).all()
    assert set(values["x"][:20]) == set(values["y"][20:]) == set(range(20))


def test_odd_bumps_are_refused() -> None:
    world = Bumps(28)
    values = {"kind": np.zeros(1, dtype=np.int64), "x": np.array([3.5]), "y": np.array([1.0])}
    with pytest.raises(ValueError, match="between pixels; expected whole numbers"):
        world.render(values)
    with pytest.raises(ValueError, match="encoding is 'wave'; expected one of bump, ramp, one-hot"):
        world.encode({**values, "x": np.array([3.0])}, "wave")  # type: ignore[arg-type]


def test_the_last_sprite_is_in_front() -> None:
    world = Sprites(64, objects=3)
    same = {"scale": 0.3, "orientation": 0.0, "x": 0.0, "y": 0.0, "shape": 0}
    values = {f"{name}_{i}": np.array([value]) for i in (1, 2, 3) for name, value in same.items()}
    values |= {f"colour_{i}": np.array([i - 1]) for i in (1, 2, 3)}
    values |= {"x_1": np.array([-0.3]), "x_3": np.array([0.3])}
    found = world.render(values)
    assert found.masks is not None
    assert found.masks[0, 32, 38] == 3 and found.masks[0, 32, 26] == 2 and found.masks[0, 32, 18] == 1
    one, two, three = found.images[0, 32, [18, 32, 45]].tolist()
    assert found.images[0, 32, [26, 38]].tolist() == [two, three] and one != two != three


def test_every_sprite_has_its_own_outline() -> None:
    n = len(SHAPES)
    usual = {"scale_1": 0.3, "orientation_1": 0.0, "x_1": 0.0, "y_1": 0.0}
    values = {name: np.full(n, value) for name, value in usual.items()} | {"shape_1": np.arange(n)}
    masks = Sprites(64, coloured=False).render(values).masks
    assert masks is not None
    shared, either = masks[:, None] & masks, masks[:, None] | masks
    overlap = shared.sum((2, 3)) / either.sum((2, 3))
    assert (overlap[~np.eye(n, dtype=bool)] < 0.8).all()


def test_white_sprites_are_white() -> None:
    found = Sprites(32, coloured=False, objects=2).split("position").samples(np.arange(10))
    assert found.masks is not None
    assert (found.images.max(-1) == found.images.min(-1)).all() and (found.images[found.masks == 0] < 200).all()
