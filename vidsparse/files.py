"""Writing files so that they appear whole or not at all, and reading what others wrote."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from vidsparse.errors import FolderError, OutputError

_NAMES: Final = "ENOSPC EDQUOT EROFS ENOENT ENOTDIR EACCES EPERM EIO ESTALE"
# not every system has them all.
_OF_THE_FOLDER: Final = frozenset(getattr(errno, n) for n in _NAMES.split() if hasattr(errno, n))

# the second form is that of version 0.1.
_PARTIAL: Final = re.compile(r"\..+\.[0-9a-z_]{8}\.tmp|\..+-[0-9a-f]{8}\.mp4")


def write_text(path: Path, text: str, hint: str = "Hint: name a file in another folder.") -> None:
    """Write ``text`` as UTF-8, in the way of ``write_whole``.

    Names of files may hold bytes that are no text. They are written as the escape that JSON has for
    them, rather than failing once all work is done. Errors end with ``hint``.

    Raises:
        FolderError: the folder is gone or cannot be written to, or the disk is full.
        OutputError: this file cannot be written.
    """
    try:
        write_whole(path, text.encode("utf-8", "backslashreplace"))
    except OSError as error:
        raise unwritten(path, error, hint) from None


def write_whole(path: Path, data: bytes) -> None:
    """Write ``data`` beside ``path`` and move it there.

    Raises:
        OSError: the folder cannot be written to, or the disk is full.
    """
    partial = partial_name(path)
    try:
        with partial.open("xb") as file:
            file.write(data)
        put_in_place(partial, path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise


def partial_name(path: Path) -> Path:
    """A hidden name beside ``path`` for a file that is still being written."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")


def put_in_place(partial: Path, path: Path) -> None:
    """Move a file that was written whole to ``path``, on the disk before it has that name.

    Raises:
        OSError: the disk is full or failing.
    """
    # data may still wait in memory, and some disks say only then that they are full.
    with partial.open("rb+") as file:
        os.fsync(file.fileno())
    os.replace(partial, path)


def clear_partial(folder: Path, *names: str, untouched: float = 0) -> None:
    """Remove what killed runs left half written in ``folder``.

    Args:
        folder: where to look.
        names: of the files whose partial ones are removed; all files' where none is given.
        untouched: seconds that nobody has written to them, where others may be writing there.
    """
    begun = tuple(f".{name}." for name in names)
    last = time.time() - untouched
    with suppress(OSError):
        for path in list(folder.iterdir()):
            if _PARTIAL.fullmatch(path.name) and (not names or path.name.startswith(begun)):
                with suppress(OSError):
                    if path.stat().st_mtime <= last or not untouched:
                        path.unlink()


def unwritten(path: Path, error: OSError, hint: str = "") -> OutputError:
    """The error for callers: a ``FolderError`` where the next file would meet it as well."""
    kind = FolderError if error.errno in _OF_THE_FOLDER else OutputError
    reason = f"{path} cannot be written: {error.strerror or error}"
    return kind(f"{reason}. {hint}" if hint else reason)


def file_hash(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex digits.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def finite_json(value: Any) -> Any:
    """The same JSON-able value with None for every infinity and NaN.

    Records carry the host's own configuration, which may hold values that JSON cannot.
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite_json(item) for item in value]
    return value


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text, with finite numbers only.

    Raises:
        ValueError: it is no JSON, nested too deeply, or holds a number that cannot be one here.
    """

    def refuse(name: str) -> float:
        raise ValueError(f"{name} is no number")

    def finite(number: str) -> float:
        value = float(number)
        return value if math.isfinite(value) else refuse(number)

    try:
        return json.loads(text, parse_float=finite, parse_constant=refuse)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
