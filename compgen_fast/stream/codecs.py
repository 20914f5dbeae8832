"""Images to bytes and back, by format: imagecodecs for JPEG and WebP, png.py, plain NumPy files for raw pixels.

Decoding writes straight into the caller's array, whose shape is the one the manifest promises. The decoders compare it
with the image's own header before they allocate or decompress anything, so an image that claims to be gigapixels costs
nothing. Grey and transparent images are refused likewise: packing writes neither. Those of others (`AS_FOUND`) take the
same way where it gives what PIL would, and PIL's where it does not.
"""

import io
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from importlib import import_module
from typing import Any

import imagecodecs
import numpy as np
from numpy.typing import NDArray

from compgen_fast.stream import png
from compgen_fast.stream.faults import BadSample
from compgen_fast.stream.manifest import AS_FOUND, Format

Pixels = NDArray[np.uint8]
EXTENSIONS: dict[Format, str] = {"raw": "npy", "png": "png", "jpg": "jpg", "webp": "webp"}
JPEG_QUALITY = 95
WEBP_QUALITY = 90

_LARGE = 1 << 15


@lru_cache(maxsize=16)
def raw_header(shape: tuple[int, ...]) -> bytes:
    """What a NumPy file of uint8 pixels of this shape begins with."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": shape})
    return file.getvalue()


def _encode_raw(image: Pixels) -> bytes:
    return raw_header(image.shape) + image.tobytes()


def _encode_jpg(image: Pixels) -> bytes:
    return bytes(imagecodecs.jpeg8_encode(image, level=JPEG_QUALITY, subsampling="444"))


def _encode_webp(image: Pixels) -> bytes:
    return bytes(imagecodecs.webp_encode(image, level=WEBP_QUALITY, lossless=False))


def _decode_raw(data: bytes, out: Pixels) -> None:
    header = raw_header(out.shape)
    if data[: len(header)] != header:
        raise ValueError("it is not a NumPy file of that shape")
    np.copyto(out.reshape(-1), np.frombuffer(data, np.uint8, offset=len(header)))


def _decode_jpg(data: bytes, out: Pixels) -> None:
    imagecodecs.jpeg8_decode(data, out=out)


def _decode_webp(data: bytes, out: Pixels) -> None:
    imagecodecs.webp_decode(data, out=out)


def _decode_found(data: bytes, out: Pixels) -> None:
    plain = _plain(data)
    if plain is not None:
        with suppress(*UNDECODABLE):
            DECODERS[plain](data, out)
            return
    # Workers that read only what was packed here do not pay for PIL.
    np.copyto(out, import_module("compgen_fast.stream.found").pixels(data, *out.shape[:2]))


def _plain(data: bytes) -> Format | None:
    """The format of an image in which nothing is to be turned, laid over black or looked up in a palette. Grey,
    transparent and 16-bit images, and those of another size, the decoders themselves refuse.
    """
    if data.startswith(b"\xff\xd8") and data.endswith(b"\xff\xd9"):  # of a JPEG that is cut they fill the rest in
        return None if b"\xff\xe1" in data[: data.find(b"\xff\xda")] else "jpg"  # EXIF and XMP come before the scan
    if data.startswith(png.SIGNATURE):
        return "png" if png.is_plain(data) else None
    if data[8:15] == b"WEBPVP8" and data[15:16] in (b" ", b"L"):  # the extended kind, X, may be turned
        return "webp"
    return "raw" if data.startswith(b"\x93NUMPY") else None


_ENCODERS: dict[Format, Callable[[Pixels], bytes]] = {
    "raw": _encode_raw,
    "png": png.encode,
    "jpg": _encode_jpg,
    "webp": _encode_webp,
}
# (bytes, uint8 array to fill) → nothing. What they raise is UNDECODABLE; the array is then in any state.
DECODERS: dict[Format, Callable[[bytes, Pixels], None]] = {
    "raw": _decode_raw,
    "png": png.decode,
    "jpg": _decode_jpg,
    "webp": _decode_webp,
    AS_FOUND: _decode_found,
}


def encoder(format: Format) -> Callable[[Pixels], bytes]:
    """uint8 [height, width, 3] (or [height, width], for masks, as PNG) → bytes."""
    return _ENCODERS[format]


# Each codec has an error class of its own, below RuntimeError; a shape that differs is a ValueError.
UNDECODABLE = (RuntimeError, ValueError)


def refusal(format: Format, out: Pixels, cause: object) -> BadSample:
    kind = "" if format == AS_FOUND else f"{format} "
    return BadSample(f"not a readable {kind}image of {'×'.join(map(str, out.shape))} ({cause})")


def crc32(data: bytes | memoryview, before: int = 0) -> int:
    """zlib's CRC-32 of flat data, by whichever code is faster for so much; ``before`` is that of what came earlier."""
    if len(data) < _LARGE:
        return zlib.crc32(data, before)
    crc: Any = imagecodecs.deflate_crc32(data, before)  # type: ignore[arg-type]
    return int(crc)
