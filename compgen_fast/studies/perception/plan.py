"""What the perception study trains, at three scales. A plan is a list of jobs; a job is one model with all that is
asked of it, and knows nothing of the others.

The question: twenty objects are each seen with few of their partners (backgrounds, textures, or other objects). Are
they recognised with the others? The decoders differ in what keeps slots from interacting:

    unconstrained           nothing: what is painted for a slot may depend on all of them
    unconstrained+hessian   the exact penalty alone: that the Hessian's blocks across slots are small
    apart                   slots are painted apart, and nothing is penalised
    attention               slots are painted apart, and the attention penalty keeps pixels from looking at two of them
    hessian                 slots are painted apart, with the exact penalty
    additive                slots are painted apart and summed: they cannot interact

Slots that are painted apart still interact where they meet, in the pixels' masks and in the network that mixes them.
So `unconstrained` against `apart` tells what the architecture does, and `apart` against the penalised ones what the
penalty adds to it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from compgen_fast.models.config import EncoderConfig, LossConfig, SlotVAEConfig, SupervisedConfig
from compgen_fast.recipes.perception import for_split, frame_vae_cpu, perception_gpu, replay_of, supervised_scenes_cpu
from compgen_fast.train.config import TrainConfig

Split = Literal["background", "texture", "object"]
ScaleName = Literal["quick", "cpu", "gpu"]
BANK = 4096  # training images whose slots replay recombines
HESSIAN = 100.0  # alpha of the Hessian's penalty, at which it adds a few per cent to the loss
DECODERS = ("unconstrained", "unconstrained+hessian", "apart", "attention", "hessian", "additive")


@dataclass(frozen=True)
class SearchConfig:
    """How images are searched. Chosen on worlds of other seeds than the study's, by readouts of validation images and
    by reconstruction.
    """

    steps: int = 48
    rate: float = 0.2
    pixels: int = 256
    pull: float = 0.1
    still: float = 0.03
    swapped: int = 0
    """Starts of each image beside the encoder's, with one slot of another image."""
    drawn: int = 0
    """Starts drawn from the slots' marginals."""


@dataclass(frozen=True)
class Job:
    """One model: how it is trained, and on how many images it is judged."""

    name: str
    method: Literal["supervised", "supervised_longer", "vae"]
    decoder: str | None
    train: TrainConfig
    replay: TrainConfig | None = None
    search: SearchConfig = SearchConfig()
    encoder: str | None = None
    """The slot encoder, where it is not the study's main one."""
    sweep: Literal["strength", "data_size"] | None = None
    """The sweep it is a point of; such jobs are not among the study's methods."""
    newton: bool = False
    """Also search by Gauss–Newton."""
    probes: int = 3_000
    """Training images that readouts are fitted on."""
    tested: int = 1_000
    """Images of seen, and of unseen combinations."""

    @property
    def seed(self) -> int:
        return self.train.seed


@dataclass(frozen=True)
class Scale:
    """How much of everything."""

    seeds: int
    decoders: tuple[str, ...]
    steps: int
    replay_steps: int
    supervised_steps: int
    longer: int
    """Times as many steps for the supervised encoder that is matched in compute."""
    probes: int
    tested: int
    images: int = 20_000
    """Training images."""
    once: tuple[str, ...] = ()
    """Decoders of the first seed only."""
    strengths: tuple[float, ...] = ()
    sizes: tuple[int, ...] = ()
    encoders: tuple[str, ...] = ()
    newton: bool = False
    """Whether one decoder is also searched by Gauss–Newton."""


SCALES: dict[ScaleName, Scale] = {
    "quick": Scale(1, ("unconstrained", "attention"), 3_000, 800, 1_000, 4, 1_500, 500),
    "cpu": Scale(
        3, ("unconstrained", "apart", "attention", "hessian", "additive"), 5_000, 1_500, 1_500, 8, 3_000, 500,
        once=("unconstrained+hessian",), strengths=(240.0,), sizes=(4_000,), encoders=("queries", "learned_attention"),
        newton=True,
    ),
    "gpu": Scale(5, DECODERS, 500_000, 100_000, 100_000, 5, 20_000, 5_000),
}  # fmt: skip


def plan(scale: ScaleName, split: Split, seeds: int, out: Path, vit: Path | None = None) -> list[Job]:
    """The jobs of a study, those of the first seed first, the main methods before the sweeps.

    ``vit`` is a local file of a timm ViT's weights, on which all encoders are then built.
    """
    planner = _Planner(scale, SCALES[scale], split, out, vit)
    return [*(job for seed in range(seeds) for job in planner.methods(seed)), *planner.sweeps()]


