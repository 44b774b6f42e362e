"""The `gluon` implementation: a persistent, warp-specialised kernel for Hopper.

Shape legend: B batch, H heads, S tokens, D head dim, DP D rounded up to 64 or 128, M query rows of
a tile, N keys of a chunk, G blocks of 128 query rows, R = 128 / M tiles of a block, C length of a
row of ``kv_index``; a step is BN keys, CHUNKS = BN / N of them.

One program runs on each multiprocessor and takes blocks until none is left. Its producer gathers
keys and values into a ring in shared memory (TMA boxes of one chunk; cp.async where a chunk is one
token); two consumer warpgroups hold 64 query rows each.

A stage of the ring holds the keys of one step and the values of the step before it, which are the
operands of the two products that a consumer has in flight together. The first step of a block
shares its stage with the last values of the block before, so that the ring, and the overlap, never
break off between blocks.

Gates and 8-bit operands are compiled in where they are asked for; the plain kernel's code is the
same without them. Scales of rows and thresholds come with a block's record, scales of keys with
their stage. A gate is decided by votes of a consumer's warps (of both consumers' for 128 rows): an
absolute one before the exponentials, a relative one after them, and the product with the values,
which is a step late anyway, is left out where no piece is open.

Blocks that are too many for full rounds of all programs are cut into parts of their lists, if that
is worth it, so that the last round is a short one. A part's rows and log-sum-exps are written
behind those of all heads, and a second kernel joins them. With a gate all blocks stay whole: a
relative one goes by the maximum of what stands before in a list.

A row's weights are powers of its scores less an anchor. In fp16 that is a running maximum. bf16 has
the exponents of fp32, so the largest score of a block's first step serves for all steps, which then
look for no maxima and rescale nothing. What comes out is right unless it left fp32's range, which
is seen when a block is stored. Such blocks are noted, and a second launch attends them again with
running maxima. It finds none where later scores are no more than 70 above the first ones and values
are of ordinary size.

Only the last chunks of a list can be short of a full step or of the sequence's end. They go first,
masked, and the loop over the other steps carries no mask. Rows that do not exist lie outside
the boxes that TMA reads (zeros) and are not stored.

Barriers, each with a running phase bit that is never reset:

======== ============================= ==================================== =====================
name     completed by                  waited for by                        guards
======== ============================= ==================================== =====================
full     bytes of TMA / cp.async       consumers, before a step's products  a stage
empty    both consumers                producer, before it refills          a stage
q_full   the producer (and q's bytes)  consumers, before a block            q and the block record
q_empty  both consumers                producer, before the next block      q and the block record
======== ============================= ==================================== =====================
"""

# what triton compiles is not typed python: both branches of a static `if` return.
# ruff: noqa: RET505, RUF005
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, no-redef"
# mypy: disable-error-code="assignment"

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .gates import KEY_GROUP, AbsoluteGate, Gate, kept_pieces
from .gluon_ring import next_stage, plain, tma_load
from .quantize import QuantizedQK
from .triton_gather import (
    LARGEST_SUM,
    LOG2_E,
    gate_kind,
    heads_together,
    is_anchored,
    tables,
)

BLOCK_ROWS = 128
# triton 3.9 renames these.
_cp_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
_thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier
_PUBLIC_REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def _view(memory, shape: gl.constexpr, layout: gl.constexpr):
    if _PUBLIC_REINTERPRET:
        return memory.reinterpret(memory.dtype, shape, layout)
    else:
        return memory._reinterpret(memory.dtype, shape, layout)


@gluon.jit
def _exp2(x):
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


# a row maximum may fall behind by this many powers of two before what was summed is rescaled: the
# final division undoes it exactly, and weights up to 256 fit all dtypes.
BEHIND = gl.constexpr(8.0)
RESCALED_AT_ONCE = 32


def _rescale_source(registers: int) -> str:
    """PTX: ``registers`` products, or plain copies where no lane of the warp has a factor but 1.

    An accumulator's registers come in fours, two of one row and two of another.
    """
    out, x, factor = ([registers * part + i for i in range(registers)] for part in range(3))
    copies = " ".join(f"mov.f32 ${o}, ${i};" for o, i in zip(out, x, strict=True))
    products = " ".join(
        f"mul.f32 ${o}, ${i}, ${f};" for o, i, f in zip(out, x, factor, strict=True)
    )
    return (
        "{ .reg .pred p; .reg .pred q; "
        f"setp.neu.f32 p, ${factor[0]}, 0f3F800000; setp.neu.or.f32 p, ${factor[2]}, 0f3F800000, p;"
        f" vote.sync.any.pred q, p, 0xffffffff; {copies} @!q bra.uni same; {products} same: }}"
    )


_RESCALE = gl.constexpr(_rescale_source(RESCALED_AT_ONCE))
_RESCALE_OPERANDS = gl.constexpr(",".join(["=f"] * RESCALED_AT_ONCE + ["f"] * 2 * RESCALED_AT_ONCE))
_RESCALED_AT_ONCE = gl.constexpr(RESCALED_AT_ONCE)


@gluon.jit
def _rescaled(acc, factor):
    """``acc`` times a factor for each row, skipped by warps whose factors are all 1."""
    return gl.inline_asm_elementwise(
        _RESCALE,
        _RESCALE_OPERANDS,
        [acc, factor],
        dtype=gl.float32,
        is_pure=True,
        pack=_RESCALED_AT_ONCE,
    )


def _raise_source() -> str:
    """PTX: for two rows, what a thread has seen of their scores ($2, $3) and their maxima ($4, $5).

    Only where some thread of the warp is ``BEHIND`` above do the four threads of a row tell each
    other.
    """
    behind = "0f" + struct.pack(">f", BEHIND.value).hex()
    both = "".join(
        f"shfl.sync.bfly.b32 t, {x}, {distance}, 31, 0xffffffff; max.f32 {x}, {x}, t; "
        for distance in (1, 2)
        for x in "xy"
    )
    return (
        "{ .reg .pred p; .reg .pred q; .reg .f32 a; .reg .f32 b; .reg .f32 x; .reg .f32 y; "
        f".reg .f32 t; mov.f32 x, $2; mov.f32 y, $3; add.f32 a, $4, {behind}; "
        f"add.f32 b, $5, {behind}; setp.gt.f32 p, x, a; setp.gt.or.f32 p, y, b, p; "
        "vote.sync.any.pred q, p, 0xffffffff; mov.f32 $0, $4; mov.f32 $1, $5; @!q bra.uni same; "
        f"{both}"
        "setp.gt.f32 p, x, a; selp.f32 $0, x, $4, p; "
        "setp.gt.f32 q, y, b; selp.f32 $1, y, $5, q; same: }"
    )


_RAISE = gl.constexpr(_raise_source())


@gluon.jit
def _raised(largest, row_max):
    """Maxima of rows, moved where what a thread holds of a row is ``BEHIND`` above.

    Both ``[rows, 4]``, an entry for each of the four threads that share a row.
    """
    return gl.inline_asm_elementwise(
        _RAISE, "=f,=f,f,f,f,f", [largest, row_max], dtype=gl.float32, is_pure=True, pack=2
    )


# whole numbers below 2^22 added to the bits of 1.5 * 2^23 make those of the sum in fp32; and this
# one makes those of minus infinity.
OFFSET_OF_INTEGERS = gl.constexpr(12582912)
MASKED_INTEGER = gl.constexpr(0xFF800000 - 0x4B400000 - 2**32)


@gluon.jit
def _as_float(x, one):
    """``x + OFFSET_OF_INTEGERS`` in fp32 of int32 sums of 8-bit products, given a 1.

    A multiplication and addition, because those have a unit that is idle then; conversions and
    plain additions share one with the maxima.
    """
    bits = gl.inline_asm_elementwise(
        "mad.lo.s32 $0, $1, $2, 0x4B400000;", "=r,r,r", [x, one], gl.int32, is_pure=True, pack=1
    )
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def _scalar(memory):
    value = memory.load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    return gl.max(value, 0)


@gluon.jit
def _put(memory, value):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    memory.store(gl.full([1], 0, gl.int32, LAYOUT) + value)


# ---- consumers ----


