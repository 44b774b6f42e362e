"""Kandinsky 6: video self-attention in ``visual_transformer_blocks.N.video_dec_block``.

Latents come with their channels last, a reference image as one more frame behind the video. Sound
attends apart, and to the video by calls of its own.
"""

from __future__ import annotations

import re
from typing import Any, Final

from torch import Tensor

from vidsparse.pipelines.adapter import Adapter, SparseProcessor
from vidsparse.pipelines.families import KANDINSKY_6
from vidsparse.pipelines.kandinsky5 import channels_last_layout
from vidsparse.pipelines.packed import Packed
from vidsparse.pipelines.parallel import Shares
from vidsparse.pipelines.projection import project_heads, rotate


class Kandinsky6SparseProcessor(SparseProcessor):
    """Stands in for ``Kandinsky6AttnProcessor`` in self-attention; same call signature."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        rotary_emb: Tensor | None = None,
        rotary_emb_kv: Tensor | None = None,
        attn_mask: Tensor | None = None,
    ) -> Tensor:
        """Self-attention of ``hidden_states`` ``[B, S, C]``."""
        if encoder_hidden_states is not None or attn_mask is not None:
            raise self.unexpected("with text or an attention mask")
        weights = attn.to_query, attn.to_key, attn.to_value
        norms = attn.query_norm, attn.key_norm
        q, k, v = project_heads(hidden_states, attn.num_heads, *weights, *norms)
        # matrices [S, 1, D / 2, 2, 2] of channel pairs, the same for both.
        if rotary_emb is not None:
            cos, sin = rotary_emb[..., 0, 0], rotary_emb[..., 1, 0]
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        projected: Tensor = attn.out_layer(self.attend(q, k, v).flatten(2, 3))
        return projected


def _plan(transformer: Any) -> Packed:
    """Sound stays whole, and attends to the video by the host's own exchange."""
    return Packed(
        blocks=("visual_transformer_blocks",), carried="vis", every={"vis_rope": 0}, output=0
    )


ADAPTER: Final = Adapter(
    family=KANDINSKY_6,
    attention=re.compile(
        r"(?P<block>visual_transformer_blocks\.\d+)\.video_dec_block\.self_attention"
    ),
    stock_processors=("Kandinsky6AttnProcessor",),
    processor=Kandinsky6SparseProcessor,
    layout=channels_last_layout,
    branches=("conditional", "unconditional"),
    outputs=("out_layer", "audio_out_layer"),
    shares=Shares(
        plan=_plan,
        exchanged=re.compile(r"visual_transformer_blocks\.\d+\.av_cross_attention"),
    ),
)
