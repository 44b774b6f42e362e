"""One pass each over attention outputs: round what one lacks of another, and add it to a third.

Shape legend: B batch, H heads, S tokens, D head dim.

What is lacking stands in numbers of 8 or 4 bits, each row with a scale. A program owns a few tokens
of one head. In torch adding takes three passes of 8 bits, and ten of 4, each with a copy as large
as the output; rounding takes seven and about twenty.
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
# added to a small number and taken off again, it leaves the nearest whole one, halves to even.
_NEAREST = tl.constexpr(1.5 * 2**23)


@triton.jit
def _rows(H, BH, BLOCK_S: tl.constexpr):
    """Sample, head and tokens of this program, int64."""
    pid = tl.program_id(0)
    # heads of the same tokens run together: in the pipelines' layout they are neighbours.
    place = (pid % BH).to(tl.int64)
    token = (pid // BH) * BLOCK_S + tl.arange(0, BLOCK_S)
    return place // H, place % H, token.to(tl.int64)


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
    batch, head, row = _rows(H, BH, BLOCK_S)
    there = row < S
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


@triton.jit
def _rounded(lacking, scale_ptr, scale_off, there, MOST: tl.constexpr):
    """Store the scale of each row of ``lacking``; returns whole numbers, 0 for what is none."""
    scale = tl.max(tl.abs(lacking), 1) / MOST
    # maxima pass over NaN.
    broken = tl.max((lacking != lacking).to(tl.int32), 1) > 0
    scale = tl.where(broken, float("nan"), scale).to(scale_ptr.dtype.element_ty)
    tl.store(scale_ptr + scale_off, scale, mask=there)
    # as the scale is kept, so that its own rounding is no error.
    scale = scale.to(tl.float32)
    steps = lacking / tl.where(scale == 0, 1.0, scale)[:, None]
    steps = tl.where(steps == steps, steps, 0.0)
    steps = tl.minimum(tl.maximum(steps, -MOST), MOST)
    return ((steps + _NEAREST) - _NEAREST).to(tl.int32)


@triton.jit
def _difference(dense_ptr, dense_off, sparse_ptr, sparse_off, alive):
    dense = tl.load(dense_ptr + dense_off, mask=alive, other=0.0).to(tl.float32)
    return dense - tl.load(sparse_ptr + sparse_off, mask=alive, other=0.0).to(tl.float32)


@triton.jit
def round_kernel(
    dense_ptr,
    sparse_ptr,
    values_ptr,
    scale_ptr,
    S,
    H,
    BH,
    stride_db,
    stride_dh,
    stride_ds,
    stride_pb,
    stride_ph,
    stride_ps,
    stride_vb,
    stride_vh,
    stride_vs,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_S: tl.constexpr,
    FOUR: tl.constexpr,
):
    """Round BLOCK_S rows to WIDTH bytes each; last strides are 1, scales are contiguous."""
    batch, head, row = _rows(H, BH, BLOCK_S)
    there = row < S
    off_w = tl.arange(0, BLOCK_W)
    alive = there[:, None] & (off_w < WIDTH)[None, :]
    dense_off = batch * stride_db + head * stride_dh + row * stride_ds
    sparse_off = batch * stride_pb + head * stride_ph + row * stride_ps
    dense_off = dense_off[:, None] + off_w[None, :]
    sparse_off = sparse_off[:, None] + off_w[None, :]
    values_off = (batch * stride_vb + head * stride_vh + row * stride_vs)[:, None] + off_w[None, :]
    scale_off = ((batch * H + head) * S + row) * (2 if FOUR else 1)
    lacking = _difference(dense_ptr, dense_off, sparse_ptr, sparse_off, alive)
    if FOUR:
        low = _rounded(lacking, scale_ptr, scale_off, there, 7.0) + 8
        # an odd head has a channel less in its second half.
        both = alive & (off_w + WIDTH < D)[None, :]
        lacking = _difference(dense_ptr, dense_off + WIDTH, sparse_ptr, sparse_off + WIDTH, both)
        high = _rounded(lacking, scale_ptr, scale_off + 1, there, 7.0) + 8
        values = low | tl.where(both, high, 0) << 4
        tl.store(values_ptr + values_off, values.to(tl.uint8), mask=alive)
    else:
        values = _rounded(lacking, scale_ptr, scale_off, there, 127.0)
        tl.store(values_ptr + values_off, values.to(tl.int8), mask=alive)


def round_difference(dense: Tensor, sparse: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """What ``sparse`` lacks of ``dense``, in numbers of 8 or 4 bits and their scales.

    Args:
        dense: ``[B, H, S, D]`` of any strides.
        sparse: the same.
        bits: of a value, 8 or 4.

    Returns:
        values: int8 ``[B, H, S, D]``, at most 127 in size; or of 4 bits uint8
            ``[B, H, S, ceil(D / 2)]``, both halves of a head plus 8 in a byte, the second above.
            Heads and tokens lie as in ``sparse``.
        scale: ``[B, H, S, 1]`` in the dtype of ``dense``, or of 4 bits ``[B, H, S, 2]``.
    """
    dense, sparse = (x if x.stride(-1) == 1 else x.contiguous() for x in (dense, sparse))
    batch, heads, tokens, dim = dense.shape
    width = dim if bits == 8 else -(-dim // 2)
    kind = torch.int8 if bits == 8 else torch.uint8
    # laid out like what it will be added to.
    values = torch.empty_like(sparse[..., :width], dtype=kind)
    scale = dense.new_empty(batch, heads, tokens, 8 // bits)
    block_w = triton.next_power_of_2(width)
    block_s = max(1, STEP_ELEMENTS // block_w)
    # triton launches on the current device, which need not be the one that holds the tensors.
    with torch.cuda.device_of(dense):  # type: ignore[no-untyped-call]
        round_kernel[(triton.cdiv(tokens, block_s) * batch * heads,)](
            dense,
            sparse,
            values,
            scale,
            tokens,
            heads,
            batch * heads,
            *dense.stride()[:3],
            *sparse.stride()[:3],
            *values.stride()[:3],
            D=dim,
            WIDTH=width,
            BLOCK_W=block_w,
            BLOCK_S=block_s,
            FOUR=bits == 4,
            num_warps=WARPS,
        )
    return values, scale


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
