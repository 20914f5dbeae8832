"""The geometry of layers, against Jacobians of torch.func in fp64 and on maps whose answer is known."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.func import hessian, jacrev

from compgen_fast.measure import LayerGeometry, factorization, geometry, grid_metrics, layer_geometry, volume
from compgen_fast.models.stacked import StackedConv2d, StackedLinear

N, CODE = 5, 6
SEEDS = (3, 4, 5)
Layers = list[nn.Module]


def mlp(seeds: Sequence[int]) -> Layers:
    return [
        nn.Sequential(StackedLinear(seeds, 0, CODE, 7), nn.GELU()),
        nn.Sequential(StackedLinear(seeds, 1, 7, 8), nn.Tanh()),
        StackedLinear(seeds, 2, 8, 4),
    ]


def cnn(seeds: Sequence[int]) -> Layers:
    return [
        nn.Sequential(StackedLinear(seeds, 0, CODE, 12), nn.SiLU(), nn.Unflatten(2, (3, 2, 2))),
        nn.Sequential(StackedConv2d(seeds, 1, 3, 4), nn.GELU()),
        StackedConv2d(seeds, 2, 4, 1, kernel=4, up=2),
    ]


def double(layers: Layers) -> Layers:
    return [layer.double() for layer in layers]


def points(*shape: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    code, x, y = torch.randn(3, *shape, CODE, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return code, (x, y)


def by_jacrev(activation: Callable[[Tensor], Tensor], code: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The metric and ‖∂_x ∂_y h‖² of one point, the plain way."""

    def at(t: Tensor) -> Tensor:
        return activation(code + t[0] * x + t[1] * y).flatten()

    moved, bent = jacrev(at)(code.new_zeros(2)), hessian(at)(code.new_zeros(2))
    return moved.T @ moved, bent[:, 0, 1].square().sum()


def alone(layers: Sequence[Callable[[Tensor], Tensor]], depth: int) -> Callable[[Tensor], Tensor]:
    """The activation of one point of one model."""

    def activation(code: Tensor) -> Tensor:
        h = code.view(1, 1, -1)
        for layer in layers[:depth]:
            h = layer(h)
        return h

    return activation


