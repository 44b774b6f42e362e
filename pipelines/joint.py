"""Attention over video and text at once: HunyuanVideo, 1.5, Motif-Video, Mochi, EasyAnimate.

They differ in where rotary angles come from; text stands after the video, in EasyAnimate before
it. Their masks hold the padding of the text, which the session cuts off; no mask is looked at or
built here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from vidsparse.pipelines.adapter import SparseProcessor
from vidsparse.pipelines.projection import norm_and_rotate, project_heads


class JointSparseProcessor(SparseProcessor, ABC):
    """Stands in for the stock processors of joint attention; same call signature.

    Text has projections and norms of its own where the module has them (``add_q_proj`` and so on),
    and shares those of the video where it has none.
    """

    text_first = False

    @abstractmethod
    def pair_angles(self, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the video tokens' channel pairs, ``[S, H or 1, D / 2]``."""

    def _joined(self, video: Tensor, text: Tensor) -> Tensor:
        return torch.cat([text, video] if self.text_first else [video, text], 1)

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
        first = text.shape[1] if self.text_first else 0
        of_video = slice(first, first + video.shape[1])
        own_text = attn.add_q_proj is not None
        x = video if own_text else self._joined(video, text)
        turned = image_rotary_emb is not None
        norms = (None, None) if turned else (attn.norm_q, attn.norm_k)
        q, k, v = project_heads(x, attn.heads, attn.to_q, attn.to_k, attn.to_v, *norms)
        if image_rotary_emb is not None:
            cos, sin = self.pair_angles(image_rotary_emb)
            begin = 0 if own_text else first
            q = norm_and_rotate(q, attn.norm_q, cos, sin, begin)
            k = norm_and_rotate(k, attn.norm_k, cos, sin, begin)
        if own_text:
            its = project_heads(
                text,
                attn.heads,
                attn.add_q_proj,
                attn.add_k_proj,
                attn.add_v_proj,
                attn.norm_added_q,
                attn.norm_added_k,
            )
            q, k, v = (self._joined(*pair) for pair in zip((q, k, v), its, strict=True))
        out = self.attend(q, k, v).flatten(2, 3).type_as(q)
        of_text = slice(first) if self.text_first else slice(of_video.stop, None)
        video, text = out[:, of_video], out[:, of_text]
        # a block may project the two itself, or drop the text after its last layer.
        if getattr(attn, "to_out", None) is not None:
            video = attn.to_out[1](attn.to_out[0](video))
        if getattr(attn, "to_add_out", None) is not None:
            text = attn.to_add_out(text)
        return video, text
