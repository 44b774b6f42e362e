"""One pass that smooths, scales and rounds queries or keys to 8 or 4 bits, in any token order.

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

from .quantize import FORMATS, FOUR_BITS, ROWS_AT_ONCE, SMALLEST, whole_numbers

WARPS = 8


@triton.jit
def quantize_kernel(
    x_ptr,
    out_ptr,
    scale_ptr,
    order_ptr,
    subtract_ptr,
    multiply_ptr,
    product_ptr,
    stride_xb,
    stride_xh,
    stride_xs,
    H,
    S,
    RUNS,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    RUN: tl.constexpr,
    ROWS: tl.constexpr,
    TOP: tl.constexpr,
    SMALLEST: tl.constexpr,
    INTEGER: tl.constexpr,
):
    """Quantise ROWS tokens of one head; ``x`` has a last stride of 1, the rest is contiguous."""
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
    if multiply_ptr is not None:
        factor = tl.load(multiply_ptr + head * D + off_d, mask=dim_alive, other=0.0)
        product = tl.sum(x * factor[None, :], 1)
        tl.store(product_ptr + head * S + off_s, product, mask=alive)
    if subtract_ptr is not None:
        mean = tl.load(subtract_ptr + head * D + off_d, mask=dim_alive, other=0.0)
        # what is not there must not become the mean's negative: it would set the scale.
        x = tl.where(alive[:, None], x - mean[None, :], 0.0)
    largest = tl.max(tl.abs(x), 1).reshape(ROWS // RUN, RUN)
    largest = tl.maximum(tl.max(largest, 1), SMALLEST)
    off_r = tl.program_id(0) * (ROWS // RUN) + tl.arange(0, ROWS // RUN)
    tl.store(scale_ptr + head * RUNS + off_r, tl.div_rn(largest, TOP), mask=off_r < RUNS)
    inverse = tl.div_rn(TOP, largest)[:, None]
    x *= tl.broadcast_to(inverse, [ROWS // RUN, RUN]).reshape(ROWS)[:, None]
    if INTEGER:
        # a cast cuts the fraction off.
        x = tl.floor(x + 0.5)
    off_out = (head * S + off_s)[:, None] * D + off_d[None, :]
    tl.store(out_ptr + off_out, x.to(out_ptr.dtype.element_ty), mask=both)


def triton_quantize_runs(
    x: Tensor,
    kind: str,
    run: int,
    order: Tensor | None,
    subtract: Tensor | None,
    multiply: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Launch the kernel; see ``quantize_runs`` for arguments and answers."""
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
    grid = (triton.cdiv(tokens, ROWS_AT_ONCE), batch * heads)
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
            *x.stride()[:3],
            heads,
            tokens,
            runs,
            D=dim,
            BLOCK_D=triton.next_power_of_2(dim),
            RUN=run,
            ROWS=ROWS_AT_ONCE,
            TOP=top,
            SMALLEST=SMALLEST,
            INTEGER=whole_numbers(kind),
            num_warps=WARPS,
        )
    return out, scale, product
