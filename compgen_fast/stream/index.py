"""The index of a shard: one record per sample, in the order of the tar, as a NumPy file that is mapped and not loaded.

key         bytes     the sample's name in the tar
offset      int64     where the image's bytes begin in the tar; size (int64) and crc (uint32, zlib's) belong to them
mask.*      the same three for the mask, where there are masks
factor.*    int64 (a category's number) or float32, one per factor
"""

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compgen_fast.stream.faults import BadShard
from compgen_fast.stream.manifest import Schema

Records = NDArray[np.void]
PLACE = ("offset", "size", "crc")
MASK_PLACE = ("mask.offset", "mask.size", "mask.crc")
KEY_LENGTH = 24
"""Of what packing writes. Keys of others are as long as they are, so the length is read from the index."""
MOST_HEADER = 1 << 20


def dtype(schema: Schema, key_length: int = KEY_LENGTH) -> np.dtype[np.void]:
    place = ("<i8", "<i8", "<u4")
    fields: list[tuple[str, str]] = [("key", f"S{key_length}"), *zip(PLACE, place, strict=True)]
    if schema.masks:
        fields += zip(MASK_PLACE, place, strict=True)
    fields += [(f"factor.{factor.name}", "<i8" if factor.categorical else "<f4") for factor in schema.factors]
    return np.dtype(fields)


def write(records: Records, path: Path) -> str:
    """Writes an index and returns the hash of the file."""
    with path.open("wb") as file:
        np.save(file, records, allow_pickle=False)
        file.flush()
        os.fsync(file.fileno())
    return digest(path)


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read(path: Path, schema: Schema, samples: int | None = None, sha256: str | None = None) -> Records:
    """Maps an index. Raises `BadShard` where it is missing, damaged, or another than the manifest speaks of."""
    try:
        if sha256 is not None and digest(path) != sha256:
            raise BadShard(f"{path.name} is damaged: its hash differs from the manifest's")
        mapped: Any = np.load(path, mmap_mode="r", allow_pickle=False, max_header_size=MOST_HEADER)
    except FileNotFoundError:
        raise BadShard(f"{path.name} is missing") from None
    except (OSError, ValueError, EOFError) as error:
        raise BadShard(f"{path.name} cannot be read: {error}") from None
    records: Records = mapped.view(np.ndarray)
    if records.dtype != dtype(schema, _key_length(records)) or records.ndim != 1 or samples not in (None, len(records)):
        raise BadShard(f"{path.name} does not fit the manifest: {len(records)} records of {records.dtype}")
    return records


def _key_length(records: Records) -> int:
    return records.dtype["key"].itemsize if "key" in (records.dtype.names or ()) else KEY_LENGTH
