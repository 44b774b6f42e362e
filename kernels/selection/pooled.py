"""A tile mask from pooled queries and keys: their product, and the rows' choice of key tiles.

Shape legend: B batch, H heads, Tq query tiles, Tk key tiles, D head dim, W = ceil(Tk / 32) words.

Scores of a few rows at a time go to a bounded room, from which ``top_p`` chooses: all of them would
be 3.6 GB at 75,600 tokens, 40 heads and 16x16 tiles.
"""

# what triton compiles is not typed python.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..hardware import device_facts
from ..logarithms import LOG2_E
from ..tokens.pool import Pooled
from .shares import count_of_share
from .top_p import choose_columns, everything, keeps_all

SCORE_BYTES = 512 * 2**20
SCORE_WARPS = 8
# so much shared memory comes with tensor cores that read it (Hopper, Blackwell's large chips), and
# there one stage is the fastest. Others read registers, and with one stage they would spill.
ONE_STAGE_SHARED_BYTES = 200 * 1024
# blocks of columns that one program multiplies with its rows, where that leaves enough programs.
SCORE_STEPS = 16


def score_block(shared: int, dim: int) -> tuple[int, int, int]:
    """Rows, columns and stages of a block of scores, by the ``shared`` memory of a program.

    Both halves of the queries, and of the keys as often as there are stages, lie there.
    """
    row = 2 * 2 * max(16, int(triton.next_power_of_2(dim)))
    stages = 1 if shared >= ONE_STAGE_SHARED_BYTES else 2
    for rows, columns in ((128, 64), (128, 32), (64, 32), (32, 32), (16, 16)):
        if (rows + stages * columns) * row <= shared:
            return rows, columns, stages
    raise ValueError(f"a head dim of {dim} leaves no room for a block of scores")


def score_steps(blocks: int, columns: int, multiprocessors: int) -> int:
    """Blocks of columns for a program: fewer where there are few of rows."""
    steps = SCORE_STEPS
    while steps > 1 and blocks * triton.cdiv(columns, steps) < 3 * multiprocessors:
        steps //= 2
    return steps


