"""latent_adam on whichever backend serves the CPU: every branch of its rules, against a plain-Python oracle in fp64.

The oracle steps one candidate at a time with if and else, and shares nothing with the reference. Where no candidate
goes back, torch.optim.Adam is a second one.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from compgen_fast.ops import Latents, latent_adam
from compgen_fast.ops.backends import serving
from compgen_fast.ops.latent_adam import reference
from tests.ops.contract import error

TRITON = serving("cpu") == "triton"
DTYPES = [torch.float32] if TRITON else [torch.float32, torch.float64]
SETTINGS: dict[str, Any] = {"patience": 3, "tolerance": 0.01, "shrink": 0.5, "least": 1e-3}
pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's, in Triton's interpreter
NAN, INF = float("nan"), float("inf")


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Also where they hold NaN."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return torch.equal(a, b) or torch.equal(a.view(integers[a.element_size()]), b.view(integers[b.element_size()]))


def copied(latents: Latents) -> Latents:
    return Latents(*(x.clone() for x in latents.tensors()))


def started(C: int = 6, L: int = 9, rate: float = 0.1, dtype: torch.dtype = torch.float32) -> Latents:
    return Latents.start(torch.randn(C, L, dtype=dtype), rate)


def step(latents: Latents, grad: Tensor, loss: Tensor, **settings: Any) -> Latents:
    latent_adam(latents, grad, loss, **(SETTINGS | settings))
    return latents


@dataclass
class Candidate:
    """The rules for one candidate, in Python's floats."""

    z: list[float]
    first: list[float]
    second: list[float]
    best_z: list[float]
    best_loss: float
    rate: float
    steps: int
    stalled: int
    active: bool

    def step(self, grad: list[float], loss: float, beta1: float, beta2: float, eps: float, **settings: Any) -> None:
        if not self.active:
            return
        known = math.isfinite(loss)
        improved = known and loss < self.best_loss * (1 - settings["tolerance"])
        if known and loss < self.best_loss:
            self.best_loss, self.best_z = loss, list(self.z)
        self.stalled = 0 if improved else self.stalled + 1
        if self.stalled >= settings["patience"] or not known or not all(map(math.isfinite, grad)):
            self.go_back(**settings)
            return
        self.steps += 1
        for i, g in enumerate(grad):
            self.first[i] = beta1 * self.first[i] + (1 - beta1) * g
            self.second[i] = beta2 * self.second[i] + (1 - beta2) * g * g
            m, v = self.first[i] / (1 - beta1**self.steps), self.second[i] / (1 - beta2**self.steps)
            self.z[i] -= self.rate * m / (math.sqrt(v) + eps)

    def go_back(self, *, shrink: float, least: float, **_: Any) -> None:
        if self.best_loss == INF:
            self.active = False
        else:
            self.z = list(self.best_z)
        self.first, self.second = [0.0] * len(self.z), [0.0] * len(self.z)
        self.steps = self.stalled = 0
        self.rate *= shrink
        self.active = self.active and self.rate >= least


class Oracle:
    """All candidates by the rules for one."""

    def __init__(self, latents: Latents) -> None:
        self.candidates = [Candidate(*row) for row in zip(*(x.tolist() for x in latents.tensors()), strict=True)]

    def step(self, grad: Tensor, loss: Tensor, betas: tuple[float, float] = (0.9, 0.999), **settings: Any) -> None:
        for candidate, g, value in zip(self.candidates, grad.tolist(), loss.tolist(), strict=True):
            candidate.step(g, value, *betas, settings.get("eps", 1e-8), **(SETTINGS | settings))

    def state(self) -> list[Tensor]:
        rows = (list(vars(candidate).values()) for candidate in self.candidates)
        return [torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True)]


def assert_follows(latents: Latents, oracle: Oracle, rounding: float) -> None:
    for name, found, true in zip(vars(latents), latents.tensors(), oracle.state(), strict=True):
        if found.dtype in (torch.int32, torch.bool):
            assert found.tolist() == true.to(found.dtype).tolist(), name
            continue
        both = true.isfinite()
        assert torch.equal(found.double()[~both], true[~both]), name
        assert error(found[both], true[both]) <= rounding, f"{name}: {error(found[both], true[both]):.1e}"


