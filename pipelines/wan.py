"""Wan 2.1 and 2.2: video self-attention in ``blocks.N.attn1``, no text in the sequence.

Images are further channels of the latent, so that image- and first-last-frame-to-video, the two
experts of 2.2 and its per-token timesteps all look the same here. VACE has control blocks beside
the main ones, ``vace_blocks.N.attn1``; their layers are numbered after those. Wan-Animate and
ChronoEdit have these blocks in transformers of their own, Lucy Edit in Wan's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from torch import Tensor

from vidsparse.pipelines.adapter import Adapter, SparseProcessor
from vidsparse.pipelines.families import WAN
from vidsparse.pipelines.layout import Layout, latent_grid
from vidsparse.pipelines.parallel import (
    Shares,
    gathered,
    own_plan,
    split_input,
    split_outputs,
)
from vidsparse.pipelines.projection import rotate


class WanSparseProcessor(SparseProcessor):
    """Stands in for diffusers' ``WanAttnProcessor`` in self-attention; same call signature."""

    def rotated(self, x: Tensor, rotary: Any) -> Tensor:
        """``x`` ``[B, S, H, D]`` by the angles that the family's transformer passes."""
        # every angle stands there twice, once for each channel of a pair.
        cos, sin = (angles[..., 0::2] for angles in rotary)
        return rotate(x, cos, sin)

    def projected(self, attn: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Normed queries and keys, and values, ``[B, S, H, D]``; norms are over all heads."""
        if attn.fused_projections:
            q, k, v = attn.to_qkv(x).chunk(3, dim=-1)
        else:
            q, k, v = attn.to_q(x), attn.to_k(x), attn.to_v(x)
        if attn.norm_q is not None:
            q, k = attn.norm_q(q), attn.norm_k(k)
        q, k, v = (one.unflatten(2, (attn.heads, -1)) for one in (q, k, v))
        return q, k, v

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: Any = None,
    ) -> Tensor:
        """Self-attention of ``hidden_states`` ``[B, S, C]``."""
        if encoder_hidden_states is not None or attention_mask is not None:
            raise self.unexpected("with text or an attention mask")
        q, k, v = self.projected(attn, hidden_states)
        if rotary_emb is not None:
            q, k = self.rotated(q, rotary_emb), self.rotated(k, rotary_emb)
        return self.projected_out(attn, self.attend(q, k, v).type_as(q))

    def projected_out(self, attn: Any, out: Tensor) -> Tensor:
        """The block's output ``[B, S, C]`` of attention's ``[B, S, H, D]``."""
        projected: Tensor = attn.to_out[1](attn.to_out[0](out.flatten(2, 3)))
        return projected


def _layout(transformer: Any, arguments: Mapping[str, Any]) -> Layout | None:
    """Tokens of the latent ``[B, C, T, H, W]``; VACE's control blocks see the same ones.

    Wan-Animate's first frame is the reference. ChronoEdit may drop its middle frames half-way.
    """
    grid = latent_grid(arguments.get("hidden_states"), transformer.config.patch_size)
    return None if grid is None else Layout(grid)


def _plan(transformer: Any) -> Mapping[str, Any]:
    """diffusers' own; it has none for VACE, whose control stands beside the video token by token.

    Raises:
        UnsupportedError: Wan-Animate, which looks at faces frame by frame.
    """
    if type(transformer).__name__ != "WanVACETransformer3DModel":
        return own_plan(transformer)
    return {
        "rope": split_outputs(1, 4, 2),
        "vace_blocks.*": {"hidden_states": split_input(1, 3)},
        "vace_blocks.0": {"control_hidden_states": split_input(1, 3)},
        "blocks.0": {"hidden_states": split_input(1, 3)},
        "proj_out": gathered(),
    }


ADAPTER: Final = Adapter(
    family=WAN,
    transformers=("transformer", "transformer_2"),
    attention=re.compile(r"(?:vace_)?blocks\.\d+\.attn1"),
    stock_processors=("WanAttnProcessor",),
    processor=WanSparseProcessor,
    layout=_layout,
    branches=("conditional", "unconditional"),
    shares=Shares(
        plan=_plan,
        host=True,
        apart=(
            "WanTransformer3DModel",
            "WanVACETransformer3DModel",
            "ChronoEditTransformer3DModel",
        ),
    ),
)
