"""Where threads go, and how the threads of a warp and of a block hear of each other."""

from collections.abc import Callable

import numpy as np

from compgen_fast.prove.emulator.machine import WARP, Block, Lanes, Mask, executes
from compgen_fast.prove.emulator.memory import Fault
from compgen_fast.prove.emulator.parser import Instruction


@executes("bra")
def _branch(block: Block, instruction: Instruction, active: Mask) -> None:
    block.at[active] = block.program.labels[instruction.operands[-1]]


@executes("ret")
def _return(block: Block, instruction: Instruction, active: Mask) -> None:
    block.at[active] = len(block.program.instructions)


@executes("bar", "barrier")
def _barrier(block: Block, instruction: Instruction, active: Mask) -> None:
    if "warp" in instruction.parts:
        return
    block.waiting |= active


@executes("shfl")
def _shuffle(block: Block, instruction: Instruction, active: Mask) -> None:
    """Each thread reads the register of another of its warp."""
    block.whole_warps(active, "shfl")
    to, value, by = (operand.split("|")[0] for operand in instruction.operands[:3])
    offset = block.read(by).astype(np.int64)
    thread, warp = block.thread.astype(np.int64), block.thread.astype(np.int64) // WARP * WARP
    match instruction.parts[1]:
        case "bfly":
            source = thread ^ offset
        case "idx":
            source = warp + offset % WARP
        case other:
            raise NotImplementedError(f"{instruction.source}: shfl.{other}")
    block.write(to, block.read(value)[source], active)


@executes("redux")
def _reduce(block: Block, instruction: Instruction, active: Mask) -> None:
    """One number of a warp, in all its threads."""
    block.whole_warps(active, "redux")
    by: dict[str, Callable[..., Lanes]] = {
        "max": np.max,
        "min": np.min,
        "add": np.sum,
        "or": np.bitwise_or.reduce,
        "and": np.bitwise_and.reduce,
    }
    values = block.read_integer(instruction.operands[1], instruction.type).reshape(-1, WARP)
    block.write(instruction.operands[0], np.repeat(by[instruction.parts[1]](values, axis=1), WARP), active)


@executes("cp")
def _copy(block: Block, instruction: Instruction, active: Mask) -> None:
    """cp.async: from global to shared memory, in groups that are waited for."""
    if "commit_group" in instruction.parts:
        block.copies.append([])
    elif "wait_group" in instruction.parts or "wait_all" in instruction.parts:
        _wait(block, int(instruction.operands[0], 0) if instruction.operands else 0)
    else:
        _begin(block, instruction, active)


def _begin(block: Block, instruction: Instruction, active: Mask) -> None:
    to, start, size = (
        block.addresses(instruction.operands[0]),
        block.addresses(instruction.operands[1]),
        int(instruction.operands[2], 0),
    )
    given = block.read(instruction.operands[3]) if len(instruction.operands) > 3 else np.full(len(active), size)
    if not np.isin(given[active], (0, size)).all():
        raise Fault(f"cp.async of a part of its {size} bytes; the emulator knows all or none")
    values = np.zeros((len(active), size), np.uint8)  # what is not read arrives as zeros
    reading = active & (given != 0)
    if reading.any():
        values[reading] = block.memory.load(start[reading], size, block.who(reading))
    block.shared.store(to[active], values[active], block.who(active), in_flight=True)
    block.copies[-1].append((to[active], size, active.nonzero()[0]))


def _wait(block: Block, left: int) -> None:
    """All groups that were committed have arrived, but for the last ``left``."""
    committed = block.copies[:-1]
    arrived = committed[: len(committed) - left] if left else committed
    for addresses, size, threads in (copy for group in arrived for copy in group):
        mask = np.zeros(len(block.thread), bool)
        mask[threads] = True
        block.shared.arrived(addresses, size, block.who(mask))
    block.copies = [*committed[len(arrived) :], block.copies[-1]]