def troubled(C: int, L: int, at: int) -> tuple[Tensor, Tensor]:
    """A gradient and a loss that fall, stall, and now and then are not finite, the same for every caller."""
    generator = torch.Generator().manual_seed(at)
    grad = torch.randn(C, L, generator=generator)
    loss = torch.rand(C, generator=generator).mul(4).round() / 4 + 1 / (1 + 0.005 * at)
    bad = torch.rand(C, generator=generator)
    loss[bad < 0.1] = (NAN, INF, -INF)[at % 3]
    grad[bad > 0.92, -1] = (INF, NAN, -INF)[at % 3]
    return grad, loss


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.5), (0.5, 0.0)], ids=str)
def test_a_troubled_search_follows_the_rules(dtype: torch.dtype, betas: tuple[float, float]) -> None:
    latents = started(C=40, dtype=dtype)
    oracle = Oracle(latents)
    for at in range(30):
        grad, loss = troubled(40, 9, at)
        step(latents, grad, loss, betas=betas)
        oracle.step(grad, loss, betas)
        # 30 steps of a few roundings each; eps is nothing beside these gradients
        assert_follows(latents, oracle, 200 * torch.finfo(dtype).eps)
    given_up = int((~latents.active).sum())
    assert 0 < given_up < 40, "the search must meet both kinds of candidates"


@given(C=st.integers(1, 20), L=st.sampled_from([1, 2, 7, 8, 9, 16, 31, 64, 100, 300]), patience=st.integers(1, 4))
def test_any_shape_follows_the_rules(C: int, L: int, patience: int) -> None:
    torch.manual_seed(0)
    latents = started(C, L)
    oracle = Oracle(latents)
    for at in range(6):
        grad, loss = troubled(C, L, at)
        step(latents, grad, loss, patience=patience)
        oracle.step(grad, loss, patience=patience)
    assert_follows(latents, oracle, 100 * torch.finfo(torch.float32).eps)


@pytest.mark.parametrize("L", [1023, 1024, 1025, 2048, 4096])
def test_the_widest_rows_follow_the_rules(L: int) -> None:
    latents = started(C=5, L=L)
    oracle = Oracle(latents)
    for at in range(4):
        grad, loss = troubled(5, L, at)
        step(latents, grad, loss)
        oracle.step(grad, loss)
    assert_follows(latents, oracle, 100 * torch.finfo(torch.float32).eps)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_without_trouble_it_is_torchs_adam(dtype: torch.dtype) -> None:
    latents = started(C=4, L=33, rate=0.02, dtype=dtype)
    z = latents.z.clone().requires_grad_()
    adam = torch.optim.Adam([z], lr=0.02)
    for at in range(20):
        z.grad = torch.randn(4, 33, dtype=dtype)
        step(latents, z.grad, torch.full((4,), 1.0 / (at + 1)), tolerance=0.0)
        adam.step()
    assert error(latents.z, z.detach().double()) <= 100 * torch.finfo(dtype).eps
    assert latents.steps.tolist() == [20] * 4


def test_the_first_step_is_as_exact_as_the_others() -> None:
    """1 − 0.9999 rounded to fp32 is wrong by a thousandth part; the first step is the rate, whatever the gradient."""
    latents = Latents.start(torch.zeros(3, 5), 0.25)
    step(latents, torch.randn(3, 5) * 10, torch.ones(3), betas=(0.99, 0.9999))
    torch.testing.assert_close(latents.z.abs(), torch.full((3, 5), 0.25), rtol=2e-6, atol=0)


def test_each_candidate_has_its_own_rate_and_its_own_count() -> None:
    latents = Latents.start(torch.zeros(3, 2), torch.tensor([0.1, 0.2, 0.3]))
    step(latents, torch.ones(3, 2), torch.ones(3))
    torch.testing.assert_close(latents.z[:, 0], -torch.tensor([0.1, 0.2, 0.3]))
    step(latents, torch.ones(3, 2), torch.tensor([0.5, NAN, 0.5]))
    assert latents.steps.tolist() == [2, 0, 2]
    step(latents, torch.ones(3, 2), torch.full((3,), 0.25))
    assert latents.steps.tolist() == [3, 1, 3]
    torch.testing.assert_close(latents.z[1], torch.full((2,), -0.1))  # from 0 again, with half the rate


# Rule 1: remember


