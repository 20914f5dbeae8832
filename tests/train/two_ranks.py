"""A script as two real processes that find each other, for tests of what ranks do together."""

import os
import socket
import subprocess
import sys
import textwrap

PATIENCE = 240.0


def run_two_ranks(script: str, *arguments: object) -> list[str]:
    """Runs the script as ranks 0 and 1 until both end well; what each printed. Nothing is left running."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    where = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]
    ranks = [
        subprocess.Popen(
            command, env={**where, "RANK": rank, "LOCAL_RANK": rank}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in "01"
    ]  # fmt: skip
    try:
        printed = [rank.communicate(timeout=PATIENCE)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n\n".join(printed)
    return printed
