"""One packed data set, read by sample number: the image's bytes through the index, checked, decoded into place.

Bytes come by `os.pread` and not through a memory map. It costs 1 µs a sample more for images of a few KB and less for
those of 100 KB, and a disk that fails to read, or a file cut short under our feet, is an error to quarantine where a
map kills the process.
"""

import os
import resource
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compgen_fast.stream import codecs, index, manifest
from compgen_fast.stream.faults import BadSample, BadShard, Fault, StreamError
from compgen_fast.stream.order import substitute
from compgen_fast.stream.remote import Place

Pixels = NDArray[np.uint8]
ATTEMPTS = 100


class OpenShard:
    """An open tar and its index."""

    def __init__(self, place: Place, entry: manifest.Shard, schema: manifest.Schema, trusted: bool) -> None:
        sha256 = None if trusted else entry.index_sha256
        records = index.read(place.file(entry.index_name, entry.index_sha256), schema, entry.samples, sha256)
        self.place = records[list(index.PLACE)]
        self.mask_place = records[list(index.MASK_PLACE)] if schema.masks else None
        self._described = records[["key", *(f"factor.{factor.name}" for factor in schema.factors)]]
        self.name = entry.name
        self._format = schema.format
        self._decode = codecs.DECODERS[schema.format]
        self._header = codecs.raw_header((schema.height, schema.width, 3)) if schema.format == "raw" else b""
        self._header_crc = codecs.crc32(self._header)
        try:
            self._file = os.open(place.file(entry.name, entry.sha256), os.O_RDONLY)
        except OSError as error:
            raise BadShard(f"{entry.name} cannot be opened: {error.strerror}") from None

    def read(self, row: int, image: Pixels, mask: Pixels | None) -> None:
        """Fills the arrays with a sample. Raises `BadSample`, and leaves them in any state."""
        if self._header:
            self._read_raw(row, image)
        else:
            data = self.encoded(self.place, row)
            try:
                self._decode(data, image)
            except codecs.UNDECODABLE as error:
                raise codecs.refusal(self._format, image, error) from None
        if mask is not None:
            assert self.mask_place is not None
            data = self.encoded(self.mask_place, row)
            try:
                codecs.DECODERS["png"](data, mask)
            except codecs.UNDECODABLE as error:
                raise codecs.refusal("png", mask, error) from None

    def encoded(self, place: index.Records, row: int) -> bytes:
        """The bytes of an image or mask, checked."""
        offset, size, crc = place.item(row)
        try:
            data = os.pread(self._file, size, offset)
        except OSError as error:
            raise BadSample(f"its bytes cannot be read: {error.strerror}") from None
        if len(data) < size:
            raise BadSample(f"{self.name} ends before it")
        if codecs.crc32(data) != crc:
            raise BadSample("its checksum differs from the index")
        return data

    def description(self, row: int) -> tuple[Any, ...]:
        """The key, as bytes, then the factors."""
        found: Any = self._described.item(row)
        return found  # type: ignore[no-any-return]

    def _read_raw(self, row: int, out: Pixels) -> None:
        """From the file straight into place."""
        offset, size, crc = self.place.item(row)
        if size != len(self._header) + out.nbytes:
            raise codecs.refusal(self._format, out, f"it has {size} bytes")
        head, pixels = bytearray(len(self._header)), out.data.cast("B")
        try:
            got = os.preadv(self._file, (head, pixels), offset)
        except OSError as error:
            raise BadSample(f"its bytes cannot be read: {error.strerror}") from None
        if got < size:
            raise BadSample(f"{self.name} ends before it")
        if codecs.crc32(pixels, self._header_crc) != crc or head != self._header:
            raise BadSample("its checksum differs from the index")

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)


