"""Training-free sparse attention for video diffusion models.

``import vidsparse`` loads nothing heavy: torch, diffusers, Triton and Gradio come in when a name
that needs them is first used.

>>> from vidsparse import sparsify
>>> handle = sparsify(pipe, "fg-attn", top_p=0.9, tile=(16, 16))   # doctest: +SKIP
>>> video = pipe("a red ball that moves right").frames             # doctest: +SKIP
>>> print(handle.summary())                                        # doctest: +SKIP
>>> handle.remove()                                                # doctest: +SKIP
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from vidsparse._version import __version__
from vidsparse.errors import (
    ModelError,
    OptionError,
    OutputError,
    UnsupportedError,
    VidsparseError,
)

if TYPE_CHECKING:
    from vidsparse.attention import attend
    from vidsparse.engine import AttentionEngine
    from vidsparse.grid import TokenGrid
    from vidsparse.methods import METHODS, make_method
    from vidsparse.order import ORDERS, TokenOrder, token_order
    from vidsparse.pipelines import SparseHandle, sparsify
    from vidsparse.plan import SparsePlan
    from vidsparse.schedule import Schedule
    from vidsparse.site import CallSite
    from vidsparse.trace import Trace

# where each public name lives; resolved on first use so that the import stays light.
_LAZY = {
    "METHODS": "vidsparse.methods",
    "ORDERS": "vidsparse.order",
    "AttentionEngine": "vidsparse.engine",
    "CallSite": "vidsparse.site",
    "Schedule": "vidsparse.schedule",
    "SparseHandle": "vidsparse.pipelines",
    "SparsePlan": "vidsparse.plan",
    "TokenGrid": "vidsparse.grid",
    "TokenOrder": "vidsparse.order",
    "Trace": "vidsparse.trace",
    "attend": "vidsparse.attention",
    "make_method": "vidsparse.methods",
    "sparsify": "vidsparse.pipelines",
    "token_order": "vidsparse.order",
}

__all__ = [
    "METHODS",
    "ORDERS",
    "AttentionEngine",
    "CallSite",
    "ModelError",
    "OptionError",
    "OutputError",
    "Schedule",
    "SparseHandle",
    "SparsePlan",
    "TokenGrid",
    "TokenOrder",
    "Trace",
    "UnsupportedError",
    "VidsparseError",
    "__version__",
    "attend",
    "make_method",
    "sparsify",
    "token_order",
]

# started from a source checkout, python finds this folder before the installed package; its
# sister folders (kernels, pipelines, apps) then stand beside it rather than inside it.
_beside = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
if os.path.isfile(os.path.join(_beside, "pyproject.toml")) and _beside not in __path__:
    __path__.append(_beside)


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        value = getattr(importlib.import_module(_LAZY[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'vidsparse' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
