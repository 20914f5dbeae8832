"""Named training runs: functions that return a config. `cgf train NAME` runs one, `--field value` changes it."""

from collections.abc import Callable

from compgen_fast.recipes.generators import (
    dit_cpu,
    dit_gpu,
    givt_cpu,
    givt_gpu,
    mar_cpu,
    mar_gpu,
    maskgit_cpu,
    maskgit_gpu,
    maskgit_jepa_cpu,
)
from compgen_fast.recipes.perception import frame_vae_cpu, perception_gpu, replay_cpu, supervised_scenes_cpu
from compgen_fast.recipes.slot_vae import slot_vae_cpu, slot_vae_reference, slot_vae_small
from compgen_fast.recipes.supervised import supervised_cpu
from compgen_fast.recipes.tokenizers import vae_tokenizer_cpu, vae_tokenizer_gpu, vq_tokenizer_cpu, vq_tokenizer_gpu
from compgen_fast.train.config import TrainConfig

RECIPES: dict[str, Callable[[], TrainConfig]] = {
    recipe.__name__: recipe
    for recipe in (
        slot_vae_cpu,
        slot_vae_small,
        slot_vae_reference,
        supervised_cpu,
        frame_vae_cpu,
        replay_cpu,
        supervised_scenes_cpu,
        perception_gpu,
        vae_tokenizer_cpu,
        vq_tokenizer_cpu,
        vae_tokenizer_gpu,
        vq_tokenizer_gpu,
        dit_cpu,
        maskgit_cpu,
        maskgit_jepa_cpu,
        mar_cpu,
        givt_cpu,
        dit_gpu,
        maskgit_gpu,
        mar_gpu,
        givt_gpu,
    )
}

__all__ = [
    "RECIPES",
    "dit_cpu",
    "dit_gpu",
    "frame_vae_cpu",
    "givt_cpu",
    "givt_gpu",
    "mar_cpu",
    "mar_gpu",
    "maskgit_cpu",
    "maskgit_gpu",
    "maskgit_jepa_cpu",
    "perception_gpu",
    "replay_cpu",
    "slot_vae_cpu",
    "slot_vae_reference",
    "slot_vae_small",
    "supervised_cpu",
    "supervised_scenes_cpu",
    "vae_tokenizer_cpu",
    "vae_tokenizer_gpu",
    "vq_tokenizer_cpu",
    "vq_tokenizer_gpu",
]
