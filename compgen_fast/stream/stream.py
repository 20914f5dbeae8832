"""Batches from packed shards, in an order that does not depend on who reads them, and that resumes exactly.

The stream is one sequence of samples, told by (seed, manifests) alone. Step t takes the next ``batch_size`` of them,
and each of ``ranks`` processes gets its equal share of every step. So all ranks make the same number of steps, and the
state of a run is one number: how many samples the whole run has consumed. It means the same on any number of ranks and
workers.

Epochs follow each other without a gap: a batch may hold the end of one and the start of the next. Where a stream of
finitely many epochs ends inside a batch, the rest of that batch is filled by going on into the next epoch, and these
samples have ``valid`` False: no sample is dropped, and whoever counts the valid ones counts each exactly once.

A bad sample's place is taken by another, chosen by the bad one's number alone, also with ``valid`` False.
"""

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compgen_fast.stream.buffers import Buffers
from compgen_fast.stream.faults import Quarantine, StreamError
from compgen_fast.stream.manifest import Schema
from compgen_fast.stream.order import Order, Part, key
from compgen_fast.stream.pool import Pool
from compgen_fast.stream.remote import place
from compgen_fast.stream.shards import DataSet, Filled, Pixels
from compgen_fast.stream.worker import Slots, fill

Integers = NDArray[np.int64]
LOOKAHEAD = 16  # steps whose samples are worked out at once; one alone would cost almost as much
FOREVER = 1 << 62


@dataclass(frozen=True)
class Batch:
    """One rank's share of a step.

    images: uint8 [b, height, width, 3].
    factors: by name, int64 [b] (the number of a category) or float32 [b].
    masks: uint8 [b, height, width], the slot that owns each pixel; None unless the stream was asked for masks.
    valid: bool [b], False for a sample that fills up the last batch or stands in for a bad one.
    sets: int64 [b], which data set of a mixture each sample is from.
    keys: the samples' names in the shards.
    """

    images: Tensor
    factors: Mapping[str, Tensor]
    masks: Tensor | None
    valid: Tensor
    sets: Tensor
    keys: tuple[str, ...]


@dataclass(frozen=True)
class _Ordered:
    """What a step asks for, before it is read."""

    sets: Integers
    samples: Integers
    real: NDArray[np.bool_]
    after: int
    """The run's position once this step is delivered."""