def _most_open() -> int:
    """How many shards may be open, at two descriptors each (tar and index), leaving as many to the rest of the process.

    Beyond it the one opened first is closed; opening it again costs a tenth of a millisecond.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 1 << 14 if limit == resource.RLIM_INFINITY else max(1, limit // 4)


@dataclass(frozen=True)
class Filled:
    """What came of reading some samples: which were read, stand-ins among them, and what was bad."""

    samples: list[int]
    keys: list[str]
    factors: dict[str, NDArray[Any]]
    faults: list[Fault]


class DataSet:
    """The samples of one manifest by number, with what is known to be bad."""

    def __init__(self, place: Place, masks: bool = False) -> None:
        self.place = place
        self.manifest = manifest.read(place.file(manifest.FILE), place.origin)
        schema = self.manifest.schema
        if masks and not schema.masks:
            raise StreamError(f"{place.origin} has no masks; leave masks=False, or pack a source that knows them")
        sizes = [shard.samples for shard in self.manifest.shards]
        self.samples = sum(sizes)
        self._starts = np.concatenate([[0], np.cumsum(sizes)]).tolist()
        self._open: OrderedDict[int, OpenShard] = OrderedDict()
        self._most_open = _most_open()
        self._trusted: set[int] = set()
        self._refused: dict[int, str] = {}
        self._factors = [(factor.name, np.int64 if factor.categorical else np.float32) for factor in schema.factors]

    def fill(self, samples: Sequence[int], images: Iterable[Pixels], masks: Iterable[Pixels] | None = None) -> Filled:
        """Reads each sample, or what stands in for it, into its place."""
        used: list[int] = []
        described: list[tuple[Any, ...]] = []
        faults: list[Fault] = []
        for sample, image, mask in zip(samples, images, repeat(None) if masks is None else masks, strict=False):
            try:
                shard, row = self.at(sample)
                shard.read(row, image, mask)
            except (BadSample, BadShard) as error:
                faults.append(self._fault(sample, error))
                sample = self._stand_in(sample, image, mask, faults)
                shard, row = self.at(sample)
            used.append(sample)
            described.append(shard.description(row))
        keys, *columns = zip(*described, strict=True)
        factors = {name: np.array(column, kind) for (name, kind), column in zip(self._factors, columns, strict=True)}
        return Filled(used, [str(key, "utf-8") for key in keys], factors, faults)

    def _stand_in(self, bad: int, image: Pixels, mask: Pixels | None, faults: list[Fault]) -> int:
        """The first readable one of the samples that stand in for a bad one, read."""
        for attempt in range(ATTEMPTS):
            sample = substitute(bad, attempt, self.samples)
            try:
                shard, row = self.at(sample)
                shard.read(row, image, mask)
                return sample
            except (BadSample, BadShard) as error:
                faults.append(self._fault(sample, error))
        raise StreamError(
            f"{self.place.origin}: none of {ATTEMPTS} samples tried in turn could be read; the first: {faults[0]}"
        )

    def _fault(self, sample: int, error: StreamError) -> Fault:
        entry = self.manifest.shards[bisect_right(self._starts, sample) - 1]
        if isinstance(error, BadShard):
            return Fault(entry.name, "", str(error), entry.samples)
        shard, row = self.at(sample)
        return Fault(entry.name, str(shard.description(row)[0], "utf-8"), str(error))

    def at(self, sample: int) -> tuple[OpenShard, int]:
        """The shard that holds a sample, and its row there."""
        number = bisect_right(self._starts, sample) - 1
        shard = self._open.get(number) or self._opened(number)
        return shard, sample - self._starts[number]

    def _opened(self, number: int) -> OpenShard:
        if number in self._refused:
            raise BadShard(self._refused[number])
        try:
            shard = OpenShard(self.place, self.manifest.shards[number], self.manifest.schema, number in self._trusted)
        except BadShard as error:
            self._refused[number] = str(error)
            raise
        self._trusted.add(number)
        self._open[number] = shard
        if len(self._open) > self._most_open:
            self._open.popitem(last=False)
        return shard
