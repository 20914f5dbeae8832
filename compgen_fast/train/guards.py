"""What a step is checked for: numbers that are not finite, a loss that jumps. A full disk is checkpoints.py's affair.

A normal step pays for none of this. Whether a loss or a gradient norm is finite is known from the metrics; only then is
the step run again by `first_bad_layer`, with every module and every operation of the backward pass looked at.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._C._autograd import _get_sequence_nr
from torch.autograd.graph import Node

from compgen_fast.jets import Jet

Losses = Mapping[str, Tensor]


class NotFinite(RuntimeError):
    """A step whose loss or gradient is not finite; it was not taken."""

    def __init__(self, step: int, what: str, layers: Sequence[str | None], checkpoint: Path | None) -> None:
        """what: such as "loss term 'penalty' is nan". layers: `first_bad_layer` of every rank, in order."""
        found = [f"{layer} (rank {rank})" for rank, layer in enumerate(layers) if layer is not None]
        where = (
            f"first seen in {found[0]}"
            if found
            else "not seen again when the step was repeated without compilation: suspect a compiled or random operation"
        )
        resume = f"the last good checkpoint is {checkpoint}" if checkpoint else "there is no checkpoint yet"
        super().__init__(
            f"step {step}: {what}, {where}. The step was not taken and {resume}. Try a lower learning rate, a smaller "
            "gradient clip, or fp32 if this was bf16."
        )


def not_finite(values: Mapping[str, float]) -> str | None:
    """The first of named numbers that is not finite, in words for `NotFinite`; None if all are."""
    bad = (f"{name} is {value}" for name, value in values.items() if not math.isfinite(value))
    return next(bad, None)


def first_bad_layer(model: nn.Module, run: Callable[[], Losses]) -> str | None:
    """Repeats a step and names where the first number that is not finite comes from; None if all are finite here.

    Args:
        model: the plain module, not the engine around it.
        run: the step's forward, model → named losses with "loss"; its draws must be those of the bad step.

    Looked at, in this order: parameters, what goes into and comes out of each module, the gradients that each operation
    of the backward pass hands on. Gradients are not accumulated and no other rank is waited for, so
    every rank can call this on its own samples.
    """
    for name, parameter in model.named_parameters():
        if not _finite(parameter):
            return f"parameter {name}, already before this step"
    with _Inspection(model) as inspection, torch.compiler.set_stance("force_eager"):
        losses = run()
        inspection.forward_done()
        if inspection.found is None:
            inspection.backward(losses["loss"])
    return inspection.found


class _Inspection:
    """Hooks on every module of one forward, then on every node of its graph."""

    def __init__(self, model: nn.Module) -> None:
        self.found: str | None = None
        self._model = model
        self._names = {module: name or "the model itself" for name, module in model.named_modules()}
        # Operations are numbered as they are made, so a module owns those between its start and its end.
        self._started: list[tuple[nn.Module, int]] = []
        self._spans: list[tuple[int, int, str]] = []
        self._hooks = ExitStack()

    def __enter__(self) -> "_Inspection":
        for module in self._names:
            before = module.register_forward_pre_hook(self._before, with_kwargs=True)
            after = module.register_forward_hook(self._after, with_kwargs=True)
            self._hooks.callback(before.remove)
            self._hooks.callback(after.remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()

    def forward_done(self) -> None:
        """From here on modules only run again to recompute what was checkpointed."""
        self._hooks.close()

    def backward(self, loss: Tensor) -> None:
        """Looks at the gradients of ``loss``. Parameters' .grad and the hooks on it stay untouched."""
        handles = [node.register_hook(self._judge(node)) for node in _nodes(loss)]
        parameters = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        try:
            torch.autograd.grad(loss, parameters, allow_unused=True)
        finally:
            for handle in handles:
                handle.remove()

    def _note(self, where: str) -> None:
        self.found = self.found or where

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not _finite((args, kwargs)):
            if self._started:
                self._note(f"the forward of {self._names[self._started[-1][0]]}, before it calls {self._names[module]}")
            else:
                self._note("the batch itself")
        self._started.append((module, _operations()))

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        start = self._started.pop()[1]
        self._spans.append((start, _operations(), self._names[module]))
        if not _finite(output):
            self._note(f"the output of {self._names[module]} ({type(module).__name__})")

    def _judge(self, node: Node) -> Callable[[Any, Any], None]:
        def look(handed_on: Any, _: Any) -> None:
            if self.found is None and not _finite(handed_on):
                self._note(f"the backward of {self._owner(node)} ({node.name()})")

        return look

    def _owner(self, node: Node) -> str:
        number = node._sequence_nr()
        spans = [(end - start, name) for start, end, name in self._spans if start <= number < end]
        # The shortest is the innermost; of equal ones, which end in this order, the first.
        return min(spans, key=lambda span: span[0])[1] if spans else "the loss"


