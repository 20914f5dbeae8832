"""The slot VAE: images → a Gaussian per slot → images, with a penalty on how much slots interact in the decoder.

    loss = sigma · ‖x − f(z)‖² + beta · KL(q(z|x) ‖ N(0, 1)) + alpha · R(f, z)        z ~ q(z|x)

Squared error and KL are sums over an image, R is a penalty of `compgen_fast.jets`. Everything is a mean over the batch,
so the losses of equal parts of a batch average to the loss of the whole. The penalty is computed in the forward pass,
and the image is decoded once for both. Not for training: that is the trainer's task.
"""

from collections.abc import Iterator, Mapping
from typing import cast

import torch
from torch import Tensor, nn

from compgen_fast.draws import Draws
from compgen_fast.jets import interaction_penalty
from compgen_fast.jets.penalty import Method
from compgen_fast.models.binding import binding, unbound
from compgen_fast.models.config import SlotVAEConfig

UNSEEDED = Draws()


class SlotVAE(nn.Module):
    """An encoder and a decoder as a VAE.

    Args:
        config: sizes and losses.
        encoder: images [B, 3, H, W] in [−1, 1], Draws → [B, slots, 2 · slot_dim], means and log-variances.
        decoder: z [B, slots, slot_dim] → [B, H · W, 3], row by row. For ``penalty_pixels`` also ``pixels=index``; one
            that decodes pixels in groups lists them as ``patch_pixels`` [groups, pixels of a group].
    """

    def __init__(self, config: SlotVAEConfig, encoder: nn.Module, decoder: nn.Module) -> None:
        super().__init__()
        self.config, self.encoder, self.decoder = config, encoder, decoder

    def forward(
        self,
        images: Tensor,
        factors: Mapping[str, Tensor] | None = None,
        *,
        step: int = 0,
        draws: Draws = UNSEEDED,
    ) -> dict[str, Tensor]:
        """The loss of a batch, and what it is made of.

        Args:
            images: uint8 [B, H, W, 3].
            factors: not used; models that need labels take them here.
            step: how far training is, for the warm-ups.
            draws: source of all random numbers.

        Returns:
            ``loss``, and without gradient: ``reconstruction`` (squared error summed over an image, colours from 0 to
            1), ``mse`` (the same per colour of a pixel), ``kl``, ``penalty``, and the weights in use, ``alpha`` and
            ``beta``.
        """
        loss = self.config.loss
        alpha = warmed(loss.alpha, loss.alpha_warmup, step - loss.alpha_start)
        beta = warmed(loss.beta, loss.beta_warmup, step)
        mean, logvar = self.encode(images, draws)
        z = mean + (logvar / 2).exp() * draws.normal(mean)
        penalty, colours, order = self._decoded(z, alpha, draws)

        target = images.flatten(1, 2)
        target = target if order is None else target[:, order]
        reconstruction = (in_full(colours) - in_full(target) / 255).square().sum() / len(images)
        kl = (mean.square() + logvar.exp() - 1 - logvar).sum() / (2 * len(images))
        named = {
            "reconstruction": reconstruction,
            "mse": reconstruction / target.shape[1:].numel(),
            "kl": kl,
            "penalty": in_full(penalty),
            "alpha": kl.new_full((), alpha),
            "beta": kl.new_full((), beta),
        }
        total = loss.sigma * reconstruction + beta * kl + alpha * penalty
        return {"loss": total} | {name: value.detach() for name, value in named.items()}

    def encode(self, images: Tensor, draws: Draws = UNSEEDED) -> tuple[Tensor, Tensor]:
        """Means and log-variances of the slots, [B, slots, slot_dim] each, of images uint8 [B, H, W, 3]."""
        return gaussians(self.encoder, images, self.config.image_size, draws)

    def decode(self, z: Tensor, pixels: Tensor | None = None) -> Tensor:
        """Colours [B, N, 3] from 0 to 1, or a little outside, of all pixels or of those given by flat index."""
        colours: Tensor = self.decoder(z) if pixels is None else self.decoder(z, pixels=pixels)
        return colours

    @torch.no_grad()
    def reconstruct(self, images: Tensor, draws: Draws = UNSEEDED) -> Tensor:
        """Images uint8 [B, H, W, 3] as the decoder draws the means of their slots."""
        mean, _ = self.encode(images, draws)
        return as_bytes(self.decode(mean)).view(images.shape)

    @property
    def warmed_after(self) -> int:
        loss = self.config.loss
        return max(loss.alpha_start + loss.alpha_warmup, loss.beta_warmup)

    @torch.no_grad()
    def diagnose(self, images: Tensor, draws: Draws = UNSEEDED) -> dict[str, Tensor]:
        """The `binding` of slots by the decoder's masks, where it has any."""
        with_masks = getattr(self.decoder, "decode_with_masks", None)
        if with_masks is None or self.config.slots == 1:
            return {}
        return binding(in_full(with_masks(self.encode(images, draws)[0])[1]))

    def fault(self, found: Mapping[str, float]) -> str | None:
        """What is wrong with slots of this `diagnose`, and what to try; None if nothing is."""
        wrong = unbound(found) if found else None
        return wrong and f"{wrong}. What to try: {', or '.join(self._tries())}"

    def _tries(self) -> Iterator[str]:
        if self.config.decoder.kind != "frame":
            yield "the recipe frame_vae_cpu, whose slots paint in frames of their own"
        if self.config.loss.penalty != "none":
            yield "a smaller --model.loss.alpha or a later --model.loss.alpha-start"
        yield "more --steps"

    def _decoded(self, z: Tensor, alpha: float, draws: Draws) -> tuple[Tensor, Tensor, Tensor | None]:
        """The penalty, and the colours [B, N, 3] in the order of these pixels; None for row by row."""
        loss = self.config.loss
        if loss.penalty == "none" or alpha == 0:
            return z.new_zeros(()), self.decode(z), None
        if loss.penalty_pixels in (None, self.config.image_size**2):
            return *self._penalty(z, None, draws), None
        # The derivatives of a few pixels bring their colours along; only the others are decoded plainly.
        order = self._pixels_in_random_order(draws, z.device)
        few, others = order[: loss.penalty_pixels], order[loss.penalty_pixels :]
        penalty, colours = self._penalty(z, few, draws)
        colours = torch.cat([in_full(colours), in_full(self.decode(z, others))], 1)
        return penalty * (len(order) / len(few)), colours, order

    def _penalty(self, z: Tensor, pixels: Tensor | None, draws: Draws) -> tuple[Tensor, Tensor]:
        loss = self.config.loss
        return interaction_penalty(
            self.decoder,
            z,
            method=cast(Method, loss.penalty),
            probes=loss.probes,
            pixels=pixels,
            generator=draws,
            checkpoint=self.config.checkpoint_activations,
            return_output=True,
        )

    def _pixels_in_random_order(self, draws: Draws, device: torch.device) -> Tensor:
        """All pixels [N]; those that decode together stay together, so that no group is decoded twice."""
        groups: Tensor | None = getattr(self.decoder, "patch_pixels", None)
        if groups is None:
            return draws.permutation(self.config.image_size**2, device)
        return groups[draws.permutation(len(groups), device)].flatten()


