"""SALE's selection pass: every score in 4 bits, compared with its row's threshold as it is made.

Shape legend: B batch, H heads, S tokens, D head dim, M x N tile, Tq and Tk tiles, W = ceil(Tk / 32)
words of a row of the mask, X columns of the second product.

An element passes where q4·k4 + offset_j / q_scale_i >= least_i / k_scale_b. All of it is made by
tensor cores: beside the product of 4-bit numbers goes one of X columns in bf16, whose factors hold
1 / q_scale and -least of a row, offset and 1 / k_scale of a key, each in two halves of 8 bits. What
is left of the comparison is the sign of a sum, and a tile fails if its largest is negative: one
instruction for an element, where adding and scaling as well take more than the products do. Threads
look at the elements they hold, collect bits of 32 key tiles, and only then agree with one another.

The 4-bit numbers ride in fp8 where tensor cores have it, else in fp16: their sums, whole numbers
below 2^13, come out exact and in fp32, which the second product goes on from.
"""

# what triton compiles is not typed python.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .dispatch import hopper_reason
from .quantize import FourBitQK, quantize_four_bits
from .triton_bits import bits_from, ones
from .triton_mask import device_facts

AREA_KEYS = 64
AREA_WARPS = 4
FINISHED_TILES = 16
FINISHED_WORDS = 128
FACTOR_KEYS = 128
# columns of the second product; six are used.
EXTRA = 16
# keys and rows that do not exist pass nowhere, and no product overflows on the way.
NEVER = tl.constexpr(1.0e25)


@dataclass(frozen=True)
class Config:
    """What is tuned: none of it changes what a call computes."""

    rows: int
    keys: int
    stages: int
    warps: int
    tma: bool


def config(capability: tuple[int, int], shared: int) -> Config:
    """The fastest measured for a GPU whose programs can have ``shared`` bytes of shared memory."""
    if capability[0] >= 9:
        return Config(rows=128, keys=128, stages=2, warps=4, tma=True)
    # where numbers ride in fp16, three steps are 110 KB.
    fits = capability >= (8, 9) or shared >= 112 * 1024
    return Config(rows=128, keys=128, stages=3 if fits else 2, warps=8, tma=False)


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


