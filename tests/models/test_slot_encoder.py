"""Images to slots, in every combination of settings."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from compgen_fast.draws import Draws
from compgen_fast.models.config import EncoderConfig
from compgen_fast.models.slot_encoder import SlotEncoder, check_encoder
from compgen_fast.models.vit import ViT, ViTVariant

CNN = EncoderConfig(kind="cnn", width=16, downsample=4, slot_layers=2)
VIT = EncoderConfig(kind="vit", width=16, patch=8, layers=2, heads=2, slot_layers=2)
CONFIGS = {
    "cnn, queries": CNN,
    "cnn, attention": replace(CNN, slots_by="attention"),
    "vit, queries": VIT,
    "vit, attention": replace(VIT, slots_by="attention"),
    "cnn, learned attention": replace(CNN, slots_by="learned_attention"),
    "cnn, dense": replace(CNN, slots_by="dense", slot_hidden=12),
    "cnn, dense with a pooled scene": replace(CNN, slots_by="dense", slot_hidden=12, pooled_scene=True),
    "vit, dense": replace(VIT, slots_by="dense", slot_hidden=12),
}


def draws(first: int = 0, total: int | None = None) -> Draws:
    return Draws.at(seed=1, step=2, first=first, total=total)


@pytest.fixture(params=CONFIGS)
def config(request: pytest.FixtureRequest) -> EncoderConfig:
    return CONFIGS[request.param]


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A small file such as timm writes."""
    path = tmp_path / "vit.pt"
    vit = ViT(32, 64, 8, layers=2, heads=1, variant=ViTVariant(class_token=True, prefix_positions=True))
    torch.save(vit.state_dict(), path)
    return path


@pytest.mark.parametrize("size", [32, 128])
def test_images_of_both_sizes_become_slots(config: EncoderConfig, size: int) -> None:
    encoder = SlotEncoder(config, size, slots=7, out_dim=10)
    assert encoder(torch.randn(2, 3, size, size), draws()).shape == (2, 7, 10)


def test_the_default_settings_are_ready_for_the_papers_images() -> None:
    slots = SlotEncoder(EncoderConfig(), 128, slots=7, out_dim=64)(torch.randn(1, 3, 128, 128), draws())
    assert slots.shape == (1, 7, 64) and slots.isfinite().all()


def test_two_halves_of_a_batch_give_the_slots_of_the_whole(config: EncoderConfig) -> None:
    encoder, images = SlotEncoder(config, 32, 3, 5).double(), torch.randn(4, 3, 32, 32, dtype=torch.float64)
    whole = encoder(images, draws(total=4))
    halves = torch.cat([encoder(images[:2], draws(0, 4)), encoder(images[2:], draws(2, 4))])
    torch.testing.assert_close(halves, whole)


def test_slot_attention_starts_where_the_draws_say() -> None:
    encoder, images = SlotEncoder(CONFIGS["cnn, attention"], 32, 3, 5), torch.randn(2, 3, 32, 32)
    assert torch.equal(encoder(images, draws()), encoder(images, draws()))
    assert not torch.allclose(encoder(images, draws()), encoder(images, Draws.at(seed=1, step=3)))


def test_slot_attentions_starts_are_the_learned_gaussian() -> None:
    encoder = SlotEncoder(CONFIGS["cnn, attention"], 32, 3, 5)
    with torch.no_grad():
        encoder.to_slots.slot_mean.fill_(4.0)
        encoder.to_slots.slot_log_scale.fill_(-1.0)
    noise = draws().normal(torch.empty(2, 3, 16))
    torch.testing.assert_close(encoder.to_slots.slots_from(noise), 4 + noise * torch.tensor(-1.0).exp())
    images = torch.randn(2, 3, 32, 32)
    expected = encoder.to_slots(encoder.features(images), encoder.to_slots.slots_from(noise))[0]
    torch.testing.assert_close(encoder(images, draws()), encoder.read_out(expected))


@pytest.mark.parametrize("which", [which for which in CONFIGS if not which.endswith(", attention")])
def test_only_sampled_slot_attention_draws(which: str) -> None:
    encoder, source = SlotEncoder(CONFIGS[which], 32, 3, 5), draws()
    before = source.generator.get_state()
    encoder(torch.randn(2, 3, 32, 32), source)
    assert torch.equal(source.generator.get_state(), before)


def gradients(encoder: SlotEncoder, images: Tensor) -> list[Tensor]:
    loss = encoder(images, draws()).float().pow(3).sum()
    return list(torch.autograd.grad(loss, [p for p in encoder.parameters() if p.requires_grad]))


def test_every_parameter_is_trained(config: EncoderConfig) -> None:
    encoder = SlotEncoder(config, 32, 3, 5)
    assert all((gradient != 0).any() for gradient in gradients(encoder, torch.randn(2, 3, 32, 32)))


def test_recomputing_gives_the_very_same_gradients(config: EncoderConfig) -> None:
    encoder, images = SlotEncoder(config, 32, 3, 5), torch.randn(2, 3, 32, 32)
    saving = SlotEncoder(config, 32, 3, 5, checkpoint=True)
    saving.load_state_dict(encoder.state_dict())
    assert all(torch.equal(*pair) for pair in zip(gradients(encoder, images), gradients(saving, images), strict=True))


