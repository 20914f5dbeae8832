"""What can be read from slots by a linear map: categories by accuracy, numbers by R².

A readout is fitted on latents of seen combinations and judged on others, so it is kept weak and fitted in seconds: L2,
its strength chosen on a held-out fifth of the fitting data, then fitted again on all of it. Not for training encoders:
latents come in as numbers, and no gradient goes back.

Latents are slots [n, slots, d] of which a readout uses one, the same for the whole data set; or features [n, d].
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy.optimize import minimize
from torch import Tensor

from compgen_fast.worlds.source import Factor

Values = Tensor | NDArray[np.int64] | NDArray[np.float32]

STRENGTHS = (1.0, 1e-1, 1e-2, 1e-3, 1e-4)  # of L2 against the mean loss of a sample; strong ones win ties
ITERATIONS = 300
FEWEST_SAMPLES = 10

# Factors of our worlds and adapters that run in a circle, and their periods. A tilt of a few degrees does not.
PERIODS: Mapping[str, float] = {
    "light_angle": 2 * math.pi,
    **{f"hue_{i}": 1.0 for i in (1, 2)},
    **{f"orientation_{i}": 2 * math.pi for i in range(1, 9)},
    **{f"{what}_hue": 1.0 for what in ("floor", "wall", "object")},
    **{f"object{place}_rotation": 360.0 for place in range(10)},
}


@dataclass(frozen=True)
class LinearMap:
    """Latents → outputs [n, m]: (features − mean) / scale @ weight [f, m] + bias [m], in fp64 on the CPU."""

    slot: int | None
    mean: Tensor
    scale: Tensor
    weight: Tensor
    bias: Tensor

    def __call__(self, latents: Tensor) -> Tensor:
        features = _features(latents, self.slot)
        if features.shape[1] != len(self.mean):
            raise ValueError(
                f"a readout of {len(self.mean)} features was given {features.shape[1]}; expected latents like those it "
                "was fitted on"
            )
        return self.outputs(features)

    def outputs(self, features: Tensor) -> Tensor:
        return (features - self.mean) / self.scale @ self.weight + self.bias


@dataclass(frozen=True)
class Readout:
    """A category, read by multinomial logistic regression; made by `fit_readout`."""

    linear: LinearMap

    @property
    def slot(self) -> int | None:
        return self.linear.slot

    def predict(self, latents: Tensor) -> Tensor:
        """The category of each image, int64 [n]."""
        return self.linear(latents).argmax(1)

    def accuracy(self, latents: Tensor, labels: Values) -> float:
        """The share of images whose category is read right."""
        expected = _column(labels, latents)
        return (self.predict(latents) == expected).double().mean().item()


@dataclass(frozen=True)
class Regression:
    """A number, read by ridge regression; one of a period by its cosine and sine. Made by `fit_regression`."""

    linear: LinearMap
    period: float | None

    @property
    def slot(self) -> int | None:
        return self.linear.slot

    def r2(self, latents: Tensor, values: Values) -> float:
        """1 − squared error / squared deviation from these values' own mean; cosine and sine count together."""
        targets = _on_circle(_column(values, latents), self.period)
        deviation = (targets - targets.mean(0)).square().sum()
        if deviation == 0:
            raise ValueError("R² was asked of values that are all the same; expected values that vary")
        return (1 - (self.linear(latents) - targets).square().sum() / deviation).item()


def fit_readout(latents: Tensor, labels: Values, classes: int, *, slot: int | None = None) -> Readout:
    """The readout of a category from one slot.

    Args:
        latents: [n, slots, d] with ``slot``; or [n, d], features of slots already matched, without.
        labels: integers [n], from 0 to classes − 1. Not every class need occur.
        classes: how many there are.
        slot: which slot to read.
    """
    return Readout(_fitted(_LOGISTIC, latents, _one_hot(labels, latents, classes), slot))


def fit_regression(
    latents: Tensor, values: Values, *, slot: int | None = None, period: float | None = None
) -> Regression:
    """The readout of a number [n] from one slot; of one that runs in a circle if ``period``, its length, is given."""
    return Regression(_fitted(_RIDGE, latents, _on_circle(_column(values, latents), period), slot), period)


