"""Sparse attention kernels: plain tensors in, plain tensors out.

Nothing here knows of grids, methods or pipelines. This package imports lazily and only relatively:
a process started in a source checkout may meet this folder under the plain name ``kernels``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .dispatch import (
        IMPLEMENTATIONS,
        block_rows,
        choose,
        plans_on_device,
        sparse_attention,
        support,
    )

__all__ = [
    "IMPLEMENTATIONS",
    "block_rows",
    "choose",
    "plans_on_device",
    "sparse_attention",
    "support",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module(".dispatch", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
