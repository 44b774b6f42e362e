"""One pass over an attention output: add numbers of 8 or 4 bits to it, each row by a scale.

Shape legend: B batch, H heads, S tokens, D head dim.

A program owns a few tokens of one head. In torch it takes three passes of 8 bits, and ten of 4,
each with a copy as large as the output.
"""

# what triton compiles is not typed python.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WARPS = 4
# numbers of a program: 16 bytes of 16-bit numbers for each of its threads, four times.
STEP_ELEMENTS = 4096


@triton.jit
def _scaled_sum(out_ptr, out_off, alive, steps, scale, factor):
    """Add ``factor * steps * scale`` to what is at ``out_off``, rounded once."""
    out = tl.load(out_ptr + out_off, mask=alive, other=0.0).to(tl.float32)
    out = tl.fma(steps * scale, factor, out)
    tl.store(out_ptr + out_off, out.to(out_ptr.dtype.element_ty), mask=alive)


@triton.jit
def add_kernel(
    out_ptr,
    values_ptr,
    scale_ptr,
    S,
    H,
    BH,
    factor,
    stride_ob,
    stride_oh,
    stride_os,
    stride_vb,
    stride_vh,
    stride_vs,
    stride_sb,
    stride_sh,
    stride_ss,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_S: tl.constexpr,
    FOUR: tl.constexpr,
):
    """Add BLOCK_S rows of ``values`` of WIDTH bytes; last strides are 1."""
    pid = tl.program_id(0)
    # heads of the same tokens run together: in the pipelines' layout they are neighbours.
    head = pid % BH
    token = (pid // BH) * BLOCK_S + tl.arange(0, BLOCK_S)
    batch, head = (head // H).to(tl.int64), (head % H).to(tl.int64)
    there = token < S
    row = token.to(tl.int64)
    off_w = tl.arange(0, BLOCK_W)
    alive = there[:, None] & (off_w < WIDTH)[None, :]
    values_off = batch * stride_vb + head * stride_vh + row * stride_vs
    values = tl.load(values_ptr + values_off[:, None] + off_w[None, :], mask=alive, other=0)
    scale_ptr += batch * stride_sb + head * stride_sh
    scale = tl.load(scale_ptr + row * stride_ss, mask=there, other=0.0).to(tl.float32)[:, None]
    out_off = (batch * stride_ob + head * stride_oh + row * stride_os)[:, None] + off_w[None, :]
    if FOUR:
        values = values.to(tl.int32)
        low = ((values & 15) - 8).to(tl.float32)
        _scaled_sum(out_ptr, out_off, alive, low, scale, factor)
        scale = tl.load(scale_ptr + row * stride_ss + 1, mask=there, other=0.0)
        high = ((values >> 4) - 8).to(tl.float32)
        # an odd head has a channel less in its second half.
        alive = alive & (off_w + WIDTH < D)[None, :]
        _scaled_sum(out_ptr, out_off + WIDTH, alive, high, scale.to(tl.float32)[:, None], factor)
    else:
        _scaled_sum(out_ptr, out_off, alive, values.to(tl.float32), scale, factor)


def add_scaled(out: Tensor, values: Tensor, scale: Tensor, factor: float, bits: int) -> Tensor:
    """Add ``factor`` times what ``values`` stand for to ``out``, in place; returns ``out``.

    Args:
        out: ``[B, H, S, D]`` of any strides whose last is 1.
        values: int8 ``[B, H, S, D]``; or of 4 bits uint8 ``[B, H, S, ceil(D / 2)]``, both halves of
            a head plus 8 in a byte, the second above.
        scale: ``[B, H, S, 1]``, or of 4 bits ``[B, H, S, 2]``, one for each half.
        factor: of all.
        bits: of a value, 8 or 4.
    """
    values, scale = (x if x.stride(-1) == 1 else x.contiguous() for x in (values, scale))
    batch, heads, tokens, dim = out.shape
    width = values.shape[-1]
    block_w = triton.next_power_of_2(width)
    block_s = max(1, STEP_ELEMENTS // block_w)
    # triton launches on the current device, which need not be the one that holds the tensors.
    with torch.cuda.device_of(out):  # type: ignore[no-untyped-call]
        add_kernel[(triton.cdiv(tokens, block_s) * batch * heads,)](
            out,
            values,
            scale,
            tokens,
            heads,
            batch * heads,
            float(factor),
            *out.stride()[:3],
            *values.stride()[:3],
            *scale.stride()[:3],
            D=dim,
            WIDTH=width,
            BLOCK_W=block_w,
            BLOCK_S=block_s,
            FOUR=bits == 4,
            num_warps=WARPS,
        )
    return out
