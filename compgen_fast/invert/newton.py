"""Latents that explain images, found by second-order steps: Levenberg–Marquardt on the objective of `search`.

    (H + damping · mean(diag H) · 1) δ = −g        H = 2 s JᵀJ + pull · WᵀW        g = 2 s Jᵀr + pull · WᵀW (z − mean)

with r = f(z) − x and J = ∂f/∂z over the pixels shown, s = all pixels ÷ those shown, and W the whitening of the
marginals. A trial costs a decode and a Jacobian dozens, so each Jacobian is tried with several dampings at once and the
best trial is taken, if it is better than where it came from.

What it is for: few latents, where a start is far off, or to know whether a search has arrived: it has no step size to
choose, and a handful of steps reach what takes `search` a hundred (docs/search.md). What it is not for: a quick look,
since a step costs dozens of gradients. Nor many latents: J has a column for each.

J comes from jets: one jet moves an even slot by u and an odd one by v, so it gives two columns. Other exact ways, in ms
per candidate on one thread of a busy machine, 4 candidates of 2 slots of 16 numbers:

                                        frame decoder               cross-attention decoder
    pixels                            64      256      960             64      256      960
    jets                             4.5      4.8     13.8            9.8     46.4    190.9
    torch.func.jvp, vmapped          4.7      4.7      9.6           12.2     41.6    175.3
    derivative of the pull-back      8.5      8.8     12.1           20.9     39.2    142.3
    one backward pass per colour    16.7                             42.5
    a gradient, for comparison       0.4      0.5      0.8            0.9      1.3      3.4

None is clearly the fastest. Jets carry the value along for every two columns, forward mode once for all; but a jet
moves two slots on one way through the network, where forward mode moves one and carries zeros for the other. It is jets
since torch's forward mode refuses fused attention, which many slots need.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from compgen_fast.invert.marginals import SlotMarginals
from compgen_fast.invert.search import (
    Candidates,
    Found,
    Progress,
    Stage,
    best,
    better_half,
    check_problem,
    check_settings,
    chunks,
    first_pixels,
    frozen,
    joined,
    plan,
)
from compgen_fast.jets.jet import Jet, unsided
from compgen_fast.jets.penalty import Decoder, uncompiled
from compgen_fast.ops import recon_error

FIRST = 0.1  # damping at the start, relative to the mean curvature
TRIED = (0.01, 0.1, 1.0, 10.0)  # dampings tried at once, relative to the candidate's own
REFUSED = 1000.0  # what the damping is multiplied with where no trial was better: beyond all that were tried
LEAST, MOST = 1e-9, 1e9  # of the damping
PATIENCE, TOLERANCE = 3, 1e-3  # steps without that much relative progress after which a candidate gives up
TOGETHER = 2048  # candidates · pixels whose Jacobians are taken at once: more would only pass through memory


@dataclass(frozen=True, eq=False)
class _State:
    """What is known of C candidates."""

    z: Tensor  # [C, K, D], where each candidate is
    damping: Tensor  # [C]
    best_z: Tensor  # [C, K, D], where the judges' loss was lowest
    best_loss: Tensor  # [C], that loss
    stalled: Tensor  # int64 [C], steps without progress
    spent: Tensor  # int64 [C], steps given
    image: Tensor  # int64 [C], which image it should explain
    start: Tensor  # int64 [C], which of its starts it is

    def keep(self, index: Tensor) -> "_State":
        return _State(*(getattr(self, field.name)[index] for field in fields(self)))

    def put(self, index: Tensor, part: "_State") -> None:
        for field in fields(self):
            getattr(self, field.name).index_copy_(0, index, getattr(part, field.name))


def newton(
    decoder: Decoder,
    images: Tensor,
    init: Tensor,
    *,
    steps: int = 8,
    pixels: int | None = None,
    marginals: SlotMarginals | None = None,
    pull: float = 0.05,
    held_out: float = 0.125,
    chunk: int = 128,
    seed: int = 0,
    progress: Progress | None = None,
) -> Found:
    """The latents of images; arguments as of `search`, which has the same objective.

    Args:
        decoder: made of torch ops that have jet rules.
        steps: Jacobians of all stages together.
    """
    inits = check_problem("newton", decoder, images, init, marginals)
    check_settings("newton", len(images), steps, chunk, pull, held_out)
    total, starts = images.shape[1:3].numel(), inits.shape[1]
    first = first_pixels("newton", total, pixels)
    # A step ends where its own pixels say, and none are averaged: the last ones should see all of them.
    stages = plan(total, steps, first, held_out, seed, images.device, starts, polish=1.0)
    marginals = None if marginals is None else marginals.to(inits)
    parts = []
    with frozen(decoder), torch.no_grad():
        for part in chunks(len(images), max(1, chunk // starts), progress):
            run = _Run(uncompiled(decoder), images[part].flatten(1, 2), inits[part], marginals, pull)
            parts.append(run.found(stages))
    return joined(parts)


class _Run:
    """The search of some images. Candidates are rows: all starts of the first image, then of the second, …"""

    def __init__(
        self, decoder: Decoder, x: Tensor, inits: Tensor, marginals: SlotMarginals | None, pull: float
    ) -> None:
        images, starts = inits.shape[:2]
        self.decoder, self.x, self.first, self.marginals, self.pull = decoder, x, inits[:, 0], marginals, pull
        image = torch.arange(images, device=x.device).repeat_interleave(starts)
        z = inits.flatten(0, 1)
        self.state = _State(
            z=z.clone(),
            damping=z.new_full((len(z),), FIRST),
            best_z=z.clone(),
            best_loss=z.new_full((len(z),), torch.inf),
            stalled=torch.zeros_like(image),
            spent=torch.zeros_like(image),
            image=image,
            start=torch.arange(starts, device=x.device).repeat(images),
        )

    def found(self, stages: Sequence[Stage]) -> Found:
        for place, stage in enumerate(stages):
            if place:
                rows = better_half(self.state.best_loss, len(self.x))
                self.state = self.state.keep(rows)
            self._descend(stage)
        state = self.state
        both = (each.repeat_interleave(2) for each in (state.image, state.start, state.spent))
        candidates = Candidates(torch.stack([state.best_z, state.z], 1).flatten(0, 1), *both)
        return best(self.decoder, self.x, self.first, candidates, self.marginals, self.pull)

    def _descend(self, stage: Stage) -> None:
        state = self.state
        _, loss = self._losses(state.best_z, state.image, stage.shown[0], stage.judges)
        self.state = replace(state, best_loss=loss, stalled=torch.zeros_like(state.stalled))
        for shown in stage.shown:
            searching = (self.state.stalled < PATIENCE).nonzero().flatten()
            for rows in searching.split(max(1, TOGETHER // len(shown))):
                self.state.put(rows, self._stepped(self.state.keep(rows), shown, stage.judges))

    def _stepped(self, state: _State, shown: Tensor, judges: Tensor) -> _State:
        """The candidates after one step."""
        loss, gradient, curvature = self._quadratic(state, shown)
        dampings = state.damping[:, None] * state.damping.new_tensor(TRIED)
        trials = self._trials(state.z, gradient, curvature, dampings)
        images = state.image.repeat_interleave(len(TRIED))
        fitted, judged = self._losses(trials.flatten(0, 1), images, shown, judges)
        fitted, judged = (each.nan_to_num(torch.inf).view_as(dampings) for each in (fitted, judged))

        lowest, which = fitted.min(1, keepdim=True)
        accepted = lowest.squeeze(1) < loss
        z = torch.where(accepted[:, None, None], trials[torch.arange(len(which)), which.squeeze(1)], state.z)
        judged = torch.where(accepted, judged.gather(1, which).squeeze(1), torch.inf)
        damping = torch.where(accepted, dampings.gather(1, which).squeeze(1), state.damping * REFUSED)
        improved, lower = judged < state.best_loss * (1 - TOLERANCE), judged < state.best_loss
        return replace(
            state,
            z=z,
            damping=damping.clamp(LEAST, MOST),
            best_z=torch.where(lower[:, None, None], z, state.best_z),
            best_loss=torch.where(lower, judged, state.best_loss),
            stalled=torch.where(improved, 0, state.stalled + 1),
            spent=state.spent + 1,
        )

    def _quadratic(self, state: _State, shown: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The loss [C], its gradient [C, L] and its curvature [C, L, L] as the pixels shown tell them."""
        colours, columns = jacobian(self.decoder, state.z, shown)
        error, slope = recon_error(colours, self.x, images=state.image, pixels=shown)
        scale = self.x.shape[1] / len(shown)
        loss, gradient = scale * error, scale * (columns @ slope.flatten(1).unsqueeze(2)).squeeze(2)
        curvature = 2 * scale * (columns @ columns.mT)
        if self.marginals is not None:
            pulled, towards = self.marginals.pull(state.z, self.pull)
            loss, gradient = loss + pulled, gradient + towards.flatten(1)
            curvature = curvature + self.pull * self.marginals.precision
        return loss, gradient, curvature

    def _trials(self, z: Tensor, gradient: Tensor, curvature: Tensor, dampings: Tensor) -> Tensor:
        """Where each damping [C, T] would lead: [C, T, K, D]. NaN where there is no way."""
        size = curvature.diagonal(dim1=1, dim2=2).mean(1)[:, None, None, None]
        unit = torch.eye(curvature.shape[1], dtype=z.dtype, device=z.device)
        damped = curvature.unsqueeze(1) + dampings[:, :, None, None] * size * unit
        factor, failed = torch.linalg.cholesky_ex(damped)
        step = torch.cholesky_solve(gradient[:, None, :, None].expand(-1, dampings.shape[1], -1, -1), factor)
        step = torch.where(failed[:, :, None, None] == 0, step, torch.nan)
        trials = z.unsqueeze(1) - step.view(*dampings.shape, *z.shape[1:])
        return trials if self.marginals is None else self.marginals.confine(trials.flatten(0, 1)).view_as(trials)

    def _losses(self, z: Tensor, images: Tensor, shown: Tensor, judges: Tensor) -> tuple[Tensor, Tensor]:
        """The objective [C] as the pixels shown tell it, and as those that judge do."""
        colours, whole, losses = self.decoder(z, pixels=torch.cat([shown, judges])), self.x.shape[1], []
        for at, pixels in ((colours[:, : len(shown)], shown), (colours[:, len(shown) :], judges)):
            error, _ = recon_error(at, self.x, images=images, pixels=pixels)
            losses.append(error * (whole / max(1, len(pixels))))
        fitted, judged = losses if len(judges) else (losses[0], losses[0])
        pulled = 0 if self.marginals is None else self.marginals.pull(z, self.pull)[0]
        return fitted + pulled, judged + pulled


