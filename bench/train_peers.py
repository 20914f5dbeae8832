"""A slot VAE's training step as a researcher would write it in plain torch, beside ours, as a benchmark case.

It works on our model's parameters: pixel queries are expanded to the batch before the first layer, attention is two
matrix products whose weights are kept, derivatives are those of `torch.func`. The encoder is the same module for all,
and so are the random numbers. A pass is forward, penalty and backward. The optimiser's step is left out for all alike:
it is the same kernel on the same parameters, and `train_ranks` times whole steps.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp, vmap
from torch.nn.functional import scaled_dot_product_attention

from compgen_fast.bench.harness import Case, Contender, Outputs
from compgen_fast.bench.ops.common import backend_of
from compgen_fast.draws import Draws
from compgen_fast.models.build import build
from compgen_fast.models.config import Penalty, SlotVAEConfig
from compgen_fast.models.slot_vae import UNSEEDED, SlotVAE
from compgen_fast.models.summary import WARMED_UP

# How much each penalty weighs here: enough for the gate to see it beside the squared error (a test takes 1 % off).
ALPHA: dict[Penalty, float] = {"none": 0.0, "attention": 1e4, "hessian": 1.0, "contrast": 1.0}
SHARPER = 10.0  # projections to q and k than at first, where attention is almost uniform and penalties are flat


@dataclass(frozen=True)
class StepSize:
    """One training step: whose sizes, the model, the batch, and a penalty on 1/``part`` of the pixels."""

    name: str
    model: SlotVAEConfig
    batch: int
    penalty: Penalty
    part: int = 1
    compiled: bool = False
    """Whether torch.compile takes part, which needs minutes."""

    def __str__(self) -> str:
        penalty = "no penalty" if self.penalty == "none" else self.penalty
        part = "" if self.part == 1 else f" on 1/{self.part} of pixels"
        return f"{self.name} {self.model.image_size} px, batch {self.batch}, {penalty}{part}"

    @property
    def config(self) -> SlotVAEConfig:
        pixels = None if self.part == 1 else self.model.image_size**2 // self.part
        loss = replace(self.model.loss, penalty=self.penalty, penalty_pixels=pixels, alpha=ALPHA[self.penalty])
        return replace(self.model, loss=loss)

    def build(self) -> SlotVAE:
        torch.manual_seed(0)
        model = cast(SlotVAE, build(self.config))
        with torch.no_grad():
            for name, parameter in model.decoder.named_parameters():
                if name.endswith(("to_q.weight", "to_k.weight")):
                    parameter.mul_(SHARPER)
        return model

    def images(self) -> Tensor:
        """Noise, uint8 [batch, H, W, 3]."""
        side, generator = self.model.image_size, torch.Generator().manual_seed(0)
        return torch.randint(0, 256, (self.batch, side, side, 3), dtype=torch.uint8, generator=generator)


def case(size: StepSize, device: str) -> Case:
    """The step by us, in eager torch, and perhaps by torch.compile of that."""
    model, images = size.build().to(device), size.images().to(device)
    eager = partial(functional_call, EagerSlotVAE(model))
    peers = [Contender("eager", partial(peer, eager, model, images))]
    if size.penalty == "none":
        fused = partial(functional_call, EagerSlotVAE(model, attend=fused_attention))
        peers.append(Contender("eager, SDPA", partial(peer, fused, model, images)))
    if size.compiled:
        peers.append(Contender("compiled eager", partial(peer, compile_step(eager, size.penalty), model, images)))
    return Case(
        suite="train",
        name=str(size),
        inputs=lambda: {name.replace(".", "_"): parameter for name, parameter in model.named_parameters()},
        outputs=("loss",),
        oracle=partial(peer, eager, model, images),
        ours=Contender("ours", partial(ours, model, images), backend=backend_of("slot_cross_attention", device)),
        peers=tuple(peers),
        device=device,
    )


def compile_step(step: Callable[..., Any], penalty: Penalty) -> Callable[..., Any]:
    """Inductor fails on nested jvp ("ZeroTensors are immutable"): its graph is captured, and run op by op."""
    derivatives = penalty not in ("none", "attention")
    return torch.compile(step, dynamic=False, fullgraph=True, backend="aot_eager" if derivatives else "inductor")


def ours(model: SlotVAE, images: Tensor, *parameters: Tensor) -> Outputs:
    """The loss with these parameters, in their precision."""
    arguments = {"step": WARMED_UP, "draws": SameDraws.at(0, 0, device=images.device)}
    return (functional_call(model, tensors_of(model, parameters), (images,), arguments)["loss"],)


def peer(step: Callable[..., Any], model: SlotVAE, images: Tensor, *parameters: Tensor) -> Outputs:
    """The same by an `EagerSlotVAE` of the model, called functionally."""
    drawn = draw(model.config, len(images), SameDraws.at(0, 0, device=images.device), parameters[0])
    return (step(tensors_of(model, parameters), (images, drawn)),)


def tensors_of(model: SlotVAE, parameters: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Parameters and buffers by name, in one precision."""
    named = dict(zip((name for name, _ in model.named_parameters()), parameters, strict=True))
    return named | {name: buffer.to(parameters[0].dtype) for name, buffer in model.named_buffers()}