def test_a_lower_loss_is_remembered_with_where_it_was() -> None:
    latents = started()
    before = latents.z.clone()
    step(latents, torch.ones(6, 9), torch.arange(6.0))
    assert torch.equal(latents.best_z, before) and torch.equal(latents.best_loss, torch.arange(6.0))
    assert not torch.equal(latents.z, before)
    moved = latents.z.clone()
    step(latents, torch.ones(6, 9), torch.full((6,), 2.5))
    assert latents.best_loss.tolist() == [0, 1, 2, 2.5, 2.5, 2.5]
    assert torch.equal(latents.best_z[:3], before[:3]) and torch.equal(latents.best_z[3:], moved[3:])


def test_a_slightly_lower_loss_is_remembered_but_does_not_end_the_waiting() -> None:
    latents = started(C=3)
    step(latents, torch.ones(3, 9), torch.ones(3))
    assert latents.stalled.tolist() == [0, 0, 0]
    moved = latents.z.clone()
    step(latents, torch.ones(3, 9), torch.tensor([0.995, 0.98, 1.0]))  # the tolerance is 0.01
    assert latents.stalled.tolist() == [1, 0, 1]
    torch.testing.assert_close(latents.best_loss, torch.tensor([0.995, 0.98, 1.0]))
    assert torch.equal(latents.best_z[:2], moved[:2]) and not torch.equal(latents.best_z[2], moved[2])


def test_a_loss_equal_to_the_best_is_no_improvement_even_at_zero() -> None:
    latents = started(C=2)
    for _ in range(2):
        step(latents, torch.ones(2, 9), torch.tensor([0.0, 1.0]), tolerance=0.0)
    assert latents.stalled.tolist() == [1, 1]


# Rule 2: go back


def test_a_candidate_out_of_patience_goes_back_to_its_best() -> None:
    latents = started(C=2)
    start = latents.z.clone()
    for loss in (1.0, 2.0, 2.0, 2.0):
        step(latents, torch.ones(2, 9), torch.full((2,), loss))
    assert torch.equal(latents.z, start) and torch.equal(latents.best_loss, torch.ones(2))
    assert (latents.first == 0).all() and (latents.second == 0).all()
    assert latents.steps.tolist() == latents.stalled.tolist() == [0, 0]
    assert torch.equal(latents.rate, torch.full((2,), 0.05)) and latents.active.all()


