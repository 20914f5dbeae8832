"""The pool of result memory in csrc/memory.h: blocks come back, never while they are in use, and not for ever."""

import pytest
import torch
from torch import Tensor

from compgen_fast.ops import jet_gelu
from compgen_fast.ops.backends import serving

pytestmark = pytest.mark.skipif(serving("cpu") != "cpp", reason="the pool belongs to the C++ kernels")
ELEMENTS = 2**19  # of four floats: 8 MiB


def result(elements: int = ELEMENTS) -> Tensor:
    return jet_gelu(torch.ones(4, elements))


def test_a_released_result_is_the_next_ones_memory() -> None:
    first = result().data_ptr()
    assert result().data_ptr() == first


def test_results_in_use_keep_their_memory_and_their_values() -> None:
    results = [result() for _ in range(3)]
    view = results.pop()[1:]
    taken = jet_gelu(torch.zeros(4, ELEMENTS))
    assert len({x.data_ptr() for x in (*results, view, taken)}) == 4
    assert all(torch.equal(x, results[0]) for x in results) and torch.equal(view, results[0][1:])


def test_other_sizes_give_idle_memory_back() -> None:
    """Five hundred results of as many sizes, 4 GB together, one alive at a time."""
    before = resident()
    for i in range(500):
        result(ELEMENTS + i)
    assert resident() - before < 2**28


def test_the_profiler_sees_pooled_memory() -> None:
    x = torch.ones(4, ELEMENTS)
    with torch.autograd.profiler.profile(use_cpu=True, profile_memory=True) as recording:
        y = jet_gelu(x)
        del y
    events = recording.kineto_results.events()  # type: ignore[union-attr]
    changes = [event.nbytes() for event in events if event.name() == "[memory]"]
    assert x.nbytes in changes and -x.nbytes in changes


def resident() -> int:
    with open("/proc/self/statm") as status:
        return int(status.read().split()[1]) * 4096
