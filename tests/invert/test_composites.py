"""Composites as a data set: pure functions of (seed, number), packed and streamed back."""

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import webdataset
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compgen_fast.invert.composites import BLOCK, Composites
from compgen_fast.models.build import build
from compgen_fast.models.config import (
    DecoderConfig,
    EncoderConfig,
    LossConfig,
    ReplayConfig,
    SlotVAEConfig,
    SupervisedConfig,
)
from compgen_fast.models.slot_vae import as_bytes
from compgen_fast.stream import ShardStream, pack
from compgen_fast.worlds.source import Source

SIZE, SLOTS, DIM = 8, 3, 2
VAE = SlotVAEConfig(
    SIZE,
    SLOTS,
    DIM,
    encoder=EncoderConfig(width=8, downsample=4, slots_by="dense", slot_hidden=8),
    decoder=DecoderConfig(kind="broadcast_mlp", layers=2, query_dim=8, octaves=2),
    loss=LossConfig(penalty="none"),
)
EXCHANGEABLE = replace(VAE, encoder=replace(VAE.encoder, slots_by="attention"))


def bank(images: int = 50) -> Tensor:
    return torch.randn(images, SLOTS, DIM, generator=torch.Generator().manual_seed(1))


def composites(size: int = 100, seed: int = 0, config: Any = VAE, **options: Any) -> Composites:
    torch.manual_seed(0)
    model: Any = build(config)
    return Composites(model, bank(), size, seed, **options)


def latents(source: Composites, factors: Any) -> Tensor:
    """Factors as slots [n, K, D]."""
    columns = [torch.as_tensor(factors[factor.name]) for factor in source.factors]
    return torch.stack(columns, 1).unflatten(1, (SLOTS, DIM))


@settings(max_examples=15)
@given(rows=st.lists(st.integers(0, 99), max_size=40))
def test_a_sample_does_not_depend_on_its_batch(rows: list[int]) -> None:
    source, chosen = composites(), np.array(rows, dtype=np.int64)
    whole, some = source.samples(np.arange(100)), source.samples(chosen)
    np.testing.assert_array_equal(some.images, whole.images[chosen])
    for name, values in some.factors.items():
        np.testing.assert_array_equal(values, whole.factors[name][chosen])


