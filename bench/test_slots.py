"""The cases of the suite `slots` under pytest-benchmark: `make bench` prints the contenders of a case side by side.

For looking around while working on a kernel. Ratios to quote come from `cgf bench slots`, which interleaves the
contenders; pytest-benchmark runs them one after the other.
"""

import functools

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from compgen_fast.bench.harness import Case, Direction, Outputs, Tried, quiet_process, try_all
from compgen_fast.bench.slots import cases

ROUNDS = 10
# In this order the contenders of a case follow each other, so that its tensors are made and compiled for only once.
ALL = [
    pytest.param(case, contender.name, direction, id=f"{case.name}, {direction}, {contender.name}".replace(" ", "_"))
    for case in cases("cpu")
    for direction in case.directions
    for contender in case.contenders
]


@functools.lru_cache(maxsize=1)
def tried(case: Case) -> tuple[str, dict[str, Tried]]:
    """The gate's verdict, and each contender by name."""
    _, contenders, verdict = try_all(case)
    return verdict, {t.contender.name: t for t in contenders}


@pytest.mark.parametrize(("case", "name", "direction"), ALL)
def test_speed(benchmark: BenchmarkFixture, case: Case, name: str, direction: Direction) -> None:
    with quiet_process(threads=1):
        verdict, contenders = tried(case)
        assert not verdict
        if not contenders[name].can(direction):
            pytest.skip(f"{name} is unsupported: {contenders[name].reason}")
        benchmark.group = f"{case.name}, {direction}"
        benchmark.name = name
        run(benchmark, contenders[name], direction)


def run(benchmark: BenchmarkFixture, contender: Tried, direction: Direction) -> None:
    runner = contender.runner
    assert runner is not None

    def forward_first() -> tuple[tuple[Outputs], dict[str, object]]:
        return (runner.forward(),), {}

    if direction == "backward":
        benchmark.pedantic(runner.backward, setup=forward_first, rounds=ROUNDS, warmup_rounds=1)
    else:
        benchmark.pedantic(getattr(runner, direction), rounds=ROUNDS, warmup_rounds=1)
