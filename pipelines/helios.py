"""Helios: self-attention in ``blocks.N.attn1``, of a section of the video behind what was made.

Frames of the past stand in front, at three scales. Their keys may be weighed anew, head by head.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from vidsparse.pipelines.adapter import Adapter
from vidsparse.pipelines.families import HELIOS
from vidsparse.pipelines.layout import Layout, latent_grid, with_history
from vidsparse.pipelines.packed import Packed
from vidsparse.pipelines.parallel import Shares
from vidsparse.pipelines.projection import rotate
from vidsparse.pipelines.wan import WanSparseProcessor


class HeliosSparseProcessor(WanSparseProcessor):
    """Stands in for ``HeliosAttnProcessor`` in self-attention; same call signature."""

    def rotated(self, x: Tensor, rotary: Tensor) -> Tensor:
        """By ``[B, S, 2D]``, cosines and then sines, every angle twice."""
        cos, sin = (angles[:, :, None, 0::2] for angles in rotary.chunk(2, -1))
        return rotate(x, cos, sin)

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: Any = None,
        original_context_length: int | None = None,
    ) -> Tensor:
        """Self-attention of ``hidden_states`` ``[B, S, C]``, whose end is the section."""
        if encoder_hidden_states is not None or attention_mask is not None:
            raise self.unexpected("with text or an attention mask")
        q, k, v = self.projected(attn, hidden_states)
        if rotary_emb is not None:
            q, k = self.rotated(q, rotary_emb), self.rotated(k, rotary_emb)
        # of several processes the first may have nothing of the section.
        past = 0
        if original_context_length is not None:
            past = hidden_states.shape[1] - original_context_length
        if attn.is_amplify_history and past:
            scale = 1 + torch.sigmoid(attn.history_key_scale) * (attn.max_scale - 1)
            # one for all heads or one for each.
            k = torch.cat([k[:, :past] * scale.view(1, 1, -1, 1), k[:, past:]], 1)
        return self.projected_out(attn, self.attend(q, k, v).type_as(q))


def _layout(transformer: Any, arguments: Mapping[str, Any]) -> Layout | None:
    """The section behind its past; a pyramid's first stages are smaller than what was made."""
    patch = transformer.config.patch_size
    grid = latent_grid(arguments.get("hidden_states"), patch)
    if grid is None:
        return None
    names = (f"latents_history_{term}" for term in ("short", "mid", "long"))
    short, *coarse = (arguments.get(name) for name in names)
    return Layout(with_history(grid, short, coarse, patch))


def _plan(transformer: Any) -> Packed:
    """Frames of the past that are the grid's are dealt with the section, others stay whole."""
    return Packed(
        blocks=("blocks",),
        carried="hidden_states",
        every={"temb": 1, "rotary_emb": 1},
        ending="original_context_length",
    )


ADAPTER: Final = Adapter(
    family=HELIOS,
    attention=re.compile(r"blocks\.\d+\.attn1"),
    stock_processors=("HeliosAttnProcessor",),
    processor=HeliosSparseProcessor,
    layout=_layout,
    branches=("conditional", "unconditional"),
    shares=Shares(plan=_plan),
)
