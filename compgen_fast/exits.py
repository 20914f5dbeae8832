"""What `cgf` exits with. docs/exit_codes.md holds this table, and a test holds them together."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Self


class Exit(IntEnum):
    """A signal's code is 128 and its number, as the shell tells of a program that the signal ended: so it is the same
    before a run can save anything and after.
    """

    meaning: str

    def __new__(cls, code: int, meaning: str) -> Self:
        member = int.__new__(cls, code)
        member._value_, member.meaning = code, meaning
        return member

    DONE = 0, "done"
    FAILED = 1, "a check failed, or a run did: a sentence or a traceback says how"
    REFUSED = 2, "the request cannot be met: a sentence says what to change; wrong syntax too"
    STALLED = 75, "a rank hangs or is gone: all ranks were ended, and the rank is named; trying again may help"
    INTERRUPTED = 128 + signal.SIGINT, "ctrl-C (SIGINT): not finished"
    REQUEUE = 128 + signal.SIGUSR1, "SIGUSR1, a scheduler's notice of a time limit: not finished, to be started again"
    READER_GONE = 128 + signal.SIGPIPE, "whoever read the output went away, as `head` does after its lines"
    TERMINATED = 128 + signal.SIGTERM, "SIGTERM: not finished"


# Who wants an end outranks who wants to go on later.
STOPS = {signal.SIGINT: Exit.INTERRUPTED, signal.SIGTERM: Exit.TERMINATED, signal.SIGUSR1: Exit.REQUEUE}
"""The signals by which a run is asked to stop, and what it then exits with."""


@contextmanager
def ended_by_ctrl_c() -> Iterator[None]:
    """Around imports: ctrl-C ends the process at once, by the signal's own action. An exception would become what the
    module in the middle of its import makes of it: a page of traceback, an ImportError, or nothing at all.
    """
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
