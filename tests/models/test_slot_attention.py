"""The SlotAttention module."""

import pytest
import torch
from torch import Tensor

from compgen_fast.models import SlotAttention


def textbook(module: SlotAttention, inputs: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Slot Attention as its paper's pseudo-code has it, for one head."""
    inputs = module.norm_inputs(inputs)
    k, v = module.to_k(inputs), module.to_v(inputs)
    for _ in range(module.iters):
        q = module.to_q(module.norm_slots(slots)) * module.dim**-0.5
        maps = (q @ k.transpose(1, 2)).softmax(1)
        shares = maps + module.eps
        updates = shares / shares.sum(-1, keepdim=True) @ v
        slots = module.gru(updates.flatten(0, 1), slots.flatten(0, 1)).view(slots.shape)
        slots = slots + module.mlp(module.norm_mlp(slots))
    return slots, maps


@pytest.mark.parametrize("iters", [1, 3])
def test_it_is_the_papers_algorithm(iters: int) -> None:
    module, inputs, start = SlotAttention(4, 16, iters), torch.randn(2, 30, 16), torch.randn(2, 4, 16)
    slots, maps = module(inputs, start)
    expected_slots, expected_maps = textbook(module, inputs, start)
    torch.testing.assert_close(slots, expected_slots)
    torch.testing.assert_close(maps, expected_maps)
    for p, q in zip(*(grads(module, x) for x in (slots, expected_slots)), strict=True):
        torch.testing.assert_close(p, q, atol=1e-5, rtol=1e-4)


def grads(module: SlotAttention, slots: Tensor) -> list[Tensor]:
    used = [p for name, p in module.named_parameters() if not name.startswith("slot_")]
    return list(torch.autograd.grad(slots.square().sum(), used, retain_graph=True))


def test_maps_share_out_every_input_among_the_live_slots() -> None:
    module, mask = SlotAttention(5, 12, heads=3, input_dim=7), torch.tensor([[True, True, False, True, False]] * 2)
    slots, maps = module(torch.randn(2, 20, 7), slot_mask=mask)
    torch.testing.assert_close(maps.sum(1), torch.ones(2, 20))
    assert (maps[~mask] == 0).all() and (slots[~mask] == 0).all() and (slots[mask] != 0).any()


def test_a_masked_slot_has_no_influence() -> None:
    module, inputs, mask = SlotAttention(4, 8), torch.randn(1, 9, 8), torch.tensor([[True, True, True, False]])
    start = torch.randn(1, 4, 8)
    other = start.clone()
    other[:, 3] = 100.0
    assert torch.equal(module(inputs, start, mask)[0], module(inputs, other, mask)[0])


def test_sampled_slots_come_in_any_number_and_repeat_with_their_generator() -> None:
    module = SlotAttention(4, 8)
    draw = lambda seed: module(torch.ones(2, 5, 8), num_slots=9, generator=torch.Generator().manual_seed(seed))[0]  # noqa: E731
    assert draw(0).shape == (2, 9, 8)
    assert torch.equal(draw(0), draw(0)) and not torch.equal(draw(0), draw(1))


def test_learned_slots_are_trained_and_fixed_in_number() -> None:
    module = SlotAttention(4, 8, initial="learned")
    module(torch.randn(2, 5, 8))[0].square().sum().backward()
    assert module.slot_mean.grad is not None and (module.slot_mean.grad != 0).any()
    with pytest.raises(ValueError, match="4 starts were learned"):
        module(torch.randn(2, 5, 8), num_slots=5)


def test_implicit_gradient_converges_to_the_unrolled_one() -> None:
    """At the fixed point the Neumann series and the unrolled rounds are the same sum."""
    inputs, start = torch.randn(1, 12, 6, dtype=torch.float64), torch.randn(1, 3, 6, dtype=torch.float64)
    unrolled = SlotAttention(3, 6, iters=60).double()
    with torch.no_grad():  # weak weights: a round contracts
        for p in unrolled.parameters():
            p.mul_(0.5)

    def gradients(implicit_terms: int | None) -> Tensor:
        unrolled.implicit_terms = implicit_terms
        return torch.cat([g.flatten() for g in grads(unrolled, unrolled(inputs, start)[0])])

    exact = gradients(None)
    errors = [((gradients(terms) - exact).norm() / exact.norm()).item() for terms in (1, 4, 40)]
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 1e-6


def test_one_implicit_term_is_the_gradient_of_the_last_round_and_starts_get_none() -> None:
    module = SlotAttention(3, 6, implicit_terms=1, initial="learned")
    inputs = torch.randn(2, 10, 6)
    module(inputs)[0].square().sum().backward()
    assert module.slot_mean.grad is None and module.to_q.weight.grad is not None


def test_it_trains_under_autocast() -> None:
    module = SlotAttention(4, 16)
    with torch.autocast("cpu", torch.bfloat16):
        slots, maps = module(torch.randn(2, 30, 16))
    (slots.float().square().sum() + maps.float().square().sum()).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())


def test_it_compiles_as_one_graph() -> None:
    module, inputs, start = SlotAttention(3, 8, iters=2), torch.randn(2, 10, 8), torch.randn(2, 3, 8)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(inputs, start)[0], module(inputs, start)[0])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"iters": 0}, "iters is 0"),
        ({"heads": 3}, "cannot be split into 3 heads"),
        ({"initial": "zero"}, "initial is 'zero'"),
        ({"implicit_terms": 0}, "implicit_terms is 0"),
        ({"num_slots": 0}, "num_slots=0"),
    ],
)
def test_bad_settings_are_refused_with_a_sentence(arguments: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        SlotAttention(**({"num_slots": 4, "dim": 8} | arguments))  # type: ignore[arg-type]


def test_unflattened_inputs_are_refused_with_advice() -> None:
    with pytest.raises(ValueError, match="flatten image features"):
        SlotAttention(4, 8)(torch.randn(2, 8, 4, 4))
