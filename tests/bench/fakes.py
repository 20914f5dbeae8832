"""A tiny case with contenders whose behaviour is known, and a clock that only moves when they say so."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from compgen_fast.bench.harness import Case, Contender, Outputs, Row, Stamp

STAMP = Stamp(1, "quick", "an abacus", "0", "2", "abc1234", "2026-01-01T00:00:00+00:00")


@dataclass
class FakeClock:
    """Seconds pass when a contender calls `spend`; nothing else takes time."""

    now: float = 0.0
    log: list[str] = field(default_factory=list)

    def ready(self) -> None:
        pass

    def mark(self) -> float:
        return self.now

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def spend(self, seconds: float) -> None:
        self.now += seconds

    def contender(self, name: str, *costs: float) -> Contender:
        """Right, and slow: each pass takes the next of ``costs`` (then the last) in seconds, half of it backward."""
        calls = iter(costs)
        last = costs[-1]

        def call(x: Tensor, y: Tensor) -> Outputs:
            self.log.append(name)
            cost = next(calls, last)
            self.spend(cost / 2)
            outputs = product(x, y)
            outputs[0].register_hook(lambda gradient: self.spend(cost / 2))
            return outputs

        return Contender(name, call)


def product(x: Tensor, y: Tensor) -> Outputs:
    return x * y, x + y


def inputs() -> Mapping[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(5, 3, generator=generator) for name in ("x", "y")}


def make_case(ours: Callable[..., Outputs] | Contender = product, *peers: Contender) -> Case:
    return Case(
        suite="fake",
        name="product 5 × 3",
        inputs=inputs,
        outputs=("product", "sum"),
        oracle=product,
        ours=ours if isinstance(ours, Contender) else Contender("ours", ours, backend="cpp"),
        peers=peers or (Contender("eager", product),),
    )


def make_row(**changes: object) -> Row:
    row = Row(
        "fake", "product", "full", "eager", 2.0, 1.5, 2.5, 1.2, 1e-7, 1, "float32", "cpu", None, None, None, 5,
        1.0, 1.9, 2.0, 2.1, 1e-7, 100, 120, 1.01, "cpp", "quick", "an abacus", "0", "2", None, "2026-01-01",
    )  # fmt: skip
    return replace(row, **changes)  # type: ignore[arg-type]