def warmed(weight: float, steps: int, step: int) -> float:
    """A weight that grows linearly from 0 over so many steps; 0 before the first."""
    if step >= steps:
        return weight
    return weight * step / steps if step > 0 else 0.0


def gaussians(encoder: nn.Module, images: Tensor, image_size: int, draws: Draws) -> tuple[Tensor, Tensor]:
    """Means and log-variances [B, slots, slot_dim] that an encoder gives for images uint8 [B, H, W, 3]."""
    mean, logvar = in_full(encoder(scaled(images, image_size, encoder), draws)).chunk(2, -1)
    return mean, logvar


def as_bytes(colours: Tensor) -> Tensor:
    """Colours from 0 to 1, or a little outside, as images hold them."""
    return (in_full(colours).clamp(0, 1) * 255).round().to(torch.uint8)


def scaled(images: Tensor, image_size: int, encoder: nn.Module) -> Tensor:
    """uint8 [B, H, W, 3] as an encoder wants it: [B, 3, H, W] in [−1, 1], in the precision of its parameters."""
    if images.dtype != torch.uint8 or images.shape[1:] != (image_size, image_size, 3):
        raise ValueError(
            f"images are {images.dtype} {list(images.shape)}; expected torch.uint8 [B, {image_size}, {image_size}, 3], "
            "as data sets give them (resize them, or set the model's image_size)"
        )
    precision = next(encoder.parameters()).dtype
    return images.movedim(-1, 1).to(precision) / 127.5 - 1


def in_full(x: Tensor) -> Tensor:
    """At least fp32: sums over an image do not survive 8 bits."""
    return x if x.dtype == torch.float64 else x.float()
