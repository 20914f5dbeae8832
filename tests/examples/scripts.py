"""The scripts of examples/, run as a user runs them but in the process of the tests."""

import io
import runpy
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def path_of(name: str) -> Path:
    return ROOT / "examples" / name


def printed_by(name: str, *arguments: object) -> str:
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
        patch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(path_of(name)), run_name="__main__")
    return printed.getvalue()
