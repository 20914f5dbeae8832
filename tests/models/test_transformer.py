"""Transformer blocks against their formulas, written out."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from compgen_fast.models.transformer import Activation, CrossBlock, TransformerBlock, activate

ACTIVATIONS: tuple[Activation, ...] = ("gelu", "gelu_tanh", "quick_gelu")


def attention(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
    """Head by head, on [B, N, dim]."""
    out = []
    for a, b, c in zip(q.chunk(heads, -1), k.chunk(heads, -1), v.chunk(heads, -1), strict=True):
        out.append((a @ b.transpose(1, 2) / math.sqrt(a.shape[-1])).softmax(-1) @ c)
    return torch.cat(out, -1)


def test_a_block_is_pre_norm_attention_and_mlp_with_residuals() -> None:
    block, x = TransformerBlock(12, 3, ratio=2.5, layer_scale=0.5).double(), torch.randn(2, 9, 12, dtype=torch.float64)
    with torch.no_grad():
        for p in block.parameters():
            p.normal_()
    p = dict(block.named_parameters())
    assert p["mlp.fc1.weight"].shape == (30, 12)
    normed = layer_norm(x, (12,), p["norm1.weight"], p["norm1.bias"], 1e-6)
    q, k, v = (normed @ p["attn.qkv.weight"].T + p["attn.qkv.bias"]).chunk(3, -1)
    y = x + p["ls1.gamma"] * (attention(q, k, v, 3) @ p["attn.proj.weight"].T + p["attn.proj.bias"])
    normed = layer_norm(y, (12,), p["norm2.weight"], p["norm2.bias"], 1e-6)
    hidden = torch.nn.functional.gelu(normed @ p["mlp.fc1.weight"].T + p["mlp.fc1.bias"])
    y = y + p["ls2.gamma"] * (hidden @ p["mlp.fc2.weight"].T + p["mlp.fc2.bias"])
    torch.testing.assert_close(block(x), y)


def test_a_cross_block_attends_to_slots_then_to_tokens() -> None:
    block = CrossBlock(8, 5, 2).double()
    slots, tokens = torch.randn(2, 3, 8, dtype=torch.float64), torch.randn(2, 20, 5, dtype=torch.float64)
    y = slots + block.attn(block.norm_self(slots))
    k, v = block.cross.to_kv(tokens).chunk(2, -1)
    y = y + block.cross.proj(attention(block.cross.to_q(block.norm_cross(y)), k, v, 2))
    torch.testing.assert_close(block(slots, tokens), y + block.mlp(block.norm_mlp(y)))


def test_the_order_of_tokens_passes_through_a_block() -> None:
    block, x, order = TransformerBlock(8, 2).double(), torch.randn(2, 6, 8, dtype=torch.float64), torch.randperm(6)
    torch.testing.assert_close(block(x[:, order]), block(x)[:, order])


def test_activations_are_their_formulas() -> None:
    x = torch.linspace(-6, 6, 101, dtype=torch.float64)
    by_tanh = 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    torch.testing.assert_close(activate(x, "gelu"), 0.5 * x * (1 + torch.erf(x / math.sqrt(2))))
    torch.testing.assert_close(activate(x, "gelu_tanh"), by_tanh)
    torch.testing.assert_close(activate(x, "quick_gelu"), x / (1 + torch.exp(-1.702 * x)))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_parameter_is_trained(activation: Activation) -> None:
    block = TransformerBlock(12, 3, activation=activation, layer_scale=1e-5)
    block(torch.randn(2, 5, 12)).square().sum().backward()
    assert all(p.grad is not None and (p.grad != 0).any() for p in block.parameters())


def test_a_width_that_the_heads_do_not_divide_is_refused() -> None:
    for heads in (5, 0):
        with pytest.raises(ValueError, match=f"width 12 cannot be split into {heads} heads"):
            TransformerBlock(12, heads)
