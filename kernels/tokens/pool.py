"""One pass over q, k or v: put tokens in another order, average tiles, or both at once.

Shape legend: B batch, H heads, S tokens, D head dim, N tokens of a tile, T = ceil(S / N) tiles.

A program owns a few neighbouring tiles of one head and walks through their tokens: the first token
of every tile, then the second, and so on. Every step moves whole rows of D elements with 16-byte
accesses, and sums stay in the registers of the thread that loaded them.

Means are kept for a product on tensor cores that is as good as one in fp32: a tile's mean is
divided by a power of two (its own, so that nothing overflows) and split into two fp16 numbers,
22 bits in all. bf16 would hold 16, and tf32 needs the split all the same at half the speed.
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
COPY_ELEMENTS = 8192
# loads in flight; a tile of fewer tokens has no more.
UNROLL = 8


@dataclass(frozen=True, slots=True)
class Pooled:
    """Mean tokens of tiles of ``size`` tokens, and how alike a tile's tokens are.

    The mean is ``(high + low) * scale``.

    Attributes:
        high: fp16 ``[B, H, T, D]``.
        low: what ``high`` rounded away, fp16 ``[B, H, T, D]``.
        scale: a power of two, fp32 ``[B, H, T]``.
        similarity: CosSim, the squared length of the mean over that of the longest token, fp32
            ``[B, H, T]``; None where it was not asked for.
        size: tokens of a tile; the last one may be short.
        tokens: S.
    """

    high: Tensor
    low: Tensor
    scale: Tensor
    similarity: Tensor | None
    size: int
    tokens: int

    def heads(self, start: int, stop: int) -> Pooled:
        """The same of heads ``start`` to ``stop``."""
        part = slice(start, stop)
        similarity = None if self.similarity is None else self.similarity[:, part]
        return Pooled(
            self.high[:, part],
            self.low[:, part],
            self.scale[:, part],
            similarity,
            self.size,
            self.tokens,
        )


@triton.jit
def store_means(
    total,
    longest,
    tile,
    head,
    high_ptr,
    low_ptr,
    scale_ptr,
    similarity_ptr,
    S,
    T,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    N: tl.constexpr,
    JUDGED: tl.constexpr,
):
    """Write the means of tiles, given the sums of their tokens and the longest's squared length."""
    off_d = tl.arange(0, BLOCK_D)
    count = tl.maximum(tl.minimum(S - tile * N, N), 1)
    mean = total / count.to(tl.float32)[:, None]
    largest = tl.max(tl.abs(mean), 1)
    # the exponent's bits alone are the power of two below; a tile of zeros takes 1.
    power = largest.to(tl.int32, bitcast=True) & 0x7F800000
    scale = tl.where(power == 0, 0x3F800000, power).to(tl.float32, bitcast=True)
    mean_scaled = mean / scale[:, None]
    high = mean_scaled.to(tl.float16)
    low = (mean_scaled - high.to(tl.float32)).to(tl.float16)
    entry = head.to(tl.int64) * T + tile
    off = entry[:, None] * D + off_d[None, :]
    there = (tile < T)[:, None] & (off_d < D)[None, :]
    tl.store(high_ptr + off, high, mask=there)
    tl.store(low_ptr + off, low, mask=there)
    tl.store(scale_ptr + entry, scale, mask=tile < T)
    if JUDGED:
        pairs = tl.sum(mean * mean, 1)
        # a tile of zeros is as similar to itself as can be.
        similarity = tl.where(longest > 0, pairs / tl.maximum(longest, 1e-38), 1.0)
        tl.store(similarity_ptr + entry, similarity, mask=tile < T)


