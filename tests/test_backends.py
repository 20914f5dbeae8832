"""The choice of a backend, in fresh processes: it is made once, at import."""

import json
import os
import subprocess
import sys

import pytest

PROBE = """
import json, torch, warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from compgen_fast.ops import backends, slot_cross_attention
x = torch.ones(1, 2, 1, 8)
try:
    slot_cross_attention(x, x, x)
    outcome = "ran"
except RuntimeError as error:
    outcome = str(error)
print(json.dumps({"serving": backends.serving("cpu"), "outcome": outcome, "warnings": [str(w.message) for w in caught],
    "statuses": {s.backend: [s.live, s.reason] for s in backends.statuses("slot_cross_attention", "cpu")}}))
"""


def probe(code: str = PROBE, **environment: str) -> dict[str, object]:
    clean = {k: v for k, v in os.environ.items() if k not in ("COMPGEN_BACKEND", "TRITON_INTERPRET")}
    done = subprocess.run([sys.executable, "-c", code], env=clean | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_cpp_serves_the_cpu_when_nothing_is_asked() -> None:
    found = probe()
    assert (found["serving"], found["outcome"], found["warnings"]) == ("cpp", "ran", [])
    assert found["statuses"]["torch"] == [False, "cpp is faster"]  # type: ignore[index]


def test_torch_can_be_asked_for() -> None:
    found = probe(COMPGEN_BACKEND="torch")
    assert (found["serving"], found["outcome"]) == ("torch", "ran")
    assert found["statuses"]["cpp"] == [False, "disabled by COMPGEN_BACKEND=torch"]  # type: ignore[index]


def test_triton_without_its_interpreter_is_refused_on_cpu_tensors() -> None:
    found = probe(COMPGEN_BACKEND="triton")
    assert found["serving"] is None
    assert "COMPGEN_BACKEND=triton cannot serve cpu tensors" in str(found["outcome"])
    assert "TRITON_INTERPRET=1" in str(found["outcome"])


def test_missing_cpp_kernels_are_said_once_and_torch_serves() -> None:
    hide = "import sys; sys.modules['compgen_fast._C'] = None\n"
    found = probe(hide + PROBE)
    assert (found["serving"], found["outcome"]) == ("torch", "ran")
    assert len(found["warnings"]) == 1 and "served by plain torch" in found["warnings"][0]  # type: ignore[index,arg-type]


def test_an_unknown_backend_is_refused_with_the_choices() -> None:
    with pytest.raises(AssertionError, match="expected one of triton, cpp, torch"):
        probe(COMPGEN_BACKEND="cuda")
