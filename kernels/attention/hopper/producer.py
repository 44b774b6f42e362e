"""The warps that gather keys and values into the ring, and queries and tables before each block.

Keys and values come as TMA boxes of one chunk, or by cp.async where a chunk is one token. Scales of
rows and thresholds come with a block's record, scales of keys with their stage.

Only the last chunks of a list can be short of a full step or of the sequence's end. They go first,
masked, and the loop over the other steps carries no mask. Rows that do not exist lie outside the
boxes that TMA reads (zeros) and are not stored.
"""

# what triton compiles is not typed python: both branches of a static `if` return.
# ruff: noqa: RET505, RUF005
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, no-redef"
# mypy: disable-error-code="assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from ...hopper_ring import next_stage, plain, tma_load
from ...logarithms import LOG2_E
from .layouts import load_scalar, put_scalar, token_layout, view
from .means import raised_by
from .ptx import cp_async, thread_barrier
from .schedule import block_of, locate, next_noted, part_of, tile_of


@gluon.jit
def _listed(start, place, alive):
    """Chunks at ``place`` of a list: ``start`` points to its first, or is that where all count."""
    if start.dtype.is_ptr():
        if alive is None:
            return gl.load(start + place).to(gl.int32)
        else:
            return gl.load(start + place, mask=alive, other=0).to(gl.int32)
    else:
        return start + place


@gluon.jit
def _chunk_rows(
    start, first, count, S, N: gl.constexpr, CHUNKS: gl.constexpr, MASKED: gl.constexpr
):
    """First rows of the chunks of a step; S, past the end, for a dead one."""
    place = first + gl.arange(0, CHUNKS, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    if MASKED:
        return gl.where(place < count, _listed(start, place, place < count) * N, S)
    else:
        return _listed(start, place, None) * N


@gluon.jit
def _load_chunks(desc, memory, bar, head, rows, stage, slot, SIZES: gl.constexpr):
    """Boxes of one chunk and 64 columns; ``rows`` holds the chunks' first rows, a step's a slot."""
    CHUNKS: gl.constexpr = SIZES.step // SIZES.keys
    # 128 bytes of a row are what TMA and the tensor cores swizzle.
    HALVES: gl.constexpr = SIZES.padded // 64 if desc.dtype.primitive_bitwidth == 16 else 1
    # four rows are read at once: no more registers, but one latency for all.
    FOUR: gl.constexpr = 4 if CHUNKS > 4 else CHUNKS
    for start in gl.static_range(0, CHUNKS, FOUR):
        four = ()
        for c in gl.static_range(start, start + FOUR):
            four = four + (load_scalar(rows.index(slot * CHUNKS + c)),)
        for c in gl.static_range(FOUR):
            for half in gl.static_range(HALVES):
                piece = memory.index((stage * HALVES + half) * CHUNKS + start + c)
                tma_load(desc, [head, four[c], half * 64], bar, piece)


@gluon.jit
def _tokens(
    list_ptr, first, count, S, BITS: gl.constexpr, BN: gl.constexpr, LAYOUT: gl.constexpr,
    MASKED: gl.constexpr,
):  # fmt: skip
    """Tokens of a step, none outside of the sequence; a dead one repeats the last that is alive."""
    place = first + gl.arange(0, BN, gl.SliceLayout(1, LAYOUT))
    if MASKED:
        place = gl.minimum(place, gl.maximum(count - 1, 0))
        token = gl.load(list_ptr + place, mask=place < count, other=0).to(gl.int32)
    else:
        token = gl.load(list_ptr + place).to(gl.int32)
    # two ways to say it: ptxas spills a register more with either in the place of the other.
    if BITS == 8:
        return gl.minimum(token.to(gl.uint32, bitcast=True), S - 1).to(gl.int32, bitcast=True)
    else:
        return gl.maximum(gl.minimum(token, S - 1), 0)


@gluon.jit
def _line_tokens(
    list_ptr, first, count, S, BITS: gl.constexpr, BN: gl.constexpr, MASKED: gl.constexpr
):
    """``_tokens``, each held by one thread."""
    LINE: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [gl.num_warps(), 1], [1, 0])
    tokens = _tokens(list_ptr, first, count, S, BITS, BN, LINE, MASKED)
    return gl.convert_layout(tokens, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))


