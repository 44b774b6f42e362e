"""Attention over video and text at once, text after video: HunyuanVideo, HunyuanVideo 1.5, Mochi.

The three differ in where rotary angles come from. Their masks hold the padding of the text, which
the session cuts off; no mask is looked at or built here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from vidsparse.pipelines.adapter import SparseProcessor, rotate, video_attention


def _heads(
    x: Tensor, heads: int, q: Any, k: Any, v: Any, q_norm: Any, k_norm: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Project ``x`` ``[B, S, C]`` to normed q, k and to v, ``[B, S, H, D]``."""
    query, key, value = (project(x).unflatten(2, (heads, -1)) for project in (q, k, v))
    if q_norm is not None:
        query = q_norm(query)
    if k_norm is not None:
        key = k_norm(key)
    return query, key, value


class JointSparseProcessor(SparseProcessor, ABC):
    """Stands in for the stock processors of joint attention; same call signature.

    Text has projections and norms of its own where the module has them (``add_q_proj`` and so on),
    and shares those of the video where it has none.
    """

    @abstractmethod
    def pair_angles(self, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the video tokens' channel pairs, ``[S, H or 1, D / 2]``."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attention of video ``hidden_states`` ``[B, S, C]`` and text ``[B, T, C]``."""
        if encoder_hidden_states is None:
            raise self.unexpected("without text")
        video, text = hidden_states, encoder_hidden_states
        tokens = video.shape[1]
        own_text = attn.add_q_proj is not None
        x = video if own_text else torch.cat([video, text], 1)
        q, k, v = _heads(x, attn.heads, attn.to_q, attn.to_k, attn.to_v, attn.norm_q, attn.norm_k)
        if image_rotary_emb is not None:
            cos, sin = self.pair_angles(image_rotary_emb)
            if own_text:
                q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            else:
                q[:, :tokens] = rotate(q[:, :tokens], cos, sin)
                k[:, :tokens] = rotate(k[:, :tokens], cos, sin)
        if own_text:
            of_text = _heads(
                text,
                attn.heads,
                attn.add_q_proj,
                attn.add_k_proj,
                attn.add_v_proj,
                attn.norm_added_q,
                attn.norm_added_k,
            )
            q, k, v = (torch.cat(pair, 1) for pair in zip((q, k, v), of_text, strict=True))
        out = video_attention(q, k, v, self.address).flatten(2, 3).type_as(q)
        video, text = out[:, :tokens], out[:, tokens:]
        # a block may project the two itself, or drop the text after its last layer.
        if getattr(attn, "to_out", None) is not None:
            video = attn.to_out[1](attn.to_out[0](video))
        if getattr(attn, "to_add_out", None) is not None:
            text = attn.to_add_out(text)
        return video, text
