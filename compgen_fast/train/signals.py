"""Being asked to stop: a signal sets a flag, the loop ends after its step, saves, and exits 0.

Who asks: a scheduler or the supervisor (SIGTERM), Slurm before a time limit (SIGUSR1), the user (SIGINT). Signals reach
ranks at different moments, and a rank that stopped a step before the others would leave them waiting, so ranks agree.
"""

import signal
import time
from types import FrameType, TracebackType
from typing import Any, Self

import torch

from compgen_fast.train.ranks import Ranks

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# One ctrl-C may arrive twice: from the terminal, and passed on by a launcher that got it too.
ECHO_SECONDS = 1.0


class Stop:
    """``with Stop() as stop:`` catches signals; a second SIGINT raises KeyboardInterrupt, for who cannot wait."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        """What asked first."""
        self._interrupted: float | None = None
        self._former: dict[signal.Signals, Any] = {}

    @property
    def asked(self) -> bool:
        """Whether this rank was asked; others may not know yet."""
        return self.signal is not None

    def as_number(self) -> float:
        """1.0 if asked, else 0.0. For a message that ranks send anyway: stop where the mean over ranks is above 0."""
        return float(self.asked)

    def agreed(self, ranks: Ranks) -> bool:
        """Whether any rank was asked, the same answer on all of them. Costs a message: see `as_number`."""
        asked = torch.tensor(self.as_number(), device=ranks.device)
        return ranks.mean({"stop": asked})["stop"] > 0

    def __enter__(self) -> Self:
        self._former = {number: signal.signal(number, self._take) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, former in self._former.items():
            # None: a handler that C code installed, which Python cannot put back.
            signal.signal(number, signal.SIG_DFL if former is None else former)

    def _take(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        self.signal = self.signal or signal.Signals(number)
        if number == signal.SIGINT:
            if self._interrupted is not None and now - self._interrupted > ECHO_SECONDS:
                raise KeyboardInterrupt
            self._interrupted = self._interrupted or now
