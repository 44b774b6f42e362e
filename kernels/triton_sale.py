"""SALE's selection pass: every score in 4 bits, compared with its row's threshold as it is made.

Shape legend: B batch, H heads, S tokens, D head dim, M x N tile, Tq and Tk tiles, W = ceil(Tk / 32)
words of a row of the mask.

A first kernel attends each query tile to its sink and local area in full precision and turns each
row's log-sum-exp into the least sum of 4-bit products that passes. The second makes all sums. A
tile is kept if any of its elements passes, and what a thread has seen of a tile is one bit: threads
look at the elements they hold themselves, collect bits of 32 key tiles, and only then agree with
one another, since agreeing costs more than looking.

The 4-bit numbers ride in fp8 where tensor cores have it, which gives the sums in fp32 with nothing
to convert, and in int8 on Ampere. Both are exact: the sums are whole numbers below 2^13.
"""

# what triton compiles is not typed python.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .quantize import FourBitQK, quantize_four_bits
from .triton_bits import bits_from, ones

AREA_KEYS = 64
AREA_WARPS = 4


@dataclass(frozen=True)
class Config:
    """What is tuned: none of it changes what a call computes."""

    rows: int
    keys: int
    stages: int
    warps: int
    tma: bool


def config(capability: tuple[int, int]) -> Config:
    """The fastest measured for a GPU of such compute capability."""
    if capability[0] >= 9:
        return Config(rows=128, keys=128, stages=3, warps=4, tma=True)
    return Config(rows=128, keys=128, stages=3, warps=8, tma=False)


