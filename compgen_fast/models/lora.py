"""Low-rank updates of a frozen module (LoRA, Hu et al., 2021): W + B A with A and B thin, trained in place of W.

B starts at zero, so the module starts as it was. What it is not for: convolutions and embeddings.
"""

from collections.abc import Collection
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

VIT_LINEARS = ("qkv", "fc1", "fc2")
"""The projections and MLPs of a Transformer block."""


class LowRankLinear(nn.Linear):
    """x ↦ W x + b + B A x, W and b frozen, A [rank, in] and B [out, rank] trained.

    It keeps the names ``weight`` and ``bias``. Gradients of W are never formed.
    """

    lora_a: nn.Parameter
    lora_b: nn.Parameter

    @classmethod
    def around(cls, base: nn.Linear, rank: int) -> Self:
        """The same map as ``base``, whose parameters it takes over."""
        layer = cls(base.in_features, base.out_features, base.bias is not None, device="meta")
        layer.weight, layer.bias = base.weight, base.bias
        layer.lora_a = nn.Parameter(base.weight.new_empty(rank, base.in_features))
        layer.lora_b = nn.Parameter(base.weight.new_zeros(base.out_features, rank))
        nn.init.uniform_(layer.lora_a, -(base.in_features**-0.5), base.in_features**-0.5)
        return layer.train(base.training)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + linear(linear(x, self.lora_a), self.lora_b)

    @torch.no_grad()
    def merged_weight(self) -> Tensor:
        """W + B A."""
        return self.weight + self.lora_b @ self.lora_a


def add_lora(module: nn.Module, rank: int, targets: Collection[str] = VIT_LINEARS) -> int:
    """Freezes ``module`` and adds trained updates to the linear layers whose last name is in ``targets``.

    Changes the module in place and returns how many parameters are left to train.
    """
    linears = {name: child for name, child in module.named_modules() if isinstance(child, nn.Linear)}
    chosen = {name: child for name, child in linears.items() if name.rpartition(".")[2] in targets}
    _check(rank, targets, linears, chosen)
    module.requires_grad_(False)
    for name, child in chosen.items():
        parent, _, last = name.rpartition(".")
        setattr(module.get_submodule(parent), last, LowRankLinear.around(child, rank))
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


def merged(module: nn.Module) -> dict[str, Tensor]:
    """The state_dict of the same module without LoRA: updates added to their weights."""
    state = dict(module.state_dict())
    for name, child in module.named_modules():
        if isinstance(child, LowRankLinear):
            prefix = f"{name}." if name else ""
            state[f"{prefix}weight"] = child.merged_weight()
            del state[f"{prefix}lora_a"], state[f"{prefix}lora_b"]
    return state


def _check(rank: int, targets: Collection[str], linears: dict[str, nn.Linear], chosen: dict[str, nn.Linear]) -> None:
    if not chosen:
        there = ", ".join(sorted({name.rpartition(".")[2] for name in linears})) or "none"
        raise ValueError(f"add_lora: no linear layer is named {' or '.join(targets)}; the module's are named: {there}")
    if any(isinstance(child, LowRankLinear) for child in linears.values()):
        raise ValueError(
            "add_lora: the module has low-rank updates already; load merged(module) into a fresh one first"
        )
    thinnest = min(min(child.in_features, child.out_features) for child in chosen.values())
    if not 1 <= rank <= thinnest:
        raise ValueError(f"add_lora: rank is {rank}; expected 1 to {thinnest}, the thinnest of the layers")
