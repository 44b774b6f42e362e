"""Compiling a pipeline's transformer block by block."""

from __future__ import annotations

import os
import shutil
from typing import Any

from vidsparse.errors import UnsupportedError


def compile_blocks(pipe: Any, **options: Any) -> None:
    """Compile the blocks around every video self-attention, each kind of block once.

    ``options`` go to ``torch.compile``, which is asked for full graphs.

    Raises:
        UnsupportedError: the pipeline's class is not supported.
    """
    # these import torch, and what a model is can be read without.
    from vidsparse.pipelines.adapter import attention_modules, transformers_of
    from vidsparse.pipelines.lookup import find_adapter

    adapter = find_adapter(pipe)
    for transformer in transformers_of(pipe, adapter):
        for name, _ in attention_modules(transformer, adapter):
            block = transformer.get_submodule(name.rpartition(".")[0])
            block.compile(**{"fullgraph": True, **options})


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
