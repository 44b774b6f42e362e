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
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, assignment"

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .gates import Gate
from .quantize import QuantizedQK
from .triton_gather import LOG2_E, heads_together

BLOCK_ROWS = 128

# triton 3.9 renames these.
_tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_cp_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
_PUBLIC_REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@triton.constexpr_function
def _plain(x):
    """The value of a constexpr: arguments of a partition arrive wrapped more than once."""
    while isinstance(x, triton.language.constexpr):
        x = x.value
    return x


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


@gluon.jit
def _next(stage, phase, STAGES: gl.constexpr):
    wraps = stage + 1 == STAGES
    return gl.where(wraps, 0, stage + 1), gl.where(wraps, phase ^ 1, phase)


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
    """Minus infinity from column ``keys`` on."""
    # the zero is opaque: known before the loop, the columns would be kept in 32 registers over it.
    zero = gl.inline_asm_elementwise(
        "mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
    column = gl.arange(0, scores.shape[1], gl.SliceLayout(0, scores.type.layout)) + zero
    return gl.where((column < keys)[None, :], scores, -float("inf"))


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
    head,
    q_tiles_ptr,
    out_ptr,
    lse_ptr,
    S,
    D: gl.constexpr,
    M: gl.constexpr,
    FIRST: gl.constexpr,
):
    """Write the rows of a block that a consumer holds, and their log-sum-exp."""
    rows: gl.constexpr = acc.shape[0]
    columns: gl.constexpr = acc.shape[1]
    BY_ROW: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    place = FIRST + gl.arange(0, rows, BY_ROW)
    tile = gl.load(q_tiles_ptr + block.to(gl.int64) * (128 // M) + place // M)
    row = tile * M + place % M
    alive = (tile >= 0) & (row < S)
    sums = gl.convert_layout(gl.sum(sums, 1), BY_ROW)
    row_max = gl.convert_layout(row_max, BY_ROW)
    # a row without keys: zeros and -inf, whatever its weights of zero were multiplied with.
    has_keys = sums > 0
    out = gl.where(has_keys[:, None], acc * (1.0 / sums)[:, None], 0.0)
    token = head.to(gl.int64) * S + row
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
    natural = (row_max + gl.log2(sums)) * 0.6931471805599453
    gl.store(lse_ptr + token, gl.where(has_keys, natural, -float("inf")), mask=alive)


@gluon.jit
def _consume(
    q_memory,
    k_stages,
    v_stages,
    record,
    barriers,
    q_tiles_ptr,
    out_ptr,
    lse_ptr,
    S,
    scale_log2,
    WHICH: gl.constexpr,
    D_: gl.constexpr,
    M_: gl.constexpr,
    GENERIC_: gl.constexpr,
):
    D: gl.constexpr = _plain(D_)
    M: gl.constexpr = _plain(M_)
    # cp.async writes through the generic proxy, wgmma reads through the async one.
    GENERIC: gl.constexpr = _plain(GENERIC_)
    STAGES: gl.constexpr = k_stages.shape[0]
    BN: gl.constexpr = k_stages.shape[1]
    DP: gl.constexpr = k_stages.shape[2]
    dtype: gl.constexpr = k_stages.dtype
    full, empty, q_full, q_empty = barriers

    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DP, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUTPUT, 2)
    OUT_BY_ROW: gl.constexpr = gl.SliceLayout(1, OUTPUT)
    q = q_memory.index(WHICH)
    nothing = gl.full([64, BN], 0.0, gl.float32, SCORES)

    # the block before the first: no weights, and a result that is not stored.
    acc = gl.full([64, DP], 0.0, gl.float32, OUTPUT)
    row_max = gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, SCORES))
    sums = _row_sums(nothing)
    weights = gl.convert_layout(nothing.to(dtype), WEIGHTS)
    done = -1
    done_head = 0

    stage = 0
    phase = 0
    q_phase = 0
    mbarrier.wait(q_full, q_phase)
    block = _scalar(record.index(0))
    head = _scalar(record.index(1))
    left = _scalar(record.index(2))
    keys = _scalar(record.index(3))
    first = True
    second = False
    working = True
    while working:
        # scores of this step, values of the one before: in a block's first step, of the block
        # before. The last step of all has no block and only ends the one before.
        mbarrier.wait(full.index(stage), phase)
        if GENERIC:
            fence_async_shared()
        k = k_stages.index(stage).permute((1, 0))
        pending = warpgroup_mma(q, k, nothing, use_acc=False, is_async=True)
        v = v_stages.index(stage)
        # the sum over a block begins with the values of its first step, one step later. Zeros
        # assigned in the branch below would be 64 moves a step.
        pending_acc = warpgroup_mma(weights, v, acc, use_acc=not second, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[pending])

        last = left == 1
        if last:
            mbarrier.arrive(q_empty)
        if first:
            scores = _mask(scores, keys)
        old_max = gl.where(first, -1.0e30, row_max)
        step_max = gl.max(scores, 1) * scale_log2
        new_max = gl.where(step_max > old_max + BEHIND, step_max, old_max)
        rescale = _exp2(old_max - new_max)
        fresh = _exp2(scores * scale_log2 - new_max[:, None])
        new_sums = _scaled_sums(gl.where(first, 0.0, sums), rescale)
        new_sums += _row_sums(fresh)
        fresh = gl.convert_layout(fresh.to(dtype), WEIGHTS)

        # this branch also keeps ptxas from waiting for the values before the softmax is done.
        next_block = block
        next_head = head
        next_keys = keys
        left -= 1
        if last:
            q_phase = q_phase ^ 1
            mbarrier.wait(q_full, q_phase)
            next_block = _scalar(record.index(0))
            next_head = _scalar(record.index(1))
            left = _scalar(record.index(2))
            next_keys = _scalar(record.index(3))
        acc, weights = warpgroup_mma_wait(0, deps=[pending_acc, weights])
        mbarrier.arrive(empty.index(stage))
        if first:
            if done >= 0:
                _store(
                    acc, row_max, sums, done, done_head, q_tiles_ptr, out_ptr, lse_ptr, S,
                    D, M, WHICH * 64,
                )  # fmt: skip
            done = block
            done_head = head
        # not between the products above: ptxas would let the second wait for the first.
        acc = _rescaled(acc, gl.convert_layout(rescale, OUT_BY_ROW)[:, None])
        working = block >= 0
        second = first
        first = last
        block = next_block
        head = next_head
        keys = next_keys
        row_max = new_max
        sums = new_sums
        weights = fresh
        stage, phase = _next(stage, phase, STAGES)


