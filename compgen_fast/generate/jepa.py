"""JEPA inside a trunk: hidden states of corrupted tokens predict those that whole tokens have.

    L_ℓ = mean over scored tokens of ‖predictor_ℓ(h_ℓ, position, condition) − norm(h̄_ℓ)‖² / W

h̄ are the hidden states of the target, a moving average of embedding and trunk which sees the latents whole and has no
gradient. The generator adds weight · Σ_ℓ L_ℓ to its own loss; sampling does not change.
"""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compgen_fast.generate.config import JepaConfig
from compgen_fast.generate.trunk import Trunk
from compgen_fast.ops.trunk_block import EPS


class Jepa(nn.Module):
    """Target, and a predictor for each layer.

    Args:
        config: settings.
        embedding: latents [B, T, …] → tokens [B, T, W].
        trunk: the target starts as a copy of both.
    """

    def __init__(self, config: JepaConfig, embedding: nn.Module, trunk: Trunk) -> None:
        super().__init__()
        outside = [layer for layer in config.layers if not 1 <= layer <= trunk.layers]
        if outside or not config.layers:
            raise ValueError(
                f"jepa.layers is {config.layers}; expected layers from 1 to {trunk.layers}, the trunk's, at least one"
            )
        self.config, self.layers, self.weight = config, config.layers, config.weight
        self.target_embedding, self.target_trunk = copy.deepcopy(embedding), copy.deepcopy(trunk)
        self.target_embedding.requires_grad_(False)
        self.target_trunk.requires_grad_(False)
        self.predictors = nn.ModuleDict({str(layer): Predictor(trunk.side**2, trunk.width) for layer in config.layers})
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))  # that the target has followed

    @torch.no_grad()
    def follow(self, embedding: nn.Module, trunk: Trunk) -> None:
        """Moves the target towards these weights, which a step has left."""
        steps = self.get_buffer("steps")
        sources: list[Tensor] = [*embedding.parameters(), *trunk.parameters()]
        targets: list[Tensor] = [*self.target_embedding.parameters(), *self.target_trunk.parameters()]
        torch._foreach_lerp_(targets, sources, 1 - self.rate(int(steps)))
        steps += 1

    def rate(self, step: int) -> float:
        """Share of its weights that the target keeps in a step, counted from 0."""
        done = min(1.0, step / self.config.rate_steps)
        return self.config.rate + (1 - self.config.rate) * done

    @torch.no_grad()
    def target(self, latents: Tensor, condition: Tensor) -> dict[int, Tensor]:
        """By layer, normed hidden states [B, T, W] of whole latents."""
        hidden = self.target_trunk.hidden(self.target_embedding(latents), condition, self.layers)
        return {layer: F.layer_norm(states, states.shape[-1:], eps=EPS) for layer, states in hidden.items()}

    def errors(self, layer: int, states: Tensor, target: Tensor, condition: Tensor, places: Tensor) -> Tensor:
        """Squared error [M] of the prediction, at places [M] of hidden states and targets [B, T, W]."""
        tokens = states.shape[1]
        at = states.flatten(0, 1).index_select(0, places)
        predicted = self.predictors[str(layer)](at, places % tokens, condition.index_select(0, places // tokens))
        wanted = target.flatten(0, 1).index_select(0, places)
        errors: Tensor = (predicted.to(wanted.dtype) - wanted).square().mean(-1)
        return errors


class Predictor(nn.Module):
    """Hidden states [M, W], positions int64 [M] and conditions [M, W] → what whole tokens would have there, [M, W]."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, EPS)
        self.positions = nn.Embedding(tokens, width)
        self.condition = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        nn.init.normal_(self.positions.weight, std=0.02)

    def forward(self, states: Tensor, positions: Tensor, condition: Tensor) -> Tensor:
        out: Tensor = self.mlp(self.norm(states) + self.positions(positions) + self.condition(condition))
        return out
