"""The `triton` implementation: one pointer-gather kernel for every GPU that Triton compiles for.

Shape legend: B batch, H heads, S tokens, D head dim, M query rows of a tile, N keys of a chunk,
G blocks of 128 query rows, R = 128 / M tiles of a block, C longest key list.
Names: ``off_*`` offsets, ``*_ptr`` pointers, ``stride_*`` strides, ``BLOCK_*`` constants.
The file has over 600 lines because the kernel, its steps and its launch change together.

A program owns one block of 128 query rows. Its key list is read as one run of ``count * N`` tokens
in steps of BLOCK_N; only the last step can hold dead tokens, so its group of 128 keys goes first,
masked, and the loop over the others carries no mask. A few heads are worked on at a time, so that
their keys and values stay in L2, and of those the longest blocks start first.

A row's weights are powers of its scores less an anchor. In fp16 and with a gate that is a running
maximum. Where weights have the exponents of fp32, the largest of the first scores serves for all:
no later maxima are looked for, and nothing is rescaled. What comes out is right unless it left
fp32's range, which the finished sums show; such a block is attended again with running maxima. That
takes scores that rise by more than 70, or large values.

Gates and 8-bit operands are compiled in where they are asked for. A gate's branch around a product
with V is taken by the whole block of rows: pieces of fewer rows that are skipped beside others that
are not get weights of zero. V is loaded all the same, since a load that waits for the branch could
not be started a step ahead.
"""

# what triton compiles is not typed python, and grows tuples by adding to them.
# ruff: noqa: RUF005
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..hardware import device_facts
from ..logarithms import LN_2, LOG2_E
from ..tokens.formats import QuantizedQK
from .gates import KEY_GROUP, AbsoluteGate, Gate, gate_kind, kept_pieces
from .lists import LARGEST_SUM, heads_together, is_anchored, tables, tables_of_means
from .means import KeyMeans

STAGES = 2
# with 128 keys a step, two stages of keys and values and the queries want 160 KiB at D = 128.
LARGE_SHARED_BYTES = 163 * 1024


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _bounded(number, last):
    """``number``, or ``last`` for what is not from 0 to it: of a right list it changes nothing.

    A negative number is beyond ``last`` without its sign.
    """
    number = number.to(tl.int32).to(tl.uint32, bitcast=True)
    return tl.minimum(number, last).to(tl.int32, bitcast=True)


@triton.jit
def _read_ahead(kv_index_ptr, at, EACH: tl.constexpr):
    """EACH numbers of a list from place ``at`` on, one register each."""
    numbers = ()
    for c in tl.static_range(EACH):
        numbers = numbers + (tl.load(kv_index_ptr + at + c).to(tl.int32),)
    return numbers


@triton.jit
def _tokens_of(chunks, last_chunk, off_n, N: tl.constexpr):
    """The tokens of a step that ``chunks`` make up, each bounded by ``last_chunk``."""
    token = _bounded(chunks[0], last_chunk) * N + off_n % N
    for c in tl.static_range(1, len(chunks)):
        # which rows of a thread these are is known when it is compiled.
        token = tl.where(off_n >= c * N, _bounded(chunks[c], last_chunk) * N + off_n % N, token)
    return token


