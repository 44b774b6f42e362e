"""Forwards of a transformer's blocks: compiled, and wrapped in what must stay Python."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Final

_WHOLE: Final = {"fullgraph": True}

_OPTIONS: Final[weakref.WeakKeyDictionary[Any, dict[str, Any]]] = weakref.WeakKeyDictionary()
"""What each compiled block was compiled with."""


def compile_block(block: Any, **options: Any) -> None:
    """Compile a block's call; ``options`` go to ``torch.compile``, asked for a full graph."""
    _OPTIONS[block] = {**_WHOLE, **options}
    block.compile(**_OPTIONS[block])


def wrap_forward(
    block: Any, wrap: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda forward: forward
) -> Callable[[], None]:
    """Put ``wrap`` of a block's forward in its place; returns what undoes it.

    Where the block was compiled, its forward alone is then. Around it the block runs as Python, so
    that hooks may look at data, and exchange it with other processes, which a full graph cannot.
    """
    import torch

    kept, whole = vars(block).get("forward"), getattr(block, "_compiled_call_impl", None)
    inner = block.forward
    if whole is not None:
        block._compiled_call_impl = None
        inner = torch.compile(inner, **_OPTIONS.get(block, _WHOLE))
    block.forward = wrap(inner)

    def undo() -> None:
        vars(block).pop("forward", None)
        if kept is not None:
            block.forward = kept
        block._compiled_call_impl = whole

    return undo


def is_compiled(block: Any) -> bool:
    """Whether a module's call was compiled."""
    return getattr(block, "_compiled_call_impl", None) is not None
