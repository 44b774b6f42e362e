"""One of two warpgroups that hold 64 query rows each: products, softmax, and the block's output.

Each step starts the product of its keys and, beside it, that of the values of the step before; the
softmax runs while the second is under way.
"""

# what triton compiles is not typed python.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, no-redef"
# mypy: disable-error-code="assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...hopper_ring import next_stage, plain
from ...logarithms import LN_2
from ..lists import LARGEST_SUM
from .gates import count_skipped, count_votes, is_open, soften_gated
from .layouts import by_run, load_scalar, thread_vector
from .ptx import OFFSET_OF_INTEGERS, as_float, meet, rescaled
from .schedule import tile_of
from .softmax import row_sums, soften


@gluon.jit
def _next_block(
    last, block, start, left, keys, means, row_scale, threshold, q_phase, q_full, tables,
    WHICH: gl.constexpr,
):  # fmt: skip
    """After a block's last step the record of the next one, else one step less.

    This branch also keeps ptxas from waiting for the values before the softmax is done.
    """
    left -= 1
    if last:
        q_phase = q_phase ^ 1
        mbarrier.wait(q_full, q_phase)
        block = load_scalar(tables.record.index(0))
        start = load_scalar(tables.record.index(1))
        left = load_scalar(tables.record.index(2))
        keys = load_scalar(tables.record.index(3))
        if tables.counts is not None:
            means = load_scalar(tables.record.index(4))
        if tables.row_scales is not None:
            row_scale = tables.row_scales.index(WHICH).load(row_scale.type.layout)
        if tables.thresholds is not None:
            threshold = tables.thresholds.index(WHICH).load(threshold.type.layout)
    return block, start, left, keys, means, row_scale, threshold, q_phase


