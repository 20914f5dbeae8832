"""What the CPU is: family and model where its name says little, the instruction sets that kernels use, and cores."""

import os
import platform
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
FAMILY = {
    "cpu family": "family", "model": "model", "stepping": "stepping",
    "CPU implementer": "implementer", "CPU part": "part", "CPU variant": "variant",
}  # fmt: skip
INSTRUCTION_SETS = {
    "avx2": "AVX2",
    "fma": "FMA",
    "avx512f": "AVX-512 F",
    "avx512_bf16": "AVX-512 BF16",
    "avx512_vnni": "AVX-512 VNNI",
    "amx_tile": "AMX",
    "amx_bf16": "AMX BF16",
    "amx_int8": "AMX INT8",
    "asimd": "NEON",
    "sve": "SVE",
    "sve2": "SVE2",
    "bf16": "BF16",
    "i8mm": "I8MM",
}
"""The kernel's word in /proc/cpuinfo, on x86 and on ARM, and the maker's."""


@dataclass(frozen=True)
class Cpu:
    """``family`` is empty and ``instruction_sets`` are None where the system does not tell, as on a Mac."""

    model: str
    family: str
    instruction_sets: tuple[str, ...] | None
    cores: int
    usable_cores: int
    """Those that this process may use: a container or a scheduler often grants fewer than the machine has."""

    def __str__(self) -> str:
        name = f"{self.model}, {self.family}" if self.family else self.model
        return f"{name}; {self.usable_cores} of {self.cores} cores usable"


def this_cpu() -> Cpu:
    told = _first(CPUINFO.read_text()) if CPUINFO.exists() else {}
    flags = told.get("flags", told.get("Features"))
    cores = os.cpu_count() or 1
    return Cpu(
        model=told.get("model name") or platform.processor() or platform.machine(),
        family=", ".join(f"{name} {told[key]}" for key, name in FAMILY.items() if key in told),
        instruction_sets=None if flags is None else _known(flags.split()),
        cores=cores,
        usable_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores,
    )


def _known(flags: Collection[str]) -> tuple[str, ...]:
    return tuple(name for word, name in INSTRUCTION_SETS.items() if word in flags)


def _first(cpuinfo: str) -> dict[str, str]:
    """What is told of the first core, or of the first kind of core."""
    pairs = (line.split(":", 1) for line in cpuinfo.split("\n\n")[0].splitlines() if ":" in line)
    return {name.strip(): value.strip() for name, value in pairs}