@triton.jit
def _step(
    q,
    k,
    v,
    acc,
    row_sum,
    row_max,
    row_scale,
    key_scale,
    alive,
    row_alive,
    threshold,
    kept,
    skipped,
    counts,
    GATE: tl.constexpr,
    GATE_ROWS: tl.constexpr,
    MASKED: tl.constexpr,
    ANCHORED: tl.constexpr,
):
    # scores stay unscaled until the exponential, which takes the scale in one instruction with the
    # maximum: row_scale is positive.
    scores = tl.dot(q, k).to(tl.float32)
    if key_scale is not None:
        if len(key_scale.shape) == 0:
            row_scale *= key_scale
        else:
            scores *= key_scale[None, :]
    if MASKED:
        scores = tl.where(alive[None, :], scores, -float("inf"))
    if ANCHORED:
        new_max = row_max
        weights = tl.exp2(scores * row_scale[:, None] - row_max[:, None])
        if counts is not None:
            weights *= counts[None, :]
        row_sum += tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc)
    elif GATE is None:
        if counts is not None:
            # one that stands for nothing is no maximum: fp16 would lose the others' weights beside
            # it. behind the last group keys are zeros, far above all others where these are low.
            scores = tl.where(counts[None, :] > 0, scores, -float("inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * row_scale)
        weights = tl.exp2(scores * row_scale[:, None] - new_max[:, None])
        if counts is not None:
            weights *= counts[None, :]
        rescale = tl.exp2(row_max - new_max)
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None])
    else:
        # NaN stays NaN: what is not a number is never far below.
        local_max = tl.reduce(scores, 1, _larger) * row_scale
        new_max = _larger(row_max, local_max)
        compared = local_max
        if GATE == "relative":
            compared = local_max - new_max
        # one bit for every piece, and all of them in one reduction over the block's warps (as a
        # column: triton 3.6 and 3.7 do not compile a reduction of all of a tensor that depends on
        # a product for sm_100). a row without a token has no say.
        ROWS: tl.constexpr = q.shape[0]
        piece = tl.arange(0, ROWS) // GATE_ROWS
        bits = tl.where(~(compared < threshold) & row_alive, 1 << piece, 0)
        open_pieces = tl.reduce_or(bits[:, None], 0).item()
        if kept is not None:
            open_pieces = tl.where(kept != 0, 0xF, open_pieces)
        computed = open_pieces != 0
        opens = ((open_pieces >> piece) & 1) != 0
        if MASKED:
            keys = tl.sum(alive.to(tl.int32), 0)
        else:
            keys = v.shape[0]
        skipped += tl.where(opens, 0, keys)
        if GATE == "relative":
            weights = tl.exp2(scores * row_scale[:, None] - new_max[:, None])
            rescale = tl.exp2(row_max - new_max)
            row_sum = row_sum * rescale + tl.sum(weights, 1)
            # no row that is skipped has moved its maximum, so nothing is lost with the rescale.
            if computed:
                open_weights = weights
                if GATE_ROWS < ROWS:
                    open_weights = tl.where(opens[:, None], weights, 0.0)
                acc = tl.dot(open_weights.to(v.dtype), v, acc * rescale[:, None])
        else:
            if GATE_ROWS < ROWS:
                new_max = tl.where(opens, new_max, row_max)
            if computed:
                weights = tl.exp2(scores * row_scale[:, None] - new_max[:, None])
                if GATE_ROWS < ROWS:
                    weights = tl.where(opens[:, None], weights, 0.0)
                rescale = tl.exp2(row_max - new_max)
                row_sum = row_sum * rescale + tl.sum(weights, 1)
                acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None])
                row_max = new_max
            new_max = row_max
    return acc, row_sum, new_max, skipped


