"""A generator's training step, ours and as one would write it first, for the suite `generate`.

The straightforward version has projections of its own for q, k and v, attention by hand, a modulation for each layer,
and scores every token before those that were seen are left out. A second one also encodes its images in every step,
where ours reads latents that were encoded once. Both read our parameters in pieces, which costs them one copy of the
gradients, below 1 % of a step. A third is what one would make of it: our model with layers in plain torch, packed and
with torch's fused attention.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from compgen_fast.bench.harness import Case, Contender, Outputs
from compgen_fast.draws import Draws
from compgen_fast.generate.build import build
from compgen_fast.generate.config import DiTConfig, GIVTConfig, MARConfig, MaskGITConfig, ObjectiveConfig
from compgen_fast.generate.generator import Corrupted, Generator
from compgen_fast.models.config import ConvVAEConfig, VQVAEConfig
from compgen_fast.models.tokenizer import VQVAE, ConvVAE
from compgen_fast.ops import trunk_block
from compgen_fast.ops.trunk_block import EPS, PARTS
from compgen_fast.worlds.source import Factor

FACTORS = (Factor("shape"), Factor("colour"), Factor("size"), Factor("x", low=-0.45, high=0.45))
AWAKE = 0.02  # noise on new weights: gates that are 0 would hide every mistake behind them


@dataclass(frozen=True)
class StepSize:
    """One training step."""

    name: str
    config: ObjectiveConfig
    batch: int

    def __str__(self) -> str:
        trunk = self.config.trunk
        sizes = f"{self.config.side**2} tokens, {trunk.layers} layers of {trunk.width}"
        return f"{self.name}, {sizes}{', JEPA' if self.config.jepa else ''}, batch {self.batch}"

    def build(self) -> Generator:
        torch.manual_seed(0)
        model = build(self.config, FACTORS)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(AWAKE * torch.randn_like(parameter))
        return model

    def tokenizer(self) -> ConvVAE | VQVAE:
        """A new one of the CPU recipes' width, 8 pixels to a token."""
        torch.manual_seed(0)
        config, size = self.config, 8 * self.config.side
        if isinstance(config, MaskGITConfig):
            return VQVAE(VQVAEConfig(size, width=48, codes=config.codes)).eval()
        return ConvVAE(ConvVAEConfig(size, width=48, channels=config.channels)).eval()

    def images(self) -> Tensor:
        """Noise, uint8 [batch, H, W, 3]."""
        size, generator = 8 * self.config.side, torch.Generator().manual_seed(0)
        return torch.randint(0, 256, (self.batch, size, size, 3), dtype=torch.uint8, generator=generator)

    def factors(self) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(1)
        return {factor.name: torch.rand(self.batch, generator=generator) for factor in FACTORS}


def case(size: StepSize, device: str) -> Case:
    """The step by us, in eager torch, and in eager torch from images."""
    model, tokenizer, images = size.build().to(device), size.tokenizer().to(device), size.images().to(device)
    factors, latents = {name: value.to(device) for name, value in size.factors().items()}, encoded(tokenizer, images)
    straightforward = partial(step, EagerGenerator(model), latents, factors)
    return Case(
        suite="generate",
        name=str(size),
        inputs=lambda: {n.replace(".", "_"): p for n, p in model.named_parameters() if p.requires_grad},
        outputs=("loss",),
        oracle=straightforward,
        ours=Contender("ours", partial(step, Ours(model), latents, factors), backend=backend(device)),
        peers=(
            Contender("eager", straightforward),
            Contender("eager, encoding", partial(from_images, EagerGenerator(model), tokenizer, images, factors)),
            Contender("SDPA", partial(step, PlainGenerator(model), latents, factors)),
        ),
        device=device,
    )


def backend(device: str) -> str:
    """What serves our layers."""
    return "cpp" if trunk_block.FUSED and device == "cpu" else "torch"


@torch.no_grad()
def encoded(tokenizer: ConvVAE | VQVAE, images: Tensor) -> Tensor:
    return tokenizer.codes(images) if isinstance(tokenizer, VQVAE) else tokenizer.encode(images)


def from_images(
    of: "Ours", tokenizer: ConvVAE | VQVAE, images: Tensor, factors: Mapping[str, Tensor], *parameters: Tensor
) -> Outputs:
    """The loss of images."""
    return step(of, encoded(tokenizer, images), factors, *parameters)


def step(of: "Ours", latents: Tensor, factors: Mapping[str, Tensor], *parameters: Tensor) -> Outputs:
    """The loss with these parameters, in their precision."""
    precision = parameters[0].dtype
    trained = [name for name, parameter in of.named_parameters() if parameter.requires_grad]
    named = dict(zip(trained, parameters, strict=True))
    others = {n: t for n, t in (*of.named_parameters(), *of.named_buffers()) if n not in named}
    named |= {n: t.to(precision) if t.is_floating_point() else t for n, t in others.items()}
    latents = latents.to(precision) if latents.is_floating_point() else latents
    draws = SameDraws.at(0, 0, device=latents.device)
    return (functional_call(of, named, (latents, factors, draws)),)


class SameDraws(Draws):
    """The same numbers in every precision, so that the fp64 oracle solves the same problem."""

    def normal(self, like: Tensor) -> Tensor:
        return super().normal(like.float()).to(like.dtype)

    def uniform(self, like: Tensor) -> Tensor:
        return super().uniform(like.float()).to(like.dtype)