class ShardStream:
    """An iterable of `Batch` over one packed folder, or a mixture of several.

    Args:
        data: a packed folder or its address, or several.
        batch_size: samples per step, over all ranks together; a multiple of ``ranks``.
        weights: how often each of several data sets has its turn, to 0.1 %; equal if not given.
        seed: another seed, another order.
        epochs: how many times to go through the data; None for endless. A mixture's epoch is as many samples as its
            data sets have together.
        shuffle: False for the order in which samples were packed.
        window: shuffle only among so many shards at a time, so that few files are read at once; None for all.
        rank, ranks: which of how many processes this is.
        workers: processes that read and decode; 0 does it here, when a batch is asked for.
        prefetch: batches on order per worker.
        masks: read the masks too.
        budget: the share of samples that may be bad before the stream raises `OverBudget`. Each rank counts its own.
        device: where batches go; to CUDA through pinned memory, one batch ahead.
        cache: a folder for files fetched from addresses.
        allow: address schemes to trust beyond the safe ones, such as ``{"pipe"}``.
        timeout: seconds without any data before a stream with workers gives up.
    """

    def __init__(
        self,
        data: str | Path | Sequence[str | Path],
        *,
        batch_size: int,
        weights: Sequence[float] | None = None,
        seed: int = 0,
        epochs: int | None = None,
        shuffle: bool = True,
        window: int | None = None,
        rank: int = 0,
        ranks: int = 1,
        workers: int = 0,
        prefetch: int = 2,
        masks: bool = False,
        budget: float = 1e-3,
        device: str | torch.device = "cpu",
        cache: str | Path | None = None,
        allow: Collection[str] = (),
        timeout: float = 300.0,
    ) -> None:
        addresses = [data] if isinstance(data, str | Path) else list(data)
        weights = [1.0] * len(addresses) if weights is None else list(weights)
        _check(addresses, weights, batch_size, epochs, window, rank, ranks, workers, prefetch)
        self.batch_size, self.rank, self.ranks = batch_size, rank, ranks
        self.epochs, self.seed = epochs, seed
        self._workers, self._prefetch, self._timeout = workers, prefetch, timeout
        self._masks, self._device = masks, torch.device(device)
        self._sets = [DataSet(place(address, cache, allow), masks) for address in addresses]
        self.schema = _common_schema(self._sets)
        self._order = Order(
            [Part(_sizes(data), weight) for data, weight in zip(self._sets, weights, strict=True)],
            seed,
            shuffle,
            window,
        )
        self._identity = self._fingerprint(shuffle, window)
        self.samples = self._order.samples
        """Samples in an epoch."""
        self.quarantine = Quarantine(self.samples, budget)
        self.position = 0
        """Samples that the whole run, all ranks together, has been given."""
        shape = (batch_size // ranks, self.schema.height, self.schema.width)
        pinned = self._device.type == "cuda"
        self._images, self._mask_images = Buffers((*shape, 3), pinned), Buffers(shape, pinned)
        self._pool: Pool | None = None
        self._waited = 0.0

    @property
    def _end(self) -> int:
        return FOREVER if self.epochs is None else self.epochs * self.samples

    @property
    def epoch(self) -> int:
        return self.position // self.samples

    @property
    def steps(self) -> int | None:
        """Steps left from here, the same on every rank; None if endless."""
        if self.epochs is None:
            return None
        return max(0, -(-(self.epochs * self.samples - self.position) // self.batch_size))

    @property
    def waited(self) -> float:
        """Seconds spent waiting for workers. Much of it: more workers would help, or faster storage."""
        return self._waited + (self._pool.waited if self._pool else 0.0)

    @property
    def workers(self) -> list[int]:
        """The process numbers of the workers that are running."""
        return self._pool.processes if self._pool else []

    def state_dict(self) -> dict[str, int]:
        """Where the run is: after the batch that was last taken from the stream, whatever was read ahead."""
        return {"position": self.position, "seed": self.seed, "order": self._identity}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Goes on where ``state`` was taken, at once. Ranks, workers, batch size and epochs may have changed."""
        if state["seed"] != self.seed or state["order"] != self._identity:
            raise StreamError(
                "the state is of another order of samples; expected the same data, seed, weights, shuffle and window "
                "as when it was saved"
            )
        self.seek(state["position"])

    def seek(self, position: int) -> None:
        """Goes to a position in samples; ``seek(0)`` starts over. Iterate anew afterwards."""
        if position < 0:
            raise ValueError(f"position is {position}; expected 0 or more")
        self.position = position

    def __iter__(self) -> Iterator[Batch]:
        """Batches from the current position on."""
        self.close()
        try:
            for batch, after in _one_ahead(self._batches(), self._device):
                self.position = after
                yield batch
        finally:
            self.close()

    def close(self) -> None:
        """Ends the workers; the stream can be iterated again."""
        if self._pool is not None:
            self._waited += self._pool.waited
            self._pool.close()
            self._pool = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _fingerprint(self, shuffle: bool, window: int | None) -> int:
        hashes = [int(data.manifest.hash[:15], 16) for data in self._sets]
        return int(key(self.seed, *hashes, *self._order.quotas, shuffle, window or 0)[0] >> np.uint64(1))

    def _ordered(self) -> Iterator[_Ordered]:
        """This rank's share of each step to come."""
        share, end, start = self.batch_size // self.ranks, self._end, self.position
        while start < end:
            steps = min(LOOKAHEAD, -(-(end - start) // self.batch_size))
            firsts = start + self.rank * share + self.batch_size * np.arange(steps)
            mine = firsts[:, None] + np.arange(share)
            sets, samples = self._order(mine.reshape(-1))
            for row in zip(sets.reshape(mine.shape), samples.reshape(mine.shape), mine < end, strict=True):
                start += self.batch_size
                yield _Ordered(*row, min(start, end))

    def _batches(self) -> Iterator[tuple[Batch, int]]:
        return self._here() if self._workers == 0 else self._from_workers()

    def _here(self) -> Iterator[tuple[Batch, int]]:
        for ordered in self._ordered():
            images, masks = self._images.take(), self._mask_images.take() if self._masks else None
            filled = fill(
                self._sets, ordered.sets, ordered.samples, images.numpy(), None if masks is None else masks.numpy()
            )
            yield self._batch(ordered, filled, images, masks), ordered.after

    def _from_workers(self) -> Iterator[tuple[Batch, int]]:
        share, count = self.batch_size // self.ranks, self._workers * self._prefetch
        slots = Slots(count, share, self.schema.height, self.schema.width, self._masks)
        self._pool = pool = Pool([data.place for data in self._sets], slots, self._workers, self._timeout)
        coming, asked = self._ordered(), deque[_Ordered]()

        def ask() -> None:
            while pool.room and (ordered := next(coming, None)) is not None:
                pool.ask(ordered.sets, ordered.samples)
                asked.append(ordered)

        ask()
        while asked:
            pixels, mask_pixels, filled = pool.next()
            images = _copied(pixels, self._images)
            masks = None if mask_pixels is None else _copied(mask_pixels, self._mask_images)
            pool.done()
            ordered = asked.popleft()
            ask()  # before the batch is handed out: workers go on while it is in use
            yield self._batch(ordered, filled, images, masks), ordered.after

    def _batch(self, ordered: _Ordered, filled: Filled, images: Tensor, masks: Tensor | None) -> Batch:
        self.quarantine.add(filled.faults)
        return Batch(
            images=images,
            factors={name: torch.from_numpy(values) for name, values in filled.factors.items()},
            masks=masks,
            valid=torch.from_numpy(ordered.real & (np.asarray(filled.samples) == ordered.samples)),
            sets=torch.from_numpy(ordered.sets),
            keys=tuple(filled.keys),
        )


def _sizes(data: DataSet) -> tuple[int, ...]:
    return tuple(shard.samples for shard in data.manifest.shards)


def _copied(pixels: Pixels, buffers: Buffers) -> Tensor:
    """Out of shared memory, whose slot is to be filled again."""
    tensor = buffers.take()
    np.copyto(tensor.numpy(), pixels)
    return tensor


def _one_ahead(batches: Iterator[tuple[Batch, int]], device: torch.device) -> Iterator[tuple[Batch, int]]:
    """On a GPU: each batch is on its way while the one before is in use."""
    if device.type == "cpu":
        yield from batches
        return
    before: tuple[Batch, int] | None = None
    for batch, after in batches:
        sent = _moved(batch, device), after
        if before is not None:
            yield before
        before = sent
    if before is not None:
        yield before


def _moved(batch: Batch, device: torch.device) -> Batch:
    def move(tensor: Tensor) -> Tensor:
        return tensor.to(device, non_blocking=True)

    return Batch(
        images=move(batch.images),
        factors={name: move(values) for name, values in batch.factors.items()},
        masks=None if batch.masks is None else move(batch.masks),
        valid=move(batch.valid),
        sets=move(batch.sets),
        keys=batch.keys,
    )


def _common_schema(sets: Sequence[DataSet]) -> Schema:
    """Data sets of a mixture give the same kind of sample; only the format on disk may differ."""
    first = sets[0].manifest.schema
    for data in sets[1:]:
        other = data.manifest.schema
        for what in ("height", "width", "factors"):
            if getattr(other, what) != getattr(first, what):
                raise StreamError(
                    f"{data.place.origin} differs from {sets[0].place.origin} in {what}; expected data sets of one "
                    "kind in a mixture"
                )
    return first


def _check(
    addresses: Sequence[Any],
    weights: Sequence[float],
    batch_size: int,
    epochs: int | None,
    window: int | None,
    rank: int,
    ranks: int,
    workers: int,
    prefetch: int,
) -> None:
    if not addresses or len(addresses) != len(weights):
        raise ValueError(
            f"{len(addresses)} data sets and {len(weights)} weights; expected as many weights, and some data"
        )
    if not 0 <= rank < ranks:
        raise ValueError(f"rank is {rank} of {ranks}; expected 0 to {ranks - 1}")
    if batch_size < 1 or batch_size % ranks:
        raise ValueError(f"batch_size is {batch_size}; expected a positive multiple of ranks, which is {ranks}")
    if workers < 0 or prefetch < 1 or (epochs is not None and epochs < 1) or (window is not None and window < 1):
        raise ValueError(
            f"workers is {workers}, prefetch {prefetch}, epochs {epochs}, window {window}; expected workers of 0 or "
            "more and the others at least 1"
        )
