"""Tokenizers: images ↔ a grid of tokens, for generators that work on tokens and not on pixels.

    ConvVAE   a token is C numbers with noise         loss = ‖x − f(z)‖² + beta · KL(q(z|x) ‖ N(0, 1))
    VQVAE     a token is one of K codes of C numbers  loss = ‖x − f(e)‖² + commitment · ‖z − e‖²,  e the code next to z

Squared errors and KL are sums over an image and means over the batch. Networks are convolutions without norms, so a
token tells of its neighbourhood only, and a new combination of familiar parts is no new input to most of them.

Latents go out, and come back in, with mean 0 and variance 1 per channel. The codebook and those moments are not
trained by gradients but follow the data as moving averages: a forward in training adds to a tally, and `end_step`,
which the trainer calls once per step, sums it over ranks and moves the averages. So a step does the same on any number
of ranks and micro-batches, up to the order of sums, and all ranks agree bit for bit. Not for training by itself.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compgen_fast.draws import Draws
from compgen_fast.models.config import ConvVAEConfig, TokenizerConfig, VQVAEConfig
from compgen_fast.models.slot_vae import UNSEEDED, as_bytes, in_full, scaled, warmed

PATCHES = (2, 4, 8, 16, 32)
MOMENTS_KEPT = 0.99  # of the latents' mean and variance, from one step to the next
LEAST_DEVIATION = 1e-4
APART = 1e-2  # of the outputs' deviation: how far a revived code must be from all others


class Tokenizer(nn.Module, ABC):
    """An encoder, a decoder, and the scale of what is between them.

    Args:
        config: sizes.
        outputs: numbers that the encoder gives for a token.
    """

    config: TokenizerConfig
    latent_mean: Tensor
    latent_deviation: Tensor
    tally: Tensor

    def __init__(self, config: TokenizerConfig, outputs: int) -> None:
        super().__init__()
        self.config, self.side = config, config.image_size // config.patch
        self.encoder = _encoder(config, outputs)
        self.decoder = _decoder(config)
        self.register_buffer("latent_mean", torch.zeros(config.channels))
        self.register_buffer("latent_deviation", torch.ones(config.channels))

    @property
    def tokens(self) -> int:
        """T, of an image: row by row."""
        return self.side**2

    @abstractmethod
    def encode(self, images: Tensor, draws: Draws = UNSEEDED) -> Tensor:
        """Latents [B, T, C] of images uint8 [B, H, W, 3]; nothing is drawn."""

    @abstractmethod
    def decode(self, tokens: Tensor) -> Tensor:
        """Colours [B, H, W, 3] from 0 to 1, or a little outside, of latents [B, T, C]."""

    @abstractmethod
    def end_step(self, total: Callable[[Tensor], Tensor]) -> None:
        """After an optimiser step; ``total`` sums a tensor over ranks, in place."""

    @torch.no_grad()
    def paint(self, tokens: Tensor) -> Tensor:
        """Images uint8 [B, H, W, 3] of what `decode` takes."""
        return as_bytes(self.decode(tokens))

    def reconstruct(self, images: Tensor, draws: Draws = UNSEEDED) -> Tensor:
        """Images uint8 [B, H, W, 3] as they come back from their tokens."""
        with torch.no_grad():
            return self.paint(self.encode(images, draws))

    def _encoded(self, images: Tensor) -> Tensor:
        """What the encoder says of each token, [B, T, outputs]."""
        grid = self.encoder(scaled(images, self.config.image_size, self.encoder))
        return in_full(grid).flatten(2).transpose(1, 2)

    def _decoded(self, z: Tensor) -> Tensor:
        """Colours [B, H, W, 3] of tokens [B, T, C] on the networks' own scale."""
        grid = z.transpose(1, 2).unflatten(2, (self.side, self.side))
        colours: Tensor = self.decoder(grid)
        return in_full(colours).movedim(1, -1)

    def _standard(self, z: Tensor) -> Tensor:
        return (z - self.latent_mean) / self.latent_deviation

    def _own_scale(self, latents: Tensor) -> Tensor:
        shape = (self.tokens, self.config.channels)
        if not latents.is_floating_point() or latents.shape[1:] != shape:
            raise ValueError(
                f"{type(self).__name__}: latents are {latents.dtype} {list(latents.shape)}; expected floating-point "
                f"numbers [B, {shape[0]}, {shape[1]}], as encode gives them"
            )
        return latents * self.latent_deviation + self.latent_mean

    def _keep_scale(self, mean: Tensor, variance: Tensor) -> None:
        self.latent_mean.copy_(mean)
        self.latent_deviation.copy_(variance.clamp_min(LEAST_DEVIATION**2).sqrt())


