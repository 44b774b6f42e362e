"""How many tiles a share of them is, for every implementation alike."""

from __future__ import annotations

import math


def count_of_share(share: float, tiles: int) -> int:
    """``share`` of ``tiles``, rounded up: at least one of a share above 0."""
    # 0.07 * 100 is 7.000000000000001: without the slack it would be 8.
    return math.ceil(share * tiles * (1 - 1e-12))
