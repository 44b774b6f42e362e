"""Kandinsky 5: video self-attention in ``visual_transformer_blocks.N.self_attention``.

Latents and grid come with their channels last. Text attends apart, in blocks and in calls of its
own. Weights for ten seconds attend sparsely by themselves (NABLA), in another order of tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from vidsparse.errors import UnsupportedError
from vidsparse.pipelines.adapter import Adapter, SparseProcessor
from vidsparse.pipelines.families import KANDINSKY_5
from vidsparse.pipelines.layout import Layout, latent_grid
from vidsparse.pipelines.parallel import Shares, gathered, split_input
from vidsparse.pipelines.projection import project_heads, rotate


class Kandinsky5SparseProcessor(SparseProcessor):
    """Stands in for ``Kandinsky5AttnProcessor`` in self-attention; same call signature."""

    def rotated(self, x: Tensor, rotary: Tensor) -> Tensor:
        """By the matrices ``[B, S, 1, D / 2, 2, 2]`` of channel pairs, alike in all samples."""
        cos, sin = rotary[0, ..., 0, 0], rotary[0, ..., 1, 0]
        # the stock processor rounds to bf16 here, whatever format the model has.
        return rotate(x, cos, sin).to(torch.bfloat16).type_as(x)

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        rotary_emb: Tensor | None = None,
        sparse_params: Any = None,
    ) -> Tensor:
        """Self-attention of ``hidden_states`` ``[B, S, C]``."""
        if encoder_hidden_states is not None or sparse_params is not None:
            raise self.unexpected("with text or a mask of its own")
        weights = attn.to_query, attn.to_key, attn.to_value
        q, k, v = project_heads(hidden_states, attn.num_heads, *weights, None, None)
        q = attn.query_norm(q.float()).type_as(q)
        k = attn.key_norm(k.float()).type_as(k)
        if rotary_emb is not None:
            q, k = self.rotated(q, rotary_emb), self.rotated(k, rotary_emb)
        projected: Tensor = attn.out_layer(self.attend(q, k, v).flatten(2, 3))
        return projected


def channels_last_layout(transformer: Any, arguments: Mapping[str, Any]) -> Layout | None:
    """Tokens of the latent ``[B, T, H, W, C]``."""
    latent = arguments.get("hidden_states")
    if not isinstance(latent, Tensor) or latent.ndim != 5:
        return None
    grid = latent_grid(latent.movedim(-1, 1), transformer.config.patch_size)
    return None if grid is None else Layout(grid)


def _layout(transformer: Any, arguments: Mapping[str, Any]) -> Layout | None:
    """Tokens of the latent.

    Raises:
        UnsupportedError: the weights bring a sparse attention of their own.
    """
    if arguments.get("sparse_params") is not None:
        raise UnsupportedError(
            "these weights of Kandinsky 5 were trained with a sparse attention of their own "
            "(NABLA), which stands in the place of ours. Hint: remove() the handle to run them as "
            "they are, or use weights for five seconds."
        )
    return channels_last_layout(transformer, arguments)


def _plan(transformer: Any) -> Mapping[str, Any]:
    """Split for the blocks alone: before and after them the tokens have the video's axes."""
    last = len(transformer.visual_transformer_blocks) - 1
    return {
        "visual_transformer_blocks.0": {"visual_embed": split_input(1, 3)},
        "visual_transformer_blocks.*": {"rope": split_input(1, 6)},
        f"visual_transformer_blocks.{last}": gathered(),
    }


ADAPTER: Final = Adapter(
    family=KANDINSKY_5,
    attention=re.compile(r"visual_transformer_blocks\.\d+\.self_attention"),
    stock_processors=("Kandinsky5AttnProcessor",),
    processor=Kandinsky5SparseProcessor,
    layout=_layout,
    branches=("conditional", "unconditional"),
    outputs=("out_layer",),
    shares=Shares(plan=_plan),
)
