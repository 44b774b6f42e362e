"""From rows of scores to a tile mask in bits: softmax, and top-p or top-k without a sort.

Shape legend: B batch, H heads, Tq query tiles, Tk key tiles, N keys of a key tile,
W = ceil(Tk / 32) words of a row.

A kernel takes a row at a time, holds it in registers (rows too long for that are read again in
every pass), and searches the largest threshold whose kept mass reaches top-p. Weights are not
negative, so their order is that of their bits, and a search among these finds the threshold
exactly. The mass is known at both ends of what is left, so the next bits to try come by false
position; a range that holds one weight ends the search, after about eleven steps where halving
takes sixteen. Top-k is the same search with every weight worth 1.
"""

# what triton compiles is not typed python.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .bits import bits_from, ones

# a row of so many columns fits the registers of a program.
ROW_COLUMNS = 16_384
COLUMNS_PER_WARP = 2560
LONG_BLOCK = 4096
LONG_WARPS = 8
LONG_WAYS = 4
# so many weighed probes halve before the others go by false position: on rows of few large weights
# masses are far from straight lines at first. Of a search that takes longer than MOST_GUESSES the
# rest are halved.
FIRST_HALVES = tl.constexpr(3)
MOST_GUESSES = tl.constexpr(16)


@triton.jit
def _weights(scores, top, JUDGED: tl.constexpr, COUNTED: tl.constexpr):
    """What a column is ranked by: a number from 0 to 1, or -1 for a stray column.

    Softmax weights of scores to base 2, not yet divided by their sum. Where columns are counted,
    not weighed, a number in the same order that no finite score makes 0.
    """
    weights = 1.0 / (1.0 + (top - scores)) if COUNTED else tl.exp2(scores - top)
    if JUDGED:
        weights = tl.where(scores == -float("inf"), -1.0, weights)
    return weights


@triton.jit
def _worth(weights, threshold, COUNTED: tl.constexpr):
    """What columns that reach a positive threshold count for, elementwise.

    A product, because a comparison that answers 0 or 1 and a product that is added up are two
    instructions, where a choice and a sum are three.
    """
    reached = (weights >= threshold).to(tl.float32)
    return reached if COUNTED else weights * reached


@triton.jit
def _all_worth(weights, JUDGED: tl.constexpr, COUNTED: tl.constexpr):
    """What every column but a stray one counts for, elementwise; NaN stays where it is weighed."""
    if COUNTED:
        worth = tl.where(weights > 0, 1.0, 0.0)
    elif JUDGED:
        worth = tl.where(weights < 0, 0.0, weights)
    else:
        worth = weights
    return worth


@triton.jit
def _several(low, low_mass, high_mass, COUNTED: tl.constexpr):
    """Whether more than one weight may lie from ``low`` up to ``high``.

    If so, they are worth at least two of the least.
    """
    return low_mass - high_mass >= (1.5 if COUNTED else 1.5 * _weight(low))


@triton.jit
def _between(low, high, above, below, probes, COUNTED: tl.constexpr):
    """Bits to try next, by false position or by halves.

    ``above`` and ``below`` are how far both masses lie from the target, an end's less if it stayed.
    """
    guessed = probes < MOST_GUESSES
    if not COUNTED:
        guessed = guessed & (probes >= FIRST_HALVES)
    share = tl.where(guessed, above / (above + below), 0.5)
    middle = low + ((high - low).to(tl.float32) * share).to(tl.int32)
    return tl.minimum(tl.maximum(middle, low + 1), high - 1)


