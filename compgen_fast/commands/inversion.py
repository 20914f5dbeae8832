"""`cgf search`, `replay`: what a trained decoder is inverted by."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from compgen_fast.commands.common import UsageError, check_cuda, load, refusals


@dataclass(frozen=True)
class Search:
    """Find the latents of images through a trained decoder: gradient steps from the encoder's guess."""

    weights: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="CHECKPOINT")]
    """Exported weights of a slot VAE or of its replay, such as runs/replay_cpu/weights."""
    shards: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="SHARDS")]
    """Packed folders of images to explain."""
    out: Path = Path("runs/search")
    """The folder to write; an interrupted search in it goes on."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where to run."""
    train: str | None = None
    """Packed training images. Their latents say where slots belong: searched ones are kept there."""
    steps: int = 48
    """Gradient steps for each image."""
    rate: float = 0.2
    """Step size at the start; it falls to a tenth."""
    pull: float = 0.05
    """Weight of the pull towards training latents."""
    still: float = 0.0
    """Gradient below which a latent hardly moves; 1e-3 keeps what pixels do not tell where the encoder had it."""
    swapped: int = 0
    """Further starts for each image, each with one slot of another image."""
    drawn: int = 0
    """Further starts for each image, drawn from the training latents."""
    newton: bool = False
    """Gauss-Newton steps instead of Adam's."""
    probes: int = 4096
    """Images of --train to look at."""
    batch: int = 256
    """Images per part that is kept when the search is cut off."""
    seed: int = 0
    """Seed of the starts and of the pixels drawn."""

    def run(self) -> int:
        if self.device == "cuda":
            check_cuda()
        if not self.shards:
            raise UsageError("search: no SHARDS were named; expected packed folders of images")
        command = load("compgen_fast.invert.command")
        with refusals():
            settings = command.SearchSettings(
                str(self.weights), self.shards, self.train, self.probes, self.steps, self.rate, self.pull,
                self.still, self.swapped, self.drawn, self.newton, self.batch, self.seed,
            )  # fmt: skip
            found = command.run_search(settings, self.out, self.device)
        print(f"{found.errors}\nlatents: {found.latents}\npage: {found.page}")
        return 0


@dataclass(frozen=True)
class Replay:
    """Pack what a decoder makes of recombined slots of training images; replay while training is a recipe."""

    weights: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="CHECKPOINT")]
    """Exported weights of a slot VAE."""
    shards: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SHARDS")]
    """Packed training images, whose slots are recombined."""
    pack: Path
    """The folder to write."""
    size: int = 20_000
    """Composites to make."""
    bank: int = 4096
    """Training images that give slots."""
    jitter: float = 0.0
    """Noise on recombined slots, in standard deviations of the training latents."""
    seed: int = 0
    """Seed of the recombinations."""

    def run(self) -> int:
        command = load("compgen_fast.invert.command")
        with refusals():
            count = command.run_pack(
                self.weights, self.shards, self.pack, size=self.size, bank=self.bank, jitter=self.jitter, seed=self.seed
            )
        print(f"{count:,} composites in {self.pack}")
        return 0
