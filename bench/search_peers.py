"""The problems of the suite `search`, and the loop that users write to solve them: Adam on the latents, all pixels, all
images at once.

A problem is made so that no contender can see what it is judged by. One pixel in eight is taken away from everybody:
from the images, and from the decoder, of which each side gets a copy that draws its own pixels only.

There are two kinds. **trained**: the decoder of `frame_vae_cpu`, trained here for a few hundred steps and kept, on
images with unseen combinations, from the encoder's latents; it cannot draw them exactly. **reference**: the papers'
decoder, untrained, on images that it drew itself, from latents that are some way off; an error of zero exists.
"""

import copy
import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, cast

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from compgen_fast import invert
from compgen_fast.draws import Draws
from compgen_fast.models import CrossAttentionDecoder
from compgen_fast.models.build import build, build_decoder
from compgen_fast.models.config import SlotVAEConfig
from compgen_fast.models.slot_vae import SlotVAE, as_bytes
from compgen_fast.recipes import frame_vae_cpu
from compgen_fast.train.config import TrainConfig
from compgen_fast.train.data import part

Kind = Literal["trained", "reference"]
HELD_OUT = 8  # one pixel in so many is shown to nobody
TRAINING, TRAINED_ON = 3_000, 20_000  # steps and images, as the recipe says: two minutes
SLOT_DIM = 64  # of the reference decoder
SHARPER, GAIN = 10.0, 2.5  # attention and colours than at first, where all slots look alike and all pixels grey
WAY_OFF = 0.5  # deviation of the reference's starts from the latents that drew the images, which have 1


@dataclass(frozen=True)
class Size:
    """What is searched: whose decoder, the images' side, slots, how many images, and starts for each."""

    kind: Kind
    side: int
    slots: int
    images: int
    starts: int = 1
    everyone: bool = False
    """Whether those take part that need a minute, torch.compile and Newton's steps."""

    def __str__(self) -> str:
        starts = "" if self.starts == 1 else f", {self.starts} starts"
        return f"{self.kind} {self.side} px, {self.slots} slots, {self.images} image{_s(self.images)}{starts}"


def _s(count: int) -> str:
    return "" if count == 1 else "s"


@dataclass(frozen=True, eq=False)
class Problem:
    """Images to explain, as contenders see them, and what they are judged by."""

    decoder: nn.Module  # draws the pixels shown
    images: Tensor  # uint8 [I, h, w, 3], those pixels
    init: Tensor  # [I, R, K, D]
    judge: nn.Module  # the same decoder, draws the pixels held out
    truth: Tensor  # uint8 [I, P, 3], those pixels

    @torch.no_grad()
    def errors(self, z: Tensor) -> Tensor:
        """Mean squared error [I] of latents [I, K, D] on pixels that nobody was shown."""
        return _errors(self.judge, z, self.truth)

    @torch.no_grad()
    def best(self, z: Tensor) -> Tensor:
        """Of latents [I · R, K, D] those [I, K, D] with the lowest error on the pixels shown."""
        images, starts = self.init.shape[:2]
        if starts == 1:
            return z
        shown = self.images.flatten(1, 2).repeat_interleave(starts, 0)
        lowest = _errors(self.decoder, z, shown).view(images, starts).argmin(1)
        return z.view(images, starts, *z.shape[1:])[torch.arange(images, device=z.device), lowest]


def _errors(decoder: nn.Module, z: Tensor, images: Tensor) -> Tensor:
    colours: Tensor = decoder(z)
    return (colours - images / 255).square().mean((1, 2))


def problem(size: Size, device: str, folder: Path) -> Problem:
    """The problem of this size; the trained decoder is kept in ``folder``."""
    make = _trained_problem if size.kind == "trained" else _reference_problem
    decoder, images, init = make(size, folder)
    return hold_out(decoder.to(device), images.to(device), init.to(device))


