"""`cgf env`: complete, honest about what does not run, and the same in both forms."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from compgen_fast import cpu, env
from compgen_fast.cpu import Cpu, this_cpu
from compgen_fast.ops import backends
from compgen_fast.ops.backends import Status

DEVICES = {"cpu", "cuda"}


def report(**environment: str) -> dict[str, Any]:
    """`cgf env --json` in a fresh process: stdout must be one JSON object and nothing else."""
    ours = ("COMPGEN_BACKEND", "TRITON_INTERPRET")
    clean = {name: value for name, value in os.environ.items() if name not in ours}
    command = [sys.executable, "-m", "compgen_fast", "env", "--json"]
    done = subprocess.run(command, env=clean | environment, capture_output=True, text=True, check=True)
    parsed = json.loads(done.stdout)
    assert isinstance(parsed, dict)
    return parsed


def table(environment: env.Environment) -> str:
    out = StringIO()
    env.show(environment, Console(file=out, width=100))
    return out.getvalue()


def synthetic(ops: dict[str, dict[backends.Device, env.Service]], error: str | None = None) -> env.Environment:
    return env.Environment({"triton": None}, env.Extension(error), Cpu("Z80", "", (), 1, 1), "none", (), ops, {})


def served_by(backend: backends.Backend) -> dict[backends.Device, env.Service]:
    service = env.Service(backend, (Status(backend, True, "it is here"),))
    return {"cpu": service, "cuda": service}


@pytest.fixture(scope="module")
def untouched() -> dict[str, Any]:
    return report()


def test_every_op_is_reported_on_every_device(untouched: dict[str, Any]) -> None:
    assert set(untouched["ops"]) == set(backends.ops())
    assert untouched["ops"]
    assert all(set(devices) == DEVICES for devices in untouched["ops"].values())


def test_one_backend_serves_each_op_and_the_others_say_why_not(untouched: dict[str, Any]) -> None:
    for devices in untouched["ops"].values():
        for service in devices.values():
            live = [status["backend"] for status in service["backends"] if status["live"]]
            assert live == [service["serves"]]
            assert {status["backend"] for status in service["backends"]} == {"triton", "cpp", "torch"}
            assert all(status["reason"] for status in service["backends"])


def test_versions_and_devices_are_named(untouched: dict[str, Any]) -> None:
    assert {"compgen-fast", "python", "torch", "triton", "numpy"} == set(untouched["versions"])
    assert untouched["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert untouched["cpu"]["model"]
    assert untouched["cpu"]["cores"] >= untouched["cpu"]["usable_cores"] >= 1 and untouched["cpu"]["family"]


XEON = """processor\t: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 143
model name\t: Intel(R) Xeon(R) Platinum 8480+
stepping\t: 8
flags\t\t: fpu sse avx avx2 fma avx512f avx512_bf16 avx512_vnni amx_bf16 amx_tile amx_int8

processor\t: 1
model name\t: another
"""
GRAVITON = """processor\t: 0
Features\t: fp asimd sve i8mm bf16
CPU implementer\t: 0x41
CPU variant\t: 0x1
CPU part\t: 0xd40
"""


@pytest.mark.parametrize(
    ("told", "family", "sets"),
    [
        (
            XEON,
            "family 6, model 143, stepping 8",
            "AVX2, FMA, AVX-512 F, AVX-512 BF16, AVX-512 VNNI, AMX, AMX BF16, AMX INT8",
        ),
        (GRAVITON, "implementer 0x41, part 0xd40, variant 0x1", "NEON, SVE, BF16, I8MM"),
    ],
)
def test_a_cpu_is_told_by_family_and_instruction_sets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: str, family: str, sets: str
) -> None:
    (tmp_path / "cpuinfo").write_text(told)
    monkeypatch.setattr(cpu, "CPUINFO", tmp_path / "cpuinfo")
    found = this_cpu()
    assert found.family == family and found.instruction_sets == tuple(sets.split(", "))
    assert (found.model == "Intel(R) Xeon(R) Platinum 8480+") == (told is XEON) and found.model
    assert 1 <= found.usable_cores <= found.cores
    shown = " ".join(table(replace(env.collect(), cpu=found)).split())
    assert family in shown and sets in shown and f"{found.usable_cores} of {found.cores} cores usable" in shown


def test_a_system_without_cpuinfo_has_a_cpu_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "CPUINFO", tmp_path / "none")
    assert this_cpu().model and this_cpu().family == "" and this_cpu().instruction_sets is None
    assert "not told by this system" in table(replace(env.collect(), cpu=this_cpu()))


def test_who_serves_self_attention_is_said_in_both_forms(untouched: dict[str, Any]) -> None:
    assert set(untouched["self_attention"]) == DEVICES
    assert untouched["self_attention"]["cpu"]["serves"] == "torch"
    words = set(table(env.collect()).split())
    for attention in env.collect().self_attention.values():
        assert {f"{attention.serves}:", *attention.reason.split()} <= words


def test_a_backend_chosen_by_hand_disables_the_others_by_name() -> None:
    for devices in report(COMPGEN_BACKEND="torch")["ops"].values():
        assert devices["cpu"]["serves"] == "torch"
        reasons = {status["backend"]: status["reason"] for status in devices["cpu"]["backends"]}
        assert "COMPGEN_BACKEND" in reasons["cpp"] or "not built" in reasons["cpp"]


def test_a_choice_that_cannot_serve_is_reported_as_served_by_nobody() -> None:
    for devices in report(COMPGEN_BACKEND="cpp")["ops"].values():
        assert devices["cuda"]["serves"] is None


def test_the_table_says_all_that_the_json_says() -> None:
    environment = env.collect()
    shown = table(environment)
    words = set(shown.split())
    for service in (service for devices in environment.ops.values() for service in devices.values()):
        for status in service.backends:
            assert set(status.reason.split()) <= words
    assert set(environment.ops) <= words
    assert {found for found in environment.versions.values() if found} <= words
    assert environment.cpu.model in shown


def test_what_is_absent_is_called_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing_installed(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr(env, "version", nothing_installed)
    assert env.installed_version("triton") is None
    shown = " ".join(table(synthetic({})).split())
    assert "triton not installed" in shown
    assert "GPU none" in shown


def test_the_reason_of_a_failed_build_reaches_the_reader(tmp_path: Path) -> None:
    written = tmp_path / "_build_info.json"
    written.write_text(json.dumps({"error": "no C++ compiler", "compiler": None, "flags": [], "torch": "2.13.0"}))
    extension = env.read_extension(written)
    assert extension.error == "no C++ compiler"
    assert "no C++ compiler" in table(synthetic({}, error=extension.error))


def test_a_checkout_that_was_never_built_says_how_to_build_it(tmp_path: Path) -> None:
    error = env.read_extension(tmp_path / "_build_info.json").error
    assert error is not None
    assert "make setup" in error


def test_ops_served_alike_share_one_block() -> None:
    environment = synthetic({"a": served_by("cpp"), "b": served_by("torch"), "c": served_by("cpp")})
    assert list(env.ops_served_alike(environment, "cpu").values()) == [["a", "c"], ["b"]]
