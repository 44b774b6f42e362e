"""Allegro: video self-attention in ``transformer_blocks.N.attn1``, angles in thirds of a head.

Guidance is batched. Its pipeline passes no mask of video tokens, though the transformer takes one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from vidsparse.pipelines.adapter import Adapter
from vidsparse.pipelines.families import ALLEGRO
from vidsparse.pipelines.layout import Layout, latent_grid
from vidsparse.pipelines.parallel import Shares, gathered, own_tokens, split_input
from vidsparse.pipelines.wan import WanSparseProcessor


class AllegroSparseProcessor(WanSparseProcessor):
    """Stands in for ``AllegroAttnProcessor2_0`` in self-attention; same call signature."""

    def rotated(self, x: Tensor, rotary: Any) -> Tensor:
        """By tables ``[T, D / 3]`` of time, height and width, and each token's place in them."""
        parts = []
        for part, tables, at in zip(x.chunk(3, -1), *rotary, strict=True):
            places = own_tokens(at[0], 0, x.shape[1])
            # an angle stands there for a channel of either half; rounded as the stock products are.
            cos, sin = (table.chunk(2, -1)[0][places, None] for table in tables)
            first, second = part.chunk(2, -1)
            parts += [first * cos - second * sin, second * cos + first * sin]
        return torch.cat(parts, -1).type_as(x)

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        temb: Tensor | None = None,
        image_rotary_emb: Any = None,
    ) -> Tensor:
        """Self-attention of ``hidden_states`` ``[B, S, C]``."""
        return super().__call__(
            attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb
        )


def _layout(transformer: Any, arguments: Mapping[str, Any]) -> Layout | None:
    config = transformer.config
    patch = (config.patch_size_t, config.patch_size, config.patch_size)
    grid = latent_grid(arguments.get("hidden_states"), patch)
    return None if grid is None else Layout(grid)


def _plan(transformer: Any) -> Mapping[str, Any]:
    """Split before the blocks."""
    return {
        "transformer_blocks.0": {"hidden_states": split_input(1, 3)},
        "proj_out": gathered(),
    }


ADAPTER: Final = Adapter(
    family=ALLEGRO,
    attention=re.compile(r"transformer_blocks\.\d+\.attn1"),
    stock_processors=("AllegroAttnProcessor2_0",),
    processor=AllegroSparseProcessor,
    layout=_layout,
    stacked=True,
    shares=Shares(plan=_plan),
)
