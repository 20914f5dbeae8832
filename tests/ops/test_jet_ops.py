"""The jet ops on whichever backend serves the CPU: values, gradients, invariants, odd shapes, dtypes, compile, opcheck.

The oracle knows nothing of jet arithmetic. It runs the ordinary function at x + a x_u + b x_v + ab x_uv and
differentiates by a and b with reverse mode over reverse mode, norms decomposed into means and roots (torch's own are
wrong there).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from compgen_fast.ops import jet_cross_attention, jet_gelu, jet_layer_norm, jet_rms_norm, jet_silu
from compgen_fast.ops.backends import interpreting, serving
from compgen_fast.ops.jet_cross_attention import reference as attention_reference
from compgen_fast.ops.jet_linear import jet_linear
from compgen_fast.ops.jet_linear import reference as linear_reference
from compgen_fast.ops.jet_norm import layer_norm_reference, rms_norm_reference
from compgen_fast.ops.jet_pointwise import gelu_reference, silu_reference
from tests.ops.contract import error

DTYPES = [torch.float32, torch.float16, torch.bfloat16] + ([] if serving("cpu") == "triton" else [torch.float64])
EPS = 1e-5
needs_fp64 = pytest.mark.skipif(serving("cpu") == "triton", reason="Triton kernels take no fp64; the oracle needs it")


@dataclass(frozen=True)
class Case:
    """An op with everything fixed but its floating inputs; the first of them is a jet."""

    name: str
    call: Callable[..., Tensor]
    reference: Callable[..., Tensor]  # in plain torch; differentiable
    ordinary: Callable[..., Tensor]  # what the op is the jet of
    shapes: tuple[tuple[int, ...], ...]
    raw: Any  # the dispatcher's op and its arguments after the tensors
    arguments: tuple[Any, ...]
    side: Tensor | None = None  # attention: k and v are (value, tangent), along u where side
    summed: int = 0  # slots that a sum runs over, in an order that depends on the width of vectors

    def inputs(self, dtype: torch.dtype) -> list[Tensor]:
        return [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in self.shapes]

    def at(self, inputs: Sequence[Tensor], a: Tensor, b: Tensor) -> Tensor:
        """The ordinary function where the jets' arguments say it is at (a, b)."""
        jet, *others = inputs
        factors = (torch.ones_like(a), a, b, a * b)
        point = sum(factor * channel for factor, channel in zip(factors, jet, strict=False))
        if self.side is not None:
            along = torch.where(self.side, a, b)[:, :, None, None]
            others = [value + along * tangent for value, tangent in others]
        return self.ordinary(point, *others)


def layer_norm(x: Tensor, weight: Tensor | float = 1.0, bias: Tensor | float = 0.0) -> Tensor:
    c = x - x.mean(-1, keepdim=True)
    return c / (c.square().mean(-1, keepdim=True) + EPS).sqrt() * weight + bias


