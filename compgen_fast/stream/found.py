"""Images as other programs wrote them: what PIL opens, or a NumPy file of bytes, made upright RGB of a size.

Whatever is wrong with one is a ValueError.
"""

import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from compgen_fast.worlds.adapters.pixels import check, resized, to_rgb, upright_size

Pixels = NDArray[np.uint8]
NUMPY = b"\x93NUMPY"


def size(data: bytes) -> tuple[int, int]:
    """Height and width once the image is upright, by its header."""
    try:
        return upright_size(_opened(data))
    except Exception as error:  # PIL's plugins raise nearly anything on a broken file
        raise ValueError(str(error)) from None


def pixels(data: bytes, height: int, width: int) -> Pixels:
    """uint8 [height, width, 3]. An image of another size is made this one if it is a square: its middle, resized."""
    try:
        found = np.asarray(to_rgb(_opened(data)))
    except Exception as error:
        raise ValueError(str(error)) from None
    if found.shape[:2] == (height, width):
        return found
    if height != width:
        raise ValueError(f"it is {found.shape[0]}×{found.shape[1]}")
    return resized(found, height)


def _opened(data: bytes) -> Image.Image:
    try:
        image = Image.fromarray(_array(data)) if data.startswith(NUMPY) else Image.open(io.BytesIO(data))
    except UnidentifiedImageError:
        raise ValueError("no kind of image that PIL knows") from None
    check(image)
    return image


def _array(data: bytes) -> Pixels:
    """Grey [height, width], or [height, width, channels]."""
    array: Pixels = np.load(io.BytesIO(data), allow_pickle=False)
    if array.dtype != np.uint8 or not array.size or array.shape[2:] not in ((), (1,), (3,), (4,)) or array.ndim < 2:
        raise ValueError(
            f"it holds {array.dtype} {list(array.shape)}; expected uint8 [height, width] or [height, width, 1, 3 or 4]"
        )
    return array[..., 0] if array.shape[2:] == (1,) else array
