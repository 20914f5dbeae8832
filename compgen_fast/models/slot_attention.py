"""Slot Attention (Locatello et al., 2020): a set of inputs becomes a few slots by rounds of competition.

Each round, slots compete for the inputs (``slot_competition``), and a GRU and a residual MLP take what each slot won.
The rounds are a fixed-point iteration; gradients go back through all of them, or through the fixed point alone.
"""

import math
from typing import Literal

import torch
from torch import Tensor, nn

from compgen_fast.ops import slot_competition


class SlotAttention(nn.Module):
    """Inputs [B, N, input_dim] → slots [B, S, dim] and maps [B, S, N].

    Args:
        num_slots: how many slots; ``forward(num_slots=…)`` may ask for another number when they are sampled.
        dim: width of a slot.
        iters: rounds of competition.
        eps: added to the maps before each slot's mean over inputs (kept in fp32 whatever the dtype).
        hidden_dim: width of the residual MLP; twice ``dim`` when None.
        input_dim: width of the inputs; ``dim`` when None.
        heads: heads of the competition; softmax runs over slots and heads together.
        initial: ``"sampled"`` draws slots from one learned Gaussian: they are exchangeable and any number can be had;
            ``"learned"`` gives each slot its own learned start.
        implicit_terms: None differentiates through all rounds. A number takes the rounds without gradient and
            differentiates their fixed point: (I − J)⁻¹ as a Neumann series of so many terms, J a round's Jacobian.
            1 is the gradient of the last round alone (Chang et al., 2022), whose memory does not grow with ``iters``.
    """

    def __init__(
        self,
        num_slots: int,
        dim: int,
        iters: int = 3,
        eps: float = 1e-8,
        hidden_dim: int | None = None,
        *,
        input_dim: int | None = None,
        heads: int = 1,
        initial: Literal["sampled", "learned"] = "sampled",
        implicit_terms: int | None = None,
    ) -> None:
        super().__init__()
        input_dim, hidden_dim = input_dim or dim, hidden_dim or 2 * dim
        _check(num_slots=num_slots, dim=dim, iters=iters, heads=heads, implicit_terms=implicit_terms)
        if initial not in ("sampled", "learned"):
            raise ValueError(f"SlotAttention: initial is {initial!r}; expected 'sampled' or 'learned'")
        self.num_slots, self.dim, self.iters, self.eps, self.heads = num_slots, dim, iters, eps, heads
        self.initial, self.implicit_terms = initial, implicit_terms

        self.norm_inputs = nn.LayerNorm(input_dim)
        self.norm_slots = nn.LayerNorm(dim)
        self.norm_mlp = nn.LayerNorm(dim)
        self.to_q = nn.Linear(dim, dim, bias=False)
        self.to_k = nn.Linear(input_dim, dim, bias=False)
        self.to_v = nn.Linear(input_dim, dim, bias=False)
        self.gru = nn.GRUCell(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, dim))
        self.slot_mean = nn.Parameter(torch.randn(1, 1 if initial == "sampled" else num_slots, dim) * dim**-0.5)
        if initial == "sampled":
            self.slot_log_scale = nn.Parameter(torch.full((1, 1, dim), -0.5 * math.log(dim)))

    def forward(
        self,
        inputs: Tensor,
        slots: Tensor | None = None,
        slot_mask: Tensor | None = None,
        num_slots: int | None = None,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Runs the competition.

        Args:
            inputs: features [B, N, input_dim].
            slots: where to start, [B, S, dim]; from ``initial`` when None (video: the previous frame's slots).
            slot_mask: bool [B, S], True where a slot takes part. The others win nothing and come back as zeros.
            num_slots: how many slots to sample, this time.
            generator: source of the sampled slots.

        Returns:
            slots [B, S, dim] and maps [B, S, N], the share of each input that each slot won last (sum over S is 1).
        """
        if inputs.dim() != 3 or inputs.shape[-1] != self.to_k.in_features:
            raise ValueError(
                f"SlotAttention: inputs have shape {list(inputs.shape)}; expected [B, N, {self.to_k.in_features}] "
                "(flatten image features over height and width)"
            )
        inputs = self.norm_inputs(inputs)
        k, v = (self._split_heads(project(inputs)) for project in (self.to_k, self.to_v))
        if slots is None:
            slots = self.initial_slots(len(inputs), num_slots, generator).to(inputs.dtype)
        slots = self._rounds(slots, k, v, slot_mask)
        slots, maps = self._round(slots, k, v, slot_mask)
        if slot_mask is not None:
            slots = slots.masked_fill(~slot_mask.unsqueeze(-1), 0)
        return slots, maps.transpose(1, 2)

    def initial_slots(
        self, batch: int, num_slots: int | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        """Slots to start from, [batch, S, dim]."""
        wanted = self.num_slots if num_slots is None else num_slots
        if self.initial == "sampled":
            shape = (batch, wanted, self.dim)
            noise = torch.randn(shape, generator=generator, device=self.slot_mean.device, dtype=self.slot_mean.dtype)
            return self.slots_from(noise)
        if wanted != self.num_slots:
            raise ValueError(
                f"SlotAttention: num_slots={wanted} but {self.num_slots} starts were learned; use initial='sampled'"
            )
        return self.slot_mean.expand(batch, -1, -1)

    def slots_from(self, noise: Tensor) -> Tensor:
        """Sampled slots to start from, made of standard normal numbers [B, S, dim] that the caller drew."""
        return self.slot_mean + self.slot_log_scale.exp() * noise

    def _rounds(self, slots: Tensor, k: Tensor, v: Tensor, slot_mask: Tensor | None) -> Tensor:
        """All rounds but the last."""
        if self.implicit_terms is None:
            for _ in range(self.iters - 1):
                slots, _ = self._round(slots, k, v, slot_mask)
            return slots
        with torch.no_grad():
            for _ in range(self.iters - 1):
                slots, _ = self._round(slots, k, v, slot_mask)
        return self._with_neumann_gradient(slots, k, v, slot_mask)

    def _with_neumann_gradient(self, slots: Tensor, k: Tensor, v: Tensor, slot_mask: Tensor | None) -> Tensor:
        """Slots for the last round, whose incoming gradient g becomes g + Jᵀg + … through ever earlier rounds.

        The last round's own backward is the first term. Each further term is one more differentiable round before it,
        started from the same fixed point.
        """
        assert self.implicit_terms is not None
        fixed_point = slots = slots.detach()
        for _ in range(self.implicit_terms - 1):
            ahead, _ = self._round(slots, k, v, slot_mask)
            slots = fixed_point + (ahead - ahead.detach())
        return slots

    def _round(self, slots: Tensor, k: Tensor, v: Tensor, slot_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        q = self._split_heads(self.to_q(self.norm_slots(slots)))
        updates, weights = slot_competition(q, k, v, slot_mask, eps=self.eps)
        flat = (-1, self.dim)
        slots = self.gru(updates.reshape(flat), slots.reshape(flat).to(updates.dtype)).view(slots.shape)
        return slots + self.mlp(self.norm_mlp(slots)), weights

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], self.heads, -1)

    def extra_repr(self) -> str:
        return f"num_slots={self.num_slots}, dim={self.dim}, iters={self.iters}, heads={self.heads}, {self.initial}"


def _check(num_slots: int, dim: int, iters: int, heads: int, implicit_terms: int | None) -> None:
    if iters < 1:
        raise ValueError(f"SlotAttention: iters is {iters}; expected at least 1 round")
    if num_slots < 1 or dim < 1:
        raise ValueError(f"SlotAttention: num_slots={num_slots}, dim={dim}; both must be at least 1")
    if heads < 1 or dim % heads:
        raise ValueError(f"SlotAttention: dim {dim} cannot be split into {heads} heads; choose a divisor of dim")
    if implicit_terms is not None and implicit_terms < 1:
        raise ValueError(f"SlotAttention: implicit_terms is {implicit_terms}; expected None or at least 1 term")
