"""Which settings a command line names, and which of them would have no effect on what was asked. Those are refused by
name, while what a recipe brings along is passed over.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence

from compgen_fast.generate.config import GeneratorConfig
from compgen_fast.train.config import OF_WORLD, TrainConfig

_OF_A_RUN = ("steps", "log_every", "checkpoint", "guard", "data.validation", "data.validation_size")
_OF_STEPS = ("optimiser", "zero_stage", "device", "seed", "start", "out", "data.workers", "data.budget")
_OF_SAMPLES = ("batch_size", "accumulation", "precision", "data.size", "data.seed", "data.cache", "data.tokenizer")
IDLE: Mapping[str, Collection[str]] = {
    "train": (),
    "profile": _OF_A_RUN,
    "scale-plan": (*_OF_A_RUN, *_OF_STEPS),
    "model": (*_OF_A_RUN, *_OF_STEPS, *_OF_SAMPLES),
}
"""By command, the settings and groups of settings that it does not look at."""


def given(arguments: Sequence[str]) -> dict[str, str]:
    """The settings named on a command line, as they were written: data.validation_size by --data.validation-size."""
    options = (word.partition("=")[0] for word in arguments if word.startswith("--"))
    return {option.removeprefix("--").replace("-", "_"): option for option in options}


def without(arguments: Sequence[str], names: Collection[str]) -> list[str]:
    """The arguments without these options and their values."""
    options = {f"--{name}" for name in names}
    before = ["", *arguments]
    return [
        word
        for word, former in zip(arguments, before, strict=False)
        if former not in options and word.partition("=")[0] not in options
    ]


def refuse_idle(command: str, config: TrainConfig, options: Mapping[str, str]) -> None:
    """Refuses what was given and has no effect. ``options`` as of `given`."""
    for setting, option in options.items():
        if any(setting == name or setting.startswith(f"{name}.") for name in IDLE[command]):
            raise ValueError(f"{option} has no effect on `cgf {command}`; leave it out")
    for setting, other in _overruled(config):
        if setting in options:
            raise ValueError(f"{options[setting]} has no effect with {other}; give one of the two")


def _overruled(config: TrainConfig) -> Iterator[tuple[str, str]]:
    """Settings without effect, each with what overrules it."""
    if config.data.shards is not None:
        for name in OF_WORLD:
            yield f"data.{name}", "--data.shards, whose images are there already"
        if not isinstance(config.model, GeneratorConfig):  # the tokens of images at an address are kept in the cache
            yield "data.cache", "--data.shards, which are packed already"
    elif config.data.validation is not None:
        yield "data.validation_size", "--data.validation, whose images are there already"