class SameDraws(Draws):
    """The same numbers in every precision, so that the fp64 oracle solves the same problem."""

    def normal(self, like: Tensor) -> Tensor:
        return super().normal(like.float()).to(like.dtype)


class Drawn(NamedTuple):
    """What a step draws. A compiled graph takes it as an input, since it cannot hold a generator."""

    noise: Tensor
    """[B, K, slot_dim], of the slots."""
    order: Tensor | None
    """[N], the pixels: derivatives are taken of the first ones; None for all of them, row by row."""
    u: Tensor
    """[B, K, slot_dim], ±1 on a random half of the slots and 0 on the others; ``v`` the other way round."""
    v: Tensor


def draw(config: SlotVAEConfig, batch: int, draws: Draws, like: Tensor) -> Drawn:
    """As `SlotVAE` draws, in the same order; ``like`` gives precision and device."""
    noise = draws.normal(like.new_empty(batch, config.slots, config.slot_dim))
    order = None if config.loss.penalty_pixels is None else draws.permutation(config.image_size**2, like.device)
    ranked = draws.uniform(torch.empty(batch, config.slots, device=like.device)).argsort(1)
    side = (ranked < config.slots // 2).unsqueeze(-1)
    signs = draws.signs(noise)
    return Drawn(noise, order, signs * side, signs * ~side)


Attend = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
Norm = Callable[[nn.LayerNorm, Tensor], Tensor]


def attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """From pixels q [B, H, N, D] to slots k, v [B, H, K, D]: the result, and the weights [B, H, N, K]."""
    weights = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
    return weights @ v, weights


def fused_attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """For a step without a penalty, which needs no weights."""
    return scaled_dot_product_attention(q, k, v), q[:0]


def layer_norm(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    out: Tensor = norm(x)
    return out


def decomposed_norm(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    """By hand, since torch's nested jvp through layer_norm is silently wrong."""
    centred = x - x.mean(-1, keepdim=True)
    return centred * (centred.square().mean(-1, keepdim=True) + norm.eps).rsqrt() * norm.weight + norm.bias


class EagerSlotVAE(nn.Module):
    """A `SlotVAE` with a `CrossAttentionDecoder` in plain torch: it owns the same encoder and the same decoder, and of
    the decoder it uses the parameters only.
    """

    def __init__(self, model: SlotVAE, attend: Attend = attention) -> None:
        super().__init__()
        self.encoder, self.decoder = model.encoder, model.decoder
        self.config, self.attend = model.config, attend
        penalties = {"attention": self.by_attention, "hessian": self.by_hessian, "contrast": self.by_contrast}
        self.decode_with_penalty = penalties.get(model.config.loss.penalty, self.without_penalty)

    def forward(self, images: Tensor, drawn: Drawn) -> Tensor:
        """The loss of images uint8 [B, H, W, 3]."""
        loss = self.config.loss
        target = images.to(drawn.noise.dtype)
        slots = self.encoder(target.movedim(-1, 1) / 127.5 - 1, UNSEEDED)
        mean, logvar = slots.chunk(2, -1)
        z = mean + (logvar / 2).exp() * drawn.noise
        penalty, colours = self.decode_with_penalty(z, drawn)
        target = target.flatten(1, 2) / 255
        target = target if drawn.order is None else target[:, drawn.order]
        reconstruction = (colours - target).square().sum() / len(images)
        kl = (mean.square() + logvar.exp() - 1 - logvar).sum() / (2 * len(images))
        total: Tensor = loss.sigma * reconstruction + loss.beta * kl + loss.alpha * penalty
        return total

    def decode(
        self, z: Tensor, pixels: Tensor | None = None, norm: Norm = layer_norm, weights: list[Tensor] | None = None
    ) -> Tensor:
        """Colours [B, N, 3]; each layer's attention [B, H, N, K] is added to ``weights``."""
        decoder: Any = self.decoder
        positions = decoder.positions if pixels is None else decoder.positions[pixels]
        x = decoder.embed_pixels(positions).expand(len(z), -1, -1)
        slots = decoder.embed_slots(z)
        for layer in decoder.layers:
            q, k, v = (
                project(of).unflatten(-1, (layer.heads, -1)).transpose(1, 2)
                for project, of in (
                    (layer.to_q, norm(layer.norm_attention, x)),
                    (layer.to_k, slots),
                    (layer.to_v, slots),
                )
            )
            seen, attended = self.attend(q, k, v)
            if weights is not None:
                weights.append(attended)
            x = x + layer.to_out(seen.transpose(1, 2).flatten(-2))
            x = x + layer.feed_forward(norm(layer.norm_feed_forward, x))
        colours: Tensor = decoder.to_colour(x)
        return colours

    def without_penalty(self, z: Tensor, drawn: Drawn) -> tuple[Tensor, Tensor]:
        return z.new_zeros(()), self.decode(z)

    def by_attention(self, z: Tensor, drawn: Drawn) -> tuple[Tensor, Tensor]:
        weights: list[Tensor] = []
        colours = self.decode(z, weights=weights)
        w = torch.stack([attended.mean(1) for attended in weights]).mean(0)
        return ((w.sum(-1).square() - w.square().sum(-1)) / 2).mean(), colours

    def by_hessian(self, z: Tensor, drawn: Drawn) -> tuple[Tensor, Tensor]:
        """Of some pixels' derivatives the colours are kept, and only the other pixels are decoded plainly, as by us."""
        few, others = (None, None) if drawn.order is None else self.split(drawn.order)

        def decode(slots: Tensor) -> Tensor:
            return self.decode(slots, few, decomposed_norm)

        (colours, _), (_, mixed) = cast(Any, jvp(lambda a: jvp(decode, (a,), (drawn.u,)), (z,), (drawn.v,)))
        K, half = self.config.slots, self.config.slots // 2
        penalty = mixed.square().sum() / len(z) * (K * (K - 1) / (half * (K - half)))
        if few is None or others is None:
            return penalty, colours
        total = len(few) + len(others)
        return penalty * (total / len(few)), torch.cat([colours, self.decode(z, others)], 1)

    def split(self, order: Tensor) -> tuple[Tensor, Tensor]:
        count = self.config.loss.penalty_pixels
        return order[:count], order[count:]

    def by_contrast(self, z: Tensor, drawn: Drawn) -> tuple[Tensor, Tensor]:
        """By the Jacobian, one forward derivative for each number of a slot and each slot, all at once."""
        K, width = z.shape[1:]
        directions = torch.eye(K * width, dtype=z.dtype, device=z.device).view(-1, 1, K, width)

        def along(direction: Tensor) -> tuple[Tensor, Tensor]:
            decode = partial(self.decode, norm=decomposed_norm)
            return cast(Any, jvp(decode, (z,), (direction.expand_as(z),)))  # type: ignore[no-any-return]

        colours, moved = vmap(along, out_dims=cast(Any, (None, 0)))(directions)
        norms = torch.linalg.vector_norm(moved.unflatten(0, (K, width)), dim=1)
        pairs = (norms.sum(0).square() - norms.square().sum(0)) / 2
        return pairs.sum() / len(z), colours