@triton.jit(do_not_specialize=["first_block"])
def scores_kernel(
    q_high_ptr,
    q_low_ptr,
    q_scale_ptr,
    k_high_ptr,
    k_low_ptr,
    k_scale_ptr,
    k_similarity_ptr,
    scores_ptr,
    first_block,
    TQ,
    TK,
    LD,
    factor,
    theta,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STEPS: tl.constexpr,
    STAGES: tl.constexpr,
    JUDGED: tl.constexpr,
):
    """Scores of one block of BLOCK_Q rows and STEPS blocks of columns; rows stand LD apart.

    LD is a multiple of 16, and -inf fills a row up to there, so that rows are written and read in
    whole vectors; it also marks stray columns.
    """
    room = tl.program_id(0)
    block = first_block + room
    per_head = tl.cdiv(TQ, BLOCK_Q)
    head = (block // per_head).to(tl.int64)
    off_d = tl.arange(0, BLOCK_D)
    off_k = tl.arange(0, BLOCK_K)
    row = (block % per_head) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    row_alive = row < TQ
    dim_alive = off_d < D
    entry = head * TQ + row
    off_q = entry[:, None] * D + off_d[None, :]
    q_alive = row_alive[:, None] & dim_alive[None, :]
    q_high = tl.load(q_high_ptr + off_q, mask=q_alive, other=0.0)
    q_low = tl.load(q_low_ptr + off_q, mask=q_alive, other=0.0)
    q_scale = tl.load(q_scale_ptr + entry, mask=row_alive, other=0.0) * factor
    k_high_ptr += head * TK * D
    k_low_ptr += head * TK * D
    k_scale_ptr += head * TK
    if JUDGED:
        k_similarity_ptr += head * TK
    place = room.to(tl.int64) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    scores_ptr += place[:, None] * LD

    first = tl.program_id(1) * (STEPS * BLOCK_K)
    last = tl.minimum(first + STEPS * BLOCK_K, TK)
    for start in tl.range(first, last, BLOCK_K, num_stages=STAGES):
        column = start + off_k
        column_alive = column < TK
        off = column[:, None] * D + off_d[None, :]
        k_alive = column_alive[:, None] & dim_alive[None, :]
        k_high = tl.load(k_high_ptr + off, mask=k_alive, other=0.0)
        k_low = tl.load(k_low_ptr + off, mask=k_alive, other=0.0)
        k_scale = tl.load(k_scale_ptr + column, mask=column_alive, other=0.0)
        # low times low is below the last bit of an fp32 result.
        acc = tl.dot(q_low, tl.trans(k_high))
        acc = tl.dot(q_high, tl.trans(k_low), acc)
        acc = tl.dot(q_high, tl.trans(k_high), acc)
        scores = acc * q_scale[:, None] * k_scale[None, :]
        if JUDGED:
            similarity = tl.load(k_similarity_ptr + column, mask=column_alive, other=1.0)
            column_alive = column_alive & (similarity >= theta)
        scores = tl.where(column_alive[None, :], scores, -float("inf"))
        tl.store(scores_ptr + column[None, :], scores, mask=(column < LD)[None, :])


def _room_shape(bytes_allowed: int, rows: int, blocks: int, row_length: int) -> int:
    """Blocks of rows whose scores are held at once, at least one."""
    return max(1, min(blocks, bytes_allowed // (rows * row_length * 4)))


def top_p_words(
    q: Pooled,
    k: Pooled,
    *,
    scale: float,
    top_p: float | Tensor = 1.0,
    topk: float | None = None,
    theta: float | None = None,
    full_rows: int | None = None,
    full_columns: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The smallest set of key tiles of each query tile whose pooled attention reaches ``top_p``.

    With ``topk``, that share of the key tiles, those of the largest pooled scores.

    Equal to sorting, except that key tiles whose weight equals the smallest that is kept are all
    kept.

    Args:
        q: pooled queries.
        k: pooled keys.
        scale: factor on q·k.
        top_p: share to reach, above 0, or one for every head, fp32 ``[H]``; 1 keeps everything.
        topk: share of key tiles to keep instead, above 0, rounded up.
        theta: key tiles less self-similar than this leave the softmax and are kept in every row;
            query tiles less self-similar keep everything. Both must have been judged.
        full_rows: query tiles from this one on keep everything.
        full_columns: key tiles from this one on are kept in every row.

    Returns:
        The mask in words of 32 key tiles, int32 ``[B, H, Tq, W]``, the first tile of a word in
        its lowest bit; and the key tokens that each query tile keeps, int32 ``[B, H, Tq]``.
    """
    batch, heads, q_tiles, dim = q.high.shape
    k_tiles = k.high.shape[2]
    width = triton.cdiv(k_tiles, 32)
    words = q.high.new_empty(batch, heads, q_tiles, width, dtype=torch.int32)
    keys = q.high.new_empty(batch, heads, q_tiles, dtype=torch.int32)
    if keeps_all(top_p, topk):
        return everything(words, keys, k_tiles, k.tokens)

    row_length = -(-k_tiles // 32) * 32
    facts = device_facts(words.device)
    rows, columns, stages = score_block(facts.shared_bytes, dim)
    blocks = triton.cdiv(q_tiles, rows) * batch * heads
    at_once = _room_shape(SCORE_BYTES, rows, blocks, row_length)
    steps = score_steps(at_once, triton.cdiv(k_tiles, columns), facts.multiprocessors)
    room = q.high.new_empty(at_once * rows, row_length, dtype=torch.float32)
    pooled = [x.contiguous() for x in (q.high, q.low, q.scale, k.high, k.low, k.scale)]
    judged = theta is not None
    q_similarity = q.similarity.contiguous() if judged and q.similarity is not None else None
    k_similarity = k.similarity.contiguous() if judged and k.similarity is not None else None
    if judged and (q_similarity is None or k_similarity is None):
        raise ValueError("theta needs self-similarities. Hint: pool(..., judged=True).")
    with torch.cuda.device_of(words):  # type: ignore[no-untyped-call]
        for first in range(0, blocks, at_once):
            now = min(at_once, blocks - first)
            scores_kernel[(now, triton.cdiv(k_tiles, columns * steps))](
                *pooled,
                k_similarity,
                room,
                first,
                q_tiles,
                k_tiles,
                row_length,
                scale * LOG2_E.value,
                0.0 if theta is None else theta,
                D=dim,
                BLOCK_D=max(16, triton.next_power_of_2(dim)),
                BLOCK_Q=rows,
                BLOCK_K=columns,
                STEPS=steps,
                STAGES=stages,
                JUDGED=judged,
                num_warps=SCORE_WARPS,
            )
            choose_columns(
                room,
                words,
                keys,
                first,
                now,
                block_rows=rows,
                tile_keys=k.size,
                tokens=k.tokens,
                top_p=top_p,
                count=None if topk is None else count_of_share(topk, k_tiles),
                full_rows=full_rows,
                full_columns=full_columns,
                theta=theta,
                q_similarity=q_similarity,
            )
    return words, keys
