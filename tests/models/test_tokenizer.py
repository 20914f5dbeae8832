"""Tokenizers: what a token is, a codebook that follows the data, and steps that do not depend on who takes them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from compgen_fast.draws import Draws
from compgen_fast.models import tokenizer
from compgen_fast.models.build import build
from compgen_fast.models.config import ConvVAEConfig, VQVAEConfig
from compgen_fast.models.ends_steps import EndsSteps
from compgen_fast.models.summary import of_config
from compgen_fast.models.tokenizer import VQVAE, ConvVAE, Tokenizer
from compgen_fast.worlds import Shapes2D

VAE = ConvVAEConfig(image_size=16, patch=4, width=8, channels=3)
VQ = VQVAEConfig(image_size=16, patch=4, width=8, channels=3, codes=6, revive_after=3)


def images(count: int = 8, first: int = 0, size: int = 16) -> Tensor:
    part = Shapes2D(size, continuous=True).split("all")
    return torch.from_numpy(part.samples(np.arange(first, first + count)).images)


def made(config: ConvVAEConfig | VQVAEConfig) -> Tokenizer:
    torch.manual_seed(0)
    model = build(config)
    assert isinstance(model, Tokenizer)
    return model


def alone(tally: Tensor) -> Tensor:
    return tally


def trained(config: ConvVAEConfig | VQVAEConfig, steps: int = 30) -> Tokenizer:
    model = made(config)
    optimiser = torch.optim.Adam(model.parameters(), 3e-3)
    for step in range(steps):
        optimiser.zero_grad()
        model(images(16, 16 * step), step=step, draws=Draws.at(0, step))["loss"].backward()
        optimiser.step()
        model.end_step(alone)
    return model.eval()


@pytest.mark.parametrize("config", [VAE, VQ, replace(VAE, image_size=24, patch=8), replace(VQ, patch=16, blocks=0)])
def test_images_become_a_grid_of_tokens_and_come_back(config: ConvVAEConfig | VQVAEConfig) -> None:
    model = made(config)
    given = images(5, size=config.image_size) if config.image_size >= 16 else images(5)
    latents = model.encode(given)
    assert latents.shape == (5, (config.image_size // config.patch) ** 2, 3) == (5, model.tokens, 3)
    assert model.decode(latents).shape == given.shape and model.decode(latents).is_floating_point()
    assert model.paint(latents).dtype == torch.uint8
    assert torch.equal(model.reconstruct(given), model.paint(latents))


@pytest.mark.parametrize("config", [VAE, VQ])
def test_tokens_are_counted_row_by_row(config: ConvVAEConfig | VQVAEConfig) -> None:
    model = made(replace(config, blocks=0))
    white = torch.full((1, 16, 16, 3), 255, dtype=torch.uint8)
    dotted = white.clone()
    dotted[:, :2, -2:] = 0  # in the corner of the fourth token
    difference = (model._encoded(white) - model._encoded(dotted)).abs().sum(-1)[0]
    assert difference[3] > 0 and difference[0] == difference[12] == difference[15] == 0


@pytest.mark.parametrize("config", [VAE, VQ])
def test_training_brings_images_back_better(config: ConvVAEConfig | VQVAEConfig) -> None:
    given = images(32, 10_000)
    errors = [
        (model.reconstruct(given).float() - given.float()).square().mean() for model in (made(config), trained(config))
    ]
    assert errors[1] < 0.3 * errors[0]


def test_latents_have_the_scale_that_training_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "MOMENTS_KEPT", 0.0)  # of the last step alone
    model, given = made(VAE), images(32)
    model(given, draws=Draws.at(0, 1))
    model.end_step(alone)
    mean, logvar = model._encoded(given).detach().chunk(2, -1)
    z = mean + logvar.div(2).exp() * Draws.at(0, 1).normal(mean)
    assert torch.allclose(model.latent_mean, z.mean((0, 1)), atol=1e-5)
    assert torch.allclose(model.latent_deviation, z.flatten(0, 1).std(0, correction=0), atol=1e-5)
    assert torch.allclose(model.encode(given), (mean - z.mean((0, 1))) / model.latent_deviation, atol=1e-4)
    assert torch.allclose(model.decode(model.encode(given)), model._decoded(mean), atol=1e-5)


def test_latents_of_a_vqvae_are_its_codes_of_unit_variance() -> None:
    model, given = made(replace(VQ, decay=0.0)), images(32)
    assert isinstance(model, VQVAE)
    for step in range(20):  # without an optimiser: the codes come to rest
        model(given, draws=Draws.at(0, step))
        model.end_step(alone)
    codes, latents = model.codes(given), model.encode(given)
    assert codes.dtype == torch.int64 and codes.shape == (32, 16) and len(codes.unique()) > 1
    assert torch.allclose(latents.std((0, 1), correction=0), torch.ones(3), atol=0.05)
    assert latents.mean((0, 1)).abs().max() < 0.05
    assert torch.equal(latents, model.embed(codes))
    assert torch.equal(model.paint(latents), model.paint(codes))
    assert torch.equal(model.paint(latents + 1e-4), model.paint(codes))  # as the code next to it


def test_the_vae_loss_is_its_formula() -> None:
    model, given = made(VAE), images()
    losses = model(given, draws=Draws.at(0, 1))
    mean, logvar = model._encoded(given).chunk(2, -1)
    noise = Draws.at(0, 1).normal(mean)
    colours = model._decoded(mean + logvar.div(2).exp() * noise)
    error = (colours - given / 255).square().sum((1, 2, 3)).mean()
    gaussian = torch.distributions.Normal(mean, logvar.div(2).exp())
    kl = torch.distributions.kl_divergence(gaussian, torch.distributions.Normal(0.0, 1.0)).sum((1, 2)).mean()
    assert losses["loss"].item() == pytest.approx((error + VAE.beta * kl).item(), rel=1e-5)
    assert losses["kl"].item() == pytest.approx(kl.item(), rel=1e-5)


def test_beta_grows_over_its_warmup() -> None:
    model = made(replace(VAE, beta=0.5, beta_warmup=10))
    assert [model(images(), step=step)["beta"].item() for step in (0, 5, 20)] == [0, 0.25, 0.5]


def test_the_gradient_passes_the_codebook_straight_through() -> None:
    model, given = made(VQ), images()
    assert isinstance(model, VQVAE)
    z = model._encoded(given)
    vectors = model.codebook[model.codes(given)].requires_grad_()
    error = (model._decoded(vectors) - given / 255).square().sum() / len(given)
    (at_codes,) = torch.autograd.grad(error, vectors)
    wanted = torch.autograd.grad(z, model.encoder[0].weight, at_codes + 2 * 0.25 * (z - vectors).detach() / len(given))
    losses = model(given)
    found = torch.autograd.grad(losses["loss"], model.encoder[0].weight)
    assert torch.allclose(found[0], wanted[0], rtol=1e-4, atol=1e-6)


def test_a_code_is_the_moving_average_of_what_is_next_to_it() -> None:
    model = made(replace(VQ, decay=0.8, revive_after=1000))
    assert isinstance(model, VQVAE)
    model.idle.zero_()
    given, counts, sums = images(), torch.zeros(6), torch.zeros(6, 3)
    for step in range(3):
        z, codes = model._encoded(given).detach().flatten(0, 1), model.codes(given).flatten()
        before = model.codebook.clone()
        model(given, draws=Draws.at(0, step))
        model.end_step(alone)
        for code in range(6):
            mine = z[codes == code]
            counts[code] = 0.8 * counts[code] + 0.2 * len(mine)
            sums[code] = 0.8 * sums[code] + 0.2 * mine.sum(0)
            wanted = sums[code] / counts[code] if len(mine) else before[code]
            assert torch.allclose(model.codebook[code], wanted, atol=1e-5)


def test_a_code_without_use_is_put_on_an_output_of_the_batch() -> None:
    model, given = made(VQ), images()
    assert isinstance(model, VQVAE)
    for step in range(10):
        model(given, draws=Draws.at(0, step))
        model.end_step(alone)
    assert model.idle.max() == 0  # all codes began as if dead, and have found a place
    outputs = model._encoded(given).detach().flatten(0, 1)
    model.codebook[2] = 1e4
    for step in range(100):
        model(given, draws=Draws.at(1, step))
        model.end_step(alone)
        if model.codebook[2].norm() < 1e3:
            break
    assert VQ.revive_after <= step < 50 and model.counts[2] > 0 and model.idle[2] == 0
    assert tokenizer.distances(model.codebook[2:3], outputs).min() < 1e-6


def test_no_two_codes_are_revived_in_one_place() -> None:
    model = made(replace(VQ, codes=200))
    assert isinstance(model, VQVAE)
    given = images(4)
    given[1:] = given[0]  # most outputs are there four times
    for step in range(5):
        model(given, draws=Draws.at(0, step))
        model.end_step(alone)
    placed = model.codebook[(model.idle <= VQ.revive_after).flatten()]
    assert 1 < len(placed) <= 16
    assert torch.cdist(placed, placed).fill_diagonal_(1).min() > 1e-4


def test_evaluation_leaves_no_trace() -> None:
    for config in (VAE, VQ):
        model = made(config).eval()
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        model(images())
        model.encode(images())
        assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


@pytest.mark.parametrize("config", [VAE, VQ, replace(VQ, codes=500)])
def test_ranks_and_micro_batches_make_the_step_of_one_process(config: ConvVAEConfig | VQVAEConfig) -> None:
    """Two ranks of two micro-batches each, in one process: their tallies are summed by hand."""
    whole, ranks = made(config), [made(config), made(config)]
    for step in range(6):
        given = images(8, 8 * step)
        whole(given, step=step, draws=Draws.at(0, step))
        whole.end_step(alone)
        for micro in range(2):
            for rank, model in enumerate(ranks):
                first = 4 * micro + 2 * rank
                draws = Draws.at(0, step, first=first, total=8)
                model(given[first : first + 2], step=step, draws=draws)
        total = ranks[0].tally + ranks[1].tally
        for model in ranks:
            model.end_step(lambda tally: tally.copy_(total))  # noqa: B023 called at once
    for name, buffer in whole.named_buffers():
        assert torch.equal(ranks[0].get_buffer(name), ranks[1].get_buffer(name))
        assert torch.allclose(ranks[0].get_buffer(name), buffer, rtol=1e-4, atol=1e-5), name


def test_buffers_that_a_step_leaves_are_in_the_state_and_the_tally_is_not() -> None:
    for model in (made(VAE), made(VQ)):
        assert isinstance(model, EndsSteps)
        state, buffers = model.state_dict(), dict(model.named_buffers())
        assert buffers.keys() - state.keys() == {"tally"}
        assert {"latent_mean", "latent_deviation"} <= state.keys()
    assert {"codebook", "counts", "sums", "idle"} <= state.keys()


def test_the_summary_knows_tokenizers() -> None:
    for config in (VAE, VQ):
        found = of_config(config)
        assert found.decoder_flops and found.step_flops > 2 * (found.encoder_flops + found.decoder_flops)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (
            replace(VAE, patch=3),
            "patch is 3 for images of 16×16; expected one of 2, 4, 8, 16, 32 that divides the side",
        ),
        (replace(VAE, image_size=20, patch=8), "patch is 8 for images of 20×20"),
        (replace(VQ, codes=1), "codes is 1 and revive_after 3; expected at least 2 codes and 1 step"),
        (replace(VQ, commitment=0), "commitment is 0 and decay 0.99"),
        (replace(VQ, channels=0), "channels is 0; expected at least 1"),
        (replace(VAE, beta=-1), "beta is -1"),
    ],
)
def test_impossible_settings_are_refused(config: ConvVAEConfig | VQVAEConfig, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        build(config)


def test_wrong_tokens_are_refused_by_name() -> None:
    vae, vq = made(VAE), made(VQ)
    assert isinstance(vae, ConvVAE) and isinstance(vq, VQVAE)
    with pytest.raises(ValueError, match=r"ConvVAE: latents are torch.int64 \[2, 16\]; expected floating-point"):
        vae.decode(torch.zeros(2, 16, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"VQVAE: latents are torch.float32 \[2, 9, 3\]; .*\[B, 16, 3\]"):
        vq.decode(torch.zeros(2, 9, 3))
    with pytest.raises(ValueError, match=r"from 0 to 5 .a mask token is no code"):
        vq.decode(torch.full((2, 16), 6))
