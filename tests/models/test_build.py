"""Models from settings: what every decoder must do, whichever it is, and which settings are refused."""

import importlib
from dataclasses import replace
from typing import Any, get_args, get_type_hints

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from compgen_fast.draws import Draws
from compgen_fast.jets import Jet, interaction_penalty
from compgen_fast.models import SlotVAE, SupervisedEncoder
from compgen_fast.models.build import build, build_decoder, check
from compgen_fast.models.config import (
    DecoderConfig,
    EncoderConfig,
    LossConfig,
    ReplayConfig,
    SlotVAEConfig,
    SupervisedConfig,
)
from compgen_fast.models.frame_decoder import FrameDecoder
from compgen_fast.models.replay import Replay
from compgen_fast.worlds.source import Factor
from tests.jets.oracles import channels_of, mixed_difference

KINDS = get_args(get_type_hints(DecoderConfig)["kind"])
EXCHANGEABLE = [kind for kind in KINDS if "frame" not in kind]
SMALL = DecoderConfig(
    layers=2, heads=2, head_dim=5, query_dim=8, slot_hidden=10, octaves=3, patch=2, frequencies=3, features=4, mixer=6
)
ENCODER = EncoderConfig(width=8, downsample=2, slot_layers=1, slot_heads=2)
CONFIG = SlotVAEConfig(8, 3, 4, encoder=ENCODER, decoder=SMALL)
SUPERVISED = SupervisedConfig(8, 3, 4, encoder=ENCODER)


def config(kind: Any, **loss: Any) -> SlotVAEConfig:
    return replace(CONFIG, decoder=replace(SMALL, kind=kind), loss=LossConfig(**{"penalty": "hessian"} | loss))


def decoder_of(kind: Any, slots: int = 3) -> nn.Module:
    return build_decoder(replace(config(kind), slots=slots))


@pytest.mark.parametrize("kind", KINDS)
def test_some_pixels_decode_as_in_the_whole_image(kind: str) -> None:
    decoder, z, chosen = decoder_of(kind), torch.randn(2, 3, 4), torch.tensor([63, 0, 17, 17])
    whole = decoder(z)
    assert whole.shape == (2, decoder.num_pixels, 3) == (2, 64, 3)
    torch.testing.assert_close(decoder(z, pixels=chosen), whole[:, chosen])


@pytest.mark.parametrize("kind", EXCHANGEABLE)
@settings(max_examples=8)
@given(order=st.permutations(range(5)))
def test_the_order_of_slots_does_not_matter_and_masks_follow_it(kind: str, order: list[int]) -> None:
    decoder, z = decoder_of(kind), torch.randn(2, 5, 4)
    torch.testing.assert_close(decoder(z[:, order]), decoder(z))
    if hasattr(decoder, "decode_with_masks"):
        torch.testing.assert_close(decoder.decode_with_masks(z[:, order])[1], decoder.decode_with_masks(z)[1][:, order])


@pytest.mark.parametrize("kind", KINDS)
def test_images_of_a_batch_do_not_see_each_other(kind: str) -> None:
    decoder, z = decoder_of(kind), torch.randn(3, 3, 4)
    torch.testing.assert_close(decoder(z)[1:2], decoder(z[1:2]))


@pytest.mark.parametrize("kind", KINDS)
def test_one_slot_is_enough(kind: str) -> None:
    decoder, z = decoder_of(kind, slots=1), torch.randn(2, 1, 4)
    assert decoder(z).shape == (2, 64, 3)
    assert interaction_penalty(decoder, z).item() == 0


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_is_trained(kind: str) -> None:
    decoder = decoder_of(kind)
    decoder(torch.randn(2, 3, 4)).square().sum().backward()
    assert all(p.grad is not None and (p.grad != 0).any() for p in decoder.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_jets_give_its_mixed_second_derivative(kind: str) -> None:
    decoder, z = decoder_of(kind).double(), torch.randn(2, 3, 4, dtype=torch.float64)
    tangent, side = torch.randn_like(z), torch.tensor([[True, False, True], [False, False, True]])[..., None]
    output = decoder(Jet(torch.stack([z, tangent]), side))
    seed = torch.randn(2, 64, 3, dtype=torch.float64)
    expected = mixed_difference(decoder, z, tangent * side, tangent * ~side, seed)
    torch.testing.assert_close((channels_of(output)[3] * seed).sum(), expected, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(output.primal, decoder(z))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "additive" not in kind])
