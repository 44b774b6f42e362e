"""Rotary embedding in one pass: what PyTorch does in eight, six of them over fp32 copies.

Shape legend: B batch, S tokens, H heads, D head dim, P = D / 2 pairs of channels.

A program owns some rows (token and head) and moves them whole. The two products of a channel are
rounded before they are added, as PyTorch's separate operations round them, so that the answer is
the same to the last bit.
"""

# what triton compiles is not typed python.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WARPS = 4
# channels that a program moves: two vectors of 16 bytes of 16-bit numbers for each thread.
BLOCK_ELEMENTS = 2048


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
):
    """Rotate BLOCK_R rows; ``out`` is contiguous, the last stride of ``x`` is 1."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    head = row % H
    token = row // H % S
    sample = row // H // S
    alive = (row < ROWS)[:, None]
    channel = tl.arange(0, 2 * BLOCK_P)
    pair = tl.arange(0, BLOCK_P)

    channel_alive = alive & (channel < 2 * P)[None, :]
    off_x = (sample * stride_xb + token * stride_xs + head * stride_xh)[:, None] + channel[None, :]
    x = tl.load(x_ptr + off_x, mask=channel_alive, other=0.0).to(tl.float32)
    even, odd = tl.split(tl.reshape(x, [BLOCK_R, BLOCK_P, 2]))

    off_c = (sample * stride_cb + token * stride_cs + head * stride_ch)[:, None]
    off_c += (pair * stride_cp)[None, :]
    pair_alive = alive & (pair < P)[None, :]
    cos = tl.load(cos_ptr + off_c, mask=pair_alive, other=0.0)
    sin = tl.load(sin_ptr + off_c, mask=pair_alive, other=0.0)

    rotated = tl.join(even * cos - odd * sin, even * sin + odd * cos)
    out = tl.reshape(rotated, [BLOCK_R, 2 * BLOCK_P])
    off_o = row[:, None] * (2 * P) + channel[None, :]
    tl.store(out_ptr + off_o, out.to(out_ptr.dtype.element_ty), mask=channel_alive)


def can_rotate(x: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Whether ``rotate_pairs`` knows such tensors; the device is not looked at."""
    return (
        x.ndim in (3, 4)
        and x.stride(-1) == 1
        and x.dtype in (torch.float16, torch.bfloat16, torch.float32)
        and cos.dtype == sin.dtype == torch.float32
        and cos.stride() == sin.stride()
    )


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of ``x`` ``[B, S, H, D]`` or ``[B, S, D]``, channels in neighbouring pairs.

    ``cos`` and ``sin``, fp32, are of equal strides and broadcast to ``[..., D / 2]``, one angle for
    each pair. The answer is contiguous and of the dtype of ``x``.
    """
    shape = x.shape
    pairs = shape[-1] // 2
    cos, sin = (angle.expand(*shape[:-1], pairs) for angle in (cos, sin))
    if x.ndim == 3:
        x, cos, sin = (part.unsqueeze(2) for part in (x, cos, sin))
    batch, tokens, heads, _ = x.shape
    out = torch.empty(shape, dtype=x.dtype, device=x.device)
    rows = batch * tokens * heads
    block_p = triton.next_power_of_2(pairs)
    block_r = max(1, BLOCK_ELEMENTS // (2 * block_p))
    # triton launches on the current device, which need not be the one that holds the tensors.
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        rotate_kernel[(triton.cdiv(rows, block_r),)](
            x,
            cos,
            sin,
            out,
            tokens,
            heads,
            rows,
            *x.stride()[:3],
            *cos.stride(),
            P=pairs,
            BLOCK_P=block_p,
            BLOCK_R=block_r,
            num_warps=WARPS,
            # a fused multiply-add would round once where PyTorch rounds twice.
            enable_fp_fusion=False,
        )
    return out
