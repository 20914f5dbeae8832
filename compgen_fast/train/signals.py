"""Being asked to stop: a signal sets a flag, the loop ends after its step, saves, and raises `Stopped`.

Who asks: a scheduler or the supervisor (SIGTERM), Slurm before a time limit (SIGUSR1), the user (SIGINT). Signals reach
ranks at different moments, perhaps only one of them, and a rank that stopped a step before the others would leave them
waiting, so ranks agree.
"""

import signal
from types import FrameType, TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from compgen_fast.exits import STOPS
from compgen_fast.train.launch import Interruptions
from compgen_fast.train.ranks import Ranks


class Stopped(SystemExit):
    """Training was asked to stop before its last step, and has saved. Nobody goes on from here as if it were complete:
    a process that does not catch this ends, with the signal's code.
    """

    code: int

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number)
        self.code = int(STOPS[number])


class Stop:
    """``with Stop() as stop:`` catches signals; a second SIGINT raises KeyboardInterrupt, for who cannot wait."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        """What all ranks have agreed to stop for."""
        self._arrived: signal.Signals | None = None
        self._interruptions = Interruptions()
        self._former: dict[signal.Signals, Any] = {}

    def agree(self, ranks: Ranks, **values: Tensor) -> dict[str, float]:
        """The means of ``values`` over ranks, and in the same message what any rank was asked by: `signal`."""
        asked = torch.tensor([float(number is self._arrived) for number in STOPS], device=ranks.device)
        means = ranks.mean(dict(zip((number.name for number in STOPS), asked, strict=True)) | values)
        self.signal = next((number for number in STOPS if means[number.name] > 0), None)
        return {name: means[name] for name in values}

    def __enter__(self) -> Self:
        self._former = {number: signal.signal(number, self._take) for number in STOPS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, former in self._former.items():
            # None: a handler that C code installed, which Python cannot put back.
            signal.signal(number, signal.SIG_DFL if former is None else former)

    def _take(self, number: int, _: FrameType | None) -> None:
        self._arrived = self._arrived or signal.Signals(number)
        if number == signal.SIGINT and self._interruptions.again():
            raise KeyboardInterrupt
