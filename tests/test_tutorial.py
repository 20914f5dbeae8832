"""Every command and every block of docs/tutorial.md runs as it stands, on few images and for a few steps."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "tutorial.md"
FEWER = {"3_000": "200"}  # in Python
SHORTER = {"cgf train frame_vae_cpu": "--steps 3", "cgf train replay_cpu": "--steps 2", "cgf search": "--steps 2"}


def shortened(command: str) -> list[str]:
    """The command of the page in this Python, with what makes it small."""
    more = next((more for start, more in SHORTER.items() if command.startswith(f"{start} ")), "")
    return [sys.executable, "-m", "compgen_fast", *command.split()[1:], *more.split()]


def test_the_tutorial_runs_from_photos_to_readout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "tutorial"}
    for language, block in re.findall(r"^```(python|bash)\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        if language == "python":
            for many, few in FEWER.items():
                block = block.replace(many, few)
            exec(compile(block, str(PAGE), "exec"), names)
            continue
        for command in block.splitlines():
            done = subprocess.run(shortened(command), capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    printed = capsys.readouterr().out
    assert re.search(r"squared error 0\.\d+, of the mean image 0\.\d+; pixels owned by each slot", printed)
    assert [line.split()[0] for line in printed.splitlines()[-3:]] == ["encoder", "after", "searched"]
