"""What every study's results.json says of where it ran."""

import os
import platform
from importlib.metadata import version

import compgen_fast


def versions() -> dict[str, str]:
    packages = {name: version(name) for name in ("torch", "deepspeed", "numpy")}
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    return {
        "compgen_fast": compgen_fast.__version__,
        **packages,
        "python": platform.python_version(),
        "machine": machine,
    }
