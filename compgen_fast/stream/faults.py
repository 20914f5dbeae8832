"""What can be wrong with stored data, by name, and the list of what was set aside while reading it.

A bad sample or shard does not end a run: it is quarantined, another sample stands in for it, and the list says which
and why. Past a budget the list itself is the error.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field


class StreamError(Exception):
    """Something about a packed folder, told in a sentence that names it and says what to do."""


class BadShard(StreamError):
    """No sample of this shard can be read."""


class BadSample(StreamError):
    """This sample cannot be read; its neighbours can."""


@dataclass(frozen=True)
class Fault:
    """One thing set aside: a sample, or a shard with all its samples (``key`` is then empty)."""

    shard: str
    key: str
    reason: str
    samples: int = 1

    def __str__(self) -> str:
        return f"{self.shard}{f', key {self.key}' if self.key else f', all {self.samples} samples'}: {self.reason}"


class OverBudget(StreamError):
    """More was quarantined than the budget allows; ``faults`` is the list."""

    def __init__(self, faults: Iterable[Fault], allowed: int, total: int) -> None:
        self.faults = tuple(faults)
        listed = "".join(f"\n  {fault}" for fault in self.faults[:20])
        more = f"\n  … and {len(self.faults) - 20} more" if len(self.faults) > 20 else ""
        bad = sum(fault.samples for fault in self.faults)
        super().__init__(
            f"{bad} of {total} samples are bad, and the budget allows {allowed}; repair or pack them again, or raise "
            f"budget= (--data.budget in training):{listed}{more}"
        )


@dataclass
class Quarantine:
    """The faults met so far, each once."""

    total: int
    budget: float
    faults: dict[tuple[str, str], Fault] = field(default_factory=dict)

    @property
    def samples(self) -> int:
        """How many samples are set aside. A sample of a shard that is set aside later counts twice."""
        return sum(fault.samples for fault in self.faults.values())

    @property
    def allowed(self) -> int:
        return int(self.budget * self.total)

    def add(self, faults: Iterable[Fault]) -> None:
        """Takes note of faults, and raises `OverBudget` when they are too many."""
        for fault in faults:
            self.faults.setdefault((fault.shard, fault.key), fault)
        if self.samples > self.allowed:
            raise OverBudget(self.faults.values(), self.allowed, self.total)