def jacobian(decoder: Decoder, z: Tensor, pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Colours [C, N, 3] of these pixels and their derivatives [C, K · D, N · 3] in each number of z [C, K, D]; exact.

    A jet for each pair of slots and each number of a slot moves both slots of the pair, one by u and one by v.
    """
    (C, K, D), pairs = z.shape, math.ceil(z.shape[1] / 2)
    unit = torch.eye(D, dtype=z.dtype, device=z.device)
    tangent = z.new_zeros(pairs, D, 1, 2 * pairs, D)
    for pair in range(pairs):
        tangent[pair, :, 0, 2 * pair] = tangent[pair, :, 0, 2 * pair + 1] = unit
    tangent = tangent[..., :K, :].expand(-1, -1, C, -1, -1).flatten(0, 2)
    side = (torch.arange(K, device=z.device) % 2 == 0).view(1, K, 1)
    moved = decoder(Jet(torch.stack([z.repeat(pairs * D, 1, 1), tangent]), side), pixels=pixels)
    if not isinstance(moved, Jet):
        raise TypeError(
            f"newton: the decoder returned {type(moved).__name__} for a jet; expected colours that depend on z, "
            "made by torch ops alone"
        )
    colours, u, v = unsided(moved).channels[:3].unflatten(1, (pairs, D, C))
    columns = torch.stack([u, v], 1).flatten(4)  # [pairs, 2, D, C, N · 3]
    return colours[0, 0], columns.movedim(3, 0).flatten(1, 3)[:, : K * D]