@triton.jit
def finish_kernel(
    words_ptr,
    keys_ptr,
    S,
    TQ,
    TK,
    W,
    local,
    full_rows,
    full_columns,
    M: tl.constexpr,
    N: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Add what is kept anyway to the words of TILES query tiles, and count their keys."""
    runs = tl.cdiv(TQ, TILES)
    head = (tl.program_id(0) // runs).to(tl.int64)
    tile = (tl.program_id(0) % runs) * TILES + tl.arange(0, TILES)
    low = tile * M + tl.minimum(S - tile * M, M) // 2 - local // 2
    near = (tl.maximum(low, 0) // N)[:, None]
    far = ((low + local + N - 1) // N)[:, None]
    sink = tl.where(tile >= full_rows, 0, full_columns)[:, None]
    counts = tl.zeros([TILES], dtype=tl.int32)
    for first in range(0, W, BLOCK_W):
        word = (first + tl.arange(0, BLOCK_W))[None, :]
        place = (head * TQ + tile)[:, None] * W + word
        alive = (tile < TQ)[:, None] & (word < W)
        found = tl.load(words_ptr + place, mask=alive, other=0)
        found |= bits_from(word, near) & ~bits_from(word, far)
        found |= bits_from(word, sink)
        found &= ~bits_from(word, tl.zeros_like(near) + TK)
        tl.store(words_ptr + place, found, mask=alive)
        # the last key tile may be short.
        last = (found >> ((TK - 1) % 32)) & 1
        counts += tl.sum(ones(found) * N - tl.where(word == W - 1, last * (TK * N - S), 0), 1)
    tl.store(keys_ptr + head * TQ + tile, counts, mask=tile < TQ)


def can_estimate(q: Tensor, tile: tuple[int, int]) -> bool:
    """Whether the kernels take such queries and tiles: 16 bits, D up to 128, 8 keys or more."""
    dim = q.shape[-1]
    sixteen_bits = q.dtype in (torch.float16, torch.bfloat16)
    return sixteen_bits and tile[1] >= 8 and dim % 16 == 0 and dim <= 128


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
        q: queries ``[B, H, S, D]``, fp16 or bf16, D a multiple of 16 up to 128.
        k: keys, likewise.
        tau: the threshold, or one for every head, fp32 ``[H]``.
        tile: (M, N), N at least 8.
        local: tokens of the local area, which is kept.
        full_rows: query tiles from this one on keep everything.
        full_columns: key tiles from this one on are the sink, and kept in every row.
        how: sizes of the plain kernel; by default the GPU's own kernel and sizes.
        riding: ``fp8`` or ``fp16``, the type that 4-bit numbers ride in; the GPU's own by default.

    Returns:
        The mask in words of 32 key tiles, int32 ``[B, H, Tq, W]``, the first tile of a word in its
        lowest bit; and the key tokens that each query tile keeps, int32 ``[B, H, Tq]``.
    """
    batch, heads, tokens, dim = q.shape
    rows, keys = tile
    q, k = q.contiguous(), k.contiguous()
    q_tiles, k_tiles = triton.cdiv(tokens, rows), triton.cdiv(tokens, keys)
    capability, shared, _ = device_facts(q.device)
    own = how is None
    how = how or config(capability, shared)
    riding = riding or ("fp8" if capability >= (8, 9) else "fp16")
    four = quantize_four_bits(q, k, keys, riding)
    # the interpreter has no products of bf16.
    half = torch.bfloat16 if q.is_cuda else torch.float32
    q_extra = torch.empty(batch, heads, q_tiles * rows, EXTRA, dtype=half, device=q.device)
    k_extra = _key_factors(four, how.keys, half)
    words = torch.empty(
        batch, heads, q_tiles, triton.cdiv(k_tiles, 32), dtype=torch.int32, device=q.device
    )
    counts = torch.empty(batch, heads, q_tiles, dtype=torch.int32, device=q.device)
    by_head = isinstance(tau, Tensor)
    with torch.cuda.device_of(q):  # type: ignore[no-untyped-call]
        least_sums_kernel[(batch * heads * q_tiles,)](
            q,
            k,
            four.q_scale,
            four.shift,
            q_extra,
            tau.to(q.device, torch.float32).log() if isinstance(tau, Tensor) else math.log(tau),
            tokens,
            heads,
            q_tiles,
            local,
            tokens if full_columns is None else full_columns * keys,
            dim**-0.5,
            **area_constants(dim, tile, by_head),
            num_warps=AREA_WARPS,
        )
        if own and riding == "fp8" and hopper_reason(q.device) is None:
            from .gluon_sale import gluon_sale

            gluon_sale(four.q, four.k, q_extra, k_extra, words, tile=tile)
        else:
            _triton_sale(four.q, four.k, q_extra, k_extra, words, tile, how)
        finish_kernel[(batch * heads * triton.cdiv(q_tiles, FINISHED_TILES),)](
            words,
            counts,
            tokens,
            q_tiles,
            k_tiles,
            words.shape[-1],
            local,
            q_tiles if full_rows is None else full_rows,
            k_tiles if full_columns is None else full_columns,
            M=rows,
            N=keys,
            TILES=FINISHED_TILES,
            BLOCK_W=FINISHED_WORDS,
            num_warps=4,
        )
    return words, counts


def _triton_sale(
    q: Tensor,
    k: Tensor,
    q_extra: Tensor,
    k_extra: Tensor,
    words: Tensor,
    tile: tuple[int, int],
    how: Config,
) -> None:
    """``gluon_sale`` by the plain kernel, for any GPU."""
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


def _key_factors(four: FourBitQK, step: int, half: torch.dtype) -> Tensor:
    """The keys' factors of the second product, ``[B, H, S padded to whole steps, EXTRA]``."""
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


def sale_constants(how: Config, dim: int, tile: tuple[int, int]) -> dict[str, Any]:
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