class Ours(nn.Module):
    """A generator's loss."""

    def __init__(self, model: Generator) -> None:
        super().__init__()
        self.model = model

    def forward(self, latents: Tensor, factors: Mapping[str, Tensor], draws: Draws) -> Tensor:
        return self.model.losses(latents, factors, draws=draws)["loss"]


class PlainGenerator(Ours):
    """Our model, its layers in plain torch: packed, with torch's fused attention."""

    def forward(self, latents: Tensor, factors: Mapping[str, Tensor], draws: Draws) -> Tensor:
        fused, trunk_block.FUSED = trunk_block.FUSED, False
        try:
            return super().forward(latents, factors, draws)
        finally:
            trunk_block.FUSED = fused


class EagerGenerator(Ours):
    """The same loss, straightforwardly."""

    def forward(self, latents: Tensor, factors: Mapping[str, Tensor], draws: Draws) -> Tensor:
        model: Any = self.model
        condition = model.conditioning(factors, draws)
        seen = model.corrupt(latents, condition, draws)
        layers = () if model.jepa is None else model.jepa.layers
        output, kept = trunk(model.trunk, seen.tokens, seen.condition, model.causal, layers)
        loss = masked_mean(seen, self.errors(output, seen, draws))
        if model.jepa is None:
            return loss
        with torch.no_grad():
            tokens = model.jepa.target_embedding(latents)
            _, wanted = trunk(model.jepa.target_trunk, tokens, model.whole(condition), False, layers)
        return cast(Tensor, loss + model.jepa.weight * sum(self.jepa(n, kept[n], wanted[n], seen) for n in layers))

    def errors(self, output: Tensor, seen: Corrupted, draws: Draws) -> Tensor:
        """[B, T], of every token."""
        model: Any = self.model
        match model.config:
            case DiTConfig():
                return cast(Tensor, (model.to_velocity(output) - seen.target).square().mean(-1))
            case MaskGITConfig():
                smoothing = model.config.label_smoothing
                logits = model.to_logits(output).transpose(1, 2)
                return F.cross_entropy(logits, seen.target, reduction="none", label_smoothing=smoothing)
            case MARConfig():
                x = seen.target
                t, noise = draws.uniform(x[..., 0]), draws.normal(x)
                x_t = (1 - t.unsqueeze(-1)) * noise + t.unsqueeze(-1) * x
                return (token_flow(model.head, x_t, t, output) - (x - noise)).square().mean(-1)
            case GIVTConfig():
                return cast(Tensor, -model.head.mixture(output).log_density(seen.target) / seen.target.shape[-1])
        raise TypeError(type(model.config))

    def jepa(self, layer: int, states: Tensor, wanted: Tensor, seen: Corrupted) -> Tensor:
        predictor: Any = cast(Any, self.model).jepa.predictors[str(layer)]
        places = torch.arange(states.shape[1], device=states.device)
        told = predictor.condition(seen.condition).unsqueeze(1)
        predicted = predictor.mlp(predictor.norm(states) + predictor.positions(places) + told)
        return masked_mean(seen, (predicted - norm(wanted)).square().mean(-1))


def masked_mean(seen: Corrupted, errors: Tensor) -> Tensor:
    return (errors * seen.hidden).sum() / (len(errors) * seen.expected)


def trunk(
    of: Any, tokens: Tensor, condition: Tensor, causal: bool, keep: tuple[int, ...]
) -> tuple[Tensor, dict[int, Tensor]]:
    """A `Trunk` with its parameters in pieces."""
    width, kept = of.width, {}
    x = tokens + of.positions()
    *of_layers, last = pieces(of.modulation, [PARTS * width] * of.layers + [2 * width])
    for number, (block, modulation) in enumerate(zip(of.blocks, of_layers, strict=True), 1):
        parts = F.linear(F.silu(condition), *modulation).unsqueeze(1).chunk(PARTS, -1)
        h = norm(x) * parts[1] + parts[0]
        q, k, v = (
            F.linear(h, *each).unflatten(-1, (of.heads, -1)).transpose(1, 2) for each in pieces(block.qkv, [width] * 3)
        )
        x = x + parts[2] * block.proj(attention(q, k, v, causal).transpose(1, 2).flatten(2))
        h = norm(x) * parts[4] + parts[3]
        x = x + parts[5] * block.fc2(F.gelu(block.fc1(h)))
        if number in keep:
            kept[number] = x
    shift, scale = F.linear(F.silu(condition), *last).unsqueeze(1).chunk(2, -1)
    return norm(x) * scale + shift, kept


def token_flow(of: Any, x: Tensor, t: Tensor, output: Tensor) -> Tensor:
    """A `TokenFlow` with its parameters in pieces."""
    condition, h = of.told(output) + of.time(t), of.embedding(x)
    width = h.shape[-1]
    *of_layers, last = pieces(of.modulation, [3 * width] * len(of.layers) + [2 * width])
    for layer, modulation in zip(of.layers, of_layers, strict=True):
        shift, scale, gate = F.linear(F.silu(condition), *modulation).chunk(3, -1)
        h = h + gate * layer(norm(h) * scale + shift)
    shift, scale = F.linear(F.silu(condition), *last).chunk(2, -1)
    return cast(Tensor, of.to_velocity(norm(h) * scale + shift))


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(ahead, -torch.inf)
    seen: Tensor = scores.softmax(-1) @ v
    return seen


def norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=EPS)


def pieces(linear: nn.Linear, sizes: list[int]) -> list[tuple[Tensor, Tensor]]:
    """Weights and biases of parts of a layer's outputs."""
    return list(zip(linear.weight.split(sizes), linear.bias.split(sizes), strict=True))