class ConvVAE(Tokenizer):
    """Continuous tokens. Latents are posterior means, scaled by mean and deviation of what the decoder is trained on:
    a channel that carries nothing stays near 0 and is not blown up to variance 1.
    """

    config: ConvVAEConfig
    moments: Tensor

    def __init__(self, config: ConvVAEConfig) -> None:
        super().__init__(config, 2 * config.channels)
        start = torch.stack([torch.zeros(config.channels), torch.ones(config.channels)])
        self.register_buffer("moments", start)  # the means of z and z²
        self.register_buffer("tally", torch.zeros(3, config.channels), persistent=False)  # sums of 1, z and z²

    def forward(
        self, images: Tensor, factors: Mapping[str, Tensor] | None = None, *, step: int = 0, draws: Draws = UNSEEDED
    ) -> dict[str, Tensor]:
        """The loss of images uint8 [B, H, W, 3], and without gradient: ``reconstruction`` (squared error summed over
        an image, colours from 0 to 1), ``mse`` (the same per colour of a pixel), ``kl`` and its weight ``beta``.
        ``factors`` are not used.
        """
        mean, logvar = self._encoded(images).chunk(2, -1)
        z = mean + (logvar / 2).exp() * draws.normal(mean)
        if self.training:
            self._note(z.detach().flatten(0, 1))
        reconstruction = squared_error(self._decoded(z), images)
        kl = (mean.square() + logvar.exp() - 1 - logvar).sum() / (2 * len(images))
        beta = warmed(self.config.beta, self.config.beta_warmup, step)
        named = {
            "reconstruction": reconstruction,
            "mse": reconstruction / images[0].numel(),
            "kl": kl,
            "beta": kl.new_full((), beta),
        }
        return {"loss": reconstruction + beta * kl} | {name: value.detach() for name, value in named.items()}

    def encode(self, images: Tensor, draws: Draws = UNSEEDED) -> Tensor:
        mean, _ = self._encoded(images).chunk(2, -1)
        return self._standard(mean)

    def decode(self, tokens: Tensor) -> Tensor:
        return self._decoded(self._own_scale(tokens))

    def _note(self, z: Tensor) -> None:
        self.tally += torch.stack([torch.full_like(z[0], len(z)), z.sum(0), z.square().sum(0)])

    @torch.no_grad()
    def end_step(self, total: Callable[[Tensor], Tensor]) -> None:
        count, *sums = total(self.tally)
        self.moments.lerp_(torch.stack(sums) / count, 1 - MOMENTS_KEPT)
        mean, square = self.moments
        self._keep_scale(mean, square - mean.square())
        self.tally.zero_()


