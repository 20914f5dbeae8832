"""The SlotVAE module: what its loss is made of, and that nothing is computed twice."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence

from compgen_fast.draws import Draws
from compgen_fast.jets import Jet, interaction_penalty
from compgen_fast.models import CrossAttentionDecoder, PatchDecoder, SlotVAE, slot_vae
from compgen_fast.models.config import LossConfig, SlotVAEConfig
from compgen_fast.models.slot_vae import warmed

SIZE, SLOTS, DIM = 4, 3, 2
ATTENTION: dict[str, Any] = {"layers": 1, "heads": 2, "head_dim": 3, "query_dim": 4, "slot_hidden": 5, "octaves": 2}
DERIVATIVES = ("hessian", "pairs", "contrast", "triple")


class TinyEncoder(nn.Module):
    """Has the signature of SlotEncoder; its slots are a linear map of the image and some noise."""

    def __init__(self, image_size: int, slots: int, out_dim: int) -> None:
        super().__init__()
        self.slots = slots
        self.linear = nn.Linear(3 * image_size**2, slots * out_dim)

    def forward(self, images: Tensor, draws: Draws) -> Tensor:
        slots = self.linear(images.flatten(1)).unflatten(-1, (self.slots, -1))
        return slots + 0.1 * draws.normal(slots)


def vae(*, slots: int = SLOTS, decoder: nn.Module | None = None, checkpoint: bool = False, **loss: Any) -> SlotVAE:
    """A small VAE in fp64."""
    config = SlotVAEConfig(SIZE, slots, DIM, loss=LossConfig(**loss), checkpoint_activations=checkpoint)
    decoder = decoder or CrossAttentionDecoder(DIM, SIZE, **ATTENTION)
    return SlotVAE(config, TinyEncoder(SIZE, slots, 2 * DIM), decoder).double()


def images(batch: int = 4, size: int = SIZE) -> Tensor:
    return torch.randint(0, 256, (batch, size, size, 3), dtype=torch.uint8)


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, materialize_grads=True))


class PixelCounter:
    """Counts the pixels a decoder is asked for, plainly and with derivatives."""

    def __init__(self, decoder: nn.Module) -> None:
        self.plain = self.with_derivatives = 0
        decoder.register_forward_hook(self.count)

    def count(self, module: nn.Module, inputs: Sequence[Any], output: Tensor) -> None:
        if isinstance(output, Jet):
            self.with_derivatives += output.shape[1]
        else:
            self.plain += output.shape[1]


def test_the_loss_is_the_weighted_sum_of_its_parts_each_by_its_formula() -> None:
    model, x = vae(sigma=5.0, beta=0.3, alpha=0.7, penalty="attention"), images()
    found = model(x, draws=Draws.at(1, 2))

    draws = Draws.at(1, 2)
    means, logvars = model.encode(x, draws)
    z = means + (0.5 * logvars).exp() * draws.normal(means)
    reconstruction = (model.decode(z) - x.view(4, -1, 3) / 255).square().sum((1, 2)).mean()
    posterior = Normal(means, logvars.exp().sqrt())
    kl = kl_divergence(posterior, Normal(torch.zeros_like(means), torch.ones_like(means))).sum((1, 2)).mean()
    penalty = interaction_penalty(model.decoder, z, method="attention")
    expected = {
        "loss": 5.0 * reconstruction + 0.3 * kl + 0.7 * penalty,
        "reconstruction": reconstruction,
        "mse": reconstruction / (3 * SIZE**2),
        "kl": kl,
        "penalty": penalty,
        "alpha": torch.tensor(0.7, dtype=torch.float64),
        "beta": torch.tensor(0.3, dtype=torch.float64),
    }
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=0)
    assert [name for name, value in found.items() if value.requires_grad] == ["loss"]


@pytest.mark.parametrize("method", DERIVATIVES)
def test_a_derivative_penalty_is_the_one_of_jets_with_the_same_draws(method: Any) -> None:
    model, x = vae(alpha=0.7, penalty=method), images()
    draws = Draws.at(1, 2)
    means, logvars = model.encode(x, draws)
    z = means + (0.5 * logvars).exp() * draws.normal(means)
    expected = interaction_penalty(model.decoder, z, method=method, generator=draws)
    torch.testing.assert_close(model(x, draws=Draws.at(1, 2))["penalty"], expected)


@pytest.mark.parametrize(
    "loss",
    [
        {"penalty": "none"},
        {"penalty": "attention"},
        {"penalty": "hessian", "probes": 2},
        {"penalty": "pairs"},
        {"penalty": "triple"},
        {"penalty": "hessian", "penalty_pixels": 5},
        {"penalty": "hessian", "penalty_pixels": 8, "decoder": "patch"},
    ],
    ids=str,
)
def test_equal_parts_of_a_batch_average_to_the_whole(loss: dict[str, Any]) -> None:
    loss = loss | ({"decoder": PatchDecoder(DIM, SIZE, patch=2, **ATTENTION)} if "decoder" in loss else {})
    model, x = vae(alpha=2.0, **loss), images(4)
    whole = model(x, step=3, draws=Draws.at(5, 6))
    halves = [model(x[i : i + 2], step=3, draws=Draws.at(5, 6, first=i, total=4)) for i in (0, 2)]
    for name in whole:
        torch.testing.assert_close((halves[0][name] + halves[1][name]) / 2, whole[name])
    of_halves = gradients(model, (halves[0]["loss"] + halves[1]["loss"]) / 2)
    for expected, found in zip(gradients(model, whole["loss"]), of_halves, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("method", ["attention", *DERIVATIVES])
def test_the_penalty_trains_the_decoder(method: Any) -> None:
    model, x = vae(sigma=0.0, beta=0.0, alpha=1.0, penalty=method), images()
    loss = model(x, draws=Draws.at(0, 0))["loss"]
    assert loss.item() > 0
    assert any((grad != 0).any() for grad in gradients(model.decoder, loss))


@pytest.mark.parametrize("method", ["attention", "hessian"])
def test_an_image_is_decoded_once_for_loss_and_penalty(method: Any) -> None:
    model = vae(penalty=method)
    counter = PixelCounter(model.decoder)
    model(images())
    assert counter.plain + counter.with_derivatives == SIZE**2


@pytest.mark.parametrize(
    ("decoder", "few"), [(CrossAttentionDecoder, 5), (PatchDecoder, 4)], ids=["by pixel", "by patch"]
)
def test_derivatives_of_some_pixels_leave_the_others_to_a_plain_pass(decoder: Any, few: int) -> None:
    options = {"patch": 2} if decoder is PatchDecoder else {}
    model = vae(penalty="hessian", penalty_pixels=few, decoder=decoder(DIM, SIZE, **ATTENTION, **options))
    counter = PixelCounter(model.decoder)
    patches = PixelCounter(model.decoder.patches) if decoder is PatchDecoder else None
    model(images())
    assert (counter.with_derivatives, counter.plain) == (few, SIZE**2 - few)
    if patches is not None:  # no patch is decoded both ways
        assert (patches.with_derivatives, patches.plain) == (1, 3)


def test_some_pixels_change_the_penalty_and_nothing_else() -> None:
    whole, some = vae(penalty="hessian"), vae(penalty="hessian", penalty_pixels=5)
    some.load_state_dict(whole.state_dict())
    x = images()
    expected, found = (model(x, draws=Draws.at(0, 0)) for model in (whole, some))
    torch.testing.assert_close(found["reconstruction"], expected["reconstruction"])
    torch.testing.assert_close(found["kl"], expected["kl"])


@dataclass(frozen=True)
class RolledDraws(Draws):
    """Draws whose permutations are the numbers in turn, from a given one on."""

    start: int = 0

    def permutation(self, count: int, device: torch.device) -> Tensor:
        return torch.arange(count, device=device).roll(-self.start)


@pytest.mark.parametrize(("patch", "few"), [(None, 3), (2, 4)])
def test_the_penalty_of_some_pixels_is_unbiased(patch: int | None, few: int) -> None:
    """Over all turns each pixel is chosen equally often; contrast has no other chance in it."""
    decoder = CrossAttentionDecoder(DIM, SIZE, **ATTENTION) if patch is None else None
    decoder = decoder or PatchDecoder(DIM, SIZE, patch=2, **ATTENTION)
    model, x = vae(penalty="contrast", decoder=decoder), images(2)
    some = SlotVAE(
        replace(model.config, loss=replace(model.config.loss, penalty_pixels=few)), model.encoder, model.decoder
    )
    draws = lambda start: RolledDraws(torch.Generator().manual_seed(0), start=start)  # noqa: E731
    turns = SIZE**2 if patch is None else SIZE**2 // patch**2
    estimates = [some(x, draws=draws(start))["penalty"] for start in range(turns)]
    torch.testing.assert_close(torch.stack(estimates).mean(), model(x, draws=draws(0))["penalty"])


def test_all_pixels_by_number_are_all_pixels() -> None:
    model = vae(penalty="hessian", penalty_pixels=SIZE**2)
    counter = PixelCounter(model.decoder)
    model(images())
    assert (counter.with_derivatives, counter.plain) == (SIZE**2, 0)


@pytest.mark.parametrize(
    ("loss", "step"),
    [
        ({"penalty": "none"}, 5),
        ({"penalty": "hessian", "alpha": 0.0}, 5),
        ({"penalty": "hessian", "alpha_warmup": 10}, 0),
        ({"penalty": "hessian", "alpha_start": 6}, 5),
    ],
    ids=str,
)
def test_a_penalty_without_weight_is_not_computed(
    loss: dict[str, Any], step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_vae, "interaction_penalty", lambda *_, **__: pytest.fail("was computed"))
    found = vae(**loss)(images(), step=step)
    assert found["penalty"].item() == 0


def test_weights_grow_linearly_to_their_value_and_stay() -> None:
    model = vae(alpha=0.8, alpha_warmup=4, beta=0.1, beta_warmup=2)
    x = images(1)
    used = [model(x, step=step, draws=Draws.at(0, 0)) for step in (0, 1, 2, 3, 4, 100)]
    assert [found["alpha"].item() for found in used] == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 0.8])
    assert [found["beta"].item() for found in used] == pytest.approx([0, 0.05, 0.1, 0.1, 0.1, 0.1])
    assert warmed(0.8, 0, 0) == 0.8
    late = vae(alpha=0.8, alpha_start=3, alpha_warmup=2)
    used_late = [late(x, step=step, draws=Draws.at(0, 0))["alpha"].item() for step in (0, 2, 3, 4, 5, 100)]
    assert used_late == pytest.approx([0, 0, 0, 0.4, 0.8, 0.8])
    assert vae(alpha=0.8, alpha_start=3)(x, step=2)["alpha"].item() == 0
    parts = used[1]
    total = parts["reconstruction"] + 0.05 * parts["kl"] + 0.2 * parts["penalty"]
    torch.testing.assert_close(parts["loss"], total)


@pytest.mark.parametrize("method", ["attention", "hessian"])
def test_gradients_are_those_of_finite_differences(method: Any) -> None:
    model, x = vae(sigma=1.0, beta=0.5, alpha=3.0, penalty=method), images(2)
    names, parameters = zip(*model.named_parameters(), strict=True)

    def loss(*values: Tensor) -> Tensor:
        named = dict(zip(names, values, strict=True))
        return torch.func.functional_call(model, named, (x,), {"draws": Draws.at(0, 0)})["loss"]

    assert torch.autograd.gradcheck(loss, parameters, fast_mode=True)


def test_recomputing_activations_changes_nothing() -> None:
    kept, recomputed = vae(penalty="hessian"), vae(penalty="hessian", checkpoint=True)
    recomputed.load_state_dict(kept.state_dict())
    x = images()
    losses = [model(x, draws=Draws.at(0, 0))["loss"] for model in (kept, recomputed)]
    torch.testing.assert_close(losses[0], losses[1])
    for expected, found in zip(gradients(kept, losses[0]), gradients(recomputed, losses[1]), strict=True):
        torch.testing.assert_close(found, expected)


def test_activations_of_derivatives_are_recomputed_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(slot_vae, "interaction_penalty", lambda *a, **k: seen.append(k) or interaction_penalty(*a, **k))
    for checkpoint in (False, True):
        vae(penalty="hessian", probes=2, checkpoint=checkpoint)(images())
    assert [(call["checkpoint"], call["probes"]) for call in seen] == [(False, 2), (True, 2)]


@pytest.mark.parametrize("method", ["attention", "hessian"])
def test_half_precision_sums_losses_in_full(method: Any) -> None:
    model, x = vae(penalty=method).float(), images()
    expected = model(x, draws=Draws.at(0, 0))
    with torch.autocast("cpu", torch.bfloat16):
        found = model(x, draws=Draws.at(0, 0))
    assert all(value.dtype == torch.float32 for value in found.values())
    for name in ("loss", "reconstruction", "kl"):
        torch.testing.assert_close(found[name], expected[name], rtol=0.02, atol=0.02)


def test_a_single_slot_has_nothing_to_interact_with() -> None:
    for method in ("attention", *DERIVATIVES):
        model = vae(slots=1, penalty=method)
        found = model(images())
        assert found["penalty"].item() == pytest.approx(0, abs=1e-12)
        found["loss"].backward()


def test_images_reach_the_encoder_between_minus_one_and_one_with_colours_first() -> None:
    model, x = vae(), images()
    seen: list[Tensor] = []
    model.encoder.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    model.encode(x)
    assert seen[0].shape == (4, 3, SIZE, SIZE) and seen[0].dtype == torch.float64
    torch.testing.assert_close(seen[0][1, 2, 0, 3], x[1, 0, 3, 2].double() / 127.5 - 1)


def test_a_reconstruction_is_the_picture_of_the_means() -> None:
    model, x = vae(), images()
    means, _ = model.encode(x, Draws.at(0, 0))
    model.decoder.to_colour[-1].bias.data.fill_(0.5)
    expected = (model.decode(means) * 255).clamp(0, 255).round()
    found = model.reconstruct(x, Draws.at(0, 0))
    assert found.dtype == torch.uint8 and found.shape == x.shape
    assert torch.equal(found.double(), expected.view(x.shape))
    model.decoder.to_colour[-1].bias.data.fill_(9.0)
    assert (model.reconstruct(x) == 255).all()


def test_some_pixels_decode_alone() -> None:
    model, z, chosen = vae(), torch.randn(2, SLOTS, DIM, dtype=torch.float64), torch.tensor([9, 2])
    torch.testing.assert_close(model.decode(z, chosen), model.decode(z)[:, chosen])


@pytest.mark.parametrize(
    "wrong",
    [torch.zeros(2, SIZE, SIZE, 3), images(2, SIZE + 1), images(2).movedim(-1, 1)],
    ids=["float", "size", "CHW"],
)
def test_wrong_images_are_refused_in_words(wrong: Tensor) -> None:
    with pytest.raises(ValueError, match=r"expected torch.uint8 \[B, 4, 4, 3\]"):
        vae()(wrong)


def test_a_few_steps_of_training_lower_the_loss() -> None:
    model, x = vae(penalty="hessian", alpha=0.01, beta=0.01).float(), images(8)
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    losses: list[float] = []
    for step in range(40):
        loss = model(x, step=step, draws=Draws.at(0, step))["loss"]
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]
