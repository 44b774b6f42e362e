"""From a tile mask in bits to the work of a kernel: group query tiles, join, order, list.

Shape legend: B batch, H heads, T query tiles, W words of 32 key tiles, G blocks of R query tiles.

Bits stay bits until a kernel wants numbers: at 75,600 tokens, 40 heads and 16x16 tiles a plan's
bits are 14 MB and its lists of chunk numbers 223 MB.
"""

# what triton compiles is not typed python.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .bits import ones

GROUP_WORDS = 8
JOIN_WORDS = 256
LIST_WORDS = 64
RANK_BLOCKS = 1024
JOIN_WARPS = 1
ORDER_WARPS = 2
LIST_WARPS = 4
COUNT_GROUPS = 1024
COUNT_WARPS = 4


@triton.jit
def group_kernel(
    words_ptr,
    q_tiles_ptr,
    T,
    W,
    G,
    window,
    windows,
    R: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_W: tl.constexpr,
    RANK: tl.constexpr,
    NEVER: tl.constexpr,
):
    """Greedy grouping of one window of query tiles of one head by XOR distance.

    Only the distances from each block's first tile are ever needed, one row in R, so they are
    counted when their block is formed.
    """
    head = (tl.program_id(0) // windows).to(tl.int64)
    start = (tl.program_id(0) % windows) * window
    position = tl.arange(0, BLOCK_T)
    free = (position < window) & (start + position < T)
    words_ptr += (head * T + start) * W
    q_tiles_ptr += head * G * R
    off_w = tl.arange(0, BLOCK_W)
    off_row = position[:, None] * W

    for block in range(tl.cdiv(tl.minimum(window, T - start), R)):
        # the first free tile leads.
        leader = tl.min(tl.where(free, position, BLOCK_T), 0)
        counts = tl.zeros([BLOCK_T, BLOCK_W], dtype=tl.int32)
        for first in range(0, W, BLOCK_W):
            word = first + off_w
            own = tl.load(words_ptr + leader * W + word, mask=word < W, other=0)
            other = tl.load(
                words_ptr + off_row + word[None, :],
                mask=free[:, None] & (word < W)[None, :],
                other=0,
            )
            counts += ones(own[None, :] ^ other)
        # one number orders by distance first and position second. the leader's own distance is 0,
        # and tiles identical to it stand behind it.
        distance = tl.sum(counts, 1).to(RANK)
        rank = tl.where(free, distance * BLOCK_T + position, NEVER)
        for member in tl.static_range(R):
            best = tl.min(rank, 0)
            taken = (best % BLOCK_T).to(tl.int32)
            tile = tl.where(best == NEVER, -1, start + taken)
            tl.store(q_tiles_ptr + (start // R + block) * R + member, tile)
            rank = tl.where((position == taken) & (best != NEVER), NEVER, rank)
        free = free & (rank != NEVER)


@triton.jit
def join_kernel(
    words_ptr,
    q_tiles_ptr,
    joined_ptr,
    count_ptr,
    pairs_ptr,
    T,
    W,
    G,
    S,
    TK,
    M: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """The keys that any tile of a block keeps, how many they are, and the pairs they make."""
    entry = tl.program_id(0).to(tl.int64)
    head = entry // G
    words_ptr += head * T * W
    off_w = tl.arange(0, BLOCK_W)
    rows = tl.zeros([], dtype=tl.int32)
    for member in tl.static_range(R):
        tile = tl.load(q_tiles_ptr + entry * R + member)
        rows += tl.where(tile >= 0, tl.minimum(S - tile * M, M), 0)
    counts = tl.zeros([BLOCK_W], dtype=tl.int32)
    ends = tl.zeros([BLOCK_W], dtype=tl.int32)
    for first in range(0, W, BLOCK_W):
        word = first + off_w
        joined = tl.zeros([BLOCK_W], dtype=tl.int32)
        for member in tl.static_range(R):
            tile = tl.load(q_tiles_ptr + entry * R + member)
            there = (word < W) & (tile >= 0)
            joined |= tl.load(words_ptr + tile.to(tl.int64) * W + word, mask=there, other=0)
        tl.store(joined_ptr + entry * W + word, joined, mask=word < W)
        counts += ones(joined)
        # the last key tile, which may be short.
        ends += tl.where(word == (TK - 1) // 32, (joined >> ((TK - 1) % 32)) & 1, 0)
    count = tl.sum(counts, 0)
    keys = count * N - tl.sum(ends, 0) * (TK * N - S)
    tl.store(count_ptr + entry, count)
    tl.store(pairs_ptr + entry, keys.to(tl.int64) * rows)


@triton.jit
def longest_first_kernel(
    q_tiles_ptr,
    count_ptr,
    words_ptr,
    q_tiles_out_ptr,
    count_out_ptr,
    words_out_ptr,
    G,
    W,
    R: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Copy a block to its place among its head's blocks, the longest first, equals in order."""
    entry = tl.program_id(0).to(tl.int64)
    head = entry // G
    block = (entry % G).to(tl.int32)
    count = tl.load(count_ptr + entry)
    before = tl.zeros([BLOCK_G], dtype=tl.int32)
    for first in range(0, G, BLOCK_G):
        other = first + tl.arange(0, BLOCK_G)
        length = tl.load(count_ptr + head * G + other, mask=other < G, other=-1)
        before += ((length > count) | ((length == count) & (other < block))).to(tl.int32)
    place = head * G + tl.sum(before, 0)
    tl.store(count_out_ptr + place, count)
    member = tl.arange(0, R)
    tl.store(q_tiles_out_ptr + place * R + member, tl.load(q_tiles_ptr + entry * R + member))
    for first in range(0, W, BLOCK_W):
        word = first + tl.arange(0, BLOCK_W)
        x = tl.load(words_ptr + entry * W + word, mask=word < W, other=0)
        tl.store(words_out_ptr + place * W + word, x, mask=word < W)


@triton.jit
def list_kernel(words_ptr, index_ptr, W, C, BLOCK_W: tl.constexpr):
    """The numbers of the bits that are set in one row of words, rising."""
    entry = tl.program_id(0).to(tl.int64)
    index_ptr += entry * C
    bit = tl.arange(0, 32)
    # the bits below each; the shift of 32 that bit 31 would want does not exist.
    below = (1 << bit) - 1
    written = tl.zeros([], dtype=tl.int32)
    for first in range(0, W, BLOCK_W):
        word = first + tl.arange(0, BLOCK_W)
        x = tl.load(words_ptr + entry * W + word, mask=word < W, other=0)
        count = ones(x)
        start = written + tl.cumsum(count, 0) - count
        place = start[:, None] + ones(x[:, None] & below[None, :])
        number = word[:, None] * 32 + bit[None, :]
        is_set = ((x[:, None] >> bit[None, :]) & 1) == 1
        tl.store(index_ptr + place, number.to(index_ptr.dtype.element_ty), mask=is_set)
        written += tl.sum(count, 0)


@triton.jit
def left_out_kernel(
    bits_ptr,
    counts_ptr,
    W,
    S,
    COUNTS,
    N: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Tokens of BLOCK_P groups that one block does not list."""
    EACH: tl.constexpr = SIZE // N
    entry = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)
    bits_ptr += entry * W
    chunk = group * EACH
    there = tl.minimum(tl.maximum(S - group * SIZE, 0), SIZE)
    listed = tl.zeros([BLOCK_P], dtype=tl.int32)
    for i in tl.static_range((EACH + 31) // 32):
        word = chunk // 32 + i
        bits = tl.load(bits_ptr + word, mask=word < W, other=0).to(tl.uint32, bitcast=True)
        if EACH < 32:
            bits = (bits >> (chunk % 32).to(tl.uint32)) & ((1 << EACH) - 1)
        listed += ones(bits.to(tl.int32, bitcast=True)) * N
        if N > 1:
            # the sequence's last chunk may be short.
            last = (S - 1) // N - chunk
            own = (last >= 0) & (last < EACH)
            is_listed = (bits >> tl.where(own, last, 0).to(tl.uint32)) & 1
            listed -= tl.where(own & (is_listed != 0), ((S - 1) // N + 1) * N - S, 0)
    tl.store(
        counts_ptr + entry * COUNTS + group, (there - listed).to(tl.uint8), mask=group < COUNTS
    )


def group_constants(window: int, width: int) -> dict[str, Any]:
    """What ``group_kernel`` is compiled for, but R: ``window`` tiles of ``width`` words."""
    block_t = int(triton.next_power_of_2(window))
    # distance and position in one number of 32 bits where they fit.
    small = width * 32 * block_t < 2**31
    return {
        "BLOCK_T": block_t,
        # a wide window takes fewer words at a time, so that its counts fit the registers.
        "BLOCK_W": max(4, min(GROUP_WORDS, 8192 // block_t, int(triton.next_power_of_2(width)))),
        "RANK": tl.int32 if small else tl.int64,
        "NEVER": 2**31 - 1 if small else 2**63 - 1,
    }


def group_warps(window: int) -> int:
    """Warps of a program that groups ``window`` tiles."""
    return max(1, min(16, int(triton.next_power_of_2(window + 1)) // 32))


def group_by_xor(words: Tensor, per_block: int, window: int | None = None) -> Tensor:
    """FG-Attn's greedy grouping by XOR distance, inside windows of neighbouring query tiles.

    Args:
        words: mask in bits, int32 ``[B, H, T, W]``.
        per_block: R, a power of two.
        window: tiles of a window, a multiple of R; None is one window of all tiles.

    Returns:
        Tile numbers int32 ``[B, H, ceil(T / R), R]``, -1 where the last block has fewer.
    """
    words = words.contiguous()
    batch, heads, tiles, width = words.shape
    blocks = triton.cdiv(tiles, per_block)
    window = blocks * per_block if window is None else min(window, blocks * per_block)
    windows = triton.cdiv(tiles, window)
    q_tiles = words.new_empty(batch, heads, blocks, per_block)
    with torch.cuda.device_of(words):  # type: ignore[no-untyped-call]
        group_kernel[(batch * heads * windows,)](
            words,
            q_tiles,
            tiles,
            width,
            blocks,
            window,
            windows,
            R=per_block,
            **group_constants(window, width),
            num_warps=group_warps(window),
        )
    return q_tiles


def join_blocks(
    words: Tensor, q_tiles: Tensor, tile: tuple[int, int], tokens: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The keys of each block, blocks put longest first.

    Args:
        words: mask in bits, int32 ``[B, H, T, W]``.
        q_tiles: tiles of each block, int32 ``[B, H, G, R]``, -1 where one is missing.
        tile: (M, N).
        tokens: S.

    Returns:
        ``q_tiles`` in the new order; the number of key tiles of each block, int32 ``[B, H, G]``;
        their bits, int32 ``[B, H, G, W]``; and the query-key pairs of all blocks, int64 ``[B, H]``.
    """
    batch, heads, tiles, width = words.shape
    blocks, per_block = q_tiles.shape[2:]
    words, q_tiles = words.contiguous(), q_tiles.contiguous()
    joined = words.new_empty(batch, heads, blocks, width)
    count = words.new_empty(batch, heads, blocks)
    pairs = words.new_empty(batch, heads, blocks, dtype=torch.int64)
    ordered = [torch.empty_like(x) for x in (q_tiles, count, joined)]
    grid = (batch * heads * blocks,)
    block_w = min(JOIN_WORDS, triton.next_power_of_2(width))
    with torch.cuda.device_of(words):  # type: ignore[no-untyped-call]
        join_kernel[grid](
            words,
            q_tiles,
            joined,
            count,
            pairs,
            tiles,
            width,
            blocks,
            tokens,
            triton.cdiv(tokens, tile[1]),
            M=tile[0],
            N=tile[1],
            R=per_block,
            BLOCK_W=block_w,
            num_warps=JOIN_WARPS,
        )
        longest_first_kernel[grid](
            q_tiles,
            count,
            joined,
            *ordered,
            blocks,
            width,
            R=per_block,
            BLOCK_G=min(RANK_BLOCKS, triton.next_power_of_2(blocks)),
            BLOCK_W=block_w,
            num_warps=ORDER_WARPS,
        )
    return ordered[0], ordered[1], ordered[2], pairs.sum(-1)


def list_bits(words: Tensor, index: Tensor) -> None:
    """Write the rising numbers of the bits set in ``words`` ``[..., W]`` to ``index`` ``[..., C]``.

    C holds as many as there are; what lies behind them in a row stays as it is.
    """
    words = words.contiguous()
    width, columns = words.shape[-1], index.shape[-1]
    with torch.cuda.device_of(words):  # type: ignore[no-untyped-call]
        list_kernel[(words.numel() // width,)](
            words,
            index,
            width,
            columns,
            BLOCK_W=min(LIST_WORDS, triton.next_power_of_2(width)),
            num_warps=LIST_WARPS,
        )


def count_left_out(words: Tensor, keys: int, tokens: int, size: int, columns: int) -> Tensor:
    """Tokens of every group of ``size`` whose bits are not set, uint8 ``[B, H, G, columns]``.

    ``words`` int32 ``[B, H, G, W]`` has a bit for each chunk of ``keys`` tokens; ``size`` is a
    multiple of ``keys``. Columns behind the last group are zeros.
    """
    words = words.contiguous()
    counts = torch.empty(*words.shape[:3], columns, dtype=torch.uint8, device=words.device)
    width = words.shape[-1]
    block = min(COUNT_GROUPS, triton.next_power_of_2(columns))
    with torch.cuda.device_of(words):  # type: ignore[no-untyped-call]
        left_out_kernel[(words.numel() // width, triton.cdiv(columns, block))](
            words,
            counts,
            width,
            tokens,
            columns,
            N=keys,
            SIZE=size,
            BLOCK_P=block,
            num_warps=COUNT_WARPS,
        )
    return counts
