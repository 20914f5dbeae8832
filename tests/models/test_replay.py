"""Replay: what is recombined, what is learnt from it, and what never changes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from compgen_fast.draws import Draws
from compgen_fast.models.build import build
from compgen_fast.models.config import DecoderConfig, EncoderConfig, LossConfig, ReplayConfig, SlotVAEConfig
from compgen_fast.models.matching import match_latents, take_slots
from compgen_fast.models.replay import Replay, recombined
from compgen_fast.models.slot_vae import SlotVAE, as_bytes

SIZE, SLOTS, DIM, BANK = 8, 3, 4, 6
VAE = SlotVAEConfig(
    SIZE,
    SLOTS,
    DIM,
    encoder=EncoderConfig(width=8, downsample=4, slots_by="dense", slot_hidden=16, slot_layers=2, slot_heads=2),
    decoder=DecoderConfig(kind="broadcast_mlp", layers=2, query_dim=8, octaves=2),
    loss=LossConfig(penalty="none"),
)
KINDS = ("dense", "queries", "learned_attention", "attention")


def images(batch: int = 4) -> Tensor:
    return torch.randint(0, 256, (batch, SIZE, SIZE, 3), dtype=torch.uint8)


def replay_of(slots_by: Any = "dense", **settings: Any) -> Replay:
    """One that is filled."""
    vae = replace(VAE, encoder=replace(VAE.encoder, slots_by=slots_by))
    model = build(ReplayConfig(vae, **{"bank": BANK} | settings))
    assert isinstance(model, Replay)
    model.fill([images(BANK)])
    return model


def numbered_bank(images: int = BANK) -> Tensor:
    """Slots whose numbers say where they come from: 10 · image + slot."""
    return (10 * torch.arange(images)[:, None] + torch.arange(SLOTS)).float()[..., None].expand(-1, -1, DIM)


def step(model: Replay, optimiser: torch.optim.Optimizer, x: Tensor, number: int = 0) -> dict[str, Tensor]:
    found = model(x, draws=Draws.at(0, number))
    optimiser.zero_grad()
    found["loss"].backward()
    optimiser.step()
    return found


@pytest.mark.parametrize("kind", ["dense", "queries", "learned_attention"])
def test_slots_with_roles_are_recombined_each_at_its_own_place(kind: str) -> None:
    model = replay_of(kind)
    model.bank.copy_(numbered_bank())
    z = model.recombined(500)
    assert z.shape == (500, SLOTS, DIM) and (z == z[..., :1]).all()
    assert (z[..., 0] % 10 == torch.arange(SLOTS)).all()
    image = z[..., 0] // 10
    assert [sorted(set(column.tolist())) for column in image.T] == [list(range(BANK))] * SLOTS
    alike = (image[:, 0] == image[:, 1]).float().mean().item()
    assert alike == pytest.approx(1 / BANK, abs=0.06)  # each slot on its own


def test_slots_without_roles_may_take_any_place() -> None:
    model = replay_of("attention")
    model.bank.copy_(numbered_bank())
    z = model.recombined(500)[..., 0]
    assert all(set(column.tolist()) == set(numbered_bank()[..., 0].flatten().tolist()) for column in z.T)


@pytest.mark.parametrize("roles", [True, False])
def test_a_chance_of_almost_one_is_the_last_of_the_bank(roles: bool) -> None:
    bank = torch.randn(3000, 1, 2)
    chance = torch.tensor([[0.0], [1 - 2**-24]])
    torch.testing.assert_close(recombined(bank, chance, roles)[:, 0], bank[[0, -1], 0])


@pytest.mark.parametrize("kind", ["dense", "attention"])
def test_jitter_is_in_deviations_of_the_bank(kind: str) -> None:
    model = replay_of(kind, jitter=0.1)
    bank = torch.randn(BANK, SLOTS, DIM) * torch.tensor([1.0, 10.0, 100.0]).view(3, 1)
    model.bank.copy_(bank)
    plain = build(replace(model.config, jitter=0.0))
    plain.bank.copy_(bank)
    noise = model.recombined(4000, Draws.at(0, 0)) - plain.recombined(4000, Draws.at(0, 0))
    expected = bank.std(0, correction=0) if kind == "dense" else bank.flatten(0, 1).std(0, correction=0).expand(3, 4)
    torch.testing.assert_close(noise.std(0), 0.1 * expected, rtol=0.1, atol=0)
    assert plain.recombined(9, Draws.at(0, 0)).isfinite().all()


def test_a_bank_of_one_image_has_no_spread_to_jitter_by() -> None:
    model = replay_of(bank=1, jitter=0.5)
    torch.testing.assert_close(model.recombined(3), model.bank.expand(3, -1, -1))


@pytest.mark.parametrize("kind", KINDS)
def test_the_bank_holds_the_slots_of_the_first_images(kind: str) -> None:
    model, x = replay_of(kind, bank=5), images(9)
    model.fill(x.split(3))
    expected = [model.vae.encode(part, Draws.at(0, first))[0] for first, part in ((0, x[:3]), (3, x[3:6]))]
    torch.testing.assert_close(model.bank, torch.cat(expected)[:5])


def test_a_bank_larger_than_the_data_is_refused() -> None:
    with pytest.raises(ValueError, match="bank is 6, but there are only 4 training images; set a smaller bank"):
        replay_of().fill(images(4).split(2))


def test_an_empty_bank_holds_draws_of_the_prior() -> None:
    bank: Any = build(ReplayConfig(VAE, bank=2000)).bank
    torch.testing.assert_close(bank.std(), torch.tensor(1.0), rtol=0.05, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_said_otherwise_before_the_first_step(kind: str) -> None:
    model, x = replay_of(kind), images()
    optimiser = torch.optim.Adam(model.vae.encoder.parameters(), 1e-2)
    found = step(model, optimiser, x)
    assert found["seen"].item() < 1e-12 < found["replayed"].item()
    assert step(model, optimiser, x, 1)["seen"].item() > 1e-6


def test_the_loss_is_the_sum_of_its_parts_each_by_its_formula() -> None:
    model, x = replay_of(seen=0.5), images()
    with torch.no_grad():
        model.vae.encoder.read_out.bias += 0.1  # as after a step
    found = model(x, draws=Draws.at(1, 2))
    wanted = model.recombined(4, Draws.at(1, 2))
    composites = as_bytes(model.decode(wanted)).view(4, SIZE, SIZE, 3)
    replayed = (model.encode(composites)[0] - wanted).square().mean()
    torch.testing.assert_close(found["replayed"], replayed)
    torch.testing.assert_close(found["seen"], torch.tensor(0.01))
    torch.testing.assert_close(found["loss"], replayed + 0.5 * 0.01)
    assert found.keys() == {"loss", "replayed", "seen"}
    assert [name for name, value in found.items() if value.requires_grad] == ["loss"]


def test_exchangeable_slots_are_matched_before_they_are_compared() -> None:
    """Wanted in another order, what the encoder says is as right as before."""
    model, x = replay_of("attention"), images()
    said = model.encode(x, Draws.at(0, 0))[0]
    for order in ([0, 1, 2], [2, 0, 1]):
        assert model._error(x, said[:, order], Draws.at(0, 0)).item() < 1e-12
    wanted = torch.randn_like(said)
    matched = take_slots(said, match_latents(said, wanted))
    torch.testing.assert_close(model._error(x, wanted, Draws.at(0, 0)), (matched - wanted).square().mean())
    fixed = replay_of("dense")
    assert fixed._error(x, fixed.encode(x)[0][:, [2, 0, 1]], Draws()).item() > 1e-6


def test_only_the_encoder_learns() -> None:
    model, x = replay_of(), images()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimiser = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 1e-2)
    for number in range(3):
        step(model, optimiser, x, number)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed and all(name.startswith("vae.encoder.") for name in changed)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {f"vae.encoder.{name}" for name, _ in model.vae.encoder.named_parameters()}


@pytest.mark.parametrize("kind", KINDS)
def test_a_few_steps_lower_the_loss(kind: str) -> None:
    model, x = replay_of(kind), images(8)
    optimiser = torch.optim.Adam(model.vae.encoder.parameters(), 1e-2)
    model.bank.add_(1.0)  # what the encoder does not say yet
    losses = [step(model, optimiser, x, number)["loss"].item() for number in range(20)]
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.parametrize("kind", KINDS)
def test_equal_parts_of_a_batch_average_to_the_whole(kind: str) -> None:
    model, x = replay_of(kind, jitter=0.1).double(), images(4)
    with torch.no_grad():
        model.vae.encoder.read_out.bias += 0.1
    whole = model(x, draws=Draws.at(5, 6))
    halves = [model(x[i : i + 2], draws=Draws.at(5, 6, first=i, total=4)) for i in (0, 2)]
    for name in whole:
        torch.testing.assert_close((halves[0][name] + halves[1][name]) / 2, whole[name])


def test_it_begins_with_a_trained_vae_and_keeps_its_encoder() -> None:
    trained: Any = build(VAE)
    model = replay_of()
    model.begin_with(trained.state_dict())
    x = images()
    assert isinstance(model.vae, SlotVAE) and model.decoder is model.vae.decoder
    torch.testing.assert_close(model.encode(x)[0], trained.encode(x)[0])
    torch.testing.assert_close(model.decode(model.bank), trained.decode(model.bank))
    assert torch.equal(model.reconstruct(x), trained.reconstruct(x))
    assert model(x)["seen"].item() == 0


def test_its_state_holds_the_bank_and_what_was_said_before() -> None:
    model, other = replay_of(), replay_of()
    other.load_state_dict(model.state_dict())
    assert torch.equal(other.bank, model.bank)
    assert torch.equal(other(images(), draws=Draws.at(0, 0))["seen"], torch.tensor(0.0))


def test_half_precision_sums_losses_in_full() -> None:
    model, x = replay_of(), images()
    expected = model(x, draws=Draws.at(0, 0))["loss"]
    with torch.autocast("cpu", torch.bfloat16):
        found = model(x, draws=Draws.at(0, 0))["loss"]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0.1, atol=1e-3)