@triton.jit
def _attend(
    q,
    k_ptr,
    v_ptr,
    kv_index_ptr,
    k_scale_ptr,
    kept_ptr,
    k_mean_ptr,
    v_mean_ptr,
    k_mean_scale_ptr,
    counts_ptr,
    row_scale,
    row_alive,
    threshold,
    keys,
    S,
    groups,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    KEY_GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    K_RUN: tl.constexpr,
    GATE: tl.constexpr,
    GATE_ROWS: tl.constexpr,
    ANCHORED: tl.constexpr,
):
    """A block's sums of weighted values and of weights, their anchor, and pairs skipped.

    If ANCHORED, the anchor is the maximum of the first KEY_GROUP scores, otherwise of all.
    """
    BLOCK_M: tl.constexpr = q.shape[0]
    # keys of a step that all share a scale: it goes to the rows, a multiplication less a score.
    SHARED_SCALE: tl.constexpr = N % BLOCK_N == 0 and K_RUN % BLOCK_N == 0
    off_n = tl.arange(0, BLOCK_N)
    off_d = tl.arange(0, BLOCK_D)
    dim_alive = off_d < D
    steps = tl.cdiv(keys, BLOCK_N)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    # finite: with -inf a fully masked first step would subtract infinities.
    row_max = tl.full([BLOCK_M], -1.0e30, dtype=tl.float32)
    skipped = tl.zeros([BLOCK_M], dtype=tl.int32)

    if steps > 0:
        # gates count on this order: the last KEY_GROUP keys, in one step or several, go first.
        early = tl.cdiv(keys, KEY_GROUP) * (KEY_GROUP // BLOCK_N) - KEY_GROUP // BLOCK_N
        for part in tl.static_range(KEY_GROUP // BLOCK_N):
            step = early + part
            if step < steps:
                place = step * BLOCK_N + off_n
                alive = place < keys
                chunk = tl.load(kv_index_ptr + place // N, mask=alive, other=0)
                # numbers of 16 bits are widened before they count tokens; those that overflow then
                # are some token or other.
                token = _bounded(chunk.to(tl.int32) * N + place % N, S - 1)
                # how much ptxas spills goes by the order of these lines too.
                off_v = token[:, None] * D + off_d[None, :]
                v_alive = alive[:, None] & dim_alive[None, :]
                k = tl.load(
                    k_ptr + token[None, :] * D + off_d[:, None],
                    mask=alive[None, :] & dim_alive[:, None],
                    other=0.0,
                )
                v = tl.load(v_ptr + off_v, mask=v_alive, other=0.0)
                key_scale = None
                if k_scale_ptr is not None:
                    if SHARED_SCALE:
                        chunk_of_step = tl.load(kv_index_ptr + step * BLOCK_N // N).to(tl.int32)
                        first = _bounded(chunk_of_step * N + step * BLOCK_N % N, S - 1)
                        key_scale = tl.load(k_scale_ptr + first // K_RUN)
                    else:
                        key_scale = tl.load(k_scale_ptr + token // K_RUN, mask=alive, other=0.0)
                kept = None
                if kept_ptr is not None:
                    kept = tl.load(kept_ptr + step).to(tl.int32)
                acc, row_sum, row_max, skipped = _step(
                    q,
                    k,
                    v,
                    acc,
                    row_sum,
                    row_max,
                    row_scale,
                    key_scale,
                    alive,
                    row_alive,
                    threshold,
                    kept,
                    skipped,
                    None,
                    GATE,
                    GATE_ROWS,
                    True,
                    False,
                )
        # a chunk that the sequence's end cuts stands in the group above, so one bound holds for all
        # tokens of a chunk here. With one for each token ptxas reads the list behind the
        # exponentials instead of among them on Hopper, and copies of keys wait for it.
        last_chunk = tl.maximum(S // N - 1, 0)
        # several chunks a step: each number is read once, a step ahead. By rows they would be twice
        # as many reads, and on Hopper copies of keys would wait for them.
        # With running maxima there are no registers left for eight of them.
        EACH: tl.constexpr = BLOCK_N // N if N >= 16 or (N == 8 and ANCHORED) else 1
        if EACH > 1:
            chunks = ()
            for _ in tl.static_range(EACH):
                chunks = chunks + (0 * early,)
            # as a branch: with a mask ptxas spills a dozen registers in the loop.
            if early > 0:
                chunks = _read_ahead(kv_index_ptr, 0, EACH)
        for step in tl.range(0, early, num_stages=STAGES):
            if EACH > 1:
                token = _tokens_of(chunks, last_chunk, off_n, N)
                chunks = _read_ahead(kv_index_ptr, tl.minimum(step + 1, early - 1) * EACH, EACH)
            elif N % BLOCK_N == 0:
                chunk = _bounded(tl.load(kv_index_ptr + step * BLOCK_N // N), last_chunk)
                first = chunk * N + step * BLOCK_N % N
                token = first + off_n
            else:
                place = step * BLOCK_N + off_n
                token = _bounded(tl.load(kv_index_ptr + place // N), last_chunk) * N + off_n % N
            off_v = token[:, None] * D + off_d[None, :]
            if D == BLOCK_D:
                if ANCHORED and N == 1 and k_ptr.dtype == v_ptr.dtype:
                    # by the addresses of values, which saves 8 % where every key has a number of
                    # its own, and costs 4 % where they come in chunks. Keys of 8 bits would impose
                    # their layout on values, which are then copied in pieces 32 bytes apart.
                    k = tl.trans(tl.load(k_ptr + off_v))
                else:
                    k = tl.load(k_ptr + token[None, :] * D + off_d[:, None])
                v = tl.load(v_ptr + off_v)
            else:
                k = tl.load(
                    k_ptr + token[None, :] * D + off_d[:, None], mask=dim_alive[:, None], other=0.0
                )
                v = tl.load(v_ptr + off_v, mask=dim_alive[None, :], other=0.0)
            key_scale = None
            if k_scale_ptr is not None:
                if SHARED_SCALE:
                    key_scale = tl.load(k_scale_ptr + first // K_RUN)
                else:
                    key_scale = tl.load(k_scale_ptr + token // K_RUN)
            kept = None
            if kept_ptr is not None:
                kept = tl.load(kept_ptr + step).to(tl.int32)
            acc, row_sum, row_max, skipped = _step(
                q,
                k,
                v,
                acc,
                row_sum,
                row_max,
                row_scale,
                key_scale,
                None,
                row_alive,
                threshold,
                kept,
                skipped,
                None,
                GATE,
                GATE_ROWS,
                False,
                ANCHORED,
            )
    if counts_ptr is not None:
        # a gate leaves means alone. Behind the last group counts are zeros.
        for step in tl.range(0, tl.cdiv(groups, BLOCK_N), num_stages=STAGES):
            group = step * BLOCK_N + off_n
            alive = group < groups
            k = tl.load(
                k_mean_ptr + group[None, :] * D + off_d[:, None],
                mask=alive[None, :] & dim_alive[:, None],
                other=0.0,
            )
            v = tl.load(
                v_mean_ptr + group[:, None] * D + off_d[None, :],
                mask=alive[:, None] & dim_alive[None, :],
                other=0.0,
            )
            key_scale = None
            if k_mean_scale_ptr is not None:
                key_scale = tl.load(k_mean_scale_ptr + group // K_RUN, mask=alive, other=0.0)
            acc, row_sum, row_max, skipped = _step(
                q,
                k,
                v,
                acc,
                row_sum,
                row_max,
                row_scale,
                key_scale,
                None,
                row_alive,
                threshold,
                None,
                skipped,
                tl.load(counts_ptr + group).to(tl.float32),
                None,
                GATE_ROWS,
                False,
                ANCHORED,
            )
    return acc, row_sum, row_max, skipped


@triton.jit
def gather_attention_kernel(
    q_ptr,
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
    S,
    G,
    C,
    P,
    COUNTS,
    BH,
    TOGETHER,
    scale_log2,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    KEY_GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    Q_RUN: tl.constexpr,
    K_RUN: tl.constexpr,
    GATE: tl.constexpr,
    GATE_ROWS: tl.constexpr,
    ANCHORED: tl.constexpr,
):
    """Attend one block of 128 query rows to its key list; all tensors contiguous.

    Pointers that are None leave out what they are for: scales and shift of 8-bit operands, a gate's
    thresholds and kept pieces, the count of skipped pairs, means and their counts.
    """
    pid = tl.program_id(0)
    start = pid // (TOGETHER * G) * TOGETHER
    heads = min(BH - start, TOGETHER)
    # of the heads that are worked on together, every longest block comes before a second longest.
    head = start + (pid - start * G) % heads
    block = (pid - start * G) // heads
    entry = head.to(tl.int64) * G + block

    off_m = tl.arange(0, BLOCK_M)
    off_d = tl.arange(0, BLOCK_D)
    tile = tl.load(q_tiles_ptr + entry * (BLOCK_M // M) + off_m // M)
    row = tile * M + off_m % M
    # a number so large that its rows overflow is no tile.
    row_alive = (tile >= 0) & (tile < tl.cdiv(S, M)) & (row < S)
    dim_alive = off_d < D

    base = head.to(tl.int64) * S
    off_q = (base + row)[:, None] * D + off_d[None, :]
    q = tl.load(q_ptr + off_q, mask=row_alive[:, None] & dim_alive[None, :], other=0.0)
    k_ptr += base * D
    v_ptr += base * D
    kv_index_ptr += entry * C

    row_scale = tl.full([BLOCK_M], scale_log2, dtype=tl.float32)
    shift = tl.zeros([BLOCK_M], dtype=tl.float32)
    if q_scale_ptr is not None:
        runs = head.to(tl.int64) * tl.cdiv(S, Q_RUN)
        row_scale *= tl.load(q_scale_ptr + runs + row // Q_RUN, mask=row_alive, other=1.0)
        shift = tl.load(shift_ptr + base + row, mask=row_alive, other=0.0) * scale_log2
        # a query that is not finite is zeros in 8 bits; its shift tells.
        shift = tl.where(tl.abs(shift) < float("inf"), shift, float("nan"))
        k_scale_ptr += head.to(tl.int64) * tl.cdiv(S, K_RUN)
    threshold = shift
    if GATE is not None:
        tiles = head.to(tl.int64) * tl.cdiv(S, M)
        threshold = tl.load(threshold_ptr + tiles + tile, mask=row_alive, other=0.0)
        threshold *= LOG2_E
        if GATE == "absolute":
            # thresholds are on scores with the mean key in them.
            threshold -= shift
    if kept_ptr is not None:
        kept_ptr += entry * tl.cdiv(C * N, BLOCK_N)

    if counts_ptr is not None:
        counts_ptr += entry * COUNTS
        k_mean_ptr += head.to(tl.int64) * P * D
        v_mean_ptr += head.to(tl.int64) * P * D
        if k_mean_scale_ptr is not None:
            k_mean_scale_ptr += head.to(tl.int64) * tl.cdiv(P, K_RUN)

    # no list is longer than its room, or than all chunks.
    count = tl.minimum(tl.load(kv_count_ptr + entry), tl.minimum(C, tl.cdiv(S, N)))
    # the list rises, so a short last chunk of the sequence can only stand at its end.
    last = tl.load(kv_index_ptr + tl.maximum(count - 1, 0), mask=count > 0, other=0).to(tl.int32)
    past_end = tl.maximum((tl.minimum(last, tl.cdiv(S, N) - 1) + 1) * N - S, 0)
    keys = tl.where(count > 0, count * N - past_end, 0)

    acc, row_sum, row_max, skipped = _attend(
        q,
        k_ptr,
        v_ptr,
        kv_index_ptr,
        k_scale_ptr,
        kept_ptr,
        k_mean_ptr,
        v_mean_ptr,
        k_mean_scale_ptr,
        counts_ptr,
        row_scale,
        row_alive,
        threshold,
        keys,
        S,
        P,
        D,
        BLOCK_D,
        N,
        BLOCK_N,
        KEY_GROUP,
        STAGES,
        K_RUN,
        GATE,
        GATE_ROWS,
        ANCHORED,
    )
    if ANCHORED:
        # what is infinite or NaN is no number times zero, and no comparison holds for NaN. sums are
        # no less than 1, the weight of the anchor.
        finite = tl.sum(acc * 0.0, 1) == 0
        # in another order ptxas spills 40 registers of the loop above.
        lost = (
            row_alive
            & ((keys > 0) | (counts_ptr is not None))
            & ~((row_sum <= LARGEST_SUM) & finite)
        )
        # a column, as with a gate.
        if tl.reduce_or(lost.to(tl.int32)[:, None], 0).item() != 0:
            acc, row_sum, row_max, skipped = _attend(
                q,
                k_ptr,
                v_ptr,
                kv_index_ptr,
                k_scale_ptr,
                kept_ptr,
                k_mean_ptr,
                v_mean_ptr,
                k_mean_scale_ptr,
                counts_ptr,
                row_scale,
                row_alive,
                threshold,
                keys,
                S,
                P,
                D,
                BLOCK_D,
                N,
                BLOCK_N,
                KEY_GROUP,
                1,
                K_RUN,
                GATE,
                GATE_ROWS,
                False,
            )

    # a row without keys: zeros and -inf. NaN is no zero, and stays.
    has_keys = row_sum != 0
    row_sum = tl.where(has_keys, row_sum, 1.0)
    out = acc / row_sum[:, None]
    if q_scale_ptr is not None:
        out = tl.where((has_keys & (shift != shift))[:, None], float("nan"), out)
    tl.store(
        out_ptr + off_q,
        out.to(out_ptr.dtype.element_ty),
        mask=row_alive[:, None] & dim_alive[None, :],
    )
    natural = (row_max + shift + tl.log2(row_sum)) * LN_2
    tl.store(lse_ptr + base + row, tl.where(has_keys, natural, -float("inf")), mask=row_alive)
    if skipped_ptr is not None:
        tl.store(skipped_ptr + entry, tl.sum(tl.where(row_alive, skipped, 0), 0))


def largest_step(shared: int) -> int:
    """Keys of a step, as many as ``shared`` bytes a program leave room for."""
    return 128 if shared >= LARGE_SHARED_BYTES else 64


def step_and_warps(capability: tuple[int, int], shared: int) -> tuple[int, int]:
    """Keys of a step and warps of a program, by compute capability and shared memory.

    On Hopper two programs of 4 warps share a multiprocessor, one in its softmax while the other
    multiplies: 454 kept TFLOP/s on an H200 where one of 8 warps kept 347.
    """
    if capability[0] == 9:
        return 64, 4
    return largest_step(shared), 8


def keys_of_a_gate(device: torch.device) -> int:
    """The most keys that a gate can skip at once: those of the largest step."""
    return largest_step(device_facts(device).shared_bytes)


def _launch(device: torch.device, gate: Gate | None) -> tuple[int, int]:
    """Keys of a step and warps of a program for a call."""
    if gate is not None:
        # a step is a piece: its product with V is left out as one. 4 warps would spill the gate.
        return gate.keys, 8
    facts = device_facts(device)
    return step_and_warps(facts.capability, facts.shared_bytes)


def triton_attention(
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
    means: KeyMeans | None = None,
    skipped: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Launch the kernel; see ``sparse_attention`` for the arguments."""
    batch, heads, tokens, dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, heads, tokens, dtype=torch.float32, device=q.device)
    blocks = q_tiles.shape[2]
    rows = q_tiles.shape[3] * tile[0]
    if quantized is not None:
        q, k = quantized.q, quantized.k
    thresholds = kept = None
    step, warps = _launch(q.device, gate)
    if gate is not None:
        thresholds = gate.thresholds(q, -(-tokens // tile[0])).contiguous()
        if isinstance(gate, AbsoluteGate) and gate.keep is not None:
            kept = kept_pieces(gate.keep, kv_count, tile[1], step).contiguous()
    # triton launches on the current device, which need not be the one that holds the tensors.
    with torch.cuda.device_of(q):  # type: ignore[no-untyped-call]
        gather_attention_kernel[(blocks * batch * heads,)](
            q.contiguous(),
            k.contiguous(),
            v.contiguous(),
            out,
            lse,
            *tables(q_tiles, kv_count, kv_index, quantized),
            thresholds,
            kept,
            skipped,
            *tables_of_means(means),
            tokens,
            blocks,
            kv_index.shape[-1],
            0 if means is None else means.groups,
            0 if means is None else means.counts.shape[-1],
            batch * heads,
            heads_together(batch * heads, 2 * tokens * dim * v.element_size()),
            scale * LOG2_E.value,
            D=dim,
            BLOCK_D=triton.next_power_of_2(dim),
            M=tile[0],
            N=tile[1],
            BLOCK_M=rows,
            BLOCK_N=step,
            KEY_GROUP=KEY_GROUP,
            STAGES=STAGES,
            Q_RUN=1 if quantized is None else quantized.q_run,
            K_RUN=1 if quantized is None else quantized.k_run,
            GATE=gate_kind(gate),
            GATE_ROWS=0 if gate is None else gate.rows,
            ANCHORED=is_anchored(gate, out.dtype),
            num_warps=warps,
        )
    return out, lse