@gluon.jit
def _mask(scores, keys):
    """Minus infinity from column ``keys`` on, or of integers what becomes it."""
    # the zero is opaque: known before the loop, the columns would be kept in 32 registers over it.
    zero = gl.inline_asm_elementwise(
        "mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
    column = gl.arange(0, scores.shape[1], gl.SliceLayout(0, scores.type.layout)) + zero
    masked: gl.constexpr = MASKED_INTEGER if scores.dtype.is_int() else -float("inf")
    return gl.where((column < keys)[None, :], scores, masked)


@gluon.jit
def _by_run(scores, RUNS: gl.constexpr):
    """Scores ``[rows, keys]`` as ``[rows, RUNS, eights of a run, 4, 2]``.

    A thread holds all but the dimension of 4 itself, and keeps what it holds.
    """
    rows: gl.constexpr = scores.shape[0]
    keys: gl.constexpr = scores.shape[1]
    return scores.reshape([rows, RUNS, keys // RUNS // 8, 4, 2])


@gluon.jit
def _scales_of_runs(memory, like):
    """Scales of runs of keys, to be multiplied with what ``_by_run`` gives."""
    PAIR: gl.constexpr = _first_two(like.type.layout, len(like.shape))
    scale = memory.load(gl.SliceLayout(0, PAIR))
    return scale[None, :, None, None, None]


@triton.constexpr_function
def _first_two(layout, rank):
    """Layout of the first two dimensions of a tensor in ``layout``."""
    for dim in range(rank - 1, 1, -1):
        layout = gl.SliceLayout(dim, layout)
    return layout


@gluon.jit
def _row_vector(x, like):
    """A number for each row, to be broadcast along the other dimensions of ``like``."""
    PAIR: gl.constexpr = _first_two(like.type.layout, len(like.shape))
    x = gl.convert_layout(x, gl.SliceLayout(1, PAIR))[:, None]
    if len(like.shape) == 2:
        return x
    else:
        return x[:, :, None, None, None]


@triton.constexpr_function
def _by_thread(layout):
    """Layout of the rows and threads of what ``_by_run`` gives in ``layout``."""
    return gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(4, layout)))


@gluon.jit
def _thread_vector(x, like):
    """A number for each row and thread, to be broadcast along the others of ``_by_run``."""
    layout: gl.constexpr = _by_thread(like.type.layout)
    return gl.convert_layout(x, layout)[:, None, None, :, None]


@gluon.jit
def _row_sums(weights):
    """Sums of a row, of which each of the four threads that share it keeps its own."""
    rows: gl.constexpr = weights.shape[0]
    keys: gl.constexpr = weights.shape[1]
    return gl.sum(gl.sum(weights.reshape([rows, keys // 8, 4, 2]), 3), 1)


@gluon.jit
def _scaled_sums(sums, rescale):
    layout: gl.constexpr = gl.SliceLayout(1, sums.type.layout)
    return sums * gl.convert_layout(rescale, layout)[:, None]


@gluon.jit
def _store(
    acc,
    row_max,
    sums,
    block,
    start,
    q_tiles_ptr,
    out_ptr,
    lse_ptr,
    shift_ptr,
    noted_ptr,
    S,
    scale_log2,
    D: gl.constexpr,
    M: gl.constexpr,
    FIRST: gl.constexpr,
):
    """Write the rows of a block that a consumer holds, and their log-sum-exp.

    ``start`` is the head's first row of the output; of a part of a block, less than zero, it is
    -1 less the part's own first row. ``noted_ptr`` has a word that says whether any block is to be
    attended again, and one for each block.
    """
    rows: gl.constexpr = acc.shape[0]
    columns: gl.constexpr = acc.shape[1]
    BY_ROW: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    place = FIRST + gl.arange(0, rows, BY_ROW)
    tile = gl.load(q_tiles_ptr + block.to(gl.int64) * (128 // M) + place // M)
    row = tile * M + place % M
    alive = (tile >= 0) & (row < S)
    sums = gl.convert_layout(gl.sum(sums, 1), BY_ROW)
    if len(row_max.shape) == 2:
        row_max = gl.max(row_max, 1)
    row_max = gl.convert_layout(row_max, BY_ROW)
    # a row without keys: zeros and -inf, whatever its weights of zero were multiplied with.
    has_keys = sums > 0
    out = gl.where(has_keys[:, None], acc * (1.0 / sums)[:, None], 0.0)
    if noted_ptr is not None:
        # what is infinite or NaN is no number times zero, and no comparison holds for NaN.
        holds = (sums <= LARGEST_SUM) & (gl.sum(out * 0.0, 1) == 0.0)
        nowhere = gl.zeros_like(row)
        gl.store(noted_ptr + nowhere, 1, mask=alive & ~holds)
        gl.store(noted_ptr + 1 + block + nowhere, 1, mask=alive & ~holds)
    whole = start >= 0
    token = gl.where(whole, start, -1 - start).to(gl.int64) + gl.where(whole, row, place)
    # eights of columns, so that addresses differ by constants.
    out = out.to(out_ptr.dtype.element_ty).reshape([rows, columns // 8, 8])
    LAYOUT: gl.constexpr = out.type.layout
    column = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    eight = gl.arange(0, columns // 8, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT))) * 8
    start = gl.convert_layout(token * D, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    alive_out = gl.convert_layout(alive, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    pointers = ((out_ptr + start)[:, None, None] + column[None, None, :]) + eight[None, :, None]
    mask = alive_out[:, None, None] & (eight < D)[None, :, None]
    gl.store(pointers, out, mask=mask)
    if shift_ptr is not None:
        # the mean key, which 8-bit keys lack. Parts get it when they are joined.
        row_max += gl.load(shift_ptr + token, mask=alive & whole, other=0.0) * scale_log2
    natural = (row_max + gl.log2(sums)) * 0.6931471805599453
    gl.store(lse_ptr + token, gl.where(has_keys, natural, -float("inf")), mask=alive)


@gluon.jit
def _piece_maxima(scores, k_scale, PIECES: gl.constexpr):
    """Largest score of each row and piece ``[rows, PIECES]``, of what ``_by_run`` gives."""
    rows: gl.constexpr = scores.shape[0]
    runs: gl.constexpr = scores.shape[1]
    largest = gl.max(gl.max(scores, 4), 2)[:, :, None, :, None]
    if k_scale is not None:
        largest = largest * k_scale
    largest = largest.reshape([rows, PIECES, runs // PIECES, 4])
    return gl.max(gl.max(largest, 2), 2)


@gluon.jit
def _vote(largest, threshold, votes, slot, GATE_ROWS: gl.constexpr):
    """Note for each warp in which pieces of its rows a row reaches its threshold.

    Bit ``i * PIECES + p`` is of a consumer's rows ``i * GATE_ROWS`` on and piece ``p`` of the keys.
    """
    rows: gl.constexpr = largest.shape[0]
    PIECES: gl.constexpr = largest.shape[1]
    LAYOUT: gl.constexpr = largest.type.layout
    row = gl.arange(0, rows, gl.SliceLayout(1, LAYOUT))
    piece = gl.arange(0, PIECES, gl.SliceLayout(0, LAYOUT))
    bit = 1 << ((row // GATE_ROWS * PIECES)[:, None] + piece[None, :])
    # the threshold of a row without a token is NaN, which nothing reaches.
    limit = gl.convert_layout(threshold, gl.SliceLayout(1, LAYOUT))
    bits = gl.reduce_or(gl.where(largest >= limit[:, None], bit, 0), 1)
    votes.index(slot).store(gl.reduce_or(bits.reshape([4, rows // 4]), 1))


@gluon.jit
def _counted(votes, slot, GATE_ROWS: gl.constexpr):
    """The bits that a warp of the consumer has voted for, or of either consumer."""
    ALL: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    bits = gl.reduce_or(votes.index(slot).load(ALL), 0)
    if GATE_ROWS == 128:
        bits = bits | gl.reduce_or(votes.index(slot ^ 1).load(ALL), 0)
    return bits


@gluon.jit
def _meet():
    """Let both consumers wait for each other."""
    # barriers from 8 on are free: triton takes one for each partition.
    gl.inline_asm_elementwise(
        "barrier.cta.sync 8, 256; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _count_skipped(
    skipped, threshold, bits, keys, BN: gl.constexpr, PIECES: gl.constexpr, GATE_ROWS: gl.constexpr
):  # fmt: skip
    """``skipped`` of each row, and the keys of this step's closed pieces."""
    row = gl.arange(0, skipped.shape[0], skipped.type.layout) // GATE_ROWS * PIECES
    # only a row that holds a token has a threshold.
    alive = threshold == threshold
    for p in gl.static_range(PIECES):
        there = gl.minimum(gl.maximum(keys - p * (BN // PIECES), 0), BN // PIECES)
        closed = ((bits >> (row + p)) & 1) == 0
        skipped = skipped + gl.where(closed & alive, there, 0)
    return skipped


@triton.constexpr_function
def _keys_of_a_scale(N, K_RUN):
    """Keys of a step that surely share a scale, and a gate's piece."""
    run = min(N, K_RUN, 64)
    # fewer than a thread holds side by side are as many columns.
    return run if run >= 8 else 1


@gluon.jit
def _is_open(bits, like, PIECES: gl.constexpr, GATE_ROWS: gl.constexpr):
    """Which pieces, runs or columns of each row are open: the second dimension of ``like``."""
    rows: gl.constexpr = like.shape[0]
    runs: gl.constexpr = like.shape[1]
    PAIR: gl.constexpr = _first_two(like.type.layout, len(like.shape))
    row = gl.arange(0, rows, gl.SliceLayout(1, PAIR)) // GATE_ROWS * PIECES
    piece = gl.arange(0, runs, gl.SliceLayout(0, PAIR)) // (runs // PIECES)
    opens = ((bits >> (row[:, None] + piece[None, :])) & 1) != 0
    if len(like.shape) == 2:
        return opens
    else:
        return opens[:, :, None, None, None]


@gluon.jit
def _next_block(
    last, block, start, left, keys, row_scale, threshold, q_phase, q_full, record, row_scales,
    thresholds, WHICH: gl.constexpr,
):  # fmt: skip
    """After a block's last step the record of the next one, else one step less.

    This branch also keeps ptxas from waiting for the values before the softmax is done.
    """
    left -= 1
    if last:
        q_phase = q_phase ^ 1
        mbarrier.wait(q_full, q_phase)
        block = _scalar(record.index(0))
        start = _scalar(record.index(1))
        left = _scalar(record.index(2))
        keys = _scalar(record.index(3))
        if row_scales is not None:
            row_scale = row_scales.index(WHICH).load(row_scale.type.layout)
        if thresholds is not None:
            threshold = thresholds.index(WHICH).load(threshold.type.layout)
    return block, start, left, keys, row_scale, threshold, q_phase


@gluon.jit
def _below_running(largest, largest_yet, first):
    """Largest scores of pieces less the running maximum, and that with this step in it.

    The running maximum of a piece holds the piece itself and those before it.
    """
    BY_ROW: gl.constexpr = gl.SliceLayout(1, largest.type.layout)
    yet = gl.convert_layout(gl.where(first, -1.0e30, largest_yet), BY_ROW)
    if largest.shape[1] == 2:
        earlier, later = gl.split(largest)
        before = gl.maximum(gl.convert_layout(earlier, BY_ROW), yet)
        after = gl.maximum(gl.convert_layout(later, BY_ROW), before)
        piece = gl.arange(0, 2, gl.SliceLayout(0, largest.type.layout))
        below = largest - gl.where(piece[None, :] == 0, before[:, None], after[:, None])
    else:
        after = gl.maximum(gl.max(largest, 1), yet)
        below = largest - after[:, None]
    return below, gl.convert_layout(after, largest_yet.type.layout)


@gluon.jit
def _scaled(scores, row_scale, k_scale_memory, PIECES: gl.constexpr):
    """Scores as ``_by_run`` gives them, the factor of each, and the largest ``[rows, PIECES]``.

    ``row_scale`` is one number or one of each row.
    """
    SCORES: gl.constexpr = scores.type.layout
    BN: gl.constexpr = scores.shape[1]
    # one scale a column is no run.
    COLUMNS: gl.constexpr = k_scale_memory is not None and k_scale_memory.shape[0] > BN // 8
    RUNS: gl.constexpr = k_scale_memory is not None and not COLUMNS
    if COLUMNS:
        scores = scores * k_scale_memory.load(gl.SliceLayout(0, SCORES))[None, :]
    scores = _by_run(scores, k_scale_memory.shape[0] if RUNS else PIECES)
    k_scale = None
    if RUNS:
        k_scale = _scales_of_runs(k_scale_memory, scores)
    largest = _piece_maxima(scores, k_scale, PIECES)
    if len(row_scale.shape) == 0:
        factor = row_scale
        largest = largest * row_scale
    else:
        factor = _row_vector(row_scale, scores)
        largest = largest * _row_vector(row_scale, largest)
    if RUNS:
        factor = factor * k_scale
    return scores, factor, largest


@gluon.jit
def _weighed(scores, factor, subtracted, sums, rescale, SCORES: gl.constexpr):
    """Weights ``[rows, keys]`` of scores as ``_by_run`` gives them, and the sums with them."""
    rows: gl.constexpr = scores.shape[0]
    keys: gl.constexpr = scores.shape[1] * scores.shape[2] * 8
    fresh = _exp2(scores * factor - subtracted)
    fresh = gl.convert_layout(fresh.reshape([rows, keys]), SCORES)
    new_sums = _scaled_sums(sums, rescale)
    new_sums += _row_sums(fresh)
    return fresh, new_sums


@gluon.jit
def _raise_anchor(scores, factor, old_max, sums, one):
    """Rows' maxima with these scores in them, what that lowers weights by, and lowered sums."""
    largest = gl.max(gl.max(scores, 4), 2)
    if scores.dtype.is_int():
        largest = _as_float(largest, one) - OFFSET_OF_INTEGERS
    if len(factor.shape) > 0:
        factor = factor.reshape(factor.shape[0], factor.shape[1])
        factor = gl.convert_layout(factor, gl.SliceLayout(2, largest.type.layout))[:, :, None]
    largest = gl.convert_layout(gl.max(largest * factor, 1), old_max.type.layout)
    new_max = _raised(largest, old_max)
    rescale = _exp2(old_max - new_max)
    return new_max, rescale, sums * rescale


@gluon.jit
def _weights_of(
    scores, first, row_max, sums, row_scale, k_scale, one, ANCHORED: gl.constexpr
):  # fmt: skip
    """Weights of a step's keys as ``_by_run`` gives them, and what their rows carry on.

    If ANCHORED, ``row_max`` is the first step's for all steps, and the third answer says nothing.
    """
    INTEGERS: gl.constexpr = scores.dtype.is_int()
    scores = _by_run(scores, 1 if k_scale is None else k_scale.shape[0])
    factor = row_scale
    if len(row_scale.shape) > 0:
        PAIR: gl.constexpr = _first_two(scores.type.layout, 5)
        scale = gl.convert_layout(row_scale, gl.SliceLayout(1, PAIR))[:, None]
        if k_scale is not None:
            scale = scale * gl.convert_layout(k_scale, gl.SliceLayout(0, PAIR))[None, :]
        factor = scale[:, :, None, None, None]
    rescale = row_max
    row_max = gl.where(first, -1.0e30, row_max)
    sums = gl.where(first, 0.0, sums)
    if ANCHORED:
        raises = first
    else:
        raises: gl.constexpr = True
    if raises:
        row_max, rescale, sums = _raise_anchor(scores, factor, row_max, sums, one)
    subtracted = _thread_vector(row_max, scores)
    if INTEGERS:
        # behind the branch in which maxima are raised, where the exponentials leave time for it.
        scores = _as_float(scores, one)
        subtracted = subtracted + factor * OFFSET_OF_INTEGERS
    fresh = _exp2(scores * factor - subtracted)
    return fresh, row_max, rescale, sums + _sums_of(fresh, sums)


@gluon.jit
def _sums_of(fresh, like):
    """What each thread holds of its rows, summed."""
    return gl.convert_layout(gl.sum(gl.sum(gl.sum(fresh, 4), 2), 1), like.type.layout)


@gluon.jit
def _soften(
    scores, first, keys, row_max, sums, row_scale, k_scale, one, dtype: gl.constexpr,
    WEIGHTS: gl.constexpr, ANCHORED: gl.constexpr,
):  # fmt: skip
    """Weights of a step's scores, and what its rows carry on.

    ``k_scale`` are those of runs, or of columns, or None.
    """
    SCORES: gl.constexpr = scores.type.layout
    rows: gl.constexpr = scores.shape[0]
    keys_at_once: gl.constexpr = scores.shape[1]
    if first:
        scores = _mask(scores, keys)
    # one scale a column is no run.
    COLUMNS: gl.constexpr = k_scale is not None and k_scale.shape[0] > keys_at_once // 8
    if COLUMNS:
        if scores.dtype.is_int():
            scores = _as_float(scores, one) - OFFSET_OF_INTEGERS
        scores = scores * k_scale[None, :]
        k_scale = None
    fresh, new_max, rescale, sums = _weights_of(
        scores, first, row_max, sums, row_scale, k_scale, one, ANCHORED
    )
    fresh = gl.convert_layout(fresh.reshape([rows, keys_at_once]), SCORES)
    return gl.convert_layout(fresh.to(dtype), WEIGHTS), new_max, rescale, sums


@gluon.jit
def _soften_gated(
    scores,
    first,
    keys,
    row_max,
    sums,
    row_scale,
    k_scale_memory,
    kept_memory,
    votes,
    slot,
    threshold,
    largest_yet,
    dtype: gl.constexpr,
    WEIGHTS: gl.constexpr,
    GATE: gl.constexpr,
    GATE_ROWS: gl.constexpr,
    PIECES: gl.constexpr,
):
    """``_soften`` with a gate.

    The last answer is the running maximum of the rows, or an absolute gate's bits of open pieces.
    """
    SCORES: gl.constexpr = scores.type.layout
    if first:
        scores = _mask(scores, keys)
    old_max = gl.where(first, -1.0e30, row_max)
    scores, factor, largest = _scaled(scores, row_scale, k_scale_memory, PIECES)
    if GATE == "absolute":
        _vote(largest, threshold, votes, slot, GATE_ROWS)
        if GATE_ROWS == 128:
            _meet()
        gated = _counted(votes, slot, GATE_ROWS)
        if kept_memory is not None:
            kept = _scalar(kept_memory)
            gated = gated | kept
            if GATE_ROWS == 32:
                gated = gated | (kept << PIECES)
        # what is skipped enters neither maximum nor sum.
        opens = _is_open(gated, largest, PIECES, GATE_ROWS)
        largest = gl.where(opens, largest, -float("inf"))
    else:
        below, gated = _below_running(largest, largest_yet, first)
        _vote(below, threshold, votes, slot, GATE_ROWS)
    step_max = gl.convert_layout(gl.max(largest, 1), row_max.type.layout)
    new_max = gl.where(step_max > old_max + BEHIND, step_max, old_max)
    rescale = _exp2(old_max - new_max)
    subtracted = _row_vector(new_max, scores)
    if GATE == "absolute":
        opens = _is_open(gated, scores, PIECES, GATE_ROWS)
        subtracted = gl.where(opens, subtracted, float("inf"))
    fresh, new_sums = _weighed(
        scores, factor, subtracted, gl.where(first, 0.0, sums), rescale, SCORES
    )  # fmt: skip
    return gl.convert_layout(fresh.to(dtype), WEIGHTS), new_max, rescale, new_sums, gated


@gluon.jit
def _consume(
    q_memory,
    k_stages,
    v_stages,
    record,
    row_scales,
    thresholds,
    votes,
    k_scales,
    kept_words,
    barriers,
    q_tiles_ptr,
    out_ptr,
    lse_ptr,
    shift_ptr,
    skipped_ptr,
    words_ptr,
    S,
    scale_log2,
    WHICH_: gl.constexpr,
    D_: gl.constexpr,
    M_: gl.constexpr,
    GENERIC_: gl.constexpr,
    GATE_: gl.constexpr,
    GATE_ROWS_: gl.constexpr,
    PIECES_: gl.constexpr,
    PASS_: gl.constexpr,
):
    WHICH: gl.constexpr = plain(WHICH_)
    D: gl.constexpr = plain(D_)
    M: gl.constexpr = plain(M_)
    # cp.async writes through the generic proxy, wgmma reads through the async one.
    GENERIC: gl.constexpr = plain(GENERIC_)
    GATE: gl.constexpr = plain(GATE_)
    GATE_ROWS: gl.constexpr = plain(GATE_ROWS_)
    PIECES: gl.constexpr = plain(PIECES_)
    STAGES: gl.constexpr = k_stages.shape[0]
    BN: gl.constexpr = k_stages.shape[1]
    DP: gl.constexpr = k_stages.shape[2]
    dtype: gl.constexpr = v_stages.dtype
    ANCHORED: gl.constexpr = plain(PASS_) == "first"
    noted_ptr = None
    if ANCHORED:
        noted_ptr = words_ptr + 2
    QK_DEPTH: gl.constexpr = 256 // k_stages.dtype.primitive_bitwidth
    full, empty, q_full, q_empty = barriers

    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, QK_DEPTH])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DP, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUTPUT, 2)
    OUT_BY_ROW: gl.constexpr = gl.SliceLayout(1, OUTPUT)
    BY_ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    q = q_memory.index(WHICH)
    nothing = gl.full([64, BN], 0.0, gl.float32, SCORES)
    no_scores = nothing
    if k_stages.dtype.is_int():
        no_scores = gl.full([64, BN], 0, gl.int32, SCORES)
    # a factor that ptxas cannot know to be 1.
    one = gl.minimum(S, 1)

    RUNS: gl.constexpr = 1 if k_scales is None else k_scales.shape[1]
    # scales of runs are few, and read while the products run: the barrier that triton puts before
    # costs nothing there.
    EARLY: gl.constexpr = k_scales is not None and RUNS <= BN // 8
    # the block before the first: no weights, and a result that is not stored.
    acc = gl.full([64, DP], 0.0, gl.float32, OUTPUT)
    sums = _row_sums(nothing)
    row_max = sums
    if GATE is not None:
        row_max = gl.full([64], 0.0, gl.float32, BY_ROW)
    weights = gl.convert_layout(nothing.to(dtype), WEIGHTS)
    done = -1
    done_start = 0

    stage = 0
    phase = 0
    q_phase = 0
    mbarrier.wait(q_full, q_phase)
    block = _scalar(record.index(0))
    start = _scalar(record.index(1))
    left = _scalar(record.index(2))
    keys = _scalar(record.index(3))
    row_scale = scale_log2
    if row_scales is not None:
        row_scale = row_scales.index(WHICH).load(BY_ROW)
    if GATE is not None:
        threshold = thresholds.index(WHICH).load(BY_ROW)
        largest_yet = row_max
        slot = WHICH + 0 * done
        if skipped_ptr is not None:
            skipped = gl.full([64], 0, gl.int32, BY_ROW)
        # whether a piece of the step before is open.
        opened = 1
    first = True
    second = False
    working = True
    while working:
        # scores of this step, values of the one before: in a block's first step, of the block
        # before. The last step of all has no block and only ends the one before.
        mbarrier.wait(full.index(stage), phase)
        if GENERIC:
            fence_async_shared()
        last = left == 1
        k_scale_memory = None
        if k_scales is not None:
            k_scale_memory = k_scales.index(stage)
        kept_memory = None
        if kept_words is not None:
            kept_memory = kept_words.index(stage)
        k = k_stages.index(stage).permute((1, 0))
        v = v_stages.index(stage)
        k_scale = None
        pending = warpgroup_mma(q, k, no_scores, use_acc=False, is_async=True)
        if GATE is None:
            # the sum over a block begins with the values of its first step, one step later. Zeros
            # assigned in the branch below would be 64 moves a step.
            pending_acc = warpgroup_mma(weights, v, acc, use_acc=not second, is_async=True)
            if EARLY:
                k_scale = k_scales.index(stage).load(gl.BlockedLayout([RUNS], [32], [4], [0]))
            scores = warpgroup_mma_wait(1, deps=[pending])
            if last:
                mbarrier.arrive(q_empty)
            if RUNS > BN // 8:
                k_scale = k_scales.index(stage).load(gl.SliceLayout(0, SCORES))
            fresh, new_max, rescale, new_sums = _soften(
                scores, first, keys, row_max, sums, row_scale, k_scale, one, dtype,
                WEIGHTS, ANCHORED,
            )  # fmt: skip
            next_block, next_start, left, next_keys, next_row_scale, _, q_phase = _next_block(
                last, block, start, left, keys, row_scale, row_scale, q_phase, q_full, record,
                row_scales, thresholds, WHICH,
            )  # fmt: skip
            acc, weights = warpgroup_mma_wait(0, deps=[pending_acc, weights])
        elif opened != 0:
            pending_acc = warpgroup_mma(weights, v, acc, use_acc=not second, is_async=True)
            scores = warpgroup_mma_wait(1, deps=[pending])
            if scores.dtype.is_int():
                scores = _as_float(scores, one) - OFFSET_OF_INTEGERS
            if last:
                mbarrier.arrive(q_empty)
            fresh, new_max, rescale, new_sums, gated = _soften_gated(
                scores, first, keys, row_max, sums, row_scale, k_scale_memory,
                kept_memory, votes, slot, threshold, largest_yet, dtype, WEIGHTS, GATE, GATE_ROWS,
                PIECES,
            )  # fmt: skip
            next_block, next_start, left, next_keys, next_row_scale, next_threshold, q_phase = (
                _next_block(
                    last, block, start, left, keys, row_scale, threshold, q_phase, q_full, record,
                    row_scales, thresholds, WHICH,
                )
            )  # fmt: skip
            acc, weights = warpgroup_mma_wait(0, deps=[pending_acc, weights])
        else:
            # a copy of the code above without the values: with a branch around their product
            # alone, ptxas lets every product wait for the one before. And with the scores' product
            # in both copies, ptxas 12.9 takes the address of other keys in the second.
            scores = warpgroup_mma_wait(0, deps=[pending])
            if scores.dtype.is_int():
                scores = _as_float(scores, one) - OFFSET_OF_INTEGERS
            if last:
                mbarrier.arrive(q_empty)
            fresh, new_max, rescale, new_sums, gated = _soften_gated(
                scores, first, keys, row_max, sums, row_scale, k_scale_memory,
                kept_memory, votes, slot, threshold, largest_yet, dtype, WEIGHTS, GATE, GATE_ROWS,
                PIECES,
            )  # fmt: skip
            next_block, next_start, left, next_keys, next_row_scale, next_threshold, q_phase = (
                _next_block(
                    last, block, start, left, keys, row_scale, threshold, q_phase, q_full, record,
                    row_scales, thresholds, WHICH,
                )
            )  # fmt: skip
        mbarrier.arrive(empty.index(stage))
        if first:
            if done >= 0:
                _store(
                    acc, row_max, sums, done, done_start, q_tiles_ptr, out_ptr, lse_ptr,
                    shift_ptr, noted_ptr, S, scale_log2, D, M, WHICH * 64,
                )  # fmt: skip
                if skipped_ptr is not None:
                    gl.atomic_add(skipped_ptr + done, gl.sum(skipped, 0), sem="relaxed")
            done = block
            done_start = start
        # not between the products above: ptxas would let the second wait for the first.
        if GATE is None:
            if not ANCHORED:
                threads = _by_run(acc, 1)
                threads = _rescaled(threads, _thread_vector(rescale, threads))
                acc = gl.convert_layout(threads.reshape([64, DP]), OUTPUT)
        else:
            acc = _rescaled(acc, gl.convert_layout(rescale, OUT_BY_ROW)[:, None])
        if GATE is not None:
            if GATE == "relative":
                # decided late: the weights are in the sum, and in the next step's product only if
                # they are open.
                largest_yet = gated
                if GATE_ROWS == 128:
                    _meet()
                bits = _counted(votes, slot, GATE_ROWS)
                ALL: gl.constexpr = (1 << PIECES * (2 if GATE_ROWS == 32 else 1)) - 1
                # where nothing is open, there is no product.
                if (bits != ALL) & ((bits != 0) | first):
                    opens = _is_open(bits, fresh, PIECES, GATE_ROWS)
                    fresh = gl.where(opens, fresh, 0.0).to(dtype)
            else:
                bits = gated
            if skipped_ptr is not None:
                skipped = _count_skipped(
                    gl.where(first, 0, skipped), threshold, bits, gl.where(first, keys, BN), BN,
                    PIECES, GATE_ROWS,
                )  # fmt: skip
            # the first values of a block start its sum, be they none.
            opened = gl.where(first, 1, bits)
            threshold = next_threshold
            slot = slot ^ 2
        working = block >= 0
        second = first
        first = last
        block = next_block
        start = next_start
        keys = next_keys
        row_scale = next_row_scale
        row_max = new_max
        sums = new_sums
        weights = fresh
        stage, phase = next_stage(stage, phase, STAGES)


# ---- producer ----


@gluon.jit
def _locate(entry, G, BH, TOGETHER):
    """Head and block of the ``entry``-th block in the order of work.

    TOGETHER heads are worked on at a time, longest blocks first: few enough that their keys and
    values stay in L2.
    """
    group = entry // (TOGETHER * G)
    start = group * TOGETHER
    heads = gl.minimum(BH - start, TOGETHER)
    rank = entry - start * G
    head = start + rank % heads
    return head, head * G + rank // heads


@gluon.jit
def _part(item, WHOLE, PARTS):
    """Place of an item's block in the order of work, which part it is and of how many.

    The first WHOLE items are blocks, the others parts of the blocks behind them.
    """
    beyond = gl.maximum(item - WHOLE, 0)
    whole = item < WHOLE
    entry = gl.where(whole, item, WHOLE + beyond // PARTS)
    return entry, gl.where(whole, 0, beyond % PARTS), gl.where(whole, 1, PARTS)


@gluon.jit
def _block_of(item, G, BH, TOGETHER, WHOLE, PARTS):
    entry, _, _ = _part(item, WHOLE, PARTS)
    _, block = _locate(entry, G, BH, TOGETHER)
    return block


@gluon.jit
def _next_noted(item, noted_ptr, counter_ptr, G, BH, TOGETHER, ITEMS, WHOLE, PARTS):
    """``item``, or the next one whose block is noted."""
    passing = item < ITEMS
    while passing:
        block = _block_of(item, G, BH, TOGETHER, WHOLE, PARTS)
        passing = gl.load(noted_ptr + 1 + block) == 0
        if passing:
            item = gl.num_programs(0) + gl.atomic_add(counter_ptr, 1, sem="relaxed")
            passing = item < ITEMS
    return item


@gluon.jit
def _chunk_rows(
    list_ptr, first, count, S, N: gl.constexpr, CHUNKS: gl.constexpr, MASKED: gl.constexpr
):
    """First rows of the chunks of a step; S, past the end, for a dead one."""
    place = first + gl.arange(0, CHUNKS, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    if MASKED:
        chunk = gl.load(list_ptr + place, mask=place < count, other=0).to(gl.int32)
        return gl.where(place < count, chunk * N, S)
    else:
        return gl.load(list_ptr + place).to(gl.int32) * N


@gluon.jit
def _load_chunks(
    desc, pieces, bar, head, rows, stage, slot, CHUNKS: gl.constexpr, HALVES: gl.constexpr
):  # fmt: skip
    """Boxes of one chunk and 64 columns; ``rows`` holds the chunks' first rows, CHUNKS a slot."""
    # four rows are read at once: no more registers, but one latency for all.
    FOUR: gl.constexpr = 4 if CHUNKS > 4 else CHUNKS
    for start in gl.static_range(0, CHUNKS, FOUR):
        four = ()
        for c in gl.static_range(start, start + FOUR):
            four = four + (_scalar(rows.index(slot * CHUNKS + c)),)
        for c in gl.static_range(FOUR):
            for half in gl.static_range(HALVES):
                piece = pieces.index((stage * HALVES + half) * CHUNKS + start + c)
                tma_load(desc, [head, four[c], half * 64], bar, piece)


@triton.constexpr_function
def _token_layout(BN, DP, BITS):
    """128 threads copy 16 bytes of each of a few neighbouring tokens."""
    each = 128 // BITS
    across = DP // each
    return gl.BlockedLayout([BN * across // 128, each], [32 // across, across], [4, 1], [1, 0])


@gluon.jit
def _tokens(list_ptr, first, count, BN: gl.constexpr, LAYOUT: gl.constexpr, MASKED: gl.constexpr):
    """Tokens of a step; a dead one repeats the last that is alive."""
    place = first + gl.arange(0, BN, gl.SliceLayout(1, LAYOUT))
    if MASKED:
        place = gl.minimum(place, gl.maximum(count - 1, 0))
        return gl.load(list_ptr + place, mask=place < count, other=0).to(gl.int32)
    else:
        return gl.load(list_ptr + place).to(gl.int32)


@gluon.jit
def _line_tokens(list_ptr, first, count, BN: gl.constexpr, MASKED: gl.constexpr):
    """``_tokens``, each held by one thread."""
    LINE: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [gl.num_warps(), 1], [1, 0])
    tokens = _tokens(list_ptr, first, count, BN, LINE, MASKED)
    return gl.convert_layout(tokens, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))


@gluon.jit
def _copy_tokens(head_ptr, memory, tokens, D: gl.constexpr, LAYOUT: gl.constexpr):
    column = gl.arange(0, memory.shape[1], gl.SliceLayout(0, LAYOUT))
    pointers = head_ptr + (tokens * D)[:, None] + column[None, :]
    if memory.shape[1] == D:
        _cp_async(memory, pointers)
    else:
        _cp_async(memory, pointers, mask=(column < D)[None, :])


@gluon.jit
def _scales_of_chunks(
    head_ptr, list_ptr, first, count, S, N: gl.constexpr, BN: gl.constexpr, K_RUN: gl.constexpr,
    RUNS: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Scales of the runs of a step's keys; 1 for what is not there."""
    each: gl.constexpr = BN // RUNS
    key = gl.arange(0, RUNS, gl.BlockedLayout([1], [32], [gl.num_warps()], [0])) * each
    place = first + key // N
    if MASKED:
        chunk = gl.load(list_ptr + place, mask=place < count, other=0).to(gl.int32)
    else:
        chunk = gl.load(list_ptr + place).to(gl.int32)
    token = chunk * N + key % N
    there = token < S
    if MASKED:
        there &= place < count
    return gl.load(head_ptr + token // K_RUN, mask=there, other=1.0)


@gluon.jit
def _put_tables(
    row_scales, thresholds, q_tiles_ptr, q_scale_ptr, shift_ptr, threshold_ptr, block, head, S,
    scale_log2, M: gl.constexpr, Q_RUN: gl.constexpr, GATE: gl.constexpr,
):  # fmt: skip
    """Scale and threshold of every row of a block."""
    line = gl.arange(0, 64, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    for half in gl.static_range(2):
        place = half * 64 + line
        tile = gl.load(q_tiles_ptr + block.to(gl.int64) * (128 // M) + place // M)
        row = tile * M + place % M
        alive = (tile >= 0) & (row < S)
        if q_scale_ptr is not None:
            runs = head.to(gl.int64) * ((S + Q_RUN - 1) // Q_RUN)
            scale = gl.load(q_scale_ptr + runs + row // Q_RUN, mask=alive, other=1.0)
            row_scales.index(half).store(scale * scale_log2)
        if GATE is not None:
            tiles = head.to(gl.int64) * ((S + M - 1) // M)
            threshold = gl.load(threshold_ptr + tiles + tile, mask=alive, other=float("nan"))
            threshold *= 1.4426950408889634
            if GATE == "absolute" and shift_ptr is not None:
                # thresholds are on scores with the mean key in them.
                shift = gl.load(shift_ptr + head.to(gl.int64) * S + row, mask=alive, other=0.0)
                threshold -= shift * scale_log2
            thresholds.index(half).store(threshold)


@gluon.jit
def _produce(
    q_desc,
    k_desc,
    v_desc,
    k_ptr,
    v_ptr,
    q_pieces,
    k_pieces,
    v_pieces,
    rows,
    q_rows,
    record,
    row_scales,
    thresholds,
    k_scales,
    kept_words,
    barriers,
    q_tiles_ptr,
    kv_count_ptr,
    kv_index_ptr,
    q_scale_ptr,
    k_scale_ptr,
    shift_ptr,
    threshold_ptr,
    kept_ptr,
    words_ptr,
    S,
    G,
    C,
    BH,
    TOGETHER,
    ITEMS,
    WHOLE,
    PARTS,
    scale_log2,
    STAGES_: gl.constexpr,
    BN_: gl.constexpr,
    D_: gl.constexpr,
    DP_: gl.constexpr,
    M_: gl.constexpr,
    N_: gl.constexpr,
    Q_RUN_: gl.constexpr,
    K_RUN_: gl.constexpr,
    GATE_: gl.constexpr,
    PASS_: gl.constexpr,
):
    STAGES: gl.constexpr = plain(STAGES_)
    BN: gl.constexpr = plain(BN_)
    D: gl.constexpr = plain(D_)
    DP: gl.constexpr = plain(DP_)
    M: gl.constexpr = plain(M_)
    N: gl.constexpr = plain(N_)
    Q_RUN: gl.constexpr = plain(Q_RUN_)
    K_RUN: gl.constexpr = plain(K_RUN_)
    GATE: gl.constexpr = plain(GATE_)
    CHUNKS: gl.constexpr = BN // N
    HALVES: gl.constexpr = DP // 64
    QK_BITS: gl.constexpr = q_desc.dtype.primitive_bitwidth
    # 128 bytes of a row are what TMA and the tensor cores swizzle.
    QK_HALVES: gl.constexpr = HALVES if QK_BITS == 16 else 1
    R: gl.constexpr = 128 // M
    BOX: gl.constexpr = M if M < 64 else 64
    V_BYTES: gl.constexpr = BN * DP * 2
    K_BYTES: gl.constexpr = BN * DP * QK_BITS // 8
    Q_BYTES: gl.constexpr = 128 * DP * QK_BITS // 8
    TMA: gl.constexpr = N >= 8
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    LAYOUT: gl.constexpr = _token_layout(BN, DP, 16)
    K_LAYOUT: gl.constexpr = _token_layout(BN, DP, QK_BITS)
    ONE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    full, empty, q_full, q_empty = barriers

    counter_ptr = words_ptr
    noted_ptr = None
    if plain(PASS_) == "second":
        counter_ptr = words_ptr + 1
        noted_ptr = words_ptr + 2
    programs = gl.num_programs(0)
    item = gl.program_id(0)
    if noted_ptr is not None:
        # most often there is none.
        item = gl.where(gl.load(noted_ptr) == 0, ITEMS, item)
        item = _next_noted(item, noted_ptr, counter_ptr, G, BH, TOGETHER, ITEMS, WHOLE, PARTS)
    first_block = _block_of(gl.minimum(item, ITEMS - 1), G, BH, TOGETHER, WHOLE, PARTS)
    count = gl.load(kv_count_ptr + first_block)
    q_phase = 0
    stage = 0
    phase = 0
    slot = 0
    # before the first block stand values that do not exist.
    if TMA:
        v_head = 0
        chunk_rows = _view(rows, [2 * CHUNKS, 1], ONE)
        rows.index(1).store(gl.full([CHUNKS], 0, gl.int32, LINE) + S)
    else:
        tokens = gl.full([BN], 0, gl.int32, gl.SliceLayout(1, LAYOUT))
        v_from = v_ptr

    while item < ITEMS:
        entry, part, parts = _part(item, WHOLE, PARTS)
        head, block = _locate(entry, G, BH, TOGETHER)
        # a part is some of a block's steps.
        steps = (count + CHUNKS - 1) // CHUNKS
        begin = steps * part // parts * CHUNKS
        count = gl.minimum(steps * (part + 1) // parts * CHUNKS, count) - begin
        list_ptr = kv_index_ptr + (block.to(gl.int64) * C + begin)
        steps = gl.maximum((count + CHUNKS - 1) // CHUNKS, 1)
        # rows of parts lie behind those of all heads.
        start = head * S
        start = gl.where(parts > 1, -1 - BH * S - (item - WHOLE) * 128, start)
        first = (steps - 1) * CHUNKS
        # the list rises: a chunk that the sequence's end cuts can only be the last.
        last = gl.load(list_ptr + count - 1, mask=count > 0, other=0).to(gl.int32)
        if TMA:
            next_rows = _chunk_rows(list_ptr, first, count, S, N, CHUNKS, True)
        else:
            k_from = k_ptr + head.to(gl.int64) * S * D
            next_tokens = _tokens(list_ptr, first, count, BN, LAYOUT, True)
            k_tokens = next_tokens
            if QK_BITS == 8:
                k_tokens = _tokens(list_ptr, first, count, BN, K_LAYOUT, True)
        if k_scale_ptr is not None:
            k_scale_from = k_scale_ptr + head.to(gl.int64) * ((S + K_RUN - 1) // K_RUN)
            if TMA:
                RUNS: gl.constexpr = k_scales.shape[1]
                next_scales = _scales_of_chunks(
                    k_scale_from, list_ptr, first, count, S, N, BN, K_RUN, RUNS, True
                )
            else:
                key_scales = k_scale_from + _line_tokens(list_ptr, first, count, BN, True) // K_RUN
        if kept_ptr is not None:
            kept_from = kept_ptr + block.to(gl.int64) * ((C * N + BN - 1) // BN)
            kept = kept_from + steps - 1 + gl.arange(0, 1, LINE)
        tile = gl.load(q_tiles_ptr + block.to(gl.int64) * R + gl.arange(0, R, LINE))
        item = programs + gl.atomic_add(counter_ptr, 1, sem="relaxed")
        if noted_ptr is not None:
            item = _next_noted(item, noted_ptr, counter_ptr, G, BH, TOGETHER, ITEMS, WHOLE, PARTS)
        next_block = _block_of(gl.minimum(item, ITEMS - 1), G, BH, TOGETHER, WHOLE, PARTS)
        next_count = gl.load(kv_count_ptr + next_block)

        # the first keys of this block and the last values of the one before.
        mbarrier.wait(empty.index(stage), phase ^ 1)
        bar = full.index(stage)
        if TMA:
            rows.index(slot).store(next_rows)
            if k_scale_ptr is not None:
                k_scales.index(stage).store(next_scales)
            if kept_ptr is not None:
                kept_words.index(stage).store(gl.load(kept))
            if k_scale_ptr is not None or kept_ptr is not None:
                _thread_barrier()
            mbarrier.expect(bar, K_BYTES + V_BYTES)
            _load_chunks(k_desc, k_pieces, bar, head, chunk_rows, stage, slot, CHUNKS, QK_HALVES)
            slot = slot ^ 1
            _load_chunks(v_desc, v_pieces, bar, v_head, chunk_rows, stage, slot, CHUNKS, HALVES)
            v_head = head
        else:
            _copy_tokens(k_from, k_pieces.index(stage), k_tokens, D, K_LAYOUT)
            _copy_tokens(v_from, v_pieces.index(stage), tokens, D, LAYOUT)
            if k_scale_ptr is not None:
                _cp_async(k_scales.index(stage), key_scales)
            if kept_ptr is not None:
                _cp_async(kept_words.index(stage), kept)
            async_copy.mbarrier_arrive(bar, increment_count=False)
            tokens = next_tokens
            v_from = v_ptr + head.to(gl.int64) * S * D
        stage, phase = next_stage(stage, phase, STAGES)

        # its queries, as soon as the consumers are done with those of the block before.
        past_end = gl.maximum((last + 1) * N - S, 0)
        mbarrier.wait(q_empty, q_phase ^ 1)
        q_phase = q_phase ^ 1
        q_rows.store(tile * M)
        _put(record.index(0), block)
        _put(record.index(1), start)
        _put(record.index(2), steps)
        _put(record.index(3), gl.where(count > 0, (count - first) * N - past_end, 0))
        if q_scale_ptr is not None or GATE is not None:
            _put_tables(
                row_scales, thresholds, q_tiles_ptr, q_scale_ptr, shift_ptr, threshold_ptr, block,
                head, S, scale_log2, M, Q_RUN, GATE,
            )  # fmt: skip
            _thread_barrier()
        mbarrier.expect(q_full, Q_BYTES)
        q_row = _view(q_rows, [R, 1], ONE)
        for b in gl.static_range(128 // BOX):
            row = _scalar(q_row.index(b * BOX // M)) + b * BOX % M
            for half in gl.static_range(QK_HALVES):
                piece = (b * BOX // 64 * QK_HALVES + half) * (64 // BOX) + b % (64 // BOX)
                tma_load(q_desc, [head, row, half * 64], q_full, q_pieces.index(piece))

        for step in range(1, steps):
            at = (step - 1) * CHUNKS
            if TMA:
                next_rows = _chunk_rows(list_ptr, at, count, S, N, CHUNKS, False)
            else:
                next_tokens = _tokens(list_ptr, at, count, BN, LAYOUT, False)
                k_tokens = next_tokens
                if QK_BITS == 8:
                    k_tokens = _tokens(list_ptr, at, count, BN, K_LAYOUT, False)
            if k_scale_ptr is not None:
                if TMA:
                    next_scales = _scales_of_chunks(
                        k_scale_from, list_ptr, at, count, S, N, BN, K_RUN, RUNS, False
                    )
                else:
                    key_scales = (
                        k_scale_from + _line_tokens(list_ptr, at, count, BN, False) // K_RUN
                    )
            if kept_ptr is not None:
                kept = kept_from + step - 1 + gl.arange(0, 1, LINE)
                if TMA:
                    next_kept = gl.load(kept)
            mbarrier.wait(empty.index(stage), phase ^ 1)
            bar = full.index(stage)
            if TMA:
                rows.index(slot).store(next_rows)
                if k_scale_ptr is not None:
                    k_scales.index(stage).store(next_scales)
                if kept_ptr is not None:
                    kept_words.index(stage).store(next_kept)
                if k_scale_ptr is not None or kept_ptr is not None:
                    _thread_barrier()
                mbarrier.expect(bar, K_BYTES + V_BYTES)
                _load_chunks(
                    k_desc, k_pieces, bar, head, chunk_rows, stage, slot, CHUNKS, QK_HALVES
                )
                slot = slot ^ 1
                _load_chunks(v_desc, v_pieces, bar, head, chunk_rows, stage, slot, CHUNKS, HALVES)
            else:
                _copy_tokens(k_from, k_pieces.index(stage), k_tokens, D, K_LAYOUT)
                _copy_tokens(v_from, v_pieces.index(stage), tokens, D, LAYOUT)
                if k_scale_ptr is not None:
                    _cp_async(k_scales.index(stage), key_scales)
                if kept_ptr is not None:
                    _cp_async(kept_words.index(stage), kept)
                async_copy.mbarrier_arrive(bar, increment_count=False)
                tokens = next_tokens
            stage, phase = next_stage(stage, phase, STAGES)
        count = next_count

    # the last values of all, and a record that ends the consumers.
    mbarrier.wait(empty.index(stage), phase ^ 1)
    if TMA:
        mbarrier.expect(full.index(stage), V_BYTES)
        slot = slot ^ 1
        _load_chunks(
            v_desc, v_pieces, full.index(stage), v_head, chunk_rows, stage, slot, CHUNKS, HALVES
        )
    else:
        _copy_tokens(v_from, v_pieces.index(stage), tokens, D, LAYOUT)
        async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
    mbarrier.wait(q_empty, q_phase ^ 1)
    _put(record.index(0), -1)
    _put(record.index(1), 0)
    _put(record.index(2), 0)
    _put(record.index(3), 0)
    mbarrier.arrive(q_full)


@gluon.jit
def gather_attention_kernel(
    q_desc,
    k_desc,
    v_desc,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    q_tiles_ptr,
    kv_count_ptr,
    kv_index_ptr,
    q_scale_ptr,
    k_scale_ptr,
    shift_ptr,
    threshold_ptr,
    kept_ptr,
    skipped_ptr,
    words_ptr,
    S,
    G,
    C,
    BH,
    TOGETHER,
    ITEMS,
    WHOLE,
    PARTS,
    scale_log2,
    D: gl.constexpr,
    DP: gl.constexpr,
    M: gl.constexpr,
    N: gl.constexpr,
    BN: gl.constexpr,
    Q_RUN: gl.constexpr,
    K_RUN: gl.constexpr,
    GATE: gl.constexpr,
    GATE_ROWS: gl.constexpr,
    GATE_KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMER_REGS: gl.constexpr,
    PRODUCER_REGS: gl.constexpr,
    PRODUCER_WARPS: gl.constexpr,
    PASS: gl.constexpr,
):
    """Attend blocks of 128 query rows to their key lists; all tensors contiguous.

    ``words_ptr`` has zeros: an item counter for each pass, and where the first notes blocks for the
    second. PASS is which it is, or None where no block can need a second one.
    Pointers that are None leave out what they are for: scales and shift of 8-bit operands, a gate's
    thresholds and words of kept pieces, the count of skipped pairs.
    """
    HALVES: gl.constexpr = DP // 64
    GENERIC: gl.constexpr = N < 8
    BOX: gl.constexpr = M if M < 64 else 64
    BITS: gl.constexpr = q_desc.dtype.primitive_bitwidth
    # columns that 128 bytes hold, or all of them.
    QK_BOX: gl.constexpr = 64 if BITS == 16 else DP
    QK_SWIZZLE: gl.constexpr = QK_BOX * BITS // 8
    ROWS: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    BOXES: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=3)
    QK_ROWS: gl.constexpr = gl.NVMMASharedLayout(QK_SWIZZLE, BITS, rank=2)
    QK_BOXES: gl.constexpr = gl.NVMMASharedLayout(QK_SWIZZLE, BITS, rank=3)
    ONE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    PIECES: gl.constexpr = BN // GATE_KEYS
    q_pieces = gl.allocate_shared_memory(
        q_desc.dtype, [128 // BOX * (DP // QK_BOX), 1, BOX, QK_BOX], QK_BOXES
    )
    q_memory = _view(q_pieces, [2, 64, DP], QK_ROWS)
    if GENERIC:
        k_stages = gl.allocate_shared_memory(k_desc.dtype, [STAGES, BN, DP], QK_ROWS)
        v_stages = gl.allocate_shared_memory(v_desc.dtype, [STAGES, BN, DP], ROWS)
        k_pieces = k_stages
        v_pieces = v_stages
    else:
        K_PIECES: gl.constexpr = STAGES * (DP // QK_BOX) * (BN // N)
        k_pieces = gl.allocate_shared_memory(k_desc.dtype, [K_PIECES, 1, N, QK_BOX], QK_BOXES)
        k_stages = _view(k_pieces, [STAGES, BN, DP], QK_ROWS)
        PIECES_OF_V: gl.constexpr = STAGES * HALVES * (BN // N)
        v_pieces = gl.allocate_shared_memory(v_desc.dtype, [PIECES_OF_V, 1, N, 64], BOXES)
        v_stages = _view(v_pieces, [STAGES, BN, DP], ROWS)
    rows = gl.allocate_shared_memory(gl.int32, [2, BN // N], ONE)
    q_rows = gl.allocate_shared_memory(gl.int32, [128 // M], ONE)
    record = gl.allocate_shared_memory(gl.int32, [4, 1], ONE)
    if q_scale_ptr is not None:
        row_scales = gl.allocate_shared_memory(gl.float32, [2, 64], ONE)
        EACH: gl.constexpr = _keys_of_a_scale(N, K_RUN)
        k_scales = gl.allocate_shared_memory(gl.float32, [STAGES, BN // EACH], ONE)
    else:
        row_scales: gl.constexpr = None
        k_scales: gl.constexpr = None
    if GATE is not None:
        thresholds = gl.allocate_shared_memory(gl.float32, [2, 64], ONE)
        # of each consumer's warps, for even and odd steps.
        votes = gl.allocate_shared_memory(gl.int32, [4, 4], ONE)
    else:
        thresholds: gl.constexpr = None
        votes: gl.constexpr = None
    if kept_ptr is not None:
        kept_words = gl.allocate_shared_memory(gl.int32, [STAGES, 1], ONE)
    else:
        kept_words: gl.constexpr = None
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    q_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    for i in gl.static_range(STAGES):
        # every thread's copies arrive by themselves; TMA's arrive with the one that expects them.
        mbarrier.init(full.index(i), count=32 * PRODUCER_WARPS if GENERIC else 1)
        mbarrier.init(empty.index(i), count=2)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=2)
    barriers = (full, empty, q_full, q_empty)
    # the argument tuples stand in the call: assigned to a variable, constexprs become tensors.
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    q_memory, k_stages, v_stages, record, row_scales, thresholds, votes,
                    k_scales, kept_words, barriers, q_tiles_ptr, out_ptr, lse_ptr, shift_ptr,
                    skipped_ptr, words_ptr, S, scale_log2, gl.constexpr(0), D, M, GENERIC,
                    GATE, GATE_ROWS, PIECES, PASS,
                ),
            ),
            (
                _consume,
                (
                    q_memory, k_stages, v_stages, record, row_scales, thresholds, votes,
                    k_scales, kept_words, barriers, q_tiles_ptr, out_ptr, lse_ptr, shift_ptr,
                    skipped_ptr, words_ptr, S, scale_log2, gl.constexpr(1), D, M, GENERIC,
                    GATE, GATE_ROWS, PIECES, PASS,
                ),
            ),
            (
                _produce,
                (
                    q_desc, k_desc, v_desc, k_ptr, v_ptr, q_pieces, k_pieces, v_pieces, rows,
                    q_rows, record, row_scales, thresholds, k_scales, kept_words, barriers,
                    q_tiles_ptr, kv_count_ptr, kv_index_ptr, q_scale_ptr, k_scale_ptr, shift_ptr,
                    threshold_ptr, kept_ptr, words_ptr, S, G, C, BH, TOGETHER, ITEMS, WHOLE, PARTS,
                    scale_log2, STAGES, BN, D, DP, M, N, Q_RUN, K_RUN, GATE, PASS,
                ),
            ),
        ],
        [4, PRODUCER_WARPS],
        [CONSUMER_REGS, PRODUCER_REGS],
    )  # fmt: skip


@gluon.jit
def join_parts_kernel(
    out_ptr,
    lse_ptr,
    shift_ptr,
    q_tiles_ptr,
    S,
    G,
    BH,
    TOGETHER,
    WHOLE,
    PARTS,
    scale,
    D: gl.constexpr,
    DP: gl.constexpr,
    M: gl.constexpr,
    MOST: gl.constexpr,
    ROWS: gl.constexpr,
):
    """Weigh the at most MOST parts of ROWS rows of a block by their log-sum-exps."""
    LAYOUT: gl.constexpr = gl.BlockedLayout(
        [MOST, 1, 8], [1, 256 // DP, DP // 8], [1, gl.num_warps(), 1], [2, 1, 0]
    )
    PAIR: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    BY_ROW: gl.constexpr = gl.SliceLayout(0, PAIR)
    head, block = _locate(WHOLE + gl.program_id(0), G, BH, TOGETHER)
    place = gl.program_id(1) * ROWS + gl.arange(0, ROWS, BY_ROW)
    tile = gl.load(q_tiles_ptr + block.to(gl.int64) * (128 // M) + place // M)
    row = tile * M + place % M
    alive = (tile >= 0) & (row < S)
    part = gl.arange(0, MOST, gl.SliceLayout(1, PAIR))
    column = gl.arange(0, DP, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    spare = (BH * S + (gl.program_id(0) * PARTS + part) * 128).to(gl.int64)
    spare = spare[:, None] + place[None, :]
    there = (part < PARTS)[:, None] & alive[None, :]
    lse = gl.load(lse_ptr + spare, mask=there, other=-float("inf"))
    pointers = out_ptr + (spare * D)[:, :, None] + column[None, None, :]
    inside = there[:, :, None] & (column < D)[None, None, :]
    parts = gl.load(pointers, mask=inside, other=0.0).to(gl.float32)
    top = gl.max(lse, 0)
    # a row without keys, of zeros in every part.
    top = gl.where(top == -float("inf"), 0.0, top)
    weight = gl.exp(lse - top[None, :])
    total = gl.sum(weight, 0)
    out = gl.sum(parts * (weight / gl.where(total > 0, total, 1.0)[None, :])[:, :, None], 0)
    token = head.to(gl.int64) * S + row
    BY_OUT: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    to = gl.convert_layout(token * D, gl.SliceLayout(1, BY_OUT))[:, None]
    of_row = gl.convert_layout(alive, gl.SliceLayout(1, BY_OUT))[:, None]
    column = gl.arange(0, DP, gl.SliceLayout(0, BY_OUT))[None, :]
    gl.store(out_ptr + to + column, out.to(out_ptr.dtype.element_ty), mask=of_row & (column < D))
    joined = top + gl.log(total)
    if shift_ptr is not None:
        joined += gl.load(shift_ptr + token, mask=alive, other=0.0) * scale
    gl.store(lse_ptr + token, gl.where(total > 0, joined, -float("inf")), mask=alive)


# ---- launch ----


@dataclass(frozen=True)
class Config:
    """What is tuned: none of it changes what a call computes."""

    stages: int
    # of the three warpgroups that share 504 registers a lane, two are consumers.
    consumer_registers: int
    producer_registers: int
    step: int = KEY_GROUP


# what a part takes beyond its own steps, and what joining parts takes, both in steps.
PART_COST = 1.5
JOIN_COST = 4.0
MOST_PARTS = 8
LEAST_STEPS = 4
# with less to win, measured calls were as often slower as faster.
LEAST_GAIN = 0.01
# how many of all chunks the lists hold is known to the GPU alone. With more than this share cutting
# wins more than is thought here; with less a few percent may be lost.
LEAST_SHARE = 0.15


def split_tail(blocks: int, programs: int, steps: int) -> tuple[int, int]:
    """How many blocks of ``steps`` steps to leave whole, and parts to cut each of the others into.

    Equal blocks that do not fill the last round of ``programs`` leave most of the GPU waiting for
    a few of them: 4,096 blocks take 132 programs as long as 4,224.
    """
    rounds, rest = divmod(blocks, programs)
    if rest == 0:
        return blocks, 1
    found, least = (blocks, 1), (rounds + 1) * steps * (1 - LEAST_GAIN)
    for parts in range(2, min(MOST_PARTS, steps // LEAST_STEPS) + 1):
        last = -(-rest * parts // programs) * (steps / parts + PART_COST)
        if (time := rounds * steps + last + JOIN_COST) < least:
            found, least = (blocks - rest, parts), time
    return found


# what a block may have, less room for barriers and tables.
STAGE_BYTES = 224 * 1024


def config(keys: int, padded_dim: int, *, key_bytes: int = 2) -> Config:
    """The fastest measured for key chunks of ``keys`` tokens and numbers of so many bytes."""
    # as many stages as shared memory holds beside the queries.
    queries = BLOCK_ROWS * padded_dim * key_bytes
    # and, of 8 bits, a scale for every key at most.
    scales = 4 if key_bytes == 1 else 0
    stages = (STAGE_BYTES - queries) // (KEY_GROUP * (padded_dim * (key_bytes + 2) + scales))
    if keys == 1:
        return Config(stages, consumer_registers=208, producer_registers=88)
    return Config(stages, consumer_registers=232, producer_registers=40)


@cache
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def boxes_layout(padded_dim: int, bits: int) -> tuple[int, gl.NVMMASharedLayout]:
    """Columns of a TMA box of numbers of ``bits`` bits, and how it lies in shared memory."""
    columns = 64 if bits == 16 else padded_dim
    return columns, gl.NVMMASharedLayout(columns * bits // 8, bits, rank=3)


def _boxes(x: Tensor, rows: int, padded_dim: int) -> TensorDescriptor:
    """Boxes of ``rows`` rows of one head of ``x``, which never reach the next."""
    batch, heads, tokens, dim = x.shape
    columns, layout = boxes_layout(padded_dim, 8 * x.element_size())
    return TensorDescriptor(
        x,
        [batch * heads, tokens, dim],
        [tokens * dim, dim, 1],
        [1, rows, columns],
        layout,
    )


def _dense(x: Tensor) -> Tensor:
    """``x`` as TMA can read it: contiguous and on a multiple of 16 bytes."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def _kept_words(gate: AbsoluteGate, kv_count: Tensor, keys: int) -> Tensor:
    """A word for each step of every list, of which bit p marks piece p as never skipped."""
    assert gate.keep is not None
    kept = kept_pieces(gate.keep, kv_count, keys, gate.keys)
    pieces = KEY_GROUP // gate.keys
    kept = torch.nn.functional.pad(kept, (0, -kept.shape[-1] % pieces)).to(torch.int32)
    kept = kept.view(*kept.shape[:-1], -1, pieces)
    return (kept << torch.arange(pieces, device=kept.device)).sum(-1, dtype=torch.int32)


# of a compiled first pass, the second one.
_SECOND: dict[object, Any] = {}


def _launch(
    grid: tuple[int, int, int],
    operands: tuple[Any, ...],
    constants: dict[str, Any],
    passes: tuple[str | None, ...],
) -> None:
    """Launch the kernel for each pass.

    What triton finds out about arguments at every launch, which takes longer than the second pass
    on the GPU, holds for both.
    """
    launch = gather_attention_kernel[grid]
    compiled = launch(*operands, **constants, PASS=passes[0], num_warps=4)
    for name in passes[1:]:
        if compiled in _SECOND:
            _SECOND[compiled][grid](*operands, *constants.values(), name)
        else:
            _SECOND[compiled] = launch(*operands, **constants, PASS=name, num_warps=4)


def gluon_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_tiles: Tensor,
    kv_count: Tensor,
    kv_index: Tensor,
    *,
    tile: tuple[int, int],
    scale: float,
    gate: Gate | None = None,
    quantized: QuantizedQK | None = None,
    skipped: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Launch the kernel; see ``sparse_attention`` for the arguments.

    Raises:
        ValueError: a tile that the kernel does not have.
    """
    rows, keys = tile
    if rows not in (16, 32, 64, 128) or keys not in (1, 8, 16, 32, 64, 128):
        raise ValueError(f"no kernel for tiles of {rows}x{keys}")
    if q_tiles.shape[3] * rows != BLOCK_ROWS:
        raise ValueError(f"blocks must have {BLOCK_ROWS // rows} tiles, not {q_tiles.shape[3]}")
    batch, heads, tokens, dim = q.shape
    dtype = q.dtype
    blocks = q_tiles.shape[2]
    padded = 64 if dim == 64 else 128
    thresholds = kept = None
    if gate is not None:
        thresholds = gate.thresholds(q, -(-tokens // rows)).contiguous()
        if isinstance(gate, AbsoluteGate) and gate.keep is not None:
            kept = _kept_words(gate, kv_count, keys)
        if skipped is not None:
            # both consumers of a block add to it.
            skipped.zero_()
    if quantized is not None:
        q, k = quantized.q, quantized.k
    q, k, v = _dense(q), _dense(k), _dense(v)
    c = config(keys, padded, key_bytes=k.element_size())
    # a chunk of one token is gathered by pointers, without boxes.
    box = keys if keys >= 8 else 8
    total = blocks * batch * heads
    programs = _multiprocessors(q.device.index)
    whole, parts = total, 1
    if gate is None:
        steps = math.ceil(LEAST_SHARE * tokens / c.step)
        whole, parts = split_tail(total, programs, steps)
    items = whole + (total - whole) * parts
    # parts have rows of their own behind all others.
    all_rows = batch * heads * tokens
    spare = BLOCK_ROWS * (items - whole)
    out = torch.empty(all_rows + spare, dim, dtype=dtype, device=q.device)
    lse = torch.empty(all_rows + spare, dtype=torch.float32, device=q.device)
    together = heads_together(batch * heads, tokens * dim * (k.element_size() + v.element_size()))
    plan = tables(q_tiles, kv_count, kv_index, quantized)
    q_tiles, shift = plan[0], plan[-1]
    words = torch.zeros(3 + total, dtype=torch.int32, device=q.device)
    operands = (
        _boxes(q, min(rows, 64), padded),
        _boxes(k, box, padded),
        _boxes(v, box, padded),
        k,
        v,
        out,
        lse,
        *plan,
        thresholds,
        kept,
        skipped,
        words,
        tokens,
        blocks,
        kv_index.shape[-1],
        batch * heads,
        together,
        items,
        whole,
        parts,
        scale * LOG2_E,
    )
    constants = {
        "D": dim,
        "DP": padded,
        "M": rows,
        "N": keys,
        "BN": c.step,
        "Q_RUN": 1 if quantized is None else quantized.q_run,
        "K_RUN": 1 if quantized is None else quantized.k_run,
        "GATE": gate_kind(gate),
        "GATE_ROWS": 128 if gate is None else gate.rows,
        "GATE_KEYS": c.step if gate is None else gate.keys,
        "STAGES": c.stages,
        "CONSUMER_REGS": c.consumer_registers,
        "PRODUCER_REGS": c.producer_registers,
        "PRODUCER_WARPS": 1 if keys >= 8 else 4,
    }
    # triton launches on the current device, which need not be the one that holds the tensors.
    with torch.cuda.device_of(q):
        grid = (min(programs, items), 1, 1)
        passes = ("first", "second") if is_anchored(gate, dtype) else (None,)
        _launch(grid, operands, constants, passes)
        if parts > 1:
            rows_at_once = 1024 // padded
            join_parts_kernel[(total - whole, BLOCK_ROWS // rows_at_once)](
                out,
                lse,
                shift,
                q_tiles,
                tokens,
                blocks,
                batch * heads,
                together,
                whole,
                parts,
                scale,
                D=dim,
                DP=padded,
                M=rows,
                MOST=triton.next_power_of_2(parts),
                ROWS=rows_at_once,
                num_warps=4,
            )
    return out[:all_rows].view(q.shape), lse[:all_rows].view(batch, heads, tokens)


def try_out(device: torch.device) -> None:
    """Attend a block in both passes, to see whether this Triton compiles the kernel.

    Twice, because the second call launches its second pass without looking at the arguments.
    """
    x = torch.zeros(1, 1, BLOCK_ROWS, 64, dtype=torch.bfloat16, device=device)
    nought = torch.zeros(1, 1, 1, 1, dtype=torch.int32, device=device)
    tile = (BLOCK_ROWS, KEY_GROUP)
    for _ in range(2):
        gluon_attention(x, x, x, nought, nought[..., 0] + 1, nought, tile=tile, scale=1.0)
