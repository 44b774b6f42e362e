"""Writing files so that they appear whole or not at all."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from vidsparse.errors import OutputError


def write_text(path: Path, text: str) -> None:
    """Write ``text`` as UTF-8, in the way of ``write_whole``.

    Raises:
        OutputError: the folder cannot be written to, or the disk is full.
    """
    try:
        write_whole(path, text.encode("utf-8"))
    except OSError as error:
        reason = error.strerror or str(error)
        raise OutputError(
            f"{path} cannot be written: {reason}. Hint: name a file in another folder."
        ) from None


def write_whole(path: Path, data: bytes) -> None:
    """Write ``data`` beside ``path`` and move it there.

    Raises:
        OSError: the folder cannot be written to, or the disk is full.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        # mkstemp makes private files; a result is as readable as the user's other files.
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