@triton.jit
def least_sums_kernel(
    q_ptr,
    k_ptr,
    q_scale_ptr,
    shift_ptr,
    least_ptr,
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
    BY_HEAD: tl.constexpr,
):
    """What the 4-bit products of each row of one query tile must reach, times the keys' scale.

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
        scores = tl.dot(q, tl.trans(k)) * (scale * 1.4426950408889634)
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
    least = ((top + tl.log2(total)) * 0.6931471805599453 + logarithm) / scale
    tl.store(least_ptr + off_row, (least - shift) / q_scale, mask=row < S)


@triton.jit
def _or(a, b):
    return a | b


@triton.jit
def sale_kernel(
    q_ptr,
    k_ptr,
    q_scale_ptr,
    k_inverse_ptr,
    offset_ptr,
    least_ptr,
    words_ptr,
    keys_ptr,
    S,
    TQ,
    TK,
    W,
    local,
    full_rows,
    full_columns,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    TMA: tl.constexpr,
):
    """The mask of BLOCK_M rows. With TMA, ``q_ptr`` and ``k_ptr`` are descriptors of boxes."""
    TILES: tl.constexpr = BLOCK_N // N
    # a head's programs run together: its keys then stay in L2.
    blocks = tl.cdiv(S, BLOCK_M)
    head = tl.program_id(0) // blocks
    start = (tl.program_id(0) % blocks) * BLOCK_M
    row = start + tl.arange(0, BLOCK_M)
    off_n = tl.arange(0, BLOCK_N)
    off_d = tl.arange(0, BLOCK_D)
    off_tile = tl.arange(0, TILES)
    first_row = head.to(tl.int64) * S
    if TMA:
        q = q_ptr.load([head * S + start, 0])
    else:
        there = (row < S)[:, None] & (off_d < D)[None, :]
        q = tl.load(q_ptr + (first_row + row)[:, None] * D + off_d[None, :], mask=there, other=0.0)
    inverse = 1.0 / tl.load(q_scale_ptr + first_row + row, mask=row < S, other=1.0)
    # rows past the end let nothing pass.
    least = tl.load(least_ptr + first_row + row, mask=row < S, other=float("inf"))
    # these two are padded to whole steps, with keys that pass nowhere.
    padded = tl.cdiv(S, BLOCK_N) * BLOCK_N
    k_inverse_ptr += head * (padded // N)
    offset_ptr += head.to(tl.int64) * padded

    tile = start // M + tl.arange(0, BLOCK_M // M)
    low = tile * M + tl.minimum(S - tile * M, M) // 2 - local // 2
    near = tl.maximum(low, 0) // N
    far = (low + local + N - 1) // N
    whole = tile >= full_rows
    words_ptr += (head.to(tl.int64) * TQ + tile) * W
    counts = tl.zeros([BLOCK_M // M], dtype=tl.int32)
    # four threads share a row of the product, and each has pairs of columns.
    seen = tl.zeros([BLOCK_M, 4], dtype=tl.int32)
    for begin in tl.range(0, padded, BLOCK_N, num_stages=STAGES):
        if TMA:
            k = k_ptr.load([head * S + begin, 0])
        else:
            key = begin + off_n
            there = (key < S)[:, None] & (off_d < D)[None, :]
            off_k = (first_row + key)[:, None] * D + off_d[None, :]
            k = tl.load(k_ptr + off_k, mask=there, other=0.0)
        column = begin // N + off_tile
        k_inverse = tl.load(k_inverse_ptr + column)
        offset = tl.load(offset_ptr + begin + off_n)
        sums = tl.dot(q, k.T).to(tl.float32) + offset[None, :] * inverse[:, None]
        best = tl.max(tl.max(tl.reshape(sums, [BLOCK_M, TILES, N // 8, 4, 2]), 4), 2)
        passes = best >= (least[:, None] * k_inverse[None, :])[:, :, None]
        seen |= tl.sum(passes.to(tl.int32) << (column % 32)[None, :, None], 1)
        done = begin // N + TILES
        if (done % 32 == 0) | (done >= TK):
            word = (done - 1) // 32
            found = tl.reduce(tl.reshape(seen, [BLOCK_M // M, M * 4]), 1, _or)
            found |= bits_from(word, near) & ~bits_from(word, far)
            found |= bits_from(word, tl.where(whole, 0, full_columns))
            found &= ~bits_from(word, tl.zeros_like(tile) + TK)
            tl.store(words_ptr + word, found, mask=tile < TQ)
            counts += ones(found) * N
            # the last key tile, which may be short.
            last = (found >> ((TK - 1) % 32)) & 1
            counts -= tl.where(done >= TK, last * (TK * N - S), 0)
            seen = tl.zeros([BLOCK_M, 4], dtype=tl.int32)
    tl.store(keys_ptr + head.to(tl.int64) * TQ + tile, counts, mask=tile < TQ)


@cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def can_estimate(q: Tensor, tile: tuple[int, int]) -> bool:
    """Whether the kernels take such queries and tiles: 16 bits, and 8 keys or more."""
    dim = q.shape[-1]
    return q.dtype in (torch.float16, torch.bfloat16) and tile[1] >= 8 and dim % 16 == 0


def sale_words(
    q: Tensor,
    k: Tensor,
    tau: float | Tensor,
    *,
    tile: tuple[int, int],
    local: int,
    full_rows: int | None = None,
    full_columns: int | None = None,
    how: Config | None = None,
    riding: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Key tiles in which some element's relative attention score may reach ``tau``.

    Args:
        q: queries ``[B, H, S, D]``, fp16 or bf16, D a multiple of 16.
        k: keys, likewise.
        tau: the threshold, or one for every head, fp32 ``[H]``.
        tile: (M, N), N at least 8.
        local: tokens of the local area, which is kept.
        full_rows: query tiles from this one on keep everything.
        full_columns: key tiles from this one on are the sink, and kept in every row.
        how: sizes to run with, the GPU's own by default.
        riding: ``fp8`` or ``int8``, the type that 4-bit numbers ride in; the GPU's own by default.

    Returns:
        The mask in words of 32 key tiles, int32 ``[B, H, Tq, W]``, the first tile of a word in its
        lowest bit; and the key tokens that each query tile keeps, int32 ``[B, H, Tq]``.
    """
    batch, heads, tokens, dim = q.shape
    rows, keys = tile
    q, k = q.contiguous(), k.contiguous()
    q_tiles, k_tiles = triton.cdiv(tokens, rows), triton.cdiv(tokens, keys)
    capability = _capability(q.device.index) if q.is_cuda else (0, 0)
    how = how or config(capability)
    riding = riding or ("fp8" if capability >= (8, 9) else "int8")
    four = quantize_four_bits(q, k, keys, riding)
    least = torch.empty(batch, heads, tokens, dtype=torch.float32, device=q.device)
    words = torch.empty(
        batch, heads, q_tiles, triton.cdiv(k_tiles, 32), dtype=torch.int32, device=q.device
    )
    counts = torch.empty(batch, heads, q_tiles, dtype=torch.int32, device=q.device)
    by_head = isinstance(tau, Tensor)
    padded = triton.cdiv(tokens, how.keys) * how.keys
    sink = tokens if full_columns is None else full_columns * keys
    with torch.cuda.device_of(q):  # type: ignore[no-untyped-call]
        least_sums_kernel[(batch * heads * q_tiles,)](
            q,
            k,
            four.q_scale,
            four.shift,
            least,
            tau.to(q.device, torch.float32).log() if isinstance(tau, Tensor) else math.log(tau),
            tokens,
            heads,
            q_tiles,
            local,
            sink,
            dim**-0.5,
            **area_constants(dim, tile, by_head),
            num_warps=AREA_WARPS,
        )
        sale_kernel[(batch * heads * triton.cdiv(tokens, how.rows),)](
            *_operands(four, how),
            four.q_scale,
            F.pad(four.k_scale.reciprocal(), (0, padded // keys - k_tiles), value=1.0),
            F.pad(four.offset, (0, padded - tokens), value=-math.inf),
            least,
            words,
            counts,
            tokens,
            q_tiles,
            k_tiles,
            words.shape[-1],
            local,
            q_tiles if full_rows is None else full_rows,
            k_tiles if full_columns is None else full_columns,
            **sale_constants(how, dim, tile),
            num_warps=how.warps,
        )
    return words, counts


def _operands(four: FourBitQK, how: Config) -> tuple[Any, Any]:
    """Pointers, or boxes that may reach into the next head: what is there passes nowhere."""
    block_d = _block_d(four.q.shape[-1])
    if not how.tma:
        return four.q, four.k
    q, k = (
        TensorDescriptor.from_tensor(x.view(-1, x.shape[-1]), [rows, block_d])
        for x, rows in ((four.q, how.rows), (four.k, how.keys))
    )
    return q, k


def _block_d(dim: int) -> int:
    # a product of 8-bit numbers takes 32 columns or more.
    return max(32, int(triton.next_power_of_2(dim)))


def area_constants(dim: int, tile: tuple[int, int], by_head: bool) -> dict[str, Any]:
    """What ``least_sums_kernel`` is compiled for."""
    return {
        "D": dim,
        "BLOCK_D": max(16, int(triton.next_power_of_2(dim))),
        "M": tile[0],
        "N": tile[1],
        "BLOCK_K": AREA_KEYS,
        "BY_HEAD": by_head,
    }


def sale_constants(how: Config, dim: int, tile: tuple[int, int]) -> dict[str, Any]:
    """What ``sale_kernel`` is compiled for."""
    return {
        "D": dim,
        "BLOCK_D": _block_d(dim),
        "M": tile[0],
        "N": tile[1],
        "BLOCK_M": how.rows,
        "BLOCK_N": how.keys,
        "STAGES": how.stages,
        "TMA": how.tma,
    }