class VQVAE(Tokenizer):
    """Tokens out of a codebook. Latents are the code vectors, so that a generator of latents and one of codes are told
    the same; latents that are not exactly codes are decoded as the codes next to them.

    A code follows the moving average of what the encoder puts next to it. One that nothing was next to for more than
    ``revive_after`` steps is dead, and is put on an encoder output drawn from the whole batch, if no code is there. All
    codes begin as if dead, so the first steps spread them over the data.
    """

    config: VQVAEConfig
    codebook: Tensor
    counts: Tensor
    sums: Tensor
    idle: Tensor

    def __init__(self, config: VQVAEConfig) -> None:
        super().__init__(config, config.channels)
        shape = config.codes, config.channels
        self.register_buffer("codebook", torch.randn(shape))
        self.register_buffer("counts", torch.zeros(config.codes, 1))
        self.register_buffer("sums", torch.zeros(shape))
        self.register_buffer("idle", torch.full((config.codes, 1), config.revive_after))
        # For each code: how many outputs were next to it, their sum, and where it goes if it is dead.
        self.register_buffer("tally", torch.zeros(config.codes, 1 + 2 * config.channels), persistent=False)

    def forward(
        self, images: Tensor, factors: Mapping[str, Tensor] | None = None, *, step: int = 0, draws: Draws = UNSEEDED
    ) -> dict[str, Tensor]:
        """The loss of images uint8 [B, H, W, 3], and without gradient: ``reconstruction`` (squared error summed over
        an image, colours from 0 to 1), ``mse`` (the same per colour of a pixel), ``commitment`` (squared distance of
        encoder outputs from their codes, summed), and ``perplexity``, how many codes would be as spread if all were
        used equally often. ``factors`` and ``step`` are not used.
        """
        z = self._encoded(images)
        codes = self._nearest(z)
        vectors = self.codebook[codes]
        if self.training:
            self._note(z.detach().flatten(0, 1), codes.flatten(), draws)
        reconstruction = squared_error(self._decoded(z + (vectors - z).detach()), images)
        commitment = (z - vectors).square().sum() / len(images)
        named = {
            "reconstruction": reconstruction,
            "mse": reconstruction / images[0].numel(),
            "commitment": commitment,
            "perplexity": self._shares().clamp_min(1e-10).log().mul(-self._shares()).sum().exp(),
        }
        loss = reconstruction + self.config.commitment * commitment
        return {"loss": loss} | {name: value.detach() for name, value in named.items()}

    def codes(self, images: Tensor) -> Tensor:
        """The code of each token, int64 [B, T], of images uint8 [B, H, W, 3]."""
        with torch.no_grad():
            return self._nearest(self._encoded(images))

    def encode(self, images: Tensor, draws: Draws = UNSEEDED) -> Tensor:
        return self._standard(self.codebook[self.codes(images)])

    def embed(self, codes: Tensor) -> Tensor:
        """Latents [B, T, C] of codes [B, T]."""
        return self._standard(self.codebook[self._checked(codes)])

    def decode(self, tokens: Tensor) -> Tensor:
        """Colours [B, H, W, 3] from 0 to 1, or a little outside, of codes [B, T] or latents [B, T, C]."""
        codes = self._nearest(self._own_scale(tokens)) if tokens.is_floating_point() else self._checked(tokens)
        return self._decoded(self.codebook[codes])

    def _checked(self, codes: Tensor) -> Tensor:
        most = self.config.codes
        if (
            codes.is_floating_point()
            or codes.shape[1:] != (self.tokens,)
            or not (codes >= 0).all() & (codes < most).all()
        ):
            raise ValueError(
                f"VQVAE: codes are {codes.dtype} {list(codes.shape)}; expected whole numbers [B, {self.tokens}] from 0 "
                f"to {most - 1} (a mask token is no code: fill it in first)"
            )
        return codes

    @torch.no_grad()
    def _nearest(self, z: Tensor) -> Tensor:
        """The code next to each of z [B, T, C]: int64 [B, T]."""
        nearest: Tensor = distances(z.flatten(0, 1), self.codebook).argmin(1)
        return nearest.view(z.shape[:2])

    def _shares(self) -> Tensor:
        """How often each code is used, [K, 1]; zeros before the first step."""
        return self.counts / self.counts.sum().clamp_min(1e-10)

    def _note(self, z: Tensor, codes: Tensor, draws: Draws) -> None:
        """Adds outputs [n, C] and their codes [n] to the tally. Where dead codes go is drawn for the whole batch, and
        the rank and micro-batch that holds that output notes it: the others add nothing.
        """
        first, rows = draws.first * self.tokens, (draws.total or len(z) // self.tokens) * self.tokens
        places = draws.permutation(rows, z.device)[torch.arange(len(self.tally), device=z.device) % rows] - first
        here = (places >= 0) & (places < len(z))
        with torch.autocast(z.device.type, enabled=False):
            chosen = F.one_hot(codes, len(self.tally)).to(z.dtype)
            found = z[places.clamp(0, len(z) - 1)] * here[:, None]
            self.tally += torch.cat([chosen.sum(0)[:, None], chosen.T @ z, found], 1)

    @torch.no_grad()
    def end_step(self, total: Callable[[Tensor], Tensor]) -> None:
        channels, new = self.config.channels, 1 - self.config.decay
        used, sums, elsewhere = total(self.tally).split([1, channels, channels], 1)
        self.counts.lerp_(used, new)
        self.sums.lerp_(sums, new)
        self.codebook.copy_(torch.where(used > 0, self.sums / self.counts, self.codebook))
        self.idle.add_(1).mul_(used == 0)
        revived = self._revived(elsewhere)
        for buffer, value in (
            (self.codebook, elsewhere),
            (self.counts, new),
            (self.sums, new * elsewhere),
            (self.idle, 0),
        ):
            buffer.copy_(torch.where(revived, value, buffer))
        shares = self._shares()
        mean = (shares * self.codebook).sum(0)
        self._keep_scale(mean, (shares * (self.codebook - mean).square()).sum(0))
        self.tally.zero_()

    def _revived(self, elsewhere: Tensor) -> Tensor:
        """Which codes are dead and go elsewhere [K, C] now, bool [K, 1]: not where a code is already, or goes before
        them. Most outputs show the same background, and of two equal codes rounding would choose.
        """
        dead = self.idle > self.config.revive_after
        places = torch.where(dead, elsewhere, self.codebook)
        apart = APART * elsewhere.var(0).sum().sqrt()
        close = distances(places, places) <= apart
        taken = close & (~dead.T | close.new_ones(close.shape).tril(-1))
        return dead & ~taken.fill_diagonal_(False).any(1, keepdim=True)


def distances(a: Tensor, b: Tensor) -> Tensor:
    """[n, m] between a [n, C] and b [m, C]. Not by way of a·b, whose rounding would hide small ones."""
    return torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist")


def squared_error(colours: Tensor, images: Tensor) -> Tensor:
    """Of colours [B, H, W, 3] from 0 to 1 against images uint8: summed over an image, mean over the batch."""
    return (colours - in_full(images) / 255).square().sum() / len(images)


def check_tokenizer(config: TokenizerConfig) -> None:
    """Raises a ValueError that says what to change."""
    if config.patch not in PATCHES or config.image_size < 1 or config.image_size % config.patch:
        raise ValueError(
            f"patch is {config.patch} for images of {config.image_size}×{config.image_size}; expected one of "
            f"{', '.join(map(str, PATCHES))} that divides the side"
        )
    for name, least in (("width", 1), ("blocks", 0), ("channels", 1)):
        if getattr(config, name) < least:
            raise ValueError(f"{name} is {getattr(config, name)}; expected at least {least}")
    if isinstance(config, ConvVAEConfig) and (config.beta < 0 or config.beta_warmup < 0):
        raise ValueError(f"beta is {config.beta} and beta_warmup {config.beta_warmup}; expected 0 or more")
    if isinstance(config, VQVAEConfig):
        _check_codebook(config)


def _check_codebook(config: VQVAEConfig) -> None:
    if config.codes < 2 or config.revive_after < 1:
        raise ValueError(
            f"codes is {config.codes} and revive_after {config.revive_after}; expected at least 2 codes and 1 step"
        )
    if config.commitment <= 0 or not 0 <= config.decay < 1:
        raise ValueError(
            f"commitment is {config.commitment} and decay {config.decay}; expected a commitment above 0, without which "
            "the encoder runs away from its codes, and a decay from 0 to below 1"
        )


class _Residual(nn.Module):
    """x + a 3×3 and a 1×1 convolution of it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.SiLU(), nn.Conv2d(width, width, 3, padding=1), nn.SiLU(), nn.Conv2d(width, width, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        changed: Tensor = x + self.layers(x)
        return changed


def _encoder(config: TokenizerConfig, outputs: int) -> nn.Module:
    """[B, 3, H, W] in [−1, 1] → [B, outputs, side, side], halving the sides until a cell is a patch."""
    layers: list[nn.Module] = []
    for layer in range(int(math.log2(config.patch))):
        layers += [nn.Conv2d(config.width if layer else 3, config.width, 4, stride=2, padding=1), nn.SiLU()]
    layers += [_Residual(config.width) for _ in range(config.blocks)]
    return nn.Sequential(*layers, nn.Conv2d(config.width, outputs, 1))


def _decoder(config: TokenizerConfig) -> nn.Module:
    """[B, C, side, side] → [B, 3, H, W]."""
    layers: list[nn.Module] = [nn.Conv2d(config.channels, config.width, 1)]
    layers += [_Residual(config.width) for _ in range(config.blocks)]
    for _ in range(int(math.log2(config.patch)) - 1):
        layers += [nn.SiLU(), nn.ConvTranspose2d(config.width, config.width, 4, stride=2, padding=1)]
    return nn.Sequential(*layers, nn.SiLU(), nn.ConvTranspose2d(config.width, 3, 4, stride=2, padding=1))
