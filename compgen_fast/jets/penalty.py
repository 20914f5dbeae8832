"""How much slots interact in a decoder, as a loss. Zero exactly where the decoder is a sum of one function per slot.

    R(f, z) = Σ_{k≠l} ‖H_kl‖²      H_kl = D²f / dz_k dz_l, squared and summed over every output, mean over the batch

All slot pairs of a random half A against half B are felt by one mixed derivative: with Rademacher u on A and v on B,
E‖D²f[u, v]‖² = Σ_{k∈A, l∈B} ‖H_kl‖². Curvature inside a slot never enters. One jet is one such derivative, at the price
of a few forward passes whatever the number of slots.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Self, get_args, overload

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function_unary
from torch.utils.checkpoint import checkpoint as recomputed

from compgen_fast.draws import Draws
from compgen_fast.jets.jet import Jet, jet_rule, unsided
from compgen_fast.ops import projected_slot_attention, slot_cross_attention  # noqa: F401  (defines the op named below)

Decoder = Callable[..., Tensor]
Method = Literal["hessian", "pairs", "attention", "contrast", "triple"]


@overload
def interaction_penalty(
    decoder: Decoder, z: Tensor, *, method: Method = ..., probes: int = ..., pixels: int | Tensor | None = ...,
    slots_dim: int = ..., generator: torch.Generator | Draws | None = ..., checkpoint: bool = ...,
    chunk: int | None = ..., return_output: Literal[False] = ...,
) -> Tensor: ...  # fmt: skip
@overload
def interaction_penalty(
    decoder: Decoder, z: Tensor, *, method: Method = ..., probes: int = ..., pixels: int | Tensor | None = ...,
    slots_dim: int = ..., generator: torch.Generator | Draws | None = ..., checkpoint: bool = ...,
    chunk: int | None = ..., return_output: Literal[True],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@torch.compiler.disable  # dynamo does not follow tensor subclasses like Jet, and does not say so
def interaction_penalty(
    decoder: Decoder,
    z: Tensor,
    *,
    method: Method = "hessian",
    probes: int = 1,
    pixels: int | Tensor | None = None,
    slots_dim: int = 1,
    generator: torch.Generator | Draws | None = None,
    checkpoint: bool = False,
    chunk: int | None = None,
    return_output: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The interaction of slots in ``decoder(z)``, a scalar to add to the loss; gradients reach parameters and z.

    Args:
        decoder: any callable of z made of torch ops that have jet rules; samples must not depend on each other.
        z: slots, batch first: [B, K, …], or with the slots in dimension ``slots_dim``.
        method: ``"hessian"`` estimates Σ_{k≠l} ‖H_kl‖² by one random split of the slots per probe; ``"pairs"`` is the
            same with every pair in every probe, for K − 1 times the price; ``"triple"`` is its third-order analogue
            Σ_{k≠l} Σ_m ‖D³f/dz_k dz_l dz_m‖² (pairs may interact, but only bilinearly); ``"contrast"`` is
            Σ_i Σ_{k<l} ‖df_i/dz_k‖ ‖df_i/dz_l‖ over output elements i, exact (no two slots touch one output);
            ``"attention"`` is the mean over pixels of Σ_{k<l} w_k w_l, w the weights of the decoder's
            ``slot_cross_attention`` and ``projected_slot_attention`` calls and of what it hands to ``note_weights``,
            averaged over heads and layers.
        probes: how many random directions to average over; ``"contrast"`` and ``"attention"`` draw none.
        pixels: decode these pixels only, by ``decoder(z, pixels=index)``. An index tensor goes as it is. A number n
            draws n of ``decoder.num_pixels`` pixels and scales up: unbiased when pixels decode independently.
        slots_dim: the dimension of z that counts slots; dimension 0 is the batch.
        generator: source of the random directions and pixels, on z's device; `Draws` where z is a part of a batch that
            is split over ranks.
        checkpoint: recompute each derivative in the backward pass, so that memory holds one of them at a time.
        chunk: take derivatives of this many pixels at a time and recompute them in the backward pass, so that memory
            holds one chunk of one derivative. For decoders that take decoder(z, pixels=index) → [B, len(index), …].
        return_output: also return decoder(z), computed on the way, so that the training step need not decode twice.

    Jets run in fp32 (or fp64), under autocast too: x_uv is what remains where first-order terms cancel, and bf16's 8
    bits cannot hold it.
    """
    _check(z, slots_dim, method, probes, chunk)
    draws = generator if isinstance(generator, Draws) else Draws(generator)
    index, factor = _chosen(decoder, z, pixels, chunk, draws)
    decoder = uncompiled(decoder)
    if method == "attention":
        penalty, output = _attention(_on_pixels(decoder, index), z)
    else:
        z = z if z.dtype == torch.float64 else z.float()
        with torch.autocast(z.device.type, enabled=False):
            if z.shape[slots_dim] == 1:
                total, output = None, _on_pixels(decoder, index)(z) if return_output else z
            else:
                parts = [_on_pixels(decoder, part) for part in _chunks(index, chunk)]
                total, output = _METHODS[method](_Probe(parts, z, slots_dim, draws, checkpoint), probes)
        # Zero by structure is still a loss: it hangs on z, with gradient zero.
        penalty = (z * 0).sum() if total is None else total * factor
    return (penalty, output) if return_output else penalty