@gluon.jit
def _store(
    acc, row_max, sums, block, start, lists, outputs, lengths, work, noted_ptr,
    FIRST: gl.constexpr, SIZES: gl.constexpr,
):  # fmt: skip
    """Write the rows of a block that a consumer holds, and their log-sum-exp.

    ``start`` is the head's first row of the output; of a part of a block, less than zero, it is
    -1 less the part's own first row. ``noted_ptr`` has a word that says whether any block is to be
    attended again, and one for each block.
    """
    D: gl.constexpr = SIZES.dim
    M: gl.constexpr = SIZES.rows
    rows: gl.constexpr = acc.shape[0]
    columns: gl.constexpr = acc.shape[1]
    BY_ROW: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    place = FIRST + gl.arange(0, rows, BY_ROW)
    tile = tile_of(lists.q_tiles_ptr, block, place, work.G, M)
    row = tile * M + place % M
    # a number so large that its rows overflow is no tile.
    alive = (tile >= 0) & (row >= 0) & (row < lengths.S)
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
    out = out.to(outputs.out_ptr.dtype.element_ty).reshape([rows, columns // 8, 8])
    LAYOUT: gl.constexpr = out.type.layout
    column = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    eight = gl.arange(0, columns // 8, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT))) * 8
    to = token * D
    if SIZES.beside:
        # parts stay behind all heads, as they are elsewhere.
        to = gl.where(whole, (row.to(gl.int64) * work.BH + start // lengths.S) * D, to)
    start = gl.convert_layout(to, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    alive_out = gl.convert_layout(alive, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    pointers = (outputs.out_ptr + start)[:, None, None] + column[None, None, :]
    pointers += eight[None, :, None]
    mask = alive_out[:, None, None] & (eight < D)[None, :, None]
    gl.store(pointers, out, mask=mask)
    if lists.shift_ptr is not None:
        # the mean key, which 8-bit keys lack. Parts get it when they are joined.
        shift = gl.load(lists.shift_ptr + token, mask=alive & whole, other=0.0)
        row_max += shift * lengths.scale_log2
    natural = (row_max + gl.log2(sums)) * LN_2
    gl.store(outputs.lse_ptr + token, gl.where(has_keys, natural, -float("inf")), mask=alive)


@gluon.jit
def consume(
    stages, tables, barriers, lists, outputs, lengths, work, WHICH_: gl.constexpr,
    SIZES_: gl.constexpr,
):  # fmt: skip
    """Take blocks as the producer puts their records, until one says that there is none."""
    WHICH: gl.constexpr = plain(WHICH_)
    SIZES: gl.constexpr = plain(SIZES_)
    # cp.async writes through the generic proxy, wgmma reads through the async one.
    GENERIC: gl.constexpr = SIZES.keys < 8
    GATE: gl.constexpr = SIZES.gate
    GATE_ROWS: gl.constexpr = SIZES.gate_rows
    PIECES: gl.constexpr = SIZES.step // SIZES.gate_keys
    STAGES: gl.constexpr = stages.k.shape[0]
    BN: gl.constexpr = stages.k.shape[1]
    DP: gl.constexpr = stages.k.shape[2]
    dtype: gl.constexpr = stages.v.dtype
    ANCHORED: gl.constexpr = SIZES.launch == "first"
    noted_ptr = None
    if ANCHORED:
        noted_ptr = lists.words_ptr + 2
    QK_DEPTH: gl.constexpr = 256 // stages.k.dtype.primitive_bitwidth
    scale_log2 = lengths.scale_log2
    full, empty = barriers.full, barriers.empty
    q_full, q_empty = barriers.q_full, barriers.q_empty
    record = tables.record
    votes = stages.votes

    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, QK_DEPTH])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DP, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUTPUT, 2)
    OUT_BY_ROW: gl.constexpr = gl.SliceLayout(1, OUTPUT)
    BY_ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    BY_KEY: gl.constexpr = gl.SliceLayout(0, SCORES)
    q = stages.q.index(WHICH)
    nothing = gl.full([64, BN], 0.0, gl.float32, SCORES)
    no_scores = nothing
    if stages.k.dtype.is_int():
        no_scores = gl.full([64, BN], 0, gl.int32, SCORES)
    # a factor that ptxas cannot know to be 1.
    one = gl.minimum(lengths.S, 1)

    RUNS: gl.constexpr = 1 if tables.k_scales is None else tables.k_scales.shape[1]
    # scales of runs are few, and read while the products run: the barrier that triton puts before
    # costs nothing there.
    LINE: gl.constexpr = gl.BlockedLayout([RUNS], [32], [4], [0])
    EARLY: gl.constexpr = tables.k_scales is not None and RUNS <= BN // 8
    # the block before the first: no weights, and a result that is not stored.
    acc = gl.full([64, DP], 0.0, gl.float32, OUTPUT)
    sums = row_sums(nothing)
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
    block = load_scalar(record.index(0))
    start = load_scalar(record.index(1))
    left = load_scalar(record.index(2))
    keys = load_scalar(record.index(3))
    # steps of means, the last ones of a block.
    MEANS: gl.constexpr = tables.counts is not None
    means = left
    if MEANS:
        means = load_scalar(record.index(4))
    row_scale = scale_log2
    if tables.row_scales is not None:
        row_scale = tables.row_scales.index(WHICH).load(BY_ROW)
    if GATE is not None:
        threshold = tables.thresholds.index(WHICH).load(BY_ROW)
        largest_yet = row_max
        slot = WHICH + 0 * done
        if outputs.skipped_ptr is not None:
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
        if tables.k_scales is not None:
            k_scale_memory = tables.k_scales.index(stage)
        kept_memory = None
        if tables.kept_words is not None:
            kept_memory = tables.kept_words.index(stage)
        counts_memory = None
        averaged = False
        if MEANS:
            counts_memory = tables.counts.index(stage)
            averaged = left <= means
        k = stages.k.index(stage).permute((1, 0))
        v = stages.v.index(stage)
        k_scale = None
        pending = warpgroup_mma(q, k, no_scores, use_acc=False, is_async=True)
        if GATE is None:
            # the sum over a block begins with the values of its first step, one step later. Zeros
            # assigned in the branch below would be 64 moves a step.
            pending_acc = warpgroup_mma(weights, v, acc, use_acc=not second, is_async=True)
            if EARLY:
                k_scale = tables.k_scales.index(stage).load(LINE)
            scores = warpgroup_mma_wait(1, deps=[pending])
            if last:
                mbarrier.arrive(q_empty)
            if RUNS > BN // 8:
                k_scale = tables.k_scales.index(stage).load(BY_KEY)
            fresh, new_max, rescale, new_sums = soften(
                scores, first, keys, row_max, sums, row_scale, k_scale, one, counts_memory,
                averaged, dtype, WEIGHTS, ANCHORED,
            )  # fmt: skip
            next_block, next_start, left, next_keys, next_means, next_row_scale, _, q_phase = (
                _next_block(
                    last, block, start, left, keys, means, row_scale, row_scale, q_phase, q_full,
                    tables, WHICH,
                )
            )  # fmt: skip
            acc, weights = warpgroup_mma_wait(0, deps=[pending_acc, weights])
        elif opened != 0:
            pending_acc = warpgroup_mma(weights, v, acc, use_acc=not second, is_async=True)
            scores = warpgroup_mma_wait(1, deps=[pending])
            if scores.dtype.is_int():
                scores = as_float(scores, one) - OFFSET_OF_INTEGERS
            if last:
                mbarrier.arrive(q_empty)
            fresh, new_max, rescale, new_sums, gated = soften_gated(
                scores, first, keys, row_max, sums, row_scale, k_scale_memory,
                kept_memory, votes, slot, threshold, largest_yet, counts_memory, averaged, dtype,
                WEIGHTS, GATE, GATE_ROWS, PIECES,
            )  # fmt: skip
            (
                next_block, next_start, left, next_keys, next_means, next_row_scale,
                next_threshold, q_phase,
            ) = _next_block(
                last, block, start, left, keys, means, row_scale, threshold, q_phase, q_full,
                tables, WHICH,
            )  # fmt: skip
            acc, weights = warpgroup_mma_wait(0, deps=[pending_acc, weights])
        else:
            # a copy of the code above without the values: with a branch around their product
            # alone, ptxas lets every product wait for the one before. And with the scores' product
            # in both copies, ptxas 12.9 takes the address of other keys in the second.
            scores = warpgroup_mma_wait(0, deps=[pending])
            if scores.dtype.is_int():
                scores = as_float(scores, one) - OFFSET_OF_INTEGERS
            if last:
                mbarrier.arrive(q_empty)
            fresh, new_max, rescale, new_sums, gated = soften_gated(
                scores, first, keys, row_max, sums, row_scale, k_scale_memory,
                kept_memory, votes, slot, threshold, largest_yet, counts_memory, averaged, dtype,
                WEIGHTS, GATE, GATE_ROWS, PIECES,
            )  # fmt: skip
            (
                next_block, next_start, left, next_keys, next_means, next_row_scale,
                next_threshold, q_phase,
            ) = _next_block(
                last, block, start, left, keys, means, row_scale, threshold, q_phase, q_full,
                tables, WHICH,
            )  # fmt: skip
        mbarrier.arrive(empty.index(stage))
        if first:
            if done >= 0:
                _store(
                    acc, row_max, sums, done, done_start, lists, outputs, lengths, work, noted_ptr,
                    WHICH * 64, SIZES,
                )  # fmt: skip
                if outputs.skipped_ptr is not None:
                    gl.atomic_add(outputs.skipped_ptr + done, gl.sum(skipped, 0), sem="relaxed")
            done = block
            done_start = start
        # not between the products above: ptxas would let the second wait for the first.
        if GATE is None:
            if not ANCHORED:
                threads = by_run(acc, 1)
                threads = rescaled(threads, thread_vector(rescale, threads))
                acc = gl.convert_layout(threads.reshape([64, DP]), OUTPUT)
        else:
            acc = rescaled(acc, gl.convert_layout(rescale, OUT_BY_ROW)[:, None])
        if GATE is not None:
            if GATE == "relative":
                # decided late: the weights are in the sum, and in the next step's product only if
                # they are open.
                largest_yet = gated
                if GATE_ROWS == 128:
                    meet()
                bits = count_votes(votes, slot, GATE_ROWS)
                ALL: gl.constexpr = (1 << PIECES * (2 if GATE_ROWS == 32 else 1)) - 1
                # where nothing is open, there is no product.
                if (bits != ALL) & ((bits != 0) | first):
                    opens = is_open(bits, fresh, PIECES, GATE_ROWS)
                    fresh = gl.where(opens, fresh, 0.0).to(dtype)
            else:
                bits = gated
            if outputs.skipped_ptr is not None:
                skipped = count_skipped(
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
        means = next_means
        row_scale = next_row_scale
        row_max = new_max
        sums = new_sums
        weights = fresh
        stage, phase = next_stage(stage, phase, STAGES)
