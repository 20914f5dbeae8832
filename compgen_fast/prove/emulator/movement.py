"""Instructions that move numbers: between registers, from parameters, from and to memory."""

import numpy as np

from compgen_fast.prove.emulator.machine import Block, Lanes, Mask, executes, kind, vector
from compgen_fast.prove.emulator.parser import Instruction, registers


@executes("mov")
def _move(block: Block, instruction: Instruction, active: Mask) -> None:
    """A register, or one that is taken apart into several, or put together from them."""
    to, value = instruction.operands
    if to.startswith("{"):
        parts, whole = registers(to), block.read(value)
        bits = 8 * whole.dtype.itemsize // len(parts)
        for place, part in enumerate(parts):
            block.write(part, whole >> whole.dtype.type(bits * place), active)
    elif value.startswith("{"):
        parts = registers(value)
        bits = int(instruction.type[1:]) // len(parts)
        shifted = [
            block.read(part, np.dtype(f"u{bits // 8}")).astype(np.uint64) << np.uint64(bits * place)
            for place, part in enumerate(parts)
        ]
        block.write(to, np.bitwise_or.reduce(shifted), active)
    else:
        block.write(to, block.read(value, kind(to)), active)


@executes("ld")
def _load(block: Block, instruction: Instruction, active: Mask) -> None:
    to, source = instruction.operands
    if "param" in instruction.parts:
        value = np.full(len(active), block.parameters[source.strip("[]")], np.uint64)
        block.write(to, _extended(value, instruction.type), active)
        return
    width = int(instruction.type[1:]) // 8
    memory = block.shared if _in_shared(instruction) else block.memory
    found = memory.load(block.addresses(source)[active], width * instruction.count, block.who(active))
    values = np.zeros((len(active), instruction.count), f"u{width}")
    values[active] = found.view(f"u{width}")
    for place, register in enumerate(registers(to)):
        block.write(register, _extended(values[:, place], instruction.type), active)


@executes("st")
def _store(block: Block, instruction: Instruction, active: Mask) -> None:
    to, value = instruction.operands
    values = vector(block, value, np.dtype(f"u{int(instruction.type[1:]) // 8}"))
    memory = block.shared if _in_shared(instruction) else block.memory
    memory.store(block.addresses(to)[active], values[active], block.who(active))


def _in_shared(instruction: Instruction) -> bool:
    return any(part.startswith("shared") for part in instruction.parts)


def _extended(value: Lanes, type: str) -> Lanes:
    """A signed number in a register that is wider keeps its sign."""
    if type[0] != "s":
        return value
    bits = int(type[1:])
    return value.astype(f"u{bits // 8}").view(f"i{bits // 8}").astype(np.int64).view(np.uint64)


@executes("selp")
def _select(block: Block, instruction: Instruction, active: Mask) -> None:
    to, yes, no, which = instruction.operands
    block.write(to, np.where(block.read(which), block.read(yes, kind(to)), block.read(no, kind(to))), active)


@executes("prmt")
def _permute(block: Block, instruction: Instruction, active: Mask) -> None:
    """Four bytes chosen from the eight of two registers; the top bit of a choice repeats the byte's sign instead."""
    to, low, high, choice = instruction.operands
    both = block.read(low).astype(np.uint64) | block.read(high).astype(np.uint64) << np.uint64(32)
    chosen = block.read(choice).astype(np.uint64)
    result = np.zeros_like(both)
    for place in range(4):
        selector = chosen >> np.uint64(4 * place) & np.uint64(15)
        byte = both >> (np.uint64(8) * (selector & np.uint64(7))) & np.uint64(255)
        sign = np.where(byte & np.uint64(128), np.uint64(255), np.uint64(0))
        result |= np.where(selector & np.uint64(8), sign, byte) << np.uint64(8 * place)
    block.write(to, result, active)
