"""Compile Triton kernels for GPUs this machine does not have, and read what the compiler made of them.

`recorded_launches` runs a launcher without launching: it notes each kernel with the arguments it was given, which may
be meta tensors. `cost` then compiles one such launch for a target as the just-in-time compiler would, with the same
specialisation (pointers and strides divisible by 16, integers that are 1, arguments left out). Needs TRITON_INTERPRET
unset.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


@dataclass(frozen=True)
class Launch:
    """One kernel with the arguments a launcher gave it."""

    kernel: JITFunction
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    grid: tuple[int, ...]

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)


class Argument(NamedTuple):
    """What one parameter of a compiled kernel is given, and its type as Triton writes it: ``*bf16``, ``i32``, …"""

    name: str
    value: Any
    type: str


@dataclass(frozen=True)
class Figures:
    """What one compiled kernel costs: per thread (registers), per program (shared bytes), and how it reaches memory."""

    registers: int
    spills: int
    shared: int
    matrix_instructions: int
    loads: dict[int, int]  # bits per thread → instructions that load from global memory, straight or to shared memory
    stores: dict[int, int]
    instructions: dict[str, int]  # opcode of the machine (SASS, GCN), without its modifiers → instructions in the code
    compile_seconds: float | None  # None when the code came from Triton's cache


@contextlib.contextmanager
def recorded_launches() -> Iterator[list[Launch]]:
    """Within the block, a kernel launch only appends to the list."""
    launches: list[Launch] = []

    def note(self: JITFunction, *arguments: Any, grid: tuple[int, ...], warmup: bool, **options: Any) -> None:
        launches.append(Launch(self, arguments, options, grid))

    with mock.patch.object(JITFunction, "run", note):
        yield launches


def identity(launch: Launch, target: GPUTarget) -> str:
    """Two launches of one identity are one compiled kernel."""
    source, options, _ = _specialised(launch, target)
    return f"{source.hash()} {sorted(options.items())}"


def cost(launch: Launch, target: GPUTarget) -> Figures:
    """What the launch is compiled to."""
    seconds: list[float | None] = []

    def note(*, times: Any, cache_hit: bool, **others: Any) -> None:
        seconds.append(None if cache_hit else times.total / 1e6)

    with mock.patch.object(knobs.compilation, "listener", note):
        compiled, _ = compile_with_arguments(launch, target)
    read = _amd_figures if target.backend == "hip" else _nvidia_figures
    return read(compiled, seconds[0])


def compile_with_arguments(launch: Launch, target: GPUTarget) -> tuple[CompiledKernel, list[Argument]]:
    """The compiled kernel and its arguments, in the order of its parameters: those that are left when constants, and
    what was specialised to one, are gone, and tuples are taken apart.
    """
    source, options, bound = _specialised(launch, target)
    compiled = triton.compile(source, target=target, options=options)
    return compiled, [each for name, type in source.signature.items() for each in _flattened(name, bound[name], type)]


def _specialised(launch: Launch, target: GPUTarget) -> tuple[ASTSource, dict[str, Any], dict[str, Any]]:
    """What to compile, with which options, and the arguments by name."""
    kernel, backend = launch.kernel, make_backend(target)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = bind(*launch.arguments, **launch.options)
    names = {parameter.name for parameter in kernel.params}
    keywords = {name: value for name, value in launch.options.items() if name not in names}
    packed, signature, constants, attributes = kernel._pack_args(backend, keywords, bound, specialization, options)
    return ASTSource(kernel, signature, constants, attributes), dict(packed.__dict__), bound


def _flattened(name: str, value: Any, type: Any) -> Iterator[Argument]:
    if isinstance(type, tuple | list):
        for part, part_type in zip(value, type, strict=True):
            yield from _flattened(name, part, part_type)
    elif type != "constexpr":
        yield Argument(name, value, type)


def _nvidia_figures(compiled: CompiledKernel, compile_seconds: float | None) -> Figures:
    ptx, (usage, sass) = compiled.asm["ptx"], _read_back(compiled.asm["cubin"])
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global.*\], *(\w+)", ptx)  # global to shared memory, so many bytes
    return Figures(
        registers=_number(r"REG:(\d+)", usage),
        spills=_number(r"STACK:(\d+)", usage) + _number(r"LOCAL:(\d+)", usage),
        shared=compiled.metadata.shared,
        matrix_instructions=len(re.findall(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)", ptx)),
        loads=_widths(_ptx_bits("ld", ptx) + [8 * int(size, 0) for size in copies]),
        stores=_widths(_ptx_bits("st", ptx)),
        instructions=_opcodes(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z]\w*)", sass),
        compile_seconds=compile_seconds,
    )


def _read_back(cubin: bytes) -> tuple[str, str]:
    """The resources that machine code uses, and the code itself as text."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        sass = [knobs.nvidia.nvdisasm.path, "-c", file.name]
        first, second = (subprocess.run(each, capture_output=True, text=True, check=True) for each in (usage, sass))
        return first.stdout, second.stdout


def _opcodes(pattern: str, assembly: str) -> dict[str, int]:
    counts = Counter(re.findall(pattern, assembly, re.MULTILINE))
    return {opcode: counts[opcode] for opcode in sorted(counts) if opcode not in ("NOP", "s_nop")}  # padding


def _ptx_bits(kind: str, ptx: str) -> list[int]:
    found = re.findall(rf"\b{kind}\.global(?:\.[a-z]\w*(?:::\w+)*)*?(?:\.v(\d))?\.[bfsu](\d+)\b", ptx)
    return [int(count or 1) * int(bits) for count, bits in found]


def _amd_figures(compiled: CompiledKernel, compile_seconds: float | None) -> Figures:
    assembly = compiled.asm["amdgcn"]
    return Figures(
        registers=_number(r"\.vgpr_count:\s+(\d+)", assembly),
        # scratch is memory; a scalar register that spills goes to a lane of a vector register and costs none
        spills=_number(r"\.vgpr_spill_count:\s+(\d+)", assembly)
        + _number(r"\.private_segment_fixed_size:\s+(\d+)", assembly),
        shared=compiled.metadata.shared,
        matrix_instructions=len(re.findall(r"\bv_mfma_", assembly)),
        loads=_widths(_amd_bits("load", assembly)),
        stores=_widths(_amd_bits("store", assembly)),
        instructions=_opcodes(r"^\t((?:v|s|ds|global|buffer|flat|scratch)_\w+)", assembly),
        compile_seconds=compile_seconds,
    )


def _amd_bits(kind: str, assembly: str) -> list[int]:
    bits = {"ubyte": 8, "byte": 8, "ushort": 16, "short": 16, "sbyte": 8, "sshort": 16}
    found = re.findall(rf"\b(?:global|buffer)_{kind}_([a-z]+)(?:_d16(?:_hi)?)?(?:x(\d))?\b", assembly)
    return [bits.get(word, 32) * int(count or 1) for word, count in found]


def _widths(bits: list[int]) -> dict[int, int]:
    return {width: bits.count(width) for width in sorted(set(bits))}


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found, f"the compiler's report has no {pattern!r}"
    return int(found.group(1))
