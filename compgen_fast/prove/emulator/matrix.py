"""The instructions of the matrix units: tiles from shared memory into registers, and products of them.

A tile is spread over the 32 threads of a warp: with g = lane / 4 and t = lane % 4, a thread holds row g, columns 2t and
2t + 1 of each 8×8 tile of 16-bit numbers, and of an fp32 accumulator the same.
"""

import numpy as np

from compgen_fast.prove.emulator.arithmetic import bf16_value
from compgen_fast.prove.emulator.machine import WARP, Block, Lanes, Mask, executes
from compgen_fast.prove.emulator.parser import Instruction, registers


@executes("ldmatrix")
def _load_tiles(block: Block, instruction: Instruction, active: Mask) -> None:
    """8×8 tiles of 16 bits; threads 8j to 8j + 7 of a warp tell where the rows of tile j begin."""
    block.whole_warps(active, "ldmatrix")
    to = registers(instruction.operands[0])
    rows = block.addresses(instruction.operands[1]).reshape(-1, WARP)
    live = np.all(active.reshape(-1, WARP), axis=1)
    for place, register in enumerate(to):
        starts = rows[live][:, 8 * place : 8 * place + 8]
        warps = np.repeat(np.arange(len(live))[live], 8)
        who = block.who(active)
        who = type(who)(who.block, who.epoch, warps)
        tiles = block.shared.load(starts.flatten(), 16, who).view(np.uint16).reshape(-1, 8, 8)
        tiles = tiles.swapaxes(1, 2) if "trans" in instruction.parts else tiles
        pairs = tiles.reshape(-1, 8, 4, 2).reshape(-1, WARP, 2).astype(np.uint32)
        values = np.zeros(rows.shape, np.uint32)
        values[live] = pairs[..., 0] | pairs[..., 1] << np.uint32(16)
        block.write(register, values.flatten(), active)


@executes("stmatrix")
def _store_tiles(block: Block, instruction: Instruction, active: Mask) -> None:
    """The way back: threads 8j to 8j + 7 of a warp tell where the rows of tile j go."""
    block.whole_warps(active, "stmatrix")
    rows = block.addresses(instruction.operands[0]).reshape(-1, WARP)
    live = np.all(active.reshape(-1, WARP), axis=1)
    warps = np.repeat(np.arange(len(live))[live], 8)
    who = block.who(active)
    for place, register in enumerate(registers(instruction.operands[1])):
        bits = block.read(register).reshape(-1, WARP)[live]
        halves = np.stack([bits & np.uint32(0xFFFF), bits >> np.uint32(16)], -1).astype(np.uint16)
        tiles = halves.reshape(-1, 8, 8)
        tiles = tiles.swapaxes(1, 2) if "trans" in instruction.parts else tiles
        starts = rows[live][:, 8 * place : 8 * place + 8].flatten()
        values = np.ascontiguousarray(tiles).view(np.uint8).reshape(-1, 16)
        block.shared.store(starts, values, type(who)(who.block, who.epoch, warps))


@executes("mma")
def _multiply(block: Block, instruction: Instruction, active: Mask) -> None:
    """D = A B + C of each warp: A [16, k], B [k, 8]; k is 16 for 16-bit numbers and 8 for TF32. Sums are in fp32."""
    block.whole_warps(active, "mma")
    to, a, b, c = (registers(operand) for operand in instruction.operands)
    element = instruction.parts[-3]
    if element not in ("bf16", "f16", "tf32"):
        raise NotImplementedError(f"{instruction.source}: {instruction.text!r}")
    A = _tile(block, a, element, across=2)
    B = _tile(block, b, element, across=1).swapaxes(1, 2)
    product = A.astype(np.float64) @ B.astype(np.float64)
    C = _accumulator([block.read_float(register) for register in c])
    D = (C + product).astype(np.float32)
    for register, value in zip(to, _spread(D), strict=True):
        block.write(register, value, active)


def _tile(block: Block, names: tuple[str, ...], element: str, across: int) -> Lanes:
    """The numbers of A [warps, 16, k] (registers go down, then right), or of B's columns [warps, 8, k]."""
    parts = []
    for name in names:
        bits = block.read(name).reshape(-1, 8, 4)
        if element == "tf32":
            parts.append((bits & np.uint32(0xFFFFE000)).view(np.float32))
            continue
        halves = np.stack([bits & np.uint32(0xFFFF), bits >> np.uint32(16)], -1).reshape(-1, 8, 8)
        parts.append(
            bf16_value(halves) if element == "bf16" else halves.astype(np.uint16).view(np.float16).astype(np.float32)
        )
    if across == 1:
        return np.concatenate(parts, 2)
    left, right = np.concatenate(parts[:2], 1), np.concatenate(parts[2:], 1)
    return np.concatenate([left, right], 2)


def _accumulator(values: list[Lanes]) -> Lanes:
    """Four registers as [warps, 16, 8]."""
    pairs = np.stack(values, -1).reshape(-1, 8, 4, 2, 2)  # warp, g, t, upper or lower half, left or right
    return pairs.transpose(0, 3, 1, 2, 4).reshape(-1, 16, 8)


def _spread(tile: Lanes) -> list[Lanes]:
    """[warps, 16, 8] as four registers."""
    pairs = tile.reshape(-1, 2, 8, 4, 2).transpose(0, 2, 3, 1, 4).reshape(-1, 4)
    return [np.ascontiguousarray(pairs[:, place]) for place in range(4)]
