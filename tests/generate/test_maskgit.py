"""MaskGIT: what its loss is, and how codes are decoded."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from compgen_fast.draws import Draws
from compgen_fast.generate.maskgit import gumbel
from tests.generate.cases import CODES, TOKENS, generator, labels, latents


def test_a_new_model_knows_nothing() -> None:
    found = generator("maskgit", awake=False)(latents("maskgit", 64), labels(64), draws=Draws.at(0, 0))
    assert abs(found["loss"] / found["scored"] - math.log(CODES)) < 0.02


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_the_cross_entropy_of_hidden_codes(smoothing: float) -> None:
    model, x, y = generator("maskgit", label_smoothing=smoothing).eval(), latents("maskgit"), labels()
    found = model(x, y, draws=Draws.at(0, 1))
    seen = model.corrupt(x, model.conditioning(y), Draws.at(0, 1))
    logits = model.to_logits(model.trunk(seen.tokens, seen.condition).tokens)
    expected = F.cross_entropy(logits[seen.hidden], x[seen.hidden], label_smoothing=smoothing)
    torch.testing.assert_close(found["loss"] / found["scored"], expected)


@pytest.mark.parametrize("steps", [1, 4, 9])
def test_every_token_is_decoded_exactly_once(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = generator("maskgit")
    rounds: list[torch.Tensor] = []
    embed = model.embedding.forward

    def noted(codes: torch.Tensor) -> Any:
        rounds.append(codes.clone())
        return embed(codes)

    monkeypatch.setattr(model.embedding, "forward", noted)
    rounds.append(model.sample(labels(), draws=Draws.at(0, 0), steps=steps))
    assert len(rounds) == steps + 1 and (rounds[0] == CODES).all() and (rounds[-1] < CODES).all()
    for before, after in pairwise(rounds):
        known = before != CODES
        assert torch.equal(before[known], after[known])
        decoded = (after != CODES).sum(1) - known.sum(1)
        assert (decoded == decoded[0]).all() and decoded[0] >= 1


def test_without_noise_the_most_confident_codes_come_first() -> None:
    model = generator("maskgit")
    with torch.no_grad():  # one certain code
        model.to_logits.bias[3] = 100.0
    assert (model.sample(labels(), draws=Draws.at(0, 0), steps=4, temperature=0.0) == 3).all()


def test_gumbel_noise_draws_from_the_softmax() -> None:
    scores = torch.tensor([0.1, 0.2, 0.7]).log().expand(50_000, 3)
    drawn = (scores + gumbel(scores, Draws.at(0, 0))).argmax(1).bincount() / 50_000
    torch.testing.assert_close(drawn, torch.tensor([0.1, 0.2, 0.7]), atol=0.01, rtol=0)


def test_rounds_are_at_most_tokens() -> None:
    with pytest.raises(ValueError, match=f"expected 1 to {TOKENS}"):
        generator("maskgit").sample(labels(), steps=TOKENS + 1)
