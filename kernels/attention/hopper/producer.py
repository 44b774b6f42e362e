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
from .schedule import block_of, locate, next_noted, part_of


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
            four = four + (load_scalar(rows.index(slot * CHUNKS + c)),)
        for c in gl.static_range(FOUR):
            for half in gl.static_range(HALVES):
                piece = pieces.index((stage * HALVES + half) * CHUNKS + start + c)
                tma_load(desc, [head, four[c], half * 64], bar, piece)


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
        cp_async(memory, pointers)
    else:
        cp_async(memory, pointers, mask=(column < D)[None, :])


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
            threshold *= LOG2_E
            if GATE == "absolute" and shift_ptr is not None:
                # thresholds are on scores with the mean key in them.
                shift = gl.load(shift_ptr + head.to(gl.int64) * S + row, mask=alive, other=0.0)
                threshold -= shift * scale_log2
            thresholds.index(half).store(threshold)


@gluon.jit
def produce(
    q_desc,
    k_desc,
    v_desc,
    k_mean_desc,
    v_mean_desc,
    k_ptr,
    v_ptr,
    k_mean_ptr,
    v_mean_ptr,
    k_mean_scale_ptr,
    counts_ptr,
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
    counts,
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
    P,
    COUNTS,
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
    """Take blocks, or with PASS second those that are noted, and fill the ring for each."""
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
    LAYOUT: gl.constexpr = token_layout(BN, DP, 16)
    K_LAYOUT: gl.constexpr = token_layout(BN, DP, QK_BITS)
    ONE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    MEANS: gl.constexpr = counts_ptr is not None
    RAISED: gl.constexpr = GATE is None and QK_BITS == 16
    # four bytes a thread are the least that cp.async copies.
    COUNTED: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
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
        item = next_noted(item, noted_ptr, counter_ptr, G, BH, TOGETHER, ITEMS, WHOLE, PARTS)
    first_block = block_of(gl.minimum(item, ITEMS - 1), G, BH, TOGETHER, WHOLE, PARTS)
    count = gl.load(kv_count_ptr + first_block)
    q_phase = 0
    stage = 0
    phase = 0
    slot = 0
    # before the first block stand values that do not exist.
    if TMA:
        v_head = 0
        chunk_rows = view(rows, [2 * CHUNKS, 1], ONE)
        rows.index(1).store(gl.full([CHUNKS], 0, gl.int32, LINE) + S)
    else:
        tokens = gl.full([BN], 0, gl.int32, gl.SliceLayout(1, LAYOUT))
        v_from = v_ptr

    while item < ITEMS:
        entry, part, parts = part_of(item, WHOLE, PARTS)
        head, block = locate(entry, G, BH, TOGETHER)
        # a part is some of a block's steps.
        steps = (count + CHUNKS - 1) // CHUNKS
        begin = steps * part // parts * CHUNKS
        count = gl.minimum(steps * (part + 1) // parts * CHUNKS, count) - begin
        list_ptr = kv_index_ptr + (block.to(gl.int64) * C + begin)
        steps = gl.maximum((count + CHUNKS - 1) // CHUNKS, 1)
        # a part has some of its block's means, too: there are no more parts than steps of them.
        means = 0
        if MEANS:
            of_means = (P + BN - 1) // BN
            first_mean = of_means * part // parts
            means = of_means * (part + 1) // parts - first_mean
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
            item = next_noted(item, noted_ptr, counter_ptr, G, BH, TOGETHER, ITEMS, WHOLE, PARTS)
        next_block = block_of(gl.minimum(item, ITEMS - 1), G, BH, TOGETHER, WHOLE, PARTS)
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
                thread_barrier()
            mbarrier.expect(bar, K_BYTES + V_BYTES)
            _load_chunks(k_desc, k_pieces, bar, head, chunk_rows, stage, slot, CHUNKS, QK_HALVES)
            slot = slot ^ 1
            if MEANS:
                # a block ends with means.
                _load_chunks(
                    v_mean_desc, v_pieces, bar, v_head, chunk_rows, stage, slot, CHUNKS, HALVES
                )
            else:
                _load_chunks(v_desc, v_pieces, bar, v_head, chunk_rows, stage, slot, CHUNKS, HALVES)
            v_head = head
        else:
            _copy_tokens(k_from, k_pieces.index(stage), k_tokens, D, K_LAYOUT)
            _copy_tokens(v_from, v_pieces.index(stage), tokens, D, LAYOUT)
            if k_scale_ptr is not None:
                cp_async(k_scales.index(stage), key_scales)
            if kept_ptr is not None:
                cp_async(kept_words.index(stage), kept)
            async_copy.mbarrier_arrive(bar, increment_count=False)
            tokens = next_tokens
            v_from = v_ptr + head.to(gl.int64) * S * D
        stage, phase = next_stage(stage, phase, STAGES)

        # its queries, as soon as the consumers are done with those of the block before.
        past_end = gl.maximum((last + 1) * N - S, 0)
        mbarrier.wait(q_empty, q_phase ^ 1)
        q_phase = q_phase ^ 1
        q_rows.store(tile * M)
        put_scalar(record.index(0), block)
        put_scalar(record.index(1), start)
        put_scalar(record.index(2), steps + means)
        if MEANS:
            put_scalar(record.index(4), means)
        put_scalar(record.index(3), gl.where(count > 0, (count - first) * N - past_end, 0))
        if q_scale_ptr is not None or GATE is not None:
            _put_tables(
                row_scales, thresholds, q_tiles_ptr, q_scale_ptr, shift_ptr, threshold_ptr, block,
                head, S, scale_log2, M, Q_RUN, GATE,
            )  # fmt: skip
            thread_barrier()
        mbarrier.expect(q_full, Q_BYTES)
        q_row = view(q_rows, [R, 1], ONE)
        for b in gl.static_range(128 // BOX):
            row = load_scalar(q_row.index(b * BOX // M)) + b * BOX % M
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
                    thread_barrier()
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
                    cp_async(k_scales.index(stage), key_scales)
                if kept_ptr is not None:
                    cp_async(kept_words.index(stage), kept)
                async_copy.mbarrier_arrive(bar, increment_count=False)
                tokens = next_tokens
            stage, phase = next_stage(stage, phase, STAGES)
        if MEANS:
            for step in range(means):
                at = (first_mean + step) * BN
                counts_from = counts_ptr + (block.to(gl.int64) * COUNTS + at)
                counts_from += gl.arange(0, BN, COUNTED)
                if TMA:
                    next_rows = at + gl.arange(0, CHUNKS, LINE) * N
                    next_counts = gl.load(counts_from).to(gl.float32)
                    if RAISED:
                        next_counts = raised_by(next_counts, scale_log2)
                    if k_scale_ptr is not None:
                        scale_from = k_mean_scale_ptr + head.to(gl.int64) * (
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
                    if k_scale_ptr is not None:
                        scale_from = k_mean_scale_ptr + head.to(gl.int64) * (
                            (P + K_RUN - 1) // K_RUN
                        )
                        key_scales = (
                            scale_from + gl.minimum(at + gl.arange(0, BN, LINE), P - 1) // K_RUN
                        )
                mbarrier.wait(empty.index(stage), phase ^ 1)
                bar = full.index(stage)
                if TMA:
                    rows.index(slot).store(next_rows)
                    counts.index(stage).store(next_counts)
                    if k_scale_ptr is not None:
                        k_scales.index(stage).store(next_scales)
                    thread_barrier()
                    mbarrier.expect(bar, K_BYTES + V_BYTES)
                    _load_chunks(
                        k_mean_desc, k_pieces, bar, head, chunk_rows, stage, slot, CHUNKS, QK_HALVES
                    )
                    slot = slot ^ 1
                    # the first step of means goes with the values of the last chunks.
                    if step == 0:
                        _load_chunks(
                            v_desc, v_pieces, bar, v_head, chunk_rows, stage, slot, CHUNKS, HALVES
                        )
                    else:
                        _load_chunks(
                            v_mean_desc,
                            v_pieces,
                            bar,
                            v_head,
                            chunk_rows,
                            stage,
                            slot,
                            CHUNKS,
                            HALVES,
                        )
                else:
                    _copy_tokens(
                        k_mean_ptr + head.to(gl.int64) * P * D, k_pieces.index(stage), k_tokens, D,
                        K_LAYOUT,
                    )  # fmt: skip
                    _copy_tokens(v_from, v_pieces.index(stage), tokens, D, LAYOUT)
                    cp_async(counts.index(stage), counts_from)
                    if k_scale_ptr is not None:
                        cp_async(k_scales.index(stage), key_scales)
                    async_copy.mbarrier_arrive(bar, increment_count=False)
                    tokens = next_tokens
                    v_from = v_mean_ptr + head.to(gl.int64) * P * D
                stage, phase = next_stage(stage, phase, STAGES)
        count = next_count

    # the last values of all, and a record that ends the consumers.
    mbarrier.wait(empty.index(stage), phase ^ 1)
    if TMA:
        mbarrier.expect(full.index(stage), V_BYTES)
        slot = slot ^ 1
        if MEANS:
            _load_chunks(
                v_mean_desc,
                v_pieces,
                full.index(stage),
                v_head,
                chunk_rows,
                stage,
                slot,
                CHUNKS,
                HALVES,
            )
        else:
            _load_chunks(
                v_desc, v_pieces, full.index(stage), v_head, chunk_rows, stage, slot, CHUNKS, HALVES
            )
    else:
        _copy_tokens(v_from, v_pieces.index(stage), tokens, D, LAYOUT)
        async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
    mbarrier.wait(q_empty, q_phase ^ 1)
    put_scalar(record.index(0), -1)
    put_scalar(record.index(1), 0)
    put_scalar(record.index(2), 0)
    put_scalar(record.index(3), 0)
    if MEANS:
        put_scalar(record.index(4), 0)
    mbarrier.arrive(q_full)
