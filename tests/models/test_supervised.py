"""The SupervisedEncoder module: which slot each factor is read from, and what its loss is made of."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from compgen_fast.draws import Draws
from compgen_fast.models import SupervisedEncoder
from compgen_fast.models.config import SupervisedConfig
from compgen_fast.models.supervised import object_of
from compgen_fast.worlds import open_world
from compgen_fast.worlds.source import Factor
from tests.models.test_slot_vae import TinyEncoder, gradients, images

SIZE, DIM = 4, 5
FACTORS = (
    Factor("shape_1", ("square", "disc", "ring")),
    Factor("x_1", low=-2.0, high=2.0),
    Factor("shape_2", ("square", "disc", "ring")),
    Factor("background", ("sky", "sea")),
    Factor("light", low=3.0, high=4.0),
)


def model(factors: Any = FACTORS, *, slots: int = 3, names: tuple[str, ...] = ()) -> SupervisedEncoder:
    config = SupervisedConfig(SIZE, slots, DIM, factors=names)
    return SupervisedEncoder(config, TinyEncoder(SIZE, slots, DIM), factors).double()


def labels(batch: int = 4) -> dict[str, Tensor]:
    return {
        "shape_1": torch.randint(0, 3, (batch,)),
        "x_1": 4 * torch.rand(batch) - 2,
        "shape_2": torch.randint(0, 3, (batch,)),
        "background": torch.randint(0, 2, (batch,)),
        "light": 3 + torch.rand(batch),
    }


def test_the_loss_is_cross_entropy_and_squared_error_of_each_factor_from_its_slot() -> None:
    encoder, x, y = model(), images(), labels()
    found = encoder(x, y, draws=Draws.at(0, 0))
    slots = encoder.encode(x, Draws.at(0, 0))
    shape_1, x_1, shape_2, background, light = (
        readout(slots[:, slot]) for readout, slot in zip(encoder.readouts, (0, 0, 1, 2, 2), strict=True)
    )
    expected = {
        "cross_entropy/shape_1": F.cross_entropy(shape_1, y["shape_1"]),
        "cross_entropy/shape_2": F.cross_entropy(shape_2, y["shape_2"]),
        "cross_entropy/background": F.cross_entropy(background, y["background"]),
        "squared_error/x_1": (x_1[:, 0] - (y["x_1"] + 2) / 4).square().mean(),
        "squared_error/light": (light[:, 0] - (y["light"] - 3)).square().mean(),
    }
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)
    torch.testing.assert_close(found["loss"], torch.stack(list(expected.values())).sum())
    right = (shape_2.argmax(1) == y["shape_2"]).double().mean()
    torch.testing.assert_close(found["accuracy/shape_2"], right)
    assert {name for name in found if name.startswith("accuracy")} == {
        "accuracy/shape_1",
        "accuracy/shape_2",
        "accuracy/background",
    }
    assert [name for name, value in found.items() if value.requires_grad] == ["loss"]


def test_equal_parts_of_a_batch_average_to_the_whole() -> None:
    encoder, x, y = model(), images(), labels()
    whole = encoder(x, y, draws=Draws.at(0, 0))
    halves = [
        encoder(x[i : i + 2], {name: v[i : i + 2] for name, v in y.items()}, draws=Draws.at(0, 0, first=i, total=4))
        for i in (0, 2)
    ]
    for name in whole:
        torch.testing.assert_close((halves[0][name] + halves[1][name]) / 2, whole[name])
    of_halves = gradients(encoder, (halves[0]["loss"] + halves[1]["loss"]) / 2)
    for expected, found in zip(gradients(encoder, whole["loss"]), of_halves, strict=True):
        torch.testing.assert_close(found, expected)


def test_a_factor_is_read_from_the_slot_of_its_object_alone() -> None:
    encoder = model()
    slots = torch.randn(4, 3, DIM, dtype=torch.float64)
    encoder.encode = lambda images, draws: slots  # type: ignore[method-assign]
    before = encoder.predict(images())
    slots[:, 1] += 100 * torch.randn(4, DIM)
    after = encoder.predict(images())
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"shape_2"}


def test_predictions_are_values_of_the_factor() -> None:
    found = model().predict(images(32))
    assert found.keys() == {factor.name for factor in FACTORS}
    assert found["shape_1"].dtype == torch.int64 and found["shape_1"].max() < 3
    assert found["x_1"].min() >= -2 and found["x_1"].max() <= 2
    assert found["light"].min() >= 3 and found["light"].max() <= 4


def test_training_teaches_it_what_is_in_the_picture() -> None:
    torch.manual_seed(0)
    encoder, x = model(FACTORS[:2], slots=1).float(), images(16)
    y = {"shape_1": torch.arange(16) % 3, "x_1": torch.linspace(-2, 2, 16)}
    optimiser = torch.optim.Adam(encoder.parameters(), 1e-2)
    for step in range(150):
        loss = encoder(x, y, draws=Draws.at(0, step))["loss"]
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    found = encoder.predict(x)
    assert (found["shape_1"] == y["shape_1"]).float().mean() > 0.9
    assert (found["x_1"] - y["x_1"]).abs().mean() < 0.5  # by chance: 1.07 or more


def test_factors_can_be_chosen_and_keep_their_slots() -> None:
    """Also those after an object of which nothing is predicted."""
    encoder = model(names=("background", "shape_1"))
    assert [factor.name for factor in encoder.factors] == ["background", "shape_1"]
    assert encoder.slot_of == (2, 0)


def test_a_number_that_never_varies_does_no_harm() -> None:
    encoder = model([Factor("x_1", low=2.0, high=2.0)], slots=1)
    assert encoder(images(), {"x_1": torch.full((4,), 2.0)})["loss"].isfinite()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("shape_1", 0),
        ("shape_12", 11),
        ("z_2_1", 1),
        ("object0_shape", 0),
        ("object3_x", 3),
        ("background_x", None),
        ("light", None),
        ("5_o_Clock_Shadow", None),
    ],
)
def test_a_name_says_which_object_it_speaks_of(name: str, expected: int | None) -> None:
    assert object_of(name) == expected


@pytest.mark.parametrize(
    ("world", "options", "slots"),
    [("scenes", {"objects": 2}, 3), ("sprites", {"objects": 2}, 2), ("additive", {}, 2), ("shapes2d", {}, 1)],
)
def test_the_factors_of_every_world_find_their_slots(world: str, options: dict[str, Any], slots: int) -> None:
    factors = open_world(world, **options).factors
    assert set(model(factors, slots=slots).slot_of) == set(range(slots))


def test_what_cannot_be_predicted_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match="'background' is read from slot 3, but there are 2 slots; set slots to 3"):
        model(slots=2)
    with pytest.raises(ValueError, match="there is no factor colour; the data set has shape_1, x_1"):
        model(names=("shape_1", "colour"))
    with pytest.raises(ValueError, match="nothing to predict; the data set has no factors"):
        model(())
    with pytest.raises(ValueError, match="'shape_0' counts objects from 0; expected from 1"):
        model([Factor("shape_0")])


def test_labels_that_do_not_fit_are_refused_in_words() -> None:
    encoder, x, y = model(), images(), labels()
    with pytest.raises(ValueError, match="no factors were given; 'shape_1' is needed"):
        encoder(x)
    with pytest.raises(ValueError, match="the factors x_1 were given; 'shape_1' is needed"):
        encoder(x, {"x_1": y["x_1"]})
    with pytest.raises(ValueError, match=r"'shape_1' is torch.float32 \[4\]; expected whole numbers \[4\]"):
        encoder(x, y | {"shape_1": y["shape_1"].float()})
    with pytest.raises(ValueError, match=r"'light' is torch.float32 \[3\]; expected floating-point numbers \[4\]"):
        encoder(x, y | {"light": y["light"][:3]})
