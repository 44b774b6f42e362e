"""Diffusers pipelines: making them sparse, loading them, generating with them.

``sparsify(pipe, method, **options)`` returns a ``SparseHandle`` whose ``remove()`` undoes it;
``restore(pipe)`` does the same where the handle was lost. Importing this package loads neither
torch nor diffusers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vidsparse.pipelines.handle import SparseHandle, is_sparse, restore, sparsify

__all__ = ["SparseHandle", "is_sparse", "restore", "sparsify"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        value = getattr(importlib.import_module("vidsparse.pipelines.handle"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'vidsparse.pipelines' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