def check_slots(where: str, z: Tensor) -> None:
    """A flat z [B, K · D] would be read as slots of one number each, and the penalty would be another."""
    if z.dim() < 3:
        raise ValueError(
            f"{where}: z is {list(z.shape)}; expected [batch, slots, numbers of a slot], such as "
            "z.unflatten(1, (slots, -1)), or z.unsqueeze(-1) if each slot is one number"
        )


def _check(z: Tensor, slots_dim: int, method: str, probes: int, chunk: int | None) -> None:
    if method not in get_args(Method):
        raise ValueError(f"interaction_penalty: method is {method!r}; expected one of {', '.join(get_args(Method))}")
    check_slots("interaction_penalty", z)
    if not 0 < slots_dim < z.dim():
        raise ValueError(
            f"interaction_penalty: z has shape {list(z.shape)} and slots_dim={slots_dim}; expected a slots_dim from 1 "
            "to z.dim() − 1"
        )
    if probes < 1 or (probes > 1 and method in ("contrast", "attention")):
        expected = "1, since nothing is drawn" if method in ("contrast", "attention") else "at least 1"
        raise ValueError(f"interaction_penalty: probes is {probes}; method {method!r} expects {expected}")
    if chunk is not None and (chunk < 1 or method == "attention"):
        expected = "None, since it takes no derivatives" if method == "attention" else "at least 1 pixel"
        raise ValueError(f"interaction_penalty: chunk is {chunk}; method {method!r} expects {expected}")


def _chosen(
    decoder: Decoder, z: Tensor, pixels: int | Tensor | None, chunk: int | None, draws: Draws
) -> tuple[Tensor | None, float]:
    """The pixels to decode (None: all, unnamed), and by how much their sum is to be scaled up."""
    if isinstance(pixels, Tensor) or (pixels is None and chunk is None):
        return pixels, 1.0
    total = getattr(decoder, "num_pixels", None)
    if total is None or (pixels is not None and not 1 <= pixels <= total):
        asked = f"chunk={chunk}" if pixels is None else f"pixels={pixels}"
        raise ValueError(
            f"interaction_penalty: {asked} needs a decoder that takes decoder(z, pixels=index) and has `num_pixels`, "
            f"at least as many (it has {total}); or give pixels= as an index tensor, and scale the result yourself"
        )
    if pixels is None:
        return torch.arange(total, device=z.device), 1.0
    return draws.permutation(total, z.device)[:pixels], total / pixels


def _on_pixels(decoder: Decoder, index: Tensor | None) -> Decoder:
    return decoder if index is None else lambda slots: decoder(slots, pixels=index)


def _chunks(index: Tensor | None, chunk: int | None) -> Sequence[Tensor | None]:
    return [None] if index is None else index.split(chunk or max(1, len(index)))


def uncompiled(decoder: Decoder) -> Decoder:
    """The decoder, run eagerly even where it was compiled: jets go through Python."""

    def run(*args: Any, **kwargs: Any) -> Tensor:
        with torch.compiler.set_stance("force_eager"):
            return decoder(*args, **kwargs)

    return run


