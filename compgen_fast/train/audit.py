"""Before the first step on several ranks: is what they compute together what one process would compute alone?

Wrong distributed training rarely fails; it trains a little worse. So the first batch goes once through the engine and
once, on rank 0, through the bare module with all ranks' samples at once, and the gradients are compared. Nothing that
training depends on is changed: gradients are dropped, buffers and random states put back, and the batch is handed in.
"""

import math
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from compgen_fast import __version__
from compgen_fast.draws import Draws
from compgen_fast.env import installed_version
from compgen_fast.train.engine import imported
from compgen_fast.train.ranks import Ranks

Gradients = dict[str, Tensor]
PACKAGES = ("torch", "triton", "deepspeed", "numpy")
TOLERANCE = 1e-5
# Rounding leaves something where a gradient is zero by structure (a bias before a softmax), however little: parameters
# are compared relative to their own gradient plus this share of the whole one.
SHARE_OF_ALL = 1e-2
SAME_START = "ranks must start from the same weights, and nothing may change them on one rank alone"


class AuditFailed(RuntimeError):
    """Ranks disagree with each other, or with a single process."""


@dataclass(frozen=True)
class Audit:
    """What was compared, and the largest relative error found."""

    ranks: int
    parameters: int
    samples: int
    error: float
    worst: str
    """The parameter it was found in."""

    def __str__(self) -> str:
        return (
            f"audit: {self.ranks} ranks agree on {self.parameters} parameters and {self.samples} distinct samples; "
            f"gradients are those of one process within {self.error:.1e} ({self.worst})"
        )


