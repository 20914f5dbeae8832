"""Ways to damage a packed folder, as disks, networks and people do."""

import dataclasses
import hashlib
import io
import struct
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path

import imagecodecs
import numpy as np

from compgen_fast.stream import codecs, index, manifest

Entry = tuple[str, bytes]


def flip(path: Path, byte: int) -> None:
    data = bytearray(path.read_bytes())
    data[byte] ^= 0x10
    path.write_bytes(data)


def place_of(folder: Path, number: int, shard_size: int = 30) -> tuple[Path, int, int]:
    """The tar that holds a sample's image, and the image's offset and size in it."""
    found = manifest.read(folder / manifest.FILE)
    shard = found.shards[number // shard_size]
    record = index.read(folder / shard.index_name, found.schema)[number % shard_size]
    return folder / shard.name, int(record["offset"]), int(record["size"])


def rewrite(tar: Path, change: Callable[[list[Entry]], list[Entry]]) -> None:
    """Takes a tar apart and puts it together again, changed."""
    with tarfile.open(tar) as archive:
        entries = [(member.name, archive.extractfile(member).read()) for member in archive]  # type: ignore[union-attr]
    with tarfile.open(tar, "w", format=tarfile.USTAR_FORMAT) as archive:
        for name, data in change(entries):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))


def replace_image(folder: Path, number: int, data: bytes, shard_size: int = 30) -> None:
    """Puts other bytes in the place of an image and seals the folder again: every checksum and hash is right."""
    tar, _, _ = place_of(folder, number, shard_size)
    found = manifest.read(folder / manifest.FILE)
    name = f"{number:09d}.{codecs.EXTENSIONS[found.schema.format]}"
    rewrite(tar, lambda entries: [(entry, data if entry == name else old) for entry, old in entries])
    reseal(folder, tar)


def reseal(folder: Path, tar: Path) -> None:
    found = manifest.read(folder / manifest.FILE)
    number = next(number for number, shard in enumerate(found.shards) if shard.name == tar.name)
    path = folder / found.shards[number].index_name
    records = np.array(index.read(path, found.schema))
    with tarfile.open(tar) as archive:
        places = {member.name: (member.offset_data, member.size) for member in archive}
    content = tar.read_bytes()
    for row, key in enumerate(records["key"].tolist()):
        for fields, ending in ((index.PLACE, codecs.EXTENSIONS[found.schema.format]), (index.MASK_PLACE, "mask.png")):
            offset, size = places[f"{key.decode()}.{ending}"]
            for field, value in zip(fields, (offset, size, zlib.crc32(content[offset : offset + size])), strict=True):
                records[field][row] = value
    path.unlink()
    digest = index.write(records, path)
    shard = dataclasses.replace(
        found.shards[number], bytes=len(content), sha256=hashlib.sha256(content).hexdigest(), index_sha256=digest
    )
    shards = (*found.shards[:number], shard, *found.shards[number + 1 :])
    manifest.write(dataclasses.replace(found, shards=shards), folder)


def png_bomb(side: int) -> bytes:
    """A real PNG of side × side black pixels, made without ever holding them."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    squeeze, row = zlib.compressobj(9), bytes(1 + 3 * side)
    pixels = b"".join([*(squeeze.compress(row) for _ in range(side)), squeeze.flush()])
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def jpeg_bomb(side: int) -> bytes:
    """A JPEG whose header claims side × side; decoders fill the missing rest in."""
    small = bytearray(imagecodecs.jpeg8_encode(np.zeros((16, 16, 3), np.uint8)))
    place = small.index(b"\xff\xc0") + 5
    small[place : place + 4] = struct.pack(">HH", side, side)
    return bytes(small)


def webp_bomb(side: int) -> bytes:
    small = bytearray(imagecodecs.webp_encode(np.zeros((16, 16, 3), np.uint8), level=80, lossless=False))
    place = small.index(b"\x9d\x01\x2a") + 3
    small[place : place + 4] = struct.pack("<HH", side, side)
    return bytes(small)
