"""What is particular to slot_cross_attention; what it shares with the other ops is in test_contract.py."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from compgen_fast.ops import slot_cross_attention
from tests.ops.contract import OPS, Shape, assert_as_exact_as_eager

OP = OPS[0]


def test_output_is_that_of_scaled_dot_product_attention() -> None:
    q, k, v = OP.inputs(Shape())
    expected = scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
    torch.testing.assert_close(slot_cross_attention(q, k, v)[0], expected)


def test_without_weights_the_output_stands_alone() -> None:
    inputs = OP.inputs(Shape())
    out = slot_cross_attention(*inputs, return_weights=False)
    assert torch.equal(out, slot_cross_attention(*inputs)[0])


def test_autocast_computes_in_its_dtype() -> None:
    inputs = OP.inputs(Shape())
    with torch.autocast("cpu", torch.bfloat16):
        out, weights = slot_cross_attention(*inputs)
    assert out.dtype == weights.dtype == torch.bfloat16


def test_only_the_inputs_are_saved_for_backward() -> None:
    inputs, saved = [x.requires_grad_() for x in OP.inputs(Shape())], []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.data_ptr()) or x, lambda x: x):
        slot_cross_attention(*inputs)
    assert set(saved) == {x.data_ptr() for x in inputs}


def test_the_reference_shape_of_the_paper_is_as_exact_as_eager() -> None:
    """12 heads of 43, 7 slots; pixels cut to what the interpreter can do in seconds."""
    assert_as_exact_as_eager(OP, OP.inputs(Shape(B=1, N=256, H=12)))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda q, k, v: (q[0], k, v), r"q has shape \[37, 2, 43\]; expected \[B, N, H, D\]"),
        (lambda q, k, v: (q, k, v[:, :3]), r"v \[2, 3, 2, 43\] and k \[2, 7, 2, 43\] must have one shape"),
        (lambda q, k, v: (q[:1], k, v), "must agree in batch, heads and head width"),
        (lambda q, k, v: (q, k.repeat(1, 10, 1, 1), v.repeat(1, 10, 1, 1)), "k has 70 slots; expected 1 to 64"),
        (lambda q, k, v: (q, k[:, :0], v[:, :0]), "k has 0 slots"),
        (lambda q, k, v: (q, k.half(), v), "k is torch.float16 but q is torch.float32"),
        (lambda q, k, v: (q.long(), k.long(), v.long()), "q is torch.int64; expected one of"),
        (lambda q, k, v: (q, k, v, torch.ones(2, 6).bool()), r"slot_mask has shape \[2, 6\]; expected \[B, S\]"),
        (lambda q, k, v: (q, k, v, torch.ones(2, 7)), "slot_mask is torch.float32; expected torch.bool"),
        (lambda q, k, v: (q, k.to("meta"), v), "k is on meta but q is on cpu"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_with_a_sentence(change, sentence: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises((ValueError, TypeError), match=f"slot_cross_attention: .*{sentence}"):
        slot_cross_attention(*change(*OP.inputs(Shape())))
