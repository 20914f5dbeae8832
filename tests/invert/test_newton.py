"""Second-order search: exact derivatives, exact steps of a linear decoder, and the objective of `search`."""

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compgen_fast.invert import SlotMarginals, newton, search
from compgen_fast.invert.newton import jacobian
from compgen_fast.models import AdditiveDecoder, CrossAttentionDecoder
from compgen_fast.models.frame_decoder import FrameDecoder
from tests.invert.test_search import SIDE, SLOTS, WIDTH, Plane, as_images, frame, near, problem, usual

MODULE = sys.modules[newton.__module__]
EXACT: dict[str, Any] = {"pixels": SIDE**2, "held_out": 0.0}


def least_squares(decoder: Plane, images: Tensor, marginals: SlotMarginals | None, pull: float) -> Tensor:
    """The minimum of the objective of a linear decoder, in fp64."""
    weight = decoder.weight.detach().double()
    target = images.flatten(1).double() / 255 - 0.5
    curvature, slope = 2 * weight.T @ weight, 2 * target @ weight
    if marginals is not None:
        precision = marginals.precision.double()
        curvature, slope = curvature + pull * precision, slope + pull * marginals.mean.double().flatten() @ precision
    return torch.linalg.solve(curvature, slope.T).T.view(-1, SLOTS, WIDTH).float()


def decoders() -> list[tuple[nn.Module, int]]:
    """With their slots; an odd number leaves the last slot without a partner."""
    torch.manual_seed(2)
    attention: dict[str, Any] = {"heads": 2, "head_dim": 4, "query_dim": 8, "slot_hidden": 8, "octaves": 3}
    return [
        (FrameDecoder(WIDTH, SIDE, 2, hidden=16, frequencies=3, features=3, mixer=4), 2),
        (CrossAttentionDecoder(WIDTH, SIDE, **attention), 3),
        (AdditiveDecoder(WIDTH, SIDE, kind="mlp", layers=2, width=8, octaves=3), 4),
        (Plane(slots=1, bend=0.3), 1),
    ]