@triton.jit
def pool_kernel(
    x_ptr,
    source_ptr,
    out_ptr,
    high_ptr,
    low_ptr,
    scale_ptr,
    similarity_ptr,
    S,
    T,
    H,
    BH,
    stride_xb,
    stride_xh,
    stride_xs,
    stride_ob,
    stride_oh,
    stride_os,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    UNROLL: tl.constexpr,
    REORDERED: tl.constexpr,
    POOLED: tl.constexpr,
    JUDGED: tl.constexpr,
):
    """Walk BLOCK_T tiles of one head; the last dimension of ``x`` and ``out`` has stride 1."""
    # heads of the same tokens run together: in the pipelines' layout they are neighbours.
    pid = tl.program_id(0)
    head = pid % BH
    tile = (pid // BH) * BLOCK_T + tl.arange(0, BLOCK_T)
    off_d = tl.arange(0, BLOCK_D)
    dim_alive = (off_d < D)[None, :]
    x_ptr += (head // H).to(tl.int64) * stride_xb + (head % H).to(tl.int64) * stride_xh
    if REORDERED:
        out_ptr += (head // H).to(tl.int64) * stride_ob + (head % H).to(tl.int64) * stride_oh

    total = tl.zeros([BLOCK_T, BLOCK_D], dtype=tl.float32)
    longest = tl.zeros([BLOCK_T], dtype=tl.float32)
    for start in range(0, N, UNROLL):
        for i in tl.static_range(UNROLL):
            token = tile * N + start + i
            alive = (token < S)[:, None] & dim_alive
            if REORDERED:
                source = tl.load(source_ptr + token, mask=token < S, other=0).to(tl.int64)
            else:
                source = token.to(tl.int64)
            off_x = source[:, None] * stride_xs + off_d[None, :]
            x = tl.load(x_ptr + off_x, mask=alive, other=0.0)
            if REORDERED:
                off_o = token.to(tl.int64)[:, None] * stride_os + off_d[None, :]
                tl.store(out_ptr + off_o, x, mask=alive)
            if POOLED:
                x = x.to(tl.float32)
                total += x
                if JUDGED:
                    longest = tl.maximum(longest, tl.sum(x * x, 1))

    if POOLED:
        store_means(
            total,
            longest,
            tile,
            head,
            high_ptr,
            low_ptr,
            scale_ptr,
            similarity_ptr,
            S,
            T,
            D,
            BLOCK_D,
            N,
            JUDGED,
        )


def _last_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def room_for_means(x: Tensor, size: int, *, judged: bool) -> Pooled:
    """Memory for what ``pool`` returns, not written yet."""
    batch, heads, tokens, dim = x.shape
    tiles = triton.cdiv(tokens, size)
    high, low = (x.new_empty(batch, heads, tiles, dim, dtype=torch.float16) for _ in range(2))
    scale = x.new_empty(batch, heads, tiles, dtype=torch.float32)
    return Pooled(high, low, scale, torch.empty_like(scale) if judged else None, size, tokens)


def _launch(
    x: Tensor, source: Tensor | None, out: Tensor | None, size: int, *, pooled: bool, judged: bool
) -> Pooled | None:
    batch, heads, tokens, dim = x.shape
    tiles = triton.cdiv(tokens, size)
    means = room_for_means(x, size, judged=judged) if pooled else None
    block_d = triton.next_power_of_2(dim)
    step = STEP_ELEMENTS if size > 1 else COPY_ELEMENTS
    block_t = max(1, step // block_d)
    # triton launches on the current device, which need not be the one that holds the tensors.
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        pool_kernel[(triton.cdiv(tiles, block_t) * batch * heads,)](
            x,
            source,
            out,
            None if means is None else means.high,
            None if means is None else means.low,
            None if means is None else means.scale,
            None if means is None else means.similarity,
            tokens,
            tiles,
            heads,
            batch * heads,
            *x.stride()[:3],
            *(x if out is None else out).stride()[:3],
            D=dim,
            BLOCK_D=block_d,
            N=size,
            BLOCK_T=block_t,
            UNROLL=min(size, UNROLL),
            REORDERED=out is not None,
            POOLED=pooled,
            JUDGED=judged,
            num_warps=WARPS,
        )
    return means


def pool(x: Tensor, size: int, *, judged: bool = False) -> Pooled:
    """Mean tokens of tiles of ``size`` neighbours; with ``judged`` their self-similarity too.

    ``x`` is ``[B, H, S, D]`` of any strides.
    """
    pooled = _launch(_last_contiguous(x), None, None, size, pooled=True, judged=judged)
    assert pooled is not None
    return pooled


def reorder(x: Tensor, source: Tensor, out: Tensor | None = None) -> Tensor:
    """``out[:, :, i] = x[:, :, source[i]]`` for ``x`` ``[B, H, S, D]`` of any strides.

    ``out`` is contiguous by default; one that is given has a last stride of 1.
    """
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _launch(_last_contiguous(x), source, out, 1, pooled=False, judged=False)
    return out


def reorder_and_pool(
    x: Tensor, source: Tensor, size: int, *, judged: bool = False
) -> tuple[Tensor, Pooled]:
    """``reorder``, and ``pool`` of what it gives, in one pass."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    pooled = _launch(_last_contiguous(x), source, out, size, pooled=True, judged=judged)
    assert pooled is not None
    return out, pooled
