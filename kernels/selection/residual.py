"""The error that means would leave, block by chunk, and the chunks where it is largest.

Shape legend: B batch, H heads, S tokens, D head dim, M rows of a query tile, R query tiles of a
block, N keys of a chunk, TQ = ceil(S / M) query tiles, TK = ceil(S / N) chunks, G blocks.

``vidsparse.residual.error_of_means`` is the definition. For a query tile and a chunk of n keys,
from means and variances of every channel alone, with c the scale of the scores:

    σ² = c² Σ_d (q² + var q) var k          spread of the logits inside the chunk
    b  = σ²/2, from σ² = 2 ln n on σ sqrt(2 ln n) - ln n
    l  = c q·k + ln n + b
    p  = min(exp(l) / Σ exp(l_g), 1),  o = Σ exp(l_g) v_g / Σ exp(l_g)
    E  = rows p² ((min(e^σ², n) - 1) / n var v + (1 - e^-b)² |v - o|²)

The sums are over groups g of larger size, in a pass of their own. E is the squared error to expect
of a mean in the chunk's place: values that go with the logits are the first term, mass that a mean
misses the second. A block's score of a chunk is the sum of its tiles' E.

Products are in 16 bits and sums in fp32: a choice needs no more. Nor does it need scores in more
than the leading 15 bits of a number in fp32, which order as it does.
"""

# what triton compiles is not typed python.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ..hardware import device_facts
from ..logarithms import LOG2_E
from ..tokens.moments import Moments

OUTPUT_TILES = 64
OUTPUT_GROUPS = 32
OUTPUT_WARPS = 4
SCORE_TILES = 64
# two stages of 32 chunks beside the query tiles want less than the 99 KiB at D = 128 that every GPU
# has. With 64 a program of twice the warps took 18 % longer on an H200.
SCORE_CHUNKS = 32
# steps of chunks that a program takes with the same query tiles.
SCORE_STEPS = 30
SCORE_WARPS = 4
SCORE_STAGES = 2
TOP_WARPS = 4
# of the second piece of a row: a few for every thread.
LEAST_BEHIND = 512


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
    """Of query tiles and chunks the logits, what spreads add to them, spreads; ln n of the chunks.

    All in powers of two, in which the hardware counts.
    """
    off_d = tl.arange(0, BLOCK_D)
    there = (chunk < TK)[:, None] & (off_d < D)[None, :]
    off = chunk[:, None] * D + off_d[None, :]
    k = tl.load(k_ptr + off, mask=there, other=0.0)
    k_variance = tl.load(k_variance_ptr + off, mask=there, other=0.0)
    spread = tl.dot(q_square, tl.trans(k_variance)) * (scale * scale * LOG2_E)
    # the last one may be short.
    last = (S - 1) // N
    whole = tl.log2(tl.full([], N, dtype=tl.float32))
    most = tl.where(chunk == last, tl.log2((S - last * N).to(tl.float32)), whole)
    # n numbers have no tail beyond sqrt(2 ln n) deviations.
    twice = 2.0 * most[None, :]
    frozen = tl.sqrt(twice * spread) - most[None, :]
    gained = tl.where(spread < twice, 0.5 * spread, frozen)
    logits = tl.dot(q, tl.trans(k)) * (scale * LOG2_E) + (most[None, :] + gained)
    return logits, gained, spread, most