@triton.jit
def _words(
    weights,
    threshold,
    first_word,
    valid,
    full_from,
    TK,
    COLUMNS: tl.constexpr,
    JUDGED: tl.constexpr,
):
    """What is kept, in words: numbers of the words, and the words, a first column lowest."""
    kept = weights >= threshold
    if JUDGED:
        kept = kept | (weights < 0)
    kept = tl.reshape(kept, [COLUMNS // 32, 32])
    words = tl.sum(tl.where(kept, (1 << tl.arange(0, 32))[None, :], 0), 1)
    word = first_word + tl.arange(0, COLUMNS // 32)
    # a row of zeros or NaN reaches no share, and keeps its first tile all the same.
    words |= tl.where(word == 0, tl.where(valid, 0, 1), 0)
    return word, (words | bits_from(word, full_from)) & ~bits_from(word, TK)


@triton.jit
def _bits(weight):
    return weight.to(tl.int32, bitcast=True)


@triton.jit
def _weight(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _least(total, wanted, columns, COUNTED: tl.constexpr):
    """Bits of a threshold that certainly keeps enough: what lies below it is less than the rest.

    A hair lower, so that rounding cannot make it too high. Where columns are counted, the least
    normal number, so that all of them reach it.
    """
    if COUNTED:
        least = tl.zeros_like(total).to(tl.int32) + 0x00800000
    else:
        least = _bits(total * (1.0 - wanted) / columns * 0.999)
    return least


@triton.jit
def _row_of_program(first_block, TQ, BLOCK_Q: tl.constexpr):
    """Of the row that a program has: its place in the room, its head, its number there."""
    room = tl.program_id(0).to(tl.int64)
    block = first_block + (room // BLOCK_Q).to(tl.int32)
    per_head = tl.cdiv(TQ, BLOCK_Q)
    head = (block // per_head).to(tl.int64)
    return room, head, (block % per_head) * BLOCK_Q + (room % BLOCK_Q).to(tl.int32)


@triton.jit
def _goal(wanted, head, BY_HEAD: tl.constexpr):
    """The share or number of columns that a row of a head is to reach."""
    return tl.load(wanted + head) if BY_HEAD else wanted


@triton.jit
def _keeps_all(q_similarity_ptr, entry, row, full_rows, theta, JUDGED: tl.constexpr):
    """Whether a row keeps every column, whatever its scores."""
    whole = row >= full_rows
    if JUDGED:
        whole = whole | (tl.load(q_similarity_ptr + entry) < theta)
    return whole


@triton.jit(do_not_specialize=["first_block"])
def top_p_kernel(
    scores_ptr,
    q_similarity_ptr,
    words_ptr,
    keys_ptr,
    first_block,
    H,
    TQ,
    TK,
    W,
    LD,
    full_rows,
    full_columns,
    last_short,
    wanted,
    theta,
    N: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BODY: tl.constexpr,
    TAIL: tl.constexpr,
    JUDGED: tl.constexpr,
    COUNTED: tl.constexpr,
    BY_HEAD: tl.constexpr,
):
    """Mask of one row, held on chip as BODY and TAIL columns (powers of two, TAIL may be 0)."""
    room, head, row = _row_of_program(first_block, TQ, BLOCK_Q)
    if row < TQ:
        entry = head * TQ + row
        goal = _goal(wanted, head % H, BY_HEAD)
        scores_ptr += room * LD
        whole = _keeps_all(q_similarity_ptr, entry, row, full_rows, theta, JUDGED)
        column = tl.arange(0, BODY)
        body = tl.load(scores_ptr + column, mask=column < LD, other=-float("inf"))
        top = tl.max(body, 0)
        if TAIL > 0:
            column = BODY + tl.arange(0, TAIL)
            tail = tl.load(scores_ptr + column, mask=column < LD, other=-float("inf"))
            top = tl.maximum(top, tl.max(tail, 0))
        # a row of -inf: its weights become zeros.
        top = tl.where(top == -float("inf"), 0.0, top)
        body = _weights(body, top, JUDGED, COUNTED)
        total = tl.sum(_all_worth(body, JUDGED, COUNTED), 0)
        if TAIL > 0:
            tail = _weights(tail, top, JUDGED, COUNTED)
            total += tl.sum(_all_worth(tail, JUDGED, COUNTED), 0)

        valid = (total > 0.0) & (total < float("inf"))
        # less than a count by a half: an end that is at the target would pull nowhere.
        target = goal - 0.5 if COUNTED else total * goal
        low = _least(total, goal, TK, COUNTED)
        low_mass = total
        # no weight is above 1.
        high = tl.where(valid, 0x3F800001, low)
        high_mass = total * 0.0
        # an end that stays for the second time in a row pulls half as hard (Illinois).
        low_pull = high_mass + 1.0
        high_pull = low_pull
        stayed = 0
        probes = 0
        while (high - low > 1) & _several(low, low_mass, high_mass, COUNTED):
            above = (low_mass - target) * low_pull
            below = (target - high_mass) * high_pull
            middle = _between(low, high, above, below, probes, COUNTED)
            threshold = _weight(middle)
            mass = tl.sum(_worth(body, threshold, COUNTED), 0)
            if TAIL > 0:
                mass += tl.sum(_worth(tail, threshold, COUNTED), 0)
            enough = mass >= target
            low = tl.where(enough, middle, low)
            low_mass = tl.where(enough, mass, low_mass)
            high = tl.where(enough, high, middle)
            high_mass = tl.where(enough, high_mass, mass)
            low_pull = tl.where(enough, 1.0, tl.where(stayed == 1, 0.5 * low_pull, 1.0))
            high_pull = tl.where(enough, tl.where(stayed == 2, 0.5 * high_pull, 1.0), 1.0)
            stayed = tl.where(enough, 2, 1)
            probes += 1
        threshold = _weight(low)

        full_from = tl.where(whole, 0, full_columns)
        words_ptr += entry * W
        last_word = (TK - 1) // 32
        word, words = _words(body, threshold, 0, valid, full_from, TK, BODY, JUDGED)
        tl.store(words_ptr + word, words, mask=word < W)
        count = tl.sum(ones(words), 0)
        ends = tl.sum(tl.where(word == last_word, words >> ((TK - 1) % 32), 0) & 1, 0)
        if TAIL > 0:
            word, words = _words(tail, threshold, BODY // 32, valid, full_from, TK, TAIL, JUDGED)
            tl.store(words_ptr + word, words, mask=word < W)
            count += tl.sum(ones(words), 0)
            ends += tl.sum(tl.where(word == last_word, words >> ((TK - 1) % 32), 0) & 1, 0)
        tl.store(keys_ptr + entry, count * N - ends * last_short)


@triton.jit(do_not_specialize=["first_block"])
def top_p_long_kernel(
    scores_ptr,
    q_similarity_ptr,
    words_ptr,
    keys_ptr,
    first_block,
    H,
    TQ,
    TK,
    W,
    LD,
    full_rows,
    full_columns,
    last_short,
    wanted,
    theta,
    N: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK: tl.constexpr,
    WAYS: tl.constexpr,
    JUDGED: tl.constexpr,
    COUNTED: tl.constexpr,
    BY_HEAD: tl.constexpr,
):
    """Mask of one row of any length; each pass over it tries WAYS thresholds at once."""
    room, head, row = _row_of_program(first_block, TQ, BLOCK_Q)
    if row < TQ:
        entry = head * TQ + row
        goal = _goal(wanted, head % H, BY_HEAD)
        scores_ptr += room * LD
        whole = _keeps_all(q_similarity_ptr, entry, row, full_rows, theta, JUDGED)
        off = tl.arange(0, BLOCK)
        tops = tl.full([BLOCK], -float("inf"), dtype=tl.float32)
        for start in range(0, TK, BLOCK):
            piece = tl.load(scores_ptr + start + off, mask=start + off < LD, other=-float("inf"))
            tops = tl.maximum(tops, piece)
        top = tl.max(tops, 0)
        top = tl.where(top == -float("inf"), 0.0, top)
        sums = tl.zeros([BLOCK], dtype=tl.float32)
        for start in range(0, TK, BLOCK):
            piece = tl.load(scores_ptr + start + off, mask=start + off < LD, other=-float("inf"))
            sums += _all_worth(_weights(piece, top, False, COUNTED), False, COUNTED)
        total = tl.sum(sums, 0)

        valid = (total > 0.0) & (total < float("inf"))
        target = goal if COUNTED else total * goal
        low = _least(total, goal, TK, COUNTED)
        low_mass = total
        high = tl.where(valid, 0x3F800001, low)
        high_mass = total * 0.0
        way = 1 + tl.arange(0, WAYS)
        while (high - low > 1) & _several(low, low_mass, high_mass, COUNTED):
            step = tl.maximum((high - low) // (WAYS + 1), 1)
            tried = tl.minimum(low + way * step, high - 1)
            threshold = _weight(tried)[:, None]
            masses = tl.zeros([WAYS, BLOCK], dtype=tl.float32)
            for start in range(0, TK, BLOCK):
                piece = tl.load(
                    scores_ptr + start + off, mask=start + off < LD, other=-float("inf")
                )
                weights = _weights(piece, top, False, COUNTED)[None, :]
                masses += _worth(weights, threshold, COUNTED)
            mass = tl.sum(masses, 1)
            enough = mass >= target
            low = tl.max(tl.where(enough, tried, low), 0)
            low_mass = tl.min(tl.where(enough, mass, low_mass), 0)
            high = tl.min(tl.where(enough, high, tried), 0)
            high_mass = tl.max(tl.where(enough, high_mass, mass), 0)
        threshold = _weight(low)

        full_from = tl.where(whole, 0, full_columns)
        words_ptr += entry * W
        last_word = (TK - 1) // 32
        counts = tl.zeros([BLOCK // 32], dtype=tl.int32)
        ends = tl.zeros([BLOCK // 32], dtype=tl.int32)
        for start in range(0, TK, BLOCK):
            piece = tl.load(scores_ptr + start + off, mask=start + off < LD, other=-float("inf"))
            weights = _weights(piece, top, JUDGED, COUNTED)
            word, words = _words(
                weights, threshold, start // 32, valid, full_from, TK, BLOCK, JUDGED
            )
            tl.store(words_ptr + word, words, mask=word < W)
            counts += ones(words)
            ends += tl.where(word == last_word, words >> ((TK - 1) % 32), 0) & 1
        keys = tl.sum(counts, 0) * N - tl.sum(ends, 0) * last_short
        tl.store(keys_ptr + entry, keys)


def row_pieces(columns: int) -> tuple[int, int]:
    """Powers of two that cover ``columns`` with little waste: 4,725 is held as 4,096 + 1,024."""
    body = max(32, triton.next_power_of_2(columns + 1) // 2)
    rest = columns - body
    if rest <= 0:
        return body, 0
    tail = max(32, triton.next_power_of_2(rest))
    return (2 * body, 0) if tail >= body else (body, tail)


def row_warps(columns: int) -> int:
    """Warps of the program that holds a row of ``columns``."""
    return int(triton.next_power_of_2(triton.cdiv(columns, COLUMNS_PER_WARP)))


def choose_columns(
    room: Tensor,
    words: Tensor,
    keys: Tensor,
    first_block: int,
    blocks: int,
    *,
    block_rows: int,
    tile_keys: int,
    tokens: int,
    top_p: float | Tensor,
    count: int | None,
    full_rows: int | None,
    full_columns: int | None,
    theta: float | None = None,
    q_similarity: Tensor | None = None,
) -> None:
    """Choose the columns of some rows of scores, and write them to ``words`` and ``keys``.

    Args:
        room: scores to base 2, fp32 ``[rows, LD]``, -inf from column Tk on and where a column is
            stray. LD is a multiple of 16; rows of a head fill whole blocks.
        words: int32 ``[B, H, Tq, W]``, of which the rows of these blocks are written.
        keys: key tokens of a row, int32 ``[B, H, Tq]``, likewise.
        first_block: the block that ``room`` begins with.
        blocks: how many blocks.
        block_rows: rows of a block.
        tile_keys: N.
        tokens: S.
        top_p: share of a row's weight to reach, or one for every head, fp32 ``[H]``.
        count: columns to keep instead, where it is given.
        full_rows: rows from this one on keep everything.
        full_columns: columns from this one on are kept in every row.
        theta: rows whose ``q_similarity`` is less keep everything; stray columns are kept.
        q_similarity: fp32 ``[B, H, Tq]``; needed with ``theta``.
    """
    q_tiles, width = words.shape[2:]
    k_tiles = triton.cdiv(tokens, tile_keys)
    body, tail = row_pieces(k_tiles)
    long = body + tail > ROW_COLUMNS
    row_kernel = top_p_long_kernel if long else top_p_kernel
    if long:
        how = {"BLOCK": LONG_BLOCK, "WAYS": LONG_WAYS, "num_warps": LONG_WARPS}
    else:
        how = {"BODY": body, "TAIL": tail, "num_warps": row_warps(body + tail)}
    with torch.cuda.device_of(words):  # type: ignore[no-untyped-call]
        row_kernel[(blocks * block_rows,)](
            room,
            q_similarity,
            words,
            keys,
            first_block,
            words.shape[1],
            q_tiles,
            k_tiles,
            width,
            room.shape[1],
            q_tiles if full_rows is None else full_rows,
            k_tiles if full_columns is None else full_columns,
            k_tiles * tile_keys - tokens,
            top_p if count is None else float(count),
            0.0 if theta is None else theta,
            N=tile_keys,
            BLOCK_Q=block_rows,
            JUDGED=theta is not None,
            COUNTED=count is not None,
            BY_HEAD=count is None and isinstance(top_p, Tensor),
            **how,
        )


def keeps_all(top_p: float | Tensor, topk: float | None) -> bool:
    """Whether a share is 1, so that there is nothing to choose; what a tensor holds is not read."""
    share = top_p if topk is None else topk
    return not isinstance(share, Tensor) and share >= 1


def everything(words: Tensor, keys: Tensor, k_tiles: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Fill ``words`` and ``keys`` with a mask that keeps all key tiles."""
    words.fill_(-1)
    if k_tiles % 32:
        words[..., -1] = 2 ** (k_tiles % 32) - 1
    return words, keys.fill_(tokens)
