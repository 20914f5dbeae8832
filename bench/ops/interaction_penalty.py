"""The interaction penalty of the reference decoder, one training step, against every other way to get it.

All contenders are given the same slots, parameters, split and directions and return the penalty and the decoded pixels;
gradients go to the slots and to every parameter.

Ours and a step without penalty run the decoder as it is, with its projections folded into the slots. Whatever stands
for what a user would write runs it unfolded: a projection, attention from q, k and v, a projection.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor
from torch.func import functional_call, hessian, jvp
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from compgen_fast.bench.harness import Case, Contender, Outputs
from compgen_fast.jets import Jet, interaction_penalty
from compgen_fast.models import cross_attention_decoder
from compgen_fast.models.cross_attention_decoder import CrossAttentionDecoder
from compgen_fast.ops import slot_cross_attention
from compgen_fast.ops.jet_cross_attention import reference as jet_cross_attention_formula
from compgen_fast.ops.jet_linear import reference as jet_linear_formula
from compgen_fast.ops.jet_norm import layer_norm_reference
from compgen_fast.ops.jet_pointwise import gelu_reference

SEED = 0
STEP = 3e-2  # of finite differences: about where truncation and rounding in fp32 cost the same


@dataclass(frozen=True)
class Size:
    """B images of side² pixels, K slots, ``layers`` layers of H heads of width D."""

    B: int
    side: int
    K: int
    H: int
    D: int
    layers: int

    def __str__(self) -> str:
        named = asdict(self) | {"N": self.side**2}
        return " ".join(f"{name}{named[name]}" for name in ("B", "N", "K", "H", "D", "layers"))

    def decoder(self, device: str = "cpu") -> CrossAttentionDecoder:
        torch.manual_seed(SEED)
        width = self.H * self.D
        return CrossAttentionDecoder(
            32,
            self.side,
            layers=self.layers,
            heads=self.H,
            head_dim=self.D,
            query_dim=180 if width > 180 else width,
            slot_hidden=4 * width,
        ).to(device)

    def inputs(self, device: str = "cpu") -> dict[str, Tensor]:
        slots = torch.randn(self.B, self.K, 32, generator=generator(torch.device("cpu"))).to(device)
        parameters = self.decoder(device).named_parameters()
        return {"z": slots} | {name.replace(".", "_"): p.detach() for name, p in parameters}


def case(size: Size, device: str, *others: str) -> Case:
    """The whole penalty against every other way to get it; ``others`` names those not fit for every size."""
    decoder = size.decoder(device)
    step = partial(run, decoder)
    choice = {
        "compiled": Contender("compiled plain jets", CompiledPlainJets(decoder)),  # takes minutes to compile
        "hessian": Contender("torch.func.hessian", partial(step, full_second_derivative)),  # holds all of it
    }
    return _case(
        str(size),
        size,
        device,
        step,
        ours,
        (
            *(choice[name] for name in others),
            Contender("finite differences", partial(step, finite_differences), inexact="truncation and cancellation"),
            Contender("nested jvp", partial(step, nested_jvp)),
            Contender("reverse over reverse", partial(step, reverse_over_reverse)),
            Contender("no penalty", partial(step, no_penalty), does_less="a plain training step"),
        ),
    )


def subset_case(size: Size, device: str) -> Case:
    """The penalty on 1/8 of the pixels, against a step without it."""
    step = partial(run, size.decoder(device))
    plain = Contender("no penalty", partial(step, no_penalty), does_less="a plain training step")
    return _case(f"{size}, 1/8 of the pixels", size, device, step, ours_subset, (plain,))


def slots_case(size: Size, device: str) -> Case:
    """Growth with the number of slots: against the same step on two of them."""
    step = partial(run, size.decoder(device))
    two = Contender("2 of the slots", partial(step, ours_of_two_slots), inexact="another problem, for its time")
    return _case(f"{size}, growth with K", size, device, step, ours, (two,))


def pixels_case(size: Size, device: str) -> Case:
    """Growth with the number of pixels: against a plain step on as many."""
    step = partial(run, size.decoder(device))
    plain = Contender("no penalty", partial(step, no_penalty), does_less="a plain training step")
    return _case(f"{size}, growth with N", size, device, step, ours, (plain,))


def _case(
    name: str,
    size: Size,
    device: str,
    step: Callable[..., Outputs],
    method: Callable[..., Outputs],
    others: tuple[Contender, ...],
) -> Case:
    formula = partial(step, partial(by_formula, method))
    return Case(
        suite="jets",
        name=f"interaction_penalty {name}",
        inputs=partial(size.inputs, device),
        outputs=("pixels", "penalty"),
        oracle=formula,
        ours=Contender("ours", partial(step, method), backend="jets"),
        peers=(Contender("plain-torch jets", formula), *others),
        device=device,
        yardstick="plain-torch jets",
    )


def run(decoder: CrossAttentionDecoder, method: Callable[..., Outputs], z: Tensor, *parameters: Tensor) -> Outputs:
    """A method on the decoder with these parameters, in the precision of z."""
    named = dict(zip((name for name, _ in decoder.named_parameters()), parameters, strict=True))
    named["positions"] = decoder.get_buffer("positions").to(z.dtype)

    def decode(slots: Tensor, pixels: Tensor | None = None) -> Tensor:
        return functional_call(decoder, named, (slots, pixels))  # type: ignore[no-any-return]

    decode.num_pixels = len(named["positions"])  # type: ignore[attr-defined]
    return method(decode, z)


def generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(SEED)


def directions(z: Tensor) -> tuple[Tensor, Tensor, float]:
    """u, v and the penalty's factor, as ``interaction_penalty`` draws them from `generator`."""
    draw = generator(z.device)
    B, K, _ = z.shape
    half = K // 2
    side = (torch.rand(B, K, generator=draw, device=z.device).argsort(1) < half).unsqueeze(-1)
    signs = (2 * torch.randint(0, 2, z.shape, generator=draw, device=z.device) - 1).to(z.dtype)
    return signs * side, signs * ~side, K * (K - 1) / (half * (K - half))


