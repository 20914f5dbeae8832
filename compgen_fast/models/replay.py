"""Replay: an encoder learns from images it has never seen, made by its own decoder from recombined slots.

    z̃_k drawn from slot k of some training image, each k on its own        x̃ = f(z̃), no gradient
    loss = ‖z̃ − enc(x̃)‖² + seen · ‖before(x) − enc(x)‖²

The first term shows combinations that training images never had, the second holds the encoder to what it said of
training images before, so that the decoder still understands it. Only the encoder learns. What it is not for: a decoder
whose slots interact, since what it makes of slots that never met may look like nothing.
"""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from compgen_fast.draws import Draws
from compgen_fast.models.config import ReplayConfig, SlotVAEConfig
from compgen_fast.models.matching import match_latents, take_slots
from compgen_fast.models.slot_vae import UNSEEDED, SlotVAE, as_bytes, gaussians


class Replay(nn.Module):
    """A slot VAE in replay. Give it a trained one (`begin_with`), then training images (`fill`).

    Args:
        config: settings.
        vae: whose encoder learns; its decoder is frozen. ``before`` is the encoder as it is now.
    """

    def __init__(self, config: ReplayConfig, vae: SlotVAE) -> None:
        super().__init__()
        self.config, self.vae, self.before = config, vae, copy.deepcopy(vae.encoder)
        # Until it is filled, draws from the prior. A buffer, so that checkpoints and exported weights have it.
        self.register_buffer("bank", torch.randn(config.bank, config.vae.slots, config.vae.slot_dim))
        self.decoder.requires_grad_(False)
        self.before.requires_grad_(False)

    @property
    def decoder(self) -> nn.Module:
        return self.vae.decoder

    def begin_with(self, vae: Mapping[str, Tensor]) -> None:
        """Takes the weights of a trained VAE."""
        self.vae.load_state_dict(vae)
        self.before.load_state_dict(self.vae.encoder.state_dict())

    @torch.no_grad()
    def fill(self, batches: Iterable[Tensor]) -> None:
        """Keeps the slots of training images uint8 [B, H, W, 3], as the VAE gave them, until the bank is full."""
        filled, bank = 0, self.get_buffer("bank")
        for images in batches:
            slots = self._said_before(images, Draws.at(0, filled, device=images.device))[: len(bank) - filled]
            bank[filled : filled + len(slots)] = slots
            filled += len(slots)
            if filled == len(bank):
                return
        raise ValueError(
            f"replay: bank is {len(bank)}, but there are only {filled} training images; set a smaller bank"
        )

    def forward(
        self,
        images: Tensor,
        factors: Mapping[str, Tensor] | None = None,
        *,
        step: int = 0,
        draws: Draws = UNSEEDED,
    ) -> dict[str, Tensor]:
        """The loss of a batch of training images uint8 [B, H, W, 3], and without gradient its parts: ``replayed`` and
        ``seen``, squared errors per number of a slot. ``factors`` and ``step`` are not used.
        """
        wanted = self.recombined(len(images), draws)
        with torch.no_grad():
            composites = as_bytes(self.decode(wanted)).view(images.shape)
        replayed = self._error(composites, wanted, draws)
        seen = self._error(images, self._said_before(images, _copied(draws)), draws)
        named = {"replayed": replayed.detach(), "seen": seen.detach()}
        return {"loss": replayed + self.config.seen * seen} | named

    @torch.no_grad()
    def recombined(self, count: int, draws: Draws = UNSEEDED) -> Tensor:
        """Slots [count, K, D], each from a training image of its own, with the jitter that is set."""
        bank, jitter = self.get_buffer("bank"), self.config.jitter
        chances = draws.uniform(bank.new_empty(count, bank.shape[1]))
        noise = jitter * draws.normal(bank.new_empty(count, *bank.shape[1:])) if jitter else None
        return recombined(bank, chances, has_roles(self.config.vae), noise)

    def encode(self, images: Tensor, draws: Draws = UNSEEDED) -> tuple[Tensor, Tensor]:
        """Means and log-variances of the slots, as `SlotVAE.encode` gives them. Log-variances are not trained."""
        return self.vae.encode(images, draws)

    def decode(self, z: Tensor, pixels: Tensor | None = None) -> Tensor:
        return self.vae.decode(z, pixels)

    def reconstruct(self, images: Tensor, draws: Draws = UNSEEDED) -> Tensor:
        return self.vae.reconstruct(images, draws)

    @torch.no_grad()
    def _said_before(self, images: Tensor, draws: Draws) -> Tensor:
        return gaussians(self.before, images, self.config.image_size, draws)[0]

    def _error(self, images: Tensor, wanted: Tensor, draws: Draws) -> Tensor:
        found = self.encode(images, draws)[0]
        if not has_roles(self.config.vae):
            found = take_slots(found, match_latents(found, wanted))
        return (found - wanted).square().mean()


def recombined(bank: Tensor, chances: Tensor, roles: bool, noise: Tensor | None = None) -> Tensor:
    """Slots [n, K, D] from a bank [m, K, D], each from the image of it that its chance [n, K] in [0, 1) chooses.

    With roles, slot k is slot k of that image. Without, all slots are alike, and any slot may take any place. ``noise``
    [n, K, D] is added in deviations of what was chosen from.
    """
    pool = bank if roles else bank.flatten(0, 1)
    chosen = (chances * len(pool)).long()
    z = pool[chosen, torch.arange(bank.shape[1], device=bank.device)] if roles else pool[chosen]
    return z if noise is None else z + noise * pool.std(0, correction=0)


def has_roles(config: SlotVAEConfig) -> bool:
    """Whether slot k means the same in all images."""
    return config.encoder.slots_by != "attention"


def _copied(draws: Draws) -> Draws:
    """Draws that come out the same once more, so that both encoders start Slot Attention alike; not those of torch's
    own generator, which all code shares.
    """
    return draws if draws.generator is None else replace(draws, generator=draws.generator.clone_state())
