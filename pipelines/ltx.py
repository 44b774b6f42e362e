"""LTX-Video: video self-attention in ``transformer_blocks.N.attn1``, no text in the sequence.

Guidance is batched. Latents arrive as a sequence already, with their sizes or the coordinates of
every token beside them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from torch import Tensor

from vidsparse.grid import TokenGrid
from vidsparse.pipelines.adapter import Adapter, Layout, SparseProcessor
from vidsparse.pipelines.families import LTX
from vidsparse.pipelines.parallel import Shares, gathered, split_input, split_outputs
from vidsparse.pipelines.projection import rotate


class LTXSparseProcessor(SparseProcessor):
    """Stands in for ``LTXVideoAttnProcessor`` in self-attention; same call signature."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Self-attention of ``hidden_states`` ``[B, S, C]``."""
        if encoder_hidden_states is not None or attention_mask is not None:
            raise self.unexpected("with text or an attention mask")
        q = attn.norm_q(attn.to_q(hidden_states))
        k = attn.norm_k(attn.to_k(hidden_states))
        v = attn.to_v(hidden_states)
        if image_rotary_emb is not None:
            # over the channels of all heads; every angle stands there twice, once for each of a
            # pair.
            cos, sin = (x[..., 0::2] for x in image_rotary_emb)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        q, k, v = (x.unflatten(2, (attn.heads, -1)) for x in (q, k, v))
        out = self.attend(q, k, v).flatten(2, 3).type_as(q)
        projected: Tensor = attn.to_out[1](attn.to_out[0](out))
        return projected


def sizes_layout(transformer: Any, arguments: Mapping[str, Any]) -> Layout | None:
    """The grid by the sizes that the pipeline passes; None where it passes coordinates alone."""
    sizes: tuple[Any, ...] = tuple(arguments.get(n) for n in ("num_frames", "height", "width"))
    return None if None in sizes else Layout(TokenGrid(*sizes))


def _layout(transformer: Any, arguments: Mapping[str, Any]) -> Layout | None:
    """The grid by sizes, or by the coordinates ``[B, 3, S]`` of every token.

    Conditions are frames of the same size in front of the video.
    """
    coordinates = arguments.get("video_coords")
    if coordinates is None:
        return sizes_layout(transformer, arguments)
    height, width = (int(axis.unique().numel()) for axis in coordinates[0, 1:])
    return Layout(TokenGrid(coordinates.shape[-1] // (height * width), height, width))


def _plan(transformer: Any) -> Mapping[str, Any]:
    """The video and what belongs to its tokens; the text, which diffusers would split, stays whole.

    An image or a condition gives every token a timestep of its own.
    """
    return {
        "": {"hidden_states": split_input(1, 3), "timestep": split_input(1, 2)},
        "rope": split_outputs(1, 3, 2),
        "proj_out": gathered(),
    }


ADAPTER: Final = Adapter(
    family=LTX,
    attention=re.compile(r"transformer_blocks\.\d+\.attn1"),
    stock_processors=("LTXVideoAttnProcessor",),
    processor=LTXSparseProcessor,
    layout=_layout,
    shares=Shares(plan=_plan),
)