class _Probe:
    """One decoder, in parts by pixels, at one z: draws directions and takes derivatives along them."""

    def __init__(
        self,
        parts: Sequence[Decoder],
        z: Tensor,
        slots_dim: int,
        draws: Draws,
        checkpoint: bool,
    ) -> None:
        self.parts, self.z, self.slots_dim, self.draws = parts, z, slots_dim, draws
        self.recompute = checkpoint or len(parts) > 1
        self.slots = z.shape[slots_dim]

    def signs(self) -> Tensor:
        """Rademacher: ±1 for every number in z."""
        return self.draws.signs(self.z)

    def split(self) -> tuple[Tensor, float]:
        """A side for each slot of each sample, half of them True, and the share of pairs that a split parts.

        Half against half parts more pairs than coins would, and never none.
        """
        K, half = self.slots, self.slots // 2
        per_slot = torch.empty(len(self.z), K, device=self.z.device)
        order = self.draws.uniform(per_slot).argsort(1)
        return self.over_slots(order < half), 2 * half * (K - half) / (K * (K - 1))

    def over_slots(self, per_slot: Tensor) -> Tensor:
        """[B or 1, K] in the layout of z, of size 1 elsewhere."""
        shape = [1] * self.z.dim()
        shape[0], shape[self.slots_dim] = per_slot.shape
        return per_slot.view(shape)

    def jet(self, tangent: Tensor, side: Tensor) -> Jet:
        """decoder(z), with each slot moved along its tangent, by u where side and by v elsewhere."""
        jets = [self._part(decode, tangent, side) for decode in self.parts]
        return jets[0] if len(jets) == 1 else Jet(torch.cat([jet.channels for jet in jets], 2))

    def _part(self, decode: Decoder, tangent: Tensor, side: Tensor) -> Jet:
        if self.recompute:
            return _checkpointed(decode, self.z, tangent, side)
        return _as_jet(decode(Jet(torch.stack([self.z, tangent]), side)))


def _as_jet(output: Any) -> Jet:
    """A decoder's output as a jet; one that ignores its slots gives a plain tensor, whose tangents are zero."""
    if isinstance(output, Jet):
        return unsided(output)
    if not isinstance(output, Tensor):
        raise TypeError(
            f"interaction_penalty: the decoder returned {type(output).__name__}; expected one tensor. "
            "Wrap it: lambda z: decoder(z)[0]"
        )
    return Jet(torch.stack([output, *(torch.zeros_like(output),) * 2]))


def _checkpointed(decode: Decoder, z: Tensor, tangent: Tensor, side: Tensor) -> Jet:
    def channels(z: Tensor) -> Tensor:
        return _as_jet(decode(Jet(torch.stack([z, tangent]), side))).channels

    return Jet(recomputed(channels, z, use_reentrant=False))


def _squares(x: Tensor) -> Tensor:
    """Squared and summed over outputs, mean over the batch."""
    return x.square().sum() / len(x)


def _mixed(jet: Jet) -> Tensor | None:
    """x_uv; None where it is zero by structure."""
    return jet.channels[3] if len(jet.channels) == 4 else None


def _mean(terms: Sequence[Tensor | None], divisor: float) -> Tensor | None:
    present = [term for term in terms if term is not None]
    return torch.stack(present).sum() / divisor if present else None


def _hessian(probe: _Probe, probes: int) -> tuple[Tensor | None, Tensor]:
    terms = []
    for _ in range(probes):
        side, share = probe.split()
        jet = probe.jet(probe.signs(), side)
        mixed = _mixed(jet)
        terms.append(None if mixed is None else _squares(mixed) * (2 / share))
    return _mean(terms, probes), jet.primal


def _pairs(probe: _Probe, probes: int) -> tuple[Tensor | None, Tensor]:
    """Σ_l ‖D²f[v_1 + … + v_{l−1}, v_l]‖²: each slot against all before it, so every pair once per probe."""
    terms = []
    for _ in range(probes):
        signs = probe.signs()
        number = probe.over_slots(torch.arange(probe.slots, device=probe.z.device)[None])
        for last in range(1, probe.slots):
            jet = probe.jet(signs * (number <= last), number < last)
            mixed = _mixed(jet)
            terms.append(None if mixed is None else _squares(mixed) * 2)
    return _mean(terms, probes), jet.primal


def _triple(probe: _Probe, probes: int) -> tuple[Tensor | None, Tensor]:
    """D³f[u, v, w] with w on every slot: the derivative of x_uv along w, by differentiating a gradient in its seed."""
    terms = []
    with torch.enable_grad():
        if not probe.z.requires_grad:
            probe.z = probe.z.detach().requires_grad_()
        for _ in range(probes):
            side, share = probe.split()
            jet = probe.jet(probe.signs(), side)
            mixed = _mixed(jet)
            bent = None if mixed is None else _along(mixed, probe.z, probe.signs())
            terms.append(None if bent is None else _squares(bent) * (2 / share))
    return _mean(terms, probes), jet.primal