def penalty(mixed: Tensor, factor: float) -> Tensor:
    return mixed.square().sum() / len(mixed) * factor


Decode = Callable[..., Tensor]


def ours(decode: Decode, z: Tensor) -> Outputs:
    found, pixels = interaction_penalty(decode, z, generator=generator(z.device), return_output=True)
    return pixels, found


def ours_subset(decode: Decode, z: Tensor) -> Outputs:
    """The penalty on an eighth of the pixels; its values are kept and only the other pixels are decoded plainly."""
    total = decode.num_pixels  # type: ignore[attr-defined]
    order = torch.randperm(total, generator=generator(z.device), device=z.device)
    few, others = order.split([total // 8, total - total // 8])
    found, some = interaction_penalty(decode, z, pixels=few, generator=generator(z.device), return_output=True)
    pixels = torch.cat([some, decode(z, pixels=others)], 1)[:, order.argsort()]
    return pixels, found * 8


def ours_of_two_slots(decode: Decode, z: Tensor) -> Outputs:
    return ours(decode, z[:, :2])


def by_formula(method: Callable[..., Outputs], decode: Decode, z: Tensor) -> Outputs:
    """One of our methods in plain torch."""
    with plain_torch():
        return method(decode, z)


class CompiledPlainJets:
    """torch.compile of what plain-torch jets compute. Dynamo does not look into ``Jet``, so it is given the graph of
    ordinary ops that one run leaves behind.
    """

    def __init__(self, decoder: CrossAttentionDecoder) -> None:
        self.decoder = decoder
        self.compiled: Callable[..., Outputs] | None = None

    def __call__(self, z: Tensor, *parameters: Tensor) -> Outputs:
        u, v, _ = directions(z)
        inputs = (z, u + v, (u != 0).any(-1, keepdim=True), *parameters)
        if self.compiled is None:
            with torch.no_grad():
                graph = make_fx(self.ordinary)(*inputs)
            self.compiled = torch.compile(graph, dynamic=False)
        return self.compiled(*inputs)

    def ordinary(self, z: Tensor, tangent: Tensor, side: Tensor, *parameters: Tensor) -> Outputs:
        _, _, factor = directions(z)

        def method(decode: Decode, z: Tensor) -> Outputs:
            jet = decode(Jet(torch.stack([z, tangent]), side))
            assert isinstance(jet, Jet)
            return jet.channels[0], penalty(jet.channels[3], factor)

        with plain_torch():
            return run(self.decoder, method, z, *parameters)


FORMULAS: dict[str, Any] = {
    "jet_linear": jet_linear_formula,
    "jet_gelu": gelu_reference,
    "jet_layer_norm": layer_norm_reference,
    "jet_cross_attention": jet_cross_attention_formula,
}


@contextmanager
def plain_torch() -> Iterator[None]:
    """Our fused jet ops by their formulas, in ordinary differentiable torch, on the decoder unfolded."""
    for name in FORMULAS:
        getattr(torch.ops.compgen, name)  # torch makes the attribute on first use; only then can it be replaced
    with patch.multiple(torch.ops.compgen, **FORMULAS), unfolded(partial(slot_cross_attention, return_weights=False)):
        yield


@contextmanager
def unfolded(attention: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Iterator[None]:
    """The decoder's attention in three steps; ``attention`` is the one from q, k and v."""

    def attend(
        x: Tensor, k: Tensor, v: Tensor, w_q: Tensor, b_q: Tensor, w_out: Tensor, b_out: Tensor, return_weights: bool
    ) -> Tensor:
        q = linear(x, w_q, b_q).unflatten(-1, k.shape[2:]).expand(len(k), -1, -1, -1)
        return linear(attention(q, k, v).flatten(-2), w_out, b_out)

    with patch.object(cross_attention_decoder, "projected_slot_attention", attend):
        yield


def finite_differences(decode: Decode, z: Tensor) -> Outputs:
    u, v, factor = directions(z)
    corners = torch.cat([z + STEP * (a * u + b * v) for a, b in ((1, 1), (1, -1), (-1, 1), (-1, -1))])
    pp, pm, mp, mm = decode(corners).chunk(4)
    return decode(z), penalty((pp - pm - mp + mm) / (4 * STEP**2), factor)


def nested_jvp(decode: Decode, z: Tensor) -> Outputs:
    """The right version of what people write: with fused attention it is refused, with layer_norm silently wrong."""
    u, v, factor = directions(z)
    with differentiable_forward():
        (pixels, _), (_, mixed) = cast(Any, jvp(lambda a: jvp(decode, (a,), (u,)), (z,), (v,)))
    return pixels, penalty(mixed, factor)


def reverse_over_reverse(decode: Decode, z: Tensor) -> Outputs:
    u, v, factor = directions(z)
    slots = z if z.requires_grad else z.detach().requires_grad_()
    with differentiable_forward(), torch.enable_grad():
        pixels = decode(slots)
        mixed = along(along(pixels, slots, u), slots, v)
    return pixels, penalty(mixed, factor)


def along(y: Tensor, z: Tensor, direction: Tensor) -> Tensor:
    """Dy[direction], by differentiating the gradient r ↦ ⟨r, Dy⟩ in r."""
    seed = torch.zeros_like(y, requires_grad=True)
    (pulled,) = torch.autograd.grad(y, z, seed, create_graph=True)
    return torch.autograd.grad(pulled, seed, direction, create_graph=True)[0]


def full_second_derivative(decode: Decode, z: Tensor) -> Outputs:
    u, v, factor = directions(z)
    with differentiable_forward():
        each = [hessian(lambda a: decode(a[None])[0])(sample) for sample in z]
    mixed = torch.einsum("bnckdlm,bkd,blm->bnc", torch.stack(each), u, v)
    return decode(z), penalty(mixed, factor)


def no_penalty(decode: Decode, z: Tensor) -> Outputs:
    return (decode(z),)


@contextmanager
def differentiable_forward() -> Iterator[None]:
    """Attention and norms out of ordinary torch ops, which torch differentiates twice correctly."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        p = (torch.einsum("bnhd,bshd->bhns", q, k) * q.shape[-1] ** -0.5).softmax(-1)
        return torch.einsum("bhns,bshd->bnhd", p, v)

    with unfolded(attention), DecomposedNorm():
        yield


class DecomposedNorm(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.nn.functional.layer_norm:
            return func(*args, **(kwargs or {}))
        x, _, weight, bias, eps = (*args, *(kwargs or {}).values())[:5]
        centred = x - x.mean(-1, keepdim=True)
        return centred * (centred.square().mean(-1, keepdim=True) + eps).rsqrt() * weight + bias