@gluon.jit
def _consume_upper(
    q_memory, k_stages, v_stages, record, barriers, q_tiles_ptr, out_ptr, lse_ptr, S, scale_log2,
    D: gl.constexpr, M: gl.constexpr, GENERIC: gl.constexpr,
):  # fmt: skip
    _consume(
        q_memory, k_stages, v_stages, record, barriers, q_tiles_ptr, out_ptr, lse_ptr, S,
        scale_log2, 0, D, M, GENERIC,
    )  # fmt: skip


@gluon.jit
def _consume_lower(
    q_memory, k_stages, v_stages, record, barriers, q_tiles_ptr, out_ptr, lse_ptr, S, scale_log2,
    D: gl.constexpr, M: gl.constexpr, GENERIC: gl.constexpr,
):  # fmt: skip
    _consume(
        q_memory, k_stages, v_stages, record, barriers, q_tiles_ptr, out_ptr, lse_ptr, S,
        scale_log2, 1, D, M, GENERIC,
    )  # fmt: skip


# ---- producer ----


@gluon.jit
def _locate(entry, G, BH, TOGETHER):
    """Head and block of the ``entry``-th piece of work.

    TOGETHER heads are worked on at a time, longest blocks first: few enough that their keys and
    values stay in L2.
    """
    group = entry // (TOGETHER * G)
    start = group * TOGETHER
    heads = gl.minimum(BH - start, TOGETHER)
    rank = entry - start * G
    return start + rank % heads, rank // heads


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
                _tma_load(desc, [head, four[c], half * 64], bar, piece)


