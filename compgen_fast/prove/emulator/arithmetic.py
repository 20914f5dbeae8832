"""Instructions that calculate, one thread at a time: integers, fp32, comparisons, conversions.

fp32 is rounded as the GPU rounds it where PTX says how (add, mul, fma, div.rn, cvt); what PTX leaves approximate (ex2,
rcp, rsqrt, div.full, …) is exact here, so an emulated result may be a little better than a real one. ``ftz`` is
honoured: subnormal inputs and results become zero.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from compgen_fast.prove.emulator.machine import Block, Lanes, Mask, executes, kind
from compgen_fast.prove.emulator.parser import Instruction

Floats = NDArray[np.float32]
_LEAST = np.finfo(np.float32).tiny


def _flushed(x: Floats, instruction: Instruction) -> Floats:
    return np.where(np.abs(x) < _LEAST, np.copysign(np.float32(0), x), x) if "ftz" in instruction.parts else x


def _fma(x: Floats, y: Floats, z: Floats) -> Floats:
    """Rounded once. The product is exact in fp64; the sum there is rounded to odd, so that the second rounding, to
    fp32, does no harm.
    """
    product = x.astype(np.float64) * y
    total = product + z
    error = (product - (total - z)) + (z - (total - (total - z)))  # what the sum in fp64 lost
    inexact = (error != 0) & np.isfinite(total) & (total.view(np.uint64) & np.uint64(1) == 0)
    towards = np.where((error > 0) == (total > 0), 1, -1)
    odd = (total.view(np.int64) + np.where(inexact, towards, 0)).view(np.float64)
    return odd.astype(np.float32)


_FLOATS: dict[str, Callable[..., Floats]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "fma": _fma, "max": np.fmax,
    "min": np.fmin, "neg": np.negative, "abs": np.abs, "sqrt": np.sqrt, "rcp": lambda x: np.float32(1) / x,
    "rsqrt": lambda x: (1 / np.sqrt(x.astype(np.float64))).astype(np.float32),
    "ex2": lambda x: np.exp2(x.astype(np.float64)).astype(np.float32),
    "lg2": lambda x: np.log2(x.astype(np.float64)).astype(np.float32),
    "sin": lambda x: np.sin(x.astype(np.float64)).astype(np.float32),
    "cos": lambda x: np.cos(x.astype(np.float64)).astype(np.float32),
    "tanh": lambda x: np.tanh(x.astype(np.float64)).astype(np.float32),
}  # fmt: skip
_INTEGERS: dict[str, Callable[..., Lanes]] = {
    "add": np.add, "sub": np.subtract, "max": np.maximum, "min": np.minimum, "neg": np.negative, "abs": np.abs,
}  # fmt: skip
_COMPARISONS: dict[str, Callable[..., Mask]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip


@executes(*_FLOATS)
def _calculate(block: Block, instruction: Instruction, active: Mask) -> None:
    to, *inputs = instruction.operands
    if instruction.type == "f32":
        values = [_flushed(block.read_float(each), instruction) for each in inputs]
        block.write(to, _flushed(_FLOATS[instruction.op](*values).astype(np.float32), instruction), active)
    elif instruction.type[0] in "su":
        block.write(to, _whole(block, instruction), active)
    else:
        raise NotImplementedError(f"{instruction.source}: {instruction.text!r} of {instruction.type}")


@executes("mad", "rem")
def _whole_only(block: Block, instruction: Instruction, active: Mask) -> None:
    block.write(instruction.operands[0], _whole(block, instruction), active)


def _whole(block: Block, instruction: Instruction) -> Lanes:
    """The result of integers, in 64 bits."""
    type = instruction.type
    values = [block.read_integer(each, type) for each in instruction.operands[1:3]]
    match instruction.op:
        case "mul" | "mad":
            product = _high(values[0], values[1], int(type[1:])) if "hi" in instruction.parts else values[0] * values[1]
            if instruction.op == "mul":
                return product
            wide = "wide" in instruction.parts
            return product.view(np.uint64) + block.read_integer(
                instruction.operands[3], "u64" if wide else f"u{type[1:]}"
            )
        case "div":
            return _truncated(*values)
        case "rem":
            left: Lanes = values[0] - _truncated(*values) * values[1]
            return left
    return _INTEGERS[instruction.op](*values)


def _high(x: Lanes, y: Lanes, bits: int) -> Lanes:
    """The upper half of the product."""
    return np.array([(int(a) * int(b)) >> bits & 0xFFFF_FFFF_FFFF_FFFF for a, b in zip(x, y, strict=True)], np.uint64)


def _truncated(x: Lanes, y: Lanes) -> Lanes:
    """Division towards zero; by zero, all ones, as the GPU has it."""
    nonzero = np.where(y == 0, 1, y).astype(x.dtype)
    size = np.abs(x) // np.abs(nonzero)
    signed = np.where((x < 0) != (nonzero < 0), -size.astype(np.int64), size.astype(np.int64)).astype(x.dtype)
    return np.where(y == 0, np.full_like(x, -1 if x.dtype == np.int64 else np.iinfo(np.uint64).max), signed)


@executes("and", "or", "xor", "not")
def _bits(block: Block, instruction: Instruction, active: Mask) -> None:
    to, *inputs = instruction.operands
    values = [block.read(each, kind(to)) for each in inputs]
    by = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert}
    block.write(to, by[instruction.op](*values), active)


@executes("shl", "shr")
def _shift(block: Block, instruction: Instruction, active: Mask) -> None:
    """Shifts by more than the width leave nothing, or the sign."""
    to, value, by = instruction.operands
    bits = int(instruction.type[1:])
    x = block.read_integer(value, instruction.type)
    amount = block.read(by).astype(np.int64)
    few = np.minimum(amount, 63).astype(x.dtype)
    if instruction.op == "shr":
        block.write(to, x >> few, active)
    else:
        block.write(to, np.where(amount < bits, x << few, 0), active)


@executes("bfe")
def _bit_field(block: Block, instruction: Instruction, active: Mask) -> None:
    to, value, start, length = instruction.operands
    x = block.read_integer(value, f"u{instruction.type[1:]}").astype(np.int64)
    first, count = (block.read(each).astype(np.int64) for each in (start, length))
    field = x >> first & (1 << count) - 1
    if instruction.type[0] == "s":
        field = np.where(field >> np.maximum(count - 1, 0) & 1, field - (1 << count), field)
    block.write(to, np.where(count == 0, 0, field), active)


@executes("setp")
def _compare(block: Block, instruction: Instruction, active: Mask) -> None:
    to, first, second = instruction.operands
    comparison, type = instruction.parts[0], instruction.type
    if type.endswith("x2"):
        _compare_pairs(block, instruction, active)
        return
    if type[0] in "sub" and type != "bf16":
        whole = _COMPARISONS[{"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}.get(comparison, comparison)]
        block.write(to, whole(*(block.read_integer(each, type) for each in (first, second))), active)
        return
    a, b = (_flushed(as_float(block, each, type), instruction) for each in (first, second))
    block.write(to, _compared(a, b, comparison), active)


def _compare_pairs(block: Block, instruction: Instruction, active: Mask) -> None:
    """Two 16-bit numbers in a register, and a predicate for each: the lower one's first."""
    predicates, *pairs = instruction.operands
    value = bf16_value if instruction.type == "bf16x2" else _f16_value
    for place, predicate in enumerate(predicates.split("|")):
        a, b = (value(block.read(each) >> np.uint32(16 * place) & np.uint32(0xFFFF)) for each in pairs)
        block.write(predicate, _compared(a, b, instruction.parts[0]), active)


