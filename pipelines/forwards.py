"""Forwards of a transformer's blocks: compiled, and wrapped in what must stay Python."""

from __future__ import annotations

import sys
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


_NO_MODULE: Final = "_vidsparse_shows_changes"

_MUTE: Final = (3, 13, 0) <= sys.version_info < (3, 13, 1)
"""Whether this Python tells nobody of attributes that were set (python/cpython#125608)."""


def show_changes(transformer: Any) -> None:
    """Have code that was compiled before see what has been set on modules of ``transformer``.

    Call it after every change of a processor or a forward. torch looks at that by itself, but under
    Python 3.13.0 it leaves the modules' own attributes out, and up to 2.11 it then takes a module
    that it has met before for unchanged as long as nothing is told of the dictionaries that it did
    look at. Those of submodules are among them, and what happens in a dictionary is told.
    """
    if not _MUTE:
        return
    for module in transformer.modules():
        # none is what the host itself has for a module that is not there: nobody looks at it.
        module._modules[_NO_MODULE] = None
        del module._modules[_NO_MODULE]