@triton.constexpr_function
def _token_layout(BN, DP):
    """128 threads copy 16 bytes of each of a few neighbouring tokens."""
    across = DP // 8
    return gl.BlockedLayout([BN * across // 128, 8], [32 // across, across], [4, 1], [1, 0])


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
def _copy_tokens(head_ptr, memory, tokens, D: gl.constexpr, LAYOUT: gl.constexpr):
    column = gl.arange(0, memory.shape[1], gl.SliceLayout(0, LAYOUT))
    pointers = head_ptr + (tokens * D)[:, None] + column[None, :]
    if memory.shape[1] == D:
        _cp_async(memory, pointers)
    else:
        _cp_async(memory, pointers, mask=(column < D)[None, :])


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
    barriers,
    q_tiles_ptr,
    kv_count_ptr,
    kv_index_ptr,
    counter_ptr,
    S,
    G,
    C,
    BH,
    TOGETHER,
    STAGES_: gl.constexpr,
    BN_: gl.constexpr,
    D_: gl.constexpr,
    DP_: gl.constexpr,
    M_: gl.constexpr,
    N_: gl.constexpr,
):
    STAGES: gl.constexpr = _plain(STAGES_)
    BN: gl.constexpr = _plain(BN_)
    D: gl.constexpr = _plain(D_)
    DP: gl.constexpr = _plain(DP_)
    M: gl.constexpr = _plain(M_)
    N: gl.constexpr = _plain(N_)
    CHUNKS: gl.constexpr = BN // N
    HALVES: gl.constexpr = DP // 64
    R: gl.constexpr = 128 // M
    BOX: gl.constexpr = M if M < 64 else 64
    STAGE_BYTES: gl.constexpr = BN * DP * 2
    Q_BYTES: gl.constexpr = 128 * DP * 2
    TMA: gl.constexpr = N >= 8
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    LAYOUT: gl.constexpr = _token_layout(BN, DP)
    ONE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    full, empty, q_full, q_empty = barriers

    programs = gl.num_programs(0)
    total = G * BH
    entry = gl.program_id(0)
    head, rank = _locate(entry, G, BH, TOGETHER)
    block = head * G + rank
    count = gl.load(kv_count_ptr + block)
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

    while entry < total:
        list_ptr = kv_index_ptr + block.to(gl.int64) * C
        steps = gl.maximum((count + CHUNKS - 1) // CHUNKS, 1)
        first = (steps - 1) * CHUNKS
        # the list rises: a chunk that the sequence's end cuts can only be the last.
        last = gl.load(list_ptr + count - 1, mask=count > 0, other=0).to(gl.int32)
        if TMA:
            next_rows = _chunk_rows(list_ptr, first, count, S, N, CHUNKS, True)
        else:
            k_from = k_ptr + head.to(gl.int64) * S * D
            next_tokens = _tokens(list_ptr, first, count, BN, LAYOUT, True)
        tile = gl.load(q_tiles_ptr + block.to(gl.int64) * R + gl.arange(0, R, LINE))
        entry = programs + gl.atomic_add(counter_ptr, 1, sem="relaxed")
        next_head, next_rank = _locate(gl.minimum(entry, total - 1), G, BH, TOGETHER)
        next_block = next_head * G + next_rank
        next_count = gl.load(kv_count_ptr + next_block)

        # the first keys of this block and the last values of the one before.
        mbarrier.wait(empty.index(stage), phase ^ 1)
        bar = full.index(stage)
        if TMA:
            rows.index(slot).store(next_rows)
            mbarrier.expect(bar, 2 * STAGE_BYTES)
            _load_chunks(k_desc, k_pieces, bar, head, chunk_rows, stage, slot, CHUNKS, HALVES)
            slot = slot ^ 1
            _load_chunks(v_desc, v_pieces, bar, v_head, chunk_rows, stage, slot, CHUNKS, HALVES)
            v_head = head
        else:
            _copy_tokens(k_from, k_pieces.index(stage), next_tokens, D, LAYOUT)
            _copy_tokens(v_from, v_pieces.index(stage), tokens, D, LAYOUT)
            async_copy.mbarrier_arrive(bar, increment_count=False)
            tokens = next_tokens
            v_from = v_ptr + head.to(gl.int64) * S * D
        stage, phase = _next(stage, phase, STAGES)

        # its queries, as soon as the consumers are done with those of the block before.
        past_end = gl.maximum((last + 1) * N - S, 0)
        mbarrier.wait(q_empty, q_phase ^ 1)
        q_phase = q_phase ^ 1
        q_rows.store(tile * M)
        _put(record.index(0), block)
        _put(record.index(1), head)
        _put(record.index(2), steps)
        _put(record.index(3), gl.where(count > 0, (count - first) * N - past_end, 0))
        mbarrier.expect(q_full, Q_BYTES)
        q_row = _view(q_rows, [R, 1], ONE)
        for b in gl.static_range(128 // BOX):
            row = _scalar(q_row.index(b * BOX // M)) + b * BOX % M
            for half in gl.static_range(HALVES):
                piece = (b * BOX // 64 * HALVES + half) * (64 // BOX) + b % (64 // BOX)
                _tma_load(q_desc, [head, row, half * 64], q_full, q_pieces.index(piece))

        for step in range(1, steps):
            if TMA:
                next_rows = _chunk_rows(list_ptr, (step - 1) * CHUNKS, count, S, N, CHUNKS, False)
            else:
                next_tokens = _tokens(list_ptr, (step - 1) * CHUNKS, count, BN, LAYOUT, False)
            mbarrier.wait(empty.index(stage), phase ^ 1)
            bar = full.index(stage)
            if TMA:
                rows.index(slot).store(next_rows)
                mbarrier.expect(bar, 2 * STAGE_BYTES)
                _load_chunks(k_desc, k_pieces, bar, head, chunk_rows, stage, slot, CHUNKS, HALVES)
                slot = slot ^ 1
                _load_chunks(v_desc, v_pieces, bar, head, chunk_rows, stage, slot, CHUNKS, HALVES)
            else:
                _copy_tokens(k_from, k_pieces.index(stage), next_tokens, D, LAYOUT)
                _copy_tokens(v_from, v_pieces.index(stage), tokens, D, LAYOUT)
                async_copy.mbarrier_arrive(bar, increment_count=False)
                tokens = next_tokens
            stage, phase = _next(stage, phase, STAGES)
        head = next_head
        block = next_block
        count = next_count

    # the last values of all, and a record that ends the consumers.
    mbarrier.wait(empty.index(stage), phase ^ 1)
    if TMA:
        mbarrier.expect(full.index(stage), STAGE_BYTES)
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
    counter_ptr,
    S,
    G,
    C,
    BH,
    TOGETHER,
    scale_log2,
    D: gl.constexpr,
    DP: gl.constexpr,
    M: gl.constexpr,
    N: gl.constexpr,
    BN: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMER_REGS: gl.constexpr,
    PRODUCER_REGS: gl.constexpr,
    PRODUCER_WARPS: gl.constexpr,
):
    """Attend blocks of 128 query rows to their key lists; all tensors contiguous."""
    HALVES: gl.constexpr = DP // 64
    GENERIC: gl.constexpr = N < 8
    BOX: gl.constexpr = M if M < 64 else 64
    ROWS: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    BOXES: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=3)
    ONE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    dtype: gl.constexpr = q_desc.dtype

    q_pieces = gl.allocate_shared_memory(dtype, [128 // BOX * HALVES, 1, BOX, 64], BOXES)
    q_memory = _view(q_pieces, [2, 64, DP], ROWS)
    if GENERIC:
        k_stages = gl.allocate_shared_memory(dtype, [STAGES, BN, DP], ROWS)
        v_stages = gl.allocate_shared_memory(dtype, [STAGES, BN, DP], ROWS)
        k_pieces = k_stages
        v_pieces = v_stages
    else:
        PIECES: gl.constexpr = STAGES * HALVES * (BN // N)
        k_pieces = gl.allocate_shared_memory(dtype, [PIECES, 1, N, 64], BOXES)
        v_pieces = gl.allocate_shared_memory(dtype, [PIECES, 1, N, 64], BOXES)
        k_stages = _view(k_pieces, [STAGES, BN, DP], ROWS)
        v_stages = _view(v_pieces, [STAGES, BN, DP], ROWS)
    rows = gl.allocate_shared_memory(gl.int32, [2, BN // N], ONE)
    q_rows = gl.allocate_shared_memory(gl.int32, [128 // M], ONE)
    record = gl.allocate_shared_memory(gl.int32, [4, 1], ONE)
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
                _consume_upper,
                (
                    q_memory, k_stages, v_stages, record, barriers, q_tiles_ptr, out_ptr, lse_ptr,
                    S, scale_log2, D, M, GENERIC,
                ),
            ),
            (
                _consume_lower,
                (
                    q_memory, k_stages, v_stages, record, barriers, q_tiles_ptr, out_ptr, lse_ptr,
                    S, scale_log2, D, M, GENERIC,
                ),
            ),
            (
                _produce,
                (
                    q_desc, k_desc, v_desc, k_ptr, v_ptr, q_pieces, k_pieces, v_pieces, rows,
                    q_rows, record, barriers, q_tiles_ptr, kv_count_ptr, kv_index_ptr, counter_ptr,
                    S, G, C, BH, TOGETHER, STAGES, BN, D, DP, M, N,
                ),
            ),
        ],
        [4, PRODUCER_WARPS],
        [CONSUMER_REGS, PRODUCER_REGS],
    )  # fmt: skip


# ---- launch ----


@dataclass(frozen=True)
class Config:
    """What is tuned: none of it changes what a call computes."""

    stages: int
    # of the three warpgroups that share 504 registers a lane, two are consumers.
    consumer_registers: int
    producer_registers: int
    step: int = 128


def config(keys: int, padded_dim: int) -> Config:
    """The fastest measured for key chunks of ``keys`` tokens."""
    # as many stages as shared memory holds beside the queries.
    stages = 3 if padded_dim == 128 else 6
    if keys == 1:
        return Config(stages, consumer_registers=208, producer_registers=88)
    return Config(stages, consumer_registers=232, producer_registers=40)


@cache
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _boxes(x: Tensor, rows: int) -> TensorDescriptor:
    """Boxes of ``rows`` rows and 64 columns of one head of ``x``, which never reach the next."""
    batch, heads, tokens, dim = x.shape
    return TensorDescriptor(
        x,
        [batch * heads, tokens, dim],
        [tokens * dim, dim, 1],
        [1, rows, 64],
        gl.NVMMASharedLayout(128, 16, rank=3),
    )


def _dense(x: Tensor) -> Tensor:
    """``x`` as TMA can read it: contiguous and on a multiple of 16 bytes."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


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
        ValueError: a tile that the kernel does not have, a gate or 8-bit operands.
    """
    if gate is not None or quantized is not None or skipped is not None:
        raise ValueError("the Hopper kernel has neither gates nor 8-bit operands")
    rows, keys = tile
    if rows not in (16, 32, 64, 128) or keys not in (1, 8, 16, 32, 64, 128):
        raise ValueError(f"no kernel for tiles of {rows}x{keys}")
    if q_tiles.shape[3] * rows != BLOCK_ROWS:
        raise ValueError(f"blocks must have {BLOCK_ROWS // rows} tiles, not {q_tiles.shape[3]}")
    batch, heads, tokens, dim = q.shape
    q, k, v = _dense(q), _dense(k), _dense(v)
    out = torch.empty_like(q)
    lse = torch.empty(batch, heads, tokens, dtype=torch.float32, device=q.device)
    blocks = q_tiles.shape[2]
    padded = 64 if dim == 64 else 128
    c = config(keys, padded)
    # a chunk of one token is gathered by pointers, without boxes.
    box = keys if keys >= 8 else 8
    programs = min(_multiprocessors(q.device.index), blocks * batch * heads)
    # triton launches on the current device, which need not be the one that holds the tensors.
    with torch.cuda.device_of(q):
        gather_attention_kernel[(programs,)](
            _boxes(q, min(rows, 64)),
            _boxes(k, box),
            _boxes(v, box),
            k,
            v,
            out,
            lse,
            q_tiles.contiguous(),
            kv_count.contiguous(),
            kv_index.contiguous(),
            torch.zeros(1, dtype=torch.int32, device=q.device),
            tokens,
            blocks,
            kv_index.shape[-1],
            batch * heads,
            heads_together(batch * heads, 2 * tokens * dim * q.element_size()),
            scale * LOG2_E,
            D=dim,
            DP=padded,
            M=rows,
            N=keys,
            BN=c.step,
            STAGES=c.stages,
            CONSUMER_REGS=c.consumer_registers,
            PRODUCER_REGS=c.producer_registers,
            PRODUCER_WARPS=1 if keys >= 8 else 4,
            num_warps=4,
        )
    return out, lse
