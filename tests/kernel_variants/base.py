"""What the specialisations of kernels are made from."""

from __future__ import annotations

from typing import Any

from cubins import Variant
from triton.compiler import ASTSource

# shared memory a block can opt in to, in KiB, by compute capability (CUDA programming guide).
SHARED_KIB = {80: 163, 89: 99, 90: 227, 100: 227, 120: 99}
HEAD_DIMS = (64, 96, 128)
EIGHT_BITS = {"int8": "i8", "fp8": "fp8e4nv"}


def pointers_to(**dtypes: str) -> dict[str, str]:
    """Types of arguments that are pointers, by their names without ``_ptr``."""
    return {f"{name}_ptr": f"*{dtype}" for name, dtype in dtypes.items()}


def make_variant(
    cc: int,
    name: str,
    kernel: Any,
    pointers: dict[str, str],
    constants: dict[str, Any],
    warps: int,
    *,
    floats: tuple[str, ...] = (),
    aligned: tuple[str, ...] = (),
    source: type = ASTSource,
    stages: int | None = None,
) -> Variant:
    """A variant whose other arguments, those that are not constants, are 32-bit integers."""
    types = dict.fromkeys((p.name for p in kernel.params if not p.is_constexpr), "i32")
    types = {n: t for n, t in types.items() if n not in constants}
    types |= pointers | dict.fromkeys(floats, "fp32")
    return Variant(cc, name, kernel, types, constants, frozenset(aligned), warps, source, stages)
