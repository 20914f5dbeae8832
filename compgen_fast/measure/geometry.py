"""The geometry of a decoder's layers over a grid of two factors (x, y): how each layer stretches, folds and mixes them.

    g_ij = ⟨∂_i h, ∂_j h⟩        the metric that a layer's activation h(x, y) pulls back to the grid, i, j in (x, y)
    ‖∂_x ∂_y h‖²                 how much x and y interact in it: what `compgen_fast.jets.interaction_penalty` punishes

`layer_geometry` is exact and takes one pass of jets through all layers; `grid_metrics` is what papers do instead, by
differences of activations between neighbours on the grid. `volume` and `factorization` sum a metric up. Not a loss:
nothing here has gradients.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compgen_fast.jets.jet import Jet

Layer = Callable[[Tensor], Tensor]
TOGETHER = 256  # points of all models in one pass: more fall out of the cache, and convolutions slow down by half


@dataclass(frozen=True)
class LayerGeometry:
    """One layer at every point (and of every model, where they are stacked)."""

    name: str
    """``"input"`` for the code itself, then ``"layer 1"``, ``"layer 2"``, …"""
    metric: Tensor
    """[…, 2, 2], g_ij = ⟨∂_i h, ∂_j h⟩, summed over features."""
    mixed: Tensor
    """[…], ‖∂_x ∂_y h‖². Exactly 0 up to the first layer that bends."""


@torch.compiler.disable
@torch.no_grad()
def layer_geometry(
    layers: Sequence[Layer], code: Tensor, along: tuple[Tensor, Tensor], *, leading: int = 1
) -> list[LayerGeometry]:
    """The geometry of the code and of what each layer makes of it, by one pass of jets through all layers.

    The mixed derivative is one more channel (4 for 3) from the first smooth nonlinearity on, and makes the pass 1.3
    (MLP) to 1.5 times (CNN) as dear as one of first derivatives alone. ReLU bends nowhere but at its kink: there it
    costs nothing, and is 0.

    Args:
        layers: the decoder in parts; what layer l makes is layers[l](… layers[0](code)). Any torch functions that have
            jet rules (docs/jets.md), as long as points do not see each other (no batch norm in training).
        code: [n, …], the codes of n points; of M stacked models [M, n, …], with ``leading=2``.
        along: ∂code/∂x and ∂code/∂y, each shaped like code. ∂²code/∂x∂y is taken to be zero, as it is for every code
            that has x and y side by side.
        leading: how many dimensions count models and points, in the code and after each layer; the others are features.

    Returns:
        the code's geometry, then each layer's.
    """
    _check(code, along, leading)
    dtype = torch.promote_types(code.dtype, torch.float32)  # second derivatives do not survive half precision
    channels = torch.stack([code, *along]).to(dtype)
    count = min(code.shape[leading - 1], math.ceil(code.shape[:leading].numel() / TOGETHER))
    with torch.autocast(code.device.type, enabled=False), torch.compiler.set_stance("force_eager"):
        passes = [_pass(layers, Jet(part), leading) for part in channels.tensor_split(count, dim=leading)]
    return [_joined(same, leading - 1) for same in zip(*passes, strict=True)]


def _pass(layers: Sequence[Layer], code: Tensor, leading: int) -> list[LayerGeometry]:
    h, found = code, [_read("input", code, leading)]
    for number, layer in enumerate(layers, 1):
        h = layer(h)
        if h.shape[:leading] != code.shape[:leading]:
            raise ValueError(
                f"layer_geometry: layer {number} made {list(h.shape)} of a code {list(code.shape)} (points come in "
                f"parts); expected it to keep the first {leading} dimensions, which count models and points: set "
                "leading, or unflatten them in that layer"
            )
        found.append(_read(f"layer {number}", h, leading))
    return found


def _joined(parts: Sequence[LayerGeometry], dim: int) -> LayerGeometry:
    metric, mixed = (torch.cat(each, dim) for each in ([p.metric for p in parts], [p.mixed for p in parts]))
    return LayerGeometry(parts[0].name, metric, mixed)


def _check(code: Tensor, along: tuple[Tensor, Tensor], leading: int) -> None:
    if not code.is_floating_point() or not 1 <= leading < code.dim() or not code.numel():
        raise ValueError(
            f"layer_geometry: code is {code.dtype} of shape {list(code.shape)} and leading is {leading}; expected "
            "floats [n, …], or [M, n, …] of stacked models with leading=2, of at least one point and one feature"
        )
    shapes = [list(direction.shape) for direction in along]
    if shapes != 2 * [list(code.shape)]:
        raise ValueError(
            f"layer_geometry: along has shapes {shapes} and code {list(code.shape)}; expected (∂code/∂x, ∂code/∂y), "
            "each shaped like code: expand them"
        )


def _read(name: str, h: Tensor, leading: int) -> LayerGeometry:
    counted = h.shape[:leading]
    if not isinstance(h, Jet):  # a layer that does not look at the code
        return LayerGeometry(name, h.new_zeros(*counted, 2, 2), h.new_zeros(counted))
    channels = h.channels.reshape(len(h.channels), *counted, -1)
    mixed = h.channels.new_zeros(counted) if len(channels) == 3 else torch.linalg.vector_norm(channels[3], dim=-1) ** 2
    return LayerGeometry(name, _gram(channels[1:3]), mixed)


def _gram(moved: Tensor) -> Tensor:
    """[2, …, F] → […, 2, 2]."""
    moved = moved.movedim(0, -2)
    return moved @ moved.mT


def grid_metrics(activations: Tensor, spacing: float = 1.0) -> Tensor:
    """The metric by central differences, one-sided at the border, as `numpy.gradient` takes them.

    For comparison, and for activations without a decoder. On a grid of whole positions it measures chords of a curve
    that turns within one step, not its speed (docs/measures.md).

    Args:
        activations: [..., X, Y, F]: x along the third dimension from the end, y along the second. Features are one
            dimension: flatten images.
        spacing: distance of neighbours on the grid, in the units of x and y.

    Returns:
        [..., X·Y, 2, 2], with y running fastest.
    """
    if activations.dim() < 3 or min(activations.shape[-3:-1]) < 2:
        raise ValueError(
            f"grid_metrics: activations have shape {list(activations.shape)}; expected [..., X, Y, F] of a grid of at "
            "least 2 × 2 points: unflatten the points, flatten the features"
        )
    moved = torch.gradient(activations, spacing=spacing, dim=(-3, -2))
    return _gram(torch.stack(moved).flatten(-3, -2))


def volume(metric: Tensor) -> Tensor:
    """log10 √det g at each point, […]: 0 keeps areas, 1 stretches them tenfold.

    det g is clamped at the least normal number of its dtype: −19 in fp32 means that the layer folded the plane to a
    curve, up to rounding.
    """
    g = _checked("volume", metric)
    det = g[..., 0, 0] * g[..., 1, 1] - g[..., 0, 1] * g[..., 1, 0]
    return det.clamp_min(torch.finfo(g.dtype).tiny).log10() / 2


def factorization(metric: Tensor) -> Tensor:
    """1 − mean|g_xy| / mean(|g_xx| + |g_yy|), means over the points: one number for [n, 2, 2], M for [M, n, 2, 2].

    1 where moving x and moving y change the layer in orthogonal directions. Its floor is 0.5, for directions that are
    the same (2|g_xy| ≤ g_xx + g_yy), not 0. A layer that does not move at all has none: NaN.
    """
    g = _checked("factorization", metric).abs()
    if g.dim() < 3:
        raise ValueError(f"factorization: metric has shape {list(g.shape)}; expected […, n, 2, 2], of n points")
    return 1 - g[..., 0, 1].mean(-1) / (g[..., 0, 0] + g[..., 1, 1]).mean(-1)


def _checked(caller: str, metric: Tensor) -> Tensor:
    if metric.shape[-2:] != (2, 2):
        raise ValueError(
            f"{caller}: metric has shape {list(metric.shape)}; expected […, 2, 2], of layer_geometry or grid_metrics"
        )
    return metric
