"""Dense attention as the host computes it, by the backend of diffusers that its user has set."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor


def swapped(x: Tensor) -> Tensor:
    """From ``[B, S, H, D]`` to ``[B, H, S, D]`` and back."""
    return x.transpose(1, 2)


def stock_attention(
    stock: Any, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    """The host's own attention on ``[B, H, S, D]``, with the backend the user has set.

    CogVideoX and Mochi know no backends and call PyTorch's. ``mask`` is added to scores. A row
    attends to those before it alone where ``causal``, with fewer heads of k and v than of q, too.
    """
    if not _dispatches(stock):
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=causal)
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    out: Tensor = dispatch_attention_fn(
        *(swapped(x) for x in (q, k, v)),
        attn_mask=mask,
        is_causal=causal,
        enable_gqa=causal,
        backend=getattr(stock, "_attention_backend", None),
    )
    return swapped(out)


def chooses_backend(stock: Any) -> bool:
    """Whether the user has set an attention backend, on the processor or for all of diffusers."""
    if not _dispatches(stock):
        return False
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    active, _ = _AttentionBackendRegistry.get_active_backend()
    own = getattr(stock, "_attention_backend", None)
    return own is not None or active != AttentionBackendName.NATIVE


def _dispatches(stock: Any) -> bool:
    """Whether the host's processor attends by a backend of diffusers.

    Cosmos' has none of its own to be set, and goes by the one that is set for all of diffusers.
    """
    code = getattr(getattr(type(stock), "__call__", None), "__code__", None)  # noqa: B004
    dispatches = code is not None and "dispatch_attention_fn" in code.co_names
    return dispatches or hasattr(stock, "_attention_backend")
