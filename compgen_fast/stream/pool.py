"""The worker processes of a stream: requests go out ahead of time, answers come back in the order they were made.

Workers are plain child processes on a socket, not `multiprocessing`'s: they import neither torch nor the user's script,
do not inherit its threads, and die with it. Pixels travel through anonymous shared memory that no crash leaves behind.

A worker that dies is replaced and asked again for what it owed. A request that killed `ATTEMPTS` workers is an error.
"""

import contextlib
import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait

import numpy as np
from numpy.typing import NDArray

from compgen_fast.stream.faults import StreamError
from compgen_fast.stream.remote import Place
from compgen_fast.stream.shards import Filled, Pixels
from compgen_fast.stream.worker import Slots

ATTEMPTS = 3
# Not `python -m`: classes of a module that runs as __main__ do not unpickle elsewhere.
_COMMAND = "import sys; from compgen_fast.stream.worker import main; main(*sys.argv[1:])"
Integers = NDArray[np.int64]


@dataclass
class _Request:
    slot: int
    parts: Integers
    samples: Integers
    kills: int = 0
    answer: Filled | StreamError | None = None


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    connection: Connection
    owed: list[_Request] = field(default_factory=list)


class Pool:
    """Fills slots with batches, in several processes."""

    def __init__(self, places: Sequence[Place], slots: Slots, workers: int, timeout: float) -> None:
        self._places, self._slots, self._timeout = tuple(places), slots, timeout
        self._file = _anonymous(slots.bytes)
        self._images, self._masks = slots.arrays(mmap.mmap(self._file, slots.bytes))
        self._free = list(range(slots.count))
        self._queue: list[_Request] = []
        self._workers: list[_Worker] = []
        self.waited = 0.0
        """Seconds spent waiting for a batch that was not ready."""
        for _ in range(workers):
            self._workers.append(self._start())

    @property
    def _origins(self) -> str:
        return ", ".join(place.origin for place in self._places)

    @property
    def room(self) -> bool:
        return bool(self._free)

    @property
    def processes(self) -> list[int]:
        return [worker.process.pid for worker in self._workers]

    def ask(self, parts: Integers, samples: Integers) -> None:
        """Puts a batch on order; there must be `room`."""
        request = _Request(self._free.pop(), parts, samples)
        self._queue.append(request)
        self._send(min(self._workers, key=lambda worker: len(worker.owed)), request)

    def next(self) -> tuple[Pixels, Pixels | None, Filled]:
        """The batch ordered first. Its arrays are good until `done`."""
        request, started = self._queue[0], time.monotonic()
        while request.answer is None:
            self._receive(started + self._timeout - time.monotonic())
        self.waited += time.monotonic() - started
        if isinstance(request.answer, StreamError):
            raise request.answer
        slot, count = request.slot, len(request.samples)
        return self._images[slot, :count], None if self._masks is None else self._masks[slot, :count], request.answer

    def done(self) -> None:
        """Gives the slot of the batch ordered first back."""
        self._free.append(self._queue.pop(0).slot)

    def close(self) -> None:
        for worker in self._workers:
            worker.connection.close()
            worker.process.kill()  # it holds nothing that could be lost
            worker.process.wait()
        self._workers.clear()
        os.close(self._file)

    def _start(self) -> _Worker:
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", _COMMAND, str(theirs.fileno()), str(self._file)],
                pass_fds=(theirs.fileno(), self._file),
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
        worker = _Worker(process, Connection(ours.detach()))
        with contextlib.suppress(ConnectionError):
            worker.connection.send((self._places, self._slots))
        return worker

    def _send(self, worker: _Worker, request: _Request) -> None:
        worker.owed.append(request)
        with contextlib.suppress(ConnectionError):  # a dead worker is noticed, and replaced, when its answer is awaited
            worker.connection.send((request.slot, request.parts, request.samples))

    def _receive(self, seconds: float) -> None:
        """Takes every answer that is there, after waiting for one."""
        connections = {worker.connection: worker for worker in self._workers}
        ready = wait(list(connections), max(0.0, seconds))
        if not ready:
            raise StreamError(
                f"no data for {self._timeout:g} s: workers {self.processes} neither answer nor end, so the storage at "
                f"{self._origins} hangs or is very slow; look there, or raise timeout="
            )
        for connection in ready:
            worker = connections[connection]  # type: ignore[index]
            try:
                slot, answer = worker.connection.recv()
            except (EOFError, ConnectionError):
                self._replace(worker)
                continue
            request = worker.owed.pop(0)
            assert request.slot == slot
            request.answer = answer

    def _replace(self, dead: _Worker) -> None:
        """A new worker takes over what a dead one owed; the first of it was being read when it died."""
        dead.connection.close()
        dead.process.kill()
        code = dead.process.wait()
        if dead.owed:
            dead.owed[0].kills += 1
            if dead.owed[0].kills >= ATTEMPTS:
                raise StreamError(
                    f"{ATTEMPTS} workers in turn ended ({_cause(code)}) on the same batch, samples "
                    f"{dead.owed[0].samples.tolist()[:8]}… of {self._origins}; a worker that is killed for "
                    "memory needs fewer workers or smaller batches"
                )
        successor = self._start()
        self._workers[self._workers.index(dead)] = successor
        for request in dead.owed:
            self._send(successor, request)


def _cause(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _anonymous(size: int) -> int:
    """A file descriptor of memory without a name, gone when the last process that has it open is."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("compgen_fast")
    else:
        with tempfile.TemporaryFile() as unlinked:
            file = os.dup(unlinked.fileno())
    os.ftruncate(file, size)
    return file
