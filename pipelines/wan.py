"""Wan 2.1 and 2.2: video self-attention in ``blocks.N.attn1``, no text in the sequence."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from torch import Tensor

from vidsparse.errors import UnsupportedError
from vidsparse.grid import TokenGrid
from vidsparse.pipelines.adapter import Adapter, SparseProcessor, video_attention
from vidsparse.pipelines.families import WAN


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of ``x`` ``[B, S, H, D]``, channels in neighbouring pairs.

    ``cos`` and ``sin`` ``[1, S, 1, D]`` hold every angle twice. The product is formed in their
    precision and rounded once, as the stock processor does.
    """
    even, odd = x[..., 0::2], x[..., 1::2]
    cos, sin = cos[..., 0::2], sin[..., 1::2]
    out = x.new_empty(x.shape)
    out[..., 0::2] = even * cos - odd * sin
    out[..., 1::2] = even * sin + odd * cos
    return out


class WanSparseProcessor(SparseProcessor):
    """Stands in for diffusers' ``WanAttnProcessor`` in self-attention; same call signature."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Self-attention of ``hidden_states`` ``[B, S, C]``."""
        if encoder_hidden_states is not None or attention_mask is not None:
            raise UnsupportedError("Wan's video self-attention takes no text and no mask here")
        if attn.fused_projections:
            q, k, v = attn.to_qkv(hidden_states).chunk(3, dim=-1)
        else:
            q, k, v = attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states)
        q = attn.norm_q(q).unflatten(2, (attn.heads, -1))
        k = attn.norm_k(k).unflatten(2, (attn.heads, -1))
        v = v.unflatten(2, (attn.heads, -1))
        if rotary_emb is not None:
            q, k = _rotate(q, *rotary_emb), _rotate(k, *rotary_emb)
        out = video_attention(q, k, v, self.address).flatten(2, 3).type_as(q)
        projected: Tensor = attn.to_out[1](attn.to_out[0](out))
        return projected


def _dense(stock: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The host's own attention on ``[B, H, S, D]``, with the backend the user has set."""
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    out: Tensor = dispatch_attention_fn(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), backend=stock._attention_backend
    )
    return out.transpose(1, 2)


def _grid(transformer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> TokenGrid | None:
    """Tokens of the latent ``[B, C, T, H, W]`` after patching."""
    latent = kwargs.get("hidden_states", args[0] if args else None)
    if not isinstance(latent, Tensor) or latent.ndim != 5:
        return None
    patch = transformer.config.patch_size
    frames, height, width = (n // p for n, p in zip(latent.shape[2:], patch, strict=True))
    return TokenGrid(frames, height, width)


ADAPTER: Final = Adapter(
    family=WAN,
    transformers=("transformer", "transformer_2"),
    attention=re.compile(r"blocks\.(\d+)\.attn1"),
    stock_processors=("WanAttnProcessor",),
    processor=WanSparseProcessor,
    dense=_dense,
    grid=_grid,
    branches=("conditional", "unconditional"),
)