def _operations() -> int:
    """How many operations this thread has recorded for a backward pass."""
    return _get_sequence_nr()


def _nodes(loss: Tensor) -> Iterator[Node]:
    """Every operation that the gradient of ``loss`` goes through."""
    ahead = [loss.grad_fn] if loss.grad_fn is not None else []
    known = set(ahead)
    while ahead:
        node = ahead.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in known:
                known.add(following)
                ahead.append(following)


def _finite(value: Any) -> bool:
    # Detached: an operation recorded here would be missing when a checkpointed part is computed again.
    return all(bool(tensor.detach().isfinite().all()) for tensor in _floats(value))


def _floats(value: Any) -> Iterator[Tensor]:
    """The tensors of real numbers in nested tuples, lists and dictionaries."""
    if isinstance(value, Jet):
        yield value.channels
    elif isinstance(value, Tensor):
        if value.is_floating_point() or value.is_complex():
            yield value
    elif isinstance(value, Mapping):
        yield from _floats(list(value.values()))
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _floats(part)


class Spike:
    """A loss far above its recent values, told once until it is back.

    Far: more than ``factor`` spreads above the median of the last ``window`` losses. The spread is 1.4826 × the median
    distance from the median, a standard deviation that outliers do not widen, and at least 1 % of the median.
    """

    def __init__(self, window: int = 100, factor: float = 10.0) -> None:
        if window < 2 or factor <= 0:
            raise ValueError(f"Spike: window is {window} and factor {factor}; expected at least 2 losses and above 0")
        self.window, self.factor = window, factor
        self._losses: deque[float] = deque(maxlen=window)
        self._inside = False

    def see(self, step: int, loss: float, keys: Sequence[str]) -> str | None:
        """A warning to print when a spike begins, else None. ``keys`` are the samples of this step.

        Nothing is said before ``window`` losses were seen.
        """
        if not math.isfinite(loss):
            return None
        limit = self._limit()
        self._losses.append(loss)
        began = loss > limit and not self._inside
        self._inside = loss > limit
        if not began:
            return None
        shown = ", ".join(keys[:8]) + (f" and {len(keys) - 8} more" if len(keys) > 8 else "")
        return (
            f"step {step}: the loss jumped to {loss:.6g}, above {limit:.6g}, which is {self.factor:g} spreads over the "
            f"median of the last {self.window} steps; samples of this rank: {shown}"
        )

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self._losses), "inside": self._inside}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where ``state`` was taken; of more losses than the window holds, the last ones count."""
        self._losses = deque(state["losses"], maxlen=self.window)
        self._inside = bool(state["inside"])

    def _limit(self) -> float:
        if len(self._losses) < self.window:
            return math.inf
        losses = np.asarray(self._losses)
        median = float(np.median(losses))
        spread = 1.4826 * float(np.median(np.abs(losses - median)))
        return median + self.factor * max(spread, 0.01 * abs(median))
