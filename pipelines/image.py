"""The images that a video begins and ends with."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

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
    """An image file in RGB, turned as its camera was held.

    Raises:
        OptionError: it is missing, no image that can be read whole, or too small.
    """
    from PIL import Image, ImageOps

    name = os.fspath(path)
    try:
        with Image.open(name) as opened:
            image = ImageOps.exif_transpose(opened).convert("RGB")
    # broken files raise whatever their decoder trips over.
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise OptionError(f"{name} holds no image that can be read: {error}") from error
    if min(image.size) < LEAST_SIDE:
        raise OptionError(
            f"{name} has {image.width}x{image.height} pixels. "
            f"Hint: an image needs at least {LEAST_SIDE} each way."
        )
    return image


def image_hash(path: str | os.PathLike[str]) -> str:
    """SHA-256 of the file."""
    return file_hash(Path(path))


def fit_image(image: Image, width: int, height: int) -> Image:
    """``image`` filled into ``width`` x ``height``: scaled to cover it, the rest cut off evenly."""
    from PIL import Image, ImageOps

    return ImageOps.fit(image, (width, height), Image.Resampling.LANCZOS)