def choose_slot(latents: Tensor, labels: Values, classes: int) -> int:
    """The slot from which the category is read best, on a held-out fifth of these data: by accuracy, then likelihood.

    For slots [n, slots, d] with a fixed role in the whole data set. Slots without one are matched first: matching.py.
    """
    return _best_slot(_LOGISTIC, latents, _one_hot(labels, latents, classes))


def fit_factors(
    factors: Sequence[Factor], latents: Tensor, values: Mapping[str, Values], *, periods: Mapping[str, float] = PERIODS
) -> dict[str, Readout | Regression]:
    """For each factor its readout, from the slot that tells it best.

    Args:
        factors: of a data set.
        latents: slots [n, slots, d].
        values: of each factor by name [n], as in `Samples.factors`.
        periods: of factors that run in a circle, by name. Names that are no factor here do no harm.
    """
    _check_names([factor.name for factor in factors], values)
    return {factor.name: _fit_factor(factor, latents, values[factor.name], periods) for factor in factors}


def per_factor(
    readouts: Mapping[str, Readout | Regression], latents: Tensor, values: Mapping[str, Values]
) -> dict[str, float]:
    """How well each factor is read from these latents: categories by accuracy, numbers by R².

    A number that is the same in all of these images has no R²; it is left out.
    """
    _check_names(readouts, values)
    scores = {}
    for name, readout in readouts.items():
        if isinstance(readout, Readout):
            scores[name] = readout.accuracy(latents, values[name])
        elif len(torch.as_tensor(values[name]).unique()) > 1:
            scores[name] = readout.r2(latents, values[name])
    return scores


def _check_names(names: Iterable[str], values: Mapping[str, Values]) -> None:
    for name in names:
        if name not in values:
            raise ValueError(f"there are no values of the factor {name!r}; expected it among {', '.join(values)}")


def _fit_factor(factor: Factor, latents: Tensor, values: Values, periods: Mapping[str, float]) -> Readout | Regression:
    if factor.values is not None:
        classes = len(factor.values)
        return fit_readout(latents, values, classes, slot=choose_slot(latents, values, classes))
    period = periods.get(factor.name)
    slot = _best_slot(_RIDGE, latents, _on_circle(_column(values, latents), period))
    return fit_regression(latents, values, slot=slot, period=period)


@dataclass(frozen=True)
class _Method:
    """fit: features [n, f], targets [n, m], strength of L2 → map. quality: outputs, targets [n, m] → more is better."""

    fit: Callable[[Tensor, Tensor, float], LinearMap]
    quality: Callable[[Tensor, Tensor], tuple[float, ...]]


def _fitted(method: _Method, latents: Tensor, targets: Tensor, slot: int | None) -> LinearMap:
    features = _features(latents, slot)
    _, strength = _tuned(method, features, targets)
    return replace(method.fit(features, targets, strength), slot=slot)


def _best_slot(method: _Method, latents: Tensor, targets: Tensor) -> int:
    if latents.dim() != 3 or latents.shape[1] == 0:
        raise ValueError(f"to choose a slot, latents of shape {list(latents.shape)} were given; expected [n, slots, d]")
    return max(range(latents.shape[1]), key=lambda slot: _tuned(method, _features(latents, slot), targets)[0])