def test_slots_that_can_interact_pay_for_it(kind: str) -> None:
    decoder, z = decoder_of(kind), torch.randn(2, 3, 4)
    penalty = interaction_penalty(decoder, z)
    assert penalty.item() > 0
    grads = torch.autograd.grad(penalty, list(decoder.parameters()), allow_unused=True, materialize_grads=True)
    assert any((grad != 0).any() for grad in grads)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_of_every_decoder_takes_a_step(kind: str) -> None:
    model = build(config(kind, alpha=1.0))
    assert isinstance(model, SlotVAE)
    x = torch.randint(0, 256, (2, 8, 8, 3), dtype=torch.uint8)
    found = model(x, draws=Draws.at(0, 0))
    found["loss"].backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert model.reconstruct(x).shape == x.shape


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "broadcast_cnn"])
def test_a_model_whose_pixels_decode_alone_may_be_penalised_on_some(kind: str) -> None:
    model = build(config(kind, penalty_pixels=16))
    assert model(torch.zeros(2, 8, 8, 3, dtype=torch.uint8))["loss"].isfinite()


@pytest.mark.parametrize("slots_by", get_args(get_type_hints(EncoderConfig)["slots_by"]))
def test_slots_may_come_in_any_way(slots_by: Any) -> None:
    model = build(replace(CONFIG, encoder=replace(ENCODER, slots_by=slots_by)))
    assert model(torch.zeros(2, 8, 8, 3, dtype=torch.uint8), draws=Draws.at(0, 0))["loss"].isfinite()


def test_a_supervised_model_is_built_for_the_factors_of_its_data() -> None:
    model = build(SUPERVISED, [Factor("shape_1", ("square", "disc")), Factor("x_2")])
    assert isinstance(model, SupervisedEncoder)
    assert model.predict(torch.zeros(2, 8, 8, 3, dtype=torch.uint8)).keys() == {"shape_1", "x_2"}


def test_the_settings_reach_their_parts() -> None:
    model: Any = build(replace(CONFIG, slots=5, slot_dim=6, decoder=replace(SMALL, kind="patch", patch=8, layers=3)))
    assert (model.decoder.patch, len(model.decoder.patches.layers), model.decoder.patches.layers[0].heads) == (8, 3, 2)
    means, logvars = model.encode(torch.zeros(2, 8, 8, 3, dtype=torch.uint8))
    assert means.shape == logvars.shape == (2, 5, 6)
    frame: Any = build_decoder(replace(CONFIG, slots=5, decoder=replace(SMALL, kind="frame", reads="all")))
    assert isinstance(frame, FrameDecoder)
    assert (frame.painters.shape, frame.painters.channels, frame.painters.reads) == ((5, 4), 4 + 1, "all")
    assert frame.painters.role.shape == (5, 10) and len(frame.painters.waves) == 15
    assert frame.to_colour[0].out_features == 6


def test_a_model_in_replay_is_a_vae_and_a_bank() -> None:
    model = build(ReplayConfig(CONFIG, bank=7))
    assert isinstance(model, Replay) and isinstance(model.vae, SlotVAE)
    assert model.bank.shape == (7, 3, 4) and model.config.image_size == 8