def _along(y: Tensor, z: Tensor, direction: Tensor) -> Tensor | None:
    """Dy[direction]: the pull-back of a seed is linear in it, and differentiating it in the seed pushes forward."""
    seed = torch.zeros_like(y, requires_grad=True)
    (pulled,) = torch.autograd.grad(y, z, seed, create_graph=True, allow_unused=True)
    if pulled is None or not pulled.requires_grad:
        return None
    return torch.autograd.grad(pulled, seed, direction, create_graph=True, allow_unused=True)[0]


def _contrast(probe: _Probe, probes: int) -> tuple[Tensor | None, Tensor]:
    """‖df_i/dz_k‖ for every output element i and slot k: one first-order jet per number in a slot's code and slot."""
    z, ours = probe.z, probe.z.new_ones((), dtype=torch.bool)  # one side for all: a first-order jet
    norms = []
    for slot in range(probe.slots):
        moved = []
        for direction in _directions(probe, slot):
            jet = probe.jet(direction.expand(z.shape), ours)
            moved.append(jet.channels[1])
        norms.append(torch.linalg.vector_norm(torch.stack(moved), dim=0))
    stacked = torch.stack(norms)
    pairs = (stacked.sum(0).square() - stacked.square().sum(0)) / 2
    return pairs.sum() / len(z), jet.primal


def _directions(probe: _Probe, slot: int) -> Iterator[Tensor]:
    """The unit directions of one slot's code, the same for every sample: [1, …] in the layout of z."""
    for unit in torch.eye(probe.z[0].numel() // probe.slots, dtype=probe.z.dtype, device=probe.z.device):
        direction = torch.zeros_like(probe.z[:1])
        code = direction.select(probe.slots_dim, slot)
        code.copy_(unit.view(code.shape))
        yield direction


def note_weights(weights: Tensor) -> Tensor:
    """Slot weights [B, N, S] as they are; what records around sees them. For a decoder whose pixels choose among slots
    by other means than our attention.
    """
    if has_torch_function_unary(weights):
        return handle_torch_function(note_weights, (weights,), weights)
    return weights


@jet_rule(note_weights)
def _noted(weights: Jet) -> Jet:
    return weights


class RecordedWeights(TorchFunctionMode):
    """Collects the slot weights [B, N, S] of every ``slot_cross_attention``, ``projected_slot_attention`` and
    ``note_weights`` called inside it; once each, also where the second calls the first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[Tensor] = []

    def __enter__(self) -> Self:
        super().__enter__()
        return self

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func is note_weights:
            self.weights.append(func(*args))
            return self.weights[-1]
        attends = (torch.ops.compgen.slot_cross_attention, projected_slot_attention)
        if func not in attends:
            return func(*args, **(kwargs or {}))
        *inputs, return_weights = args
        out, weights = func(*inputs, True)
        self.weights.append(weights)
        if func is projected_slot_attention:
            return (out, weights) if return_weights else out
        return out, weights if return_weights else weights[:0]


def _attention(decode: Decoder, z: Tensor) -> tuple[Tensor, Tensor]:
    """mean over batch and pixels of Σ_{k<l} w_k w_l, w the mean over heads and layers; at most (1 − 1/K) / 2."""
    with RecordedWeights() as recorded:
        output = decode(z)
    if not recorded.weights:
        raise ValueError(
            "interaction_penalty: method 'attention' found no call of compgen_fast.ops.slot_cross_attention or "
            "projected_slot_attention in the decoder; use one for its cross-attention, hand weights of your own to "
            "compgen_fast.jets.penalty.note_weights, or use method 'hessian'"
        )
    w = torch.stack(recorded.weights).mean(0)
    w = w if w.dtype == torch.float64 else w.float()  # a mean over all pixels does not survive bf16
    return ((w.sum(-1).square() - w.square().sum(-1)) / 2).mean(), output


_METHODS: dict[str, Callable[[_Probe, int], tuple[Tensor | None, Tensor]]] = {
    "hessian": _hessian,
    "pairs": _pairs,
    "contrast": _contrast,
    "triple": _triple,
}