@pytest.mark.parametrize("kind", ["cnn", "vit"])
def test_checkpointing_reaches_the_parts_that_recompute(kind: str) -> None:
    encoder = SlotEncoder({"cnn": CNN, "vit": VIT}[kind], 32, 3, 5, checkpoint=True)
    assert encoder.to_slots.checkpoint and getattr(encoder.features, "checkpoint", True)


def test_it_trains_under_autocast_and_runs_in_double_precision(config: EncoderConfig) -> None:
    encoder, images = SlotEncoder(config, 32, 3, 5), torch.randn(2, 3, 32, 32)
    with torch.autocast("cpu", torch.bfloat16):
        assert all(gradient.isfinite().all() for gradient in gradients(encoder, images))
    assert encoder.double()(images.double(), draws()).dtype == torch.float64


def test_pretrained_features_come_from_the_file(weights: Path) -> None:
    encoder = SlotEncoder(replace(VIT, weights=weights), 32, 3, 5)
    stored = torch.load(weights)
    assert torch.equal(encoder.features.blocks[1].mlp.fc1.weight, stored["blocks.1.mlp.fc1.weight"])
    assert encoder(torch.randn(2, 3, 32, 32), draws()).shape == (2, 3, 5)
    assert all(p.requires_grad for p in encoder.parameters())


def test_lora_freezes_the_file_and_trains_its_updates_and_the_slots(weights: Path) -> None:
    encoder = SlotEncoder(replace(VIT, weights=weights, lora_rank=2), 32, 3, 5)
    trained = {name for name, p in encoder.named_parameters() if p.requires_grad}
    assert all(("lora_" in name) == name.startswith("features.") for name in trained)
    assert any(name.startswith("features.") for name in trained) and "read_out.weight" in trained


def test_pretrained_weights_serve_images_of_another_size(weights: Path) -> None:
    encoder = SlotEncoder(replace(VIT, weights=weights, lora_rank=2), 64, 3, 5, checkpoint=True)
    assert encoder(torch.randn(2, 3, 64, 64), draws()).shape == (2, 3, 5)


REFUSED = {
    "weights for a cnn": (replace(CNN, weights=Path("vit.pt")), "weights are for a ViT, but kind is 'cnn'"),
    "weights that are not there": (replace(VIT, weights=Path("absent.pt")), "absent.pt: there is no such file"),
    "lora without weights": (replace(VIT, lora_rank=4), "lora_rank is 4 without weights"),
    "negative lora": (replace(VIT, lora_rank=-1), "lora_rank is -1; expected 0"),
    "slot heads": (replace(CNN, slot_heads=3), "width 16, which slots have too, cannot be split into 3 slot_heads"),
    "heads": (replace(VIT, heads=5), "width 16 cannot be split into 5 heads"),
    "downsample that does not divide": (
        replace(CNN, downsample=16),
        "image_size 40 is not a multiple of downsample 16",
    ),
    "downsample that strides cannot reach": (replace(CNN, downsample=5), "downsample is 5; expected one of 1, 2, 4"),
    "patch": (replace(VIT, patch=16), "image_size 40 is not a multiple of the patch"),
    "slot layers": (replace(CNN, slot_layers=0), "layers=0; both must be at least 1"),
    "rounds": (replace(CNN, slot_layers=0, slots_by="attention"), "iters is 0"),
    "hidden": (replace(CNN, slots_by="dense", slot_hidden=0), "hidden=0; expected at least 1 of both"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_settings_that_cannot_work_are_refused_alike_before_and_while_building(what: str) -> None:
    config, sentence = REFUSED[what]
    for refuse in (check_encoder, SlotEncoder):
        with pytest.raises(ValueError, match=sentence):
            refuse(config, 40, 7, 10)


@pytest.mark.parametrize(("slots", "out_dim"), [(0, 5), (65, 5), (3, 0)])
def test_slots_that_cannot_be_are_refused(slots: int, out_dim: int) -> None:
    with pytest.raises(ValueError, match=f"{slots} slots of {out_dim} numbers; expected 1 to 64 slots"):
        check_encoder(CNN, 32, slots, out_dim)


def test_settings_that_work_pass_the_check(config: EncoderConfig, weights: Path) -> None:
    check_encoder(config, 32, 7, 10)
    check_encoder(replace(VIT, weights=weights, lora_rank=2), 64, 7, 10)


def test_a_rank_beyond_the_file_is_refused(weights: Path) -> None:
    with pytest.raises(ValueError, match="rank is 100; expected 1 to 64"):
        check_encoder(replace(VIT, weights=weights, lora_rank=100), 32, 7, 10)


@pytest.mark.parametrize(
    "images", [torch.zeros(2, 3, 32, 32, dtype=torch.uint8), torch.zeros(2, 32, 32, 3), torch.zeros(3, 32, 32)]
)
def test_images_in_another_form_are_refused_with_what_to_do(config: EncoderConfig, images: Tensor) -> None:
    with pytest.raises(ValueError, match=r"expected floats in \[−1, 1\].*images\.float\(\) / 127\.5 − 1"):
        SlotEncoder(config, 32, 3, 5)(images, draws())


def test_it_compiles_as_one_graph() -> None:
    encoder, images = SlotEncoder(VIT, 32, 3, 5), torch.randn(2, 3, 32, 32)
    compiled = torch.compile(encoder, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(images, Draws()), encoder(images, Draws()))