def rms_norm(x: Tensor, weight: Tensor | float = 1.0) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def attention(slot_mask: Tensor | None, scale: float) -> Callable[..., Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        logits = torch.einsum("bnhd,bshd->bhns", q, k) * scale
        if slot_mask is not None:
            logits = logits.masked_fill(~slot_mask[:, None, None], float("-inf"))
        return torch.einsum("bhns,bshd->bnhd", logits.softmax(-1), v)

    return attend


def pointwise_cases(*shape: int) -> list[Case]:
    ops, gelu, cases = torch.ops.compgen, torch.nn.functional.gelu, []
    for channels in (3, 4):
        shapes = ((channels, *shape),)
        name = f"of {channels} channels {list(shape)}"
        cases += [
            Case(f"gelu {name}", jet_gelu, lambda x: gelu_reference(x, False), gelu, shapes, ops.jet_gelu, (False,)),
            Case(
                f"gelu-tanh {name}",
                lambda x: jet_gelu(x, "tanh"),
                lambda x: gelu_reference(x, True),
                lambda x: gelu(x, approximate="tanh"),
                shapes,
                ops.jet_gelu,
                (True,),
            ),
            Case(f"silu {name}", jet_silu, silu_reference, torch.nn.functional.silu, shapes, ops.jet_silu, ()),
        ]
    return cases


def linear_cases(*shape: int, out: int) -> list[Case]:
    linear, op = torch.nn.functional.linear, torch.ops.compgen.jet_linear
    x, weight, name = (4, *shape), (out, shape[-1]), f"of {list(shape)} to {out}"
    return [
        Case(f"linear {name}", jet_linear, linear_reference, linear, (x, weight, (out,)), op, ()),
        Case(f"bare linear {name}", jet_linear, linear_reference, linear, (x, weight), op, (None,)),
    ]


def norm_cases(*shape: int) -> list[Case]:
    ops, D, cases = torch.ops.compgen, shape[-1], []
    for channels in (3, 4):
        x = (channels, *shape)
        name = f"of {channels} channels {list(shape)}"
        cases += [
            Case(
                f"layer_norm {name}",
                lambda x, w, b: jet_layer_norm(x, w, b, EPS),
                lambda x, w, b: layer_norm_reference(x, w, b, EPS),
                layer_norm,
                (x, (D,), (D,)),
                ops.jet_layer_norm,
                (EPS,),
            ),
            Case(
                f"bare layer_norm {name}",
                lambda x: jet_layer_norm(x, eps=EPS),
                lambda x: layer_norm_reference(x, None, None, EPS),
                layer_norm,
                (x,),
                ops.jet_layer_norm,
                (None, None, EPS),
            ),
            Case(
                f"rms_norm {name}",
                lambda x, w: jet_rms_norm(x, w, EPS),
                lambda x, w: rms_norm_reference(x, w, EPS),
                rms_norm,
                (x, (D,)),
                ops.jet_rms_norm,
                (EPS,),
            ),
        ]
    return cases


def attention_case(
    channels: int,
    N: int = 37,
    S: int = 7,
    D: int = 43,
    *,
    B: int = 2,
    H: int = 2,
    sides: str = "both",
    masked: bool = False,
) -> Case:
    generator = torch.Generator().manual_seed(S)
    side = torch.rand(B, S, generator=generator) > 0.5 if sides == "both" else torch.full((B, S), sides == "u")
    mask = torch.rand(B, S, generator=generator) > 0.4 if masked else None
    if mask is not None:
        mask[:, S // 2] = True
    scale = D**-0.5
    return Case(
        f"attention of {channels} channels, {N=} {S=} {D=}, sides {sides}{', masked' * masked}",
        lambda q, k, v: jet_cross_attention(q, k, v, side, mask),
        lambda q, k, v: attention_reference(q, k, v, side, mask, scale),
        attention(mask, scale),
        ((channels, B, N, H, D), (2, B, S, H, D), (2, B, S, H, D)),
        torch.ops.compgen.jet_cross_attention,
        (side, mask, scale),
        side,
        summed=S,
    )


# Slots and head widths; the interpreter takes seconds for each.
SIZES = [(5, 7), (64, 64)] if interpreting() else [(S, D) for S in (1, 5, 11, 64) for D in (1, 7, 64)]
NORMAL = [
    *pointwise_cases(3, 43),
    *linear_cases(3, 43, out=20),
    *norm_cases(2, 5, 43),
    *(attention_case(channels, masked=masked) for channels in (1, 4) for masked in (False, True)),
]
ODD = [
    *pointwise_cases(1),
    *pointwise_cases(261),
    *linear_cases(1, out=1),
    *linear_cases(1, 100, 43, out=17),
    *linear_cases(100, 650, out=16),
    *linear_cases(2, 50, 1, out=180),
    *norm_cases(3, 7),
    *norm_cases(64),
    *norm_cases(1, 2),
    *(attention_case(channels, N=3, S=S, D=D, H=1) for channels in (1, 4) for S, D in SIZES),
    *(attention_case(channels, N=50, S=S, D=7, sides=sides) for channels in (1, 4) for S in (1, 5) for sides in "uv"),
]
SMALL = [
    *pointwise_cases(3),
    *linear_cases(2, 3, out=2),
    *norm_cases(2, 3),
    *(attention_case(c, 3, 3, 2, H=1, masked=True) for c in (1, 4)),
]
named = {"ids": lambda case: case.name}


def along(y: Tensor, t: Tensor) -> Tensor:
    """dy/dt for a number t, by reverse mode twice: the gradient of w·y by t is linear in w, and its slope is dy/dt."""
    w = torch.zeros_like(y, requires_grad=True)
    (by_t,) = torch.autograd.grad(y, t, w, create_graph=True, allow_unused=True, materialize_grads=True)
    if not by_t.requires_grad:
        return torch.zeros_like(y)
    slope = torch.autograd.grad(by_t, w, create_graph=True, allow_unused=True, materialize_grads=True)
    return slope[0]


def oracle(case: Case, inputs: Sequence[Tensor]) -> Tensor:
    a, b = (torch.zeros((), dtype=torch.float64, requires_grad=True) for _ in range(2))
    y = case.at(inputs, a, b)
    y_u = along(y, a)
    return torch.stack([y, y_u, along(y, b), along(y_u, b)])


def run(function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """The output and the gradients of all inputs."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = function(*leaves)
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype)
    return [out, *torch.autograd.grad(out, leaves, grad)]


def assert_as_exact_as_the_reference(case: Case, inputs: Sequence[Tensor]) -> None:
    """At most twice the error that plain torch makes in this dtype, by jets and autograd, with fp32 sums where the
    dtype is half; plus 16 roundings, and one for every fourth slot, for where plain torch happens to be exact.
    """
    dtype = inputs[0].dtype
    exact = run(case.reference, [x.double() for x in inputs])
    for index, (found, peer, true) in enumerate(
        zip(run(case.call, inputs), run(case.reference, inputs), exact, strict=True)
    ):
        bound = 2 * error(peer, true) + (16 + case.summed / 4) * torch.finfo(dtype).eps
        assert found.dtype == dtype and found.shape == true.shape
        assert error(found, true) <= bound, f"{case.name}, result {index}: {error(found, true):.2e}, bound {bound:.2e}"


@needs_fp64
@pytest.mark.parametrize("case", [*NORMAL, *ODD], **named)
def test_all_channels_are_derivatives_of_the_ordinary_function(case: Case) -> None:
    inputs = case.inputs(torch.float64)
    found, exact = case.call(*inputs), oracle(case, inputs)
    assert found.shape == exact.shape
    for channel, (ours, true) in enumerate(zip(found, exact, strict=True)):
        assert (ours - true).abs().max() <= 1e-9 * true.abs().max() + 1e-12, f"channel {channel}"


@needs_fp64
def test_the_oracle_agrees_with_central_differences() -> None:
    """The mixed channel once more, from exact first derivatives at two points."""
    for case in (pointwise_cases(3, 4)[3], norm_cases(3, 7)[3], attention_case(4, 5, 3, 2)):
        inputs = case.inputs(torch.float64)
        slopes = []
        for b in (-1e-5, 1e-5):
            a = torch.zeros((), dtype=torch.float64, requires_grad=True)
            slopes.append(along(case.at(inputs, a, torch.tensor(b, dtype=torch.float64)), a))
        difference = (slopes[1] - slopes[0]) / 2e-5
        torch.testing.assert_close(case.call(*inputs)[3], difference.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("case", NORMAL, **named)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_outputs_and_gradients_are_as_exact_as_plain_torch(case: Case, dtype: torch.dtype) -> None:
    assert_as_exact_as_the_reference(case, case.inputs(dtype))


@pytest.mark.parametrize("case", ODD, **named)
def test_odd_shapes_are_as_exact_as_plain_torch(case: Case) -> None:
    assert_as_exact_as_the_reference(case, case.inputs(torch.float32))


def test_many_rows_are_summed_exactly() -> None:
    """Several tiles, several tasks, and a ragged end."""
    rows = 300 if interpreting() else 2000
    for case in (
        *linear_cases(rows, 20, out=30),
        *norm_cases(rows, 20),
        attention_case(4, rows, B=1, H=1),
        attention_case(1, rows, B=1, H=1),
    ):
        assert_as_exact_as_the_reference(case, case.inputs(torch.float32))


@pytest.mark.parametrize("case", NORMAL, **named)
def test_strided_and_expanded_inputs_need_no_copy_by_the_caller(case: Case) -> None:
    inputs = case.inputs(torch.float32)
    interleaved = [torch.stack([x, x.flip(-1)], -1)[..., 0] for x in inputs]
    swapped = [x.transpose(0, -1).contiguous().transpose(0, -1) for x in inputs]
    expanded = [inputs[0][:, :1].expand_as(inputs[0]), *inputs[1:]]
    for strided in (interleaved, swapped, expanded):
        assert_as_exact_as_the_reference(case, strided)


@pytest.mark.parametrize("magnitude", [0.0, 1e-3, 8.0, 30.0, 1e4, 1e7])
def test_pointwise_functions_hold_far_out(magnitude: float) -> None:
    for case in pointwise_cases(64):
        inputs = case.inputs(torch.float32)
        inputs[0][0] = torch.linspace(-magnitude, magnitude, 64)
        assert all(x.isfinite().all() for x in run(case.call, inputs))
        assert_as_exact_as_the_reference(case, inputs)


def test_a_zero_mixed_channel_may_be_left_out() -> None:
    for case in (*pointwise_cases(3, 5)[:3], *norm_cases(2, 5)[:3]):
        (x, *others) = case.inputs(torch.float32)
        assert torch.equal(case.call(x, *others), case.call(torch.cat([x, torch.zeros_like(x[:1])]), *others))


def test_queries_without_tangents_are_queries_with_zero_tangents() -> None:
    case = attention_case(1)
    q, k, v = case.inputs(torch.float32)
    full = torch.cat([q, torch.zeros(3, *q.shape[1:])])
    torch.testing.assert_close(case.call(q, k, v), case.call(full, k, v))


def test_slots_all_on_one_side_leave_nothing_mixed() -> None:
    for sides, silent in (("u", 2), ("v", 1)):
        case = attention_case(1, sides=sides)
        out = case.call(*case.inputs(torch.float32))
        assert (out[silent] == 0).all() and (out[3] == 0).all() and (out[3 - silent] != 0).any()


def test_swapping_the_sides_swaps_u_and_v() -> None:
    case = attention_case(4)
    q, k, v = case.inputs(torch.float32)
    assert case.side is not None
    swapped = jet_cross_attention(q[[0, 2, 1, 3]], k, v, ~case.side)
    torch.testing.assert_close(swapped[[0, 2, 1, 3]], case.call(q, k, v), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("channels", [1, 4])
def test_a_masked_slot_does_not_matter_whatever_it_holds(channels: int) -> None:
    case = attention_case(channels, masked=True)
    q, k, v = case.inputs(torch.float32)
    _, mask, _ = case.arguments
    clean = run(case.call, [q, k, v])
    for slots in (k, v):
        slots[:, ~mask] = float("nan")
    for a, b in zip(clean, run(case.call, [q, k, v]), strict=True):
        assert torch.equal(a, b)
    assert all((grad[:, ~mask] == 0).all() for grad in clean[2:])


@pytest.mark.parametrize("channels", [1, 4])
def test_an_image_without_any_live_slot_gets_zeros(channels: int) -> None:
    case = attention_case(channels)
    mask = torch.tensor([[False] * 7, [True] * 7])
    out, *grads = run(lambda q, k, v: jet_cross_attention(q, k, v, case.side, mask), case.inputs(torch.float32))
    assert all((x[:, 0] == 0).all() and x.isfinite().all() for x in (out, *grads))


@pytest.mark.parametrize(
    "case", [*pointwise_cases(0), *linear_cases(0, 5, out=3), *norm_cases(0, 5), attention_case(4, N=0)], **named
)
def test_empty_inputs_give_empty_outputs_and_zero_gradients(case: Case) -> None:
    out, *grads = run(case.call, case.inputs(torch.float32))
    assert out.numel() == 0 and all((grad == 0).all() for grad in grads)


@pytest.mark.parametrize("case", NORMAL, **named)
def test_every_element_of_every_result_is_written(case: Case) -> None:
    """Deterministic mode fills fresh memory with NaN: an element that no kernel wrote would show."""
    inputs = case.inputs(torch.float32)
    plain = run(case.call, inputs)
    torch.use_deterministic_algorithms(True)
    try:
        poisoned = run(case.call, inputs)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(plain, poisoned, strict=True))


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    if serving("cpu") == "torch":
        pytest.skip("plain torch sums in an order of its own")
    rows, threads = 300 if interpreting() else 3000, torch.get_num_threads()
    for case in (*pointwise_cases(rows, 43), *norm_cases(rows, 43), attention_case(4, rows, D=8)):
        inputs, results = case.inputs(torch.float32), []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(run(case.call, inputs))
        torch.set_num_threads(threads)
        assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


@needs_fp64
@pytest.mark.parametrize("case", SMALL, **named)
def test_first_and_second_derivatives_pass_gradcheck(case: Case) -> None:
    inputs = [x.requires_grad_() for x in case.inputs(torch.float64)]
    assert torch.autograd.gradcheck(case.call, inputs)
    assert torch.autograd.gradgradcheck(case.call, inputs, fast_mode=True)


@pytest.mark.parametrize("case", SMALL, **named)
def test_opcheck_finds_nothing(case: Case) -> None:
    inputs = [x.requires_grad_() for x in case.inputs(torch.float32)]
    permuted = [x.detach().transpose(0, -1).contiguous().transpose(0, -1).requires_grad_() for x in inputs]
    for tensors in (inputs, permuted):
        torch.library.opcheck(case.raw.default, (*tensors, *case.arguments))


@pytest.mark.parametrize(
    "case",
    [*pointwise_cases(3, 43)[:1], *linear_cases(3, 43, out=20)[:1], *norm_cases(2, 43)[::2], attention_case(4)],
    **named,
)
def test_compiles_as_one_graph(case: Case) -> None:
    torch.compiler.reset()
    compiled = torch.compile(case.call, fullgraph=True, dynamic=True, backend="aot_eager")
    inputs = case.inputs(torch.float32)
    for a, b in zip(run(compiled, inputs), run(case.call, inputs), strict=True):
        torch.testing.assert_close(a, b)


def test_autocast_computes_norms_in_fp32_and_attention_in_half() -> None:
    x, weight = torch.randn(4, 3, 8, dtype=torch.bfloat16), torch.randn(8)
    case = attention_case(1)
    with torch.autocast("cpu", torch.bfloat16):
        assert jet_layer_norm(x, weight).dtype == jet_rms_norm(x, weight).dtype == torch.float32
        assert jet_gelu(x).dtype == torch.bfloat16
        assert case.call(*case.inputs(torch.float32)).dtype == torch.bfloat16


def test_forward_mode_is_refused_rather_than_silently_dropped() -> None:
    for case in SMALL:
        inputs = tuple(case.inputs(torch.float32))
        with pytest.raises((RuntimeError, NotImplementedError)):
            torch.func.jvp(case.call, inputs, tuple(torch.ones_like(x) for x in inputs))


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: jet_gelu(torch.ones(2, 5)), r"jet_gelu: x has shape \[2, 5\]; expected \[3 or 4, …\]"),
        (
            lambda: jet_gelu(torch.ones(4, 5), "sigmoid"),
            "jet_gelu: approximate is 'sigmoid'; expected 'none' or 'tanh'",
        ),  # type: ignore[arg-type]
        (lambda: jet_silu(torch.ones(4, 5, dtype=torch.int32)), "jet_silu: x is torch.int32; expected one of"),
        (
            lambda: jet_linear(torch.ones(4, 100, 9), torch.ones(20, 8)),
            r"value has shape \[100, 9\], weight \[20, 8\] and no bias; expected",
        ),
        (lambda: jet_linear(torch.ones(4, 9), torch.ones(20, 9), torch.ones(3)), r"bias \[3\]; expected \[…, I\]"),
        (lambda: jet_layer_norm(torch.ones(4)), r"jet_layer_norm: x has shape \[4\]; expected \[3 or 4, …, D\]"),
        (lambda: jet_layer_norm(torch.ones(4, 2), torch.ones(3)), r"weight has shape \[3\]; expected \[D\] = \[2\]"),
        (lambda: jet_layer_norm(torch.ones(4, 2), torch.ones(2).double()), "weight is torch.float64 but x is torch.fl"),
        (lambda: jet_rms_norm(torch.ones(4, 2), eps=-1.0), "jet_rms_norm: eps is -1.0; expected 0 or a small"),
        (
            lambda: attend(q=torch.ones(3, 1, 2, 1, 4)),
            r"q has shape \[3, 1, 2, 1, 4\]; expected \[1 or 4, B, N, H, D\]",
        ),
        (lambda: attend(k=torch.ones(1, 3, 1, 4)), r"k has shape \[1, 3, 1, 4\]; expected \[2, B, S, H, D\]"),
        (lambda: attend(k=torch.ones(2, 3, 1, 4)), r"k\[0\] has shape \[3, 1, 4\]; expected \[B, S, H, D\]"),
        (
            lambda: attend(side=torch.ones(1, 4).bool()),
            r"side is torch.bool \[1, 4\] on cpu; expected torch.bool \[B, S\]",
        ),
        (lambda: attend(side=torch.ones(1, 3)), r"side is torch.float32 \[1, 3\] on cpu; expected torch.bool"),
    ],
)
def test_refusals_say_what_was_given_and_what_was_expected(call: Callable[[], Tensor], sentence: str) -> None:
    with pytest.raises((TypeError, ValueError), match=sentence):
        call()


def attend(**changed: Tensor) -> Tensor:
    slots = torch.ones(2, 1, 3, 1, 4)
    usual = {"q": torch.ones(1, 1, 2, 1, 4), "k": slots, "v": slots, "side": torch.ones(1, 3, dtype=torch.bool)}
    return jet_cross_attention(**(usual | changed))


def test_the_raw_linear_op_reads_nothing_beyond_its_rows() -> None:
    """Enough rows for the path that packs the weight, which trusts the widths."""
    with pytest.raises(RuntimeError):
        torch.ops.compgen.jet_linear(torch.ones(4, 100, 43), torch.ones(17, 42), None)
    with pytest.raises(RuntimeError):
        torch.ops.compgen.jet_linear(torch.ones(4, 100, 43), torch.ones(17, 43), torch.ones(16))
