"""The suite `search` at tiny sizes: what is held out, the loop, the aim, settings, rounds on a fake clock, rows."""

import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields, replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from rich.console import Console, RenderableType
from torch import Tensor, nn

from compgen_fast.bench import search, search_peers
from compgen_fast.bench.search import Aim, Contender, Row, Setting
from compgen_fast.bench.search_peers import Problem, Size, hold_out, loop, only
from compgen_fast.models import CrossAttentionDecoder
from compgen_fast.models.frame_decoder import FrameDecoder
from compgen_fast.recipes import frame_vae_cpu
from tests.bench.fakes import STAMP, FakeClock

SIZE = Size("reference", 8, 2, images=3)


def frame() -> nn.Module:
    torch.manual_seed(0)
    return FrameDecoder(4, 8, 2, hidden=16, frequencies=3, features=2, mixer=4)


def attention() -> nn.Module:
    torch.manual_seed(0)
    return CrossAttentionDecoder(4, 8, heads=2, head_dim=5, query_dim=12, slot_hidden=16, octaves=3)


def noise(images: int = 3) -> Tensor:
    return torch.randint(0, 256, (images, 8, 8, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def starts(images: int = 3, each: int = 1) -> Tensor:
    return torch.randn(images, each, 2, 4, generator=torch.Generator().manual_seed(1))


def tiny(each: int = 1) -> Problem:
    return hold_out(frame(), noise(), starts(each=each))


# ------------------------------------------------------------------------------------------------ problems


@pytest.mark.parametrize("make", [frame, attention])
def test_shown_and_held_out_pixels_are_all_pixels_and_drawn_as_ever(make: Callable[[], nn.Module]) -> None:
    decoder, z = make(), starts()[:, 0]
    pixels = torch.arange(64, dtype=torch.uint8).view(1, 8, 8, 1).expand(3, 8, 8, 3)
    given = hold_out(decoder, pixels, starts())
    shown, held_out = given.images[0, ..., 0].flatten().long(), given.truth[0, :, 0].long()
    assert given.images.shape == (3, 7, 8, 3)
    assert sorted([*shown.tolist(), *held_out.tolist()]) == list(range(64))
    assert (given.decoder.num_pixels, given.judge.num_pixels) == (56, 8)
    whole = decoder(z)
    torch.testing.assert_close(given.decoder(z), whole[:, shown])
    torch.testing.assert_close(given.judge(z), whole[:, held_out])
    torch.testing.assert_close(given.decoder(z, pixels=torch.tensor([5, 0])), whole[:, shown[[5, 0]]])


def test_the_decoder_that_was_given_still_draws_everything() -> None:
    decoder = frame()
    only(decoder, torch.tensor([3]))
    assert decoder(starts()[:, 0]).shape == (3, 64, 3)


def test_errors_are_means_over_the_pixels_held_out() -> None:
    given, z = tiny(), starts()[:, 0]
    expected = (given.judge(z) - given.truth.double() / 255).square().flatten(1).mean(1)
    torch.testing.assert_close(given.errors(z).double(), expected, rtol=1e-5, atol=0)


def test_of_several_starts_the_pixels_shown_choose() -> None:
    given = tiny(each=4)
    z = given.init.flatten(0, 1)
    shown = (given.decoder(z).view(3, 4, 56, 3) - given.images.flatten(1, 2).unsqueeze(1) / 255).square().mean((2, 3))
    torch.testing.assert_close(given.best(z), given.init[torch.arange(3), shown.argmin(1)])
    assert len(set(shown.argmin(1).tolist())) > 1


def test_a_reference_problem_has_an_answer_far_below_its_start(tmp_path: Path) -> None:
    decoder, images, init = search_peers._reference_problem(Size("reference", 16, 3, images=2), tmp_path)
    answer = torch.randn(2, 3, search_peers.SLOT_DIM, generator=torch.Generator().manual_seed(1))
    given = hold_out(decoder, images, init)
    assert (100 * given.errors(answer) < given.errors(init[:, 0])).all()
    assert not torch.equal(images[0], images[1])


@pytest.fixture
def short_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_peers, "TRAINED_ON", 8)
    monkeypatch.setattr(search_peers, "TRAINING", 1)
    once = search_peers.train
    monkeypatch.setattr(search_peers, "train", lambda model, images, recipe: once(model, images, recipe, steps=1))


@pytest.mark.usefixtures("short_training")
def test_the_decoder_is_trained_once_for_each_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = replace(frame_vae_cpu(), batch_size=2)
    first = search_peers.trained(recipe, tmp_path)

    def again(*_: object) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr(search_peers, "train", again)
    torch.testing.assert_close(dict(search_peers.trained(recipe, tmp_path).state_dict()), dict(first.state_dict()))
    with pytest.raises(AssertionError, match="trained again"):
        search_peers.trained(replace(recipe, batch_size=3), tmp_path)


def test_training_follows_the_loss() -> None:
    recipe = replace(frame_vae_cpu(), batch_size=4)
    torch.manual_seed(0)
    model = search_peers.build(recipe.model)
    images = torch.full((4, 32, 32, 3), 200, dtype=torch.uint8)
    before = model(images)["loss"]
    search_peers.train(model, images, recipe, steps=8)
    assert model(images)["loss"] < 0.9 * before


@pytest.mark.usefixtures("short_training")
@pytest.mark.parametrize("side", [32, 64])
def test_what_was_learnt_on_small_images_draws_large_ones(side: int, tmp_path: Path) -> None:
    given = search_peers.problem(Size("trained", side, 2, images=2, starts=3), "cpu", tmp_path)
    assert given.images.shape == (2, side * 7 // 8, side, 3)
    assert given.init.shape == (2, 3, 2, 16)
    assert given.decoder(given.best(given.init.flatten(0, 1))).shape == (2, side * side * 7 // 8, 3)


def test_the_trained_decoder_has_its_number_of_slots(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="7 slots, 1 image: the trained decoder has 2 slots"):
        search_peers.problem(Size("trained", 32, 7, images=1), "cpu", tmp_path)


# ------------------------------------------------------------------------------------------------ the loop


def test_the_loop_takes_steps_of_its_rate_and_lowers_the_error() -> None:
    given, target = tiny(), starts() + 1
    with torch.no_grad():
        drawn = (255 * given.decoder(target[:, 0])).round().to(torch.uint8).view(given.images.shape)
    given = replace(given, images=drawn)
    moved = next(loop(given, 0.1)) - given.init[:, 0]
    torch.testing.assert_close(moved.abs(), torch.full((3, 2, 4), 0.1), rtol=1e-3, atol=0)
    loss = search_peers.loss_of(given)
    assert loss(search.last(islice(loop(given, 0.1), 20))) < loss(given.init[:, 0]) / 4


def test_starts_do_not_disturb_each_other_in_the_loop() -> None:
    given = tiny(each=2)
    together = search.last(islice(loop(given, 0.1), 3)).view(3, 2, 2, 4)
    for each in (0, 1):
        alone = search.last(islice(loop(replace(given, init=given.init[:, each : each + 1]), 0.1), 3))
        torch.testing.assert_close(together[:, each], alone, rtol=1e-4, atol=1e-4)


def test_all_forms_of_the_loop_find_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: made.append(function) or function)
    given, setting = tiny(each=2), Setting(4, 0.1)
    compiled = search.CompiledLoop()
    for form in (search.frozen_loop, compiled, compiled):
        torch.testing.assert_close(form(given, setting), search.eager_loop(given, setting))
    assert len(made) == 1
    compiled(tiny(), setting)
    assert len(made) == 2


def test_only_the_frozen_loop_leaves_parameters_without_gradients() -> None:
    given = tiny()
    search.frozen_loop(given, Setting(1, 0.1))
    assert all(parameter.grad is None and parameter.requires_grad for parameter in given.decoder.parameters())
    search.eager_loop(given, Setting(1, 0.1))
    assert any(parameter.grad is not None for parameter in given.decoder.parameters())


def test_a_trained_decoder_is_searched_from_several_starts_made_of_the_one_that_all_are_given() -> None:
    by = {size: search.contenders(size)[0].find for size in search.sizes()}
    assert by[Size("trained", 64, 2, images=64)] is search.restarted_search
    assert by[Size("trained", 32, 2, images=32, starts=4)] is by[Size("reference", 64, 7, images=2)] is search.search
    given = hold_out(frame(), noise(), starts())
    found = search.restarted_search(given, Setting(steps=8, rate=0.1))
    assert found.shape == given.init[:, 0].shape
    assert (given.errors(found) <= given.errors(given.init[:, 0])).float().mean() > 0.5


# ------------------------------------------------------------------------------------------------ aim and settings


@pytest.mark.parametrize(("start", "end", "bound"), [(0.02, 0.01, 0.0102), (0.011, 0.01, 0.01005), (0.01, 0.02, 0.02)])
def test_the_aim_is_close_to_what_is_left_and_to_what_was_taken_away(start: float, end: float, bound: float) -> None:
    assert Aim(torch.full((3,), start), end).bound == pytest.approx(bound)


class Judged(Problem):
    """A problem in which latents are their own errors."""

    def __init__(self, start: float) -> None:
        super().__init__(nn.Identity(), noise(), torch.full((3, 1), start), nn.Identity(), noise())

    def errors(self, z: Tensor) -> Tensor:
        return z


def test_the_loop_takes_the_rate_that_gets_there_first(monkeypatch: pytest.MonkeyPatch) -> None:
    courses = {0.05: [0.9, 0.8, 0.7], 0.1: [0.5, 0.4025, 0.401], 0.2: [0.6, 0.41, 0.4]}
    monkeypatch.setattr(search, "course", lambda given, rate, steps: courses[rate])
    aim, setting = search.aim_of(Judged(1.0), "reference")
    assert aim.end == 0.4
    assert setting == Setting(2, 0.1)


def test_the_course_is_looked_at_after_every_step() -> None:
    given = tiny()
    expected = [float(given.errors(z).mean()) for z in islice(loop(given, 0.1), 3)]
    assert search.course(given, 0.1, 3) == pytest.approx(expected, rel=1e-4)
    assert len(set(expected)) == 3


def by_steps(error: Callable[[int], float], log: list[Setting]) -> Callable[[Problem, Setting], Tensor]:
    """Finds latents with errors that depend on the steps, and on how far the rate is from 0.1."""

    def find(given: Problem, setting: Setting) -> Tensor:
        log.append(setting)
        return torch.full((3,), error(setting.steps) + abs(setting.rate - 0.1))

    return find


@pytest.mark.parametrize(("needed", "found"), [(3, 4), (9, 10), (13, 14), (16, 16)])
def test_others_get_the_fewest_steps_at_the_rate_that_is_best(needed: int, found: int) -> None:
    log: list[Setting] = []
    contender = Contender("search", by_steps(lambda steps: 0.0 if steps >= needed else 1.0, log), (8, 16, 32))
    assert search.soonest(contender, Judged(1.0), "reference", bound=0.01).setting == Setting(found, 0.1)
    rates = search.RATES["reference"]
    assert log[: len(rates)] == [Setting(8, rate) for rate in rates]
    assert all(setting.rate == 0.1 for setting in log[-2:])
    assert max(setting.steps for setting in log) <= 16


def test_who_never_gets_there_has_tried_the_most_steps() -> None:
    log: list[Setting] = []
    contender = Contender("newton", by_steps(lambda steps: 1 / steps, log), (1, 2), has_rate=False)
    missed = search.soonest(contender, Judged(1.0), "reference", bound=0.1)
    assert missed.setting == Setting(2)
    assert log == [Setting(1), Setting(2)]


def test_one_step_is_the_fewest() -> None:
    contender = Contender("newton", by_steps(lambda steps: 0.0, []), (1, 2))
    assert search.soonest(contender, Judged(1.0), "reference", bound=0.1).setting == Setting(1, 0.1)


# ------------------------------------------------------------------------------------------------ measuring


def contender(
    name: str, clock: FakeClock, errors: tuple[float, ...], seconds: Callable[[Setting], float], *steps: int
) -> Contender:
    """One that takes known times, and with the fewest of its steps comes to known errors."""

    def find(given: Problem, setting: Setting) -> Tensor:
        clock.log.append(f"{name} {setting.steps}")
        clock.spend(seconds(setting))
        return torch.tensor(errors) if setting.steps >= min(steps, default=0) else torch.ones(3)

    return Contender(name, find, steps)


@pytest.fixture
def a_loop_of_25_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which the first 20 reach the aim, 0.5 and a little."""
    monkeypatch.setattr(search, "course", lambda given, rate, steps: [1.0] * 19 + [0.5] * 6)


def measured(clock: FakeClock, *among: Contender) -> list[Row]:
    return search.measure(SIZE, Judged(1.0), among, 0.0, asdict(STAMP), "cpu", clock)


@pytest.mark.usefixtures("a_loop_of_25_steps")
def test_ratios_are_formed_within_rounds_and_loops_are_timed_in_part() -> None:
    clock = FakeClock()
    slower: Iterator[float] = iter([1.0] * 5 + [1.0, 2.0, 4.0, 8.0, 16.0])  # three rates and two halvings come first
    ours = contender("search", clock, (0.1, 0.5, 0.9), lambda setting: 0.5 * next(slower), 8)
    eager = contender("eager", clock, (0.2, 0.5, 0.8), lambda setting: 0.3 * setting.steps)
    first, second = measured(clock, ours, eager)
    assert clock.log[3:] == ["search 4", "search 6", "eager 20", *["search 8", "eager 5"] * 5]
    assert (first.steps, first.ratio, first.images_per_second, first.rounds) == (8, 1.0, 3 / 2.0, 5)
    assert second.ratio == pytest.approx(6.0 / 2.0)  # 20 steps of 0.3 s against 0.5 s · 4
    assert second.ratio_low == pytest.approx(1.35)
    assert second.images_per_second == pytest.approx(3 / 6.0)
    assert (second.steps, second.error, second.error_median) == (20, 0.5, 0.5)
    assert (first.start_error, first.loop_error, first.loop_steps) == (1.0, 0.5, search.LOOP_STEPS["reference"])
    assert first.gate is second.gate is None


@pytest.mark.usefixtures("a_loop_of_25_steps")
def test_nobody_has_a_time_when_ours_misses_the_aim() -> None:
    clock = FakeClock()
    ours = contender("search", clock, (0.6, 0.6, 0.6), lambda setting: 1.0, 4, 8)
    eager = contender("eager", clock, (0.5, 0.5, 0.5), lambda setting: 1.0)
    rows = measured(clock, ours, eager)
    assert [row.gate for row in rows] == 2 * ["gate: the error is 6.000e-01 after 8 steps, and the aim 5.100e-01"]
    assert all(row.ratio is None and row.images_per_second is None and row.rounds == 0 for row in rows)
    assert [row.error for row in rows] == pytest.approx([0.6, 0.5])


@pytest.mark.usefixtures("a_loop_of_25_steps")
def test_a_loop_that_misses_the_aim_is_a_red_gate_of_its_own() -> None:
    clock = FakeClock()
    ours = contender("search", clock, (0.5, 0.5, 0.5), lambda setting: 1.0, 8)
    other = contender("compiled", clock, (0.7, 0.5, 0.5), lambda setting: 1.0)
    first, second = measured(clock, ours, other)
    assert (first.gate, first.ratio) == (None, 1.0)
    assert second.gate is not None
    assert second.ratio is None


@pytest.mark.usefixtures("a_loop_of_25_steps")
def test_who_cannot_take_part_or_never_gets_there_is_a_row_with_the_reason() -> None:
    def refuse(given: Problem, setting: Setting) -> Tensor:
        raise NotImplementedError("no jets here. Sorry.")

    clock = FakeClock()
    ours = contender("search", clock, (0.5, 0.5, 0.5), lambda setting: 1.0, 8)
    far = contender("newton", clock, (0.9, 0.9, 0.9), lambda setting: 1.0, 1, 2)
    _, refused, late = measured(clock, ours, Contender("compiled", refuse), far)
    assert refused.unsupported == "no jets here"
    assert late.unsupported == "the error is 9.000e-01 after 2 steps, and the aim 5.100e-01"
    assert all(row.ratio is None and row.gate is None for row in (refused, late))


@pytest.mark.usefixtures("a_loop_of_25_steps")
def test_a_mistake_of_ours_is_no_reason() -> None:
    def wrong(given: Problem, setting: Setting) -> Tensor:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        measured(FakeClock(), Contender("search", wrong, (8,)))


# ------------------------------------------------------------------------------------------------ the command


def shown(something: RenderableType) -> str:
    console = Console(width=140)
    with console.capture() as captured:
        console.print(something)
    return captured.get()


@pytest.mark.usefixtures("a_loop_of_25_steps")
def test_tables_have_speeds_errors_and_reasons() -> None:
    clock = FakeClock()
    ours = contender("search", clock, (0.1, 0.4, 0.9), lambda setting: 0.25, 8)
    eager = contender("eager", clock, (0.2, 0.5, 0.8), lambda setting: 0.1 * setting.steps)
    far = contender("newton", clock, (0.9, 0.9, 0.9), lambda setting: 1.0, 1)
    rows = measured(clock, ours, eager, far)
    text = shown(search.table(rows))
    assert "error 10000.00 at the start, 5000.00 after 40 steps of the loop; the aim is 5100.00" in text
    for part in ("12", "8.00×", "8.00–8.00", "4666.67", "4000.00", "newton: unsupported: the error is 9.000e-01"):
        assert part in text
    summary = shown(search.summary(rows))
    assert "reference 8 px, 2 slots, 3 images" in summary
    assert "8.00×" in summary
    assert "gate" in shown(search.summary([replace(row, ratio=None, gate="gate: late") for row in rows]))


@pytest.fixture
def tiny_suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole command on one tiny problem, with an aim that all reach."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(search, "QUICK", replace(search.QUICK, seconds=0.0))
    monkeypatch.setattr(search, "quick_sizes", lambda: [SIZE])
    monkeypatch.setattr(search, "problem", lambda size, device, folder: tiny())
    monkeypatch.setattr(search, "LOOP_STEPS", {"reference": 4})
    monkeypatch.setattr(search, "LEFT", 1e3)
    monkeypatch.setattr(search, "TAKEN", 1e3)


@pytest.mark.usefixtures("tiny_suite")
def test_a_green_run_leaves_rows_of_one_schema(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert search.run(quick=True, json="-") == 0
    captured = capsys.readouterr()
    rows = json.loads(captured.out)
    assert [row["contender"] for row in rows] == ["search", "eager", "frozen"]
    assert all(row["ratio"] > 0 and row["images_per_second"] > 0 and row["error"] <= row["bound"] for row in rows)
    with (tmp_path / "bench-results" / "search.csv").open(newline="") as file:
        assert [tuple(row) for row in csv.DictReader(file)] == 3 * [tuple(field.name for field in fields(Row))]
    assert "against the eager loop" in captured.err


@pytest.mark.usefixtures("tiny_suite")
def test_a_missed_aim_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late = Contender("search", lambda given, setting: given.init[:, 0] + 9, (1,))
    monkeypatch.setattr(search, "contenders", lambda size: [late, Contender("eager", search.eager_loop)])
    monkeypatch.setattr(search, "LEFT", 0.02)
    assert search.run(quick=True, json="rows.json") == 1
    assert all(row["gate"] for row in json.loads((tmp_path / "rows.json").read_text()))


def test_newton_and_the_compiler_take_part_where_everyone_does() -> None:
    plain, full = Size("trained", 32, 2, images=1), Size("trained", 32, 2, images=1, everyone=True)
    assert [each.name for each in search.contenders(plain)] == ["search", "eager", "frozen"]
    assert [each.name for each in search.contenders(full)] == ["search", "eager", "frozen", "compiled", "newton"]
    many = Size("reference", 32, 7, images=1, everyone=True)
    assert [each.name for each in search.contenders(many)] == ["search", "eager", "frozen", "compiled"]


@pytest.mark.parametrize("listed", [search.sizes, search.quick_sizes])
def test_every_problem_has_a_name_of_its_own(listed: Callable[[], list[Size]]) -> None:
    sizes = listed()
    assert len({str(size) for size in sizes}) == len(sizes)
    assert {size.kind for size in sizes} == {"trained", "reference"}


def test_a_quick_run_has_nobody_slow() -> None:
    assert not any(size.everyone for size in search.quick_sizes())
    assert any(size.everyone for size in search.sizes())


def test_the_suite_grows_with_pixels_images_starts_and_slots() -> None:
    sizes = search.sizes()
    for kind in ("trained", "reference"):
        assert {size.side for size in sizes if size.kind == kind} == {32, 64, 128}
    assert {size.slots for size in sizes} == {2, 3, 7}
    assert len({size.images for size in sizes if (size.kind, size.side) == ("trained", 32)}) >= 4
    assert {size.starts for size in sizes} == {1, 2, 4}


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_without_cuda_is_one_sentence_and_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert search.run(device="cuda") == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
