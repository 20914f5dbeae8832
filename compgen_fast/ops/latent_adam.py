"""One step of gradient search for many candidates at once: Adam, the best so far, going back, and giving up, in place.

``Latents`` holds what the search knows of C candidates z [C, L]. Given the loss and its gradient at z, ``latent_adam``
does for every active candidate, each with its own step size (rate) and its own count of steps:

    1. remember     if loss < best_loss:  best_loss, best_z ← loss, z
                    stalled ← 0 if loss < old best_loss · (1 − tolerance) else stalled + 1
    2. go back      if stalled ≥ patience, or the loss or part of the gradient is not finite:
                    z ← best_z;  moments, steps, stalled ← 0;  rate ← rate · shrink;  and if rate < least, give up:
                    active ← False. A candidate that never had a finite loss has nowhere to go: it gives up where it is.
    3. or step      steps ← steps + 1;  first ← β₁ first + (1 − β₁) grad;  second ← β₂ second + (1 − β₂) grad²
                    z ← z − rate · m / (√v + eps)      m = first / (1 − β₁^steps),  v = second / (1 − β₂^steps)

A candidate that gave up is not touched any more, whatever its loss and gradient hold. Nothing waits for the device: ask
``active`` now and then, and drop those that gave up with ``Latents.keep``. What it is not for: weights of a model, and
losses below zero, for which a tolerance relative to the loss means nothing.

The function named ``reference`` is the specification, the fp64 oracle of the tests and the torch backend.
"""

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from compgen_fast.ops.arguments import DTYPES
from compgen_fast.ops.backends import define_op

WIDEST = 64 * 64


@dataclass(frozen=True, eq=False)
class Latents:
    """The state of a search over C candidates of L numbers each; ``latent_adam`` changes its tensors in place."""

    z: Tensor  # [C, L], fp32 or fp64, where each candidate is
    first: Tensor  # [C, L], moments of the gradient
    second: Tensor  # [C, L]
    best_z: Tensor  # [C, L], where the loss was lowest
    best_loss: Tensor  # [C], inf before the first step
    rate: Tensor  # [C], step sizes
    steps: Tensor  # int32 [C], since the moments were zero
    stalled: Tensor  # int32 [C], steps without enough improvement
    active: Tensor  # bool [C]

    def __post_init__(self) -> None:
        z = self.z
        if z.dim() != 2 or not 1 <= z.shape[1] <= WIDEST or z.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"Latents: z is {z.dtype} {list(z.shape)}; expected fp32 or fp64 [C, L] with L from 1 to {WIDEST}; "
                "cast or flatten it"
            )
        kinds = {"steps": torch.int32, "stalled": torch.int32, "active": torch.bool}
        for field in fields(self):
            name, tensor = field.name, getattr(self, field.name)
            shape = z.shape if name in ("z", "first", "second", "best_z") else z.shape[:1]
            dtype = kinds.get(name, z.dtype)
            if tensor.shape != shape or tensor.dtype != dtype or tensor.device != z.device:
                raise ValueError(
                    f"Latents: {name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}; expected {dtype} "
                    f"{list(shape)} on {z.device}, as z has it"
                )
            if not tensor.is_contiguous():
                raise ValueError(f"Latents: {name} has strides {tensor.stride()}; expected dense: call .contiguous()")
            _refuse_grad("Latents", name, tensor)

    @classmethod
    def start(cls, z: Tensor, rate: float | Tensor) -> "Latents":
        """Candidates at z [C, L], which is copied, with one step size for all or a step size for each, [C]."""
        _refuse_grad("Latents.start", "z", z)
        rates = torch.as_tensor(rate, dtype=z.dtype, device=z.device)
        if rates.shape not in ((), z.shape[:1]):
            raise ValueError(
                f"Latents.start: rate has shape {list(rates.shape)}; expected a number, or [C] = {list(z.shape[:1])}"
            )
        each, z = z.new_zeros(z.shape[:1]), z.clone(memory_format=torch.contiguous_format)
        return cls(
            z=z,
            first=torch.zeros_like(z),
            second=torch.zeros_like(z),
            best_z=z.clone(),
            best_loss=torch.full_like(each, torch.inf),
            rate=each + rates,
            steps=each.int(),
            stalled=each.int(),
            active=torch.ones_like(each, dtype=torch.bool),
        )

    def keep(self, index: Tensor) -> "Latents":
        """Copies of the candidates at index, int64 [K]; of those still searching: active.nonzero().squeeze(1)."""
        if index.dtype != torch.int64 or index.dim() != 1:
            raise ValueError(
                f"Latents.keep: index is {index.dtype} {list(index.shape)}; expected torch.int64 [K]; of a mask pass "
                "mask.nonzero().squeeze(1)"
            )
        return Latents(*(tensor.index_select(0, index) for tensor in self.tensors()))

    def tensors(self) -> tuple[Tensor, ...]:
        """All fields, in order: the first arguments of the raw op."""
        return (
            self.z,
            self.first,
            self.second,
            self.best_z,
            self.best_loss,
            self.rate,
            self.steps,
            self.stalled,
            self.active,
        )

    def __len__(self) -> int:
        return len(self.z)


