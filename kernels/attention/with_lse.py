"""Attention to all of a few keys, with the log-sum-exp of its scores, by PyTorch's CPU kernel.

What `torch` calls once for every few blocks, and a ring for every part of the keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

# with fewer keys than numbers in a vector, pytorch's kernel takes a query that is NaN for one
# without keys. two products of so few cost no more.
FLASH_KEYS = 16


def has_flash(device: torch.device) -> bool:
    """Whether one of PyTorch's fused kernels is called."""
    # those that report a log-sum-exp differ by device and build, and speed is not the point off the
    # CPU: two products and a softmax run everywhere.
    return device.type == "cpu"


def attend_with_lse(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of all queries to all keys.

    Args:
        q: queries ``[B, H, S, D]``, of a last stride of 1 like ``k`` and ``v``: the kernel takes
            that for granted.
        k: keys ``[B, H, K, D]``.
        v: values ``[B, H, K, D]``.
        bias: added to the scaled scores, ``[B, 1, 1, K]``, or None.
        scale: of the scores.

    Returns:
        Output ``[B, H, S, D]`` in the dtype of ``q`` and the natural log-sum-exp of the scores
        ``[B, H, S]`` in fp32 (fp64 where the inputs are).
    """
    if has_flash(q.device) and k.shape[2] >= FLASH_KEYS:
        mask = None if bias is None else bias.expand(q.shape[0], 1, q.shape[2], k.shape[2])
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, attn_mask=mask, scale=scale
        )
        # in 16 bits its output is finite where scores are infinite; its log-sum-exp tells.
        if q.dtype.itemsize == 2 and not (there := lse.isfinite()).all():
            out = out.masked_fill(~there.unsqueeze(-1), torch.nan)
        return out, lse
    # in fp32: scores rounded to the inputs' 16 bits would cost more than all the rest.
    work = torch.promote_types(q.dtype, torch.float32)
    scores = (q.to(work) @ k.to(work).transpose(-1, -2)) * scale
    if bias is not None:
        scores = scores + bias
    return (scores.softmax(-1) @ v.to(work)).to(q.dtype), scores.logsumexp(-1)
