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
    from .gates import AbsoluteGate, RelativeGate
    from .quantize import QuantizedQK, quantize_qk

_HOMES = {
    "IMPLEMENTATIONS": "dispatch",
    "AbsoluteGate": "gates",
    "QuantizedQK": "quantize",
    "RelativeGate": "gates",
    "block_rows": "dispatch",
    "choose": "dispatch",
    "plans_on_device": "dispatch",
    "quantize_qk": "quantize",
    "sparse_attention": "dispatch",
    "support": "dispatch",
}

__all__ = [
    "IMPLEMENTATIONS",
    "AbsoluteGate",
    "QuantizedQK",
    "RelativeGate",
    "block_rows",
    "choose",
    "plans_on_device",
    "quantize_qk",
    "sparse_attention",
    "support",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
