"""Sparse attention kernels: plain tensors in, plain tensors out.

Nothing here knows of grids, methods or pipelines. This package imports lazily and only relatively:
a process started in a source checkout may meet this folder under the plain name ``kernels``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .attention.gates import AbsoluteGate, RelativeGate
    from .dispatch import (
        IMPLEMENTATIONS,
        choose,
        dense_attention,
        sparse_attention,
        support,
    )
    from .hardware import block_rows, plans_on_device
    from .tokens.formats import QuantizedQK
    from .tokens.quantize import quantize_qk

_HOMES = {
    "IMPLEMENTATIONS": "dispatch",
    "AbsoluteGate": "attention.gates",
    "QuantizedQK": "tokens.formats",
    "RelativeGate": "attention.gates",
    "block_rows": "hardware",
    "choose": "dispatch",
    "dense_attention": "dispatch",
    "plans_on_device": "hardware",
    "quantize_qk": "tokens.quantize",
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
    "dense_attention",
    "plans_on_device",
    "quantize_qk",
    "sparse_attention",
    "support",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
