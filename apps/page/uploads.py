"""What a visitor may hand in, looked at before anything else touches it, and forgotten again."""

from __future__ import annotations

import filecmp
import threading
import time
import warnings
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from vidsparse.apps.runs.prompts import parse_prompts
from vidsparse.errors import OptionError, OutputError
from vidsparse.pipelines.image import plain_image

if TYPE_CHECKING:
    from PIL import Image

# of an uploaded picture: above what any model reads and what most cameras make, far below what
# fills the memory.
MOST_PIXELS = 16_000_000
MOST_SIDE = 10_000

# a few kilobytes can hold a picture that takes hundreds of megabytes once it is decoded.
_decoding = threading.Lock()

# seconds. gradio keeps what it is sent and copies what it shows; nothing is lost with either, since
# pictures are written anew and videos stay in the visits' folders, to be copied when shown again.
CLEAN_EVERY = 600
CLEAN_AFTER = 6 * 3600

_IMAGE_FORMATS = ("PNG", "JPEG", "WEBP")


class Allowance:
    """How much visitors may hand in before the first of it is forgotten.

    Args:
        each: bytes of one visitor.
        together: bytes of all.
    """

    def __init__(self, each: int, together: int) -> None:
        self._each, self._together = each, together
        self._taken: deque[tuple[float, str, int]] = deque()

    def take(self, visitor: str, size: int) -> bool:
        """Count an upload of that many bytes; False, and nothing is counted, if it is too much."""
        now = time.monotonic()
        while self._taken and now - self._taken[0][0] > CLEAN_AFTER:
            self._taken.popleft()
        # the smallest file takes a place on the disk as well.
        size = max(size, 2**16)
        own = sum(each for _, name, each in self._taken if name == visitor)
        if own + size > self._each or sum(each for _, _, each in self._taken) + size > (
            self._together
        ):
            return False
        self._taken.append((now, visitor, size))
        return True


def forget_old(folder: Path) -> None:
    """Remove what a page that was killed left among gradio's files; the others clean up."""
    for path in folder.glob("*/*"):
        # another page may be using the folder: what was removed meanwhile is gone, as it should be.
        with suppress(OSError):
            if time.time() - path.stat().st_ctime > CLEAN_AFTER:
                path.unlink()
    for path in folder.iterdir():
        with suppress(OSError):
            path.rmdir()


def check_size(path: Path, megabytes: int) -> None:
    """Refuse a file that is too large.

    Raises:
        OptionError: it is, or it cannot be read.
    """
    try:
        size = path.stat().st_size
    except OSError:
        raise OptionError("the upload did not arrive. Hint: try it again.") from None
    if size > megabytes * 2**20:
        raise OptionError(
            f"an upload can have at most {megabytes} MB here, this one has {size / 2**20:.1f}. "
            "Hint: the host of the page sets this limit."
        )


def read_prompt_file(path: Path, *, megabytes: int, most: int) -> list[str]:
    """The prompts of an uploaded text file, one a line.

    Raises:
        OptionError: too large, not UTF-8 text, without a prompt, or with too many.
    """
    check_size(path, megabytes)
    data = path.read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise OptionError(
            f"the file is not UTF-8 text (byte {error.start}). Hint: save it with UTF-8 encoding."
        ) from None
    return read_prompt_lines(text, most=most)


def read_prompt_lines(text: str, *, most: int) -> list[str]:
    """The prompts of a text, one a line.

    Raises:
        OptionError: none, too many, or one that is too long.
    """
    prompts = [prompt.text for prompt in parse_prompts("the text", text)]
    if not prompts:
        raise OptionError("there are no prompts. Hint: write one a line.")
    if len(prompts) > most:
        raise OptionError(
            f"a report can have at most {most} prompts here, got {len(prompts)}. "
            "Hint: the host of the page sets this limit."
        )
    return prompts


def rewrite_image(path: Path, target: Path, *, megabytes: int) -> Path:
    """Decode an uploaded picture and write it anew as ``target``, a PNG without its metadata.

    Models are given this copy: whatever else was in the upload stays behind. One picture is decoded
    at a time; the others wait.

    Raises:
        OptionError: too large, no PNG, JPEG or WebP, broken, or with too many pixels.
        OutputError: the copy cannot be written.
    """
    check_size(path, megabytes)
    with _decoding:
        plain = _decode(path)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            plain.save(target, format="PNG")
        except OSError as error:
            with suppress(OSError):
                target.unlink(missing_ok=True)
            raise OutputError(f"{target} cannot be written: {error.strerror}") from None
    return target


def kept_picture(path: Path, folder: Path) -> Path | None:
    """The picture of a visit's folder that a file is a copy of, None where there is none.

    The page puts such pictures into its uploads itself, of settings that are used again or come
    back, and gradio hands a copy of them in like any other file.
    """
    for kept in folder.glob("*.png"):
        # one that is gone meanwhile is no picture of the visit any more.
        with suppress(OSError):
            if filecmp.cmp(kept, path, shallow=False):
                return kept
    return None


def _decode(path: Path) -> Image.Image:
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            # other formats' decoders, some of which start programs, are never asked.
            with Image.open(path, formats=_IMAGE_FORMATS) as image:
                # the header says how large it is; nothing is decoded yet.
                if image.width * image.height > MOST_PIXELS or max(image.size) > MOST_SIDE:
                    raise OptionError(
                        f"a picture can have at most {MOST_PIXELS / 1e6:.0f} megapixels and "
                        f"{MOST_SIDE:,} pixels a side, this one has {image.width}x{image.height}. "
                        "Hint: scale it down."
                    )
                plain = plain_image(image, "the picture")
                # frees what it was decoded to, which leaving the block does not.
                image.close()
                return plain
    except (OptionError, MemoryError):
        raise
    except UnidentifiedImageError:
        raise OptionError(
            "the upload is no picture that can be read. Hint: use PNG, JPEG or WebP."
        ) from None
    # broken files raise whatever their decoder trips over.
    except Exception as error:
        raise OptionError(f"the picture is broken: {error}") from None
