"""What SALE's selection pass multiplies besides 4-bit numbers: factors of rows and of keys.

Shape legend: B batch, H heads, S tokens, D head dim, M x N tile, X columns of the second product.

An element of SALE's mask passes where q4·k4 + offset_j / q_scale_i >= least_i / k_scale_b. All of
it is made by tensor cores: beside the product of 4-bit numbers goes one of X columns in bf16, whose
factors hold 1 / q_scale and -least of a row, offset and 1 / k_scale of a key, each in two halves of
8 bits. What is left of the comparison is the sign of a sum.
"""

# what triton compiles is not typed python.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..logarithms import LN_2, LOG2_E
from ..tokens.formats import FourBitQK

AREA_KEYS = 64
AREA_WARPS = 4
FACTOR_KEYS = 128
# columns of the second product; six are used.
EXTRA = 16
# keys and rows that do not exist pass nowhere, and no product overflows on the way.
NEVER = tl.constexpr(1.0e25)


@triton.jit
def least_sums_kernel(
    q_ptr,
    k_ptr,
    q_scale_ptr,
    shift_ptr,
    extra_ptr,
    log_tau,
    S,
    H,
    TQ,
    local,
    sink,
    scale,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EXTRA: tl.constexpr,
    BY_HEAD: tl.constexpr,
):
    """The rows' factors of the second product, for one query tile.

    ``sink`` is the first token of the sink, S where there is none.
    """
    head = (tl.program_id(0) // TQ).to(tl.int64)
    start = (tl.program_id(0) % TQ) * M
    row = start + tl.arange(0, M)
    off_d = tl.arange(0, BLOCK_D)
    dim_alive = off_d < D
    q_ptr += head * S * D
    k_ptr += head * S * D
    q = tl.load(
        q_ptr + row[:, None] * D + off_d[None, :],
        mask=(row < S)[:, None] & dim_alive[None, :],
        other=0.0,
    )
    low = start + tl.minimum(S - start, M) // 2 - local // 2
    first = tl.maximum(low, 0) // N * N
    stop = tl.minimum((low + local + N - 1) // N * N, S)
    # two runs of keys: from the tile's neighbourhood, or the sink where that begins before, to the
    # neighbourhood's end; and the sink behind it.
    sink_first = tl.maximum(sink, stop)
    first = tl.minimum(first, sink)
    near_steps = tl.cdiv(stop - first, BLOCK_K)
    steps = near_steps + tl.cdiv(tl.maximum(S - sink_first, 0), BLOCK_K)
    top = tl.full([M], -float("inf"), dtype=tl.float32)
    total = tl.zeros([M], dtype=tl.float32)
    for step in range(steps):
        near = step < near_steps
        begin = tl.where(near, first + step * BLOCK_K, sink_first + (step - near_steps) * BLOCK_K)
        key = begin + tl.arange(0, BLOCK_K)
        alive = key < tl.where(near, stop, S)
        k = tl.load(
            k_ptr + key[:, None] * D + off_d[None, :],
            mask=alive[:, None] & dim_alive[None, :],
            other=0.0,
        )
        scores = tl.dot(q, tl.trans(k)) * (scale * LOG2_E)
        scores = tl.where(alive[None, :], scores, -float("inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        total = total * tl.exp2(top - higher) + tl.sum(tl.exp2(scores - higher[:, None]), 1)
        top = higher
    if BY_HEAD:
        logarithm = tl.load(log_tau + head % H)
    else:
        logarithm = log_tau
    off_row = head * S + row
    q_scale = tl.load(q_scale_ptr + off_row, mask=row < S, other=1.0)
    shift = tl.load(shift_ptr + off_row, mask=row < S, other=0.0)
    least = ((top + tl.log2(total)) * LN_2 + logarithm) / scale
    least = tl.where(row < S, (least - shift) / q_scale, NEVER)
    inverse = tl.where(row < S, 1.0 / q_scale, 0.0)
    half: tl.constexpr = extra_ptr.dtype.element_ty
    least_high = least.to(half)
    inverse_high = inverse.to(half)
    least_low = (least - least_high.to(tl.float32)).to(half)
    inverse_low = (inverse - inverse_high.to(tl.float32)).to(half)
    # against offset, offset's rest, offset; the keys' factor, its rest, the factor.
    column = tl.arange(0, EXTRA)[None, :]
    extra = tl.where(column < 2, inverse_high[:, None], inverse_low[:, None])
    extra = tl.where(column < 3, extra, -least_high[:, None])
    extra = tl.where(column < 5, extra, -least_low[:, None])
    extra = tl.where(column < 6, extra, 0.0)
    off_extra = (head * TQ * M + row)[:, None] * EXTRA + column
    tl.store(extra_ptr + off_extra, extra.to(half))


@triton.jit
def key_factors_kernel(
    offset_ptr,
    scale_ptr,
    extra_ptr,
    S,
    RUNS,
    PADDED,
    RUN: tl.constexpr,
    EXTRA: tl.constexpr,
    KEYS: tl.constexpr,
):
    """The keys' factors of the second product, for KEYS keys of one head."""
    head = tl.program_id(1).to(tl.int64)
    key = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    offset = tl.load(offset_ptr + head * S + key, mask=key < S, other=-NEVER)
    scale = tl.load(scale_ptr + head * RUNS + key // RUN, mask=key < S, other=1.0)
    factor = 1.0 / scale
    half: tl.constexpr = extra_ptr.dtype.element_ty
    offset_high = offset.to(half)
    factor_high = factor.to(half)
    offset_low = (offset - offset_high.to(tl.float32)).to(half)
    factor_low = (factor - factor_high.to(tl.float32)).to(half)
    # the queries' factors say against what.
    column = tl.arange(0, EXTRA)[None, :]
    extra = tl.where(column == 1, offset_low[:, None], offset_high[:, None])
    extra = tl.where(column < 3, extra, factor_high[:, None])
    extra = tl.where(column == 4, factor_low[:, None], extra)
    extra = tl.where(column < 6, extra, 0.0)
    off_extra = (head * PADDED + key)[:, None] * EXTRA + column
    tl.store(extra_ptr + off_extra, extra.to(half), mask=(key < PADDED)[:, None])


def block_d(dim: int) -> int:
    """Columns of a product of 8-bit numbers, of which there are 32 or more."""
    return max(32, int(triton.next_power_of_2(dim)))


def area_constants(dim: int, tile: tuple[int, int], by_head: bool) -> dict[str, Any]:
    """What ``least_sums_kernel`` is compiled for."""
    return {
        "D": dim,
        "BLOCK_D": max(16, int(triton.next_power_of_2(dim))),
        "M": tile[0],
        "N": tile[1],
        "BLOCK_K": AREA_KEYS,
        "EXTRA": EXTRA,
        "BY_HEAD": by_head,
    }


def row_factors(
    q: Tensor,
    k: Tensor,
    four: FourBitQK,
    tau: float | Tensor,
    *,
    tile: tuple[int, int],
    local: int,
    full_columns: int | None,
    half: torch.dtype,
) -> Tensor:
    """The rows' factors of the second product, ``[B, H, Tq * M, X]``; see ``sale_words``."""
    batch, heads, tokens, dim = q.shape
    q_tiles = triton.cdiv(tokens, tile[0])
    out = torch.empty(batch, heads, q_tiles * tile[0], EXTRA, dtype=half, device=q.device)
    with torch.cuda.device_of(q):  # type: ignore[no-untyped-call]
        least_sums_kernel[(batch * heads * q_tiles,)](
            q,
            k,
            four.q_scale,
            four.shift,
            out,
            tau.to(q.device, torch.float32).log() if isinstance(tau, Tensor) else math.log(tau),
            tokens,
            heads,
            q_tiles,
            local,
            tokens if full_columns is None else full_columns * tile[1],
            dim**-0.5,
            **area_constants(dim, tile, isinstance(tau, Tensor)),
            num_warps=AREA_WARPS,
        )
    return out


def key_factors(four: FourBitQK, step: int, half: torch.dtype) -> Tensor:
    """The keys' factors of the second product, ``[B, H, S padded to whole steps, X]``."""
    batch, heads, tokens = four.offset.shape
    padded = triton.cdiv(tokens, step) * step
    out = torch.empty(batch, heads, padded, EXTRA, dtype=half, device=four.offset.device)
    with torch.cuda.device_of(out):  # type: ignore[no-untyped-call]
        key_factors_kernel[(triton.cdiv(padded, FACTOR_KEYS), batch * heads)](
            four.offset,
            four.k_scale,
            out,
            tokens,
            four.k_scale.shape[2],
            padded,
            RUN=four.k_run,
            EXTRA=EXTRA,
            KEYS=FACTOR_KEYS,
        )
    return out
