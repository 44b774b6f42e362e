"""XAttention's scores: a product of whole groups of tokens whose result is summed where it is made.

Shape legend: B batch, H heads, S tokens, D head dim, STRIDE tokens of a group, G = S / STRIDE
groups, M x N tile, Tq and Tk tiles, KB = N / STRIDE key groups of a key tile.

Queries and keys of a group lie behind one another in memory, so reshaped they are matrices of
[G, STRIDE * D], and the sum along antidiagonals is their product with the pieces of D columns of
one of them taken in falling order: nothing is moved. The scores are a [G, G] matrix, 357 MB a head
at 75,600 tokens and stride 8 if it were kept. It never is: the program that has a square of it
turns the scores of a query group and a key tile into their log-sum-exp, 1 / KB as many numbers.
A second kernel divides by the rows' sums and adds up the groups of a query tile, and the rows of
tiles are then chosen from as all pooled ones are (``top_p``).
"""

# what triton compiles is not typed python.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..hardware import device_facts
from ..logarithms import LOG2_E
from .top_p import choose_columns, everything, keeps_all

# log-sum-exps of some heads at a time: 22 MB a head at 75,600 tokens, stride 8 and 128x128 tiles.
PART_BYTES = 512 * 2**20
# neighbouring blocks of rows that go through the columns together, so that both stay in L2.
TOGETHER = 8
COLUMNS_AT_ONCE = 256
SUM_WARPS = 4


@dataclass(frozen=True)
class AntidiagonalTuning:
    """What is tuned of the sums: none of it changes what a call computes."""

    rows: int
    columns: int
    stages: int
    warps: int
    tma: bool
    persistent: bool