def _tuned(method: _Method, features: Tensor, targets: Tensor) -> tuple[tuple[float, ...], float]:
    """The best quality on a held-out fifth, and the strength that reached it.

    The fifth is drawn, always the same: data sets may come in a pattern, of which every fifth sample is no fair part.
    """
    count = len(features)
    if count < FEWEST_SAMPLES:
        raise ValueError(f"a readout was given {count} samples; expected at least {FEWEST_SAMPLES}, to hold some out")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    held, fitting = order[: count // 5], order[count // 5 :]

    def quality(strength: float) -> tuple[float, ...]:
        fitted = method.fit(features[fitting], targets[fitting], strength)
        return method.quality(fitted.outputs(features[held]), targets[held])

    trials = [(quality(strength), strength) for strength in STRENGTHS]
    return max(trials, key=lambda trial: trial[0])


def _logistic(x: Tensor, targets: Tensor, strength: float) -> LinearMap:
    """Minimises mean cross-entropy + strength/2 · ‖weight‖² over weight and bias, by L-BFGS; targets are one-hot.

    Of a class that does not occur the bias falls until the gradient no longer shows it: no special case.
    """
    mean, scale = _standard(x)
    n, f = x.shape
    x = torch.cat([(x - mean) / scale, x.new_ones(n, 1)], 1)

    def loss(flat: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        w = torch.from_numpy(flat).view(f + 1, -1)
        log_likelihood = (x @ w).log_softmax(1)
        value = strength / 2 * w[:f].square().sum() - (targets * log_likelihood).sum() / n
        slope = x.mT @ (log_likelihood.exp() - targets) / n
        slope[:f] += strength * w[:f]
        return value.item(), slope.flatten().numpy()

    start = np.zeros((f + 1) * targets.shape[1])
    found = minimize(loss, start, jac=True, method="L-BFGS-B", options={"maxiter": ITERATIONS})
    w = torch.from_numpy(found.x).view(f + 1, -1)
    return LinearMap(None, mean, scale, w[:f], w[f])


def _read_right(outputs: Tensor, targets: Tensor) -> tuple[float, ...]:
    """Accuracy, and the mean log-likelihood to tell equals apart."""
    right = outputs.argmax(1) == targets.argmax(1)
    return right.double().mean().item(), (targets * outputs.log_softmax(1)).sum(1).mean().item()


def _ridge(x: Tensor, targets: Tensor, strength: float) -> LinearMap:
    """Minimises mean squared error + strength · ‖weight‖² over weight and bias."""
    mean, scale = _standard(x)
    x, bias = (x - mean) / scale, targets.mean(0)
    normal = x.mT @ x / len(x) + strength * torch.eye(x.shape[1], dtype=x.dtype)
    return LinearMap(None, mean, scale, torch.linalg.solve(normal, x.mT @ (targets - bias) / len(x)), bias)


def _closeness(outputs: Tensor, targets: Tensor) -> tuple[float, ...]:
    return (-(outputs - targets).square().sum().item(),)


_LOGISTIC, _RIDGE = _Method(_logistic, _read_right), _Method(_ridge, _closeness)


def _standard(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and spread of each feature; one that never varies keeps its scale."""
    spread = x.std(0, correction=0)
    return x.mean(0), torch.where(spread > 0, spread, 1.0)


def _features(latents: Tensor, slot: int | None) -> Tensor:
    """[n, f] in fp64 on the CPU."""
    if latents.dim() != (2 if slot is None else 3) or (slot is not None and not 0 <= slot < latents.shape[1]):
        raise ValueError(
            f"a readout of slot {slot} was given latents of shape {list(latents.shape)}; expected [n, slots, d] and "
            "one of those slots, or [n, d] and no slot"
        )
    features = (latents if slot is None else latents[:, slot]).detach().double().cpu()
    if not features.isfinite().all():
        raise ValueError(
            "a readout was given latents with NaN or infinity; expected finite numbers (see what made them)"
        )
    return features


def _column(values: Values, latents: Tensor) -> Tensor:
    """One value per image [n], on the CPU."""
    column = torch.as_tensor(values).detach().cpu()
    if column.shape != (len(latents),) or len(column) == 0:
        raise ValueError(
            f"{len(latents)} latents were given with values of shape {list(column.shape)}; expected one value for each"
        )
    return column


def _one_hot(labels: Values, latents: Tensor, classes: int) -> Tensor:
    column = _column(labels, latents)
    low, high = column.min().item(), column.max().item()
    if column.dtype.is_floating_point or low < 0 or high >= classes:
        raise ValueError(
            f"labels are {column.dtype}, from {low} to {high}; expected integers from 0 to {classes - 1}, the numbers "
            f"of {classes} classes"
        )
    return F.one_hot(column.long(), classes).double()


def _on_circle(values: Tensor, period: float | None) -> Tensor:
    """What a regression predicts: the value [n, 1]; with a period, cosine and sine of its place in it [n, 2]."""
    values = values.double()
    if not values.isfinite().all():
        raise ValueError("a regression was given values with NaN or infinity; expected finite numbers")
    if period is None:
        return values[:, None]
    angle = values * (2 * math.pi / period)
    return torch.stack([angle.cos(), angle.sin()], 1)