@pytest.mark.parametrize("make", [mlp, cnn])
@pytest.mark.parametrize("together", [256, 4, 1])
def test_every_layer_of_every_model_is_as_torch_func_has_it(
    make: Callable[[Sequence[int]], Layers], together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(geometry, "TOGETHER", together)
    code, along = points(len(SEEDS), N)
    found = layer_geometry(double(make(SEEDS)), code, along, leading=2)
    assert [layer.name for layer in found] == ["input", "layer 1", "layer 2", "layer 3"]
    for model, seed in enumerate(SEEDS):
        layers = double(make([seed]))
        for depth, layer in enumerate(found):
            expected = [
                by_jacrev(alone(layers, depth), *(given[model, point] for given in (code, *along)))
                for point in range(N)
            ]
            metric, mixed = map(torch.stack, zip(*expected, strict=True))
            torch.testing.assert_close(layer.metric[model], metric, rtol=1e-10, atol=1e-14)
            torch.testing.assert_close(layer.mixed[model], mixed, rtol=1e-10, atol=1e-14)
    assert found[-1].mixed.min() > 0


def test_plain_modules_of_images_are_as_torch_func_has_them() -> None:
    torch.manual_seed(0)
    layers = double([
        nn.Sequential(nn.Linear(CODE, 12), nn.ReLU(inplace=True), nn.Unflatten(1, (3, 2, 2))),
        nn.ConvTranspose2d(3, 2, 4, 2, 1),
        nn.Softplus(),
    ])  # fmt: skip
    code, along = points(N)
    found = layer_geometry(layers, code, along)

    def activation(code: Tensor) -> Tensor:
        return nn.Sequential(*layers)(code[None])

    for point in range(N):
        metric, mixed = by_jacrev(activation, *(given[point] for given in (code, *along)))
        torch.testing.assert_close(found[-1].metric[point], metric)
        torch.testing.assert_close(found[-1].mixed[point], mixed)
    assert (found[1].mixed == 0).all() and (found[2].mixed == 0).all()


@pytest.mark.parametrize("make", [mlp, cnn])
def test_a_model_is_the_same_in_a_stack_and_alone(make: Callable[[Sequence[int]], Layers]) -> None:
    code, along = points(len(SEEDS), N)
    together = layer_geometry(double(make(SEEDS)), code, along, leading=2)
    for model, seed in enumerate(SEEDS):
        x, y = along
        by_itself = layer_geometry(double(make([seed])), code[[model]], (x[[model]], y[[model]]), leading=2)
        for one, all_of_them in zip(by_itself, together, strict=True):
            torch.testing.assert_close(one.metric[0], all_of_them.metric[model])
            torch.testing.assert_close(one.mixed[0], all_of_them.mixed[model])


def identity(n: int = N) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The code (x, y) itself."""
    x, y = torch.eye(2).unbind()
    return torch.rand(n, 2), (x.expand(n, 2), y.expand(n, 2))


def test_the_code_x_y_has_the_identity_for_its_metric() -> None:
    (found,) = layer_geometry([], *identity())
    torch.testing.assert_close(found.metric, torch.eye(2).expand(N, 2, 2), rtol=0, atol=0)
    assert (volume(found.metric) == 0).all() and (found.mixed == 0).all()
    assert factorization(found.metric) == 1


def test_additive_layers_do_not_mix_and_a_product_does() -> None:
    additive: list[Callable[[Tensor], Tensor]] = [torch.sin, nn.Linear(2, 3)]  # each number bent by itself, then summed
    for layer in layer_geometry(additive, *identity()):
        assert (layer.mixed == 0).all()
    *_, product = layer_geometry([lambda h: 3 * h[:, :1] * h[:, 1:]], *identity())
    torch.testing.assert_close(product.mixed, torch.full((N,), 9.0))


def test_orthogonal_directions_are_factorized_and_equal_ones_are_at_the_floor() -> None:
    code, along = identity()
    turning, summing = torch.tensor([[3.0, 1.0], [1.0, -3.0]]), torch.ones(2, 1)
    turned = layer_geometry([lambda h: h @ turning], code, along)[-1].metric
    summed = layer_geometry([lambda h: h @ summing], code, along)[-1].metric
    assert factorization(turned) == 1
    assert factorization(summed) == 0.5
    assert (volume(summed) < -18).all() and volume(summed).isfinite().all()


def test_stacked_models_have_a_factorization_each() -> None:
    metric = torch.stack([torch.eye(2).expand(N, 2, 2), torch.full((N, 2, 2), 7.0)])
    assert factorization(metric).tolist() == [1.0, 0.5]


def test_factorization_is_a_ratio_of_means_over_points() -> None:
    metric = torch.tensor([[[1.0, 1.0], [1.0, 1.0]], [[5.0, -2.0], [-2.0, 3.0]]])
    assert factorization(metric).item() == pytest.approx(1 - (3 / 2) / (10 / 2))


def test_volume_is_the_logarithm_of_the_area() -> None:
    code, along = identity()
    (_, stretched) = layer_geometry([lambda h: h * torch.tensor([2.0, 50.0])], code, along)
    torch.testing.assert_close(volume(stretched.metric), torch.full((N,), 2.0))


def test_a_rotation_of_features_leaves_everything_as_it_was() -> None:
    rotation = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64)).Q
    code, along = points(1, N)
    layers = double(mlp([3]))
    *_, before, after = layer_geometry([*layers, lambda h: h @ rotation], code, along, leading=2)
    torch.testing.assert_close(after.metric, before.metric)
    torch.testing.assert_close(after.mixed, before.mixed)


def curve(n: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """(x, y) on [0, 1]², y fastest, and its directions."""
    line = torch.linspace(0, 1, n, dtype=torch.float64)
    code = torch.cartesian_prod(line, line)
    x, y = torch.eye(2, dtype=torch.float64)
    return code, (x.expand_as(code), y.expand_as(code))


def test_central_differences_come_to_the_exact_metric_as_the_grid_is_refined() -> None:
    weight = torch.tensor([[1.0, 2.0, -1.0], [0.5, -1.0, 3.0]], dtype=torch.float64)
    errors = []
    for n in (11, 21, 41):
        code, along = curve(n)
        exact = layer_geometry([lambda h: torch.tanh(h @ weight)], code, along)[-1].metric
        near = grid_metrics(torch.tanh(code @ weight).view(n, n, 3), spacing=1 / (n - 1))
        inside = (near - exact).view(n, n, 2, 2)[1:-1, 1:-1]
        errors.append(float(inside.abs().max()))
    assert errors[0] > 3.5 * errors[1] > 3.5**2 * errors[2] > 0  # second order: 4 times for half the step


def test_differences_are_exact_for_linear_activations_and_x_comes_first() -> None:
    grid = torch.stack(torch.meshgrid(torch.arange(4.0), torch.arange(3.0), indexing="ij"), -1)
    found = grid_metrics(grid * torch.tensor([2.0, 5.0]))
    torch.testing.assert_close(found, torch.tensor([[4.0, 0.0], [0.0, 25.0]]).expand(12, 2, 2))
    assert grid_metrics(grid.expand(6, 4, 3, 2)).shape == (6, 12, 2, 2)


def test_a_layer_that_ignores_the_code_does_not_move() -> None:
    code, along = identity()
    *_, constant = layer_geometry([lambda h: torch.ones(N, 3)], code, along)
    assert (constant.metric == 0).all() and (constant.mixed == 0).all()
    assert factorization(constant.metric).isnan()


def test_half_precision_is_measured_in_single_and_nothing_records_gradients() -> None:
    code, (x, y) = identity()
    layer = nn.Linear(2, 3).bfloat16()
    found = layer_geometry([layer], code.bfloat16(), (x.bfloat16(), y.bfloat16()))
    assert isinstance(found[0], LayerGeometry)
    assert found[-1].metric.dtype == torch.float32 and not found[-1].metric.requires_grad


@pytest.mark.parametrize(
    ("code", "along", "leading", "says"),
    [
        (torch.zeros(3), 2 * (torch.zeros(3),), 1, "code is torch.float32 of shape .3. and leading is 1"),
        (torch.zeros(3, 2), 2 * (torch.zeros(3, 2),), 2, "leading is 2; expected"),
        (torch.zeros(3, 2).long(), 2 * (torch.zeros(3, 2),), 1, "code is torch.int64"),
        (torch.zeros(0, 2), 2 * (torch.zeros(0, 2),), 1, "at least one point"),
        (torch.zeros(3, 2), 2 * (torch.zeros(2),), 1, "each shaped like code: expand"),
        (torch.zeros(3, 2), (torch.zeros(3, 2),), 1, "expected .∂code/∂x, ∂code/∂y."),
    ],
)
def test_wrong_codes_are_refused(code: Tensor, along: tuple[Tensor, Tensor], leading: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        layer_geometry([], code, along, leading=leading)


def test_a_layer_that_loses_the_points_is_named() -> None:
    with pytest.raises(ValueError, match=r"layer 2 made \[10\] of a code"):
        layer_geometry([nn.Tanh(), nn.Flatten(0)], *identity())


def test_wrong_metrics_and_grids_are_refused() -> None:
    with pytest.raises(ValueError, match="volume: metric has shape"):
        volume(torch.zeros(4, 3))
    with pytest.raises(ValueError, match="of n points"):
        factorization(torch.eye(2))
    with pytest.raises(ValueError, match=r"grid_metrics: activations have shape \[1, 4, 2\]"):
        grid_metrics(torch.zeros(1, 4, 2))