def test_a_slight_improvement_that_ends_the_patience_is_where_it_goes_back_to() -> None:
    latents = started(C=1)
    for loss in (1.0, 2.0, 2.0):
        step(latents, torch.ones(1, 9), torch.tensor([loss]))
    here = latents.z.clone()
    step(latents, torch.ones(1, 9), torch.tensor([0.999]))
    assert latents.steps.item() == 0 and torch.equal(latents.z, here) and torch.equal(latents.best_z, here)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_loss_that_is_not_finite_sends_back(bad: float) -> None:
    latents = started(C=2)
    start = latents.z.clone()
    step(latents, torch.ones(2, 9), torch.ones(2))
    step(latents, torch.ones(2, 9), torch.tensor([bad, 0.5]))
    assert torch.equal(latents.z[0], start[0]) and latents.best_loss.tolist() == [1.0, 0.5]
    assert latents.steps.tolist() == [0, 2] and latents.active.all()
    torch.testing.assert_close(latents.rate, torch.tensor([0.05, 0.1]))


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("place", [0, 7, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_one_number_of_a_gradient_that_is_not_finite_sends_back(bad: float, place: int, dtype: torch.dtype) -> None:
    """Its loss was good, so the place is remembered, and it starts again from there with a smaller rate."""
    latents = started(C=3)
    start, grad = latents.z.clone(), torch.ones(3, 9, dtype=dtype)
    grad[1, place] = bad
    step(latents, grad, torch.ones(3))
    assert torch.equal(latents.z[1], start[1]) and latents.steps.tolist() == [1, 0, 1]
    assert latents.best_loss.tolist() == [1, 1, 1] and latents.active.all()
    assert all(x.isfinite().all() for x in (latents.z, latents.first, latents.second))


def test_a_candidate_whose_rate_falls_below_the_least_gives_up_at_its_best() -> None:
    latents = started(C=1, rate=0.1)
    start = latents.z.clone()
    step(latents, torch.ones(1, 9), torch.ones(1), least=0.03)
    for active in (True, False):
        step(latents, torch.ones(1, 9), torch.tensor([NAN]), least=0.03)
        assert latents.active.item() is active
    assert torch.equal(latents.z, start) and torch.equal(latents.z, latents.best_z)


def test_a_rate_equal_to_the_least_goes_on() -> None:
    latents = started(C=1, rate=0.5)
    step(latents, torch.ones(1, 9), torch.ones(1))
    step(latents, torch.ones(1, 9), torch.tensor([NAN]), least=0.25)
    assert latents.active.item() and latents.rate.item() == 0.25


def test_a_candidate_that_never_had_a_finite_loss_gives_up_where_it_is() -> None:
    latents = started(C=2)
    start = latents.z.clone()
    latents.best_z.fill_(7.0)  # nothing was remembered, so it does not matter what lies here
    step(latents, torch.ones(2, 9), torch.tensor([NAN, 1.0]))
    assert latents.active.tolist() == [False, True]
    assert torch.equal(latents.z[0], start[0]) and latents.best_loss[0] == INF


# Those that gave up


def test_inactive_candidates_are_not_touched() -> None:
    """Bit for bit, whatever they, their loss and their gradient hold."""
    latents = started(C=40)
    for tensor in latents.tensors()[:6]:
        tensor[::3] = NAN
    latents.steps[::3], latents.stalled[::3], latents.active[::3] = 5, 77, False
    before = copied(latents)
    for at in range(5):
        grad, loss = troubled(40, 9, at)
        grad[::6], loss[::9] = NAN, NAN
        step(latents, grad, loss)
    assert all(same_bits(a[::3], b[::3]) for a, b in zip(latents.tensors(), before.tensors(), strict=True))
    assert not torch.equal(latents.z[1::3], before.z[1::3])


# Invariants


def test_candidates_do_not_see_each_other() -> None:
    """In any order, and beside any others, a candidate takes the same steps to the last bit."""
    latents, order = started(C=30), torch.randperm(30)[:17]
    few = latents.keep(order)
    for at in range(10):
        grad, loss = troubled(30, 9, at)
        step(latents, grad, loss)
        step(few, grad[order], loss[order])
    assert all(same_bits(a, b[order]) for a, b in zip(few.tensors(), latents.tensors(), strict=True))


def test_results_do_not_depend_on_the_number_of_threads_or_the_run() -> None:
    L = 40 if TRITON else 700  # more numbers than a C++ task takes
    origin, threads, results = started(C=50, L=L), torch.get_num_threads(), []
    for count in (1, 1, 2, 3):
        torch.set_num_threads(count)
        latents = copied(origin)
        for at in range(4):
            step(latents, *troubled(50, L, at))
        results.append(latents.tensors())
    torch.set_num_threads(threads)
    assert all(same_bits(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_a_gradient_of_any_dtype_is_taken_at_its_value(dtype: torch.dtype) -> None:
    latents = started()
    plain = copied(latents)
    grad, loss = torch.randn(6, 9).to(dtype), torch.rand(6).to(dtype)
    step(latents, grad, loss)
    step(plain, grad.float(), loss.float())
    assert all(same_bits(a, b) for a, b in zip(latents.tensors(), plain.tensors(), strict=True))


@pytest.mark.skipif(TRITON, reason="Triton kernels take no fp64")
def test_fp64_latents_take_gradients_of_any_dtype() -> None:
    latents = started(dtype=torch.float64)
    plain = copied(latents)
    grad, loss = torch.randn(6, 9).bfloat16(), torch.rand(6).half()
    step(latents, grad, loss)
    step(plain, grad.double(), loss.double())
    assert all(same_bits(a, b) for a, b in zip(latents.tensors(), plain.tensors(), strict=True))


@pytest.mark.parametrize(
    "arrange", [lambda x: x.t().contiguous().t(), lambda x: torch.cat([x, x], -1)[:, :9], lambda x: x[:1].expand(6, 9)]
)
def test_any_strides_of_the_gradient_give_the_same(arrange: Callable[[Tensor], Tensor]) -> None:
    latents = started()
    plain = copied(latents)
    grad, loss = arrange(torch.randn(6, 9)), torch.rand(6, 2)[:, 0]
    step(latents, grad, loss)
    step(plain, grad.contiguous(), loss.contiguous())
    assert all(same_bits(a, b) for a, b in zip(latents.tensors(), plain.tensors(), strict=True))


def test_a_search_finds_the_minimum_and_ends() -> None:
    target = torch.randn(8, 5)
    latents = Latents.start(torch.zeros(8, 5), 0.3)
    for _ in range(300):
        difference = latents.z - target
        step(latents, 2 * difference, difference.square().sum(1), patience=5, least=1e-2)
    assert (latents.best_loss < 1e-2).all() and not latents.active.any()


def test_no_candidates_take_no_step() -> None:
    latents = Latents.start(torch.zeros(0, 5), 0.1)
    step(latents, torch.zeros(0, 5), torch.zeros(0))
    assert len(latents) == 0


# The state


def test_starting_copies_the_latents() -> None:
    z = torch.randn(4, 3).t()
    latents = Latents.start(z, 0.1)
    before = z.clone()
    step(latents, torch.ones(3, 4), torch.ones(3))
    assert torch.equal(z, before) and len(latents) == 3 and torch.equal(latents.best_z, before)


def test_keeping_some_copies_all_that_is_known_of_them() -> None:
    latents = started()
    step(latents, torch.randn(6, 9), torch.rand(6))
    few = latents.keep(torch.tensor([4, 1]))
    assert len(few) == 2
    assert all(torch.equal(a, b[[4, 1]]) for a, b in zip(few.tensors(), latents.tensors(), strict=True))
    step(few, torch.ones(2, 9), torch.zeros(2))
    assert not torch.equal(few.z, latents.z[[4, 1]])


def test_the_raw_op_refuses_rows_it_would_run_past() -> None:
    latents = started()
    arguments = [0.9, 0.999, 1e-8, 3, 0.01, 0.5, 1e-3]
    if serving("cpu") != "cpp":
        pytest.skip("torch checks shapes by itself")
    for place in range(9):
        state = list(latents.tensors())
        state[place] = state[place][:3]
        with pytest.raises(RuntimeError, match="latent_adam"):
            torch.ops.compgen.latent_adam(*state, torch.ones(6, 9), torch.ones(6), *arguments)


# torch's machinery


def test_opcheck_finds_nothing() -> None:
    arguments = (torch.ones(6, 9), torch.ones(6), 0.9, 0.999, 1e-8, 3, 0.01, 0.5, 1e-3)
    torch.library.opcheck(torch.ops.compgen.latent_adam.default, (*started().tensors(), *arguments))


def test_compiles_as_one_graph() -> None:
    torch.compiler.reset()
    target = torch.randn(6, 9)

    def search(latents: Latents) -> Tensor:
        for _ in range(3):
            difference = latents.z - target
            step(latents, difference, difference.square().sum(1))
        return latents.z * 2

    latents = started()
    compiled, plain = copied(latents), copied(latents)
    found = torch.compile(search, fullgraph=True, dynamic=True, backend="aot_eager")(compiled)
    torch.testing.assert_close(found, search(plain))
    torch.testing.assert_close(compiled.tensors(), plain.tensors())
    assert not torch.equal(plain.z, latents.z)


def test_a_graph_that_holds_the_old_latents_is_stale_after_a_step() -> None:
    latents, weight = started(), torch.ones(9, requires_grad=True)
    y = (latents.z * weight).sum()
    step(latents, torch.ones(6, 9), torch.ones(6))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


# The reference, and wrong versions of it


def assert_steps_by_the_rules(function: Callable[..., None]) -> None:
    latents = started(C=60, dtype=torch.float64)
    oracle = Oracle(latents)
    for at in range(30):
        grad, loss = troubled(60, 9, at)
        function(*latents.tensors(), grad, loss, 0.9, 0.999, 1e-8, 3, 0.01, 0.5, 0.03)
        oracle.step(grad, loss, least=0.03)
        assert_follows(latents, oracle, 1e-12)


def test_the_reference_is_the_oracle_in_fp64() -> None:
    assert_steps_by_the_rules(reference)


MUTANTS = {
    "best is not remembered": ("torch.where(better[:, None], z, best_z)", "best_z"),
    "any lower loss ends the waiting": ("best_loss * (1 - tolerance)", "best_loss"),
    "one step too patient": ("waited >= patience", "waited > patience"),
    "broken gradients are taken": (" | ~g.isfinite().all(1)", ""),
    "moments survive going back": ("(first, torch.where(back[:, None], 0, new_first))", "(first, new_first)"),
    "steps survive going back": ("torch.where(back, 0, steps + 1)", "steps + 1"),
    "the hopeless go on": ("hopeless | (lower_rate < least)", "lower_rate < least"),
    "the old rate decides": ("(lower_rate < least)", "(rate < least)"),
    "the inactive are touched": ("torch.where(active.view(-1, *[1] * (old.dim() - 1)), new, old)", "new"),
    "no bias correction": ("(1 - beta2**t)", "(1 - 0 * t)"),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_breaks_the_rules(mutant: str) -> None:
    with pytest.raises(AssertionError):
        assert_steps_by_the_rules(mutated(reference, *MUTANTS[mutant]))


def mutated(function: Callable[..., Any], right: str, wrong: str) -> Callable[..., Any]:
    """The function with one expression of its source exchanged."""
    source = inspect.getsource(function)
    assert source.count(right) == 1, f"what the mutant changes is no longer there: {right}"
    names = dict(vars(inspect.getmodule(function)))
    exec(source.replace(right, wrong), names)
    return names[function.__name__]  # type: ignore[no-any-return]


# Refusals


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"betas": (0.9, 1.0)}, r"betas is \(0.9, 1.0\); expected two numbers from 0 to below 1"),
        ({"eps": 0.0}, r"eps is 0.0; expected a small positive number such as 1e-8"),
        ({"patience": 0}, r"patience is 0; expected at least one step"),
        ({"tolerance": 1.0}, r"tolerance is 1.0; expected a part of the loss, from 0 to below 1"),
        ({"shrink": 0.0}, r"shrink is 0.0; expected a factor above 0 and at most 1"),
        ({"least": -1.0}, r"least is -1.0; expected the smallest step size worth taking, or 0"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        step(started(), torch.ones(6, 9), torch.ones(6), **settings)


@pytest.mark.parametrize(
    ("grad", "loss", "sentence"),
    [
        (
            torch.ones(6, 8),
            torch.ones(6),
            r"grad is torch.float32 \[6, 8\] on cpu; expected floating \[C, L\] = \[6, 9\]",
        ),
        (
            torch.ones(6, 9),
            torch.ones(()),
            r"loss is torch.float32 \[\] on cpu; expected floating \[C\] = \[6\] on cpu",
        ),
        (torch.ones(6, 9).long(), torch.ones(6), r"grad is torch.int64"),
        (torch.ones(6, 9, device="meta"), torch.ones(6), r"grad is torch.float32 \[6, 9\] on meta"),
        (torch.ones(6, 9, requires_grad=True), torch.ones(6), r"grad requires grad, .*; pass grad.detach\(\)"),
        (torch.ones(6, 9), torch.ones(6, requires_grad=True), r"loss requires grad, .*; pass loss.detach\(\)"),
    ],
)
def test_a_gradient_or_loss_that_does_not_fit_is_refused(grad: Tensor, loss: Tensor, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        step(started(), grad, loss)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda: Latents.start(torch.ones(3), 0.1),
            r"z is torch.float32 \[3\]; expected fp32 or fp64 \[C, L\] with L from",
        ),
        (
            lambda: Latents.start(torch.ones(3, 4097), 0.1),
            r"z is torch.float32 \[3, 4097\]; expected .* L from 1 to 4096",
        ),
        (lambda: Latents.start(torch.ones(3, 2).half(), 0.1), r"z is torch.float16 \[3, 2\]; expected fp32 or fp64"),
        (lambda: Latents.start(torch.ones(3, 2, requires_grad=True), 0.1), r"z requires grad, .*; pass z.detach\(\)"),
        (
            lambda: Latents.start(torch.ones(3, 2), torch.ones(2)),
            r"rate has shape \[2\]; expected a number, or \[C\] = \[3",
        ),
        (
            lambda: replace(started(), rate=torch.ones(5)),
            r"rate is torch.float32 \[5\] on cpu; expected torch.float32 \[6",
        ),
        (
            lambda: replace(started(), steps=torch.ones(6)),
            r"steps is torch.float32 \[6\] on cpu; expected torch.int32 \[6",
        ),
        (
            lambda: replace(started(), first=torch.ones(9, 6).t()),
            r"first has strides \(1, 6\); expected dense: call .cont",
        ),
        (lambda: started().keep(torch.ones(6, dtype=torch.bool)), r"index is torch.bool \[6\]; .* mask.nonzero\(\)"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(make: Callable[[], Latents], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make()


@pytest.mark.skipif(not TRITON, reason="the other backends take fp64")
def test_triton_refuses_fp64() -> None:
    with pytest.raises(ValueError, match=r"z is torch.float64, which is for CPU tensors"):
        step(started(dtype=torch.float64), torch.ones(6, 9), torch.ones(6))
