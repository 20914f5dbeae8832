"""What does not move: shapes, dtypes, comparisons, indices, detached values. They are read off the value alone."""

from typing import Any

import torch
from torch import Tensor

from compgen_fast.jets.jet import RULES, Jet, jet_rule, spellings

METADATA = (
    "shape", "dtype", "device", "ndim", "layout", "itemsize", "nbytes", "names", "is_cuda", "is_cpu", "is_mps",
    "is_xpu", "is_xla", "is_hpu", "is_mtia", "is_ipu", "is_maia", "is_vulkan", "is_meta", "is_sparse",
    "is_sparse_csr", "is_quantized", "is_nested", "is_mkldnn",
)  # fmt: skip
METHODS = (
    "dim", "size", "numel", "nelement", "ndimension", "element_size", "is_floating_point", "is_complex",
    "get_device", "is_same_size", "type", "is_inference", "is_signed", "is_conj", "is_neg", "__len__",
    "__hash__", "__format__",
)  # fmt: skip
FUNCTIONS = (
    "eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "isfinite", "isclose", "allclose", "equal", "any",
    "all", "logical_not", "logical_and", "logical_or", "argmax", "argmin", "argsort", "count_nonzero",
    "nonzero", "searchsorted", "bucketize", "sign", "floor", "ceil", "round", "trunc", "heaviside", "bernoulli",
    "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like",
)  # fmt: skip
ONLY_METHODS = (
    "new_zeros", "new_ones", "new_empty", "new_full", "new_tensor", "item", "tolist", "long", "int", "bool",
    "stride", "is_contiguous", "__bool__", "__float__", "__int__", "__eq__", "__ne__", "__lt__", "__le__",
    "__gt__", "__ge__",
)  # fmt: skip


def _metadata(function: Any) -> Any:
    def rule(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)

    return rule


def _of_primal(function: Any) -> Any:
    def rule(*args: Any, **kwargs: Any) -> Any:
        args = tuple(x.primal.detach() if isinstance(x, Jet) else x for x in args)
        kwargs = {name: x.primal.detach() if isinstance(x, Jet) else x for name, x in kwargs.items()}
        return function(*args, **kwargs)

    return rule


for _name in METADATA:
    if hasattr(Tensor, _name):
        RULES[getattr(Tensor, _name).__get__] = _metadata(getattr(Tensor, _name).__get__)
for _function in [*(getattr(Tensor, name) for name in METHODS), torch.is_floating_point, torch.is_complex, torch.numel]:
    RULES[_function] = _metadata(_function)
for _function in [*spellings(*FUNCTIONS), *(getattr(Tensor, name) for name in ONLY_METHODS)]:
    RULES[_function] = _of_primal(_function)


@jet_rule(Tensor.requires_grad.__get__)  # type: ignore[attr-defined]
def requires_grad(x: Jet) -> bool:
    return x.channels.requires_grad


@jet_rule(Tensor.is_leaf.__get__)  # type: ignore[attr-defined]
def is_leaf(x: Jet) -> bool:
    return x.channels.is_leaf


@jet_rule(Tensor.grad_fn.__get__)  # type: ignore[union-attr]
def grad_fn(x: Jet) -> Any:
    return x.channels.grad_fn


@jet_rule(*spellings("detach"), Tensor.data.__get__)  # type: ignore[attr-defined]
def detach(x: Jet) -> Tensor:
    """Detached is constant: it moves with nothing, in jets as in autograd."""
    return x.primal.detach()


@jet_rule(torch.is_tensor)
def is_tensor(x: Any) -> bool:
    return True


@jet_rule(Tensor.__reduce_ex__, Tensor.__deepcopy__, Tensor.backward, Tensor.numpy, Tensor.__array__)
def refuse(x: Jet, *args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError(
        "jets: use x.primal or x.channels, which are plain tensors, for backward, numpy and copies"
    )
