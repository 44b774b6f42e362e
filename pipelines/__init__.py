"""Diffusers pipelines: making them sparse, loading them, generating with them.

``sparsify(pipe, method, **options)`` returns a ``SparseHandle`` whose ``remove()`` undoes it;
``restore(pipe)`` does the same where the handle was lost. ``accelerate(pipe, speed)`` does all that
a named speed stands for. Importing this package loads neither torch nor diffusers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vidsparse.pipelines.acceleration import AcceleratedPipeline, accelerate
    from vidsparse.pipelines.handle import SparseHandle, is_sparse, restore, sparsify

_LAZY = {
    "AcceleratedPipeline": "vidsparse.pipelines.acceleration",
    "SparseHandle": "vidsparse.pipelines.handle",
    "accelerate": "vidsparse.pipelines.acceleration",
    "is_sparse": "vidsparse.pipelines.handle",
    "restore": "vidsparse.pipelines.handle",
    "sparsify": "vidsparse.pipelines.handle",
}

__all__ = [
    "AcceleratedPipeline",
    "SparseHandle",
    "accelerate",
    "is_sparse",
    "restore",
    "sparsify",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        value = getattr(importlib.import_module(_LAZY[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'vidsparse.pipelines' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
