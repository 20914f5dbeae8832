"""What holds for generators of every kind: losses, ranks, sampling, guidance, ablation, learning."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from compgen_fast.draws import Draws
from compgen_fast.generate.build import build
from compgen_fast.generate.config import ConditioningConfig, TrunkConfig
from compgen_fast.models.ends_steps import EndsSteps
from compgen_fast.train.ema import Ema
from compgen_fast.worlds.source import Factor
from tests.generate.cases import (
    CHANNELS,
    CODES,
    JEPA,
    KINDS,
    MASKED,
    TOKENS,
    TOLD,
    WITH_JEPA,
    generator,
    labels,
    latents,
    rows,
)

every_kind = pytest.mark.parametrize("kind", KINDS)


@every_kind
def test_the_loss_is_finite_and_reaches_every_parameter(kind: str) -> None:
    model = generator(kind)
    found = model(latents(kind), labels(), step=3, draws=Draws.at(0, 3))
    assert {"loss", model.measure, "scored"} == found.keys()
    assert all(value.shape == () and value.isfinite() for value in found.values())
    assert [name for name, value in found.items() if value.requires_grad] == ["loss"]
    found["loss"].backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name


@every_kind
def test_bf16_serves_matrix_products_and_leaves_the_loss_in_full(kind: str) -> None:
    model, x, y = generator(kind).float(), latents(kind), labels()
    x = x.float() if x.is_floating_point() else x
    expected = model(x, y, draws=Draws.at(0, 0))["loss"]
    with torch.autocast("cpu", torch.bfloat16):
        found = model(x, y, draws=Draws.at(0, 0))["loss"]
        assert model.sample(y, draws=Draws.at(0, 0)).isfinite().all()
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)


@every_kind
def test_the_same_draws_give_the_same_losses_and_others_give_others(kind: str) -> None:
    model, x, y = generator(kind), latents(kind), labels()
    once, again, other = (model(x, y, draws=Draws.at(0, step))["loss"] for step in (1, 1, 2))
    assert torch.equal(once, again) and not torch.equal(once, other)


@pytest.mark.parametrize("jepa", [None, JEPA], ids=["alone", "with JEPA"])
@every_kind
def test_equal_parts_of_a_batch_average_to_the_whole(kind: str, jepa: object) -> None:
    if jepa and kind not in WITH_JEPA:
        pytest.skip("a causal generator hides no tokens")
    model = generator(kind, jepa=jepa, conditioning=replace(TOLD, kind="dropout", concept_dropout=0.5))
    x, y = latents(kind), labels()
    whole = model(x, y, draws=Draws.at(0, 0))
    halves = [model(x[i : i + 2], rows(y, i, i + 2), draws=Draws.at(0, 0, first=i, total=4)) for i in (0, 2)]
    for name in whole:
        torch.testing.assert_close((halves[0][name] + halves[1][name]) / 2, whole[name])


@every_kind
def test_samples_have_the_shape_and_type_of_latents(kind: str) -> None:
    found = generator(kind).float().sample(labels(), draws=Draws.at(0, 0))
    if kind == "maskgit":
        assert found.shape == (4, TOKENS) and found.dtype == torch.int64
        assert found.min() >= 0 and found.max() < CODES
    else:
        assert found.shape == (4, TOKENS, CHANNELS) and found.dtype == torch.float32 and found.isfinite().all()


@pytest.mark.parametrize("guidance", [1.0, 2.0])
@every_kind
def test_a_sample_depends_on_its_row_and_seed_only(kind: str, guidance: float) -> None:
    model, y = generator(kind), labels()
    whole = model.sample(y, draws=Draws.at(5, 0), guidance=guidance)
    part = model.sample(rows(y, 1, 3), draws=Draws.at(5, 0, first=1, total=4), guidance=guidance)
    torch.testing.assert_close(part, whole[1:3])
    assert not torch.equal(whole, model.sample(y, draws=Draws.at(6, 0), guidance=guidance))


@every_kind
def test_guidance_of_one_is_no_guidance_and_more_of_it_changes_samples(kind: str) -> None:
    model, y = generator(kind), labels()
    with torch.no_grad():  # conditions that matter
        model.trunk.modulation.weight.mul_(5)
    plain, guided = (model.sample(y, draws=Draws.at(0, 0), guidance=g) for g in (1.0, 8.0))
    assert not torch.equal(plain, guided)


@every_kind
def test_guidance_without_training_for_it_is_refused(kind: str) -> None:
    model = generator(kind, conditioning=ConditioningConfig(all_dropout=0.0))
    with pytest.raises(ValueError, match=r"all_dropout is 0; set it to 0\.1"):
        model.sample(labels(), draws=Draws.at(0, 0), guidance=2.0)


@pytest.mark.parametrize("kind", MASKED)
def test_tokens_that_were_seen_do_not_count(kind: str) -> None:
    model, x = generator(kind), latents(kind)
    seen = model.corrupt(x, model.conditioning(labels()), Draws.at(0, 1))
    assert 0 < seen.hidden.sum() < seen.hidden.numel()
    other = seen.target.clone()
    other[~seen.hidden] = latents(kind)[~seen.hidden]
    output = model.trunk(seen.tokens, seen.condition).tokens
    score = lambda target: model.score(output, replace(seen, target=target), Draws.at(0, 2))  # noqa: E731
    assert torch.equal(score(seen.target), score(other))
    other[seen.hidden] = latents(kind)[seen.hidden]
    assert not torch.equal(score(seen.target), score(other))


@pytest.mark.parametrize("kind", MASKED)
def test_hidden_tokens_are_not_seen(kind: str) -> None:
    model, x = generator(kind), latents(kind)
    seen = model.corrupt(x, model.conditioning(labels()), Draws.at(0, 1))
    changed = x.clone()
    changed[seen.hidden] = latents(kind)[seen.hidden]
    again = model.corrupt(changed, model.conditioning(labels()), Draws.at(0, 1))
    assert torch.equal(seen.tokens, again.tokens)


@every_kind
def test_factors_are_left_out_in_training_only(kind: str) -> None:
    model, x, y = generator(kind, conditioning=replace(TOLD, all_dropout=0.99)), latents(kind), labels()
    others = {name: value.flip(0) for name, value in y.items()}
    assert torch.equal(*(model(x, f, draws=Draws.at(0, 0))["loss"] for f in (y, others)))
    model.eval()
    assert not torch.equal(*(model(x, f, draws=Draws.at(0, 0))["loss"] for f in (y, others)))


@every_kind
def test_other_latents_are_refused_with_what_to_set(kind: str) -> None:
    wrong = torch.randn(4, TOKENS, CHANNELS + 1) if kind == "maskgit" else torch.zeros(4, TOKENS, dtype=torch.int64)
    with pytest.raises(ValueError, match="set side to the tokenizer's grid"):
        generator(kind)(wrong, labels())


@every_kind
def test_a_trainer_can_average_the_weights_and_end_steps(kind: str) -> None:
    model = generator(kind, awake=False).float()
    assert isinstance(model, EndsSteps)
    ema = Ema(model, 0.9)
    ema.update(model)
    with ema.applied(model):
        assert model.sample(labels(), draws=Draws.at(0, 0)).isfinite().all()


CODE = Factor("code", ("a", "b", "c", "d"))


LEARNING: dict[str, tuple[dict[str, Any], float, int, float]] = {
    # Settings, noise on what is learned, steps, and how far samples may then be from it; strangers are √2 apart.
    "dit": ({}, 0.0, 150, 0.35),
    "maskgit": ({"label_smoothing": 0.0}, 0.0, 60, 0.0),
    "mar": ({}, 0.0, 150, 0.35),
    "masked givt": ({"components": 1}, 0.3, 100, 0.5),  # likelihoods of points without noise have no maximum
    "causal givt": ({"components": 1}, 0.3, 140, 0.5),
}


@every_kind
def test_four_samples_are_learned_by_their_factor(kind: str) -> None:
    trunk, told = TrunkConfig(32, 2, 2), ConditioningConfig(all_dropout=0.0)
    changes, noise, steps, near = LEARNING[kind]
    model = build(replace(KINDS[kind], trunk=trunk, conditioning=told, **changes), (CODE,))
    x, y = latents(kind), {"code": torch.arange(4)}
    x = x.float() if x.is_floating_point() else x
    x_many, y_many = x.repeat(8, *[1] * (x.dim() - 1)), {"code": y["code"].repeat(8)}  # many masks and times
    optimiser = torch.optim.Adam(model.parameters(), 5e-3)
    for step in range(steps):
        optimiser.zero_grad()
        seen = x_many + noise * torch.randn_like(x_many) if noise else x_many
        model(seen, y_many, step=step, draws=Draws.at(0, step))["loss"].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
    found = model.sample(y, draws=Draws.at(1, 0))
    error = (found - x).double().square().mean().sqrt()
    assert error <= near, error


@pytest.mark.parametrize("kind", KINDS)
def test_a_blank_is_what_it_takes(kind: str) -> None:
    made = generator(kind)
    blank = made.blank(2)
    assert blank.shape == latents(kind, 2).shape and blank.dtype == latents(kind, 2).dtype
    made.check(blank)


@pytest.mark.parametrize("kind", MASKED)
def test_without_rounds_given_few_tokens_take_one_each(kind: str) -> None:
    made = generator(kind, side=2)
    told = labels()
    asked, given = (made.sample(told, draws=Draws.at(0, 0), **steps) for steps in ({"steps": 4}, {}))
    assert torch.equal(asked, given) and given.shape[:2] == (4, 4)
