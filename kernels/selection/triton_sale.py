"""SALE's selection pass for every GPU that Triton compiles for.

Shape legend: B batch, H heads, S tokens, D head dim, M x N tile, Tq and Tk tiles, W = ceil(Tk / 32)
words of a row of the mask, X columns of the second product.

Both products of an element add up to what passes if it is not negative (``sale_factors``), and a
tile fails if its largest is negative: one instruction for an element, where adding and scaling as
well take more than the products do. Threads look at the elements they hold, collect bits of 32 key
tiles, and only then agree with one another.
"""

# what triton compiles is not typed python.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .sale_factors import EXTRA, block_d


@dataclass(frozen=True)
class SaleTuning:
    """What is tuned of the plain kernel: none of it changes what a call computes."""

    rows: int
    keys: int
    stages: int
    warps: int
    tma: bool


def tuned_sale(capability: tuple[int, int], shared: int) -> SaleTuning:
    """The fastest measured for a GPU whose programs can have ``shared`` bytes of shared memory."""
    if capability[0] >= 9:
        return SaleTuning(rows=128, keys=128, stages=2, warps=4, tma=True)
    # where numbers ride in fp16, three steps are 110 KB.
    fits = capability >= (8, 9) or shared >= 112 * 1024
    return SaleTuning(rows=128, keys=128, stages=3 if fits else 2, warps=8, tma=False)


@triton.jit
def _or(a, b):
    return a | b


@triton.jit
def sale_kernel(
    q_ptr,
    k_ptr,
    q_extra_ptr,
    k_extra_ptr,
    words_ptr,
    S,
    TQ,
    TK,
    W,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    EXTRA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    TMA: tl.constexpr,
):
    """The words of BLOCK_M rows. With TMA, the first four are descriptors of boxes."""
    TILES: tl.constexpr = BLOCK_N // N
    # a head's programs run together: its keys then stay in L2.
    blocks = tl.cdiv(S, BLOCK_M)
    head = tl.program_id(0) // blocks
    start = (tl.program_id(0) % blocks) * BLOCK_M
    off_m = start + tl.arange(0, BLOCK_M)
    off_n = tl.arange(0, BLOCK_N)
    off_d = tl.arange(0, BLOCK_D)
    off_x = tl.arange(0, EXTRA)
    # factors are padded to whole tiles and whole steps. Rows and keys past a head's last are the
    # next head's, or zeros: their factors let nothing pass.
    padded = tl.cdiv(S, BLOCK_N) * BLOCK_N
    if TMA:
        q = q_ptr.load([head * S + start, 0])
        q_extra = q_extra_ptr.load([head * (TQ * M) + start, 0])
    else:
        first_row = head.to(tl.int64) * S
        q_alive = (off_m < S)[:, None] & (off_d < D)[None, :]
        q = tl.load(q_ptr + (first_row + off_m)[:, None] * D + off_d[None, :], q_alive, other=0.0)
        off_q = (head.to(tl.int64) * (TQ * M) + off_m)[:, None] * EXTRA + off_x[None, :]
        q_extra = tl.load(q_extra_ptr + off_q, (off_m < TQ * M)[:, None], other=0.0)

    tile = start // M + tl.arange(0, BLOCK_M // M)
    words_ptr += (head.to(tl.int64) * TQ + tile) * W
    # a thread's elements of sixteen rows: two rows eight apart, and pairs of columns.
    seen = tl.zeros([BLOCK_M // 16, 8, 4], dtype=tl.int32)
    for begin in tl.range(0, padded, BLOCK_N, num_stages=STAGES):
        if TMA:
            k = k_ptr.load([head * S + begin, 0])
            k_extra = k_extra_ptr.load([head * padded + begin, 0])
        else:
            key = begin + off_n
            k_alive = (key < S)[:, None] & (off_d < D)[None, :]
            k = tl.load(k_ptr + (first_row + key)[:, None] * D + off_d[None, :], k_alive, other=0.0)
            off_k = (head.to(tl.int64) * padded + key)[:, None] * EXTRA + off_x[None, :]
            k_extra = tl.load(k_extra_ptr + off_k)
        sums = tl.dot(q, k.T)
        sums = tl.dot(q_extra, k_extra.T, sums)
        best = tl.reshape(sums, [BLOCK_M // 16, 2, 8, TILES, N // 8, 4, 2])
        best = tl.max(tl.max(tl.max(best, 6), 4), 1)
        place = (begin // N + tl.arange(0, TILES)) % 32
        passes = (best >= 0).to(tl.int32) << place[None, None, :, None]
        seen |= tl.sum(passes, 2)
        done = begin // N + TILES
        if (done % 32 == 0) | (done >= TK):
            word = (done - 1) // 32
            found = tl.reduce(tl.reshape(seen, [BLOCK_M // M, M * 2]), 1, _or)
            tl.store(words_ptr + word, found, mask=(tile < TQ) & (word < W))
            seen = tl.zeros([BLOCK_M // 16, 8, 4], dtype=tl.int32)


def sale_constants(how: SaleTuning, dim: int, tile: tuple[int, int]) -> dict[str, Any]:
    """What ``sale_kernel`` is compiled for."""
    return {
        "D": dim,
        "BLOCK_D": block_d(dim),
        "M": tile[0],
        "N": tile[1],
        "EXTRA": EXTRA,
        "BLOCK_M": how.rows,
        "BLOCK_N": how.keys,
        "STAGES": how.stages,
        "TMA": how.tma,
    }


def triton_sale(
    q: Tensor,
    k: Tensor,
    q_extra: Tensor,
    k_extra: Tensor,
    words: Tensor,
    *,
    tile: tuple[int, int],
    how: SaleTuning,
) -> None:
    """Fill ``words`` with the tiles in which an element passes.

    Args:
        q: 4-bit queries in fp8 or fp16 ``[B, H, S, D]``.
        k: 4-bit keys, likewise.
        q_extra: the rows' factors of the second product ``[B, H, Tq * M, X]``.
        k_extra: the keys', ``[B, H, S padded to whole steps, X]``.
        words: int32 ``[B, H, Tq, W]``.
        tile: (M, N), N at least 8.
        how: the kernel's sizes.
    """
    batch, heads, tokens, dim = q.shape
    operands: list[Any] = [q, k, q_extra, k_extra]
    if how.tma:
        columns = block_d(dim)
        boxes = ([how.rows, columns], [how.keys, columns], [how.rows, EXTRA], [how.keys, EXTRA])
        operands = [
            TensorDescriptor.from_tensor(x.view(-1, x.shape[-1]), box)
            for x, box in zip(operands, boxes, strict=True)
        ]
    sale_kernel[(batch * heads * triton.cdiv(tokens, how.rows),)](
        *operands,
        words,
        tokens,
        words.shape[2],
        triton.cdiv(tokens, tile[1]),
        words.shape[3],
        **sale_constants(how, dim, tile),
        num_warps=how.warps,
    )
