"""Rotary embedding in one pass: what PyTorch does in eight, six of them over fp32 copies.

Of neighbouring channels the norm of each head may come before, in the same pass.

Shape legend: B batch, S tokens, H heads, D head dim, P = D / 2 pairs of channels.

A program owns one token and walks through its heads, a few at a time; angles that heads share stay
in registers. Neighbouring channels of 16 bits that form a pair are read and written as one word, so
that a thread has both and its angle; halves of a head that form pairs are two rows of their own.

Products are rounded before they are added, as PyTorch's separate operations round them; where the
host multiplies and adds at once (``halves``), so does the kernel. The answer is the same to the
last bit; with a norm, whose mean is a sum in another order, but for a rounding.
"""

# what triton compiles is not typed python.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WARPS = 2
# pairs that a step turns: 2 vectors of 16 bytes for each thread.
STEP_PAIRS = 512


@triton.jit
def rotate_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    weight_ptr,
    eps,
    S,
    H,
    FIRST,
    TURNED,
    stride_xb,
    stride_xs,
    stride_xh,
    stride_cb,
    stride_cs,
    stride_ch,
    stride_cp,
    P: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_H: tl.constexpr,
    SHARED: tl.constexpr,
    HALVES: tl.constexpr,
    BF16: tl.constexpr,
):
    """Rotate one token; ``out`` is contiguous, the last stride of ``x`` is 1.

    TURNED tokens from FIRST on have angles, the others turn by nothing. With a ``weight`` every
    head is normed before, by the root of its mean square.

    ``x`` and ``out`` are words of two channels, and so are strides of ``x``; with HALVES they are
    channels. With SHARED all heads have the same angles.
    """
    place = tl.program_id(0).to(tl.int64)
    token, sample = place % S, place // S
    pair = tl.arange(0, BLOCK_P)
    pair_alive = pair < P
    x_ptr += sample * stride_xb + token * stride_xs + pair[None, :]
    out_ptr += place * H * P * (2 if HALVES else 1) + pair[None, :]
    turns = (token >= FIRST) & (token < FIRST + TURNED)
    off_c = sample * stride_cb + (token - FIRST) * stride_cs + pair * stride_cp
    if SHARED:
        cos = tl.load(cos_ptr + off_c, mask=pair_alive & turns, other=1.0)[None, :]
        sin = tl.load(sin_ptr + off_c, mask=pair_alive & turns, other=0.0)[None, :]
    dtype: tl.constexpr = tl.bfloat16 if BF16 else tl.float16
    if weight_ptr is not None:
        even_weight = tl.load(weight_ptr + 2 * pair, mask=pair_alive, other=0.0)[None, :]
        odd_weight = tl.load(weight_ptr + 2 * pair + 1, mask=pair_alive, other=0.0)[None, :]
    for start in range(0, H, BLOCK_H):
        head = (start + tl.arange(0, BLOCK_H))[:, None]
        alive = (head < H) & pair_alive[None, :]
        if not SHARED:
            off = off_c[None, :] + head * stride_ch
            cos = tl.load(cos_ptr + off, mask=alive & turns, other=1.0)
            sin = tl.load(sin_ptr + off, mask=alive & turns, other=0.0)
        if HALVES:
            first = tl.load(x_ptr + head * stride_xh, mask=alive, other=0.0).to(tl.float32)
            second = tl.load(x_ptr + head * stride_xh + P, mask=alive, other=0.0).to(tl.float32)
            into = out_ptr + head * (2 * P)
            turned = tl.fma(-sin, second, first * cos)
            tl.store(into, turned.to(out_ptr.dtype.element_ty), mask=alive)
            turned = tl.fma(sin, first, second * cos)
            tl.store(into + P, turned.to(out_ptr.dtype.element_ty), mask=alive)
        else:
            word = tl.load(x_ptr + head * stride_xh, mask=alive, other=0)
            even = word.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
            odd = (word >> 16).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
            if weight_ptr is not None:
                square = tl.sum(even * even + odd * odd, 1)[:, None] / (2 * P)
                factor = tl.rsqrt(square + eps)
                # rounded where the host's norm rounds.
                even = ((even * factor).to(dtype) * even_weight).to(dtype).to(tl.float32)
                odd = ((odd * factor).to(dtype) * odd_weight).to(dtype).to(tl.float32)
            low = (even * cos - odd * sin).to(dtype).to(tl.int16, bitcast=True)
            high = (even * sin + odd * cos).to(dtype).to(tl.int16, bitcast=True)
            word = (high.to(tl.int32) << 16) | (low.to(tl.int32) & 0xFFFF)
            tl.store(out_ptr + head * P, word, mask=alive)


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


def rotate_rows(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    halves: bool = False,
    first: int | None = None,
    norm: tuple[Tensor, float] | None = None,
) -> Tensor:
    """Rotary embedding of ``x`` ``[B, S, H, D]`` or ``[B, S, D]``, fp16 or bf16.

    Args:
        x: what to rotate; its last stride is 1.
        cos: fp32, broadcasts to ``[..., D / 2]``, one angle for each pair of channels.
        sin: the same, of equal strides.
        halves: the first half of the channels pairs up with the second; otherwise neighbours do.
        first: the token that the angles, ``[T, H or 1, D / 2]``, begin at; there may be fewer than
            S. None: every token has its own.
        norm: each head of neighbouring channels is divided by the root of its mean square plus a
            number, and multiplied by a weight ``[D]`` of the dtype of ``x``, before.

    Returns:
        A contiguous tensor of the shape and dtype of ``x``.
    """
    assert norm is None or not halves
    shape = x.shape
    pairs = shape[-1] // 2
    turned = shape[1] if first is None else cos.shape[-3]
    wide = (shape[0], turned, *shape[2:-1], pairs)
    cos, sin = (angle.expand(wide) for angle in (cos, sin))
    if x.ndim == 3:
        x, cos, sin = (part.unsqueeze(2) for part in (x, cos, sin))
    batch, tokens, heads, _ = x.shape
    out = torch.empty(shape, dtype=x.dtype, device=x.device)
    bf16 = x.dtype == torch.bfloat16
    source, target = (x, out) if halves else (x.view(torch.int32), out.view(torch.int32))
    block_p = triton.next_power_of_2(pairs)
    block_h = min(max(1, STEP_PAIRS // block_p), triton.next_power_of_2(heads))
    # triton launches on the current device, which need not be the one that holds the tensors.
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        rotate_kernel[(batch * tokens,)](
            source,
            cos,
            sin,
            target,
            None if norm is None else norm[0],
            0.0 if norm is None else norm[1],
            tokens,
            heads,
            first or 0,
            turned,
            *source.stride()[:3],
            *cos.stride(),
            P=pairs,
            BLOCK_P=block_p,
            BLOCK_H=block_h,
            SHARED=heads == 1 or cos.stride(2) == 0,
            HALVES=halves,
            BF16=bf16,
            num_warps=WARPS,
            # a fused multiply-add would round once where PyTorch rounds twice.
            enable_fp_fusion=False,
        )
    return out