@gluon.jit
def _copy_tokens(head_ptr, memory, tokens, D: gl.constexpr, LAYOUT: gl.constexpr):
    column = gl.arange(0, memory.shape[1], gl.SliceLayout(0, LAYOUT))
    pointers = head_ptr + (tokens * D)[:, None] + column[None, :]
    if memory.shape[1] == D:
        cp_async(memory, pointers)
    else:
        cp_async(memory, pointers, mask=(column < D)[None, :])


@gluon.jit
def _scales_of_chunks(
    head_ptr, list_from, first, count, S, N: gl.constexpr, BN: gl.constexpr, K_RUN: gl.constexpr,
    RUNS: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Scales of the runs of a step's keys; 1 for what is not there."""
    each: gl.constexpr = BN // RUNS
    key = gl.arange(0, RUNS, gl.BlockedLayout([1], [32], [gl.num_warps()], [0])) * each
    place = first + key // N
    if MASKED:
        chunk = _listed(list_from, place, place < count)
    else:
        chunk = _listed(list_from, place, None)
    token = chunk * N + key % N
    # a negative number is beyond them all without its sign.
    there = token.to(gl.uint32, bitcast=True) < S
    if MASKED:
        there &= place < count
    return gl.load(head_ptr + token // K_RUN, mask=there, other=1.0)


@gluon.jit
def _put_tables(tables, inputs, lists, block, head, lengths, G, SIZES: gl.constexpr):
    """Scale and threshold of every row of a block."""
    M: gl.constexpr = SIZES.rows
    S = lengths.S
    line = gl.arange(0, 64, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    for half in gl.static_range(2):
        place = half * 64 + line
        tile = tile_of(lists.q_tiles_ptr, block, place, G, M)
        row = tile * M + place % M
        alive = (tile >= 0) & (row >= 0) & (row < S)
        if inputs.q_scale_ptr is not None:
            runs = head.to(gl.int64) * ((S + SIZES.q_run - 1) // SIZES.q_run)
            scale = gl.load(inputs.q_scale_ptr + runs + row // SIZES.q_run, mask=alive, other=1.0)
            tables.row_scales.index(half).store(scale * lengths.scale_log2)
        if SIZES.gate is not None:
            tiles = head.to(gl.int64) * ((S + M - 1) // M)
            threshold_from = lists.threshold_ptr + tiles
            # a tile's number that overflows has another's rows.
            threshold = gl.load(threshold_from + row // M, mask=alive, other=float("nan"))
            threshold *= LOG2_E
            if SIZES.gate == "absolute" and lists.shift_ptr is not None:
                # thresholds are on scores with the mean key in them.
                at = head.to(gl.int64) * S + row
                shift = gl.load(lists.shift_ptr + at, mask=alive, other=0.0)
                threshold -= shift * lengths.scale_log2
            tables.thresholds.index(half).store(threshold)


@gluon.jit
def produce(inputs, lists, lengths, work, pieces, tables, barriers, SIZES_: gl.constexpr):
    """Take blocks, or in the second launch those that are noted, and fill the ring for each."""
    SIZES: gl.constexpr = plain(SIZES_)
    STAGES: gl.constexpr = SIZES.stages
    BN: gl.constexpr = SIZES.step
    D: gl.constexpr = SIZES.dim
    DP: gl.constexpr = SIZES.padded
    M: gl.constexpr = SIZES.rows
    N: gl.constexpr = SIZES.keys
    K_RUN: gl.constexpr = SIZES.k_run
    GATE: gl.constexpr = SIZES.gate
    CHUNKS: gl.constexpr = BN // N
    HALVES: gl.constexpr = DP // 64
    QK_BITS: gl.constexpr = inputs.q_desc.dtype.primitive_bitwidth
    QK_HALVES: gl.constexpr = HALVES if QK_BITS == 16 else 1
    R: gl.constexpr = 128 // M
    BOX: gl.constexpr = M if M < 64 else 64
    V_BYTES: gl.constexpr = BN * DP * 2
    K_BYTES: gl.constexpr = BN * DP * QK_BITS // 8
    Q_BYTES: gl.constexpr = 128 * DP * QK_BITS // 8
    TMA: gl.constexpr = N >= 8
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    LAYOUT: gl.constexpr = token_layout(BN, DP, 16)
    K_LAYOUT: gl.constexpr = token_layout(BN, DP, QK_BITS)
    ONE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    DENSE: gl.constexpr = lists.kv_index_ptr is None
    MEANS: gl.constexpr = lists.counts_ptr is not None
    RAISED: gl.constexpr = GATE is None and QK_BITS == 16
    # four bytes a thread are the least that cp.async copies.
    COUNTED: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    S, C, P = lengths.S, lengths.C, lengths.P
    scale_log2 = lengths.scale_log2
    full, empty = barriers.full, barriers.empty
    q_full, q_empty = barriers.q_full, barriers.q_empty
    record = tables.record

    counter_ptr = lists.words_ptr
    noted_ptr = None
    if SIZES.launch == "second":
        counter_ptr = lists.words_ptr + 1
        noted_ptr = lists.words_ptr + 2
    programs = gl.num_programs(0)
    item = gl.program_id(0)
    if noted_ptr is not None:
        # most often there is none.
        item = gl.where(gl.load(noted_ptr) == 0, work.ITEMS, item)
        item = next_noted(item, noted_ptr, counter_ptr, work)
    first_block = block_of(gl.minimum(item, work.ITEMS - 1), work)
    if DENSE:
        count = C
    else:
        # no list is longer than its room.
        count = gl.minimum(gl.load(lists.kv_count_ptr + first_block), C)
    q_phase = 0
    stage = 0
    phase = 0
    slot = 0
    # before the first block stand values that do not exist.
    if TMA:
        v_head = 0
        chunk_rows = view(pieces.rows, [2 * CHUNKS, 1], ONE)
        pieces.rows.index(1).store(gl.full([CHUNKS], 0, gl.int32, LINE) + S)
    else:
        tokens = gl.full([BN], 0, gl.int32, gl.SliceLayout(1, LAYOUT))
        v_from = inputs.v_ptr

    while item < work.ITEMS:
        entry, part, parts = part_of(item, work)
        head, block = locate(entry, work.G, work.BH, work.TOGETHER)
        # a part is some of a block's steps.
        steps = (count + CHUNKS - 1) // CHUNKS
        begin = steps * part // parts * CHUNKS
        count = gl.minimum(steps * (part + 1) // parts * CHUNKS, count) - begin
        if DENSE:
            list_from = begin
        else:
            list_from = lists.kv_index_ptr + (block.to(gl.int64) * C + begin)
        steps = gl.maximum((count + CHUNKS - 1) // CHUNKS, 1)
        # a part has some of its block's means, too: there are no more parts than steps of them.
        means = 0
        if MEANS:
            of_means = (P + BN - 1) // BN
            first_mean = of_means * part // parts
            means = of_means * (part + 1) // parts - first_mean
        # rows of parts lie behind those of all heads.
        start = head * S
        start = gl.where(parts > 1, -1 - work.BH * S - (item - work.WHOLE) * 128, start)
        first = (steps - 1) * CHUNKS
        # the list rises: a chunk that the sequence's end cuts can only be the last.
        last = _listed(list_from, count - 1, count > 0)
        if TMA:
            next_rows = _chunk_rows(list_from, first, count, S, N, CHUNKS, True)
        else:
            k_from = inputs.k_ptr + head.to(gl.int64) * S * D
            next_tokens = _tokens(list_from, first, count, S, QK_BITS, BN, LAYOUT, True)
            k_tokens = next_tokens
            if QK_BITS == 8:
                k_tokens = _tokens(list_from, first, count, S, QK_BITS, BN, K_LAYOUT, True)
        if inputs.k_scale_ptr is not None:
            k_scale_from = inputs.k_scale_ptr + head.to(gl.int64) * ((S + K_RUN - 1) // K_RUN)
            if TMA:
                RUNS: gl.constexpr = tables.k_scales.shape[1]
                next_scales = _scales_of_chunks(
                    k_scale_from, list_from, first, count, S, N, BN, K_RUN, RUNS, True
                )
            else:
                key_scales = (
                    k_scale_from
                    + _line_tokens(list_from, first, count, S, QK_BITS, BN, True) // K_RUN
                )
        if lists.kept_ptr is not None:
            kept_from = lists.kept_ptr + block.to(gl.int64) * ((C * N + BN - 1) // BN)
            kept = kept_from + steps - 1 + gl.arange(0, 1, LINE)
        tile = tile_of(lists.q_tiles_ptr, block, gl.arange(0, R, LINE) * M, work.G, M)
        item = programs + gl.atomic_add(counter_ptr, 1, sem="relaxed")
        if noted_ptr is not None:
            item = next_noted(item, noted_ptr, counter_ptr, work)
        next_block = block_of(gl.minimum(item, work.ITEMS - 1), work)
        if DENSE:
            next_count = C
        else:
            next_count = gl.minimum(gl.load(lists.kv_count_ptr + next_block), C)

        # the first keys of this block and the last values of the one before.
        mbarrier.wait(empty.index(stage), phase ^ 1)
        bar = full.index(stage)
        if TMA:
            pieces.rows.index(slot).store(next_rows)
            if inputs.k_scale_ptr is not None:
                tables.k_scales.index(stage).store(next_scales)
            if lists.kept_ptr is not None:
                tables.kept_words.index(stage).store(gl.load(kept))
            if inputs.k_scale_ptr is not None or lists.kept_ptr is not None:
                thread_barrier()
            mbarrier.expect(bar, K_BYTES + V_BYTES)
            _load_chunks(inputs.k_desc, pieces.k, bar, head, chunk_rows, stage, slot, SIZES)
            slot = slot ^ 1
            if MEANS:
                # a block ends with means.
                _load_chunks(
                    inputs.v_mean_desc, pieces.v, bar, v_head, chunk_rows, stage, slot, SIZES
                )
            else:
                _load_chunks(inputs.v_desc, pieces.v, bar, v_head, chunk_rows, stage, slot, SIZES)
            v_head = head
        else:
            _copy_tokens(k_from, pieces.k.index(stage), k_tokens, D, K_LAYOUT)
            _copy_tokens(v_from, pieces.v.index(stage), tokens, D, LAYOUT)
            if inputs.k_scale_ptr is not None:
                cp_async(tables.k_scales.index(stage), key_scales)
            if lists.kept_ptr is not None:
                cp_async(tables.kept_words.index(stage), kept)
            async_copy.mbarrier_arrive(bar, increment_count=False)
            tokens = next_tokens
            v_from = inputs.v_ptr + head.to(gl.int64) * S * D
        stage, phase = next_stage(stage, phase, STAGES)

        # its queries, as soon as the consumers are done with those of the block before.
        past_end = gl.maximum((last + 1) * N - S, 0)
        mbarrier.wait(q_empty, q_phase ^ 1)
        q_phase = q_phase ^ 1
        pieces.q_rows.store(tile * M)
        put_scalar(record.index(0), block)
        put_scalar(record.index(1), start)
        put_scalar(record.index(2), steps + means)
        if MEANS:
            put_scalar(record.index(4), means)
        put_scalar(record.index(3), gl.where(count > 0, (count - first) * N - past_end, 0))
        if inputs.q_scale_ptr is not None or GATE is not None:
            _put_tables(tables, inputs, lists, block, head, lengths, work.G, SIZES)
            thread_barrier()
        mbarrier.expect(q_full, Q_BYTES)
        q_row = view(pieces.q_rows, [R, 1], ONE)
        for b in gl.static_range(128 // BOX):
            row = load_scalar(q_row.index(b * BOX // M)) + b * BOX % M
            for half in gl.static_range(QK_HALVES):
                piece = (b * BOX // 64 * QK_HALVES + half) * (64 // BOX) + b % (64 // BOX)
                tma_load(inputs.q_desc, [head, row, half * 64], q_full, pieces.q.index(piece))

        for step in range(1, steps):
            at = (step - 1) * CHUNKS
            if TMA:
                next_rows = _chunk_rows(list_from, at, count, S, N, CHUNKS, False)
            else:
                next_tokens = _tokens(list_from, at, count, S, QK_BITS, BN, LAYOUT, False)
                k_tokens = next_tokens
                if QK_BITS == 8:
                    k_tokens = _tokens(list_from, at, count, S, QK_BITS, BN, K_LAYOUT, False)
            if inputs.k_scale_ptr is not None:
                if TMA:
                    next_scales = _scales_of_chunks(
                        k_scale_from, list_from, at, count, S, N, BN, K_RUN, RUNS, False
                    )
                else:
                    key_scales = (
                        k_scale_from
                        + _line_tokens(list_from, at, count, S, QK_BITS, BN, False) // K_RUN
                    )
            if lists.kept_ptr is not None:
                kept = kept_from + step - 1 + gl.arange(0, 1, LINE)
                if TMA:
                    next_kept = gl.load(kept)
            mbarrier.wait(empty.index(stage), phase ^ 1)
            bar = full.index(stage)
            if TMA:
                pieces.rows.index(slot).store(next_rows)
                if inputs.k_scale_ptr is not None:
                    tables.k_scales.index(stage).store(next_scales)
                if lists.kept_ptr is not None:
                    tables.kept_words.index(stage).store(next_kept)
                if inputs.k_scale_ptr is not None or lists.kept_ptr is not None:
                    thread_barrier()
                mbarrier.expect(bar, K_BYTES + V_BYTES)
                _load_chunks(inputs.k_desc, pieces.k, bar, head, chunk_rows, stage, slot, SIZES)
                slot = slot ^ 1
                _load_chunks(inputs.v_desc, pieces.v, bar, head, chunk_rows, stage, slot, SIZES)
            else:
                _copy_tokens(k_from, pieces.k.index(stage), k_tokens, D, K_LAYOUT)
                _copy_tokens(v_from, pieces.v.index(stage), tokens, D, LAYOUT)
                if inputs.k_scale_ptr is not None:
                    cp_async(tables.k_scales.index(stage), key_scales)
                if lists.kept_ptr is not None:
                    cp_async(tables.kept_words.index(stage), kept)
                async_copy.mbarrier_arrive(bar, increment_count=False)
                tokens = next_tokens
            stage, phase = next_stage(stage, phase, STAGES)
        if MEANS:
            for step in range(means):
                at = (first_mean + step) * BN
                counts_from = lists.counts_ptr + (block.to(gl.int64) * lengths.COUNTS + at)
                counts_from += gl.arange(0, BN, COUNTED)
                if TMA:
                    next_rows = at + gl.arange(0, CHUNKS, LINE) * N
                    next_counts = gl.load(counts_from).to(gl.float32)
                    if RAISED:
                        next_counts = raised_by(next_counts, scale_log2)
                    if inputs.k_scale_ptr is not None:
                        scale_from = inputs.k_mean_scale_ptr + head.to(gl.int64) * (
                            (P + K_RUN - 1) // K_RUN
                        )
                        key = at + gl.arange(0, RUNS, LINE) * (BN // RUNS)
                        next_scales = gl.load(scale_from + key // K_RUN, mask=key < P, other=1.0)
                else:
                    next_tokens = gl.minimum(
                        at + gl.arange(0, BN, gl.SliceLayout(1, LAYOUT)), P - 1
                    )
                    k_tokens = next_tokens
                    if QK_BITS == 8:
                        k_tokens = gl.minimum(
                            at + gl.arange(0, BN, gl.SliceLayout(1, K_LAYOUT)), P - 1
                        )
                    if inputs.k_scale_ptr is not None:
                        scale_from = inputs.k_mean_scale_ptr + head.to(gl.int64) * (
                            (P + K_RUN - 1) // K_RUN
                        )
                        key_scales = (
                            scale_from + gl.minimum(at + gl.arange(0, BN, LINE), P - 1) // K_RUN
                        )
                mbarrier.wait(empty.index(stage), phase ^ 1)
                bar = full.index(stage)
                if TMA:
                    pieces.rows.index(slot).store(next_rows)
                    tables.counts.index(stage).store(next_counts)
                    if inputs.k_scale_ptr is not None:
                        tables.k_scales.index(stage).store(next_scales)
                    thread_barrier()
                    mbarrier.expect(bar, K_BYTES + V_BYTES)
                    _load_chunks(
                        inputs.k_mean_desc, pieces.k, bar, head, chunk_rows, stage, slot, SIZES
                    )
                    slot = slot ^ 1
                    # the first step of means goes with the values of the last chunks.
                    if step == 0:
                        _load_chunks(
                            inputs.v_desc, pieces.v, bar, v_head, chunk_rows, stage, slot, SIZES
                        )
                    else:
                        _load_chunks(
                            inputs.v_mean_desc,
                            pieces.v,
                            bar,
                            v_head,
                            chunk_rows,
                            stage,
                            slot,
                            SIZES,
                        )
                else:
                    k_mean_from = inputs.k_mean_ptr + head.to(gl.int64) * P * D
                    _copy_tokens(k_mean_from, pieces.k.index(stage), k_tokens, D, K_LAYOUT)
                    _copy_tokens(v_from, pieces.v.index(stage), tokens, D, LAYOUT)
                    cp_async(tables.counts.index(stage), counts_from)
                    if inputs.k_scale_ptr is not None:
                        cp_async(tables.k_scales.index(stage), key_scales)
                    async_copy.mbarrier_arrive(bar, increment_count=False)
                    tokens = next_tokens
                    v_from = inputs.v_mean_ptr + head.to(gl.int64) * P * D
                stage, phase = next_stage(stage, phase, STAGES)
        count = next_count

    # the last values of all, and a record that ends the consumers.
    mbarrier.wait(empty.index(stage), phase ^ 1)
    if TMA:
        mbarrier.expect(full.index(stage), V_BYTES)
        slot = slot ^ 1
        if MEANS:
            _load_chunks(
                inputs.v_mean_desc,
                pieces.v,
                full.index(stage),
                v_head,
                chunk_rows,
                stage,
                slot,
                SIZES,
            )
        else:
            _load_chunks(
                inputs.v_desc, pieces.v, full.index(stage), v_head, chunk_rows, stage, slot, SIZES
            )
    else:
        _copy_tokens(v_from, pieces.v.index(stage), tokens, D, LAYOUT)
        async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
    mbarrier.wait(q_empty, q_phase ^ 1)
    put_scalar(record.index(0), -1)
    put_scalar(record.index(1), 0)
    put_scalar(record.index(2), 0)
    put_scalar(record.index(3), 0)
    if MEANS:
        put_scalar(record.index(4), 0)
    mbarrier.arrive(q_full)
