"""One block of threads that executes PTX: registers are arrays with a number for each thread.

Threads need not agree where to go. Each has its own place in the program; of all places, the earliest is executed next,
by the threads that are there, and a thread that waits at a barrier is nowhere until all others wait or are done. Since
compilers lay code out so that branches meet again further down, that brings threads together as hardware does.

What a register holds that was never written is a pattern nobody would mistake for a result. The functions that execute
an instruction are registered by opcode in the modules beside this one.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compgen_fast.prove.emulator.memory import Bytes, Fault, GlobalMemory, Index, Memory, Who
from compgen_fast.prove.emulator.parser import Instruction, Program, address, registers

Lanes = NDArray[Any]
"""A number for each thread."""
Mask = NDArray[np.bool_]
WARP = 32
UNWRITTEN = 0x7FC0DEAD_7FC0DEAD  # NaN as two fp32, and as an address in no buffer
_KINDS = {"%p": np.dtype(np.bool_), "%rs": np.dtype(np.uint16), "%rd": np.dtype(np.uint64), "%r": np.dtype(np.uint32)}

Executor = Callable[["Block", Instruction, Mask], None]
EXECUTORS: dict[str, Executor] = {}


def executes(*ops: str) -> Callable[[Executor], Executor]:
    """Registers the function that executes these opcodes."""

    def register(function: Executor) -> Executor:
        EXECUTORS.update(dict.fromkeys(ops, function))
        return function

    return register


def kind(register: str) -> np.dtype[np.generic]:
    """How a register is kept: by the letters of its name, as the compiler declares them."""
    return _KINDS[register.rstrip("0123456789")]


class Block:
    """A block of threads.

    Args:
        program: what it executes.
        parameters: an integer for each parameter, as the bits of 64.
        memory: the buffers.
        shared: its shared memory.
        place: the block's number in x, y and z; ``grid`` is how many there are.
    """

    def __init__(
        self,
        program: Program,
        parameters: Sequence[int],
        memory: GlobalMemory,
        shared: Memory,
        place: tuple[int, int, int],
        grid: tuple[int, int, int],
    ) -> None:
        T = program.threads
        self.program, self.memory, self.place, self.grid = program, memory, place, grid
        self.parameters = dict(zip(program.parameters, parameters, strict=True))
        self.shared = shared
        self.thread = np.arange(T, dtype=np.uint32)
        self.warps: Index = np.arange(T, dtype=np.int64) // WARP
        self.number = place[0] + grid[0] * (place[1] + grid[1] * place[2])
        self.epoch = 0
        self.registers: dict[str, Lanes] = {}
        self.copies: list[list[tuple[Index, int, Index]]] = [[]]  # groups of cp.async: addresses, bytes, threads
        self.at = np.zeros(T, np.int64)  # the next instruction of each thread
        self.waiting = np.zeros(T, bool)
        self.executed: dict[str, int] = {}

    def run(self) -> None:
        """Executes the program to its end."""
        end = len(self.program.instructions)
        while (moving := (self.at < end) & ~self.waiting).any() or self._released(end):
            if not moving.any():
                continue
            here = int(self.at[moving].min())
            self._execute(self.program.instructions[here], moving & (self.at == here), here)

    def _released(self, end: int) -> bool:
        """Lets threads go on once all that are left wait at the barrier; False when none is left."""
        left = self.at < end
        if not left.any():
            return False
        self.waiting[:] = False
        self.epoch += 1
        return True

    def _execute(self, instruction: Instruction, active: Mask, here: int) -> None:
        self.at[active] = here + 1
        if instruction.guard is not None:
            chosen = self.read(instruction.guard)
            active = active & (~chosen if instruction.negated else chosen)
        opcode = ".".join((instruction.op, *instruction.parts))
        self.executed[opcode] = self.executed.get(opcode, 0) + 1
        if not active.any():
            return
        executor = EXECUTORS.get(instruction.op)
        if executor is None:
            raise NotImplementedError(f"{instruction.source}: the emulator does not know {instruction.text!r}")
        try:
            with np.errstate(all="ignore"):
                executor(self, instruction, active)
        except Fault as fault:
            raise Fault(f"{instruction.source}, block {self.number}: {fault} ({instruction.text})") from None

    # ------------------------------------------------------------------------------------------------- operands

    def read(self, operand: str, dtype: np.dtype[np.generic] | type[np.generic] = np.uint32) -> Lanes:
        """The value of a register, a special register or a constant in all threads; a constant as ``dtype``."""
        if operand in self.registers:
            return self.registers[operand]
        if operand.startswith("%"):
            return self._special(operand)
        if operand in ("true", "false"):
            return np.full(len(self.thread), operand == "true")
        if operand.startswith(("0f", "0d")):
            return np.full(len(self.thread), int(operand[2:], 16), np.uint32 if operand[1] == "f" else np.uint64)
        if operand == "global_smem":
            return np.zeros(len(self.thread), dtype)
        bits = 8 * np.dtype(dtype).itemsize
        return np.full(len(self.thread), int(operand.rstrip("U"), 0) & ((1 << bits) - 1), f"u{bits // 8}")

    def _special(self, operand: str) -> Lanes:
        name, _, axis = operand.partition(".")
        place = "xyz".find(axis)
        match name:
            case "%tid":
                return self.thread if place == 0 else np.zeros_like(self.thread)
            case "%ctaid":
                return np.full_like(self.thread, self.place[place])
            case "%nctaid":
                return np.full_like(self.thread, self.grid[place])
            case "%laneid":
                return self.thread % np.uint32(WARP)
        return np.full(len(self.thread), UNWRITTEN & ((1 << 8 * kind(operand).itemsize) - 1)).astype(kind(operand))

    def read_float(self, operand: str) -> NDArray[np.float32]:
        return self.read(operand).view(np.float32)

    def read_integer(self, operand: str, type: str) -> Lanes:
        """As 64 bits with the sign that its type (s32, u16, b64, …) gives it."""
        if type[0] not in "sub" or type == "bf16":
            raise NotImplementedError(f"{operand} as an integer of type {type}")
        bits = int(type[1:])
        value = self.read(operand, np.dtype(f"u{bits // 8}")).astype(f"u{bits // 8}")
        return value.view(f"i{bits // 8}").astype(np.int64) if type[0] == "s" else value.astype(np.uint64)

    def write(self, register: str, value: Lanes, active: Mask) -> None:
        """Sets a register in the active threads; integers lose the bits that it has no room for."""
        if register == "_":
            return
        dtype = kind(register)
        if value.dtype == np.float32:
            value = value.view(np.uint32)
        elif value.dtype == np.float64:
            value = value.view(np.uint64)
        value = value if value.dtype == dtype else value.astype(dtype)
        self.registers[register] = value.copy() if active.all() else np.where(active, value, self.read(register))

    def addresses(self, operand: str) -> Index:
        base, offset = address(operand)
        return self.read(base, np.uint64).astype(np.int64) + offset

    def who(self, active: Mask) -> Who:
        return Who(self.number, self.epoch, self.warps[active])

    def whole_warps(self, active: Mask, what: str) -> None:
        """Refuses an instruction of a whole warp of which some threads are elsewhere."""
        some = active.reshape(-1, WARP)
        if (some.any(1) & ~some.all(1)).any():
            raise Fault(f"{what} by part of a warp; all 32 threads have to take part")


def vector(block: Block, operand: str, dtype: np.dtype[np.generic]) -> Bytes:
    """The registers of a vector as bytes [threads, n]."""
    values = np.stack([block.read(name, dtype).astype(dtype) for name in registers(operand)], 1)
    return np.ascontiguousarray(values).view(np.uint8)