@pytest.mark.parametrize(("decoder", "slots"), decoders(), ids=lambda each: type(each).__name__)
def test_the_jacobian_is_that_of_finite_differences(decoder: nn.Module, slots: int) -> None:
    decoder, z = decoder.double().requires_grad_(False), torch.randn(2, slots, WIDTH, dtype=torch.float64)
    pixels, step = torch.tensor([5, 0, 60, 33]), 1e-5
    colours, columns = jacobian(decoder, z, pixels)
    torch.testing.assert_close(colours, decoder(z, pixels=pixels))
    moves = step * torch.eye(slots * WIDTH, dtype=torch.float64).view(-1, 1, slots, WIDTH)
    expected = torch.stack([decoder(z + d, pixels=pixels) - decoder(z - d, pixels=pixels) for d in moves], 1)
    torch.testing.assert_close(columns, expected.flatten(2) / (2 * step), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("pull", [None, 0.5])
def test_a_linear_decoder_is_solved_in_two_steps(pull: float | None) -> None:
    decoder, z, images = problem()
    marginals = None if pull is None else usual()
    found = newton(decoder, images, near(z, 1.0), steps=2, marginals=marginals, pull=pull or 0.0, **EXACT)
    optimum = least_squares(decoder, images, marginals, pull or 0.0)
    torch.testing.assert_close(found.z, optimum, rtol=0, atol=1e-4)
    if pull is not None:
        assert (optimum - least_squares(decoder, images, None, 0.0)).abs().max() > 0.1  # the pull is felt


def test_it_ends_where_search_does() -> None:
    decoder, z, images = problem(decoder=Plane(bend=0.05))
    settings: dict[str, Any] = {"marginals": usual(), "pull": 0.3, **EXACT}
    found = newton(decoder, images, near(z), steps=8, **settings)
    searched = search(decoder, images, near(z), steps=400, patience=400, **settings)
    torch.testing.assert_close(found.z, searched.z, rtol=0, atol=0.02)
    assert (found.z - z).abs().max() > 0.05  # where the pull leads, not where the images came from


def test_a_bent_decoder_takes_few_steps() -> None:
    decoder, z, images = problem(decoder=frame())
    found = newton(decoder, images, near(z), steps=6, pixels=32)
    assert (found.error < found.start_error / 5).all()


def test_the_error_never_exceeds_that_of_the_first_start() -> None:
    decoder, z, images = problem(decoder=Plane(bend=0.5))
    found = newton(decoder, images, near(z, 3.0), steps=3, pixels=4)
    assert (found.error <= found.start_error).all() and (found.error < found.start_error).any()
    by_hand = (decoder(found.z) - images.flatten(1, 2) / 255).square().mean((1, 2))
    torch.testing.assert_close(found.error, by_hand.detach())


def test_a_step_that_leads_up_is_not_taken_and_the_next_is_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, z, images = problem(decoder=Plane(bend=0.05))
    tried: list[tuple[Tensor, Tensor]] = []

    def astray(run: Any, z: Tensor, gradient: Tensor, curvature: Tensor, dampings: Tensor) -> Tensor:
        tried.append((z, dampings))
        return (z + 3).unsqueeze(1).expand(-1, dampings.shape[1], -1, -1)

    monkeypatch.setattr(MODULE._Run, "_trials", astray)
    found = newton(decoder, images, near(z), steps=2, **EXACT)
    (first, dampings), (second, larger) = tried
    assert torch.equal(first, near(z)) and torch.equal(second, near(z))
    assert (larger.min(1).values > 0.99 * dampings.max(1).values).all()
    assert torch.equal(found.z, near(z)) and not found.steps.any()


def test_a_good_step_is_taken_and_the_next_may_be_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, z, images = problem()
    monkeypatch.setattr(MODULE, "FIRST", 1e6)
    few, more = (newton(decoder, images, near(z), steps=steps, **EXACT) for steps in (1, 6))
    assert (few.error < few.start_error).all() and (more.error < few.error / 100).all()


def test_an_image_notices_neither_the_images_beside_it_nor_the_chunk() -> None:
    decoder, z, images = problem(5, decoder=frame())
    init = torch.stack([near(z), z.flip(0)], 1)
    whole = newton(decoder, images, init, steps=4, pixels=16)
    for part, found in (
        (slice(None), newton(decoder, images, init, steps=4, pixels=16, chunk=2)),
        (slice(1, 3), newton(decoder, images[1:3], init[1:3], steps=4, pixels=16)),
    ):
        torch.testing.assert_close(found.z, whole.z[part], rtol=0, atol=1e-2)
        torch.testing.assert_close(found.error, whole.error[part], rtol=0.05, atol=1e-6)


def test_halving_keeps_the_better_start() -> None:
    decoder, z, images = problem(4, decoder=Plane(bend=0.5))
    found = newton(decoder, images, torch.stack([z + 40, z - 40, near(z, 0.05)], 1), steps=6, pixels=32)
    assert found.restart.tolist() == [2] * 4


def test_candidates_that_no_longer_improve_give_up() -> None:
    decoder, z, images = problem(4)
    found = newton(decoder, images, near(z), steps=30, **EXACT)
    assert (found.steps < 10).all()


def test_held_out_pixels_stop_it() -> None:
    """Pixels shown ask for a move that the others speak against."""
    decoder, z, images = problem(4)
    plan = sys.modules[search.__module__].plan
    (stage,) = plan(SIDE**2, 8, SIDE**2, 0.25, seed=0, device=torch.device("cpu"))
    other = images.flatten(1, 2).clone()
    other[:, stage.shown[0]] = as_images(decoder(-z)).flatten(1, 2)[:, stage.shown[0]]
    decoder.calls.clear()
    newton(decoder, other.view_as(images), z, steps=8, pixels=SIDE**2, held_out=0.25)
    jacobians = [count for count, _ in decoder.calls if count == 2 * WIDTH]
    assert len(jacobians) <= 2 * MODULE.PATIENCE


def test_what_is_found_lies_within_what_was_seen() -> None:
    decoder, z, _ = problem()
    marginals = usual()
    found = newton(decoder, as_images(decoder(20 * z)), z, marginals=marginals, pull=0.0, steps=4)
    distance = torch.einsum("kij,ckj->cki", marginals.whitening, found.z - marginals.mean).norm(dim=-1)
    assert (distance <= marginals.radius * (1 + 1e-4)).all() and (distance > 0.9 * marginals.radius).any()


def test_parameters_ask_for_gradient_again_afterwards() -> None:
    decoder, z, images = problem()
    asked: list[bool] = []
    decoder.register_forward_pre_hook(lambda *_: asked.append(decoder.weight.requires_grad))
    newton(decoder, images, z, steps=1)
    assert asked and not any(asked) and decoder.weight.requires_grad


def test_half_precision_is_read_as_fp32_and_fp64_stays() -> None:
    decoder, z, images = problem()
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        decoder = decoder.to(expected)
        assert newton(decoder, images, near(z).to(dtype), marginals=usual(), steps=2).z.dtype == expected


def test_a_decoder_that_ignores_its_slots_is_refused() -> None:
    _, z, images = problem()
    with pytest.raises(TypeError, match="the decoder returned Tensor for a jet; expected colours that depend on z"):
        newton(lambda z, pixels=None: torch.zeros(len(z), SIDE**2 if pixels is None else len(pixels), 3), images, z)


def test_an_op_without_a_jet_rule_is_named() -> None:
    decoder, z, images = problem()

    def sorts(z: Tensor, pixels: Tensor | None = None) -> Tensor:
        return decoder(z.msort(), pixels)

    with pytest.raises(NotImplementedError, match=r"no rule for torch.*msort"):
        newton(sorts, images, z)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"images": torch.zeros(6, SIDE, SIDE, 3)}, "images are torch"),
        ({"init": torch.zeros(2, SLOTS, WIDTH)}, "there are 6 images"),
        ({"steps": 0}, "steps is 0"),
        ({"pixels": 65}, "pixels is 65"),
        ({"pull": -1.0}, "pull is -1"),
        ({"held_out": 1.5}, "held_out is 1.5"),
        ({"chunk": 0}, "chunk is 0"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_sentence(changed: dict[str, Any], sentence: str) -> None:
    decoder, z, images = problem()
    with pytest.raises(ValueError, match=f"newton: .*{sentence}"):
        newton(decoder, **({"images": images, "init": z} | changed))
