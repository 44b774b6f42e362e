"""Compiling a pipeline's transformer block by block."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from vidsparse.errors import UnsupportedError
from vidsparse.pipelines.forwards import compile_block


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
            compile_block(block, **options)


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
