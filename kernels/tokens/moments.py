"""One pass over q, k or v: put tokens in another order, and take means and variances of tiles.

Shape legend: B batch, H heads, S tokens, D head dim, N tokens of a tile, T = ceil(S / N) tiles.

A program owns a few neighbouring tiles of one head and walks through their tokens, as in ``pool``.
Variances are differences of sums in fp32: of numbers of 16 bits they are right to a part in 1,000
even where a mean is 100 times the spread around it.
"""

# what triton compiles is not typed python.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

WARPS = 4
# elements that a program's step moves: 16 bytes of 16-bit numbers for each of its threads.
STEP_ELEMENTS = 1024
# loads in flight.
UNROLL = 4


@dataclass(frozen=True, slots=True)
class Moments:
    """Mean tokens of tiles of ``size`` tokens, and how far the tokens of a tile spread.

    Attributes:
        mean: ``[B, H, T, D]``, in the dtype of the tokens.
        variance: of every channel, ``[B, H, T, D]``, in bf16 where tokens have 16 bits and else in
            fp32; or summed over channels, fp32 ``[B, H, T]``. About the mean, or where so asked
            about zero.
        size: tokens of a tile; the last one may be short.
        tokens: S.
        square: squared lengths of the mean tokens, fp32 ``[B, H, T]``, beside summed variances.
    """

    mean: Tensor
    variance: Tensor
    size: int
    tokens: int
    square: Tensor | None = None


