"""Whether slots own pixels, by masks that are known."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from compgen_fast.jets import interaction_penalty
from compgen_fast.jets.penalty import note_weights
from compgen_fast.models import SlotVAE
from compgen_fast.models.binding import binding, unbound
from compgen_fast.models.build import build
from compgen_fast.models.config import DecoderConfig, EncoderConfig, LossConfig, SlotVAEConfig
from compgen_fast.models.diagnosed import Diagnosed

CONFIG = SlotVAEConfig(
    image_size=16,
    slots=2,
    slot_dim=4,
    encoder=EncoderConfig(width=8, slot_layers=1, slot_heads=2),
    decoder=DecoderConfig(layers=1, heads=2, head_dim=4, query_dim=8, slot_hidden=8, octaves=2),
    loss=LossConfig(alpha_start=30, alpha_warmup=12, beta_warmup=5),
)


def masks(*owners: list[int], slots: int = 3) -> Tensor:
    """One image for each list, whose pixels look at the slots in it and no other."""
    return torch.nn.functional.one_hot(torch.tensor(owners), slots).float().mT


def numbers(masks: Tensor) -> dict[str, float]:
    return {name: value.item() for name, value in binding(masks).items()}


def test_slots_that_own_pixels_are_bound() -> None:
    found = numbers(masks([0] * 150 + [1] * 48 + [2] * 2, [0] * 150 + [1] * 50))
    assert found == pytest.approx({"overlap": 0, "slot_0_owns": 1, "slot_1_owns": 1, "slot_2_owns": 0.5})
    assert unbound(found) is None


def test_a_slot_below_a_hundredth_of_every_image_owns_nothing() -> None:
    found = numbers(masks([0] * 150 + [1] * 49 + [2], [0] * 150 + [1] * 50))
    assert found["slot_2_owns"] == 0
    said = unbound(found)
    assert said is not None and "slot 2 owns nothing" in said
    said = unbound(numbers(masks([0] * 9)))
    assert said is not None and "slots 1, 2 own nothing" in said


def test_overlap_is_the_attention_penalty_over_its_maximum() -> None:
    weights = torch.rand(4, 3, 20).softmax(1)
    penalty = interaction_penalty(
        lambda z: note_weights(weights.mT) + z.mean(), torch.rand(4, 3, 2), method="attention"
    )
    torch.testing.assert_close(binding(weights)["overlap"], penalty / ((1 - 1 / 3) / 2))


def test_slots_that_are_looked_at_alike_are_not_bound() -> None:
    uneven = torch.tensor([0.52, 0.48]).view(1, 2, 1).expand(2, 2, 50).clone()
    uneven[:, :, 25:] = uneven[:, :, 25:].flip(1)
    found = numbers(uneven)
    assert found["slot_0_owns"] == found["slot_1_owns"] == 1
    said = unbound(found)
    assert said is not None and "look at all 2 slots alike" in said and "0.25 of at most 0.25" in said


def test_a_slot_vae_says_what_is_wrong_and_what_to_try() -> None:
    torch.manual_seed(0)
    model = build(CONFIG)
    assert isinstance(model, Diagnosed) and isinstance(model, SlotVAE) and model.warmed_after == 42
    found = model.diagnose(torch.zeros(2, 16, 16, 3, dtype=torch.uint8))
    assert set(found) == {"overlap", "slot_0_owns", "slot_1_owns"}
    said = model.fault({"overlap": 1.0, "slot_0_owns": 1.0, "slot_1_owns": 1.0})
    assert said is not None and "frame_vae_cpu" in said and "--model.loss.alpha-start" in said
    assert model.fault({"overlap": 0.1, "slot_0_owns": 1.0, "slot_1_owns": 0.4}) is None


def test_a_frame_decoder_is_not_advised_to_become_one() -> None:
    frame = DecoderConfig(kind="frame", slot_hidden=8, frequencies=2, features=2, mixer=4)
    model = build(replace(CONFIG, decoder=frame))
    assert isinstance(model, SlotVAE)
    said = model.fault({"overlap": 1.0, "slot_0_owns": 1.0, "slot_1_owns": 1.0})
    assert said is not None and "frame_vae_cpu" not in said and "more --steps" in said


@pytest.mark.parametrize(
    "config",
    [
        replace(CONFIG, slots=1),
        replace(CONFIG, decoder=DecoderConfig(kind="additive", query_dim=8), loss=LossConfig(penalty="none")),
    ],
)
def test_nothing_is_said_of_one_slot_or_of_a_decoder_without_masks(config: SlotVAEConfig) -> None:
    model = build(config)
    assert isinstance(model, SlotVAE)
    assert model.diagnose(torch.zeros(2, 16, 16, 3, dtype=torch.uint8)) == {} and model.fault({}) is None
