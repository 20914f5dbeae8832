"""The trunk: starts as the identity, attends as it should, and reads token by token what it computes at once."""

import pytest
import torch
from torch import Tensor

from compgen_fast.generate.config import TrunkConfig
from compgen_fast.generate.trunk import Trunk
from compgen_fast.ops.trunk_block import modulated, split_heads

SIDE, WIDTH, LAYERS, HEADS, BATCH = 3, 12, 3, 2, 2


def trunk(awake: bool = True) -> Trunk:
    made = Trunk(TrunkConfig(WIDTH, LAYERS, HEADS), SIDE).double()
    if awake:
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))
    return made


def inputs() -> tuple[Tensor, Tensor]:
    return torch.randn(BATCH, SIDE**2, WIDTH).double(), torch.randn(BATCH, WIDTH).double()


def test_a_new_trunk_is_the_identity_whatever_the_condition() -> None:
    (tokens, condition), new = inputs(), trunk(awake=False)
    output, kept = new(tokens, condition, keep=(1, 2, 3))
    placed = tokens + new.positions()
    for states in kept.values():
        assert torch.equal(states, placed)
    torch.testing.assert_close(output, torch.nn.functional.layer_norm(placed, (WIDTH,), eps=1e-6))


def test_a_layer_computes_its_formula() -> None:
    (tokens, condition), made = inputs(), trunk()
    block, parts = made.blocks[0], made.modulations(condition)[0].unsqueeze(2).unbind(1)
    x = tokens + made.positions()
    q, k, v = split_heads(block.qkv(modulated(x, parts[0], parts[1])), HEADS)
    seen = ((q @ k.mT * (WIDTH / HEADS) ** -0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)
    x = x + parts[2] * block.proj(seen)
    x = x + parts[5] * block.fc2(torch.nn.functional.gelu(block.fc1(modulated(x, parts[3], parts[4]))))
    torch.testing.assert_close(made(tokens, condition, keep=(1,)).kept[1], x)


def test_q_k_and_v_are_thirds_of_the_packed_projection() -> None:
    qkv = torch.randn(BATCH, 5, 3 * WIDTH)
    for part, packed in zip(split_heads(qkv, HEADS), qkv.chunk(3, -1), strict=True):
        assert torch.equal(part.transpose(1, 2).flatten(2), packed)


def test_kept_states_are_those_of_a_shallower_run() -> None:
    (tokens, condition), made = inputs(), trunk()
    kept = made(tokens, condition, keep=(2, 3)).kept
    assert kept.keys() == {2, 3}
    assert torch.equal(made.hidden(tokens, condition, (2,))[2], kept[2])


def test_a_causal_trunk_does_not_look_ahead() -> None:
    (tokens, condition), made = inputs(), trunk()
    later = tokens.clone()
    later[:, 5:] = torch.randn_like(later[:, 5:])
    before, after = (made(x, condition, causal=True).tokens for x in (tokens, later))
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])
    assert not torch.allclose(*(made(x, condition).tokens[:, :5] for x in (tokens, later)))


def test_reading_token_by_token_is_the_causal_trunk() -> None:
    (tokens, condition), made = inputs(), trunk()
    read = made.reader(condition)
    one_by_one = torch.stack([read(token) for token in tokens.unbind(1)], 1)
    torch.testing.assert_close(one_by_one, made(tokens, condition, causal=True).tokens)


def test_a_place_is_its_row_and_its_column() -> None:
    made = trunk()
    places = made.positions().view(SIDE, SIDE, WIDTH)
    torch.testing.assert_close(places[0, 1] + places[2, 0], places[2, 1] + places[0, 0])
    assert len(places.flatten(0, 1).unique(dim=0)) == SIDE**2


def test_wrong_shapes_layers_and_heads_are_refused() -> None:
    (tokens, condition), made = inputs(), trunk()
    with pytest.raises(ValueError, match=r"tokens are \[2, 8, 12\].*expected \[B, 9, 12\]"):
        made(tokens[:, 1:], condition)
    with pytest.raises(ValueError, match="there is no layer 4; layers are counted from 1 to 3"):
        made(tokens, condition, keep=(4,))
    with pytest.raises(ValueError, match="cannot be split into 5 heads"):
        Trunk(TrunkConfig(12, 1, 5), 2)