def test_a_sample_is_decoded_among_the_same_neighbours_whatever_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrix products round by the size of the whole, which may change a byte."""
    source = composites()

    def row_of_batch(z: Tensor) -> Tensor:
        return (torch.arange(len(z)) * 256 // len(z) / 255).view(-1, 1, 1).expand(-1, SIZE**2, 3)

    monkeypatch.setattr(source.model, "decode", row_of_batch)
    numbers = np.array([99, 3, 40, 3, 17])
    assert (source.samples(numbers).images[:, 0, 0, 0] == numbers % BLOCK * 256 // BLOCK).all()


def test_samples_are_as_a_source_promises() -> None:
    source: Source = composites()
    found = source.samples(np.arange(5))
    assert found.images.shape == (5, SIZE, SIZE, 3) and found.images.dtype == np.uint8 and found.masks is None
    assert [factor.name for factor in source.factors] == ["z_1_1", "z_1_2", "z_2_1", "z_2_2", "z_3_1", "z_3_2"]
    assert list(found.factors) == [factor.name for factor in source.factors]
    for factor in source.factors:
        values = found.factors[factor.name]
        assert values.dtype == np.float32 and (values >= factor.low).all() and (values <= factor.high).all()
    assert len(source) == 100 and source.slots == ()


def test_an_image_is_what_the_decoder_makes_of_its_factors() -> None:
    source = composites()
    found = source.samples(np.arange(BLOCK))
    z = latents(source, found.factors)
    expected = as_bytes(source.model.decode(z)).view(-1, SIZE, SIZE, 3)
    assert np.abs(found.images.astype(int) - expected.numpy()).max() <= 1
    assert len(np.unique(found.images.reshape(BLOCK, -1), axis=0)) == BLOCK


def test_each_slot_comes_from_an_image_of_its_own() -> None:
    source = composites(2_000)
    z = source.latents(np.arange(2_000))
    origin = (z[:, None] == bank()).all(-1).int().argmax(1)  # [2000, K], the image of each slot
    torch.testing.assert_close(bank()[origin, torch.arange(SLOTS)], z)
    assert all(len(column.unique()) == 50 for column in origin.T)
    assert (origin[:, 0] == origin[:, 1]).float().mean().item() == pytest.approx(1 / 50, abs=0.012)


def test_exchangeable_slots_take_any_place() -> None:
    source = composites(2_000, config=EXCHANGEABLE)
    z = source.latents(np.arange(2_000))
    there = {tuple(slot) for slot in bank().flatten(0, 1).tolist()}
    assert all({tuple(slot) for slot in z[:, k].tolist()} == there for k in range(SLOTS))
    assert {(factor.low, factor.high) for factor in source.factors[::2]} == {
        (bank()[..., 0].min().item(), bank()[..., 0].max().item())
    }


def test_seeds_give_other_samples_and_the_size_does_not() -> None:
    first, second, larger = composites(), composites(seed=1), composites(1_000)
    numbers = np.arange(100)
    same = (first.latents(numbers) == second.latents(numbers)).all(-1).float().mean()
    assert same < 0.1
    np.testing.assert_array_equal(first.samples(numbers).images, larger.samples(numbers).images)


def test_jitter_is_in_deviations_of_the_bank() -> None:
    numbers = np.arange(3_000)
    noise = composites(3_000, jitter=0.2).latents(numbers) - composites(3_000).latents(numbers)
    torch.testing.assert_close(noise.std(0), 0.2 * bank().std(0, correction=0), rtol=0.06, atol=0)
    torch.testing.assert_close(noise.mean(0), torch.zeros(SLOTS, DIM), rtol=0, atol=0.02)
    assert abs(np.corrcoef(noise.flatten(1).T.numpy()) - np.eye(SLOTS * DIM)).max() < 0.08


def test_packed_composites_stream_back_as_they_were(tmp_path: Path) -> None:
    source = composites(60)
    expected = source.samples(np.arange(60))
    pack(source, tmp_path / "shards", shard_size=25)  # shards that begin in the middle of a block
    with ShardStream(str(tmp_path / "shards"), batch_size=8, epochs=1, shuffle=False) as stream:
        batches = [*stream]
    images = torch.cat([batch.images[batch.valid] for batch in batches])
    np.testing.assert_array_equal(images.numpy(), expected.images)
    for factor in source.factors:
        values = torch.cat([batch.factors[factor.name][batch.valid] for batch in batches])
        np.testing.assert_array_equal(values.numpy(), expected.factors[factor.name])


def test_any_webdataset_reader_sees_the_slots(tmp_path: Path) -> None:
    source = composites(10)
    pack(source, tmp_path / "shards")
    tars = [str(path) for path in sorted((tmp_path / "shards").glob("*.tar"))]
    found = [json.loads(sample["json"]) for sample in webdataset.WebDataset(tars, shardshuffle=False)]
    torch.testing.assert_close(
        latents(source, {name: [each[name] for each in found] for name in found[0]}), source.latents(np.arange(10))
    )


def test_an_encoder_learns_the_slots_of_composites_offline() -> None:
    """Each slot's numbers are read from the slot of the same place."""
    source = composites(32)
    found = source.samples(np.arange(32))
    model: Any = build(SupervisedConfig(SIZE, SLOTS, 4, encoder=VAE.encoder), source.factors)
    assert model.slot_of == (0, 0, 1, 1, 2, 2)
    labels = {name: torch.from_numpy(values) for name, values in found.factors.items()}
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    for _ in range(20):
        loss = model(torch.from_numpy(found.images), labels)["loss"]
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_a_replay_gives_its_own_bank() -> None:
    replay: Any = build(ReplayConfig(VAE, bank=7))
    source = Composites(replay, replay.bank, 9)
    assert source.samples(np.arange(9)).images.shape == (9, SIZE, SIZE, 3)
    assert torch.isin(source.latents(np.arange(9)), replay.bank).all()


def test_it_travels_to_another_process() -> None:
    source = composites(20)
    np.testing.assert_array_equal(
        pickle.loads(pickle.dumps(source)).samples(np.arange(20)).images, source.samples(np.arange(20)).images
    )


def test_what_cannot_be_is_refused_in_a_sentence() -> None:
    model: Any = build(VAE)
    for wrong in (torch.zeros(5, 2, 2), torch.zeros(0, 3, 2), torch.zeros(3, 2)):
        with pytest.raises(ValueError, match=r"expected \[n, 3, 2\], the slots of at least one training image"):
            Composites(model, wrong, 4)
    for options in ({"size": 0}, {"size": 4, "seed": -1}, {"size": 4, "jitter": -1.0}):
        with pytest.raises(ValueError, match="expected a size of at least 1, a seed and a jitter of 0 or more"):
            Composites(model, bank(), **options)
    for beyond in (np.array([4]), np.array([-1])):
        with pytest.raises(IndexError, match="expected 0 to 3"):
            Composites(model, bank(), 4).samples(beyond)
