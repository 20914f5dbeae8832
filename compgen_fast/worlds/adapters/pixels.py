"""From an image file to a square at the resolution asked for, and the mask beside it to the same.

Cameras' rotation marks (EXIF) are followed. Then either the middle square is cut out or, with ``"pad"``, the whole
image lies in the middle of black. Images are resized by Lanczos, PIL's best filter; masks by nearest neighbour, since
the mean of slot 1 and slot 3 is not slot 2. Both are cut alike, so they stay aligned. The header is looked at before
anything is decoded: a file that claims to be absurdly large is refused.
"""

from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from compgen_fast.worlds.adapters.layout import FolderError

Fit = Literal["crop", "pad"]
MADE: dict[Fit, str] = {
    "crop": "centre crop, resized by Lanczos, EXIF turned, alpha over black",
    "pad": "whole image on a black square, resized by Lanczos, EXIF turned, alpha over black",
}
MAX_PIXELS = 2**26
_SIXTEEN_BIT = ("I;16", "I;16L", "I;16B", "I;16N")
_KNOWN = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", *_SIXTEEN_BIT)
_SIDEWAYS = (5, 6, 7, 8)  # values of EXIF's orientation that swap width and height


class BadImage(FolderError):
    """An image, or its mask, that cannot be used. ``what`` is wrong with it."""

    def __init__(self, path: Path, what: str, advice: str = "restore or remove the file") -> None:
        super().__init__(path, what, advice)  # kept as they are: it travels between processes
        self.path, self.what = path, what

    def __str__(self) -> str:
        path, what, advice = self.args
        return f"{path}: {what}; {advice}"


def read_image(path: Path, resolution: int, fit: Fit = "crop") -> NDArray[np.uint8]:
    """[resolution, resolution, 3]. What is transparent is laid over black; 16 bits of grey become 8."""
    image = _fitted(to_rgb(decoded_image(path)), fit)
    return np.asarray(_resized(image, resolution, Image.Resampling.LANCZOS))


def to_rgb(image: Image.Image) -> Image.Image:
    """Upright as EXIF says, 16 bits of grey as 8, and what is transparent over black."""
    image = _eight_bit(ImageOps.exif_transpose(image))
    if image.has_transparency_data:
        image = Image.alpha_composite(Image.new("RGBA", image.size, (0, 0, 0, 255)), image.convert("RGBA"))
    return image.convert("RGB")


def read_mask(path: Path, image: Path, resolution: int, slots: int, fit: Fit = "crop") -> NDArray[np.uint8]:
    """[resolution, resolution], the slot of each pixel; a palette's numbers count, not its colours."""
    mask = _decoded(path, ("L", "P"))
    if mask.size != (size := _size(image)):
        what = f"the mask is {_by(mask.size)} pixels and its image {image.name} {_by(size)}"
        raise BadImage(path, what, "expected the two alike")
    numbers = np.asarray(_resized(_fitted(mask, fit), resolution, Image.Resampling.NEAREST))
    if int(numbers.max()) >= slots:
        what = f"the mask holds the number {int(numbers.max())}, but there are {slots - 1} objects at most"
        raise BadImage(
            path, what, "it should number the objects from 1, in the order of the scene file, with 0 as background"
        )
    return numbers


def decoded_image(path: Path) -> Image.Image:
    return _decoded(path, _KNOWN)


def resized(image: NDArray[np.uint8], resolution: int) -> NDArray[np.uint8]:
    """An image that is already decoded, [height, width, 3]."""
    return np.asarray(_resized(_fitted(Image.fromarray(image), "crop"), resolution, Image.Resampling.LANCZOS))


def _decoded(path: Path, modes: tuple[str, ...]) -> Image.Image:
    try:
        with Image.open(path) as image:
            check(image, modes)
            image.load()
            ImageOps.exif_transpose(image, in_place=True)
            return image
    except UnidentifiedImageError:
        raise BadImage(path, "this is not an image, whatever its ending says") from None
    except Exception as error:  # PIL's plugins raise nearly anything on a broken file
        raise BadImage(path, f"the image cannot be read ({error})") from error


def check(image: Image.Image, modes: tuple[str, ...] = _KNOWN) -> None:
    """Refuses an image by its header."""
    if image.width * image.height > MAX_PIXELS:
        raise ValueError(f"it claims {_by(image.size)} pixels, and more than {MAX_PIXELS:,} are refused")
    if image.mode not in modes:
        raise ValueError(f"its mode is {image.mode}, expected one of {', '.join(modes)}")


def upright_size(image: Image.Image) -> tuple[int, int]:
    """Height and width as EXIF says, of an image that is not decoded yet."""
    turned = image.getexif().get(ExifTags.Base.Orientation) in _SIDEWAYS
    return image.size if turned else (image.height, image.width)


def _size(path: Path) -> tuple[int, int]:
    """Width and height as `_decoded` gives them, without decoding."""
    with Image.open(path) as image:
        height, width = upright_size(image)
        return width, height


def _eight_bit(image: Image.Image) -> Image.Image:
    if image.mode not in _SIXTEEN_BIT:
        return image
    return Image.fromarray(((np.asarray(image).astype(np.uint32) + 128) // 257).astype(np.uint8))  # 65535 / 255 = 257


def _fitted(image: Image.Image, fit: Fit) -> Image.Image:
    """The middle square, or all of it."""
    if fit == "pad" or image.width == image.height:
        return image
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    return image.crop((left, top, left + side, top + side))


def _resized(image: Image.Image, resolution: int, by: Image.Resampling) -> Image.Image:
    """The longer side becomes ``resolution``, and what is not square then lies in the middle of zeros."""
    longer = max(image.size)
    width, height = (max(1, round(side * resolution / longer)) for side in image.size)
    scaled = image if longer == resolution else image.resize((width, height), by)
    if width == height:
        return scaled
    square = Image.new(image.mode, (resolution, resolution))
    square.paste(scaled, ((resolution - width) // 2, (resolution - height) // 2))
    return square


def _by(size: tuple[int, int]) -> str:
    return f"{size[0]}×{size[1]}"