@triton.jit
def outputs_kernel(
    q_ptr,
    q_square_ptr,
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
    """o and the logarithm (to 2) of the sum of exponentials, of BLOCK_Q query tiles of a head."""
    head = tl.program_id(1).to(tl.int64)
    tile = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    off_d = tl.arange(0, BLOCK_D)
    off = (head * TQ + tile)[:, None] * D + off_d[None, :]
    there = (tile < TQ)[:, None] & (off_d < D)[None, :]
    q = tl.load(q_ptr + off, mask=there, other=0.0)
    q_square = tl.load(q_square_ptr + off, mask=there, other=0.0)
    k_ptr += head * TK * D
    k_variance_ptr += head * TK * D
    v_ptr += head * TK * D
    largest = tl.full([BLOCK_Q], -1.0e30, dtype=tl.float32)
    total = tl.zeros([BLOCK_Q], dtype=tl.float32)
    acc = tl.zeros([BLOCK_Q, BLOCK_D], dtype=tl.float32)
    for first in tl.range(0, TK, BLOCK_K, num_stages=STAGES):
        group = first + tl.arange(0, BLOCK_K)
        logits, _, _, _ = _logits(
            q, q_square, k_ptr, k_variance_ptr, group, TK, S, scale, D, BLOCK_D, N
        )
        logits = tl.where((group < TK)[None, :], logits, -float("inf"))
        new_largest = tl.maximum(largest, tl.max(logits, 1))
        weights = tl.exp2(logits - new_largest[:, None])
        rescale = tl.exp2(largest - new_largest)
        v = tl.load(
            v_ptr + group[:, None] * D + off_d[None, :],
            mask=(group < TK)[:, None] & (off_d < D)[None, :],
            other=0.0,
        )
        total = total * rescale + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None])
        largest = new_largest
    tl.store(out_ptr + off, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=there)
    tl.store(lse_ptr + head * TQ + tile, largest + tl.log2(total), mask=tile < TQ)


