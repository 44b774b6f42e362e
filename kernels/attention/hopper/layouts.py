"""How tensors lie in shared memory and in registers, and views of them.

Scores of a consumer are ``[64, BN]`` in the layout of its tensor cores: four threads share a row,
and each holds pairs of neighbouring columns, eight columns apart.
"""

# what triton compiles is not typed python: both branches of a static `if` return.
# ruff: noqa: RET505
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from functools import cache

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_PUBLIC_REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def view(memory, shape: gl.constexpr, layout: gl.constexpr):
    """The same shared memory in another shape and layout."""
    if _PUBLIC_REINTERPRET:
        return memory.reinterpret(memory.dtype, shape, layout)
    else:
        return memory._reinterpret(memory.dtype, shape, layout)


@gluon.jit
def load_scalar(memory):
    """The one number of ``memory``, for every thread."""
    value = memory.load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    return gl.max(value, 0)


@gluon.jit
def put_scalar(memory, value):
    """Store an int32 in the one place of ``memory``."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    memory.store(gl.full([1], 0, gl.int32, LAYOUT) + value)


@cache
def boxes_layout(padded_dim: int, bits: int) -> tuple[int, gl.NVMMASharedLayout]:
    """Columns of a TMA box of numbers of ``bits`` bits, and how it lies in shared memory."""
    columns = 64 if bits == 16 else padded_dim
    return columns, gl.NVMMASharedLayout(columns * bits // 8, bits, rank=3)


@triton.constexpr_function
def token_layout(BN, DP, BITS):
    """128 threads copy 16 bytes of each of a few neighbouring tokens."""
    each = 128 // BITS
    across = DP // each
    return gl.BlockedLayout([BN * across // 128, each], [32 // across, across], [4, 1], [1, 0])


@triton.constexpr_function
def keys_of_a_scale(N, K_RUN):
    """Keys of a step that surely share a scale, and a gate's piece."""
    run = min(N, K_RUN, 64)
    # fewer than a thread holds side by side are as many columns.
    return run if run >= 8 else 1


@triton.constexpr_function
def first_two(layout, rank):
    """Layout of the first two dimensions of a tensor in ``layout``."""
    for dim in range(rank - 1, 1, -1):
        layout = gl.SliceLayout(dim, layout)
    return layout


@triton.constexpr_function
def _by_thread(layout):
    """Layout of the rows and threads of what ``by_run`` gives in ``layout``."""
    return gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(4, layout)))


@gluon.jit
def by_run(scores, RUNS: gl.constexpr):
    """Scores ``[rows, keys]`` as ``[rows, RUNS, eights of a run, 4, 2]``.

    A thread holds all but the dimension of 4 itself, and keeps what it holds.
    """
    rows: gl.constexpr = scores.shape[0]
    keys: gl.constexpr = scores.shape[1]
    return scores.reshape([rows, RUNS, keys // RUNS // 8, 4, 2])


@gluon.jit
def row_vector(x, like):
    """A number for each row, to be broadcast along the other dimensions of ``like``."""
    PAIR: gl.constexpr = first_two(like.type.layout, len(like.shape))
    x = gl.convert_layout(x, gl.SliceLayout(1, PAIR))[:, None]
    if len(like.shape) == 2:
        return x
    else:
        return x[:, :, None, None, None]


@gluon.jit
def thread_vector(x, like):
    """A number for each row and thread, to be broadcast along the others of ``by_run``."""
    layout: gl.constexpr = _by_thread(like.type.layout)
    return gl.convert_layout(x, layout)[:, None, None, :, None]


@gluon.jit
def scales_of_runs(memory, like):
    """Scales of runs of keys, to be multiplied with what ``by_run`` gives."""
    PAIR: gl.constexpr = first_two(like.type.layout, len(like.shape))
    scale = memory.load(gl.SliceLayout(0, PAIR))
    return scale[None, :, None, None, None]
