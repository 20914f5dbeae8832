"""Launchers that run their kernels here: compiled for sm_80 as they ship, executed from PTX on CPU tensors.

Within `emulated`, a launch compiles the kernel for the target and executes all its blocks, one after the other, so a
launcher of several kernels ends with its results in its tensors. Beside the results there are faults (see
`emulator.memory`) and what was moved. It needs TRITON_INTERPRET unset, and no GPU.
"""

import contextlib
import ctypes
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch
from triton.runtime.jit import JITFunction

from compgen_fast.prove.ahead_of_time import TARGETS, Argument, Launch, compile_with_arguments
from compgen_fast.prove.emulator import Block, GlobalMemory, Memory, parse
from compgen_fast.prove.emulator.memory import Bytes, TracedMemory, Traffic


@dataclass
class Emulation:
    """What one launch did. ``loads`` and ``stores`` are of global memory, by the name of the kernel's argument."""

    name: str
    blocks: int
    """In the grid; ``loads``, ``stores`` and ``executed`` are of those that ran, which is all of them unless traced."""
    ran: int
    threads: int  # of a block
    loads: dict[str, Traffic] = field(default_factory=dict)
    stores: dict[str, Traffic] = field(default_factory=dict)
    executed: dict[str, int] = field(default_factory=dict)
    """How often each opcode was executed by a block."""


@contextlib.contextmanager
def emulated(inputs: Sequence[torch.Tensor | None], target: str = "sm_80") -> Iterator[list[Emulation]]:
    """Within the block, kernels are emulated, and each launch appends to the list.

    Args:
        inputs: tensors that have their values. Of all others, a byte must be written before it is read.
        target: the GPU that kernels are compiled for: ``sm_80``, or ``sm_90`` where no kernel uses wgmma.
    """
    known = _Known([tensor for tensor in inputs if tensor is not None])
    found: list[Emulation] = []

    def run(self: JITFunction, *arguments: Any, grid: tuple[int, ...], warmup: bool, **options: Any) -> None:
        found.append(_emulate(Launch(self, arguments, options, grid), target, known))

    with mock.patch.object(JITFunction, "run", run):
        yield found


@contextlib.contextmanager
def traced(sample: int, target: str = "sm_80") -> Iterator[list[Emulation]]:
    """Within the block, of each launch ``sample`` consecutive blocks are emulated, from the middle of the grid, on
    tensors of any size, and only what they move is noted: nothing is checked, and the results are incomplete.
    """
    found: list[Emulation] = []

    def run(self: JITFunction, *arguments: Any, grid: tuple[int, ...], warmup: bool, **options: Any) -> None:
        found.append(_emulate(Launch(self, arguments, options, grid), target, _Traced(), sample))

    with mock.patch.object(JITFunction, "run", run):
        yield found


class _Traced:
    """Memory of which only traffic is noted."""

    def memory(self, argument: Argument) -> Memory:
        return TracedMemory(_content(argument.value), argument.name, _base(argument.value))

    def shared(self, size: int) -> Memory:
        return TracedMemory(np.zeros(size, np.uint8), "shared memory", 0)


class _Known:
    """Memory that is watched, and which bytes of which storage have a value, from one launch to the next."""

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        self.defined = {_base(tensor): np.ones(_size(tensor), bool) for tensor in inputs}
        self.kept: list[torch.Tensor] = list(inputs)  # so that no other tensor comes to lie in the same place

    def memory(self, argument: Argument) -> Memory:
        tensor = argument.value
        base = _base(tensor)
        memory = Memory(_content(tensor), argument.name, defined=False, base=base)
        memory.defined = self.defined.setdefault(base, memory.defined)
        self.kept.append(tensor)
        return memory

    def shared(self, size: int) -> Memory:
        return Memory(np.zeros(size, np.uint8), "shared memory", defined=False)


def _base(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())


def _size(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().nbytes())


def _content(tensor: torch.Tensor) -> Bytes:
    return np.ctypeslib.as_array((ctypes.c_uint8 * _size(tensor)).from_address(_base(tensor)))


def _emulate(launch: Launch, target: str, kind: _Known | _Traced, sample: int | None = None) -> Emulation:
    compiled, arguments = compile_with_arguments(launch, TARGETS[target])
    program = parse(compiled.asm["ptx"])
    buffers: dict[int, Memory] = {}
    for argument in arguments:
        if isinstance(argument.value, torch.Tensor) and argument.value.numel():
            buffers.setdefault(_base(argument.value), kind.memory(argument))
    parameters = [_bits(argument) for argument in arguments]
    parameters += [0] * (len(program.parameters) - len(parameters))  # scratch memory, which our kernels do not use
    memory, grid = GlobalMemory(list(buffers.values())), _three(launch.grid)
    places = list(itertools.product(*(range(count) for count in reversed(grid))))
    if sample is not None:
        first = len(places) // 2 // sample * sample
        places = places[first : first + sample]
    emulation = Emulation(launch.name, int(np.prod(grid)), len(places), program.threads)
    for z, y, x in places:
        block = Block(program, parameters, memory, kind.shared(max(16, compiled.metadata.shared)), (x, y, z), grid)
        block.run()
        for opcode, count in block.executed.items():
            emulation.executed[opcode] = emulation.executed.get(opcode, 0) + count
    for buffer in buffers.values():
        emulation.loads[buffer.name], emulation.stores[buffer.name] = buffer.loads, buffer.stores
    return emulation


def _bits(argument: Argument) -> int:
    """An argument as the bits of a parameter."""
    if isinstance(argument.value, torch.Tensor):
        return int(argument.value.data_ptr())
    if argument.type.startswith("fp"):
        return int(np.float32(argument.value).view(np.uint32))
    return int(argument.value) & 0xFFFF_FFFF_FFFF_FFFF


def _three(grid: tuple[int, ...]) -> tuple[int, int, int]:
    x, y, z = (*grid, 1, 1)[:3]
    return x, y, z
