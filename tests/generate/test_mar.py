"""MAR: the flow of each token is its own."""

import torch

from compgen_fast.draws import Draws
from compgen_fast.generate.mar import TokenFlow
from tests.generate.cases import CHANNELS, generator, labels, latents


def test_a_new_head_says_zero_and_starts_as_the_identity() -> None:
    head = TokenFlow(CHANNELS, 8, 16, 2)
    assert head(torch.randn(5, CHANNELS), torch.rand(5), head.told(torch.randn(5, 8))).abs().max() == 0
    modulations = head.modulation(torch.randn(1, 16)).view(-1, 16)
    assert modulations.mean(1).tolist() == [0, 1, 0, 0, 1, 0, 0, 1]  # shift, scale, gate; …; shift, scale


def test_the_loss_is_the_error_of_the_velocity_of_hidden_tokens() -> None:
    model, x, y = generator("mar").eval(), latents("mar"), labels()
    found = model(x, y, draws=Draws.at(0, 1))
    draws = Draws.at(0, 1)
    seen = model.corrupt(x, model.conditioning(y), draws)
    t, noise = draws.uniform(x[..., 0]).unsqueeze(-1), draws.normal(x)
    told = model.head.told(model.trunk(seen.tokens, seen.condition).tokens)
    velocity = model.head((1 - t) * noise + t * x, t.squeeze(-1), told)
    expected = (velocity - (x - noise))[seen.hidden].square().mean()
    torch.testing.assert_close(found["loss"] / found["scored"], expected)


def test_a_tokens_flow_sees_no_other_token() -> None:
    head = generator("mar").head
    x, t, told = torch.randn(5, CHANNELS).double(), torch.rand(5).double(), torch.randn(5, 16).double()
    other = x.clone()
    other[2:] = 0
    torch.testing.assert_close(head(x, t, told)[:2], head(other, t, told)[:2])


def test_a_temperature_of_zero_leaves_no_chance_but_the_order() -> None:
    model, y = generator("mar"), labels()
    once, again = (model.sample(y, draws=Draws.at(seed, 0), steps=1, temperature=0.0) for seed in (0, 1))
    torch.testing.assert_close(once, again)
