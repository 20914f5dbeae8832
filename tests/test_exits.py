"""Exit codes: one table in code and docs, and ctrl-C before anything has begun."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from compgen_fast import cli
from compgen_fast.exits import STOPS, Exit

PAGE = Path(__file__).parents[1] / "docs" / "exit_codes.md"


def test_the_page_lists_every_code_as_it_is_declared() -> None:
    rows = re.findall(r"^\| (\d+) \| (.+?) \|$", PAGE.read_text(), re.MULTILINE)
    assert rows == [(f"{code.value}", code.meaning) for code in sorted(Exit)]


def test_a_signals_code_is_what_the_shell_calls_it() -> None:
    def heard() -> None:  # where tests run in the background of a script, SIGINT is ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    for number, code in STOPS.items():
        command = ["sh", "-c", f"sh -c 'kill -{int(number)} $$'; exit $?"]
        assert subprocess.run(command, capture_output=True, preexec_fn=heard).returncode == code


IMPORTS_AND_IS_INTERRUPTED = """
import os, signal
signal.signal(signal.SIGINT, {handler})
from compgen_fast.exits import ended_by_ctrl_c
try:
    with ended_by_ctrl_c():
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except BaseException:
            pass  # as some modules do when they look for an optional one
    print("went on")
    os.kill(os.getpid(), signal.SIGINT)
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize(
    ("handler", "code", "printed"),
    [
        ("signal.default_int_handler", -signal.SIGINT, ""),
        ("signal.SIG_IGN", 0, "went on\n"),  # a job in the background of a script
    ],
)
def test_ctrl_c_in_the_middle_of_an_import_is_not_lost(handler: str, code: int, printed: str) -> None:
    script = IMPORTS_AND_IS_INTERRUPTED.format(handler=handler)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (code, printed, "")


@pytest.mark.parametrize("command", [cli.Pack, cli.Search, cli.Study])
def test_who_interrupts_a_long_command_is_told_that_it_goes_on(
    command: type, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run", interrupted)
    arguments = {cli.Pack: ["pack", "shapes2d", "out"], cli.Search: ["search", "weights", "shards"]}
    assert cli.main(arguments.get(command, ["study", "bumps"])) == Exit.INTERRUPTED
    assert capsys.readouterr().err == "cgf: interrupted; the same command goes on where it stopped\n"
