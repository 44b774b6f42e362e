"""The error that means would leave, block by chunk, and the chunks where it is largest.

Shape legend: B batch, H heads, S tokens, D head dim, M rows of a query tile, R query tiles of a
block, N keys of a chunk, TQ = ceil(S / M) query tiles, TK = ceil(S / N) chunks, G blocks.

``vidsparse.residual.error_of_means`` is the definition. For a query tile and a chunk of n keys,
from means and variances of every channel alone, with c the scale of the scores:

    σ² = c² Σ_d (q² + var q) var k          spread of the logits inside the chunk
    b  = σ²/2, from σ² = 2 ln n on σ sqrt(2 ln n) - ln n
    p  = softmax(c q·k + ln n + b),  o = Σ p v
    E  = rows p² ((min(e^σ², n) - 1) / n var v + (1 - e^-b)² |v - o|²)

E is the squared error to expect of a mean in the chunk's place: values that go with the logits are
the first term, mass that a mean misses the second. A block's score of a chunk is the sum of its
tiles' E.

Products are in 16 bits and sums in fp32: a choice needs no more. Nor does it need scores in more
than the leading 15 bits of a number in fp32, which order as it does.
"""

# what triton compiles is not typed python.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..tokens.moments import Moments

OUTPUT_TILES = 32
OUTPUT_CHUNKS = 64
OUTPUT_WARPS = 4
SCORE_TILES = 64
# two stages of 32 chunks beside the query tiles want 89 KiB at D = 128, which every GPU has. With
# 64 a program of twice the warps took 13 % longer on an H100.
SCORE_CHUNKS = 32
# steps of chunks that a program takes with the same query tiles.
SCORE_STEPS = 16
SCORE_WARPS = 4
STAGES = 2
TOP_WARPS = 8


@triton.jit
def _logits(
    q,
    q_square,
    k_ptr,
    k_variance_ptr,
    chunk,
    TK,
    S,
    scale,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    N: tl.constexpr,
):
    """Logits of query tiles and chunks, what spreads add to them, spreads, keys of the chunks."""
    off_d = tl.arange(0, BLOCK_D)
    there = (chunk < TK)[:, None] & (off_d < D)[None, :]
    off = chunk[:, None] * D + off_d[None, :]
    k = tl.load(k_ptr + off, mask=there, other=0.0)
    k_variance = tl.load(k_variance_ptr + off, mask=there, other=0.0)
    spread = tl.dot(q_square, tl.trans(k_variance)) * (scale * scale)
    keys = tl.maximum(tl.minimum(S - chunk * N, N), 1).to(tl.float32)
    most = tl.log(keys)[None, :]
    # n numbers have no tail beyond sqrt(2 ln n) deviations.
    frozen = tl.sqrt(2.0 * most * spread) - most
    gained = tl.where(spread < 2.0 * most, 0.5 * spread, frozen)
    return tl.dot(q, tl.trans(k)) * scale + most + gained, gained, spread, keys


@triton.jit
def _square(q, q_variance):
    wide = q.to(tl.float32)
    return (wide * wide + q_variance.to(tl.float32)).to(q_variance.dtype)


@triton.jit
def outputs_kernel(
    q_ptr,
    q_variance_ptr,
    k_ptr,
    k_variance_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    TQ,
    TK,
    S,
    scale,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    N: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """o and the log-sum-exp of the logits of BLOCK_Q query tiles of one head."""
    head = tl.program_id(1).to(tl.int64)
    tile = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    off_d = tl.arange(0, BLOCK_D)
    off = (head * TQ + tile)[:, None] * D + off_d[None, :]
    there = (tile < TQ)[:, None] & (off_d < D)[None, :]
    q = tl.load(q_ptr + off, mask=there, other=0.0)
    q_square = _square(q, tl.load(q_variance_ptr + off, mask=there, other=0.0))
    k_ptr += head * TK * D
    k_variance_ptr += head * TK * D
    v_ptr += head * TK * D
    largest = tl.full([BLOCK_Q], -1.0e30, dtype=tl.float32)
    total = tl.zeros([BLOCK_Q], dtype=tl.float32)
    acc = tl.zeros([BLOCK_Q, BLOCK_D], dtype=tl.float32)
    for first in tl.range(0, TK, BLOCK_K, num_stages=STAGES):
        chunk = first + tl.arange(0, BLOCK_K)
        logits, _, _, _ = _logits(
            q, q_square, k_ptr, k_variance_ptr, chunk, TK, S, scale, D, BLOCK_D, N
        )
        logits = tl.where((chunk < TK)[None, :], logits, -float("inf"))
        new_largest = tl.maximum(largest, tl.max(logits, 1))
        weights = tl.exp(logits - new_largest[:, None])
        rescale = tl.exp(largest - new_largest)
        v = tl.load(
            v_ptr + chunk[:, None] * D + off_d[None, :],
            mask=(chunk < TK)[:, None] & (off_d < D)[None, :],
            other=0.0,
        )
        total = total * rescale + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None])
        largest = new_largest
    tl.store(out_ptr + off, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=there)
    tl.store(lse_ptr + head * TQ + tile, largest + tl.log(total), mask=tile < TQ)


