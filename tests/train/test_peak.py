"""The measured peak is a rate that products reach and do not exceed; memory follows what is allocated."""

import subprocess
import sys
import time

import pytest
import torch

from compgen_fast.train import peak
from compgen_fast.train.peak import measured_peak, memory_in_use

MIB = 2**20


@pytest.fixture
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peak, "SECONDS_PER_SIZE", 0.05)


@pytest.mark.usefixtures("_short")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_peak_is_what_a_large_product_reaches(dtype: torch.dtype) -> None:
    size = 384
    a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    seconds = []
    for _ in range(20):
        started = time.perf_counter()
        a @ b.t()
        seconds.append(time.perf_counter() - started)
    # A wide corridor: other processes slow either side down, a wrong count of FLOPs or a wrong unit is out by more.
    assert 0.1 < measured_peak("cpu", dtype, 1) / (2 * size**3 / min(seconds)) < 10


def test_peak_is_the_best_of_all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {256: 1e12, 512: 3e12, 1024: 2e12, 2048: 1e12}
    monkeypatch.setattr(peak, "_rate", lambda device, dtype, size: rates[size])
    assert measured_peak("cpu", torch.float32, 1) == 3e12


def test_sizes_that_would_take_too_long_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    monkeypatch.setattr(peak, "_rate", lambda device, dtype, size: tried.append(size) or 1.5e9)
    measured_peak("cpu", torch.bfloat16, 1)
    assert tried == [256, 512]  # 2 · 1024³ operations at 1.5 GFLOP/s are 1.4 s


@pytest.mark.usefixtures("_short")
def test_the_number_of_threads_is_set_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    before = torch.get_num_threads()
    monkeypatch.setattr(peak, "_rate", lambda *_: seen.append(torch.get_num_threads()) or 1.0)
    measured_peak("cpu", torch.float32, before + 1)
    assert set(seen) == {before + 1} and torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("device", "dtype", "threads", "word"),
    [("meta", torch.float32, 1, "device"), ("cpu", torch.int64, 1, "dtype"), ("cpu", torch.float32, 0, "threads")],
)
def test_what_cannot_be_measured_is_refused(device: str, dtype: torch.dtype, threads: int, word: str) -> None:
    with pytest.raises(ValueError, match=f"{word} is .*; expected"):
        measured_peak(device, dtype, threads)


def test_memory_follows_what_is_held_and_the_peak_stays() -> None:
    before = memory_in_use("cpu")
    held = torch.ones(100 * MIB, dtype=torch.uint8)
    during = memory_in_use("cpu")
    del held
    after = memory_in_use("cpu")
    assert during.now - before.now > 90 * MIB
    assert during.now - after.now > 90 * MIB
    assert after.peak - before.now > 90 * MIB


def test_a_process_does_not_inherit_the_peak_of_the_one_that_started_it() -> None:
    held = torch.ones(600 * MIB, dtype=torch.uint8)
    script = "from compgen_fast.train.peak import memory_in_use; print(memory_in_use('cpu').peak)"
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert int(printed) < 600 * MIB < held.numel() + memory_in_use("cpu").now
