"""Readouts, against scikit-learn and on latents whose answer is known."""

import math

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import r2_score
from torch import Tensor

from compgen_fast.measure import PERIODS, choose_slot, fit_factors, fit_readout, fit_regression, per_factor, probes
from compgen_fast.worlds import open_world
from compgen_fast.worlds.source import Factor


def blobs(n: int = 600, slots: int = 3, d: int = 6, classes: int = 4, told_by: int = 1) -> tuple[Tensor, Tensor]:
    """Latents of which one slot tells the class, by clusters that overlap a little."""
    labels = torch.randint(classes, (n,))
    latents = torch.randn(n, slots, d)
    centres = 2.5 * torch.randn(classes, d, generator=torch.Generator().manual_seed(1))
    latents[:, told_by] += centres[labels]
    return latents, labels


def one_hot(labels: Tensor, classes: int) -> Tensor:
    return torch.nn.functional.one_hot(labels, classes).double()


@pytest.mark.parametrize("strength", [1e-1, 1e-3])
def test_the_logistic_fit_is_scikit_learns(strength: float) -> None:
    latents, labels = blobs()
    x = latents[:, 1].double()
    ours = probes._logistic(x, one_hot(labels, 4), strength)
    standard = ((x - ours.mean) / ours.scale).numpy()
    theirs = LogisticRegression(C=1 / (strength * len(x)), tol=1e-8, max_iter=2000).fit(standard, labels.numpy())
    expected = torch.from_numpy(theirs.predict_proba(standard))
    torch.testing.assert_close(ours.outputs(x).softmax(1), expected, atol=2e-3, rtol=0)


def test_the_ridge_fit_is_scikit_learns() -> None:
    x, targets = torch.randn(50, 4).double(), torch.randn(50, 2).double()
    ours = probes._ridge(x, targets, 0.1)
    standard = ((x - ours.mean) / ours.scale).numpy()
    theirs = Ridge(alpha=0.1 * 50).fit(standard, targets.numpy())
    torch.testing.assert_close(ours.outputs(x), torch.from_numpy(theirs.predict(standard)))


def test_a_category_is_read_from_the_slot_that_tells_it() -> None:
    latents, labels = blobs(1000)
    readout = fit_readout(latents[:800], labels[:800], 4, slot=1)
    predicted = readout.predict(latents[800:])
    assert predicted.dtype == torch.int64 and predicted.shape == (200,)
    assert readout.accuracy(latents[800:], labels[800:]) > 0.9
    assert readout.accuracy(latents[800:], labels[800:]) == (predicted == labels[800:]).double().mean().item()


def test_a_slot_that_tells_nothing_is_read_at_chance() -> None:
    latents, labels = blobs(2000)
    assert fit_readout(latents[:1000], labels[:1000], 4, slot=0).accuracy(latents[1000:], labels[1000:]) < 0.35


@pytest.mark.parametrize("told_by", [0, 1, 2])
def test_the_slot_that_tells_the_category_is_chosen(told_by: int) -> None:
    assert choose_slot(*blobs(told_by=told_by), classes=4) == told_by


def test_of_two_slots_that_are_always_right_the_surer_is_chosen() -> None:
    labels = torch.arange(200) % 2
    side = (2.0 * labels - 1)[:, None]
    faint = side + 0.2 * torch.randn(200, 1).clamp(-3, 3)
    assert choose_slot(torch.stack([faint, side], 1), labels, 2) == 1


def test_matched_features_need_no_slot() -> None:
    latents, labels = blobs()
    with_slot, without = fit_readout(latents, labels, 4, slot=1), fit_readout(latents[:, 1], labels, 4)
    assert torch.equal(with_slot.predict(latents), without.predict(latents[:, 1]))
    assert with_slot.slot == 1 and without.slot is None


def test_readouts_do_not_depend_on_the_scale_of_a_feature() -> None:
    latents, labels = blobs()
    scaled = latents * torch.tensor([1e-4, 1, 1e4, 1, 10, 1]) + 100 * torch.arange(6)
    before, after = (fit_readout(z.double(), labels, 4, slot=1).predict(z) for z in (latents, scaled))
    assert (before == after).double().mean() > 0.99


def test_a_feature_that_never_varies_does_no_harm() -> None:
    latents, labels = blobs()
    latents[:, 1, 0] = 3.0
    assert fit_readout(latents, labels, 4, slot=1).accuracy(latents, labels) > 0.8


def test_many_useless_features_call_for_a_strong_penalty() -> None:
    latents, labels = torch.randn(200, 100), torch.randint(2, (200,))
    latents[:, 0] += 2 * labels
    quality, strength = probes._tuned(probes._LOGISTIC, latents.double(), one_hot(labels, 2))
    assert strength >= 1e-1
    assert quality[0] > 0.5


def test_classes_that_never_occur_are_never_read() -> None:
    latents, labels = blobs(classes=3)
    assert fit_readout(latents, labels, 9, slot=1).predict(latents).max() < 3
    always = fit_readout(latents, torch.full((600,), 5), 9, slot=1)
    assert (always.predict(latents) == 5).all()


def test_fitting_twice_gives_the_same_readout() -> None:
    latents, labels = blobs()
    one, other = (fit_readout(latents, labels, 4, slot=1).linear.weight for _ in range(2))
    assert torch.equal(one, other)