@triton.jit
def moments_kernel(
    x_ptr,
    source_ptr,
    out_ptr,
    mean_ptr,
    variance_ptr,
    square_ptr,
    S,
    T,
    H,
    BH,
    stride_xb,
    stride_xh,
    stride_xs,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    UNROLL: tl.constexpr,
    ABOUT_ZERO: tl.constexpr,
):
    """Walk BLOCK_T tiles of one head; ``out`` is contiguous, the last stride of ``x`` is 1.

    With squares of means, variances are summed over channels.
    """
    # heads of the same tokens run together: in the pipelines' layout they are neighbours.
    pid = tl.program_id(0)
    head = pid % BH
    tile = (pid // BH) * BLOCK_T + tl.arange(0, BLOCK_T)
    off_d = tl.arange(0, BLOCK_D)
    dim_alive = (off_d < D)[None, :]
    x_ptr += (head // H).to(tl.int64) * stride_xb + (head % H).to(tl.int64) * stride_xh
    total = tl.zeros([BLOCK_T, BLOCK_D], dtype=tl.float32)
    squares = tl.zeros([BLOCK_T, BLOCK_D], dtype=tl.float32)
    for start in range(0, N, UNROLL):
        for i in tl.static_range(UNROLL):
            token = tile * N + start + i
            alive = (token < S)[:, None] & dim_alive
            if source_ptr is not None:
                source = tl.load(source_ptr + token, mask=token < S, other=0).to(tl.int64)
            else:
                source = token.to(tl.int64)
            x = tl.load(x_ptr + source[:, None] * stride_xs + off_d[None, :], mask=alive, other=0.0)
            if out_ptr is not None:
                to = head.to(tl.int64) * S + token
                tl.store(out_ptr + to[:, None] * D + off_d[None, :], x, mask=alive)
            x = x.to(tl.float32)
            total += x
            squares += x * x
    count = tl.maximum(tl.minimum(S - tile * N, N), 1).to(tl.float32)[:, None]
    mean = total / count
    variance = squares / count
    if not ABOUT_ZERO:
        variance = tl.maximum(variance - mean * mean, 0.0)
    entry = head.to(tl.int64) * T + tile
    off = entry[:, None] * D + off_d[None, :]
    there = (tile < T)[:, None] & dim_alive
    mean = mean.to(mean_ptr.dtype.element_ty)
    tl.store(mean_ptr + off, mean, mask=there)
    if square_ptr is not None:
        tl.store(variance_ptr + entry, tl.sum(variance, 1), mask=tile < T)
        # of what is stored, which products are made of.
        mean = mean.to(tl.float32)
        tl.store(square_ptr + entry, tl.sum(mean * mean, 1), mask=tile < T)
    else:
        tl.store(variance_ptr + off, variance.to(variance_ptr.dtype.element_ty), mask=there)


@triton.jit
def merge_kernel(
    mean_ptr,
    variance_ptr,
    out_ptr,
    out_variance_ptr,
    S,
    T,
    P,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    N: tl.constexpr,
    EACH: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Means of groups of EACH tiles, from those of the tiles, and variances where there are any."""
    head = tl.program_id(1).to(tl.int64)
    group = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    off_d = tl.arange(0, BLOCK_D)
    dim_alive = (off_d < D)[None, :]
    total = tl.zeros([BLOCK_P, BLOCK_D], dtype=tl.float32)
    squares = tl.zeros([BLOCK_P, BLOCK_D], dtype=tl.float32)
    for i in tl.static_range(EACH):
        tile = group * EACH + i
        count = tl.minimum(tl.maximum(S - tile * N, 0), N).to(tl.float32)[:, None]
        off = (head * T + tile)[:, None] * D + off_d[None, :]
        there = (tile < T)[:, None] & dim_alive
        mean = tl.load(mean_ptr + off, mask=there, other=0.0).to(tl.float32)
        total += mean * count
        if variance_ptr is not None:
            variance = tl.load(variance_ptr + off, mask=there, other=0.0).to(tl.float32)
            squares += (variance + mean * mean) * count
    size = tl.minimum(tl.maximum(S - group * (EACH * N), 1), EACH * N).to(tl.float32)[:, None]
    off = (head * P + group)[:, None] * D + off_d[None, :]
    there = (group < P)[:, None] & dim_alive
    mean = total / size
    tl.store(out_ptr + off, mean.to(out_ptr.dtype.element_ty), mask=there)
    if variance_ptr is not None:
        variance = tl.maximum(squares / size - mean * mean, 0.0)
        tl.store(out_variance_ptr + off, variance.to(out_variance_ptr.dtype.element_ty), mask=there)


MERGE_GROUPS = 16


def merge_means(fine: Moments, size: int) -> Tensor:
    """Means ``[B, H, P, D]`` of groups of ``size`` tokens, a multiple of those of ``fine``."""
    if size == fine.size:
        return fine.mean
    return _merged(fine, size, variances=False)[0]


def merge_moments(fine: Moments, size: int) -> Moments:
    """Moments of groups of ``size`` tokens, a multiple of those of ``fine``.

    ``fine`` has variances of every channel, about its means.
    """
    if size == fine.size:
        return fine
    mean, variance = _merged(fine, size, variances=True)
    assert variance is not None
    return Moments(mean, variance, size, fine.tokens)


def _merged(fine: Moments, size: int, *, variances: bool) -> tuple[Tensor, Tensor | None]:
    batch, heads, tiles, dim = fine.mean.shape
    groups = triton.cdiv(fine.tokens, size)
    mean = fine.mean.new_empty(batch, heads, groups, dim)
    variance = fine.variance.new_empty(mean.shape) if variances else None
    with torch.cuda.device_of(mean):  # type: ignore[no-untyped-call]
        merge_kernel[(triton.cdiv(groups, MERGE_GROUPS), batch * heads)](
            fine.mean,
            fine.variance if variances else None,
            mean,
            variance,
            fine.tokens,
            tiles,
            groups,
            D=dim,
            BLOCK_D=triton.next_power_of_2(dim),
            N=fine.size,
            EACH=size // fine.size,
            BLOCK_P=MERGE_GROUPS,
            num_warps=WARPS,
        )
    return mean, variance


def reorder_and_measure(
    x: Tensor,
    source: Tensor | None,
    size: int,
    *,
    summed: bool = False,
    about_zero: bool = False,
) -> tuple[Tensor, Moments]:
    """``x`` in another order, and the moments of its tiles of ``size`` tokens then.

    Args:
        x: ``[B, H, S, D]`` of any strides.
        source: ``[S]`` token numbers; token i of the result is token ``source[i]`` of ``x``. None
            leaves ``x`` as it is.
        size: tokens of a tile.
        summed: variances are summed over channels, and the squared lengths of means are taken.
        about_zero: variances are about zero: mean squares.
    """
    if x.stride(-1) != 1:
        x = x.contiguous()
    batch, heads, tokens, dim = x.shape
    tiles = triton.cdiv(tokens, size)
    out = None
    if source is not None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    mean = x.new_empty(batch, heads, tiles, dim)
    square = None
    if summed:
        variance = mean.new_empty(batch, heads, tiles, dtype=torch.float32)
        square = torch.empty_like(variance)
    else:
        # squares of fp16's numbers need more range than it has.
        wide = torch.float32 if x.dtype == torch.float32 else torch.bfloat16
        variance = torch.empty_like(mean, dtype=wide)
    block_d = triton.next_power_of_2(dim)
    block_t = max(1, STEP_ELEMENTS // block_d)
    # triton launches on the current device, which need not be the one that holds the tensors.
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        moments_kernel[(triton.cdiv(tiles, block_t) * batch * heads,)](
            x,
            source,
            out,
            mean,
            variance,
            square,
            tokens,
            tiles,
            heads,
            batch * heads,
            *x.stride()[:3],
            D=dim,
            BLOCK_D=block_d,
            N=size,
            BLOCK_T=block_t,
            UNROLL=min(size, UNROLL),
            ABOUT_ZERO=about_zero,
            num_warps=WARPS,
        )
    return x if out is None else out, Moments(mean, variance, size, tokens, square)