def audit(
    engine: Any,
    ranks: Ranks,
    images: Tensor,
    factors: Mapping[str, Tensor],
    keys: Sequence[str],
    draws: Callable[[int, int], Draws],
    step: int = 0,
) -> Audit:
    """Compares the ranks' first step with a single process's, on all ranks together; prints a line on rank 0.

    Args:
        engine: DeepSpeed's, at ZeRO stage 0, 1 or 2, before its first step.
        images, factors: this rank's samples: uint8 [b, H, W, 3], and [b] by name. Some are used: as many from each rank
            as make up a batch of about b, so that rank 0 needs no more memory than a step does.
        keys: the samples' names, of those that are valid; ranks may not share any.
        draws: (first, total) → the draws for rows first … of a batch of total.
        step: what the model is told; choose one at which all losses have their full weight.

    What was put around this module's forward (autocast, a compiler) is taken off for the audit: in bf16 the order of a
    sum alone changes some gradients by 15 %, which would hide everything.

    Raises `AuditFailed` on every rank, with the same sentence.
    """
    module: nn.Module = engine.module
    _same_software(ranks)
    _same_numbers(ranks, "parameter", dict(module.named_parameters()), SAME_START)
    _same_numbers(ranks, "buffer", dict(module.named_buffers()), SAME_START)
    _distinct(ranks, keys)
    rows = min(len(images), max(2, len(images) // ranks.size))
    # Clones, since a view is sent to other ranks with all that it is a view of.
    share = _Share(images[:rows].clone(), {name: values[:rows].clone() for name, values in factors.items()})
    with _unchanged(module, ranks.device):
        reduced = _reduced(engine, share, draws(ranks.rank * rows, ranks.size * rows), step)
        _same_numbers(
            ranks, "gradient of parameter", reduced, "it was reduced over ranks, so something changed it later"
        )
        shares: list[_Share] = ranks.gather(share.to("cpu"))
        alone = (
            _alone(module, _joined(shares).to(ranks.device), draws(0, ranks.size * rows), step) if ranks.first else {}
        )
    error, worst = ranks.gather(_largest_error(alone, reduced) if ranks.first else (0.0, ""))[0]
    if not error <= TOLERANCE:
        raise AuditFailed(
            f"audit: the gradient of parameter {worst} is off by {error:.1e} of what one process computes on the same "
            f"{ranks.size * rows} samples (allowed: {TOLERANCE:g}). The loss must be a mean over samples, and what is "
            "drawn at random must come from `draws`"
        )
    passed = Audit(ranks.size, len(reduced), sum(ranks.gather(len(keys))), error, worst)
    if ranks.first:
        print(passed, flush=True)
    return passed


@dataclass(frozen=True)
class _Share:
    """One rank's samples."""

    images: Tensor
    factors: dict[str, Tensor]

    def to(self, device: str | torch.device) -> "_Share":
        return _Share(self.images.to(device), {name: values.to(device) for name, values in self.factors.items()})


def _joined(shares: Sequence[_Share]) -> _Share:
    return _Share(
        torch.cat([share.images for share in shares]),
        {name: torch.cat([share.factors[name] for share in shares]) for name in shares[0].factors},
    )


def _same_software(ranks: Ranks) -> None:
    found = {package: installed_version(package) for package in PACKAGES}
    found |= {"compgen-fast": __version__, "python": platform.python_version()}
    found["the table of kernel configurations"] = _kernel_configurations(ranks.device)
    all_found = ranks.gather(found)
    for rank, other in enumerate(all_found):
        for what, value in other.items():
            if value != all_found[0][what]:
                raise AuditFailed(
                    f"audit: {what} is {all_found[0][what]} on rank 0 and {value} on rank {rank}; install the same on "
                    "all machines, or kernels and results differ between ranks"
                )


def _kernel_configurations(device: torch.device) -> str:
    """The architecture whose rows kernels use, and their hash: with other rows, ranks add in another order."""
    if find_spec("triton") is None:
        return "none, without triton"
    launch = import_module("compgen_fast.kernels.launch")
    name = launch.architecture_of(device)
    return f"{name} {launch.configurations()[name]['hash']}"


def _same_numbers(ranks: Ranks, what: str, tensors: Mapping[str, Tensor], advice: str) -> None:
    """Bit for bit, by a checksum of each."""
    sums = ranks.gather({name: _checksum(tensor) for name, tensor in tensors.items()})
    for rank, other in enumerate(sums):
        differ = [name for name in sums[0] | other if sums[0].get(name) != other.get(name)]
        if differ:
            more = f" (and {len(differ) - 1} more)" if len(differ) > 1 else ""
            raise AuditFailed(f"audit: the {what} {differ[0]}{more} differs between rank 0 and rank {rank}; {advice}")


def _checksum(tensor: Tensor) -> int:
    """Of the bits, each byte by its position: Σ (i mod p + 1) · byte_i, modulo 2⁶⁴."""
    bits = tensor.detach().contiguous().flatten().view(torch.uint8).long()
    return int((bits * (torch.arange(len(bits), device=bits.device) % 1_000_003 + 1)).sum())


def _distinct(ranks: Ranks, keys: Sequence[str]) -> None:
    owner: dict[str, int] = {}
    for rank, others in enumerate(ranks.gather(list(keys))):
        shared = [key for key in others if owner.setdefault(key, rank) != rank]
        if shared:
            shown = ", ".join(shared[:5]) + (" …" if len(shared) > 5 else "")
            raise AuditFailed(
                f"audit: ranks {owner[shared[0]]} and {rank} were given the same {len(shared)} samples: {shown}. Give "
                "the stream rank= and ranks= of this process"
            )


@contextmanager
def _unchanged(module: nn.Module, device: torch.device) -> Iterator[None]:
    """The module as its class defines it; afterwards its buffers and torch's random states are what they were."""
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    around = vars(module).pop("forward", None)
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        if around is not None:
            vars(module)["forward"] = around
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                buffer.copy_(buffers[name])


def _reduced(engine: Any, share: _Share, draws: Draws, step: int) -> Gradients:
    """The mean gradient over ranks, as the optimiser would be given it. Afterwards the engine has none."""
    full_gradient = imported(share.images.device).utils.safe_get_full_grad
    micro_batches: int = engine.gradient_accumulation_steps()
    if micro_batches > 1:  # at stages 0 and 1 gradients are reduced only with the last of them
        engine.set_gradient_accumulation_boundary(True)
    loss = engine(share.images, share.factors, step=step, draws=draws)["loss"]
    engine.backward(loss * micro_batches)  # DeepSpeed divides by their number, even when told not to
    # At stages 1 and 2 each rank holds a part, and this assembles the parts: a collective, parameter by parameter.
    full = {name: full_gradient(parameter) for name, parameter in engine.module.named_parameters()}
    reduced = {name: gradient.clone() for name, gradient in full.items() if gradient is not None}
    engine.zero_grad()  # what stages 1 and 2 have kept as their part is replaced, not added to, by the next backward
    if micro_batches > 1:
        engine._is_gradient_accumulation_boundary = None  # back to counting micro-batches; there is no public way
    return reduced


def _alone(module: nn.Module, share: _Share, draws: Draws, step: int) -> Gradients:
    """What one process computes. Not by .backward(): the engine's hooks would wait for the other ranks."""
    names, parameters = zip(*((n, p) for n, p in module.named_parameters() if p.requires_grad), strict=True)
    loss = module(share.images, share.factors, step=step, draws=draws)["loss"]
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return {name: gradient for name, gradient in zip(names, found, strict=True) if gradient is not None}


def _largest_error(alone: Gradients, reduced: Gradients) -> tuple[float, str]:
    norms = {name: float(gradient.norm()) for name, gradient in alone.items()}
    whole = math.hypot(*norms.values())
    errors = {}
    for name, gradient in reduced.items():
        expected = alone.get(name, torch.zeros_like(gradient))  # absent: the loss does not depend on it
        distance = float(torch.dist(expected, gradient))
        size = norms.get(name, 0.0) + SHARE_OF_ALL * whole
        errors[name] = distance / max(size, sys.float_info.min)
    worst = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])
    return errors[worst], worst
