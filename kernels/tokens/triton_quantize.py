"""One pass that smooths, scales and rounds queries or keys to 8 or 4 bits, in any token order, and
averages their tiles on the way where a mask is to be made of them.

Shape legend: B batch, H heads, S tokens, D head dim, RUN tokens that share a scale.

A program owns ROWS neighbouring tokens of the result. It also multiplies the tokens it has loaded
with one vector a head, which is how q·mean(k) costs no pass of its own.
"""

# what triton compiles is not typed python.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .formats import FORMATS, FOUR_BITS, ROWS_AT_ONCE, SMALLEST, whole_numbers
from .pool import Pooled, store_means

# rows of a program and tokens that one of the means adds up.
MEAN_ROWS = 32
MEAN_TOKENS = 512
MEAN_WARPS = 4


@triton.jit
def sums_kernel(
    x_ptr,
    out_ptr,
    stride_xb,
    stride_xh,
    stride_xs,
    H,
    S,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Sum of TOKENS tokens of one head; ``out`` is ``[B * H, pieces, D]``."""
    head = tl.program_id(1).to(tl.int64)
    x_ptr += (head // H) * stride_xb + (head % H) * stride_xh
    off_d = tl.arange(0, BLOCK_D)
    total = tl.zeros([ROWS, BLOCK_D], dtype=tl.float32)
    for start in tl.static_range(0, TOKENS, ROWS):
        token = tl.program_id(0) * TOKENS + start + tl.arange(0, ROWS)
        alive = (token < S)[:, None] & (off_d < D)[None, :]
        off_x = token.to(tl.int64)[:, None] * stride_xs + off_d[None, :]
        x = tl.load(x_ptr + off_x, mask=alive, other=0.0).to(tl.float32)
        total += tl.where(tl.abs(x) < float("inf"), x, 0.0)
    entry = head * tl.num_programs(0) + tl.program_id(0)
    tl.store(out_ptr + entry * D + off_d, tl.sum(total, 0), mask=off_d < D)


def triton_mean(x: Tensor) -> Tensor:
    """The mean token of every head of ``x`` ``[B, H, S, D]``, fp32 ``[B, H, D]``."""
    batch, heads, tokens, dim = x.shape
    if x.stride(3) != 1:
        x = x.contiguous()
    pieces = triton.cdiv(tokens, MEAN_TOKENS)
    sums = torch.empty(batch, heads, pieces, dim, dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        sums_kernel[(pieces, batch * heads)](
            x,
            sums,
            *x.stride()[:3],
            heads,
            tokens,
            D=dim,
            BLOCK_D=triton.next_power_of_2(dim),
            ROWS=MEAN_ROWS,
            TOKENS=MEAN_TOKENS,
            num_warps=MEAN_WARPS,
        )
    return sums.sum(2) / tokens


@triton.jit
def quantize_kernel(
    x_ptr,
    out_ptr,
    scale_ptr,
    order_ptr,
    subtract_ptr,
    multiply_ptr,
    product_ptr,
    high_ptr,
    low_ptr,
    mean_scale_ptr,
    similarity_ptr,
    stride_xb,
    stride_xh,
    stride_xs,
    H,
    S,
    RUNS,
    T,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    RUN: tl.constexpr,
    ROWS: tl.constexpr,
    TOP: tl.constexpr,
    SMALLEST: tl.constexpr,
    INTEGER: tl.constexpr,
    N: tl.constexpr,
):
    """Quantise ROWS tokens of one head; ``x`` has a last stride of 1, the rest is contiguous.

    Tiles of N tokens are averaged first, if there is room for their means.
    """
    head = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * ROWS
    off_s = first + tl.arange(0, ROWS)
    off_d = tl.arange(0, BLOCK_D)
    alive = off_s < S
    dim_alive = off_d < D
    both = alive[:, None] & dim_alive[None, :]
    token = off_s
    if order_ptr is not None:
        token = tl.load(order_ptr + off_s, mask=alive, other=0)
    base = x_ptr + (head // H) * stride_xb + (head % H) * stride_xh
    off_x = token.to(tl.int64)[:, None] * stride_xs + off_d[None, :]
    x = tl.load(base + off_x, mask=both, other=0.0).to(tl.float32)
    if high_ptr is not None:
        TILES: tl.constexpr = ROWS // N
        tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
        total = tl.sum(x.reshape(TILES, N, BLOCK_D), 1)
        longest = tl.zeros([TILES], dtype=tl.float32)
        if similarity_ptr is not None:
            longest = tl.max(tl.sum(x * x, 1).reshape(TILES, N), 1)
        store_means(
            total,
            longest,
            tile,
            head,
            high_ptr,
            low_ptr,
            mean_scale_ptr,
            similarity_ptr,
            S,
            T,
            D,
            BLOCK_D,
            N,
            similarity_ptr is not None,
        )
    if multiply_ptr is not None:
        factor = tl.load(multiply_ptr + head * D + off_d, mask=dim_alive, other=0.0)
        product = tl.sum(x * factor[None, :], 1)
        tl.store(product_ptr + head * S + off_s, product, mask=alive)
    if subtract_ptr is not None:
        mean = tl.load(subtract_ptr + head * D + off_d, mask=dim_alive, other=0.0)
        # what is not there must not become the mean's negative: it would set the scale.
        x = tl.where(alive[:, None], x - mean[None, :], 0.0)
    finite = tl.abs(x) < float("inf")
    x = tl.where(finite, x, 0.0)
    largest = tl.max(tl.abs(x), 1).reshape(ROWS // RUN, RUN)
    largest = tl.maximum(tl.max(largest, 1), SMALLEST)
    off_r = tl.program_id(0) * (ROWS // RUN) + tl.arange(0, ROWS // RUN)
    scale = tl.div_rn(largest, TOP)
    if multiply_ptr is None:
        # no product tells of a token that is not finite.
        lost = tl.max((~finite).to(tl.int32), 1).reshape(ROWS // RUN, RUN)
        scale = tl.where(tl.max(lost, 1) != 0, float("nan"), scale)
    tl.store(scale_ptr + head * RUNS + off_r, scale, mask=off_r < RUNS)
    inverse = tl.div_rn(TOP, largest)[:, None]
    x *= tl.broadcast_to(inverse, [ROWS // RUN, RUN]).reshape(ROWS)[:, None]
    if INTEGER:
        # a cast cuts the fraction off.
        x = tl.floor(x + 0.5)
    off_out = (head * S + off_s)[:, None] * D + off_d[None, :]
    tl.store(out_ptr + off_out, x.to(out_ptr.dtype.element_ty), mask=both)


def block(run: int, pooled: int = 0) -> tuple[int, int]:
    """Rows of a program that cuts no run and no tile of ``pooled`` tokens, and its warps.

    Few rows and warps: many programs of a multiprocessor then load while others look for the
    largest. Tiles shorter than runs are averaged beside them, for which two warps lack registers.
    """
    if max(run, pooled) > 64:
        return ROWS_AT_ONCE, 4
    return 64, 4 if 0 < pooled < run else 2


def triton_quantize_runs(
    x: Tensor,
    kind: str,
    run: int,
    order: Tensor | None,
    subtract: Tensor | None,
    multiply: Tensor | None,
    means: Pooled | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Launch the kernel; see ``quantize_runs`` for arguments and what is returned.

    ``means`` is memory for the tiles' means, as ``room_for_means`` gives it.
    """
    batch, heads, tokens, dim = x.shape
    if x.stride(3) != 1:
        x = x.contiguous()
    dtype, top = (FORMATS | FOUR_BITS)[kind]
    runs = -(-tokens // run)
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    scale = torch.empty(batch, heads, runs, dtype=torch.float32, device=x.device)
    product = None
    if multiply is not None:
        product = torch.empty(batch, heads, tokens, dtype=torch.float32, device=x.device)
    rows, warps = block(run, 0 if means is None else means.size)
    grid = (triton.cdiv(tokens, rows), batch * heads)
    # triton launches on the current device, which need not be the one that holds the tensors.
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        quantize_kernel[grid](
            x,
            out,
            scale,
            order,
            None if subtract is None else subtract.contiguous(),
            None if multiply is None else multiply.contiguous(),
            product,
            None if means is None else means.high,
            None if means is None else means.low,
            None if means is None else means.scale,
            None if means is None else means.similarity,
            *x.stride()[:3],
            heads,
            tokens,
            runs,
            1 if means is None else means.scale.shape[2],
            D=dim,
            BLOCK_D=triton.next_power_of_2(dim),
            RUN=run,
            ROWS=rows,
            TOP=top,
            SMALLEST=SMALLEST,
            INTEGER=whole_numbers(kind),
            N=1 if means is None else means.size,
            num_warps=warps,
        )
    return out, scale, product
