"""The file that a benchmark measures into: one process at a time, and no row is lost unasked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vidsparse.apps.bench.machine import default_dtype
from vidsparse.apps.results.row_file import RowFile, hardware_text
from vidsparse.dtypes import dtype_name

if TYPE_CHECKING:
    import torch


@contextmanager
def filled_anew(
    path: str | None,
    opened: Callable[[Path], RowFile],
    kind: Callable[..., object],
    header: Mapping[str, Any],
    *,
    overwrite: bool,
) -> Iterator[RowFile | None]:
    """The file in ``path`` while a benchmark fills it, without rows as yet; None without a path.

    Args:
        path: it need not exist.
        opened: the function that reads such files.
        kind: the dataclass of their rows.
        header: of the rows to come.
        overwrite: whether rows that are there may be replaced.

    Raises:
        OptionError: it holds something else, rows that may not be replaced, or another process
            measures into it.
        OutputError: its folder cannot be written to.
    """
    if path is None:
        yield None
        return
    file = opened(Path(path))
    with file.held():
        # what is replaced is rows of this benchmark, never another's.
        file.typed(kind)
        file.begin(header, overwrite=overwrite)
        yield file


@contextmanager
def added_to(
    path: str | None,
    opened: Callable[[Path], RowFile],
    header: Mapping[str, Any],
    dtype: torch.dtype,
) -> Iterator[RowFile | None]:
    """The file in ``path`` while a benchmark adds to its rows; None without a path.

    Args:
        path: it need not exist.
        opened: the function that reads such files.
        header: of the rows to come, ``dtype`` aside.
        dtype: of the weights.

    Raises:
        OptionError: it holds something else, rows of other hardware or another dtype, or another
            process measures into it.
        OutputError: its folder cannot be written to.
    """
    if path is None:
        yield None
        return
    file = opened(Path(path))
    with file.held():
        # files of earlier versions do not say their dtype, and documented commands ask for none.
        on_cpu = " CPU" in hardware_text(file.header.get("hardware"))
        unsaid = {"dtype": default_dtype("cpu" if on_cpu else "cuda")}
        file.go_on({**header, "dtype": dtype_name(dtype)}, unsaid)
        yield file
