"""Every rule against reverse over reverse in fp64, on every kind of jet, and gradcheck through it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compgen_fast.jets import Jet
from compgen_fast.ops import projected_slot_attention, slot_competition, slot_cross_attention
from tests.jets.oracles import KINDS, attention, channels_of, expanded, layer_norm, random_jet

torch.manual_seed(0)
W, BIAS, VECTOR = torch.randn(5, 4).double(), torch.randn(5).double(), torch.randn(4).double()
MASK, INDEX = torch.rand(2, 3, 4) < 0.5, torch.tensor([2, 0, 1, 1])
MATRIX, SCALE = torch.randn(3, 3).double(), torch.rand(6).double() + 0.5
PADDING = torch.tensor([[True, True, False], [False, True, True]])
MULTI_HEAD = nn.MultiheadAttention(4, 2, batch_first=True).double()
WIDE = torch.randn(12, 4).double(), torch.randn(12).double(), torch.randn(5, 12).double(), BIAS
NARROW = torch.randn(12, 3).double(), None, torch.randn(2, 12).double(), None
SHAPE = (2, 3, 4)


@dataclass(frozen=True)
class Case:
    f: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...] = (SHAPE,)
    oracle: Callable[..., Any] | None = None  # where torch's own second derivative is wrong or missing
    positive: bool = False


def conv(dims: int, transposed: bool = False, **options: Any) -> Case:
    name = f"conv_transpose{dims}d" if transposed else f"conv{dims}d"
    weight, bias = torch.randn(4, 3, *(2,) * dims).double(), torch.randn(3 if transposed else 4).double()
    op = getattr(F, name)
    return Case(lambda x: op(x, weight, bias, **options), ((2, 4 if transposed else 3, *(3,) * dims),))


def projected_slots(weights: tuple[Any, ...], mask: Tensor | None, which: int) -> dict[str, Any]:
    """The op on pixels and slots [B, S, H, 2·D], and its oracle in three parts: output (0) or weights (1).

    Keys and values lie side by side, so that they are sided alike.
    """

    def call(x: Any, s: Any) -> Any:
        return projected_slot_attention(x, *s.chunk(2, -1), *weights, mask)[which]

    def parts(x: Tensor, s: Tensor) -> Tensor:
        w_q, b_q, w_out, b_out = weights
        (k, v), heads = s.chunk(2, -1), s.shape[2]
        q = F.linear(x, w_q, b_q).unflatten(-1, (heads, -1)).expand(len(k), -1, -1, -1)
        logits = torch.einsum("bnhd,bshd->bhns", q, k) * k.shape[-1] ** -0.5
        if mask is not None:
            logits = logits.masked_fill(~mask[:, None, None], float("-inf"))
        p = logits.softmax(-1)
        seen = torch.einsum("bhns,bshd->bnhd", p, v).flatten(-2)
        return F.linear(seen, w_out, b_out) if which == 0 else p.mean(1)

    return {"f": call, "oracle": parts}


def images(f: Callable[[Any], Any]) -> Case:
    return Case(f, ((2, 4, 3, 5),))


POINTWISE = {
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu": torch.relu,
    "relu functional": F.relu,
    "relu6": F.relu6,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "hardtanh": F.hardtanh,
    "elu": lambda x: F.elu(x, 0.7),
    "softplus": lambda x: F.softplus(x, beta=2.0),
    "mish": F.mish,
    "logsigmoid": F.logsigmoid,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "softsign": F.softsign,
    "celu": lambda x: F.celu(x, 2.0),
    "selu": F.selu,
    "hardswish": lambda x: F.hardswish(3 * x),
    "glu": lambda x: F.glu(x, -1),
    "exp": torch.exp,
    "exp2": torch.exp2,
    "sinh": torch.sinh,
    "cosh": torch.cosh,
    "expm1": torch.expm1,
    "sin": torch.sin,
    "cos": torch.cos,
    "erf": torch.erf,
    "atan": torch.atan,
    "abs": torch.abs,
    "square": torch.square,
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "clamp_min": lambda x: x.clamp_min(0.1),
    "clamp_max": lambda x: x.clamp_max(0.1),
    "neg": lambda x: -x,
    "pow": lambda x: x**3,
    "pow 1": lambda x: x**1,
    "pow 0": lambda x: x**0,
    "pow of each": lambda x: x ** torch.tensor([0.0, 1.0, 2.0, 3.0]),
    "add number": lambda x: 2.1 + x - 3.3,
    "rsub": lambda x: 1 - x,
    "multiply number": lambda x: 3 * x / 2,
}  # fmt: skip
POSITIVE = {
    "log": torch.log,
    "log2": torch.log2,
    "log10": torch.log10,
    "log1p": torch.log1p,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal,
    "rdiv": lambda x: 2 / x,
    "pow fraction": lambda x: x**1.5,
    "rpow": lambda x: 2**x,
    "pow of jets": lambda x: x**x,
    "pow tensor": lambda x: x**VECTOR,
}
ARITHMETIC = {
    "add": lambda x, y: x + y,
    "add alpha": lambda x, y: torch.add(x, y, alpha=2),
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / (y * y + 1),
    "addcmul": lambda x, y: torch.addcmul(x, x, y, value=0.5),
    "lerp": lambda x, y: torch.lerp(x, y, 0.3),
    "where": lambda x, y: torch.where(MASK, x, y),
    "cat": lambda x, y: torch.cat([x, y], 1),
    "cat rows": lambda x, y: torch.cat([x, y], 0),
    "stack": lambda x, y: torch.stack([x, y], -1),
    "maximum": torch.maximum,
    "mse": F.mse_loss,
}
SHAPES = {
    "reshape": lambda x: x.reshape(3, -1),
    "view": lambda x: x.view(2, 12),
    "flatten": lambda x: x.flatten(1),
    "unflatten": lambda x: x.unflatten(2, (2, 2)),
    "permute": lambda x: x.permute(2, 0, 1),
    "transpose": lambda x: x.transpose(0, 2),
    "mT": lambda x: x.mT,
    "movedim": lambda x: x.movedim(0, 2),
    "unsqueeze": lambda x: x.unsqueeze(1).unsqueeze(-1),
    "squeeze": lambda x: x[:1].squeeze(0),
    "expand": lambda x: x[:, :, None].expand(2, 3, 5, 4),
    "expand more": lambda x: x.expand(6, -1, -1, -1),
    "repeat": lambda x: x.repeat(2, 1, 2),
    "repeat more": lambda x: x.repeat(2, 1, 1, 3),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 1),
    "index": lambda x: x[:, 1:, ::2],
    "index ellipsis": lambda x: x[..., 0, None],
    "index tensor": lambda x: x[:, :, INDEX],
    "index rows": lambda x: x[torch.tensor([1, 0, 1])],
    "index apart": lambda x: x[torch.tensor([1, 0]), :, torch.tensor([0, 3])],
    "index mask": lambda x: x[MASK],
    "index_select": lambda x: x.index_select(1, torch.tensor([2, 2, 0])),
    "gather": lambda x: x.gather(1, torch.zeros(2, 1, 4, dtype=torch.long)),
    "flip": lambda x: x.flip(1, 2),
    "roll": lambda x: x.roll(1, 1),
    "select": lambda x: x.select(1, 2),
    "narrow": lambda x: x.narrow(2, 1, 2),
    "chunk": lambda x: x.chunk(2, 2)[1],
    "split": lambda x: x.split([1, 2], 1)[1],
    "unbind": lambda x: x.unbind(1)[2],
    "iterate": lambda x: list(x)[1],
    "clone": lambda x: x.clone().contiguous(),
    "to": lambda x: x.to(torch.float64).double(),
    "tril": lambda x: x.tril(),
    "cat constant": lambda x: torch.cat([x, MASK.double()], 2),
    "cat constant rows": lambda x: torch.cat([MASK.double(), x], 0),
    "broadcast": lambda x: x + torch.ones(5, 1, 1, 4).double(),
    "broadcast mul": lambda x: x * torch.ones(5, 1, 1, 4).double(),
}
REDUCTIONS = {
    "sum": lambda x: x.sum(),
    "sum dim": lambda x: x.sum((0, 2)),
    "sum keepdim": lambda x: x.sum(1, keepdim=True),
    "mean": lambda x: x.mean(1),
    "var": lambda x: x.var(1, unbiased=False),
    "std": lambda x: x.std(-1),
    "norm": lambda x: x.norm(dim=-1),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "cumsum": lambda x: x.cumsum(1),
    "amax": lambda x: x.amax(1, keepdim=True),
    "amax of all": lambda x: x.amax(),
    "amin of two": lambda x: x.amin((0, 2)),
    "linalg norm": lambda x: torch.linalg.norm(x, dim=(0, 1)),
    "linalg vector norm": lambda x: torch.linalg.norm(x, 2, dim=-1),
    "max": lambda x: x.max(1).values,
    "min": lambda x: x.min(),
    "softmax": lambda x: x.softmax(1),
    "softmax functional": lambda x: F.softmax(x, dim=-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "logsumexp": lambda x: x.logsumexp(1),
    "masked_fill": lambda x: x.masked_fill(MASK, 7.0),
    "masked softmax": lambda x: x.masked_fill(~PADDING[:, :, None], float("-inf")).softmax(1),
    "where constant": lambda x: torch.where(MASK, x, 0.5),
    "dropout in eval": lambda x: F.dropout(x, 0.5, training=False),
    "detach": lambda x: x * x.detach(),
}
CASES = {name: Case(f) for table in (POINTWISE, SHAPES, REDUCTIONS) for name, f in table.items()}
CASES |= {name: Case(f, positive=True) for name, f in POSITIVE.items()}
CASES |= {name: Case(f, (SHAPE, SHAPE)) for name, f in ARITHMETIC.items()}
CASES |= {f"{name} broadcast": Case(ARITHMETIC[name], (SHAPE, (3, 1))) for name in ("add", "sub", "mul", "div")}
CASES |= {
    "linear": Case(lambda x: F.linear(x, W, BIAS)),
    "linear without bias": Case(lambda x: F.linear(x, W)),
    "linear of vectors": Case(lambda x: F.linear(x, W, BIAS), ((4,),)),
    "matmul constant": Case(lambda x: x @ W.T),
    "constant matmul": Case(lambda x: MATRIX @ x),
    "constant matmul batched": Case(lambda x: torch.ones(5, 1, 2, 3).double() @ x),
    "matmul vector": Case(lambda x: x @ VECTOR),
    "vector matmul": Case(lambda x: VECTOR[:3] @ x),
    "matmul": Case(lambda x, y: x @ y.mT, (SHAPE, SHAPE)),
    "matmul broadcast": Case(lambda x, y: x @ y, (SHAPE, (4, 2))),
    "bmm": Case(lambda x, y: torch.bmm(x, y), (SHAPE, (2, 4, 2))),
    "baddbmm": Case(lambda x, y: torch.baddbmm(y, x, y, alpha=0.5), ((2, 4, 4), (2, 4, 4))),
    "einsum": Case(lambda x, y: torch.einsum("bsd,btd->bst", x, y), (SHAPE, SHAPE)),
    "einsum constant": Case(lambda x: torch.einsum("ed,bsd->sbe", W, x)),
    "einsum alone": Case(lambda x: torch.einsum("bsd->ds", x)),
    "einsum implicit": Case(lambda x, y: torch.einsum("bsd,bsd", x, y), (SHAPE, SHAPE)),
    "conv1d": conv(1, padding=1),
    "conv2d": conv(2, stride=2, padding=1),
    "conv3d": conv(3),
    "conv_transpose1d": conv(1, transposed=True),
    "conv_transpose2d": conv(2, transposed=True, stride=2, padding=1),
    "conv_transpose3d": conv(3, transposed=True),
    "pad": images(lambda x: F.pad(x, (1, 2, 0, 1), value=3.0)),
    "pad reflect": images(lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect")),
    "upsample nearest": images(lambda x: F.interpolate(x, scale_factor=2)),
    "upsample bilinear": images(lambda x: F.interpolate(x, size=(5, 7), mode="bilinear", align_corners=False)),
    "avg_pool2d": images(lambda x: F.avg_pool2d(x, 2)),
    "pixel_shuffle": images(lambda x: F.pixel_shuffle(x, 2)),
    "layer_norm": Case(lambda x: F.layer_norm(x, (4,), W[0], W[1]), oracle=lambda x: layer_norm(x, (4,), W[0], W[1])),
    "layer_norm of two dims": Case(
        lambda x: F.layer_norm(x, (3, 4), MASK[0] + 1.0), oracle=lambda x: layer_norm(x, (3, 4), MASK[0] + 1.0)
    ),
    "rms_norm": Case(lambda x: F.rms_norm(x, (4,), W[0], 1e-3)),
    "group_norm": images(lambda x: F.group_norm(x, 2, W[0], W[1])),
    "instance_norm": Case(
        lambda x: F.instance_norm(x, weight=W[0], bias=W[1]),
        ((2, 4, 3, 5),),
        oracle=lambda x: layer_norm(x, (3, 5), W[0].view(4, 1, 1), W[1].view(4, 1, 1)),
    ),
    "batch_norm": Case(
        lambda x: F.batch_norm(x, W[0], SCALE[:4], W[1], W[2]),
        ((2, 4, 3, 5),),
        oracle=lambda x: (
            (x - W[0].view(4, 1, 1)) / (SCALE[:4].view(4, 1, 1) + 1e-5).sqrt() * W[1].view(4, 1, 1)
            + W[2].view(4, 1, 1)
        ),
    ),
    "attention": Case(F.scaled_dot_product_attention, ((2, 2, 3, 4),) * 3, oracle=attention),
    "attention masked": Case(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, PADDING[:, None, None]),
        ((2, 2, 3, 4),) * 3,
        oracle=lambda q, k, v: attention(q, k, v, PADDING[:, None, None]),
    ),
    "attention causal": Case(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        ((2, 2, 3, 4),) * 3,
        oracle=lambda q, k, v: attention(q, k, v, torch.ones(3, 3).tril().bool()),
    ),
    "multi-head attention": Case(
        lambda q, k: MULTI_HEAD(q, k, k, key_padding_mask=~PADDING)[0], ((2, 5, 4), (2, 3, 4))
    ),
    "multi-head attention weights": Case(
        lambda q, k: MULTI_HEAD(q, k, k, attn_mask=torch.ones(5, 3).triu(1).bool())[1], ((2, 5, 4), (2, 3, 4))
    ),
    "slot_cross_attention": Case(
        lambda q, k, v: slot_cross_attention(q, k, v, PADDING, return_weights=False),
        ((2, 5, 2, 4),) + ((2, 3, 2, 4),) * 2,
    ),
    "slot_cross_attention weights": Case(
        lambda q, k, v: slot_cross_attention(q, k, v)[1], ((2, 5, 2, 4),) + ((2, 3, 2, 4),) * 2
    ),
    "projected_slot_attention": Case(
        lambda x, k, v: projected_slot_attention(x, k, v, *WIDE, PADDING, return_weights=False),
        ((2, 9, 4),) + ((2, 3, 2, 6),) * 2,
    ),
    "projected_slot_attention, slots alike": Case(**projected_slots(WIDE, None, 0), shapes=((2, 9, 4), (2, 3, 2, 12))),
    "projected_slot_attention, slots alike and masked": Case(
        **projected_slots(WIDE, PADDING, 0), shapes=((2, 9, 4), (2, 3, 2, 12))
    ),
    "projected_slot_attention weights": Case(
        **projected_slots(WIDE, PADDING, 1), shapes=((2, 9, 4), (2, 3, 2, 12))
    ),
    "projected_slot_attention, one set of pixels": Case(
        lambda s: projected_slots(NARROW, None, 0)["f"](MATRIX[None], s),
        ((2, 2, 1, 24),),
        oracle=lambda s: projected_slots(NARROW, None, 0)["oracle"](MATRIX[None], s),
    ),
    "slot_competition": Case(
        lambda q, k, v: slot_competition(q, k, v, PADDING)[0], ((2, 3, 2, 4),) + ((2, 5, 2, 4),) * 2
    ),
}  # fmt: skip


def inputs_of(case: Case, kind: str) -> list[Jet]:
    return [random_jet(kind, shape, case.positive) for shape in case.shapes]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_a_rule_gives_the_exact_derivatives(name: str, kind: str) -> None:
    case = CASES[name]
    inputs = inputs_of(case, kind)
    found, expected = channels_of(case.f(*inputs)), expanded(case.oracle or case.f, inputs)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["full", "sided by row"])  # what every term of a rule, and every sided rule, is in
@pytest.mark.parametrize("name", [name for name in CASES if name != "detach"])  # gradcheck would see what detach hides
def test_gradients_pass_through_a_rule(name: str, kind: str) -> None:
    case = CASES[name]
    inputs = inputs_of(case, kind)
    sides = [x.side for x in inputs]

    def run(*channels: Tensor) -> Tensor:
        return channels_of(case.f(*(Jet(c, side) for c, side in zip(channels, sides, strict=True))))

    channels = [x.channels.requires_grad_() for x in inputs]
    assert torch.autograd.gradcheck(run, channels, fast_mode=True, atol=1e-5)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if len(case.shapes) == 2])
@pytest.mark.parametrize("kinds", [("full", "uv"), ("uv", "sided by row"), ("sided by row", "full")])
def test_kinds_mix(name: str, kinds: tuple[str, str]) -> None:
    case = CASES[name]
    inputs = [random_jet(kind, shape) for kind, shape in zip(kinds, case.shapes, strict=True)]
    torch.testing.assert_close(
        channels_of(case.f(*inputs)), expanded(case.oracle or case.f, inputs), rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if len(case.shapes) == 2])
@pytest.mark.parametrize("position", [0, 1])
def test_a_plain_tensor_beside_a_jet_is_a_constant(name: str, position: int) -> None:
    case = CASES[name]
    inputs: list[Any] = inputs_of(case, "full")
    inputs[position] = inputs[position].primal
    torch.testing.assert_close(
        channels_of(case.f(*inputs)), expanded(case.oracle or case.f, inputs), rtol=1e-9, atol=1e-9
    )
