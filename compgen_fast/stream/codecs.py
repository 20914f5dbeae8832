"""Images to bytes and back, by format: imagecodecs for JPEG and WebP, png.py, plain NumPy files for raw pixels.

Decoding writes straight into the caller's array, whose shape is the one the manifest promises. The decoders compare it
with the image's own header before they allocate or decompress anything, so an image that claims to be gigapixels costs
nothing. Grey and transparent images are refused likewise: packing writes neither.
"""

import io
import zlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import imagecodecs
import numpy as np
from numpy.typing import NDArray

from compgen_fast.stream import png
from compgen_fast.stream.faults import BadSample
from compgen_fast.stream.manifest import Format

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
}


def encoder(format: Format) -> Callable[[Pixels], bytes]:
    """uint8 [height, width, 3] (or [height, width], for masks, as PNG) → bytes."""
    return _ENCODERS[format]


# Each codec has an error class of its own, below RuntimeError; a shape that differs is a ValueError.
UNDECODABLE = (RuntimeError, ValueError)


def refusal(format: Format, out: Pixels, cause: object) -> BadSample:
    return BadSample(f"not a readable {format} image of {'×'.join(map(str, out.shape))} ({cause})")


def crc32(data: bytes | memoryview, before: int = 0) -> int:
    """zlib's CRC-32 of flat data, by whichever code is faster for so much; ``before`` is that of what came earlier."""
    if len(data) < _LARGE:
        return zlib.crc32(data, before)
    crc: Any = imagecodecs.deflate_crc32(data, before)  # type: ignore[arg-type]
    return int(crc)