def _compared(a: Floats, b: Floats, comparison: str) -> Mask:
    unordered = np.isnan(a) | np.isnan(b)
    match comparison:
        case "num":
            return ~unordered
        case "nan":
            return unordered
        case _ if comparison in _COMPARISONS:
            return _COMPARISONS[comparison](a, b) & ~unordered
    return _COMPARISONS[comparison[:-1]](a, b) | unordered  # equ, neu, ltu, …: also true where one is NaN


@executes("cvt")
def _convert(block: Block, instruction: Instruction, active: Mask) -> None:
    to, *inputs = instruction.operands
    target, source = instruction.parts[-2:]
    if target in ("bf16x2", "f16x2"):
        half = bf16_bits if target == "bf16x2" else f16_bits
        high, low = (half(block.read_float(each)).astype(np.uint32) for each in inputs)
        block.write(to, high << np.uint32(16) | low, active)
    elif source == "f32":
        block.write(to, _from_float(block.read_float(inputs[0]), target), active)
    elif target == "f32":
        block.write(to, as_float(block, inputs[0], source), active)
    elif target[0] in "subi" and source[0] in "subi":
        block.write(to, block.read_integer(inputs[0], source).view(np.uint64), active)
    else:
        raise NotImplementedError(f"{instruction.source}: {instruction.text!r}")


def _from_float(x: Floats, target: str) -> Lanes:
    match target:
        case "bf16":
            return bf16_bits(x)
        case "f16":
            return f16_bits(x)
        case "tf32":  # round to nearest, ties away from zero
            return x.view(np.uint32) + np.uint32(0x1000) & np.uint32(0xFFFFE000)
        case "f32":
            return x
        case "f64":
            return x.astype(np.float64)
    limits = np.iinfo(f"{'i' if target[0] == 's' else 'u'}{int(target[1:]) // 8}")
    whole = np.clip(np.where(np.isnan(x), 0, np.trunc(x.astype(np.float64))), limits.min, limits.max)
    return whole.astype(np.int64).view(np.uint64)


def as_float(block: Block, operand: str, source: str) -> Floats:
    """A register of any type as fp32."""
    match source:
        case "f32":
            return block.read_float(operand)
        case "bf16":
            return bf16_value(block.read(operand, np.uint16))
        case "f16":
            return _f16_value(block.read(operand, np.uint16))
        case "f64":
            return block.read(operand, np.uint64).view(np.float64).astype(np.float32)
    return block.read_integer(operand, source).astype(np.float32)


def bf16_bits(x: Floats) -> NDArray[np.uint16]:
    """To the nearest, ties to even; every NaN becomes the same one."""
    bits = x.view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1)) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint32(0x7FFF), rounded).astype(np.uint16)


def bf16_value(bits: Lanes) -> Floats:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _f16_value(bits: Lanes) -> Floats:
    return bits.astype(np.uint16).view(np.float16).astype(np.float32)


def f16_bits(x: Floats) -> NDArray[np.uint16]:
    return x.astype(np.float16).view(np.uint16)