@triton.jit
def _places(BLOCK_Q: tl.constexpr, R: tl.constexpr):
    """The order in which 64 tiles are taken, so that a block's R are in few threads.

    A thread has rows g and g + 8 of the 16 of its warp: two tiles of a block go there, and to its
    neighbours if there are more of them.
    """
    tl.static_assert(BLOCK_Q == 64)
    # one end: what stands behind a branch that returns is compiled all the same.
    place = tl.arange(0, BLOCK_Q)
    if R > 1:
        NEAR: tl.constexpr = R // 2
        warp, upper, lane = place // 16, place // 8 % 2, place % 8
        block = warp * (8 // NEAR) + lane // NEAR
        place = block * R + upper + 2 * (lane % NEAR)
    return place


@triton.jit
def _of_blocks(error, BLOCK_Q: tl.constexpr, R: tl.constexpr, BLOCK_K: tl.constexpr):
    """Sums over the R tiles of each block of what ``_places`` has put in order."""
    if R > 1:
        NEAR: tl.constexpr = R // 2
        error = tl.reshape(error, [4, 2, 8 // NEAR, NEAR, BLOCK_K])
        error = tl.sum(tl.sum(error, 1), 2)
        error = tl.reshape(error, [BLOCK_Q // R, BLOCK_K])
    return error


# a pitch known to be a multiple of 16 has what is stored brought together first, at a tenth more.
@triton.jit(do_not_specialize=["PITCH"])
def residual_kernel(
    q_ptr,
    q_square_ptr,
    k_ptr,
    k_variance_ptr,
    v_ptr,
    v_variance_ptr,
    v_square_ptr,
    out_ptr,
    lse_ptr,
    ranks_ptr,
    TQ,
    TK,
    PITCH,
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
    tile = tl.program_id(0) * BLOCK_Q + _places(BLOCK_Q, R)
    block = tl.program_id(0) * (BLOCK_Q // R) + tl.arange(0, BLOCK_Q // R)
    off_d = tl.arange(0, BLOCK_D)
    off = (head * TQ + tile)[:, None] * D + off_d[None, :]
    there = (tile < TQ)[:, None] & (off_d < D)[None, :]
    q = tl.load(q_ptr + off, mask=there, other=0.0)
    q_square = tl.load(q_square_ptr + off, mask=there, other=0.0)
    out = tl.load(out_ptr + off, mask=there, other=0.0)
    out_square = tl.sum(out.to(tl.float32) * out.to(tl.float32), 1)
    lse = tl.load(lse_ptr + head * TQ + tile, mask=tile < TQ, other=0.0)
    # in the place of a factor on the squared share.
    most_share = 0.5 * tl.log2(tl.maximum(tl.minimum(S - tile * M, M), 0).to(tl.float32))
    lse -= most_share
    k_ptr += head * TK * D
    k_variance_ptr += head * TK * D
    v_ptr += head * TK * D
    v_variance_ptr += head * TK
    v_square_ptr += head * TK
    ranks_ptr += head * G * PITCH
    begin = tl.program_id(1) * (STEPS * BLOCK_K)
    for first in tl.range(
        begin, tl.minimum(begin + STEPS * BLOCK_K, TK), BLOCK_K, num_stages=STAGES
    ):
        chunk = first + tl.arange(0, BLOCK_K)
        logits, gained, spread, most = _logits(
            q, q_square, k_ptr, k_variance_ptr, chunk, TK, S, scale, D, BLOCK_D, N
        )
        v = tl.load(
            v_ptr + chunk[:, None] * D + off_d[None, :],
            mask=(chunk < TK)[:, None] & (off_d < D)[None, :],
            other=0.0,
        )
        v_variance = tl.load(v_variance_ptr + chunk, mask=chunk < TK, other=0.0)
        v_square = tl.load(v_square_ptr + chunk, mask=chunk < TK, other=0.0)
        away = out_square[:, None] + v_square[None, :] - 2.0 * tl.dot(out, tl.trans(v))
        # a chunk may stand out of its group: no share is above 1.
        share = tl.exp2(tl.minimum(logits - lse[:, None], most_share[:, None]))
        # of each of the n keys.
        v_variance = v_variance * tl.exp2(-most)
        inside = tl.exp2(tl.minimum(spread, most[None, :])) - 1.0
        missed = 1.0 - tl.exp2(-gained)
        error = inside * v_variance[None, :] + missed * missed * tl.maximum(away, 0.0)
        error = _of_blocks(error * (share * share), BLOCK_Q, R, BLOCK_K)
        # not negative: bit patterns rise with the numbers.
        rank = (error.to(tl.int32, bitcast=True) >> 16).to(tl.int16)
        tl.store(
            ranks_ptr + block[:, None] * PITCH + chunk[None, :],
            rank,
            mask=(block < G)[:, None] & (chunk < TK)[None, :],
        )


@triton.jit
def _load_pairs(pairs_ptr, first, OPEN_CHUNKS, PAIRS: tl.constexpr):
    """Ranks of chunks in pairs, a bit above each; zeros for what is not to be chosen."""
    chunk = first + 2 * tl.arange(0, PAIRS)
    pair = tl.load(pairs_ptr + chunk // 2, mask=chunk < OPEN_CHUNKS, other=0)
    pair = tl.where(chunk + 1 < OPEN_CHUNKS, pair, pair & 0xFFFF)
    return pair.to(tl.uint32, bitcast=True) | 0x80008000


@triton.jit
def _reached(pairs, rank):
    """For both of a pair whether it has at least ``rank``: bits 0 and 16.

    What is taken off leaves the bit above a rank alone where the rank is larger, and never reaches
    the other of a pair.
    """
    return ((pairs - rank * 0x10001) >> 15) & 0x10001


@triton.jit
def _how_many(pairs, behind, rank):
    """Chunks of at least ``rank`` in both pieces of a row, of which the second may be None."""
    both = _reached(pairs, rank)
    if behind is not None:
        MORE: tl.constexpr = behind.shape[0]
        # every thread adds its own first: what costs is adding up over threads.
        both = tl.sum(tl.reshape(both, [both.shape[0] // MORE, MORE]), 0)
        both += _reached(behind, rank)
    count = tl.sum(both, 0)
    return ((count & 0xFFFF) + (count >> 16)).to(tl.int32)


@triton.jit
def _words_of(pairs, rank, PAIRS: tl.constexpr):
    """A bit for every chunk of at least ``rank``, in words of 32."""
    each = _reached(pairs, rank)
    place = (2 * tl.arange(0, 16)).to(tl.uint32)[None, :]
    bits = tl.reshape(each | (each >> 15), [PAIRS // 16, 16]) & 3
    return tl.sum(bits << place, 1)


@triton.jit
def _first_bits(count):
    """The lowest ``count`` bits of a word, from none to all 32."""
    count = tl.minimum(tl.maximum(count, 0), 32)
    some = (tl.full([], 1, tl.uint32) << tl.minimum(count, 31).to(tl.uint32)) - 1
    return tl.where(count == 32, 0xFFFFFFFF, some)


@triton.jit
def _set_bits(word):
    """How many bits of a word are set."""
    word -= (word >> 1) & 0x55555555
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return ((word * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _store_kept(
    pairs, low, spare, whole, words_ptr, first, TK, W, OPEN_CHUNKS, PAIRS: tl.constexpr
):
    """Write the bits of chunks that are kept; how many those are, and how many equal ``low``."""
    number = tl.arange(0, PAIRS // 16)
    begin = first + 32 * number
    above = _words_of(pairs, low + 1, PAIRS)
    opened = _first_bits(OPEN_CHUNKS - begin)
    equal = (_words_of(pairs, low, PAIRS) ^ above) & opened
    equals = _set_bits(equal)
    left = spare - (tl.cumsum(equals, 0) - equals)
    # one word may have too many: of it the first ones.
    cut = (left > 0) & (left < equals)
    cut_word = tl.sum(tl.where(cut, equal, 0), 0)
    cut_left = tl.sum(tl.where(cut, left, 0), 0)
    place = tl.zeros([], dtype=tl.int32)
    for i in tl.static_range(5):
        further = place + (16 >> i)
        fits = _set_bits(cut_word & _first_bits(further)) <= cut_left
        place = tl.where(fits, further, place)
    some = tl.where(cut, cut_word & _first_bits(place), 0)
    kept = above | tl.where(equals <= left, equal, some)
    kept = (kept | tl.where(whole, 0xFFFFFFFF, opened ^ 0xFFFFFFFF)) & _first_bits(TK - begin)
    word = first // 32 + number
    tl.store(words_ptr + word, kept.to(tl.int32, bitcast=True), mask=word < W)
    return tl.sum(_set_bits(kept), 0), tl.sum(equals, 0)


@triton.jit
def largest_kernel(
    pairs_ptr,
    kept_ptr,
    words_ptr,
    count_ptr,
    TK,
    PITCH,
    W,
    G,
    H,
    OPEN_CHUNKS,
    OPEN_BLOCKS,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
):
    """Bits of the chunks of largest rank in a block's row, and of all from OPEN_CHUNKS on.

    Every head has a number of them. Blocks from OPEN_BLOCKS on keep every chunk. Of equal ranks the
    first chunks are kept, so that all other blocks of a head keep the same number. A row is taken
    as FIRST chunks and SECOND behind them, of which there may be none; two ranks are a number, so
    that both are compared at once.
    """
    entry = tl.program_id(0).to(tl.int64)
    wanted = tl.load(kept_ptr + entry // G % H)
    pairs_ptr += entry * (PITCH // 2)
    words_ptr += entry * W
    pairs = _load_pairs(pairs_ptr, 0, OPEN_CHUNKS, FIRST // 2)
    behind = None
    if SECOND > 0:
        behind = _load_pairs(pairs_ptr, FIRST, OPEN_CHUNKS, SECOND // 2)
    low = tl.zeros([], dtype=tl.uint32)
    # the largest rank that so many chunks reach, bit by bit.
    for i in tl.static_range(15):
        tried = low + (1 << (14 - i))
        low = tl.where(_how_many(pairs, behind, tried) >= wanted, tried, low)
    spare = wanted - _how_many(pairs, behind, low + 1)
    whole = entry % G >= OPEN_BLOCKS
    count, equal = _store_kept(
        pairs, low, spare, whole, words_ptr, 0, TK, W, OPEN_CHUNKS, FIRST // 2
    )
    if SECOND > 0:
        more, _ = _store_kept(
            behind, low, spare - equal, whole, words_ptr, FIRST, TK, W, OPEN_CHUNKS, SECOND // 2
        )
        count += more
    tl.store(count_ptr + entry, count)


def residual_ranks(
    q: Moments, k: Moments, v: Moments, groups: tuple[Moments, Tensor], per_block: int, scale: float
) -> Tensor:
    """What the scores of all blocks and chunks rank by, int16 ``[B, H, G, TK]``.

    Rows begin on multiples of 32 bytes.

    Args:
        q: moments of query tiles, about zero in every channel.
        k: moments of chunks, variances of every channel.
        v: moments of chunks, variances summed over channels.
        groups: what o and the softmax's sum are of: moments of keys like those of ``k``, and means
            of values, of larger groups of tokens.
        per_block: query tiles of a block, a divisor of 64; they are neighbours.
        scale: factor on q·k.
    """
    batch, heads, q_tiles, dim = q.mean.shape
    chunks = k.mean.shape[2]
    blocks = triton.cdiv(q_tiles, per_block)
    out = torch.empty_like(q.mean)
    lse = q.mean.new_empty(batch, heads, q_tiles, dtype=torch.float32)
    pitch = _pitch(chunks)
    ranks = q.mean.new_empty(batch, heads, blocks, pitch, dtype=torch.int16)
    block_d = triton.next_power_of_2(dim)
    sizes = {"D": dim, "BLOCK_D": block_d}
    k_groups, v_means = groups
    with torch.cuda.device_of(ranks):  # type: ignore[no-untyped-call]
        outputs_kernel[(triton.cdiv(q_tiles, OUTPUT_TILES), batch * heads)](
            q.mean,
            q.variance,
            k_groups.mean,
            k_groups.variance,
            v_means,
            out,
            lse,
            q_tiles,
            v_means.shape[2],
            q.tokens,
            scale,
            N=k_groups.size,
            BLOCK_Q=OUTPUT_TILES,
            BLOCK_K=OUTPUT_GROUPS,
            STAGES=output_stages(device_facts(ranks.device).shared_bytes, block_d),
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
            v.square,
            out,
            lse,
            ranks,
            q_tiles,
            chunks,
            pitch,
            blocks,
            q.tokens,
            scale,
            M=q.size,
            N=k.size,
            R=per_block,
            BLOCK_Q=SCORE_TILES,
            BLOCK_K=SCORE_CHUNKS,
            STEPS=SCORE_STEPS,
            STAGES=SCORE_STAGES,
            num_warps=SCORE_WARPS,
            **sizes,
        )
    return ranks[..., :chunks]


def output_stages(shared: int, block_d: int) -> int:
    """Groups of keys in flight, by the bytes of shared memory that a program can have.

    A third takes a sixth off the time on an H200.
    """
    # q and its squares; keys, their variances and values; in 16 bits, and a little beside.
    tiles, groups = 2 * OUTPUT_TILES, 3 * OUTPUT_GROUPS
    return 3 if 2 * block_d * (tiles + 3 * groups) + 8192 <= shared else 2


def _pitch(chunks: int) -> int:
    return -(-chunks // 16) * 16


def _in_two(chunks: int) -> tuple[int, int]:
    """Two powers of two that are enough for so many chunks, the second zero if one is.

    With one alone up to half of a row would be nothing.
    """
    whole = max(32, triton.next_power_of_2(chunks))
    rest = chunks - whole // 2
    if whole <= 2 * LEAST_BEHIND or rest > whole // 4:
        return whole, 0
    return whole // 2, max(LEAST_BEHIND, triton.next_power_of_2(rest))


def largest_chunks(
    ranks: Tensor, kept: Tensor, open_chunks: int, open_blocks: int
) -> tuple[Tensor, Tensor]:
    """The chunks of largest rank in every row of ``ranks`` ``[B, H, G, TK]``, none negative.

    ``kept`` int32 ``[H]`` says how many of every head. They are chosen from the first
    ``open_chunks``; those behind are kept, too, and so are all chunks of blocks from
    ``open_blocks`` on.

    Returns:
        Bits, int32 ``[B, H, G, ceil(TK / 32)]``, and how many are set, int32 ``[B, H, G]``.
    """
    batch, heads, blocks, chunks = ranks.shape
    width = triton.cdiv(chunks, 32)
    first, second, pitch = *_in_two(chunks), _pitch(chunks)
    # counts of both of a pair share a number.
    assert first < 2**17
    if ranks.stride() != (heads * blocks * pitch, blocks * pitch, pitch, 1):
        ranks = F.pad(ranks.contiguous(), (0, pitch - chunks))
    words = torch.empty(batch, heads, blocks, width, dtype=torch.int32, device=ranks.device)
    count = torch.empty(batch, heads, blocks, dtype=torch.int32, device=ranks.device)
    with torch.cuda.device_of(ranks):  # type: ignore[no-untyped-call]
        largest_kernel[(batch * heads * blocks,)](
            ranks.as_strided((batch, heads, blocks, pitch), ranks.stride()).view(torch.int32),
            kept,
            words,
            count,
            chunks,
            pitch,
            width,
            blocks,
            heads,
            open_chunks,
            open_blocks,
            FIRST=first,
            SECOND=second,
            num_warps=TOP_WARPS,
        )
    return words, count
