"""Tokens as shards: exact, with their factors, in ordinary folders."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from compgen_fast.generate.latents import Layout, Packed, Tokens, TokenStream, cache, fingerprint
from compgen_fast.models.config import ConvVAEConfig, VQVAEConfig
from compgen_fast.models.tokenizer import VQVAE, ConvVAE
from compgen_fast.stream import ShardStream, StreamError, inspect, pack, verify
from compgen_fast.worlds import Shapes2D
from compgen_fast.worlds.world import Part

COUNT = 20


@pytest.fixture(scope="module")
def source() -> Part:
    return Shapes2D(16, continuous=True).split("composition", size=COUNT)


@pytest.fixture(scope="module")
def vae() -> ConvVAE:
    torch.manual_seed(0)
    return ConvVAE(ConvVAEConfig(image_size=16, patch=4, width=8, channels=5)).eval()


@pytest.fixture(scope="module")
def vq() -> VQVAE:
    torch.manual_seed(0)
    return VQVAE(VQVAEConfig(image_size=16, patch=4, width=8, channels=5, codes=300)).eval()


def images_of(source: Part) -> torch.Tensor:
    return torch.from_numpy(source.samples(np.arange(COUNT)).images)


@pytest.mark.parametrize("size", [1, 3, 5])
def test_latents_survive_the_bytes_of_an_image(size: int) -> None:
    layout = Layout("latents", 4, size, "0" * 12)
    latents = torch.randn(3, 4, size)
    latents[0, 0, 0], latents[1, 0, 0] = -0.0, float("inf")
    stored = layout.pack(latents)
    assert stored.dtype == np.uint8 and stored.shape == (3, *layout.shape)
    found = layout.unpack(torch.from_numpy(stored))
    assert torch.equal(found.view(torch.int32), latents.view(torch.int32))


def test_codes_survive_the_bytes_of_an_image() -> None:
    layout = Layout("codes", 4, 1 << 20, "0" * 12)
    codes = torch.tensor([[0, 255, 256, (1 << 20) - 1]])
    assert layout.shape == (4, 1, 3)
    assert torch.equal(layout.unpack(torch.from_numpy(layout.pack(codes))), codes)


def test_the_name_says_how_to_read_tokens(vae: ConvVAE, vq: VQVAE) -> None:
    for layout in (Layout.of(vae, "latents"), Layout.of(vq, "latents"), Layout.of(vq, "codes")):
        assert Layout.read(layout.named("a.b-c")) == layout
    assert Layout.of(vq, "codes").size == 300 and Layout.of(vq, "latents").size == 5
    assert Layout.read("shapes2d-composition-train") is None


def test_a_cache_streams_back_latents_and_factors(source: Part, vae: ConvVAE, tmp_path: Path) -> None:
    cache(vae, source, tmp_path / "latents", kind="latents")
    (batch,) = TokenStream(tmp_path / "latents", batch_size=COUNT, epochs=1, shuffle=False)
    assert batch.images.dtype == torch.float32 and batch.images.shape == (COUNT, 16, 5)
    assert torch.allclose(batch.images, vae.encode(images_of(source)), atol=1e-5)
    for name, values in source.values(np.arange(COUNT)).items():
        np.testing.assert_array_equal(batch.factors[name].numpy(), values)


def test_codes_are_cached_exactly_and_embed_to_latents(source: Part, vq: VQVAE, tmp_path: Path) -> None:
    for kind in ("codes", "latents"):
        cache(vq, source, tmp_path / kind, kind=kind)  # type: ignore[arg-type]
    options = {"batch_size": 8, "seed": 3, "epochs": 1}
    codes, latents = (list(TokenStream(tmp_path / kind, **options)) for kind in ("codes", "latents"))
    for one, other in zip(codes, latents, strict=True):
        assert one.images.dtype == torch.int64
        assert torch.equal(one.factors["size"], other.factors["size"])
        assert torch.equal(vq.embed(one.images), other.images)


def test_the_order_and_the_state_are_those_of_any_stream(source: Part, vae: ConvVAE, tmp_path: Path) -> None:
    cache(vae, source, tmp_path / "latents", kind="latents")
    plain = ShardStream(tmp_path / "latents", batch_size=4, seed=1)
    stream = TokenStream(tmp_path / "latents", batch_size=4, seed=1)
    batches, keys = iter(stream), [batch.keys for batch, _ in zip(plain, range(3), strict=False)]
    assert [next(batches).keys for _ in range(2)] == keys[:2]
    state = stream.state_dict()
    resumed = TokenStream(tmp_path / "latents", batch_size=4, seed=1)
    resumed.load_state_dict(state)
    assert next(iter(resumed)).keys == keys[2]


def test_packed_images_give_the_same_cache(source: Part, vq: VQVAE, tmp_path: Path) -> None:
    pack(source, tmp_path / "images", shard_size=7)
    packed = Packed(tmp_path / "images")
    assert len(packed) == COUNT and packed.factors == source.factors and packed.name == source.name
    np.testing.assert_array_equal(packed.samples(np.array([9, 2])).images, images_of(source)[[9, 2]].numpy())
    made = [cache(vq, given, tmp_path / str(n), kind="codes") for n, given in enumerate((source, tmp_path / "images"))]
    assert made[0].hash == made[1].hash


def test_a_cache_verifies_and_can_be_inspected(source: Part, vae: ConvVAE, tmp_path: Path) -> None:
    folder = tmp_path / "latents"
    cache(vae, source, folder, kind="latents", split="composition")
    assert verify(folder) == []
    console = Console(record=True, width=200, quiet=True)
    found = inspect(folder, tmp_path / "grid.png", console)
    assert found.name == Layout.of(vae, "latents").named("shapes2d-composition-train")
    assert (tmp_path / "grid.png").exists()
    command = [sys.executable, "-m", "compgen_fast", "verify", str(folder)]
    assert subprocess.run(command, capture_output=True).returncode == 0
    shard = folder / "shard-000000.tar"
    damaged = bytearray(shard.read_bytes())
    damaged[700] ^= 1
    shard.write_bytes(damaged)
    assert verify(folder) != []


def test_tokens_of_another_tokenizer_are_refused(source: Part, vae: ConvVAE, tmp_path: Path) -> None:
    torch.manual_seed(1)
    other = ConvVAE(vae.config).eval()
    assert fingerprint(other) != fingerprint(vae)
    cache(vae, source, tmp_path / "latents", kind="latents")
    stream = TokenStream(tmp_path / "latents", batch_size=4)
    stream.check(vae)
    with pytest.raises(StreamError, match=f"made by the tokenizer {fingerprint(vae)}, and this one is"):
        stream.check(other)
    with pytest.raises(StreamError, match="holds a pack of other images or settings"):
        cache(other, source, tmp_path / "latents", kind="latents")


def test_what_cannot_be_is_refused_by_name(source: Part, vae: ConvVAE, vq: VQVAE, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="it has no codes; expected a VQ-VAE, or kind 'latents'"):
        Tokens(vae, source, "codes")
    pack(source, tmp_path / "images")
    with pytest.raises(StreamError, match="which are images; expected tokens"):
        TokenStream(tmp_path / "images", batch_size=4)
    with pytest.raises(ValueError, match=r"stored tokens are torch.uint8 \[2, 16, 1, 3\]; expected .*\[n, 16, 7, 3\]"):
        Layout.of(vae, "latents").unpack(torch.zeros(2, 16, 1, 3, dtype=torch.uint8))
