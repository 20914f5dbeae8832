"""The penalties: zero where they must be, unbiased, and with the gradients that reverse over reverse gives."""

import copy
from functools import partial
from itertools import combinations

import pytest
import torch
from torch import Tensor, nn

from compgen_fast.bench.memory import measure_peaks
from compgen_fast.jets import Jet, interaction_penalty, plot_slot_hessian_norms, slot_hessian_norms
from compgen_fast.jets.penalty import RecordedWeights, note_weights
from compgen_fast.jets.rules import attention as attention_rules
from compgen_fast.models import CrossAttentionDecoder
from compgen_fast.ops import projected_slot_attention, slot_cross_attention
from tests.jets import decoders
from tests.jets.decoders import (
    CODE,
    DECODERS,
    Additive,
    AdditiveConvolutional,
    Bent,
    ProjectedTransformer,
    SlotTransformer,
    Transformer,
    slots,
)
from tests.jets.oracles import (
    DecomposedLayerNorm,
    attention,
    block_hessian_norms,
    block_hessian_sum,
    channels_of,
    mixed_derivative,
    mixed_difference,
)

RANDOM_METHODS = ("hessian", "pairs", "triple")


def directions(z: Tensor) -> tuple[Jet, Tensor, Tensor]:
    """Slots moved by a random tangent, half of them by u and half by v, and the tangent's u and v parts."""
    side = (torch.rand(z.shape[:2]).argsort(1) < z.shape[1] // 2)[..., None]
    tangent = torch.randn_like(z)
    return Jet(torch.stack([z, tangent]), side), tangent * side, tangent * ~side


def decomposed(decoder: nn.Module) -> nn.Module:
    """A copy sharing parameters, of ops that torch differentiates rightly to any order."""
    twin = copy.deepcopy(decoder, {id(p): p for p in decoder.parameters()})
    for module in twin.modules():
        if type(module) is nn.LayerNorm:
            module.__class__ = DecomposedLayerNorm
    return twin


@pytest.fixture
def plain_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's fused attention has no second derivative: where the oracle runs, it is done by hand."""
    fused = torch.nn.functional.scaled_dot_product_attention

    def either(q: Tensor, k: Tensor, v: Tensor, *args: object, **kwargs: object) -> Tensor:
        jets = any(isinstance(x, Jet) for x in (q, k, v))
        return fused(q, k, v, *args, **kwargs) if jets else attention(q, k, v)

    monkeypatch.setattr(decoders.F, "scaled_dot_product_attention", either)


@pytest.mark.usefixtures("plain_attention")
@pytest.mark.parametrize("kind", DECODERS)
def test_a_decoders_mixed_derivative_matches_both_oracles(kind: type[nn.Module]) -> None:
    decoder, z = kind().double(), slots()
    jet, u, v = directions(z)
    with torch.no_grad():
        found = channels_of(decoder(jet))
    torch.testing.assert_close(found[0], decoder(z))
    torch.testing.assert_close(found[3], mixed_derivative(decomposed(decoder), z, u, v), rtol=1e-9, atol=1e-9)
    seed = torch.randn_like(found[3])
    difference = mixed_difference(decoder, z, u, v, seed)
    torch.testing.assert_close((seed * found[3]).sum(), difference, rtol=1e-7, atol=1e-7)


@pytest.mark.usefixtures("plain_attention")
@pytest.mark.parametrize("kind", DECODERS)
def test_gradients_of_the_penalty_match_reverse_over_reverse(kind: type[nn.Module]) -> None:
    decoder, z = kind().double(), slots().requires_grad_()
    jet, u, v = directions(z)
    wanted = [z, *decoder.parameters()]
    found = torch.autograd.grad(channels_of(decoder(jet))[3].square().sum(), wanted, allow_unused=True)
    exact = mixed_derivative(decomposed(decoder), z, u, v).square().sum()
    expected = torch.autograd.grad(exact, wanted, allow_unused=True)
    for x, ours, theirs in zip(wanted, found, expected, strict=True):
        ours, theirs = (torch.zeros_like(x) if grad is None else grad for grad in (ours, theirs))
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("method", RANDOM_METHODS)
@pytest.mark.parametrize("kind", [Additive, AdditiveConvolutional])
def test_an_additive_decoder_pays_exactly_nothing(kind: type[nn.Module], method: str) -> None:
    decoder, z = kind(), slots().float().requires_grad_()
    penalty = interaction_penalty(decoder, z, method=method, probes=2)
    assert penalty.item() == 0.0
    penalty.backward()
    assert z.grad is not None and not z.grad.any()


@pytest.mark.parametrize("method", RANDOM_METHODS)
def test_additive_is_zero_also_where_the_jet_cannot_know_it(method: str) -> None:
    """Each slot's branch runs on its own, unsided, so x_uv is computed, and comes out as 0 exactly."""
    branch = Additive().double().branch
    penalty = interaction_penalty(
        lambda z: sum(branch(z[:, k].flatten(0)) for k in range(3)), slots(1, 3), method=method
    )
    assert penalty.item() == 0.0


def stripe(t: Tensor, sigma: float = 1.5) -> Tensor:
    return torch.exp(-((torch.arange(8) - t) ** 2) / (2 * sigma**2))


def test_a_bump_is_a_product_of_stripes_with_a_known_penalty_and_their_sum_has_none() -> None:
    """d²/dxdy of stripe(x) stripe(y) = stripe'(x) stripe'(y), so the sum over pixels is ‖stripe'(x)‖² ‖stripe'(y)‖²."""
    z = torch.tensor([[[2.3], [4.9]], [[5.0], [1.2]]], dtype=torch.float64)
    slope = stripe(z) * (torch.arange(8) - z) / 1.5**2
    expected = 2 * slope.square().sum(-1).prod(1).mean()
    bump = interaction_penalty(lambda z: stripe(z[:, 0])[:, :, None] * stripe(z[:, 1])[:, None, :], z)
    torch.testing.assert_close(bump, expected)
    assert interaction_penalty(lambda z: stripe(z[:, 0])[:, :, None] + stripe(z[:, 1])[:, None, :], z).item() == 0.0


@pytest.mark.parametrize("method", ["hessian", "pairs"])
@pytest.mark.parametrize("K", [2, 5])
def test_the_mean_over_probes_is_the_exact_block_hessian_sum(method: str, K: int) -> None:
    decoder, z, probes = Bent().double(), slots(1, K), 4096
    with torch.no_grad():  # every copy of the sample draws directions of its own
        many = z.expand(probes, -1, -1)
        draws = torch.stack([interaction_penalty(decoder, part, method=method) for part in many.split(1)[:150]])
        mean = interaction_penalty(decoder, many, method=method)
    error = draws.std() / probes**0.5
    assert abs(mean - block_hessian_sum(decomposed(decoder), z)) < 3.5 * error


def test_three_slots_in_third_order_match_the_exact_sum() -> None:
    """f = tanh(Σ_k a·z_k) has D³f/dz_k dz_l dz_m = tanh''' a ⊗ a ⊗ a whatever k, l and m."""
    a, z, K = torch.tensor([0.7, -0.4]).double(), torch.randn(1, 3, 2).double() / 3, 3
    t = torch.tanh((z @ a).sum())
    third = -2 * (1 - t * t) * (1 - 3 * t * t)
    expected = K * (K - 1) * K * (third * a.square().sum() ** 1.5) ** 2
    many = z.expand(4096, -1, -1)

    def decoder(z: Tensor) -> Tensor:
        return torch.tanh((z @ a).sum(1, True))

    draws = torch.stack([interaction_penalty(decoder, z, method="triple") for _ in range(100)])
    mean = interaction_penalty(decoder, many, method="triple")
    assert abs(mean - expected) < 3.5 * draws.std() / 64


def test_a_bilinear_interaction_is_free_in_third_order_only() -> None:
    def bilinear(z: Tensor) -> Tensor:
        return (z[:, 0] * z[:, 1]).sum(1) + z[:, 2].exp().sum(1)

    assert interaction_penalty(bilinear, slots(2, 3), method="triple").item() == 0.0
    assert interaction_penalty(bilinear, slots(2, 3), method="pairs").item() > 0.0


def test_gradients_of_the_third_order_penalty_reach_parameters() -> None:
    decoder, z = Bent().double(), slots(1, 2)
    weight = decoder.branch[3].weight

    def loss() -> Tensor:
        return interaction_penalty(decoder, z, method="triple", generator=torch.Generator().manual_seed(0))

    (grad,) = torch.autograd.grad(loss(), weight)
    step = torch.zeros_like(weight)
    step[1, 2] = 1e-5
    with torch.no_grad():
        weight += step
        above = loss()
        weight -= 2 * step
        below = loss()
    torch.testing.assert_close(grad[1, 2], (above - below).detach() / 2e-5, rtol=1e-6, atol=1e-9)


def test_u_and_v_are_symmetric() -> None:
    decoder, z = Transformer().double(), slots()
    jet, _, _ = directions(z)
    mirrored = Jet(jet.channels, ~jet.side)
    a, b = (channels_of(decoder(x)) for x in (jet, mirrored))
    torch.testing.assert_close(a[3], b[3], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(a[1], b[2], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("method", ["hessian", "pairs"])
def test_curvature_within_slots_changes_nothing(method: str) -> None:
    decoder, additive, z = Bent().double(), Additive().double(), slots()
    values = [
        interaction_penalty(f, z, method=method, generator=torch.Generator().manual_seed(0))
        for f in (decoder, lambda z: decoder(z) + 10 * additive(z))
    ]
    torch.testing.assert_close(*values, rtol=1e-12, atol=0)


def test_contrast_is_the_sum_of_products_of_jacobian_norms() -> None:
    decoder, z = Bent().double(), slots(2, 3).requires_grad_()
    output = decoder(z)
    expected = torch.zeros(())
    for b in range(2):
        for i in range(output.shape[1]):
            (jacobian,) = torch.autograd.grad(output[b, i], z, retain_graph=True)
            norms = jacobian[b].norm(dim=-1)
            expected = expected + sum(norms[k] * norms[other] for k, other in combinations(range(3), 2)) / 2
    found = interaction_penalty(decoder, z, method="contrast")
    torch.testing.assert_close(found, expected.double())
    found.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in decoder.parameters() if p.requires_grad)


def test_contrast_of_slots_with_pixels_of_their_own_is_zero_and_its_gradient_finite() -> None:
    z = slots().requires_grad_()
    penalty = interaction_penalty(torch.sin, z, method="contrast")
    penalty.backward()
    assert penalty.item() == 0.0 and z.grad is not None and z.grad.isfinite().all()


@pytest.mark.parametrize("kind", [SlotTransformer, ProjectedTransformer])
def test_attention_penalty_reads_the_weights_of_every_layer(kind: type[Transformer]) -> None:
    decoder, z = kind().double(), slots()
    with RecordedWeights() as recorded:
        output = decoder(z)
    assert len(recorded.weights) == 2
    w = torch.stack(recorded.weights).mean(0)
    assert w.shape == (2, 7, 4)
    expected = sum((w[..., k] * w[..., other]).mean() for k, other in combinations(range(4), 2))
    found, same = interaction_penalty(decoder, z, method="attention", return_output=True)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(same, output)
    found.backward()
    assert decoder.layers[0].to_kv.weight.grad.any()


class Choosing(nn.Module):
    """Pixels choose among slots without our attention, and say so."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Linear(CODE, 7)

    def forward(self, z: Tensor) -> Tensor:
        weights = note_weights(self.logits(z).mT.softmax(-1))
        return weights @ z


def test_attention_penalty_reads_weights_that_a_decoder_notes() -> None:
    decoder, z = Choosing().double(), slots()
    w = decoder.logits(z).mT.softmax(-1)
    expected = sum((w[..., k] * w[..., other]).mean() for k, other in combinations(range(4), 2))
    found, output = interaction_penalty(decoder, z, method="attention", return_output=True)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(output, w @ z)
    found.backward()
    assert decoder.logits.weight.grad.any()


def test_noted_weights_and_attention_are_averaged_alike() -> None:
    noting, attending, z = Choosing().double(), SlotTransformer().double(), slots()
    with RecordedWeights() as recorded:
        noting(z)
        attending(z)
    assert [w.shape for w in recorded.weights] == [(2, 7, 4)] * 3


def test_every_recorder_around_a_decoder_sees_its_weights() -> None:
    noting, attending, z = Choosing().double(), SlotTransformer().double(), slots()
    with RecordedWeights() as outer:
        with RecordedWeights() as inner:
            noting(z)
            attending(z)
        noting(z)
    assert (len(outer.weights), len(inner.weights)) == (4, 3)
    noting(z)
    assert len(outer.weights) == 4


def test_noting_changes_nothing_for_jets() -> None:
    decoder, z = Choosing().double(), slots()
    jet, u, v = directions(z)
    with RecordedWeights() as recorded:
        found = channels_of(decoder(jet))
    torch.testing.assert_close(found[3], mixed_derivative(decoder, z, u, v), rtol=1e-9, atol=1e-9)
    assert isinstance(recorded.weights[0], Jet) and interaction_penalty(decoder, z).item() > 0


def test_noting_compiles_as_one_graph() -> None:
    decoder, z = Choosing().double(), slots()
    compiled = torch.compile(decoder, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(z), decoder(z))
    penalties = [interaction_penalty(each, z, method="attention") for each in (compiled, decoder)]
    torch.testing.assert_close(*penalties)


def test_attention_penalty_of_a_decoder_without_our_op_says_so() -> None:
    with pytest.raises(ValueError, match="found no call of"):
        interaction_penalty(Bent().double(), slots(), method="attention")


@pytest.mark.parametrize("method", ["hessian", "pairs", "contrast", "triple"])
def test_one_slot_cannot_interact(method: str) -> None:
    penalty, output = interaction_penalty(Bent().double(), slots(2, 1), method=method, return_output=True)
    assert penalty.item() == 0.0 and output.shape == (2, 5) and type(output) is Tensor


@pytest.mark.parametrize("kind", [SlotTransformer, ProjectedTransformer])
@pytest.mark.parametrize("method", ["hessian", "pairs", "contrast", "triple", "attention"])
def test_the_output_is_the_decoders(kind: type[Transformer], method: str) -> None:
    decoder, z = kind().double(), slots()
    _, output = interaction_penalty(decoder, z, method=method, return_output=True)
    torch.testing.assert_close(output, decoder(z))


@pytest.mark.parametrize("method", ["hessian", "pairs", "contrast", "triple", "attention"])
def test_folding_the_projections_changes_no_penalty(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, z = ProjectedTransformer().double(), slots(2, 3).requires_grad_()
    calls, softmax = [], attention_rules.jet_slot_softmax
    monkeypatch.setattr(attention_rules, "jet_slot_softmax", lambda *x: calls.append(x) or softmax(*x))

    def penalty_and_gradients() -> list[Tensor]:
        penalty = interaction_penalty(decoder, z, method=method, generator=torch.Generator().manual_seed(0))
        wanted = [z, *decoder.parameters()]
        return [penalty, *torch.autograd.grad(penalty, wanted, allow_unused=True, materialize_grads=True)]

    folded = penalty_and_gradients()
    assert bool(calls) == (method in RANDOM_METHODS)  # contrast takes first-order jets, attention none
    monkeypatch.setitem(projected_slot_attention.__globals__, "folding_pays", lambda *_: False)
    monkeypatch.setattr(attention_rules, "folding_pays", lambda *_: False)
    torch.testing.assert_close(folded, penalty_and_gradients(), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("method", ["hessian", "pairs", "contrast", "triple"])
def test_checkpointing_changes_nothing(method: str) -> None:
    grads = []
    for checkpoint in (False, True):
        torch.manual_seed(0)
        decoder, z = Bent().double(), slots(2, 3)
        interaction_penalty(decoder, z, method=method, checkpoint=checkpoint).backward()
        grads.append([p.grad for p in decoder.parameters() if p.grad is not None])
    torch.testing.assert_close(*grads)


def test_a_pixel_subset_is_unbiased() -> None:
    decoder, z = SlotTransformer().double(), slots(1)

    def penalty(pixels: int | Tensor | None) -> Tensor:
        return interaction_penalty(decoder, z, pixels=pixels, generator=torch.Generator().manual_seed(3))

    with torch.no_grad():
        one_by_one = torch.stack([penalty(torch.tensor([i])) for i in range(7)])
        torch.testing.assert_close(one_by_one.sum(), penalty(None))
        draws = torch.stack([interaction_penalty(decoder, z, pixels=3) for _ in range(250)])
        every = interaction_penalty(decoder, z.expand(4096, -1, -1))
    assert abs(draws.mean() - every) < 4 * draws.std() / 250**0.5
    with pytest.raises(ValueError, match=r"pixels=3 needs a decoder that takes decoder\(z, pixels=index\)"):
        interaction_penalty(Bent().double(), z, pixels=3)


@pytest.mark.parametrize("method", ["hessian", "pairs", "contrast", "triple"])
@pytest.mark.parametrize("pixels", [None, 5])
def test_chunks_of_pixels_change_nothing(method: str, pixels: int | None) -> None:
    found = []
    for chunk in (None, 2, 100):
        torch.manual_seed(0)
        decoder, z = SlotTransformer().double(), slots(2, 3).requires_grad_()
        penalty, output = interaction_penalty(decoder, z, method=method, pixels=pixels, chunk=chunk, return_output=True)
        (penalty + output.square().sum()).backward()
        found.append([penalty, output, z.grad, *(p.grad for p in decoder.parameters())])
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(found[2], found[0])


def test_chunks_hold_less_memory() -> None:
    decoder, z = (
        CrossAttentionDecoder(8, 32, layers=1, heads=2, head_dim=8, query_dim=32, slot_hidden=8),
        torch.rand(2, 3, 8),
    )
    peaks = [
        measure_peaks(partial(interaction_penalty, decoder, z, chunk=chunk), lambda loss: loss.backward(), "cpu").full
        for chunk in (None, 64)
    ]
    assert peaks[1] < peaks[0] / 4


def test_chunks_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="chunk=3 needs a decoder that takes"):
        interaction_penalty(Bent().double(), slots(1), chunk=3)
    with pytest.raises(ValueError, match="chunk is 0; method 'hessian' expects at least 1 pixel"):
        interaction_penalty(SlotTransformer(), slots(1), chunk=0)
    with pytest.raises(ValueError, match="method 'attention' expects None, since it takes no derivatives"):
        interaction_penalty(SlotTransformer(), slots(1), method="attention", chunk=2)


def test_slots_may_lie_in_another_dimension() -> None:
    decoder, z = Bent().double(), slots()
    generator = [torch.Generator().manual_seed(0) for _ in range(2)]
    many = 4000
    with torch.no_grad():
        a = interaction_penalty(decoder, z[:1].expand(many, -1, -1), generator=generator[0])
        moved = z[:1].expand(many, -1, -1).transpose(1, 2)
        b = interaction_penalty(lambda z: decoder(z.transpose(1, 2)), moved, slots_dim=2, generator=generator[1])
    torch.testing.assert_close(a, b, rtol=0.3, atol=0)


def test_autocast_leaves_jets_in_full_precision() -> None:
    decoder, z = SlotTransformer(), slots().float()
    runs = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            runs.append(interaction_penalty(decoder, z, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(*runs) and runs[1].dtype == torch.float32


@pytest.mark.parametrize("what", ["decoder", "step"])
@pytest.mark.filterwarnings("ignore")
def test_under_compile_the_penalty_is_what_it_is_without(what: str) -> None:
    decoder, z = Bent().double(), slots()

    def penalty(f: nn.Module) -> Tensor:
        torch.manual_seed(0)
        return interaction_penalty(f, z) * 2

    def step(z: Tensor) -> Tensor:
        return interaction_penalty(decoder, z) * 2

    expected = penalty(decoder)
    if what == "decoder":
        found = penalty(torch.compile(decoder, backend="aot_eager"))
    else:
        torch.manual_seed(0)
        found = torch.compile(step, backend="aot_eager")(z)
    torch.testing.assert_close(found, expected)


def test_fp32_jets_are_exact_to_six_digits() -> None:
    decoder, z = SlotTransformer().double(), slots()
    jet, _, _ = directions(z)
    with torch.no_grad():
        exact = channels_of(decoder(jet))[3]
        found = channels_of(decoder.float()(Jet(jet.channels.float(), jet.side)))[3]
    assert (found - exact).norm() < 1e-5 * exact.norm()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"method": "hesian"}, "method is 'hesian'; expected one of hessian, pairs"),
        ({"slots_dim": 0}, "slots_dim=0; expected"),
        ({"z": torch.randn(8, 24)}, r"z is \[8, 24\]; expected \[batch, slots, .*z.unflatten\(1, \(slots, -1\)\)"),
        ({"probes": 0}, "expects at least 1"),
        ({"probes": 2, "method": "contrast"}, "expects 1, since nothing is drawn"),
    ],
)
def test_bad_arguments_are_refused_with_a_sentence(arguments: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        interaction_penalty(Bent().double(), **{"z": slots(), **arguments})


def test_a_decoder_of_several_outputs_is_told_what_to_do() -> None:
    with pytest.raises(TypeError, match="returned tuple; expected one tensor"):
        interaction_penalty(lambda z: (z, z), slots())


def test_slot_hessian_norms_are_those_of_the_blocks(tmp_path) -> None:  # type: ignore[no-untyped-def]
    decoder, z = Bent().double(), slots(2, 2)
    exact = slot_hessian_norms(decoder, z)
    torch.testing.assert_close(exact, block_hessian_norms(decomposed(decoder), z).sqrt())
    estimated = slot_hessian_norms(decoder, z, probes=60)
    torch.testing.assert_close(estimated, exact, rtol=0.5, atol=0)
    plot_slot_hessian_norms(exact, tmp_path / "norms.png")
    assert (tmp_path / "norms.png").stat().st_size > 1000


def test_hooked_weights_do_not_change_what_the_decoder_sees() -> None:
    q = torch.randn(1, 5, 2, 3)
    with RecordedWeights() as recorded:
        out = slot_cross_attention(q, q, q, return_weights=False)
    assert torch.equal(out, slot_cross_attention(q, q, q)[0]) and recorded.weights[0].shape == (1, 5, 5)


@pytest.mark.parametrize("K", [2, 60], ids=["folded", "unfolded"])
@pytest.mark.parametrize("return_weights", [False, True])
def test_a_call_with_projections_is_recorded_once(K: int, return_weights: bool) -> None:
    x, k, w = torch.randn(1, 7, 8), torch.randn(2, K, 2, 8), torch.randn(16, 8)
    arguments = (x, k, k, w, None, w.T, None)
    with RecordedWeights() as recorded:
        found = projected_slot_attention(*arguments, return_weights=return_weights)
    out, weights = projected_slot_attention(*arguments)
    assert len(recorded.weights) == 1 and torch.equal(recorded.weights[0], weights)
    torch.testing.assert_close(found, (out, weights) if return_weights else out)
