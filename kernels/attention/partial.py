"""Attention to a part of the keys, and what joins the parts to attention to all of them.

With the log-sum-exp of its scores a part says how much of the softmax it holds, so that parts of
the keys, seen one after the other, give what all of them would have given at once:

    lse = ln(e^lse_1 + e^lse_2),    o = e^(lse_1 - lse) o_1 + e^(lse_2 - lse) o_2
"""

from __future__ import annotations

import torch
from torch import Tensor

from .with_lse import attend_with_lse


def attend_to_part(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of all queries to all of these keys, by PyTorch's own kernels.

    Args:
        q: queries ``[B, H, S, D]``.
        k: keys ``[B, H, K, D]``.
        v: values ``[B, H, K, D]``.

    Returns:
        Output ``[B, H, S, D]`` in the dtype of ``q`` and the natural log-sum-exp of the scaled
        scores ``[B, H, S]`` in fp32 (fp64 where the inputs are).
    """
    # the operators themselves: the public function keeps the log-sum-exp to itself.
    if q.device.type == "cpu":
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        return attend_with_lse(q, k, v, None, q.shape[-1] ** -0.5)
    if q.dtype in (torch.float16, torch.bfloat16):
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)[:2]
        return out, lse
    out, lse = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True)[:2]
    # its rows are rounded up.
    return out, lse[:, :, : q.shape[2]]


def join(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> Tensor:
    """Join attention to one more part of the keys into ``out``, in place; the new log-sum-exp.

    ``out`` and ``part`` are ``[B, H, S, D]``, ``lse`` and ``part_lse`` ``[B, H, S]``, where a row
    that saw no keys has zeros and -inf. ``out`` is wide enough to be added to (fp32).
    """
    joined = torch.logaddexp(lse, part_lse)
    # a row without keys in either: what minus infinity less itself is, is nobody's weight.
    weight = torch.where(joined == -torch.inf, 0.0, (part_lse - joined).exp())
    out.lerp_(part.to(out.dtype), weight.unsqueeze(-1).to(out.dtype))
    return joined
