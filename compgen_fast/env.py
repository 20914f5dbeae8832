"""What this machine can run: versions, devices, and which backend serves each op and why the others do not.

For people (a table) and for bug reports (JSON with the same content). It only reports; the choice of a backend is made
in `compgen_fast.ops.backends`.
"""

import json
import platform
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import get_args

import torch
from rich.console import Console

from compgen_fast import __version__
from compgen_fast.cpu import Cpu, this_cpu
from compgen_fast.models.attention import attention_backend
from compgen_fast.ops import backends
from compgen_fast.ops.backends import Device
from compgen_fast.tables import Sheet

BUILD_INFO = Path(__file__).with_name("_build_info.json")


@dataclass(frozen=True)
class Extension:
    """How compgen_fast._C was built, or why it was not."""

    error: str | None
    compiler: str | None = None
    flags: tuple[str, ...] = ()
    torch: str | None = None
    python: str | None = None


@dataclass(frozen=True)
class Service:
    """Who serves one op on one device; nobody, if COMPGEN_BACKEND names a backend that cannot."""

    serves: backends.Backend | None
    backends: tuple[backends.Status, ...]


@dataclass(frozen=True)
class SelfAttention:
    """Whose kernel serves the encoders' self-attention on one device."""

    serves: str
    reason: str


@dataclass(frozen=True)
class Environment:
    versions: dict[str, str | None]
    extension: Extension
    cpu: Cpu
    simd: str
    """What torch's own kernels use of the CPU's instruction sets."""
    gpus: tuple[str, ...]
    ops: dict[str, dict[Device, Service]]
    self_attention: dict[Device, SelfAttention]


def collect() -> Environment:
    return Environment(
        versions={
            "compgen-fast": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": installed_version("triton"),
            "numpy": installed_version("numpy"),
        },
        extension=read_extension(BUILD_INFO),
        cpu=this_cpu(),
        simd=torch.backends.cpu.get_cpu_capability(),
        gpus=gpu_names(),
        ops={op: {device: service(op, device) for device in get_args(Device)} for op in backends.ops()},
        self_attention={device: SelfAttention(*attention_backend(device)) for device in get_args(Device)},
    )


def installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def read_extension(path: Path) -> Extension:
    if not path.exists():
        return Extension(error="never built; run `make setup` or `pip install --no-build-isolation -e .`")
    return Extension(**json.loads(path.read_text()))


def gpu_names() -> tuple[str, ...]:
    kind = "ROCm" if torch.version.hip else "CUDA"
    return tuple(f"{torch.cuda.get_device_name(i)} ({kind})" for i in range(torch.cuda.device_count()))


def service(op: str, device: Device) -> Service:
    statuses = backends.statuses(op, device)
    return Service(next((status.backend for status in statuses if status.live), None), statuses)


def to_json(environment: Environment) -> str:
    return json.dumps(asdict(environment), indent=2)


def show(environment: Environment, console: Console) -> None:
    console.print(machine_table(environment))
    console.print(ops_table(environment))


def machine_table(environment: Environment) -> Sheet:
    table = Sheet("what", "found", words=("what", "found"), folds=("found",))
    for name, found in environment.versions.items():
        table.add_row(name, found or "not installed")
    extension, cpu = environment.extension, environment.cpu
    table.add_row("C++ kernels", extension.error or "compiled from csrc/")
    if extension.compiler:
        table.add_row("compiler", f"{extension.compiler}\n{' '.join(extension.flags)}")
    table.add_row("CPU", str(cpu))
    sets = "not told by this system" if cpu.instruction_sets is None else ", ".join(cpu.instruction_sets) or "none"
    table.add_row("instruction sets", f"{sets}\ntorch uses {environment.simd}")
    table.add_row("GPU", "\n".join(environment.gpus) or "none")
    for device, attention in environment.self_attention.items():
        table.add_row(f"self-attention, {device}", f"{attention.serves}: {attention.reason}")
    return table


def ops_table(environment: Environment) -> Sheet:
    """One block per device and per set of ops that are served alike: most ops differ in nothing."""
    head = ("device", "op", "backend", "", "why")
    table = Sheet(*head, words=head, folds=("why",))
    for device in get_args(Device):
        for alike, names in ops_served_alike(environment, device).items():
            for row, status in enumerate(alike.backends):
                first = row == 0
                table.add_row(
                    device if first else "",
                    "\n".join(names) if first else "",
                    status.backend,
                    "serves" if status.live else "",
                    status.reason,
                    style="" if status.live else "dim",
                    end_section=row == len(alike.backends) - 1,
                )
    return table


def ops_served_alike(environment: Environment, device: Device) -> dict[Service, list[str]]:
    groups: dict[Service, list[str]] = {}
    for op, by_device in environment.ops.items():
        groups.setdefault(by_device[device], []).append(op)
    return groups


def run(as_json: bool) -> int:
    environment = collect()
    if as_json:
        print(to_json(environment))
    else:
        show(environment, Console())
    return 0