def hold_out(decoder: nn.Module, images: Tensor, init: Tensor) -> Problem:
    """One pixel in eight is held out; the others are shown as an image of seven eighths of the height."""
    pixels = images.shape[1:3].numel()
    order = torch.randperm(pixels, generator=torch.Generator().manual_seed(0)).to(images.device)
    held_out, shown = (part.sort().values for part in order.split([pixels // HELD_OUT, pixels - pixels // HELD_OUT]))
    flat = images.flatten(1, 2)
    seen = flat[:, shown].unflatten(1, (-1, images.shape[2]))
    return Problem(only(decoder, shown), seen, init, only(decoder, held_out), flat[:, held_out])


def only(decoder: nn.Module, pixels: Tensor) -> nn.Module:
    """A copy that draws these pixels only, at no cost for the others: its tables of all pixels have lost their rows."""
    total, smaller = cast(int, decoder.num_pixels), copy.deepcopy(decoder)
    for module in smaller.modules():
        for name, table in module.named_buffers(recurse=False):
            if table.shape[:1] == (total,):
                setattr(module, name, table[pixels])
    if smaller.num_pixels == total:  # a number rather than a look at a table
        smaller.num_pixels = len(pixels)  # type: ignore[assignment]
    return smaller


# ------------------------------------------------------------------------------------------------ trained


def _trained_problem(size: Size, folder: Path) -> tuple[nn.Module, Tensor, Tensor]:
    """Frames have no resolution: what was learnt on small images draws large ones. The encoder sees small ones."""
    recipe = frame_vae_cpu()
    config = cast(SlotVAEConfig, recipe.model)
    if size.slots != config.slots:
        raise ValueError(f"{size}: the trained decoder has {config.slots} slots; expected as many")
    model = trained(recipe, folder)
    decoder = build_decoder(replace(config, image_size=size.side)).eval()
    decoder.load_state_dict(model.decoder.state_dict())
    small, images = (
        torch.from_numpy(part(recipe.data, side, "ood").samples(np.arange(size.images)).images)
        for side in (config.image_size, size.side)
    )
    with torch.no_grad():
        encoded = model.encode(small)[0]
    generator = torch.Generator().manual_seed(0)
    return decoder, images, invert.starts(encoded, swapped=size.starts - 1, generator=generator)


def trained(recipe: TrainConfig, folder: Path) -> SlotVAE:
    """The recipe's model after the first steps of its training, made once and kept."""
    torch.manual_seed(0)
    model = cast(SlotVAE, build(recipe.model)).eval()
    shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}  # code may change under a recipe
    made_of = repr((shapes, recipe.model, recipe.data, recipe.optimiser, recipe.batch_size, TRAINING, TRAINED_ON))
    file = folder / f"search-model-{hashlib.sha256(made_of.encode()).hexdigest()[:12]}.safetensors"
    if not file.exists():
        images = part(recipe.data, recipe.model.image_size, "train").samples(np.arange(TRAINED_ON)).images
        train(model, torch.from_numpy(images), recipe)
        folder.mkdir(parents=True, exist_ok=True)
        weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
        save_file(weights, unfinished := file.with_suffix(".part"))
        unfinished.rename(file)
    model.load_state_dict(load_file(file))
    return model


def train(model: SlotVAE, images: Tensor, recipe: TrainConfig, steps: int = TRAINING) -> None:
    """The recipe's loss on images uint8 [n, H, W, 3], in plain torch: warm-up, then a cosine to a tenth of the rate."""
    rule, generator = recipe.optimiser, torch.Generator().manual_seed(0)
    optimiser = torch.optim.AdamW(model.parameters(), lr=rule.lr, betas=rule.betas, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser,
        lambda step: min(1.0, (step + 1) / rule.warmup) * (0.55 + 0.45 * math.cos(math.pi * step / steps)),
    )
    for step in range(steps):
        chosen = torch.randint(len(images), (recipe.batch_size,), generator=generator)
        optimiser.zero_grad()
        model(images[chosen], step=step, draws=Draws.at(0, step))["loss"].backward()
        nn.utils.clip_grad_norm_(model.parameters(), rule.clip)
        optimiser.step()
        schedule.step()


# ------------------------------------------------------------------------------------------------ reference


def _reference_problem(size: Size, folder: Path) -> tuple[nn.Module, Tensor, Tensor]:
    decoder, generator = reference_decoder(size.side), torch.Generator().manual_seed(1)
    z = torch.randn(size.images, size.slots, SLOT_DIM, generator=generator)
    with torch.no_grad():
        images = as_bytes(decoder(z)).unflatten(1, (size.side, size.side))
    off = torch.randn(size.images, size.starts, size.slots, SLOT_DIM, generator=generator)
    return decoder, images, z.unsqueeze(1) + WAY_OFF * off


def reference_decoder(side: int) -> nn.Module:
    """The papers' decoder, 12 heads of 43, with slots that make a difference."""
    torch.manual_seed(0)
    decoder = CrossAttentionDecoder(SLOT_DIM, side)
    last = cast(nn.Linear, decoder.to_colour[-1])
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if name.endswith(("to_q.weight", "to_k.weight")):
                parameter.mul_(SHARPER)
        last.weight.mul_(GAIN)
        last.bias.fill_(0.5)
    return decoder.eval()


# ------------------------------------------------------------------------------------------------ the loop


Loss = Callable[[Tensor], Tensor]


def loop(given: Problem, rate: float, loss: Loss | None = None) -> Iterator[Tensor]:
    """The loop as users write it. Gives the latents [I · R, K, D] after each step, without end."""
    loss = loss or loss_of(given)
    z = given.init.flatten(0, 1).clone().requires_grad_()
    optimiser = torch.optim.Adam([z], lr=rate)
    while True:
        optimiser.zero_grad()
        loss(z).backward()
        optimiser.step()
        yield z.detach()


def loss_of(given: Problem) -> Loss:
    """The squared error of all candidates and all pixels shown. A sum: Adam's eps then never matters."""
    target = given.images.flatten(1, 2).float().div(255).repeat_interleave(given.init.shape[1], 0)
    return lambda z: (given.decoder(z) - target).square().sum()
