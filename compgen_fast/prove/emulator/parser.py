"""PTX text → instructions. Only what Triton's compiler writes: one kernel to a module, no calls.

The text of an instruction is ``@!%p1 ld.global.v2.b32 {%r1, %r2}, [%rd3+16];``: a guard, an opcode of several parts,
operands. Each keeps the line of the kernel's source that it came from, which errors name.
"""

import re
from dataclasses import dataclass

_INSTRUCTION = re.compile(r"(?:@(?P<negated>!?)(?P<guard>%p\d+)\s+)?(?P<opcode>[a-z][\w.:]*)\s*(?P<operands>.*)", re.S)
_SOURCE = re.compile(r"\.loc\b.*//\s*(\S+:\d+):\d+")


@dataclass(frozen=True)
class Instruction:
    op: str
    """The first part of the opcode, such as ``ld``; ``parts`` are the others."""
    parts: tuple[str, ...]
    operands: tuple[str, ...]
    guard: str | None
    """The predicate register without which it does nothing."""
    negated: bool
    source: str
    """File and line of the kernel, such as ``recon_error.py:61``."""
    text: str

    @property
    def type(self) -> str:
        """The last part: the type of the operands, such as ``b32``."""
        return self.parts[-1]

    @property
    def count(self) -> int:
        """2 or 4 of a vector instruction, else 1."""
        return next((int(part[1:]) for part in self.parts if re.fullmatch(r"v\d", part)), 1)


@dataclass(frozen=True)
class Program:
    name: str
    threads: int
    """Of one block."""
    parameters: tuple[str, ...]
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]
    """Where a branch to a label goes on: a place among the instructions."""


def parse(ptx: str) -> Program:
    """The one kernel of a module."""
    entry = re.search(r"\.visible \.entry (\w+)\((.*?)\)\s*\.reqntid (\d+)[^{]*\{(.*?)\n\}", ptx, re.S)
    if entry is None:
        raise ValueError(
            "parse: there is no .visible .entry with .reqntid in this text; expected PTX that Triton wrote"
        )
    name, parameters, threads, body = entry.groups()
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    source = ""
    for line in body.split("\n"):
        if found := _SOURCE.search(line):
            source = found.group(1)
        line = line.split("//")[0].strip()
        if not line or line.startswith("."):
            continue
        if line.endswith(":"):
            labels[line[:-1]] = len(instructions)
            continue
        for text in filter(None, (each.strip() for each in line.strip("{}").split(";"))):
            instructions.append(_instruction(text, source))
    names = tuple(re.findall(rf"\b{name}_param_\d+", parameters))
    return Program(name, int(threads), names, tuple(instructions), labels)


def _instruction(text: str, source: str) -> Instruction:
    found = _INSTRUCTION.fullmatch(text)
    if found is None:
        raise ValueError(f"parse: {text!r} is not an instruction")
    op, *parts = found["opcode"].split(".")
    return Instruction(op, tuple(parts), split(found["operands"]), found["guard"], bool(found["negated"]), source, text)


def split(operands: str) -> tuple[str, ...]:
    """Operands at commas outside of braces and brackets."""
    return tuple(each.strip() for each in re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,{\[])+", operands) if each.strip())


def registers(operand: str) -> tuple[str, ...]:
    """Those of a vector ``{%r1, %r2}``, or the operand itself."""
    return tuple(each.strip() for each in operand.strip("{} ").split(","))


def address(operand: str) -> tuple[str, int]:
    """``[%rd3+16]`` as its register or symbol and its offset."""
    base, _, offset = operand.strip("[] ").replace(" ", "").partition("+")
    return base, int(offset, 0) if offset else 0
