"""What the kernels that gather keys by lists agree on, whatever they are written in."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from ..tokens.formats import QuantizedQK
from .gates import Gate
from .means import KeyMeans

# weights relative to an anchor hold for a row whose sum of them is no larger. So far from fp32's
# last power of two that the sum's reciprocal is no subnormal.
LARGEST_SUM = tl.constexpr(2.0**120)

# keys and values of the heads worked on at a time: what an H100's L2 of 50 MB keeps while queries
# and outputs pass through it.
TOGETHER_BYTES = 32 * 1024 * 1024


def heads_together(heads: int, head_bytes: int) -> int:
    """How many heads of ``head_bytes`` keys and values are worked on at a time."""
    return max(1, min(heads, TOGETHER_BYTES // head_bytes))


def is_anchored(gate: Gate | None, dtype: torch.dtype) -> bool:
    """Whether a row's weights are relative to its first scores; fp16 has none far above 1."""
    return gate is None and dtype != torch.float16


def tables(
    q_tiles: Tensor | None,
    kv_count: Tensor | None,
    kv_index: Tensor | None,
    quantized: QuantizedQK | None,
) -> tuple[Tensor | None, ...]:
    """The plan and the scales of 8-bit operands as kernels of attention take them."""
    plan = tuple(None if x is None else x.contiguous() for x in (q_tiles, kv_count, kv_index))
    if quantized is None:
        return *plan, None, None, None
    return *plan, quantized.q_scale, quantized.k_scale, quantized.shift


def tables_of_means(means: KeyMeans | None) -> tuple[Tensor | None, ...]:
    """Mean keys and values, the scales of 8-bit mean keys and counts, as kernels take them."""
    if means is None:
        return None, None, None, None
    k = means.k if means.k8 is None else means.k8
    return k.contiguous(), means.v.contiguous(), means.k8_scale, means.counts.contiguous()
