"""Decoders in frames: places and pictures apart, masks, waves. What all decoders must do is in test_build.py."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from compgen_fast.draws import Draws
from compgen_fast.jets import Jet, interaction_penalty
from compgen_fast.models import frame_decoder
from compgen_fast.models.build import build
from compgen_fast.models.config import DecoderConfig, EncoderConfig, LossConfig, SlotVAEConfig
from compgen_fast.models.frame_decoder import AdditiveFrameDecoder, FrameDecoder
from compgen_fast.worlds import Scenes
from tests.jets.oracles import channels_of, mixed_difference

SMALL: dict[str, Any] = {"hidden": 10, "frequencies": 3, "features": 4, "mixer": 6}
SIZE, PIXEL = 8, 2 / 8


def decoder_of(slots: int = 3, slot_dim: int = 4, **options: Any) -> FrameDecoder:
    return FrameDecoder(slot_dim, SIZE, slots, **SMALL, **options).double()


def slots(batch: int = 2, count: int = 3, width: int = 4) -> Tensor:
    return torch.randn(batch, count, width, dtype=torch.float64)


@torch.no_grad()
def moved(decoder: FrameDecoder | AdditiveFrameDecoder, right: int, down: int) -> None:
    """Moves the places of all slots by whole pixels."""
    decoder.painters.to_place.bias += torch.tensor([right, down]) * PIXEL


def as_image(pixels: Tensor) -> Tensor:
    """[…, N] as […, height, width]."""
    return pixels.unflatten(-1, (SIZE, SIZE))


def test_any_pixels_decode_as_in_the_whole_image_with_masks_too() -> None:
    decoder, z, chosen = decoder_of(), slots(), torch.tensor([63, 0, 17, 17])
    whole, masks = decoder.decode_with_masks(z)
    colours, some = decoder.decode_with_masks(z, chosen)
    assert whole.shape == (2, 64, 3) and masks.shape == (2, 3, 64)
    torch.testing.assert_close(colours, whole[:, chosen])
    torch.testing.assert_close(some, masks[:, :, chosen])


def test_masks_share_out_every_pixel() -> None:
    _, masks = decoder_of().decode_with_masks(5 * slots())
    assert (masks >= 0).all()
    torch.testing.assert_close(masks.sum(1), torch.ones(2, 64, dtype=torch.float64))


def test_things_start_as_discs_in_the_middle_and_the_scene_as_the_rest() -> None:
    decoder = decoder_of(2)
    nn.init.zeros_(decoder.painters.to_series.weight)
    nn.init.zeros_(decoder.painters.to_series.bias)
    scene, thing = as_image(decoder.decode_with_masks(slots(count=2))[1]).unbind(1)
    assert (thing[:, 3:5, 3:5] > 0.8).all() and (thing[:, 0] < 0.1).all()
    assert (scene[:, 0] > 0.9).all()


def test_moving_a_place_moves_what_a_thing_paints() -> None:
    """By whole pixels everything moves with it, but for the columns that waves bring in from the other side."""
    decoder, z = decoder_of(), slots()
    decoder.height.data.fill_(300.0)  # so far above the scene that only things are seen
    colours, masks = decoder.decode_with_masks(z)
    moved(decoder, 2, 1)
    later, later_masks = decoder.decode_with_masks(z)
    for before, after in ((colours.mT, later.mT), (masks, later_masks)):
        torch.testing.assert_close(as_image(after)[..., 1:, 2:], as_image(before)[..., :-1, :-2])
    assert not torch.allclose(later, colours)


def test_the_scene_does_not_move() -> None:
    decoder, z = decoder_of(), slots()
    decoder.height.data.fill_(-1000.0)  # only the scene is seen
    before = decoder(z)
    moved(decoder, 2, 1)
    torch.testing.assert_close(decoder(z), before, rtol=0, atol=0)


def test_a_picture_that_crosses_the_image_comes_back() -> None:
    painters, code = decoder_of().painters, slots(width=10)
    here, across = (painters._series(code, torch.full((2, 3, 2), x, dtype=torch.float64)) for x in (0.3, 2.3))
    torch.testing.assert_close(across, here, rtol=0, atol=1e-5)  # waves are multiples of π in fp32
    assert not torch.allclose(painters._series(code, torch.zeros(2, 3, 2, dtype=torch.float64)), here, atol=0.1)


def test_waves_are_as_many_as_a_disc_of_frequencies_holds_one_of_each_pair() -> None:
    waves = frame_decoder._waves(4) / torch.pi
    assert (waves.norm(dim=1) <= 4).all() and len(waves.unique(dim=0)) == len(waves)
    assert len(torch.cat([waves, -waves]).unique(dim=0)) == 49  # whole numbers in a disc of radius 4
    assert len(waves) == 25


def test_every_slot_has_a_role_of_its_own() -> None:
    decoder, z = decoder_of(), slots(count=1).expand(-1, 3, -1)
    painted, _ = decoder.painters(z, None)
    assert not torch.allclose(painted[:, 1], painted[:, 2])
    z = slots()
    assert not torch.allclose(decoder(z[:, [0, 2, 1]]), decoder(z))


@pytest.mark.parametrize("reads", ["own", "all"])
def test_a_painter_reads_its_own_slot_or_all(reads: Any) -> None:
    painters, z = decoder_of(reads=reads).painters, slots()
    other = z.clone()
    other[0, 1] += 1
    changed = (painters(other, None)[0] - painters(z, None)[0]).abs().amax((2, 3)) > 1e-6
    assert changed.tolist() == [[reads == "all", True, reads == "all"], [False] * 3]


def test_jets_follow_painters_that_read_all_slots() -> None:
    decoder, z = decoder_of(reads="all"), slots()
    tangent, side = torch.randn_like(z), torch.tensor([[True, False, True], [False, False, True]])[..., None]
    mixed = channels_of(decoder(Jet(torch.stack([z, tangent]), side)))[3]
    seed = torch.randn_like(mixed)
    expected = mixed_difference(decoder, z, tangent * side, tangent * ~side, seed)
    torch.testing.assert_close((mixed * seed).sum(), expected, rtol=1e-6, atol=1e-9)


def test_painters_that_read_all_slots_cost_more_curvature() -> None:
    z = slots()
    own, every = (decoder_of(reads=reads) for reads in ("own", "all"))
    penalties = [interaction_penalty(each, z, generator=torch.Generator().manual_seed(0)) for each in (own, every)]
    assert penalties[1] > penalties[0] > 0


def test_the_attention_penalty_is_that_of_its_masks_and_trains_it() -> None:
    decoder, z = decoder_of(), slots()
    masks = decoder.decode_with_masks(z)[1]
    expected = sum((masks[:, k] * masks[:, other]).mean() for k, other in ((0, 1), (0, 2), (1, 2)))
    penalty, colours = interaction_penalty(decoder, z, method="attention", return_output=True)
    torch.testing.assert_close(penalty, expected)
    torch.testing.assert_close(colours, decoder(z))
    penalty.backward()
    for name in ("painters.to_series.weight", "painters.to_place.weight", "height", "painters.embed.weight"):
        assert (decoder.get_parameter(name).grad != 0).any(), name


@dataclass(frozen=True)
class EverySign(Draws):
    """All signs of two slots of two numbers, one choice in each of 16 rows: the mean over them is exact."""

    def signs(self, like: Tensor) -> Tensor:
        return torch.cartesian_prod(*[torch.tensor([-1.0, 1.0], dtype=like.dtype)] * 4).view(16, 2, 2)


def test_the_hessian_penalty_is_exact_by_finite_differences() -> None:
    decoder, z, h = decoder_of(2, 2), slots(1, 2, 2), 1e-3
    unit = h * torch.eye(4, dtype=torch.float64).view(4, 1, 2, 2)
    blocks = []
    with torch.no_grad():
        for u in unit[:2]:  # a number of the scene
            for v in unit[2:]:  # and one of the thing
                corners = decoder(z + u + v) - decoder(z + u - v) - decoder(z - u + v) + decoder(z - u - v)
                blocks.append((corners / (4 * h * h)).square().sum())
    expected = 2 * torch.stack(blocks).sum()
    found = interaction_penalty(decoder, z.expand(16, -1, -1), generator=EverySign())
    assert expected > 1e-3
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=0)


def test_slots_do_not_interact_where_every_pixel_looks_at_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_decoder, "STEEPNESS", 1e7)  # discs with hard edges, that no pixel lies on
    decoder, z = decoder_of(2), slots(count=2)
    decoder.height.data.fill_(0.4e7)
    masks = decoder.decode_with_masks(z)[1]
    assert set(masks.unique().tolist()) == {0, 1} and (masks.mean(-1) > 0.1).all()
    assert interaction_penalty(decoder, z, method="hessian").item() == 0
    assert interaction_penalty(decoder, z, method="contrast").item() == 0
    assert interaction_penalty(decoder, z, method="attention").item() == 0


@pytest.mark.parametrize("method", ["hessian", "pairs", "triple"])
def test_slots_that_are_summed_do_not_interact_at_all(method: Any) -> None:
    decoder, z = AdditiveFrameDecoder(4, SIZE, 3, hidden=10, frequencies=3), slots().float().requires_grad_()
    penalty = interaction_penalty(decoder, z, method=method)
    assert penalty.item() == 0
    grads = torch.autograd.grad(penalty, [z, *decoder.parameters()], allow_unused=True, materialize_grads=True)
    assert not any(grad.any() for grad in grads)
    assert interaction_penalty(decoder, z, method="contrast").item() > 0  # they do share pixels


def test_summed_things_move_before_a_scene_that_stays() -> None:
    decoder, z = AdditiveFrameDecoder(4, SIZE, 3, hidden=10, frequencies=3).double(), slots()
    parts = decoder.painters(z, None)[0]
    torch.testing.assert_close(decoder(z), 0.5 + parts.sum(1).mT)
    moved(decoder, 2, 1)
    scene, *things = decoder.painters(z, None)[0].unbind(1)
    assert torch.equal(scene, parts[:, 0])
    for thing, before in zip(things, parts[:, 1:].unbind(1), strict=True):
        torch.testing.assert_close(as_image(thing), as_image(before).roll((1, 2), (-2, -1)), rtol=0, atol=1e-5)


def test_half_precision_comes_close() -> None:
    decoder, z = decoder_of().float(), slots().float()
    expected = decoder(z)
    with torch.autocast("cpu", torch.bfloat16):
        found, masks = decoder.decode_with_masks(z)
    torch.testing.assert_close(found.float(), expected, rtol=0.05, atol=0.05)
    torch.testing.assert_close(masks.float().sum(1), torch.ones(2, 64), rtol=0, atol=0.02)


def test_it_compiles_as_one_graph_and_its_masks_are_still_seen() -> None:
    decoder, z = decoder_of(), slots()
    compiled = torch.compile(decoder, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(z), decoder(z))
    penalties = [interaction_penalty(each, z, method="attention") for each in (compiled, decoder)]
    torch.testing.assert_close(*penalties)


@pytest.mark.parametrize(
    ("kind", "penalty", "pixels"),
    [
        ("frame", "attention", None),
        ("frame", "hessian", None),
        ("frame", "hessian", 64),
        ("additive_frame", "none", None),
    ],
)
def test_a_few_steps_on_calm_scenes_lower_the_loss(kind: Any, penalty: Any, pixels: int | None) -> None:
    images = torch.from_numpy(Scenes(16, variation=0.1).split("background").samples(np.arange(16)).images)
    model: Any = build(
        SlotVAEConfig(
            image_size=16,
            slots=2,
            slot_dim=4,
            encoder=EncoderConfig(width=8, slots_by="dense", slot_hidden=32),
            decoder=DecoderConfig(kind=kind, slot_hidden=32, frequencies=4, features=4, mixer=8),
            loss=LossConfig(sigma=5.0, alpha=0.1, penalty=penalty, penalty_pixels=pixels),
        )
    )
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    losses: list[float] = []
    for step in range(20):
        found = model(images, step=step, draws=Draws.at(0, step))
        optimiser.zero_grad()
        found["loss"].backward()
        optimiser.step()
        losses.append(found["loss"].item())
        assert (found["penalty"].item() > 0) == (penalty != "none")
    assert losses[-1] < 0.8 * losses[0]


def test_what_does_not_fit_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match="frequencies is 5 at 8 pixels; expected 1 to 4, half of image_size"):
        FrameDecoder(4, 8, 2, frequencies=5)
    with pytest.raises(ValueError, match="slots is 0; expected at least 1"):
        FrameDecoder(4, 8, 0, frequencies=2)
    for wrong in (slots(count=1), slots(count=4), slots(width=5)):
        with pytest.raises(ValueError, match=r"expected \[B, 3, 4\], a slot for each role"):
            decoder_of()(wrong)
