"""Rotary embedding in one pass: what PyTorch does in eight, six of them over fp32 copies.

Shape legend: B batch, S tokens, H heads, D head dim, P = D / 2 pairs of channels.

A program owns some rows (token and head) and moves them whole. Neighbouring channels of 16 bits
that form a pair are read and written as one word, so that a thread has both and its angle; halves
of a row that form pairs are two rows of their own.

Products are rounded before they are added, as PyTorch's separate operations round them; where the
host multiplies and adds at once (``halves``), so does the kernel. The answer is the same to the
last bit.
"""

# what triton compiles is not typed python.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WARPS = 4
# pairs that a program turns: one vector of 16 bytes for each thread, of every kind.
BLOCK_PAIRS = 512


@triton.jit
def rotate_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    S,
    H,
    ROWS,
    stride_xb,
    stride_xs,
    stride_xh,
    stride_cb,
    stride_cs,
    stride_ch,
    stride_cp,
    P: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_R: tl.constexpr,
    HALVES: tl.constexpr,
    BF16: tl.constexpr,
):
    """Rotate BLOCK_R rows; ``out`` is contiguous, the last stride of ``x`` is 1.

    ``x`` and ``out`` are words of two channels, and so are strides of ``x``; with HALVES they are
    channels.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    head = row % H
    token = row // H % S
    sample = row // H // S
    pair = tl.arange(0, BLOCK_P)
    alive = (row < ROWS)[:, None] & (pair < P)[None, :]
    off_c = (sample * stride_cb + token * stride_cs + head * stride_ch)[:, None]
    off_c += (pair * stride_cp)[None, :]
    off_x = (sample * stride_xb + token * stride_xs + head * stride_xh)[:, None] + pair[None, :]
    cos = tl.load(cos_ptr + off_c, mask=alive, other=0.0)
    sin = tl.load(sin_ptr + off_c, mask=alive, other=0.0)
    if HALVES:
        first = tl.load(x_ptr + off_x, mask=alive, other=0.0).to(tl.float32)
        second = tl.load(x_ptr + off_x + P, mask=alive, other=0.0).to(tl.float32)
        off_o = row[:, None] * (2 * P) + pair[None, :]
        turned = tl.fma(-sin, second, first * cos)
        tl.store(out_ptr + off_o, turned.to(out_ptr.dtype.element_ty), mask=alive)
        turned = tl.fma(sin, first, second * cos)
        tl.store(out_ptr + off_o + P, turned.to(out_ptr.dtype.element_ty), mask=alive)
    else:
        word = tl.load(x_ptr + off_x, mask=alive, other=0)
        dtype: tl.constexpr = tl.bfloat16 if BF16 else tl.float16
        even = word.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
        odd = (word >> 16).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
        low = (even * cos - odd * sin).to(dtype).to(tl.int16, bitcast=True)
        high = (even * sin + odd * cos).to(dtype).to(tl.int16, bitcast=True)
        word = (high.to(tl.int32) << 16) | (low.to(tl.int32) & 0xFFFF)
        tl.store(out_ptr + row[:, None] * P + pair[None, :], word, mask=alive)


def can_rotate(x: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Whether ``rotate_rows`` knows such tensors; the device is not looked at."""
    words = x.storage_offset() % 2 == 0 and all(stride % 2 == 0 for stride in x.stride()[:-1])
    return (
        x.ndim in (3, 4)
        and x.stride(-1) == 1
        and x.dtype in (torch.float16, torch.bfloat16)
        and words
        and cos.dtype == sin.dtype == torch.float32
        and cos.stride() == sin.stride()
    )


def rotate_rows(x: Tensor, cos: Tensor, sin: Tensor, *, halves: bool = False) -> Tensor:
    """Rotary embedding of ``x`` ``[B, S, H, D]`` or ``[B, S, D]``, fp16 or bf16.

    Args:
        x: what to rotate; its last stride is 1.
        cos: fp32, broadcasts to ``[..., D / 2]``, one angle for each pair of channels.
        sin: the same, of equal strides.
        halves: the first half of the channels pairs up with the second; otherwise neighbours do.

    Returns:
        A contiguous tensor of the shape and dtype of ``x``.
    """
    shape = x.shape
    pairs = shape[-1] // 2
    cos, sin = (angle.expand(*shape[:-1], pairs) for angle in (cos, sin))
    if x.ndim == 3:
        x, cos, sin = (part.unsqueeze(2) for part in (x, cos, sin))
    batch, tokens, heads, _ = x.shape
    out = torch.empty(shape, dtype=x.dtype, device=x.device)
    bf16 = x.dtype == torch.bfloat16
    source, target = (x, out) if halves else (x.view(torch.int32), out.view(torch.int32))
    rows = batch * tokens * heads
    block_p = triton.next_power_of_2(pairs)
    block_r = max(1, BLOCK_PAIRS // block_p)
    # triton launches on the current device, which need not be the one that holds the tensors.
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        rotate_kernel[(triton.cdiv(rows, block_r),)](
            source,
            cos,
            sin,
            target,
            tokens,
            heads,
            rows,
            *source.stride()[:3],
            *cos.stride(),
            P=pairs,
            BLOCK_P=block_p,
            BLOCK_R=block_r,
            HALVES=halves,
            BF16=bf16,
            num_warps=WARPS,
            # a fused multiply-add would round once where PyTorch rounds twice.
            enable_fp_fusion=False,
        )
    return out
