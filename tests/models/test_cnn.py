"""The CNN encoder."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compgen_fast.models.cnn import CNN, OCTAVES
from compgen_fast.models.positions import fourier_features


@settings(max_examples=20)
@given(st.sampled_from([1, 2, 4, 8, 16]), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2), st.integers(1, 5))
def test_any_size_that_downsample_divides_gives_one_feature_per_cell(
    downsample: int, rows: int, columns: int, batch: int, width: int
) -> None:
    images = torch.randn(batch, 3, rows * downsample, columns * downsample)
    assert CNN(width, downsample)(images).shape == (batch, rows * columns, width)


def test_it_is_four_convolutions_of_five_by_five_and_a_position() -> None:
    cnn, images = CNN(6, 4), torch.randn(2, 3, 16, 24)
    maps = images
    for weight, bias, stride in zip(
        [p for p in cnn.layers.parameters() if p.dim() == 4],
        [p for p in cnn.layers.parameters() if p.dim() == 1],
        [2, 2, 1, 1],
        strict=True,
    ):
        assert weight.shape[2:] == (5, 5)
        maps = torch.nn.functional.conv2d(maps, weight, bias, stride, padding=2).relu()
    position = cnn.embed_position(fourier_features(4, 6, OCTAVES, images.device))
    for row, column in ((0, 0), (3, 5), (2, 1)):
        cell = 6 * row + column
        torch.testing.assert_close(cnn(images)[:, cell], maps[:, :, row, column] + position[cell])


def test_a_position_is_waves_of_the_middle_of_its_cell() -> None:
    features = fourier_features(4, 10, OCTAVES, torch.device("cpu"))[2 * 10 + 7]
    angles = [math.pi * 2**octave * place for place in (2.5 / 4, 7.5 / 10) for octave in range(6)]
    torch.testing.assert_close(features, torch.tensor([f(x) for f in (math.sin, math.cos) for x in angles]))


def test_every_place_has_features_of_its_own() -> None:
    features = fourier_features(16, 32, OCTAVES, torch.device("cpu"))
    distances = torch.cdist(features, features) + 9 * torch.eye(len(features))
    assert distances.min() > 0.1


def test_opposite_edges_are_far_apart() -> None:
    columns = fourier_features(1, 128, OCTAVES, torch.device("cpu"))
    assert (columns[0] - columns[-1]).norm() > 1.9


def test_the_same_content_elsewhere_differs_only_by_its_position() -> None:
    cnn, blank = CNN(4, 2), torch.zeros(1, 3, 64, 64)
    positions = cnn.embed_position(fourier_features(32, 32, OCTAVES, blank.device))
    content = (cnn(blank)[0] - positions).view(32, 32, -1)[8:-8, 8:-8]  # away from the padding
    torch.testing.assert_close(content, content[:1, :1].expand_as(content))


def test_every_parameter_is_trained() -> None:
    cnn = CNN(8, 4)
    cnn(torch.randn(2, 3, 32, 32)).square().sum().backward()
    assert all(p.grad is not None and (p.grad != 0).any() for p in cnn.parameters())


def test_it_runs_in_double_precision_and_under_autocast() -> None:
    images = torch.randn(2, 3, 16, 16)
    exact = CNN(8, 4).double()
    assert exact(images.double()).dtype == torch.float64
    with torch.autocast("cpu", torch.bfloat16):
        rough = CNN(8, 4)(images)
    assert rough.isfinite().all()


@pytest.mark.parametrize("shape", [(2, 3, 30, 32), (2, 3, 32, 30), (2, 1, 32, 32), (3, 32, 32)])
def test_images_that_do_not_fit_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"expected \[B, 3, H, W\] with H and W multiples of downsample=4"):
        CNN(4, 4)(torch.randn(shape))


def test_a_downsample_that_strides_cannot_reach_is_refused() -> None:
    for downsample in (0, 3, 32):
        with pytest.raises(ValueError, match=f"downsample is {downsample}; expected one of 1, 2, 4, 8, 16"):
            CNN(4, downsample)
    with pytest.raises(ValueError, match="width is 0"):
        CNN(0, 4)
