"""Build the C++ kernels of csrc/ into `compgen_fast._C`, if this machine can.

Everything declarative lives in pyproject.toml. This file holds what cannot be declared: the compiler, its flags, and
what happens without one. The package then installs all the same and runs on the torch backend; the reason is written to
`compgen_fast/_build_info.json`, where `cgf env` reads it.
"""

import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from glob import glob
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent
PACKAGE = "compgen_fast"
MAPPED = {f"{PACKAGE}.kernels": "kernels", f"{PACKAGE}.bench": "bench"}


def find_compiler() -> tuple[str | None, str | None]:
    """The C++ compiler to use, or why there is none: one of the two is None."""
    if chosen := os.environ.get("CXX"):
        if shutil.which(shlex.split(chosen)[0]):
            return chosen, None
        return None, f"no C++ compiler: CXX names {chosen}, which is not on PATH"
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return name, None
    return None, "no C++ compiler: CXX is not set, and c++, g++ and clang++ are not on PATH"


# What `make sanitize` compiles with: the first fault ends the process, with a report that names lines. Python's own
# flags often bring -fwrapv, under which a signed overflow is no fault.
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
SANITIZED = ["-O1", "-g", "-fno-omit-frame-pointer", "-fno-wrapv", *SANITIZERS]


def compile_flags(machine: str, system: str, portable: bool, sanitized: bool = False) -> list[str]:
    """Flags for one kind of machine. A wheel must run elsewhere (portable); a source build only here."""
    flags = ["-std=c++20", *(SANITIZED if sanitized else ["-O3", "-g0"]), "-ffp-contract=fast"]
    is_x86 = machine.lower() in ("x86_64", "amd64")
    if not portable:
        flags.append("-march=native")
    elif is_x86:
        flags.append("-march=x86-64-v3")
    if system == "Linux":
        flags.append("-fopenmp")  # without it at::parallel_for compiles to a plain loop
    return flags


def compiler_version(compiler: str) -> str:
    answer = subprocess.run([*shlex.split(compiler), "--version"], capture_output=True, text=True, check=False)
    return answer.stdout.partition("\n")[0] or compiler


def mapped_packages() -> dict[str, str]:
    """Package name → folder for the packages that live beside compgen_fast/, with their subpackages."""
    folders = dict(MAPPED)
    for package, folder in MAPPED.items():
        for sub in find_packages(str(ROOT / folder)):
            folders[f"{package}.{sub}"] = f"{folder}/{sub.replace('.', '/')}"
    return folders


def build_command(flags: list[str]) -> type:
    """The build_ext command. A function, so that find_compiler can be imported without paying for torch."""
    import torch
    from torch.utils.cpp_extension import BuildExtension

    class BuildOrExplain(BuildExtension):
        """Compile the kernels; on failure install without them and write down why."""

        def initialize_options(self) -> None:
            super().initialize_options()
            # pip builds in a new temporary folder each time; a fixed one lets ninja reuse the objects.
            self.build_temp = str(ROOT / "build" / "objects")

        def run(self) -> None:
            self.compiler_found, self.error = find_compiler()
            super().run()
            package = ROOT / PACKAGE if self.inplace else Path(self.build_lib) / PACKAGE
            if self.error:
                self.go_without(package)
            self.write_build_info(package)

        def build_extensions(self) -> None:
            if self.compiler_found:
                os.environ["CXX"] = self.compiler_found
                try:
                    super().build_extensions()
                except Exception as failure:
                    self.error = f"compiling csrc/ with {self.compiler_found} failed: {failure}"
            for extension in self.extensions:
                extension.optional = self.error is not None  # else setuptools insists on finding the library

        def go_without(self, package: Path) -> None:
            print(f"\nWARNING: compgen-fast installs without its C++ kernels: {self.error}.", file=sys.stderr)
            print("It runs on the torch backend, which is slower.\n", file=sys.stderr)
            for stale in package.glob("_C*.so"):
                stale.unlink()

        def write_build_info(self, package: Path) -> None:
            info = {
                "error": self.error,
                "compiler": compiler_version(self.compiler_found) if self.compiler_found else None,
                "flags": flags,
                "torch": torch.__version__,
                "python": platform.python_version(),
            }
            package.mkdir(parents=True, exist_ok=True)
            (package / "_build_info.json").write_text(json.dumps(info, indent=2) + "\n")

    return BuildOrExplain


def main() -> None:
    try:
        from torch.utils.cpp_extension import CppExtension
    except ImportError:
        sys.exit(
            "compgen-fast compiles against the torch it will run with, and this build cannot import torch.\n"
            "Run `pip install torch==2.13.0 setuptools ninja`, then install with `pip install --no-build-isolation`."
        )
    os.chdir(ROOT)
    os.environ.setdefault("MAX_JOBS", "2")
    portable = os.environ.get("COMPGEN_PORTABLE") == "1"
    sanitized = os.environ.get("COMPGEN_SANITIZE") == "1"
    flags = compile_flags(platform.machine(), platform.system(), portable, sanitized)
    kernels = CppExtension(
        f"{PACKAGE}._C",
        sorted(glob("csrc/*.cpp")),
        depends=sorted(glob("csrc/*.h")),
        extra_compile_args=flags,
        extra_link_args=[flag for flag in flags if flag in ("-fopenmp", *SANITIZERS)],
    )
    mapped = mapped_packages()
    setup(
        packages=[*find_packages(include=[PACKAGE, f"{PACKAGE}.*"]), *mapped],
        package_dir=mapped,
        ext_modules=[kernels],
        cmdclass={"build_ext": build_command(flags)},
    )


# pip and setuptools run this file as __main__; the tests import it for find_compiler and compile_flags.
if __name__ == "__main__":
    main()