@dataclass(frozen=True)
class _Planner:
    """What the jobs of one study have in common."""

    scale: ScaleName
    size: Scale
    split: Split
    out: Path
    vit: Path | None

    def methods(self, seed: int) -> Iterator[Job]:
        for name in (*self.size.decoders, *(self.size.once if seed == 0 else ())):
            job = self.inverted(f"{name}-{seed}", name, _decoded(self.vae(seed), name))
            yield replace(job, newton=self.size.newton and (name, seed) == ("attention", 0))
        yield self.alone(f"supervised-{seed}", "supervised", self.supervised(seed))
        longer = self.supervised(seed, self.size.longer)
        yield self.alone(f"supervised_longer-{seed}", "supervised_longer", longer)

    def sweeps(self) -> Iterator[Job]:
        """At the first seed: strengths of the attention penalty, numbers of training images, other slot encoders."""
        for alpha in self.size.strengths:
            weighted = _with_loss(self.vae(0), alpha=alpha)
            yield replace(self.inverted(f"strength-{alpha:g}", "attention", weighted), sweep="strength")
        for images in self.size.sizes:
            few = self.inverted(f"images-{images}", "attention", _with_images(self.vae(0), images))
            yield replace(few, sweep="data_size")
            few = self.alone(f"images-{images}-supervised", "supervised", _with_images(self.supervised(0), images))
            yield replace(few, sweep="data_size")
        for encoder in self.size.encoders:
            other = _with_encoder(self.vae(0), slots_by=encoder)
            yield replace(self.inverted(f"encoder-{encoder}", "attention", other), encoder=encoder)

    def vae(self, seed: int) -> TrainConfig:
        """The slot VAE with the attention penalty. The penalty begins when slots have found their roles: from the start
        it is lowest where one slot paints everything. And the prior comes in slowly: at full weight from the start it
        kept some seeds from ever telling where things are.
        """
        config = self._set_up(perception_gpu() if self.scale == "gpu" else frame_vae_cpu(), seed, self.size.steps)
        third, half = config.steps // 3, config.steps // 2
        return _with_loss(config, beta_warmup=third, alpha_start=half, alpha_warmup=third // 2)

    def supervised(self, seed: int, times: int = 1) -> TrainConfig:
        config = supervised_scenes_cpu()
        if self.scale == "gpu":
            large = perception_gpu()
            model = _vae_config(large)
            config = replace(
                large, model=SupervisedConfig(model.image_size, model.slots, model.slot_dim, model.encoder)
            )
        return self._set_up(config, seed, times * self.size.supervised_steps)

    def inverted(self, name: str, decoder: str, train: TrainConfig) -> Job:
        """A decoder with its replay."""
        train = replace(train, out=self.out / "jobs" / name / "vae")
        replay = replay_of(
            train,
            steps=self.size.replay_steps,
            out=self.out / "jobs" / name / "replay",
            bank=min(train.data.size, BANK),
        )
        return Job(name, "vae", decoder, train, replay, probes=self.size.probes, tested=self.size.tested)

    def alone(self, name: str, method: Literal["supervised", "supervised_longer"], train: TrainConfig) -> Job:
        """An encoder without a decoder."""
        train = replace(train, out=self.out / "jobs" / name / "supervised")
        return Job(name, method, None, train, probes=self.size.probes, tested=self.size.tested)

    def _set_up(self, config: TrainConfig, seed: int, steps: int) -> TrainConfig:
        config = _with_images(for_split(config, self.split, seed, steps=steps, out=self.out), self.size.images)
        if self.vit is None:
            return config
        return _with_encoder(config, kind="vit", weights=self.vit, slots_by="queries", pooled_scene=False)


def _decoded(config: TrainConfig, decoder: str) -> TrainConfig:
    """The VAE with the decoder of this name in place of the attention-penalised one."""
    model = _vae_config(config)
    match decoder:
        case "unconstrained":
            mixed = replace(config, model=replace(model, decoder=replace(model.decoder, reads="all")))
            return _with_loss(mixed, penalty="none", alpha=0.0)
        case "unconstrained+hessian":
            return _decoded(_decoded(config, "unconstrained"), "hessian")
        case "apart":
            return _with_loss(config, penalty="none", alpha=0.0)
        case "attention":
            return config
        case "hessian":
            return _with_loss(config, penalty="hessian", alpha=HESSIAN, penalty_pixels=model.image_size**2 // 8)
        case "additive":
            additive = replace(model.decoder, kind="additive_frame" if model.decoder.kind == "frame" else "additive")
            return _with_loss(replace(config, model=replace(model, decoder=additive)), penalty="none", alpha=0.0)
    raise ValueError(f"there is no decoder {decoder!r}; expected one of {', '.join(DECODERS)}")


def _with_loss(config: TrainConfig, **changes: object) -> TrainConfig:
    model = _vae_config(config)
    loss: LossConfig = replace(model.loss, **changes)  # type: ignore[arg-type]
    return replace(config, model=replace(model, loss=loss))


def _with_encoder(config: TrainConfig, **changes: object) -> TrainConfig:
    model = config.model
    assert isinstance(model, SlotVAEConfig | SupervisedConfig)
    encoder: EncoderConfig = replace(model.encoder, **changes)  # type: ignore[arg-type]
    return replace(config, model=replace(model, encoder=encoder))


def _with_images(config: TrainConfig, images: int) -> TrainConfig:
    return replace(config, data=replace(config.data, size=images))


def _vae_config(config: TrainConfig) -> SlotVAEConfig:
    assert isinstance(config.model, SlotVAEConfig)
    return config.model
