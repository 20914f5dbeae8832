"""Installing: with a compiler, without one, with a broken one, and from another folder."""

import importlib.util
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


def load_setup() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compgen_fast_setup", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


setup = load_setup()


def build(folder: Path, **environment: str) -> tuple[subprocess.CompletedProcess[str], dict[str, object]]:
    """Run setup.py's build into `folder`, far from the library that is in use, and read what it wrote."""
    command = [sys.executable, "setup.py", "build_ext", f"--build-lib={folder}", f"--build-temp={folder / 'objects'}"]
    clean = {name: value for name, value in os.environ.items() if name != "CXX"}
    done = subprocess.run(command, cwd=ROOT, env=clean | environment, capture_output=True, text=True, check=False)
    written = folder / "compgen_fast" / "_build_info.json"
    return done, json.loads(written.read_text()) if written.exists() else {}


def test_no_compiler_is_found_on_an_empty_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    compiler, why_not = setup.find_compiler()
    assert compiler is None
    assert "no C++ compiler" in why_not


def test_a_compiler_asked_for_by_name_is_not_replaced_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    compiler, why_not = setup.find_compiler()
    assert compiler is None
    assert "CXX names no-such-compiler" in why_not


def test_a_compiler_behind_a_wrapper_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", f"{sys.executable} g++")
    assert setup.find_compiler() == (f"{sys.executable} g++", None)


@pytest.mark.parametrize(
    ("machine", "portable", "target"),
    [
        ("x86_64", False, ["-march=native"]),
        ("x86_64", True, ["-march=x86-64-v3"]),
        ("AMD64", True, ["-march=x86-64-v3"]),
        ("aarch64", True, []),
    ],
)
def test_only_a_source_build_uses_this_machines_instructions(machine: str, portable: bool, target: list[str]) -> None:
    flags = setup.compile_flags(machine, "Linux", portable)
    assert [flag for flag in flags if flag.startswith("-march")] == target


def test_linux_builds_are_multithreaded() -> None:
    assert "-fopenmp" in setup.compile_flags("x86_64", "Linux", portable=False)


def test_installing_without_a_compiler_succeeds_and_writes_down_why(tmp_path: Path) -> None:
    done, info = build(tmp_path, PATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "installs without its C++ kernels: no C++ compiler" in done.stderr
    assert "no C++ compiler" in str(info["error"])
    assert not list(tmp_path.rglob("_C*.so"))


def test_a_failing_compiler_leaves_a_reason_and_no_stale_library(tmp_path: Path) -> None:
    compiler = tmp_path / "broken-g++"
    compiler.write_text("#!/bin/sh\necho 'broken-g++: out of order' >&2\nexit 1\n")
    compiler.chmod(0o755)
    stale = tmp_path / "compgen_fast" / "_C.stale.so"
    stale.parent.mkdir()
    stale.touch()
    done, info = build(tmp_path, CXX=str(compiler))
    assert done.returncode == 0, done.stderr
    assert f"compiling csrc/ with {compiler} failed" in str(info["error"])
    assert not stale.exists()


def test_a_build_that_cannot_see_torch_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('isolated')")
    done, _ = build(tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert "pip install torch==2.13.0" in done.stderr
    assert "--no-build-isolation" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(setup.find_compiler()[0] is None, reason="this machine has no C++ compiler")
def test_a_machine_with_a_compiler_has_the_compiled_kernels() -> None:
    info = json.loads((ROOT / "compgen_fast" / "_build_info.json").read_text())
    assert info["error"] is None
    import torch  # noqa: F401  (the library needs torch's libraries loaded first)

    assert importlib.util.find_spec("compgen_fast._C") is not None
    importlib.import_module("compgen_fast._C")


def test_kernels_and_bench_import_from_another_folder(tmp_path: Path) -> None:
    program = "import compgen_fast.kernels as k, compgen_fast.bench as b; print(k.__path__[0]); print(b.__path__[0])"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.split() == [str(ROOT / "kernels"), str(ROOT / "bench")], done.stderr


@pytest.mark.parametrize("folder", ["compgen_fast", "kernels", "bench"])
def test_every_folder_with_modules_is_a_package(folder: str) -> None:
    """A folder without __init__.py works in a checkout and is missing from the wheel."""
    folders = {module.parent for module in (ROOT / folder).rglob("*.py")}
    assert folders, f"{folder}/ holds no modules"
    assert [str(f) for f in sorted(folders) if not (f / "__init__.py").exists()] == []


def test_constraints_pin_the_torch_in_use_and_leave_triton_to_it() -> None:
    """torch's CUDA build requires one triton, its CPU build another or none: a pin would make one uninstallable."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line)
    assert pins["torch"] == version("torch").partition("+")[0]
    assert "triton" not in pins
