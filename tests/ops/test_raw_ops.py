"""The C++ ops called without their public functions' checks: tensors that do not fit each other are refused, not read.

The ops that are not here have such a test in their own file.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from compgen_fast.ops.backends import serving

pytestmark = pytest.mark.skipif(serving("cpu") != "cpp", reason="plain torch spreads what does not fit, within bounds")

SIZES = {"B": 2, "N": 5, "S": 3, "H": 2, "D": 8, "J": 4, "P": 2, "C": 3}
ALWAYS = "JP"  # axes of a whole jet and of a pair have one size, also where a single tensor has them
# Every argument: a tensor's axes, those of a mask after a colon, or a number.
CALLS: dict[str, tuple[str | float, ...]] = {
    "slot_cross_attention": ("BNHD", "BSHD", "BSHD", ":BS", 0.3, True),
    "slot_cross_attention_backward": ("BNHD", "BNS", "BNHD", "BSHD", "BSHD", ":BS", 0.3),
    "slot_competition": ("BSHD", "BNHD", "BNHD", ":BS", 0.3, 1e-8, True),
    "slot_competition_backward": ("BSHD", "BNS", "BSHD", "BNHD", "BNHD", ":BS", "BNS", "BSHD", "BSH", 0.3, 1e-8),
    "jet_cross_attention": ("JBNHD", "PBSHD", "PBSHD", ":BS", ":BS", 0.3),
    "jet_cross_attention_backward": ("JBNHD", "JBNHD", "PBSHD", "PBSHD", ":BS", ":BS", 0.3),
    "jet_layer_norm": ("CND", "D", "D", 1e-5),
    "jet_layer_norm_backward": ("JND", "CND", "D", 1e-5),
    "jet_rms_norm": ("CND", "D", 1e-5),
    "jet_rms_norm_backward": ("JND", "CND", "D", 1e-5),
    "jet_gelu_backward": ("JND", "CND", False),
    "jet_silu_backward": ("JND", "CND"),
}


def made(argument: str | float) -> Any:
    if not isinstance(argument, str):
        return argument
    shape = [SIZES[axis] for axis in argument.removeprefix(":")]
    return torch.ones(shape, dtype=torch.bool if argument.startswith(":") else torch.float32)


def misfits(arguments: tuple[str | float, ...]) -> list[tuple[int, int]]:
    """The arguments and their axes that cannot be shortened alone."""
    tensors = {i: x.removeprefix(":") for i, x in enumerate(arguments) if isinstance(x, str)}
    together = "".join(tensors.values())
    pairs = [(i, axis, name) for i, axes in tensors.items() for axis, name in enumerate(axes)]
    return [(i, axis) for i, axis, name in pairs if name in ALWAYS or together.count(name) > 1]


def without_last(x: Tensor, axis: int) -> Tensor:
    return x.narrow(axis, 0, x.shape[axis] - 1).contiguous()


@pytest.mark.parametrize("name", CALLS)
def test_a_tensor_that_is_short_along_any_axis_is_refused(name: str) -> None:
    op, arguments = getattr(torch.ops.compgen, name), [made(x) for x in CALLS[name]]
    op(*arguments)
    for i, axis in misfits(CALLS[name]):
        changed = [without_last(x, axis) if i == j else x for j, x in enumerate(arguments)]
        with pytest.raises(RuntimeError, match="; expected"):
            op(*changed)


@pytest.mark.parametrize("x", [torch.ones(()), torch.ones(5, 8)], ids=["no axis", "five channels"])
def test_what_is_no_jet_is_refused(x: Tensor) -> None:
    with pytest.raises(RuntimeError, match="; expected"):
        torch.ops.compgen.jet_silu(x)


@pytest.mark.parametrize("shape", [(4, 3, 0), (4,)])
def test_norms_of_nothing_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(RuntimeError, match="; expected"):
        torch.ops.compgen.jet_layer_norm(torch.ones(shape), None, None, 1e-5)
