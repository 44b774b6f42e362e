"""The images that a video begins and ends with."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from vidsparse.errors import OptionError
from vidsparse.files import file_hash

if TYPE_CHECKING:
    from PIL.Image import Image

LEAST_SIDE: Final = 16
"""Pixels that an image must have each way: one token of the finest model."""


def check_image(path: str | os.PathLike[str]) -> tuple[int, int]:
    """Width and height of an image file, turned as its camera was held.

    Raises:
        OptionError: it is missing, no image that can be read whole, or too small.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise OptionError(f"an image must be the path of a file, got {path!r}")
    if not os.path.isfile(path):
        raise OptionError(f"there is no image file {os.fspath(path)}")
    stat = os.stat(path)
    return _checked(os.fspath(path), stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=64)
def _checked(path: str, changed: int, size: int) -> tuple[int, int]:
    # requests are copied often; a file that stays as it is need not be decoded each time.
    return read_image(path).size


def read_image(path: str | os.PathLike[str]) -> Image:
    """An image file in RGB, turned as its camera was held, on white where it is transparent.

    Raises:
        OptionError: it is missing, no image that can be read whole, too small, or has values that
            say nothing of how bright they are.
    """
    from PIL import Image

    name = os.fspath(path)
    try:
        with Image.open(name) as opened:
            image = plain_image(opened, name)
    except (OptionError, MemoryError):
        raise
    # broken files raise whatever their decoder trips over.
    except Exception as error:
        raise OptionError(f"{name} holds no image that can be read: {error}") from error
    if min(image.size) < LEAST_SIDE:
        raise OptionError(
            f"{name} has {image.width}x{image.height} pixels. "
            f"Hint: an image needs at least {LEAST_SIDE} each way."
        )
    return image


def plain_image(image: Image, name: str) -> Image:
    """``image`` in RGB, turned as its camera was held, on white where it is transparent.

    Nothing else that its file held comes along.

    Raises:
        OptionError: it has values that say nothing of how bright they are; ``name`` says which.
        Exception: whatever the decoder of a broken file trips over.
    """
    from PIL import ExifTags, Image, ImageOps

    image.load()
    held = image.getexif().get(ExifTags.Base.Orientation)
    plain = _in_rgb(image, name)
    # Pillow writes all that a camera said anew to turn a picture, and fails where an entry of it
    # has another type than its name: nothing but the turn is left for it.
    turn = Image.Exif()
    turn[ExifTags.Base.Orientation] = held if held in range(1, 9) else 1
    plain.info = {"exif": turn.tobytes()}
    ImageOps.exif_transpose(plain, in_place=True)
    plain.info = {}
    return plain


def _in_rgb(image: Image, name: str) -> Image:
    """``image`` in 8 bits a colour; Pillow would clip deeper ones and show what nobody can see."""
    from PIL import Image

    if image.mode == "F" or image.mode.startswith("I"):
        numbers = np.asarray(image)
        # integers of 16 bits may be held in 32.
        if image.mode == "F" or numbers.min() < 0 or numbers.max() >= 2**16:
            raise OptionError(
                f"{name} holds numbers of which none is known to be white. "
                "Hint: save it with 8 or 16 bits for each colour."
            )
        grey = (numbers.astype(np.int32) + 128) // 257
        return Image.fromarray(grey.astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        seen = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", seen.size, "white"), seen).convert("RGB")
    return image.convert("RGB")


def image_hash(path: str | os.PathLike[str]) -> str:
    """SHA-256 of the file."""
    return file_hash(Path(path))


def fit_image(image: Image, width: int, height: int) -> Image:
    """``image`` filled into ``width`` x ``height``: scaled to cover it, the rest cut off evenly."""
    from PIL import Image, ImageOps

    return ImageOps.fit(image, (width, height), Image.Resampling.LANCZOS)