def tuned_antidiagonal(
    capability: tuple[int, int], shared: int, per_column: int, piece: int
) -> AntidiagonalTuning:
    """The fastest measured for a GPU whose programs can have ``shared`` bytes of shared memory.

    ``per_column`` are the key groups of a key tile, ``piece`` the columns of a step.
    """
    large = capability[0] >= 9 and shared >= 200 * 1024
    rows, columns = 128, 256 if large else 128
    # what a square leaves is laid out anew before it is written, beside the stages of the next.
    left = shared - rows * (columns // per_column) * 4 - 1024
    stages = max(1, min(3, left // ((rows + columns) * piece * 2)))
    return AntidiagonalTuning(rows, columns, stages, warps=8, tma=large, persistent=large)


@triton.jit
def antidiagonal_kernel(
    q_ptr,
    k_ptr,
    part_ptr,
    first_head,
    heads,
    last_group,
    G,
    TK,
    factor,
    D: tl.constexpr,
    STRIDE: tl.constexpr,
    KB: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_U: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TOGETHER: tl.constexpr,
    FALLING: tl.constexpr,
    PERSISTENT: tl.constexpr,
    TMA: tl.constexpr,
):
    """Log-sum-exp to base 2 of the scores of every query group and key tile of some heads.

    Programs take every so-manieth square of BLOCK_T x BLOCK_U groups. With TMA, ``q_ptr`` and
    ``k_ptr`` are descriptors of boxes of so many rows and BLOCK_D columns.
    """
    PIECES: tl.constexpr = D // BLOCK_D
    off_d = tl.arange(0, BLOCK_D)
    across = tl.cdiv(G, BLOCK_U)
    down = tl.cdiv(G, BLOCK_T)
    squares = across * down
    for square in tl.range(
        tl.program_id(0), heads * squares, tl.num_programs(0), flatten=PERSISTENT
    ):
        head = square // squares
        rest = square % squares
        strip = rest // (TOGETHER * across)
        strip_rows = tl.minimum(down - strip * TOGETHER, TOGETHER)
        inside = rest % (TOGETHER * across)
        t = (strip * TOGETHER + inside % strip_rows) * BLOCK_T
        u = (inside // strip_rows) * BLOCK_U
        # groups past a head's last are the next head's: they are computed, and not kept.
        first_group = (first_head + head) * G
        if not TMA:
            q_row = tl.minimum(first_group + t + tl.arange(0, BLOCK_T), last_group).to(tl.int64)
            k_row = tl.minimum(first_group + u + tl.arange(0, BLOCK_U), last_group).to(tl.int64)
            q_from = q_ptr + (q_row * (STRIDE * D))[:, None] + off_d[None, :]
            k_from = k_ptr + (k_row * (STRIDE * D))[:, None] + off_d[None, :]
        scores = tl.zeros([BLOCK_T, BLOCK_U], dtype=tl.float32)
        for step in range(STRIDE * PIECES):
            if FALLING:
                q_column = (STRIDE - 1 - step // PIECES) * D + step % PIECES * BLOCK_D
            else:
                q_column = step * BLOCK_D
            if TMA:
                q = q_ptr.load([first_group + t, q_column])
                k = k_ptr.load([first_group + u, step * BLOCK_D])
            else:
                q = tl.load(q_from + q_column)
                k = tl.load(k_from + step * BLOCK_D)
            scores = tl.dot(q, k.T, scores)
        column = u + tl.arange(0, BLOCK_U)
        scores = tl.where((column < G)[None, :], scores * factor, -float("inf"))
        scores = tl.reshape(scores, [BLOCK_T, BLOCK_U // KB, KB])
        top = tl.max(scores, 2)
        # key tiles past the last have no scores.
        top = tl.where(top == -float("inf"), 0.0, top)
        part = top + tl.log2(tl.sum(tl.exp2(scores - top[:, :, None]), 2))
        row = t + tl.arange(0, BLOCK_T)
        tile = u // KB + tl.arange(0, BLOCK_U // KB)
        off = (head.to(tl.int64) * G + row)[:, None] * TK + tile[None, :]
        tl.store(part_ptr + off, part, mask=(row < G)[:, None] & (tile < TK)[None, :])


@triton.jit
def block_sums_kernel(
    part_ptr,
    room_ptr,
    G,
    TQ,
    TK,
    LD,
    MB: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """What one query tile of MB groups gives every key tile, as scores to base 2."""
    room = tl.program_id(0).to(tl.int64)
    head = room // TQ
    group = (room % TQ).to(tl.int32) * MB + tl.arange(0, BLOCK_M)
    alive = (group < G) & (tl.arange(0, BLOCK_M) < MB)
    part_ptr += head * G * TK + group[:, None].to(tl.int64) * TK
    room_ptr += room * LD
    off = tl.arange(0, BLOCK_C)
    top = tl.full([BLOCK_M], -float("inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    for start in range(0, TK, BLOCK_C):
        there = alive[:, None] & (start + off < TK)[None, :]
        part = tl.load(part_ptr + start + off[None, :], mask=there, other=-float("inf"))
        higher = tl.maximum(top, tl.max(part, 1))
        base = tl.where(higher == -float("inf"), 0.0, higher)
        total = total * tl.exp2(top - base) + tl.sum(tl.exp2(part - base[:, None]), 1)
        top = higher
    # a query group's weights sum to 1, so that none counts for more than another.
    whole = tl.where(alive, top + tl.log2(total), 0.0)
    for start in range(0, LD, BLOCK_C):
        column = start + off
        there = alive[:, None] & (column < TK)[None, :]
        part = tl.load(part_ptr + column[None, :], mask=there, other=-float("inf"))
        sums = tl.sum(tl.exp2(part - whole[:, None]), 0)
        tl.store(room_ptr + column, tl.log2(sums), mask=column < LD)


def can_score(q: Tensor) -> bool:
    """Whether the kernels take such queries: 16 bits, and a head dim of whole steps."""
    return q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] % 16 == 0


def block_d(dim: int) -> int:
    """Columns that one step multiplies: the most, up to 64, that a piece of ``dim`` is made of."""
    return min(64, dim & -dim)


def _groups(x: Tensor, stride: int, turn: Tensor | None) -> Tensor:
    """``[B, H, S, D]`` as ``[B * H * G, stride * D]``; a short last group repeats its tokens.

    Tokens of a group are put into the order ``turn`` where it is given.
    """
    tokens, dim = x.shape[2:]
    short = tokens % stride
    if short:
        again = tokens - short + torch.arange(stride - short, device=x.device) % short
        x = torch.cat([x, x.index_select(2, again)], 2)
    if turn is not None:
        x = torch.unflatten(x, 2, (-1, stride)).index_select(3, turn.to(x.device))
    x = x.contiguous().view(-1, stride * dim)
    # TMA reads from multiples of 16 bytes.
    return x if x.data_ptr() % 16 == 0 else x.clone()


def antidiagonal_words(
    q: Tensor,
    k: Tensor,
    *,
    tile: tuple[int, int],
    stride: int,
    turn: Tensor | None = None,
    top_p: float | Tensor = 1.0,
    count: int | None = None,
    full_rows: int | None = None,
    full_columns: int | None = None,
    how: AntidiagonalTuning | None = None,
) -> tuple[Tensor, Tensor]:
    """Key tiles chosen by their antidiagonal sums, in every row of tiles.

    Args:
        q: queries ``[B, H, S, D]``, fp16 or bf16, D a multiple of 16.
        k: keys, likewise.
        tile: (M, N), multiples of ``stride``.
        stride: tokens of a group.
        turn: which query of a group meets key 0, 1, .. of another, int64 ``[stride]``; None is
            falling order, the antidiagonal.
        top_p: share of a row's sums to reach, above 0, or one for every head, fp32 ``[H]``.
        count: key tiles to keep in every row instead.
        full_rows: query tiles from this one on keep everything.
        full_columns: key tiles from this one on are kept in every row.
        how: sizes to run with, the GPU's own by default.

    Returns:
        The mask in words of 32 key tiles, int32 ``[B, H, Tq, W]``, the first tile of a word in its
        lowest bit; and the key tokens that each query tile keeps, int32 ``[B, H, Tq]``. Key tiles
        whose sum equals the smallest that is kept are all kept.
    """
    batch, heads, tokens, dim = q.shape
    q_tiles, k_tiles = triton.cdiv(tokens, tile[0]), triton.cdiv(tokens, tile[1])
    words = torch.empty(
        batch, heads, q_tiles, triton.cdiv(k_tiles, 32), dtype=torch.int32, device=q.device
    )
    keys = torch.empty(batch, heads, q_tiles, dtype=torch.int32, device=q.device)
    if keeps_all(top_p, None) and count is None:
        return everything(words, keys, k_tiles, tokens)
    groups = triton.cdiv(tokens, stride)
    per_row, per_column = tile[0] // stride, tile[1] // stride
    facts = device_facts(q.device)
    how = how or tuned_antidiagonal(facts.capability, facts.shared_bytes, per_column, block_d(dim))
    operands: list[Any] = [_groups(q, stride, turn), _groups(k, stride, None)]
    all_groups = operands[0].shape[0]
    if how.tma:
        boxes = ([how.rows, block_d(dim)], [how.columns, block_d(dim)])
        operands = [
            TensorDescriptor.from_tensor(*pair) for pair in zip(operands, boxes, strict=True)
        ]
    row_length = -(-k_tiles // 32) * 32
    at_once = max(1, min(batch * heads, PART_BYTES // (groups * k_tiles * 4)))
    part = torch.empty(at_once, groups, k_tiles, dtype=torch.float32, device=q.device)
    room = torch.empty(at_once * q_tiles, row_length, dtype=torch.float32, device=q.device)
    squares = triton.cdiv(groups, how.rows) * triton.cdiv(groups, how.columns)
    with torch.cuda.device_of(words):  # type: ignore[no-untyped-call]
        for first in range(0, batch * heads, at_once):
            now = min(at_once, batch * heads - first)
            programs = now * squares
            if how.persistent:
                programs = min(programs, facts.multiprocessors)
            antidiagonal_kernel[(programs,)](
                *operands,
                part,
                first,
                now,
                all_groups - 1,
                groups,
                k_tiles,
                LOG2_E.value / (dim**0.5 * stride),
                num_warps=how.warps,
                num_stages=how.stages,
                **antidiagonal_constants(how, dim, stride, per_column, turn is None),
            )
            block_sums_kernel[(now * q_tiles,)](
                part,
                room,
                groups,
                q_tiles,
                k_tiles,
                row_length,
                MB=per_row,
                BLOCK_M=triton.next_power_of_2(per_row),
                BLOCK_C=COLUMNS_AT_ONCE,
                num_warps=SUM_WARPS,
            )
            choose_columns(
                room,
                words,
                keys,
                first * q_tiles,
                now * q_tiles,
                block_rows=1,
                tile_keys=tile[1],
                tokens=tokens,
                top_p=top_p,
                count=count,
                full_rows=full_rows,
                full_columns=full_columns,
            )
    return words, keys


def antidiagonal_constants(
    how: AntidiagonalTuning, dim: int, stride: int, per_column: int, falling: bool
) -> dict[str, Any]:
    """What ``antidiagonal_kernel`` is compiled for."""
    return {
        "D": dim,
        "STRIDE": stride,
        "KB": per_column,
        "BLOCK_T": how.rows,
        "BLOCK_U": how.columns,
        "BLOCK_D": block_d(dim),
        "TOGETHER": TOGETHER,
        "FALLING": falling,
        "PERSISTENT": how.persistent,
        "TMA": how.tma,
    }
