"""Compiling a pipeline's transformer block by block."""

from __future__ import annotations

import os
import shutil
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from vidsparse.errors import UnsupportedError

_OPTIONS: Final[weakref.WeakKeyDictionary[Any, dict[str, Any]]] = weakref.WeakKeyDictionary()
"""What each compiled block was compiled with."""


def compile_blocks(pipe: Any, **options: Any) -> None:
    """Compile the blocks around every video self-attention, each kind of block once.

    ``options`` go to ``torch.compile``, which is asked for full graphs.

    Raises:
        UnsupportedError: the pipeline's class is not supported.
    """
    # these import torch, and what a model is can be read without.
    from vidsparse.pipelines.adapter import transformer_blocks, transformers_of
    from vidsparse.pipelines.lookup import find_adapter

    adapter = find_adapter(pipe)
    for transformer in transformers_of(pipe, adapter):
        for block in transformer_blocks(transformer, adapter):
            _OPTIONS[block] = {"fullgraph": True, **options}
            block.compile(**_OPTIONS[block])


@contextmanager
def compilations(
    tell: Callable[[bool], None] = lambda running: None,
) -> Iterator[Callable[[], float]]:
    """Watch ``torch.compile`` at work while the block runs.

    What this process, or one before it, has compiled already comes from torch's cache in less time.

    Args:
        tell: called with True where compilation begins, and with False where it has ended.

    Yields:
        How many seconds it took so far, in all threads of this process.
    """
    from torch._dynamo.callback import callback_handler

    spent, began = 0.0, 0.0

    def begin(_: object) -> None:
        nonlocal began
        began = time.perf_counter()
        tell(True)

    def end(_: object) -> None:
        nonlocal spent
        spent += time.perf_counter() - began
        tell(False)

    callback_handler.register_start_callback(begin)
    callback_handler.register_end_callback(end)
    try:
        yield lambda: spent
    finally:
        callback_handler.remove_start_callback(begin)
        callback_handler.remove_end_callback(end)


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
        inner = torch.compile(inner, **_OPTIONS.get(block, {"fullgraph": True}))
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


def require_compiler(device: str) -> None:
    """Raise an ``UnsupportedError`` where ``torch.compile`` would find no compiler.

    On the CPU it generates C++.
    """
    candidates = (os.environ.get("CXX"), "g++", "clang++", "cl")
    if device == "cpu" and not any(name and shutil.which(name) for name in candidates):
        raise UnsupportedError(
            "compile on the CPU needs a C++ compiler, and there is none. "
            "Hint: install g++, or leave --compile out."
        )
