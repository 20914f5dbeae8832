"""The Jet itself: what it shows to ordinary code, what it refuses, which zeros it never computes."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from compgen_fast.jets import Jet, jet_rule
from compgen_fast.jets.jet import RULES
from compgen_fast.ops import slot_cross_attention
from tests.jets.decoders import CODE, SlotTransformer, slots
from tests.jets.oracles import channels_of, random_jet


def sided_slots(B: int = 2, K: int = 4) -> Jet:
    z = slots(B, K)
    return Jet(torch.stack([z, torch.randn_like(z)]), torch.rand(B, K, 1) < 0.5)


def test_a_jet_looks_like_its_value() -> None:
    x = random_jet("full", (2, 3, 4))
    assert isinstance(x, Tensor) and torch.is_tensor(x)
    assert (x.shape, x.dim(), x.ndim, x.size(1), len(x), x.numel()) == ((2, 3, 4), 3, 3, 3, 2, 24)
    assert x.dtype == torch.float64 and x.device.type == "cpu" and not x.requires_grad and x.is_floating_point()
    assert "Jet(full, shape=[2, 3, 4]" in repr(x) == f"{x}"
    assert Jet(x.channels.requires_grad_()).requires_grad


def test_comparisons_and_detached_values_are_constants() -> None:
    x = random_jet("full", (3,))
    for y in (x > 0, x == x, x.argmax(), x.detach(), torch.zeros_like(x), x.new_zeros(2)):
        assert type(y) is Tensor
    assert torch.equal(x > 0, x.primal > 0)


def test_an_op_without_a_rule_is_named_and_told_how_to_get_one() -> None:
    with pytest.raises(NotImplementedError, match=r"no rule for torch\.digamma") as error:
        torch.digamma(random_jet("full", (3,)))
    assert "@jet_rule(torch.digamma)" in str(error.value)


def test_a_user_can_register_a_rule() -> None:
    x = random_jet("full", (3,))

    @jet_rule(torch.digamma)
    def digamma(x: Jet) -> Tensor:
        return torch.sin(x)

    try:
        assert torch.equal(channels_of(torch.digamma(x)), channels_of(torch.sin(x)))
    finally:
        del RULES[torch.digamma]


def test_slots_stay_sided_through_their_own_branch_and_open_up_where_they_meet() -> None:
    branch = nn.Sequential(
        nn.Linear(CODE, 8), nn.LayerNorm(8), nn.GELU(), nn.RMSNorm(8), nn.Linear(8, 5), nn.Softmax(-1)
    )
    x = branch.double()(sided_slots())
    assert len(x.channels) == 2
    x = x * x.sum(-1, keepdim=True)
    assert len(x.channels) == 2
    assert len(x.sum(1).channels) == 3
    assert len(x.sum(1).exp().channels) == 4
    assert len(x.softmax(1).channels) == 4


def test_slots_stay_sided_through_a_convolution_per_slot() -> None:
    x = sided_slots().flatten(0, 1)[:, :, None, None].expand(-1, -1, 3, 3)
    x = F.group_norm(F.conv2d(x, torch.randn(4, CODE, 2, 2).double()), 2)
    assert len(F.interpolate(x, scale_factor=2).unflatten(0, (2, 4)).channels) == 2


def test_queries_that_do_not_depend_on_slots_stay_plain_tensors() -> None:
    decoder, seen = SlotTransformer().double(), []
    decoder.layers[0].to_q.register_forward_hook(lambda module, inputs, output: seen.append(type(output)))
    decoder.layers[1].to_q.register_forward_hook(lambda module, inputs, output: seen.append(type(output)))
    decoder(sided_slots())
    assert seen == [Tensor, Jet]


def test_the_fused_op_takes_slot_keys_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    from compgen_fast.jets.rules import attention as module

    calls, fused = [], module.jet_cross_attention
    monkeypatch.setattr(module, "jet_cross_attention", lambda q, *rest: calls.append(len(q)) or fused(q, *rest))
    SlotTransformer().double()(sided_slots())
    assert calls == [1, 4]  # constant queries, then full jets


def test_dropout_drops_the_same_elements_of_all_channels() -> None:
    x = Jet(torch.ones(4, 1000).double())
    y = F.dropout(x, 0.5, training=True).channels
    assert set(y.unique().tolist()) == {0.0, 2.0}
    assert (y == y[0]).all()


def test_in_place_ops_write_into_the_jet_everyone_holds() -> None:
    x = random_jet("full", (3,))
    expected = torch.relu(x + 1).channels
    same = x
    x += 1
    F.relu(x, inplace=True)
    assert same is x and torch.equal(same.channels, expected)


def test_in_place_on_shared_memory_is_refused_with_advice() -> None:
    x = random_jet("full", (3, 2))
    y = x[0]
    for shared in (x, y):
        with pytest.raises(NotImplementedError, match=r"x = x \+ y, not x \+= y"):
            shared.add_(1)
    with pytest.raises(NotImplementedError, match="build it whole with"):
        x[0] = 1
    with pytest.raises(NotImplementedError, match="plain tensor cannot take a jet"):
        torch.zeros(2).double().add_(y)


def test_norms_of_matrices_are_refused_rather_than_taken_for_frobenius() -> None:
    x = Jet(torch.randn(4, 3, 3))
    with pytest.raises(NotImplementedError, match="norms of matrices have no rule"):
        torch.linalg.norm(x, 2, dim=(0, 1))


def test_batch_norm_in_training_mode_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="ties the samples of a batch together"):
        nn.BatchNorm1d(4).double()(random_jet("full", (5, 4)))


def test_weights_of_slot_cross_attention_are_jets_too() -> None:
    q, kv = torch.randn(2, 5, 2, 3).double(), sided_slots().unflatten(-1, (2, 3))
    out, weights = slot_cross_attention(q, kv, kv)
    alone = slot_cross_attention(q, kv, kv, return_weights=False)
    assert len(weights.channels) == 4
    torch.testing.assert_close(out.channels, alone.channels)


def test_a_half_precision_weight_is_read_in_the_jets_precision() -> None:
    layer = nn.Linear(4, 3).bfloat16()
    y = layer(Jet(torch.randn(4, 2, 4)))
    assert y.dtype == torch.float32


def test_a_checkpointed_block_gives_the_same_gradients() -> None:
    block = nn.Sequential(nn.Linear(CODE, 8), nn.LayerNorm(8), nn.GELU()).double()
    grads = []
    for run in (block, lambda z: checkpoint(block, z, use_reentrant=False)):
        torch.manual_seed(1)
        block.zero_grad()
        channels_of(run(sided_slots()).sum(1).tanh()).square().sum().backward()
        grads.append([p.grad.clone() for p in block.parameters()])
    torch.testing.assert_close(*grads)


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_module_gives_the_same_jet() -> None:
    """Traced, it would not: see Jet.__torch_function__."""
    module, x = nn.Sequential(nn.Linear(CODE, 8), nn.LayerNorm(8), nn.Linear(8, 3)).double(), sided_slots()
    compiled = torch.compile(module, backend="aot_eager")
    torch.testing.assert_close(channels_of(compiled(x).sum(1).tanh()), channels_of(module(x).sum(1).tanh()))


def test_a_jet_of_the_wrong_number_of_channels_is_refused() -> None:
    with pytest.raises(ValueError, match="3 or 4 channels, or 2 with a side"):
        Jet(torch.zeros(2, 3))