@triton.jit
def residual_kernel(
    q_ptr,
    q_variance_ptr,
    k_ptr,
    k_variance_ptr,
    v_ptr,
    v_variance_ptr,
    out_ptr,
    lse_ptr,
    ranks_ptr,
    TQ,
    TK,
    G,
    S,
    scale,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STEPS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Ranks of STEPS * BLOCK_K chunks for the blocks of BLOCK_Q query tiles of one head."""
    head = tl.program_id(2).to(tl.int64)
    tile = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    block = tl.program_id(0) * (BLOCK_Q // R) + tl.arange(0, BLOCK_Q // R)
    off_d = tl.arange(0, BLOCK_D)
    off = (head * TQ + tile)[:, None] * D + off_d[None, :]
    there = (tile < TQ)[:, None] & (off_d < D)[None, :]
    q = tl.load(q_ptr + off, mask=there, other=0.0)
    q_square = _square(q, tl.load(q_variance_ptr + off, mask=there, other=0.0))
    out = tl.load(out_ptr + off, mask=there, other=0.0)
    out_square = tl.sum(out.to(tl.float32) * out.to(tl.float32), 1)
    lse = tl.load(lse_ptr + head * TQ + tile, mask=tile < TQ, other=0.0)
    rows = tl.maximum(tl.minimum(S - tile * M, M), 0).to(tl.float32)
    k_ptr += head * TK * D
    k_variance_ptr += head * TK * D
    v_ptr += head * TK * D
    v_variance_ptr += head * TK
    ranks_ptr += head * G * TK
    begin = tl.program_id(1) * (STEPS * BLOCK_K)
    for first in tl.range(
        begin, tl.minimum(begin + STEPS * BLOCK_K, TK), BLOCK_K, num_stages=STAGES
    ):
        chunk = first + tl.arange(0, BLOCK_K)
        logits, gained, spread, keys = _logits(
            q, q_square, k_ptr, k_variance_ptr, chunk, TK, S, scale, D, BLOCK_D, N
        )
        v = tl.load(
            v_ptr + chunk[:, None] * D + off_d[None, :],
            mask=(chunk < TK)[:, None] & (off_d < D)[None, :],
            other=0.0,
        )
        v_variance = tl.load(v_variance_ptr + chunk, mask=chunk < TK, other=0.0)
        v_square = tl.sum(v.to(tl.float32) * v.to(tl.float32), 1)
        away = out_square[:, None] + v_square[None, :] - 2.0 * tl.dot(out, tl.trans(v))
        share = tl.exp(logits - lse[:, None])
        most = tl.log(keys)[None, :]
        inside = (tl.exp(tl.minimum(spread, most)) - 1.0) / keys[None, :]
        missed = 1.0 - tl.exp(-gained)
        error = inside * v_variance[None, :] + missed * missed * tl.maximum(away, 0.0)
        error = error * share * share * rows[:, None]
        if R > 1:
            error = tl.sum(tl.reshape(error, [BLOCK_Q // R, R, BLOCK_K]), 1)
        # not negative: bit patterns rise with the numbers.
        rank = (error.to(tl.int32, bitcast=True) >> 16).to(tl.int16)
        tl.store(
            ranks_ptr + block[:, None] * TK + chunk[None, :],
            rank,
            mask=(block < G)[:, None] & (chunk < TK)[None, :],
        )


@triton.jit
def largest_kernel(
    ranks_ptr,
    kept_ptr,
    words_ptr,
    count_ptr,
    TK,
    W,
    G,
    H,
    OPEN_CHUNKS,
    OPEN_BLOCKS,
    BLOCK_K: tl.constexpr,
):
    """Bits of the chunks of largest rank in a block's row, and of all from OPEN_CHUNKS on.

    Every head has a number of them. Blocks from OPEN_BLOCKS on keep every chunk. Of equal ranks the
    first chunks are kept, so that all other blocks of a head keep the same number.
    """
    entry = tl.program_id(0).to(tl.int64)
    wanted = tl.load(kept_ptr + entry // G % H)
    off = tl.arange(0, BLOCK_K)
    chosen = off < OPEN_CHUNKS
    # what is not there never reaches a threshold.
    rank = tl.load(ranks_ptr + entry * TK + off, mask=chosen, other=-1).to(tl.int32)
    low = tl.zeros([], dtype=tl.int32)
    # the largest rank that so many chunks reach, two bits at a time: three counts in one sum.
    for i in tl.static_range(8):
        at = (rank - low) >> (14 - 2 * i)
        reached = (
            (at >= 1).to(tl.int64) + ((at >= 2).to(tl.int64) << 21) + ((at >= 3).to(tl.int64) << 42)
        )
        total = tl.sum(reached, 0)
        mask = (1 << 21) - 1
        steps = ((total & mask) >= wanted).to(tl.int32)
        steps += (((total >> 21) & mask) >= wanted).to(tl.int32)
        steps += ((total >> 42) >= wanted).to(tl.int32)
        low += steps << (14 - 2 * i)
    above = rank > low
    equal = rank == low
    spare = wanted - tl.sum(above.to(tl.int32), 0)
    kept = above | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= spare))
    kept = kept | (entry % G >= OPEN_BLOCKS) | (off >= OPEN_CHUNKS)
    kept = kept & (off < TK)
    tl.store(count_ptr + entry, tl.sum(kept.to(tl.int32), 0))
    bits = tl.reshape(kept.to(tl.int32), [BLOCK_K // 32, 32]) << tl.arange(0, 32)[None, :]
    word = tl.arange(0, BLOCK_K // 32)
    tl.store(words_ptr + entry * W + word, tl.sum(bits, 1), mask=word < W)


def residual_ranks(q: Moments, k: Moments, v: Moments, per_block: int, scale: float) -> Tensor:
    """What the scores of all blocks and chunks rank by, int16 ``[B, H, G, TK]``.

    Args:
        q: moments of query tiles, variances of every channel.
        k: the same of chunks.
        v: moments of chunks, variances summed over channels.
        per_block: query tiles of a block, a divisor of 64; they are neighbours.
        scale: factor on q·k.
    """
    batch, heads, q_tiles, dim = q.mean.shape
    chunks = k.mean.shape[2]
    blocks = triton.cdiv(q_tiles, per_block)
    out = torch.empty_like(q.mean)
    lse = q.mean.new_empty(batch, heads, q_tiles, dtype=torch.float32)
    ranks = q.mean.new_empty(batch, heads, blocks, chunks, dtype=torch.int16)
    sizes = {"D": dim, "BLOCK_D": triton.next_power_of_2(dim), "N": k.size, "STAGES": STAGES}
    with torch.cuda.device_of(ranks):  # type: ignore[no-untyped-call]
        outputs_kernel[(triton.cdiv(q_tiles, OUTPUT_TILES), batch * heads)](
            q.mean,
            q.variance,
            k.mean,
            k.variance,
            v.mean,
            out,
            lse,
            q_tiles,
            chunks,
            q.tokens,
            scale,
            BLOCK_Q=OUTPUT_TILES,
            BLOCK_K=OUTPUT_CHUNKS,
            num_warps=OUTPUT_WARPS,
            **sizes,
        )
        rows = triton.cdiv(q_tiles, SCORE_TILES)
        columns = triton.cdiv(chunks, SCORE_STEPS * SCORE_CHUNKS)
        residual_kernel[(rows, columns, batch * heads)](
            q.mean,
            q.variance,
            k.mean,
            k.variance,
            v.mean,
            v.variance,
            out,
            lse,
            ranks,
            q_tiles,
            chunks,
            blocks,
            q.tokens,
            scale,
            M=q.size,
            R=per_block,
            BLOCK_Q=SCORE_TILES,
            BLOCK_K=SCORE_CHUNKS,
            STEPS=SCORE_STEPS,
            num_warps=SCORE_WARPS,
            **sizes,
        )
    return ranks


def largest_chunks(
    ranks: Tensor, kept: Tensor, open_chunks: int, open_blocks: int
) -> tuple[Tensor, Tensor]:
    """The chunks of largest rank in every row of ``ranks`` ``[B, H, G, TK]``.

    ``kept`` int32 ``[H]`` says how many of every head. They are chosen from the first
    ``open_chunks``; those behind are kept, too, and so are all chunks of blocks from
    ``open_blocks`` on.

    Returns:
        Bits, int32 ``[B, H, G, ceil(TK / 32)]``, and how many are set, int32 ``[B, H, G]``.
    """
    batch, heads, blocks, chunks = ranks.shape
    width = triton.cdiv(chunks, 32)
    words = torch.empty(batch, heads, blocks, width, dtype=torch.int32, device=ranks.device)
    count = torch.empty(batch, heads, blocks, dtype=torch.int32, device=ranks.device)
    with torch.cuda.device_of(ranks):  # type: ignore[no-untyped-call]
        largest_kernel[(batch * heads * blocks,)](
            ranks,
            kept,
            words,
            count,
            chunks,
            width,
            blocks,
            heads,
            open_chunks,
            open_blocks,
            BLOCK_K=max(32, triton.next_power_of_2(chunks)),
            num_warps=TOP_WARPS,
        )
    return words, count
