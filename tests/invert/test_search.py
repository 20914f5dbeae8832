"""Search on decoders whose answer is known: it gets there, judges by what it was not shown, and mixes nothing up."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compgen_fast.invert import Found, SlotMarginals, search
from compgen_fast.invert.search import better_half, first_pixels, plan
from compgen_fast.models.frame_decoder import FrameDecoder

SIDE, SLOTS, WIDTH = 8, 2, 3
CPU = torch.device("cpu")
MODULE = sys.modules[search.__module__]  # the package has a function of the same name


class Plane(nn.Module):
    """Colours are linear in z, around grey, or bent by a sine; remembers how many candidates and pixels it decoded."""

    def __init__(self, slots: int = SLOTS, bend: float = 0.0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.num_pixels, self.bend = SIDE**2, bend
        self.weight = nn.Parameter(torch.randn(self.num_pixels * 3, slots * WIDTH, generator=generator) / 20)
        self.calls: list[tuple[int, int]] = []

    def forward(self, z: Tensor, pixels: Tensor | None = None) -> Tensor:
        y = nn.functional.linear(z.flatten(1), self.weight).unflatten(1, (-1, 3))
        y = y if pixels is None else y[:, pixels]
        self.calls.append((len(z), y.shape[1]))
        return 0.5 + y + self.bend * torch.sin(5 * y)


def as_images(colours: Tensor) -> Tensor:
    return (colours.detach() * 255).round().clamp(0, 255).to(torch.uint8).view(-1, SIDE, SIDE, 3)


def problem(images: int = 6, decoder: nn.Module | None = None) -> tuple[Any, Tensor, Tensor]:
    """A decoder, latents and the images they make."""
    decoder = Plane() if decoder is None else decoder
    z = torch.randn(images, SLOTS, WIDTH, generator=torch.Generator().manual_seed(3))
    return decoder, z, as_images(decoder(z))


def frame() -> FrameDecoder:
    torch.manual_seed(1)
    return FrameDecoder(WIDTH, SIDE, SLOTS, hidden=16, frequencies=3, features=3, mixer=4)


def near(z: Tensor, by: float = 0.3) -> Tensor:
    return z + by * torch.randn(z.shape, generator=torch.Generator().manual_seed(5))


def usual() -> SlotMarginals:
    """Marginals of latents like those of `problem`."""
    return SlotMarginals.fit(torch.randn(500, SLOTS, WIDTH, generator=torch.Generator().manual_seed(11)))


def assert_same(a: Found, b: Found, rows: slice = slice(None), tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(a.z[rows], b.z[rows], rtol=0, atol=tolerance)
    torch.testing.assert_close(a.error[rows], b.error[rows], rtol=1e-2, atol=1e-7)
    assert torch.equal(a.restart[rows], b.restart[rows])


def test_it_recovers_the_latents_that_made_the_images() -> None:
    decoder, z, images = problem()
    found = search(decoder, images, near(z), steps=200, pixels=32)
    assert (found.z - z).abs().max() < 0.05 < 0.5 < (near(z) - z).abs().max()
    assert (found.error < found.start_error / 100).all()


def test_it_recovers_images_of_a_frame_decoder() -> None:
    decoder, z, images = problem(decoder=frame())
    found = search(decoder, images, near(z), steps=100, pixels=32)
    assert (found.error < found.start_error / 5).all()


def test_the_error_is_that_of_the_latents_over_all_pixels() -> None:
    decoder, z, images = problem()
    found = search(decoder, images, near(z), steps=8)
    for latents, error in ((found.z, found.error), (near(z), found.start_error)):
        by_hand = (decoder(latents) - images.flatten(1, 2) / 255).square().mean((1, 2))
        torch.testing.assert_close(error, by_hand.detach())


def test_the_error_never_exceeds_that_of_the_first_start() -> None:
    decoder, z, images = problem()
    found = search(decoder, images, z, steps=12, rate=50.0, pixels=4)
    assert (found.error <= found.start_error).all()
    found = search(decoder, images, near(z)[:, None].expand(-1, 3, -1, -1) * torch.tensor([1, 50, 90]).view(3, 1, 1))
    assert (found.error <= found.start_error).all()


def test_where_nothing_is_better_the_start_comes_back_untouched() -> None:
    decoder, z, _ = problem()
    images = as_images(torch.full((6, SIDE**2, 3), 0.5))
    found = search(decoder, images, torch.zeros_like(z), steps=3, rate=20.0, patience=1)
    assert torch.equal(found.z, torch.zeros_like(z)) and torch.equal(found.error, found.start_error)
    assert not found.steps.any() and not found.restart.any()


@pytest.mark.parametrize("starts", [1, 3])
def test_an_image_notices_neither_the_images_beside_it_nor_the_chunk(starts: int) -> None:
    decoder, z, images = problem(7)
    init = torch.stack([near(z), 2 * z.flip(0), -z], 1)[:, :starts]
    whole = search(decoder, images, init, steps=40, pixels=16)
    assert_same(search(decoder, images, init, steps=40, pixels=16, chunk=2), whole)
    alone = search(decoder, images[2:4], init[2:4], steps=40, pixels=16)
    torch.testing.assert_close(alone.z, whole.z[2:4], rtol=0, atol=1e-4)


def test_the_seed_chooses_the_pixels() -> None:
    decoder, z, images = problem(decoder=Plane(bend=0.05))
    once, again, other = (search(decoder, images, near(z), steps=6, pixels=8, seed=seed).z for seed in (1, 1, 2))
    assert torch.equal(once, again) and not torch.allclose(once, other)


def test_parameters_ask_for_gradient_again_afterwards() -> None:
    decoder, z, images = problem(decoder=frame())
    decoder.height.requires_grad_(False)
    before = [each.requires_grad for each in decoder.parameters()]
    asked: list[bool] = []
    decoder.register_forward_pre_hook(lambda *_: asked.extend(each.requires_grad for each in decoder.parameters()))
    search(decoder, images, z, steps=2)
    assert asked and not any(asked)
    assert [each.requires_grad for each in decoder.parameters()] == before
    assert all(each.grad is None for each in decoder.parameters())


def test_parameters_ask_for_gradient_again_after_an_error() -> None:
    decoder, z, images = problem()

    def fail(done: int, images: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search(decoder, images, z, steps=2, progress=fail)
    assert decoder.weight.requires_grad


def test_a_method_of_a_module_is_frozen_too() -> None:
    decoder, z, images = problem()
    asked: list[bool] = []
    decoder.register_forward_pre_hook(lambda *_: asked.append(decoder.weight.requires_grad))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decoder = decoder

        def decode(self, z: Tensor, pixels: Tensor | None = None) -> Tensor:
            return self.decoder(z, pixels)

    search(Model().decode, images, z, steps=2)
    assert asked and not any(asked) and decoder.weight.requires_grad


def test_candidates_that_gave_up_leave_the_batch_and_their_results_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, z, images = problem(8)
    init = near(z, 1.5)
    init[::2] = z[::2]  # nothing to gain for every other image
    settings: dict[str, Any] = {"steps": 60, "pixels": SIDE**2, "patience": 3}
    decoder.calls.clear()
    found = search(decoder, images, init, **settings)
    sizes = [count for count, _ in decoder.calls]
    assert sizes[0] == 8 and min(sizes) <= 5
    monkeypatch.setattr(MODULE, "RETIRED", 2.0)  # never
    decoder.calls.clear()
    assert_same(search(decoder, images, init, **settings), found, tolerance=1e-5)
    assert {count for count, _ in decoder.calls} == {8}
    assert (found.steps[::2] < found.steps[1::2]).all()


def test_halving_keeps_the_better_start() -> None:
    decoder, z, images = problem(5)
    init = torch.stack([z + 4, z - 4, near(z, 0.1), 4 - z], 1)
    decoder.calls.clear()
    found = search(decoder, images, init, steps=16, pixels=16)
    assert found.restart.tolist() == [2] * 5 and (found.error < 1e-3).all()
    steps = [count for count, pixels in decoder.calls[:-2]]  # the last two calls take errors
    assert sorted(set(steps), reverse=True) == [20, 10, 5]


def test_the_better_half_of_an_odd_number_is_rounded_up() -> None:
    losses = torch.tensor([3.0, 1.0, 2.0, torch.inf, 5.0, 4.0])
    assert better_half(losses, 2).tolist() == [1, 2, 4, 5]
    assert better_half(losses, 6).tolist() == list(range(6))


# ------------------------------------------------------------------------------------------------------ pixels


def test_held_out_pixels_are_never_shown_and_all_others_are() -> None:
    stages = plan(1000, 50, 60, 0.2, seed=3, device=CPU)
    shown = set(torch.cat([stage.shown.flatten() for stage in stages]).tolist())
    for stage in stages:
        judges = set(stage.judges.tolist())
        assert len(judges) == 200 and not judges & shown and len(judges | shown) == 1000


def test_the_plan_grows_to_all_pixels_in_as_many_steps_as_asked_for() -> None:
    stages = plan(1000, 50, 60, 0.2, seed=3, device=CPU, polish=1.0)
    sizes, counts = zip(*((stage.shown.shape[1], len(stage.shown)) for stage in stages), strict=True)
    assert sizes == (60, 240, 800, 800) and sum(counts) == 50 and list(counts) == sorted(counts, reverse=True)
    assert [stage.first for stage in stages] == [0, counts[0], sum(counts[:2]), sum(counts[:3])]


def test_steps_look_at_other_pixels_until_all_were_shown() -> None:
    stage = plan(100, 20, 20, 0.2, seed=0, device=CPU)[0]
    assert stage.shown.shape[1] == 20 and stage.shown[:4].unique().numel() == 80


def test_as_many_stages_as_it_takes_to_halve_the_starts_to_one() -> None:
    for starts, stages in ((1, 1), (2, 2), (3, 3), (8, 4), (9, 5)):
        sizes = [stage.shown.shape[1] for stage in plan(64, 400, 16, 0.1, seed=0, device=CPU, starts=starts)]
        assert sizes == [16] * stages + [58]


def test_a_stage_has_its_share_of_the_work() -> None:
    halves, one, more, most = plan(1024, 1000, 64, 0.0, seed=0, device=CPU, starts=2)
    work = [stage.shown.numel() for stage in (halves, one, more, most)]
    assert 2 * work[0] == pytest.approx(work[1], rel=0.01)  # two candidates
    assert work[2] == pytest.approx(work[1] / 4, rel=0.02) and work[3] == pytest.approx(work[1] / 16, rel=0.2)
    assert [len(stage.shown) for stage in plan(1024, 12, 64, 0.0, seed=0, device=CPU)] == [11, 1]


def test_of_small_images_half_is_looked_at() -> None:
    assert [first_pixels("search", total, None) for total in (64, 400, 1024, 1025, 128**2)] == [64, 256, 512, 256, 256]
    assert first_pixels("search", 1024, 100) == 100


def test_judges_are_not_more_than_it_takes() -> None:
    (stage, *_) = plan(128**2, 32, 1024, 0.125, seed=0, device=CPU)
    assert len(stage.judges) == 256 and stage.shown.shape == (30, 1024)


def test_without_held_out_pixels_those_shown_judge_and_stay_the_same() -> None:
    for stage in plan(64, 20, 16, 0.0, seed=0, device=CPU):
        assert not len(stage.judges) and (stage.shown == stage.shown[0]).all()


def test_no_gradient_comes_from_held_out_pixels() -> None:
    """What lies there decides which place is the best, not which places are visited."""
    decoder, z, images = problem(4)
    (stage,) = plan(SIDE**2, 6, SIDE**2, 0.25, seed=0, device=CPU)
    other = images.flatten(1, 2).clone()
    other[:, stage.judges] = 255 - other[:, stage.judges]
    settings: dict[str, Any] = {"steps": 6, "pixels": SIDE**2, "held_out": 0.25, "patience": 99, "paths": range(4)}
    found, same = (search(decoder, x, near(z), **settings) for x in (images, other.view_as(images)))
    assert torch.equal(found.paths, same.paths)
    other[:, stage.shown[0, :5]] //= 2
    assert not torch.equal(search(decoder, other.view_as(images), near(z), **settings).paths[:, -1], same.paths[:, -1])


def test_where_held_out_pixels_see_no_progress_the_search_goes_back_and_stops() -> None:
    """Pixels shown ask for a move that the others speak against."""
    decoder, z, images = problem(4)
    (stage,) = plan(SIDE**2, 30, SIDE**2, 0.25, seed=0, device=CPU)
    other = images.flatten(1, 2).clone()
    other[:, stage.shown[0]] = as_images(decoder(-z)).flatten(1, 2)[:, stage.shown[0]]
    settings: dict[str, Any] = {"steps": 30, "pixels": SIDE**2, "trace": True, "patience": 4}
    stopped = search(decoder, other.view_as(images), z, held_out=0.25, **settings)
    assert torch.equal(stopped.z, z) and stopped.trace is not None and stopped.trace[:, -1].isnan().all()
    went_on = search(decoder, other.view_as(images), z, held_out=0.0, **settings)
    assert (went_on.error < stopped.error).all()


def test_every_step_looks_at_the_pixels_of_the_plan() -> None:
    decoder, z, images = problem(4)
    looked: list[Tensor] = []
    judged: list[Tensor] = []

    def watched(z: Tensor, pixels: Tensor | None = None) -> Tensor:
        if pixels is not None:
            (looked if z.requires_grad else judged).append(pixels.clone())
        return decoder(z, pixels)

    search(watched, images, near(z), steps=12, pixels=16, patience=99)
    stages = plan(SIDE**2, 12, 16, 0.125, seed=0, device=CPU)
    stage, planned = stages[0], [shown for stage in stages for shown in stage.shown]
    assert len(looked) == 12 and all(map(torch.equal, looked, planned))
    # At steps 0 and 8 and after each stage.
    assert len(stages) == 2 and len(judged) == 5 and all(torch.equal(pixels, stage.judges) for pixels in judged)


def test_few_pixels_weigh_as_much_as_all() -> None:
    """Where all pixels are alike, the pull leads to the same places however many are shown."""
    decoder, z, _ = problem(4)
    with torch.no_grad():
        decoder.weight.copy_(decoder.weight[:3].repeat(SIDE**2, 1))
    settings: dict[str, Any] = {"marginals": usual(), "pull": 2.0, "steps": 8, "patience": 99, "paths": range(4)}
    few, whole = (search(decoder, as_images(decoder(z)), near(z), pixels=n, **settings).paths for n in (8, SIDE**2))
    assert few is not None and whole is not None
    torch.testing.assert_close(few, whole, rtol=0, atol=1e-4)


def test_those_who_gave_up_on_few_pixels_go_on_with_more() -> None:
    decoder, z, images = problem(3)
    found = search(decoder, images, z, steps=40, pixels=16, patience=1, trace=True)
    _, last = plan(SIDE**2, 40, 16, 0.125, seed=0, device=CPU)
    assert found.trace is not None
    assert found.trace[:, last.first - 1].isnan().all() and found.trace[:, last.first].isfinite().all()


def test_a_number_that_hardly_matters_hardly_moves_where_still_says_so() -> None:
    decoder, z, images = problem()
    with torch.no_grad():
        decoder.weight[:, -1] *= 1e-4
    calm, restless = ((search(decoder, images, near(z), steps=20, still=s).z - near(z)).abs() for s in (1e-3, 0.0))
    assert calm[:, 1, -1].max() < 0.01 < 0.05 < calm.mean()
    assert restless[:, 1, -1].mean() > 0.1


# ------------------------------------------------------------------------------------------------ traces and paths


def test_the_trace_holds_the_error_on_held_out_pixels() -> None:
    decoder, z, images = problem(3)
    found = search(decoder, images, near(z), steps=30, pixels=16, trace=True)
    first, *_ = plan(SIDE**2, 30, 16, 0.125, seed=0, device=CPU)
    assert found.trace is not None and found.trace.shape == (3, 30)
    difference = (decoder(near(z)) - images.flatten(1, 2) / 255)[:, first.judges].detach()
    torch.testing.assert_close(found.trace[:, 0], difference.square().mean((1, 2)))
    assert (found.trace[:, -1] < found.trace[:, 0] / 10).all()


def test_the_trace_is_that_of_the_best_start() -> None:
    decoder, z, images = problem(3)
    init = torch.stack([z + 4, near(z, 0.1)], 1)
    both = search(decoder, images, init, steps=12, trace=True)
    alone = search(decoder, images, init[:, 1], steps=12, trace=True)
    assert both.trace is not None and alone.trace is not None
    torch.testing.assert_close(both.trace[:, :3], alone.trace[:, :3], rtol=1e-2, atol=1e-6)


def test_traces_and_paths_end_in_nan_where_the_candidate_gave_up() -> None:
    decoder, z, images = problem(4)
    init = near(z, 2.0)
    init[1] = z[1]
    found = search(decoder, images, init, steps=60, pixels=SIDE**2, patience=2, trace=True, paths=[1, 3])
    assert found.trace is not None and found.paths is not None
    assert found.paths.shape == (2, 60, SLOTS, WIDTH)
    gone = found.trace.isnan()
    assert gone[1].any() and torch.equal(gone, gone.cummax(1).values)  # once gone, gone
    assert torch.equal(found.paths.isnan().all((2, 3)), gone[[1, 3]])
    torch.testing.assert_close(found.paths[:, 0], init[[1, 3]])


def test_paths_end_where_the_first_start_was_dropped() -> None:
    decoder, z, images = problem(3)
    found = search(decoder, images, torch.stack([z + 4, near(z, 0.1)], 1), steps=20, pixels=16, paths=[2])
    _, second, *_ = plan(SIDE**2, 20, 16, 0.125, seed=0, device=CPU, starts=2)
    assert found.paths is not None
    assert found.paths[0, : second.first].isfinite().all() and found.paths[0, second.first :].isnan().all()


def test_paths_come_in_the_order_asked_for() -> None:
    decoder, z, images = problem(6)
    for chunk in (128, 4, 1):
        found = search(decoder, images, near(z), steps=3, paths=(5, 2, 3), chunk=chunk)
        assert found.paths is not None
        torch.testing.assert_close(found.paths[:, 0], near(z)[[5, 2, 3]])


def test_nothing_is_kept_unasked() -> None:
    decoder, z, images = problem(2)
    found = search(decoder, images, z, steps=2)
    assert found.trace is None and found.paths is None


def test_progress_is_told_in_images() -> None:
    decoder, z, images = problem(5)
    told: list[tuple[int, int]] = []
    search(decoder, images, torch.stack([z, z], 1), steps=2, chunk=4, progress=lambda *each: told.append(each))
    assert told == [(2, 5), (4, 5), (5, 5)]


# ------------------------------------------------------------------------------------------------------ marginals


def test_the_pull_moves_what_the_pixels_leave_open() -> None:
    decoder, z, images = problem()
    with torch.no_grad():
        decoder.weight[:, -1] = 0  # nobody sees the last number
    near_mean, far = (
        search(decoder, images, near(z, 1.0), marginals=usual(), pull=pull, steps=80, pixels=SIDE**2, patience=99).z
        for pull in (3.0, 0.0)
    )
    assert near_mean[:, 1, -1].abs().mean() < far[:, 1, -1].abs().mean() / 2
    assert torch.allclose(far[:, 1, -1], near(z, 1.0)[:, 1, -1])


def test_what_is_found_lies_within_what_was_seen() -> None:
    decoder, z, _ = problem()
    marginals = usual()
    found = search(decoder, as_images(decoder(20 * z)), z, marginals=marginals, pull=0.0, steps=60, rate=1.0)
    distance = torch.einsum("kij,ckj->cki", marginals.whitening, found.z - marginals.mean).norm(dim=-1)
    assert (distance <= marginals.radius * (1 + 1e-4)).all() and (distance > 0.9 * marginals.radius).any()
    assert (found.error < found.start_error).all()


def test_the_best_is_the_best_with_the_pull() -> None:
    """Of two starts that explain an image alike, the one that was seen in training wins."""
    decoder, z, images = problem()
    with torch.no_grad():
        decoder.weight[:, -1] = 0
    odd, known = near(z, 0.1), near(z, 0.1)
    odd[:, 1, -1], known[:, 1, -1] = 3.0, 0.0
    init = torch.stack([near(z, 1.0), odd, known], 1)
    found = search(decoder, images, init, marginals=usual(), pull=1.0, steps=2, held_out=0.0, pixels=SIDE**2)
    assert found.restart.tolist() == [2] * 6


# ------------------------------------------------------------------------------------------------------ precision


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_latents_in_half_precision_are_read_as_fp32(dtype: torch.dtype) -> None:
    decoder, z, images = problem()
    init = near(z).to(dtype)
    marginals = SlotMarginals.fit(torch.randn(50, SLOTS, WIDTH).to(dtype))
    found = search(decoder, images, init, marginals=marginals, steps=6)
    assert found.z.dtype == found.error.dtype == torch.float32
    assert_same(found, search(decoder, images, init.float(), marginals=marginals, steps=6))


def test_a_decoder_in_fp64_is_searched_in_fp64() -> None:
    decoder, z, images = problem()
    found = search(decoder.double(), images, near(z).double(), marginals=usual(), steps=30)
    assert found.z.dtype == torch.float64
    assert_same(search(decoder.float(), images, near(z), marginals=usual(), steps=30), _single(found), tolerance=1e-3)


def _single(found: Found) -> Found:
    return Found(found.z.float(), found.error.float(), found.start_error.float(), found.steps, found.restart)


def test_it_works_where_gradients_are_off() -> None:
    decoder, z, images = problem()
    expected = search(decoder, images, near(z), steps=6)
    with torch.no_grad():
        assert_same(search(decoder, images, near(z), steps=6), expected)
    assert not expected.z.requires_grad


def test_latents_of_an_encoder_in_training_are_detached() -> None:
    decoder, z, images = problem()
    assert not search(decoder, images, near(z).requires_grad_(), steps=3).z.requires_grad


def test_a_start_without_a_finite_error_does_no_harm() -> None:
    decoder, z, images = problem(3)

    def fragile(z: Tensor, pixels: Tensor | None = None) -> Tensor:
        return decoder(z, pixels) + torch.where(z.abs().amax((1, 2), keepdim=True) > 50, torch.nan, 0.0)

    found = search(fragile, images, torch.stack([z + 60, near(z)], 1), steps=12)
    assert found.start_error.isnan().all() and found.error.isfinite().all() and found.restart.tolist() == [1] * 3
    found = search(fragile, images, z + 60, steps=12)
    assert torch.equal(found.z, z + 60)


# ------------------------------------------------------------------------------------------------------ refusals


def _bad(**changed: Any) -> Callable[[], Found]:
    decoder, z, images = problem(3)
    arguments = {"images": images, "init": z, "steps": 2} | changed
    return lambda: search(decoder, arguments.pop("images"), arguments.pop("init"), **arguments)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (_bad(images=torch.zeros(3, SIDE, SIDE, 3)), r"images are torch.float32 \[3, 8, 8, 3\]; expected torch.uint8"),
        (_bad(images=torch.zeros(0, SIDE, SIDE, 3, dtype=torch.uint8)), "at least one image"),
        (_bad(images=torch.zeros(3, 4, 4, 3, dtype=torch.uint8)), "4×4 = 16 pixels and the decoder draws 64"),
        (_bad(init=torch.zeros(2, SLOTS, WIDTH)), r"init is torch.float32 \[2, 2, 3\] and there are 3 images"),
        (_bad(init=torch.zeros(3, WIDTH)), r"expected floating \[I, K, D\] or \[I, R, K, D\] with I = 3"),
        (_bad(init=torch.zeros(3, SLOTS, WIDTH).long()), "init is torch.int64"),
        (_bad(init=torch.full((3, SLOTS, WIDTH), torch.nan)), r"image 0 is not finite \(3 such images\)"),
        (
            _bad(marginals=SlotMarginals.fit(torch.randn(9, 1, WIDTH))),
            r"marginals have slots \[1, 3\] and init \[2, 3\]",
        ),
        (_bad(steps=0), "steps is 0; expected at least one step"),
        (_bad(rate=0.0), "rate is 0.0; expected a positive step size"),
        (_bad(rate=float("nan")), "rate is nan"),
        (_bad(pixels=65), "pixels is 65; expected 1 to 64"),
        (_bad(pixels=0), "pixels is 0; expected 1 to 64"),
        (_bad(pull=-1.0), "pull is -1.0; expected a weight"),
        (_bad(held_out=1.0), "held_out is 1.0; expected a part of the pixels"),
        (_bad(chunk=0), "chunk is 0; expected at least one candidate"),
        (_bad(patience=0), "patience is 0; expected at least one step"),
        (_bad(still=-1.0), "still is -1.0; expected a gradient"),
        (_bad(paths=[3]), r"paths is \[3\]; expected numbers of images, 0 to 2"),
        (_bad(paths=[1, 1]), r"paths is \[1, 1\]; expected each image once"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_sentence(call: Callable[[], Found], sentence: str) -> None:
    with pytest.raises(ValueError, match=f"search: .*{sentence}"):
        call()
