"""The rows of ``vidsparse bench attention``: their file and the columns of their table."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from vidsparse.apps.bench.inputs import RANDOM, shape_text
from vidsparse.apps.results.row_file import RowFile
from vidsparse.apps.results.tables import Columns, number


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRow:
    """One case of one implementation against one dense kernel; times are medians in milliseconds.

    ``case`` names what the ratio counts: ``ratio`` is ``dense_ms`` over the sum of ``ms`` (the
    kernel), ``plan_ms`` (grouping and lists) and ``mask_ms`` (selection), of which those that the
    case leaves out are None. On a GPU ``plan_ms`` holds the selection too, where it counts, and
    rounding to 8 bits: all that the whole call takes beyond its kernel. ``kept`` is the
    computed density, ``kept_tflops`` 4·D operations per computed pair over ``ms``. ``error`` is
    relative to fp64, ||out - ref|| / ||ref||, over sampled blocks. ``data`` says what q, k and v
    are, and with them the lists.
    """

    case: str
    tile: str
    kept: float
    seq_len: int
    heads: int
    head_dim: int
    dtype: str
    impl: str
    ms: float | None
    mask_ms: float | None
    plan_ms: float | None
    kept_tflops: float | None
    dense_impl: str
    dense_ms: float
    ratio: float
    error: float | None
    data: str = RANDOM


def attention_file(path: Path) -> RowFile:
    """The rows of this bench in ``path``, which need not exist.

    Raises:
        OptionError: it exists and holds something else.
    """
    return RowFile(path, "vidsparse-attention/1", "attention benchmark", unnamed=True)


COLUMNS: Final[Columns[AttentionRow]] = {
    "case": lambda row: row.case,
    "tile": lambda row: row.tile,
    "tokens x heads x dim": lambda row: shape_text(row.seq_len, row.heads, row.head_dim, row.data),
    "computed": lambda row: f"{row.kept:.3f}",
    "implementation": lambda row: row.impl,
    "mask ms": lambda row: number(row.mask_ms),
    "plan ms": lambda row: number(row.plan_ms),
    "kernel ms": lambda row: number(row.ms, 3),
    "kept TFLOP/s": lambda row: number(row.kept_tflops, 0 if (row.kept_tflops or 0) >= 10 else 3),
    "dense": lambda row: row.dense_impl,
    "dense ms": lambda row: number(row.dense_ms),
    "ratio": lambda row: number(row.ratio),
    "error": lambda row: "" if row.error is None else f"{row.error:.1e}",
}
"""The table's columns."""
