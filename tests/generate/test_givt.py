"""GIVT: mixtures, their likelihood and their samples; and that the causal one does not look ahead."""

import pytest
import torch
from torch.distributions import Categorical, Independent, MixtureSameFamily, Normal

from compgen_fast.draws import Draws
from compgen_fast.generate.generator import Guide
from compgen_fast.generate.givt import Mixture
from tests.generate.cases import CHANNELS, TOKENS, generator, labels, latents


def mixture(*shape: int) -> Mixture:
    means = 2 * torch.randn(*shape, 3, CHANNELS)
    return Mixture(torch.randn(*shape, 3), means, torch.rand_like(means) + 0.1)


def reference(of: Mixture) -> MixtureSameFamily:
    return MixtureSameFamily(Categorical(logits=of.logits), Independent(Normal(of.means, of.deviations), 1))


def test_the_density_is_that_of_torchs_mixture() -> None:
    found, x = mixture(4, 5), torch.randn(4, 5, CHANNELS)
    torch.testing.assert_close(found.log_density(x), reference(found).log_prob(x))


def test_samples_have_the_mixtures_moments() -> None:
    one = mixture(1)
    drawn = Mixture(*(x.expand(100_000, *x.shape[1:]) for x in one)).draw(Draws.at(0, 0))
    expected = reference(one)
    torch.testing.assert_close(drawn.mean(0), expected.mean[0], atol=0.03, rtol=0)
    torch.testing.assert_close(drawn.var(0), expected.variance[0], atol=0.1, rtol=0.02)


@pytest.mark.parametrize("kind", ["masked givt", "causal givt"])
def test_the_loss_is_the_negative_log_likelihood_of_a_number(kind: str) -> None:
    model, x, y = generator(kind).eval(), latents(kind), labels()
    found = model(x, y, draws=Draws.at(0, 1))
    seen = model.corrupt(x, model.conditioning(y), Draws.at(0, 1))
    output = model.trunk(seen.tokens, seen.condition, causal=model.causal).tokens
    density = reference(model.head.mixture(output)).log_prob(x)
    torch.testing.assert_close(found["loss"] / found["scored"], -density[seen.hidden].mean() / CHANNELS)


def test_a_causal_token_is_told_from_those_before_it_only() -> None:
    model, x, y = generator("causal givt").eval(), latents("causal givt"), labels()
    later = x.clone()
    later[:, 4:] = torch.randn_like(later[:, 4:])

    def means(of: torch.Tensor) -> torch.Tensor:
        seen = model.corrupt(of, model.conditioning(y), Draws.at(0, 0))
        found: torch.Tensor = model.head.mixture(model.trunk(seen.tokens, seen.condition, causal=True).tokens).means
        return found

    torch.testing.assert_close(means(x)[:, :5], means(later)[:, :5])  # the fifth is told from the first four
    assert not torch.allclose(means(x)[:, 5:], means(later)[:, 5:])


def test_causal_samples_are_drawn_from_what_the_trunk_tells() -> None:
    model, y = generator("causal givt").eval(), labels()
    x = model.sample(y, draws=Draws.at(0, 0), temperature=1e-9)
    seen = model.corrupt(x, model.conditioning(y), Draws.at(0, 0))
    means = model.head.mixture(model.trunk(seen.tokens, seen.condition, causal=True).tokens).means
    nearest = (means - x.unsqueeze(-2)).norm(dim=-1).min(-1).values
    assert x.shape == (4, TOKENS, CHANNELS) and nearest.max() < 1e-6


def test_guidance_sharpens_towards_what_is_told() -> None:
    """told N(1, 1) and untold N(0, 1) make N(g, 1)."""
    head, count = generator("masked givt").head, 4000
    at = lambda mean: Mixture(torch.zeros(count, 1), torch.full((count, 1, 1), mean), torch.ones(count, 1, 1))  # noqa: E731
    head.mixture = lambda output, temperature: at(float(output[0, 0]))
    output = torch.cat([torch.ones(count, 1), torch.zeros(count, 1)])
    found = head.draw(output, Guide(torch.zeros(2 * count, 1), 1.5), Draws.at(0, 0), 1.0)
    assert found.shape == (count, 1)
    assert abs(found.mean() - 1.5) < 0.06 and abs(found.std() - 1) < 0.06
