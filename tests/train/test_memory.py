"""Memory that is kept: steps after the first few ask the system for no pages."""

import resource
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
import torch
from compgen_fast.train.memory import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
def step():
    return sum(torch.ones(1 << 20).exp().sum() for _ in range(4))
for _ in range(5):  # until the heap has found its shape
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator is Linux's")
def test_a_process_that_keeps_its_memory_faults_far_less():
    def faults(how: str) -> int:
        answer = subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, text=True, check=True)
        return int(answer.stdout)

    assert resource.getpagesize() <= 1 << 16
    kept, given_back = faults("kept"), faults("given back")
    assert given_back > 1_000 and kept < given_back / 20
