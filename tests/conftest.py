"""Set-up shared by all tests: hypothesis budgets by backend, and the repaired bf16 of Triton's interpreter."""

import os

import hypothesis
import pytest
import torch

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETING:
    import tests.interpreter_bf16  # noqa: F401  (repairs the interpreter on import)

hypothesis.settings.register_profile("compiled", max_examples=60, deadline=None, derandomize=True)
hypothesis.settings.register_profile("interpreted", max_examples=6, deadline=None, derandomize=True)
hypothesis.settings.load_profile("interpreted" if INTERPRETING else "compiled")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