@pytest.mark.parametrize("checkpoint", [False, True])
def test_the_encoder_recomputes_its_blocks_when_asked(checkpoint: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    build_module = importlib.import_module("compgen_fast.models.build")
    made_by = build_module.SlotEncoder
    monkeypatch.setattr(build_module, "SlotEncoder", lambda *a, **k: seen.append(k) or made_by(*a, **k))
    build(replace(CONFIG, checkpoint_activations=checkpoint))
    assert seen == [{"checkpoint": checkpoint}]


def test_the_reference_sizes_fit_together() -> None:
    """128×128 pixels, 7 slots, 12 heads of 43."""
    model: Any = build(SlotVAEConfig(slot_dim=64))
    assert model.decoder.layers[0].to_q.weight.shape == (12 * 43, 180)
    with torch.no_grad():
        found = model(torch.zeros(1, 128, 128, 3, dtype=torch.uint8), draws=Draws.at(0, 0))
    assert found["loss"].isfinite() and 0 < found["penalty"] <= (1 - 1 / 7) / 2


def test_building_seeds_nothing() -> None:
    torch.manual_seed(1)
    first = build(CONFIG).state_dict()
    torch.manual_seed(1)
    again = build(CONFIG).state_dict()
    torch.manual_seed(2)
    other = build(CONFIG).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


REFUSED = {
    "slots is 0; expected 1 to 64": replace(CONFIG, slots=0),
    "slots is 65; expected 1 to 64": replace(SUPERVISED, slots=65),
    "slot_dim is 0; expected at least 1": replace(CONFIG, slot_dim=0),
    "image_size is 0; expected at least 1": replace(CONFIG, image_size=0),
    "layers is 0; expected at least 1": replace(CONFIG, decoder=replace(SMALL, layers=0)),
    "heads is 0; expected at least 1": replace(CONFIG, decoder=replace(SMALL, heads=0)),
    "alpha is -1.0; expected 0 or more": config("patch", alpha=-1.0),
    "beta_warmup is -1; expected 0 or more": config("patch", beta_warmup=-1),
    "patch is 3, which does not divide image_size 8": replace(CONFIG, decoder=replace(SMALL, kind="patch", patch=3)),
    "'additive' has none; use penalty 'hessian'": config("additive", penalty="attention"),
    "'broadcast_mlp' has none; use penalty 'hessian'": config("broadcast_mlp", penalty="attention"),
    "probes is 0; expected at least 1": config("patch", probes=0),
    "probes is 2, but penalty 'attention' draws no": config("patch", probes=2, penalty="attention"),
    "probes is 2, but penalty 'contrast' draws no": config("patch", probes=2, penalty="contrast"),
    "penalty_pixels is 9, but penalty 'attention'": config("patch", penalty_pixels=9, penalty="attention"),
    "penalty_pixels is 9, but penalty 'none'": config("patch", penalty_pixels=9, penalty="none"),
    "penalty_pixels is 65; expected 1 to 64": config("cross_attention", penalty_pixels=65),
    "penalty_pixels is 0; expected 1 to 64": config("cross_attention", penalty_pixels=0),
    "'broadcast_cnn' decodes all pixels at once": config("broadcast_cnn", penalty_pixels=9),
    "in patches of 4; choose a multiple of 4": config("patch", penalty_pixels=9),
    "downsample 3": replace(CONFIG, encoder=replace(ENCODER, downsample=3)),
    "slots_by is 'attention', whose slots come in random order, but a supervised": replace(
        SUPERVISED, encoder=replace(ENCODER, slots_by="attention")
    ),
    "in random order, but a decoder of kind 'frame' gives each slot a role; set slots_by to": replace(
        config("frame"), encoder=replace(ENCODER, slots_by="attention")
    ),
    "frequencies is 5 at 8 pixels; expected 1 to 4": replace(
        CONFIG, decoder=replace(SMALL, kind="frame", frequencies=5)
    ),
    "kind 'additive_frame' gives each slot a role": replace(
        config("additive_frame"), encoder=replace(ENCODER, slots_by="attention")
    ),
    "'additive_frame' has none; use penalty 'hessian'": config("additive_frame", penalty="attention"),
    "mixer is 0; expected at least 1": replace(CONFIG, decoder=replace(SMALL, kind="frame", mixer=0)),
    "alpha_start is -1; expected 0 or more": config("patch", alpha_start=-1),
    "slots=3, hidden=0; expected at least 1 of both": replace(
        CONFIG, encoder=replace(ENCODER, slots_by="dense", slot_hidden=0)
    ),
    "bank is 0; expected at least 1": ReplayConfig(CONFIG, bank=0),
    "jitter is -0.1 and seen 1.0; expected 0 or more": ReplayConfig(CONFIG, jitter=-0.1),
    "jitter is 0.0 and seen -1.0; expected 0 or more": ReplayConfig(CONFIG, seen=-1.0),
    "slots is 65": ReplayConfig(replace(CONFIG, slots=65)),
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_contradictions_are_refused_in_words(sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        check(REFUSED[sentence])
    with pytest.raises(ValueError, match=sentence):
        build(REFUSED[sentence])


@pytest.mark.parametrize("penalty", ["none", "hessian", "pairs", "contrast", "triple"])
def test_an_additive_decoder_may_have_any_penalty_of_derivatives(penalty: str) -> None:
    check(config("additive", penalty=penalty))
    check(config("additive_frame", penalty=penalty))
