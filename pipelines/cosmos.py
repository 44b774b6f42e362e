"""Cosmos 1, 2 and 2.5: video self-attention in ``transformer_blocks.N.attn1``, no text beside it.

Frames that are given have a timestep of their own. Guidance runs the transformer twice a step.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from torch import Tensor

from vidsparse.pipelines.adapter import Adapter
from vidsparse.pipelines.families import COSMOS
from vidsparse.pipelines.layout import Layout, latent_grid
from vidsparse.pipelines.parallel import Shares, gathered, split_input, split_outputs
from vidsparse.pipelines.projection import project_heads, rotate
from vidsparse.pipelines.wan import WanSparseProcessor


class CosmosSparseProcessor(WanSparseProcessor):
    """Stands in for ``CosmosAttnProcessor2_0`` in self-attention; same call signature."""

    def projected(self, attn: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Norms are over each head."""
        return project_heads(
            x, attn.heads, attn.to_q, attn.to_k, attn.to_v, attn.norm_q, attn.norm_k
        )

    def rotated(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """By ``[S, D]``: every angle stands in both halves."""
        cos, sin = (angles.chunk(2, -1)[0][:, None] for angles in rotary)
        return rotate(x, cos, sin, halves=True)

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Any = None,
    ) -> Tensor:
        """Self-attention of ``hidden_states`` ``[B, S, C]``."""
        return super().__call__(
            attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb
        )


def _layout(transformer: Any, arguments: Mapping[str, Any]) -> Layout | None:
    grid = latent_grid(arguments.get("hidden_states"), transformer.config.patch_size)
    return None if grid is None else Layout(grid)


def _plan(transformer: Any) -> Mapping[str, Any]:
    """Split before the blocks; frames with timesteps of their own give every token one."""
    times = {name: split_input(1, 3) for name in ("embedded_timestep", "temb")}
    positions = {"learnable_pos_embed": split_outputs(1, 3)}
    return {
        "rope": split_outputs(0, 2, 2),
        **(positions if transformer.learnable_pos_embed is not None else {}),
        "transformer_blocks.0": {"hidden_states": split_input(1, 3)},
        "transformer_blocks.*": times,
        "norm_out": times,
        "proj_out": gathered(),
    }


ADAPTER: Final = Adapter(
    family=COSMOS,
    attention=re.compile(r"transformer_blocks\.\d+\.attn1"),
    stock_processors=("CosmosAttnProcessor2_0",),
    processor=CosmosSparseProcessor,
    layout=_layout,
    branches=("conditional", "unconditional"),
    shares=Shares(plan=_plan),
)
