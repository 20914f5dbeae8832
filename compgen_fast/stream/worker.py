"""A process that reads and decodes: it gets lists of samples, fills slots of shared memory, and says what was bad.

It holds no state that matters. What to read is in each request, so a worker that dies is replaced and asked again. It
ends when its parent does, however that ends, because the socket between them closes.
"""

import mmap
import resource
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compgen_fast.stream.faults import Fault, StreamError
from compgen_fast.stream.remote import Place
from compgen_fast.stream.shards import DataSet, Filled, Pixels


@dataclass(frozen=True)
class Slots:
    """Shared memory cut into places for one batch each: the images, then the masks."""

    count: int
    batch: int
    height: int
    width: int
    masks: bool

    @property
    def channels(self) -> int:
        return 4 if self.masks else 3

    @property
    def bytes(self) -> int:
        return max(1, self.count * self.batch * self.height * self.width * self.channels)

    def arrays(self, memory: mmap.mmap) -> tuple[Pixels, Pixels | None]:
        """uint8 [count, batch, height, width, 3] and [count, batch, height, width]."""
        pixels = np.frombuffer(memory, np.uint8)
        shape = (self.count, self.batch, self.height, self.width)
        split = 3 * self.count * self.batch * self.height * self.width
        images = pixels[:split].reshape(*shape, 3)
        return images, pixels[split:].reshape(shape) if self.masks else None


def fill(
    sets: Sequence[DataSet], parts: NDArray[np.int64], samples: NDArray[np.int64], images: Pixels, masks: Pixels | None
) -> Filled:
    """Reads sample ``samples[i]`` of data set ``parts[i]`` into ``images[i]`` and ``masks[i]``."""
    if len(sets) == 1:
        return sets[0].fill(samples.tolist(), images, masks)
    used, keys = np.empty_like(samples), np.empty(len(samples), object)
    factors: dict[str, NDArray[Any]] = {}
    faults: list[Fault] = []
    for part in np.unique(parts).tolist():
        rows = np.flatnonzero(parts == part)
        chosen = None if masks is None else (masks[row] for row in rows)
        found = sets[part].fill(samples[rows].tolist(), (images[row] for row in rows), chosen)
        used[rows], keys[rows] = found.samples, found.keys
        for name, values in found.factors.items():
            factors.setdefault(name, np.empty(len(samples), values.dtype))[rows] = values
        faults += found.faults
    return Filled(used.tolist(), keys.tolist(), factors, faults)


def serve(connection: Connection, memory: int) -> None:
    places: Sequence[Place]
    slots: Slots
    places, slots = connection.recv()
    sets = [DataSet(place, slots.masks) for place in places]
    images, masks = slots.arrays(mmap.mmap(memory, slots.bytes))
    while True:
        slot, parts, samples = connection.recv()
        answer: Filled | StreamError
        try:
            answer = fill(sets, parts, samples, images[slot], None if masks is None else masks[slot])
        except StreamError as error:
            answer = error
        connection.send((slot, answer))


def main(connection: str, memory: str) -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # one process per shard set: it may open all of them
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C reaches the whole group; the parent decides what it means
    try:
        serve(Connection(int(connection)), int(memory))
    except (EOFError, ConnectionError):
        return
