"""Two readings of a published density, and what whole runs would take under each.

FG-Attn's table 1 gives attention FLOPs, of which it does not say whether they count the tiles that
were selected or all that the kernel computes once tiles are merged into blocks of 128 rows. Read as
computed, a row's measured sparse step stands as it is. Read as selected, more is computed than was
measured, and the step is projected from the measured one.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Final

# query rows of a block on a GPU: a tile of as many is merged with no other.
BLOCK_ROWS: Final = 128

MERGED: Final[Mapping[str, tuple[tuple[float, float], ...]]] = {
    "16x16": ((0.186, 0.333), (0.371, 0.533)),
    "32x32": ((0.208, 0.303), (0.408, 0.513)),
    "64x64": ((0.232, 0.273), (0.444, 0.488)),
}
"""Selected and computed densities of FG-Attn by tile: windowed merging on the Hilbert curve, 7,488
tokens of `shapes` (rows ``merging`` of docs/benchmarks/quality-small.json)."""


def merged_share(tile: str, selected: float) -> float | None:
    """The share of pairs computed where ``selected`` of them are selected, None if not measured.

    Between the measured points, nothing and everything: linearly.
    """
    if int(tile.partition("x")[0]) >= BLOCK_ROWS:
        return selected
    if tile not in MERGED:
        return None
    points = ((0.0, 0.0), *MERGED[tile], (1.0, 1.0))
    (x0, y0), (x1, y1) = next(
        (low, high) for low, high in pairwise(points) if low[0] <= selected <= high[0]
    )
    return y0 + (selected - x0) / (x1 - x0) * (y1 - y0)


def projected_step(
    sparse_ms: float, kernel_ms: float, *, measured: float, computed: float
) -> float:
    """Milliseconds of a sparse step if its kernel computed another share of the pairs.

    The kernel's time is proportional to what it computes (within 2 % from 0.3 to 0.5, on the
    careful side: docs/benchmarks/attention-h200.json); all else in the step stays as measured.

    Args:
        sparse_ms: the measured step.
        kernel_ms: the sparse kernel in it.
        measured: share of pairs that the kernel computed.
        computed: share that it would compute.
    """
    return sparse_ms + kernel_ms * (computed / measured - 1)


def projected_ratio(dense: float, sparse: float, warmup: float, steps: int) -> float:
    """How many times faster a run is whose first steps are dense and whose others are sparse."""
    from vidsparse.schedule import share_or_count

    first = share_or_count(warmup, steps, "warmup")
    return steps * dense / (first * dense + (steps - first) * sparse)
