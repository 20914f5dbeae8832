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
from compgen_fast.prove.emulator.memory import Traffic


@dataclass
class Emulation:
    """What one launch did. ``loads`` and ``stores`` are of global memory, by the name of the kernel's argument."""

    name: str
    blocks: int
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


class _Known:
    """Which bytes of which storage have a value, from one launch to the next."""

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        self.defined = {_base(tensor): np.ones(_size(tensor), bool) for tensor in inputs}
        self.kept: list[torch.Tensor] = list(inputs)  # so that no other tensor comes to lie in the same place

    def memory(self, argument: Argument) -> Memory:
        tensor = argument.value
        base, size = _base(tensor), _size(tensor)
        content = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(base))
        memory = Memory(content, argument.name, defined=False, base=base)
        memory.defined = self.defined.setdefault(base, memory.defined)
        self.kept.append(tensor)
        return memory


def _base(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())


def _size(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().nbytes())


def _emulate(launch: Launch, target: str, known: _Known) -> Emulation:
    compiled, arguments = compile_with_arguments(launch, TARGETS[target])
    program = parse(compiled.asm["ptx"])
    buffers: dict[int, Memory] = {}
    for argument in arguments:
        if isinstance(argument.value, torch.Tensor) and argument.value.numel():
            buffers.setdefault(_base(argument.value), known.memory(argument))
    parameters = [_bits(argument) for argument in arguments]
    parameters += [0] * (len(program.parameters) - len(parameters))  # scratch memory, which our kernels do not use
    memory, grid = GlobalMemory(list(buffers.values())), _three(launch.grid)
    emulation = Emulation(launch.name, int(np.prod(grid)))
    for z, y, x in itertools.product(*(range(count) for count in reversed(grid))):
        block = Block(program, parameters, memory, max(16, compiled.metadata.shared), (x, y, z), grid)
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
