from dataclasses import replace
from typing import Any

import pytest

from compgen_fast.models import build
from compgen_fast.models.config import ReplayConfig, SlotVAEConfig
from compgen_fast.recipes import RECIPES
from compgen_fast.settings import changes, from_json, to_json
from compgen_fast.train.config import OptimiserConfig, TrainConfig, check, micro_batch
from compgen_fast.train.engine import learning_rate, settings


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_possible_and_survives_json(name: str) -> None:
    config = RECIPES[name]()
    check(config, ranks=1)
    check(config, ranks=8)
    build.check(config.model)
    assert from_json(TrainConfig, to_json(config), "here") == config


def test_replay_is_of_the_vae_whose_weights_it_begins_with() -> None:
    vae, replay = RECIPES["frame_vae_cpu"](), RECIPES["replay_cpu"]()
    assert isinstance(vae.model, SlotVAEConfig) and isinstance(replay.model, ReplayConfig)
    assert replay.model.vae == vae.model and replay.data == vae.data
    assert replay.start == vae.out / "weights"
    assert replay.model.bank <= replay.data.size


def test_deepspeed_is_told_sizes_that_multiply() -> None:
    config = TrainConfig(batch_size=64, accumulation=4)
    told = settings(config, ranks=8)
    assert told["train_micro_batch_size_per_gpu"] == micro_batch(config, 8) == 2
    assert told["train_batch_size"] == 2 * 4 * 8


def test_the_learning_rate_warms_up_and_falls_to_a_tenth() -> None:
    config = OptimiserConfig(lr=1.0, warmup=10)
    rates = [learning_rate(config, step, 110) for step in range(111)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == rates[10] == 1.0
    assert rates[60] == pytest.approx(0.55)
    assert rates[110] == pytest.approx(0.1)
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert learning_rate(replace(config, decay="constant"), 100, 110) == 1.0


def test_changes_are_named_with_dots() -> None:
    config = TrainConfig()
    other = replace(config, seed=1, data=replace(config.data, size=7))
    assert list(changes(config, other)) == [("data.size", config.data.size, 7), ("seed", 0, 1)]
    assert not list(changes(config, config))


def test_generators_learn_tokens_and_other_models_images() -> None:
    dit, vae = RECIPES["dit_cpu"](), RECIPES["vae_tokenizer_cpu"]()
    assert dit.data.tokenizer == vae.out / "weights"
    with pytest.raises(ValueError, match=r"data\.tokenizer is missing; a generator learns tokens"):
        check(replace(dit, data=replace(dit.data, tokenizer=None)), ranks=1)
    with pytest.raises(ValueError, match="but ConvVAEConfig is a model of images; leave it out"):
        check(replace(vae, data=dit.data), ranks=1)


@pytest.mark.parametrize("where", ["cpu", "gpu"])
def test_recipes_of_generators_fit_their_tokenizers_and_differ_in_the_objective_only(where: str) -> None:
    shared = set()
    for kind in ("dit", "maskgit", "mar", "givt"):
        config = RECIPES[f"{kind}_{where}"]()
        tokenizer: Any = RECIPES["vq_tokenizer_" + where if kind == "maskgit" else "vae_tokenizer_" + where]().model
        model: Any = config.model
        assert config.data.tokenizer is not None and config.data.split == "composition"
        assert model.image_size == tokenizer.image_size and model.side == tokenizer.image_size // tokenizer.patch
        assert model.codes == tokenizer.codes if kind == "maskgit" else model.channels == tokenizer.channels
        shared.add((model.trunk, config.optimiser, config.steps, config.batch_size))
    assert len(shared) == 1


def test_jepas_target_comes_to_rest_with_the_training() -> None:
    config: Any = RECIPES["maskgit_jepa_cpu"]()
    assert config.model.jepa.rate_steps == config.steps
    assert replace(config.model, jepa=None) == RECIPES["maskgit_cpu"]().model