def test_r2_is_scikit_learns() -> None:
    latents = torch.randn(300, 2, 5)
    values = latents[:, 0] @ torch.randn(5) + 0.5 * torch.randn(300)
    regression = fit_regression(latents[:200], values[:200], slot=0)
    predicted = regression.linear(latents[200:])
    assert regression.r2(latents[200:], values[200:]) == pytest.approx(r2_score(values[200:], predicted), abs=1e-6)
    assert 0.5 < regression.r2(latents[200:], values[200:]) < 1


def on_circle(n: int, period: float) -> tuple[Tensor, Tensor]:
    values = torch.rand(n) * period
    angle = 2 * math.pi * values / period
    return torch.stack([angle.cos(), angle.sin(), torch.randn(n)], 1), values


def test_a_number_in_a_circle_is_read_whole_with_its_period_only() -> None:
    features, values = on_circle(500, 360.0)
    assert fit_regression(features, values, period=360.0).r2(features, values) > 0.999
    assert fit_regression(features, values).r2(features, values) < 0.8
    assert fit_regression(features, values, period=180.0).r2(features, values) < 0.2


def test_values_a_period_apart_are_one_value() -> None:
    features, values = on_circle(100, 1.0)
    regression = fit_regression(features, values, period=1.0)
    assert regression.r2(features, values + 3) == pytest.approx(regression.r2(features, values), abs=1e-5)


FACTORS = (Factor("shape", ("disc", "square", "star")), Factor("x", low=-1, high=1), Factor("hue_1"), Factor("noise"))


def scene(n: int) -> tuple[Tensor, dict[str, np.ndarray]]:
    """Slot 0 holds the hue and x, slot 1 the shape; nothing holds the noise."""
    shape, x = torch.randint(3, (n,)), 2 * torch.rand(n) - 1
    circle, hue = on_circle(n, 1.0)
    first = torch.cat([circle[:, :2], x[:, None], torch.randn(n, 1)], 1)
    second = torch.cat([one_hot(shape, 3).float(), torch.randn(n, 1)], 1)
    values = {"shape": shape, "x": x, "hue_1": hue, "noise": torch.rand(n)}
    return torch.stack([first, second], 1), {name: column.numpy() for name, column in values.items()}


def test_each_factor_is_read_from_its_slot_and_scored_in_its_way() -> None:
    readouts = fit_factors(FACTORS, *scene(400))
    assert [readouts[name].slot for name in ("shape", "x", "hue_1")] == [1, 0, 0]
    scores = per_factor(readouts, *scene(400))
    assert list(scores) == ["shape", "x", "hue_1", "noise"]
    assert scores["shape"] == 1 and scores["x"] > 0.99 and scores["hue_1"] > 0.99 and scores["noise"] < 0.1


def test_periods_are_the_callers_to_name() -> None:
    readouts = fit_factors(FACTORS[2:3], *scene(400), periods={})
    assert per_factor(readouts, *scene(400))["hue_1"] < 0.8


def test_a_number_that_does_not_vary_has_no_score() -> None:
    readouts = fit_factors(FACTORS, *scene(100))
    latents, values = scene(50)
    values["x"] = np.full(50, 0.5, np.float32)
    assert set(per_factor(readouts, latents, values)) == {"shape", "hue_1", "noise"}
    with pytest.raises(ValueError, match="all the same"):
        readouts["x"].r2(latents, values["x"])  # type: ignore[union-attr]


@pytest.mark.parametrize(("world", "options"), [("scenes", {"objects": 2}), ("sprites", {"objects": 8})])
def test_the_periods_of_our_worlds_are_those_of_whole_circles(world: str, options: dict[str, int]) -> None:
    factors = open_world(world, **options).factors
    whole = {f.name: f.high - f.low for f in factors if f.name.startswith(("hue", "orientation", "light_angle"))}
    assert whole == pytest.approx({f.name: PERIODS[f.name] for f in factors if f.name in PERIODS})
    assert whole


def test_a_missing_factor_is_named() -> None:
    latents, values = scene(50)
    del values["x"]
    with pytest.raises(ValueError, match="'x'"):
        fit_factors(FACTORS, latents, values)


GOOD = torch.randn(20, 2, 3)


@pytest.mark.parametrize(
    ("latents", "labels", "slot", "sentence"),
    [
        (GOOD, torch.zeros(20).long(), None, "expected"),
        (GOOD, torch.zeros(20).long(), 2, "one of those slots"),
        (GOOD[:, 0], torch.zeros(20).long(), 0, "no slot"),
        (GOOD, torch.zeros(19).long(), 0, "one value for each"),
        (GOOD, torch.zeros(20), 0, "integers"),
        (GOOD, torch.full((20,), 4), 0, "from 0 to 3"),
        (GOOD * torch.nan, torch.zeros(20).long(), 0, "finite"),
        (GOOD[:5], torch.zeros(5).long(), 0, "at least 10"),
    ],
)
def test_what_cannot_be_fitted_is_refused(latents: Tensor, labels: Tensor, slot: int | None, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        fit_readout(latents, labels, 4, slot=slot)


def test_latents_of_another_width_are_refused() -> None:
    latents, labels = blobs()
    with pytest.raises(ValueError, match="6 features was given 5"):
        fit_readout(latents, labels, 4, slot=1).predict(latents[..., :5])