def latent_adam(
    latents: Latents,
    grad: Tensor,
    loss: Tensor,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    patience: int,
    tolerance: float,
    shrink: float,
    least: float,
) -> None:
    """One step for every active candidate, in place; the formulas are at the top of this module.

    Args:
        latents: the candidates; nothing of them may be shared with another tensor that must not change.
        grad: [C, L] of any floating dtype and strides, the gradient at ``latents.z``.
        loss: [C] of any floating dtype, at least 0, the loss at ``latents.z``.
        betas, eps: as in torch.optim.Adam.
        patience: steps without improvement, at least 1, after which a candidate goes back to its best.
        tolerance: the part of the best loss, from 0 to below 1, by which a loss must be lower to be an improvement.
        shrink: what the step size is multiplied with on going back, above 0 and at most 1.
        least: the step size below which a candidate gives up.

    The step is not differentiated: a grad or loss that requires grad is refused, as is a state that does.
    """
    _check_step(latents, grad, loss)
    _check_settings(betas, eps, patience, tolerance, shrink, least)
    torch.ops.compgen.latent_adam(
        *latents.tensors(), grad, loss, *map(float, betas), eps, patience, tolerance, shrink, least
    )
    if not torch.compiler.is_compiling():  # the kernels write past autograd, which must know that old graphs are stale
        torch.autograd.graph.increment_version(latents.tensors())


def _refuse_grad(where: str, name: str, tensor: Tensor) -> None:
    if tensor.requires_grad:
        raise ValueError(f"{where}: {name} requires grad, but steps are not differentiated; pass {name}.detach()")


def _check_step(latents: Latents, grad: Tensor, loss: Tensor) -> None:
    z = latents.z
    for name, tensor, form, shape in (("grad", grad, "[C, L]", z.shape), ("loss", loss, "[C]", z.shape[:1])):
        if tensor.shape != shape or tensor.dtype not in DTYPES or tensor.device != z.device:
            raise ValueError(
                f"latent_adam: {name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}; expected floating "
                f"{form} = {list(shape)} on {z.device}, as the latents have it"
            )
        _refuse_grad("latent_adam", name, tensor)


def _check_settings(
    betas: tuple[float, float], eps: float, patience: int, tolerance: float, shrink: float, least: float
) -> None:
    for name, value, right, expected in (
        ("betas", betas, all(0 <= beta < 1 for beta in betas), "two numbers from 0 to below 1"),
        ("eps", eps, eps > 0, "a small positive number such as 1e-8"),
        ("patience", patience, patience >= 1, "at least one step"),
        ("tolerance", tolerance, 0 <= tolerance < 1, "a part of the loss, from 0 to below 1"),
        ("shrink", shrink, 0 < shrink <= 1, "a factor above 0 and at most 1"),
        ("least", least, least >= 0, "the smallest step size worth taking, or 0"),
    ):
        if not right:
            raise ValueError(f"latent_adam: {name} is {value}; expected {expected}")


def reference(
    z: Tensor,
    first: Tensor,
    second: Tensor,
    best_z: Tensor,
    best_loss: Tensor,
    rate: Tensor,
    steps: Tensor,
    stalled: Tensor,
    active: Tensor,
    grad: Tensor,
    loss: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    patience: int,
    tolerance: float,
    shrink: float,
    least: float,
) -> None:
    """The op in plain torch: the new state beside the old one, then chosen where a candidate is active."""
    g, loss = grad.to(z.dtype), loss.to(z.dtype)
    known = loss.isfinite()
    better = known & (loss < best_loss)
    new_best_loss = torch.where(better, loss, best_loss)
    new_best_z = torch.where(better[:, None], z, best_z)
    waited = torch.where(known & (loss < best_loss * (1 - tolerance)), 0, stalled + 1)

    back = (waited >= patience) | ~known | ~g.isfinite().all(1)
    hopeless = new_best_loss.isinf()
    lower_rate = rate * shrink

    t = (steps + 1).double()[:, None]  # 1 − β^t of the first steps would lose its digits in fp32
    new_first = beta1 * first + (1 - beta1) * g
    new_second = beta2 * second + (1 - beta2) * g * g
    m, v = new_first / (1 - beta1**t).to(z.dtype), new_second / (1 - beta2**t).to(z.dtype)
    stepped = z - rate[:, None] * m / (v.sqrt() + eps)

    gone_back = torch.where(hopeless[:, None], z, new_best_z)
    for old, new in (
        (z, torch.where(back[:, None], gone_back, stepped)),
        (first, torch.where(back[:, None], 0, new_first)),
        (second, torch.where(back[:, None], 0, new_second)),
        (best_z, new_best_z),
        (best_loss, new_best_loss),
        (rate, torch.where(back, lower_rate, rate)),
        (steps, torch.where(back, 0, steps + 1)),
        (stalled, torch.where(back, 0, waited)),
        (active, ~(back & (hopeless | (lower_rate < least)))),  # last: the others ask for the old one
    ):
        old.copy_(torch.where(active.view(-1, *[1] * (old.dim() - 1)), new, old))


def _fake(*arguments: Any) -> None:
    return None


define_op(
    "latent_adam",
    "(Tensor(a!) z, Tensor(b!) first, Tensor(c!) second, Tensor(d!) best_z, Tensor(e!) best_loss, Tensor(f!) rate,"
    " Tensor(g!) steps, Tensor(h!) stalled, Tensor(i!) active, Tensor grad, Tensor loss, float beta1, float beta2,"
    " float eps, int patience, float tolerance, float shrink, float least) -> ()",
    reference=reference,
    triton="latent_adam:step",
    fake=_fake,
    public=True,
)
