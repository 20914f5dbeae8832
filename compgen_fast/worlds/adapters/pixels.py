"""From an image file to the middle square of it at the resolution asked for, and the mask beside it to the same.

Images shrink by Lanczos, PIL's best filter; masks by nearest neighbour, since the mean of slot 1 and slot 3 is not slot
2. Both are cut to the same square first, so they stay aligned. The header is looked at before anything is decoded: a
file that claims to be absurdly large is refused.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps

from compgen_fast.worlds.adapters.layout import FolderError

MAX_PIXELS = 2**26
_EIGHT_BIT = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")


def read_image(path: Path, resolution: int) -> NDArray[np.uint8]:
    """[resolution, resolution, 3]. What is transparent is laid over black."""
    image = to_rgb(_decoded(path, _EIGHT_BIT))
    return np.asarray(_resized(_middle(image), resolution, Image.Resampling.LANCZOS))


def to_rgb(image: Image.Image) -> Image.Image:
    """Upright as EXIF says, and what is transparent over black."""
    image = ImageOps.exif_transpose(image)
    if image.has_transparency_data:
        image = Image.alpha_composite(Image.new("RGBA", image.size, (0, 0, 0, 255)), image.convert("RGBA"))
    return image.convert("RGB")


def upright_size(image: Image.Image) -> tuple[int, int]:
    """Height and width as EXIF says, of an image that is not decoded yet."""
    turned = image.getexif().get(ExifTags.Base.Orientation, 1) >= 5
    return image.size if turned else (image.height, image.width)


def read_mask(path: Path, image: Path, resolution: int, slots: int) -> NDArray[np.uint8]:
    """[resolution, resolution], the slot of each pixel; a palette's numbers count, not its colours."""
    mask = _decoded(path, ("L", "P"))
    if mask.size != (size := _size(image)):
        raise FolderError(f"{path}: the mask is {_by(mask.size)} pixels and its image {image.name} {_by(size)}")
    numbers = np.asarray(_resized(_middle(mask), resolution, Image.Resampling.NEAREST))
    if int(numbers.max()) >= slots:
        raise FolderError(
            f"{path}: the mask holds the number {int(numbers.max())}, but there are {slots - 1} objects at most; "
            "it should number the objects from 1, in the order of the scene file, with 0 as background"
        )
    return numbers


def resized(image: NDArray[np.uint8], resolution: int) -> NDArray[np.uint8]:
    """An image that is already decoded, [height, width, 3]."""
    return np.asarray(_resized(_middle(Image.fromarray(image)), resolution, Image.Resampling.LANCZOS))


def _decoded(path: Path, modes: tuple[str, ...]) -> Image.Image:
    try:
        with Image.open(path) as image:
            check(image, modes)
            image.load()
            return image
    except Exception as error:  # PIL's plugins raise nearly anything on a broken file
        raise FolderError(f"{path}: the image cannot be read ({error}); restore or remove the file") from error


def check(image: Image.Image, modes: tuple[str, ...] = _EIGHT_BIT) -> None:
    """Refuses an image by its header."""
    if image.width * image.height > MAX_PIXELS:
        raise ValueError(f"it claims {_by(image.size)} pixels, and more than {MAX_PIXELS:,} are refused")
    if image.mode not in modes:
        raise ValueError(f"its mode is {image.mode}, expected one of {', '.join(modes)}")


def _size(path: Path) -> tuple[int, int]:
    with Image.open(path) as image:
        return image.size


def _middle(image: Image.Image) -> Image.Image:
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    return image if image.width == image.height else image.crop((left, top, left + side, top + side))


def _resized(image: Image.Image, resolution: int, by: Image.Resampling) -> Image.Image:
    return image if image.width == resolution else image.resize((resolution, resolution), by)


def _by(size: tuple[int, int]) -> str:
    return f"{size[0]}×{size[1]}"
