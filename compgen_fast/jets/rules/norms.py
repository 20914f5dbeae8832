"""Normalisation. All of it comes down to one op, a layer norm along the last dimension of a suitable view.

Nested torch.func.jvp is silently wrong through layer_norm and batch_norm (pytorch #196700); these rules are not.
"""

from typing import Any

import torch
from torch import Tensor

from compgen_fast.jets.jet import Jet, jet_rule, mixable, spellings
from compgen_fast.jets.rules.linear import refuse_jet
from compgen_fast.ops.jet_norm import jet_layer_norm, jet_rms_norm


@jet_rule(*spellings("layer_norm"))
def layer_norm(
    x: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, cudnn_enable: bool = True
) -> Any:
    refuse_jet("layer_norm", weight, bias)
    dims = len(normalized_shape)
    flat = _flattened(x, dims)
    weight, bias = (None if p is None else p.flatten().to(x.dtype) for p in (weight, bias))
    if flat.side is None:
        y = Jet(jet_layer_norm(flat.channels, weight, bias, eps))
    else:
        y = _affine(_normalised_sided(flat, eps, centred=True), weight, bias)
    return y.reshape(x.shape)


@jet_rule(*spellings("rms_norm"))
def rms_norm(x: Jet, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    refuse_jet("rms_norm", weight)
    flat = _flattened(x, len(normalized_shape))
    weight = None if weight is None else weight.flatten().to(x.dtype)
    if flat.side is None:
        y = Jet(jet_rms_norm(flat.channels, weight, eps))
    else:
        eps = torch.finfo(x.dtype).eps if eps is None else eps
        y = _affine(_normalised_sided(flat, eps, centred=False), weight, None)
    return y.reshape(x.shape)


@jet_rule(*spellings("group_norm"))
def group_norm(x: Jet, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any) -> Any:
    refuse_jet("group_norm", weight, bias)
    groups = x.reshape(x.shape[0], num_groups, -1)
    y = layer_norm(groups, groups.shape[-1:], eps=eps).reshape(x.shape)
    return _affine(y, *(_per_channel(p, x) for p in (weight, bias)))


@jet_rule(*spellings("instance_norm"))
def instance_norm(
    x: Jet,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *_: Any,
) -> Any:
    if not use_input_stats:
        return batch_norm(x, running_mean, running_var, weight, bias, False, momentum, eps)
    return group_norm(x, x.shape[1], weight, bias, eps)


@jet_rule(*spellings("batch_norm"))
def batch_norm(
    x: Jet,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *_: Any,
) -> Any:
    if training or running_mean is None:
        raise NotImplementedError(
            "jets: batch_norm in training mode ties the samples of a batch together, so a sample's slots would meet "
            "other samples' slots; call decoder.eval(), or use LayerNorm or GroupNorm"
        )
    scale = torch.rsqrt(running_var + eps) * (1 if weight is None else weight)
    shift = -running_mean * scale + (0 if bias is None else bias)
    return _affine(x, _per_channel(scale, x), _per_channel(shift, x))


def _flattened(x: Jet, dims: int) -> Jet:
    """x as […, D] with the last ``dims`` dimensions joined, ready to be mixed along D."""
    x = mixable(x, range(-dims, 0))
    return x if dims == 1 else x.flatten(-dims)  # type: ignore[return-value]


def _normalised_sided(x: Jet, eps: float, centred: bool) -> Jet:
    """n = c r with c = x − mean(x) (or x), r = (mean(c²) + eps)^(-1/2); n_t = r (c_t − n mean(n c_t))."""
    channels = x.channels - x.channels.mean(-1, keepdim=True) if centred else x.channels
    c, c_t = channels
    r = torch.rsqrt((c * c).mean(-1, keepdim=True) + eps)
    n = c * r
    return Jet(torch.stack([n, r * (c_t - n * (n * c_t).mean(-1, keepdim=True))]), x.side)


def _per_channel(parameter: Tensor | None, x: Jet) -> Tensor | None:
    return None if parameter is None else parameter.to(x.dtype).view(-1, *(1,) * (x.dim() - 2))


def _affine(x: Any, weight: Tensor | None, bias: Tensor | None) -> Any:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias
