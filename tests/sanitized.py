"""A pytest plugin of `make sanitize`: no test runs unless the C++ kernels in use are those built with the sanitizers.

Without it a run that found the ordinary library, or none, would be green for nothing.
"""

import ctypes
import sys

import pytest

RUNTIMES = {"AddressSanitizer": "__asan_init", "UndefinedBehaviorSanitizer": "__ubsan_handle_add_overflow_abort"}


def pytest_sessionstart() -> None:
    from compgen_fast.ops import backends

    if backends.serving("cpu") != "cpp":
        raise pytest.UsageError(f"the C++ kernels do not serve the CPU: {backends.statuses(backends.ops()[0], 'cpu')}")
    path = str(sys.modules["compgen_fast._C"].__file__)
    library = ctypes.CDLL(path)  # its symbols are its own and those of what it was linked with
    if missing := [name for name, symbol in RUNTIMES.items() if not hasattr(library, symbol)]:
        raise pytest.UsageError(f"{path} is built without {' and '.join(missing)}; `make sanitize` builds it with them")
