"""The errors a caller can meet, all under one base class.

- ``VidsparseError``: any mistake or limit that the caller can do something about. Its text is one
  sentence saying what was given and what is needed, with a hint where there is one. The command
  line prints it and exits with code 2.

  - ``OptionError``: a value or combination of options is not valid (also a ``ValueError``).
  - ``UnsupportedError``: this pipeline, device or implementation cannot do what was asked.
  - ``ModelError``: a model folder or hub id cannot be used.
  - ``OutputError``: a file or folder cannot be written (also an ``OSError``).

    - ``FolderError``: the folder is gone, full or closed, so that its next file would fail too.

  - ``NonFiniteError``: a run returned NaN or infinity; its result would be worthless.

Anything else that escapes is a defect of this library.
"""

from __future__ import annotations

from collections.abc import Sequence


class VidsparseError(Exception):
    """Base of every error meant for the caller."""


class OptionError(VidsparseError, ValueError):
    """An option has a value, or stands beside another option, that is not valid."""


class UnsupportedError(VidsparseError):
    """The pipeline, device or implementation cannot do what was asked."""


class ModelError(VidsparseError):
    """A model folder or hub id cannot be used."""


class OutputError(VidsparseError, OSError):
    """A file or folder cannot be written."""


class FolderError(OutputError):
    """A folder is gone, full or closed: nothing else can be written into it either."""


class NonFiniteError(VidsparseError):
    """A run returned NaN or infinity, and its result would be worthless."""


def listed(names: Sequence[str]) -> str:
    """Names as a sentence has them: ``a``, ``a and b``, ``a, b and c``."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def check_flag(name: str, value: object) -> None:
    """Raise an ``OptionError`` unless ``value`` is True or False: ``"false"`` would be true."""
    if not isinstance(value, bool):
        raise OptionError(f"{name} must be True or False, got {value!r}")
