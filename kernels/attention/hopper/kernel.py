"""The kernel: shared memory and barriers of a program, and its three partitions."""

# what triton compiles is not typed python.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, no-redef"
# mypy: disable-error-code="assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .arguments import (
    Barriers,
    BlockLists,
    BlockShares,
    Inputs,
    Lengths,
    Outputs,
    Pieces,
    Stages,
    Tables,
)
from .consumer import consume
from .layouts import keys_of_a_scale, view
from .producer import produce


@gluon.jit
def gather_attention_kernel(
    q_desc,
    k_desc,
    v_desc,
    k_mean_desc,
    v_mean_desc,
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
    k_mean_ptr,
    v_mean_ptr,
    k_mean_scale_ptr,
    counts_ptr,
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
    SIZES: gl.constexpr,
):
    """Attend blocks of 128 query rows to their key lists; all tensors contiguous.

    ``words_ptr`` has zeros; ``arguments`` says what it and ``SIZES`` are. Pointers that are None
    leave out what they are for: lists (then all blocks attend all C chunks), scales and shift of
    8-bit operands, a gate's thresholds and words of kept pieces, the count of skipped pairs, means
    and their counts.
    """
    STAGES: gl.constexpr = SIZES.stages
    BN: gl.constexpr = SIZES.step
    DP: gl.constexpr = SIZES.padded
    M: gl.constexpr = SIZES.rows
    N: gl.constexpr = SIZES.keys
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
    q_pieces = gl.allocate_shared_memory(
        q_desc.dtype, [128 // BOX * (DP // QK_BOX), 1, BOX, QK_BOX], QK_BOXES
    )
    q_memory = view(q_pieces, [2, 64, DP], QK_ROWS)
    if GENERIC:
        k_stages = gl.allocate_shared_memory(k_desc.dtype, [STAGES, BN, DP], QK_ROWS)
        v_stages = gl.allocate_shared_memory(v_desc.dtype, [STAGES, BN, DP], ROWS)
        k_pieces = k_stages
        v_pieces = v_stages
    else:
        K_PIECES: gl.constexpr = STAGES * (DP // QK_BOX) * (BN // N)
        k_pieces = gl.allocate_shared_memory(k_desc.dtype, [K_PIECES, 1, N, QK_BOX], QK_BOXES)
        k_stages = view(k_pieces, [STAGES, BN, DP], QK_ROWS)
        PIECES_OF_V: gl.constexpr = STAGES * HALVES * (BN // N)
        v_pieces = gl.allocate_shared_memory(v_desc.dtype, [PIECES_OF_V, 1, N, 64], BOXES)
        v_stages = view(v_pieces, [STAGES, BN, DP], ROWS)
    rows = gl.allocate_shared_memory(gl.int32, [2, BN // N], ONE)
    q_rows = gl.allocate_shared_memory(gl.int32, [128 // M], ONE)
    record = gl.allocate_shared_memory(gl.int32, [4 if counts_ptr is None else 5, 1], ONE)
    if q_scale_ptr is not None:
        row_scales = gl.allocate_shared_memory(gl.float32, [2, 64], ONE)
        EACH: gl.constexpr = keys_of_a_scale(N, SIZES.k_run)
        k_scales = gl.allocate_shared_memory(gl.float32, [STAGES, BN // EACH], ONE)
    else:
        row_scales: gl.constexpr = None
        k_scales: gl.constexpr = None
    if SIZES.gate is not None:
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
    if counts_ptr is not None:
        # cp.async copies them as they are.
        counts = gl.allocate_shared_memory(gl.uint8 if GENERIC else gl.float32, [STAGES, BN], ONE)
    else:
        counts: gl.constexpr = None
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    q_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    for i in gl.static_range(STAGES):
        # every thread's copies arrive by themselves; TMA's arrive with the one that expects them.
        mbarrier.init(full.index(i), count=32 * SIZES.producer_warps if GENERIC else 1)
        mbarrier.init(empty.index(i), count=2)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=2)
    inputs = Inputs(
        q_desc, k_desc, v_desc, k_mean_desc, v_mean_desc, k_ptr, v_ptr, k_mean_ptr, v_mean_ptr,
        q_scale_ptr, k_scale_ptr, k_mean_scale_ptr,
    )  # fmt: skip
    lists = BlockLists(
        q_tiles_ptr, kv_count_ptr, kv_index_ptr, counts_ptr, kept_ptr, threshold_ptr, shift_ptr,
        words_ptr,
    )  # fmt: skip
    outputs = Outputs(out_ptr, lse_ptr, skipped_ptr)
    lengths = Lengths(S, C, P, COUNTS, scale_log2)
    work = BlockShares(G, BH, TOGETHER, ITEMS, WHOLE, PARTS)
    pieces = Pieces(q_pieces, k_pieces, v_pieces, rows, q_rows)
    stages = Stages(q_memory, k_stages, v_stages, votes)
    tables = Tables(record, row_scales, thresholds, k_scales, kept_words, counts)
    barriers = Barriers(full, empty, q_full, q_empty)
    # the argument tuples stand in the call: assigned to a variable, constexprs become tensors.
    gl.warp_specialize(
        [
            (
                consume,
                (stages, tables, barriers, lists, outputs, lengths, work, gl.constexpr(0), SIZES),
            ),
            (
                consume,
                (stages, tables, barriers, lists, outputs, lengths, work, gl.constexpr(1), SIZES),
            ),
            (produce, (inputs, lists, lengths, work, pieces, tables, barriers, SIZES)),
        ],
        [4, SIZES.producer_warps],
        [SIZES.consumer_registers, SIZES.producer_registers],
    )
