"""What the Gluon kernels for Hopper share: Triton's names by version, and steps through a ring."""

# what triton compiles is not typed python.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

# triton 3.9 renames it.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@triton.constexpr_function
def plain(x):
    """The value of a constexpr: arguments of a partition arrive wrapped more than once."""
    while isinstance(x, triton.language.constexpr):
        x = x.value
    return x


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """The stage behind one of a ring, and the phase in which its barriers are then."""
    wraps = stage + 1 == STAGES
    return gl.where(wraps, 0, stage + 1), gl.where(wraps, phase ^ 1, phase)
