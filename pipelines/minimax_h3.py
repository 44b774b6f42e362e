"""MiniMax-H3: one sequence of text, references, sound and video, whose generated video comes last.

Everything that stands before the generated video counts as text here, keyframes and references
included: it attends all tokens and is attended by all of them. So sparse attention adds no error
of its own to the rows that become sound.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from vidsparse.grid import TokenGrid
from vidsparse.pipelines.adapter import Adapter, SparseProcessor
from vidsparse.pipelines.families import MINIMAX_H3
from vidsparse.pipelines.layout import Layout
from vidsparse.pipelines.packed import Packed
from vidsparse.pipelines.parallel import Shares


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of the first channels of ``x`` ``[B, S, H, D]``, angles ``[S, 2P]``.

    Channel c pairs up with c + P, and every angle stands there twice. Unlike ``rotate``, angles
    and products are rounded to the dtype of ``x``, as the stock processor rounds them.
    """
    pairs = cos.shape[-1] // 2
    cos, sin = (angle[:, None, :pairs].to(x.dtype) for angle in (cos, sin))
    first, second = x[..., : 2 * pairs].chunk(2, -1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat((*turned, x[..., 2 * pairs :]), -1)


class MiniMaxH3SparseProcessor(SparseProcessor):
    """Stands in for ``MiniMaxH3AttnProcessor`` in the block stack; same call signature."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Self-attention of the packed sequence ``hidden_states`` ``[B, S, C]``."""
        if attention_mask is not None:
            raise self.unexpected("with an attention mask")
        q, k, v = (
            project(hidden_states).unflatten(2, (attn.heads, -1))
            for project in (attn.to_q, attn.to_k, attn.to_v)
        )
        q, k = attn.norm_q(q), attn.norm_k(k)
        if rotary_emb is not None:
            q, k = (_rotate(x, *rotary_emb) for x in (q, k))
        out = self.attend(q, k, v).flatten(2, 3).type_as(q)
        projected: Tensor = attn.to_out[1](attn.to_out[0](out))
        return projected


_NOT_LAST: Final = "the sequence does not end with whole frames of one size"


def _layout(transformer: Any, arguments: Mapping[str, Any]) -> Layout | str:
    """The grid of the last video rows, by the coordinates ``[S, 3]`` of every row.

    Conditions are video rows too, and other rows part them from what is generated.
    """
    positions, rows = arguments["position_ids"].cpu(), arguments["video_indices"].cpu()
    gaps = (rows.diff() != 1).nonzero()
    video = rows[int(gaps[-1]) + 1 :] if len(gaps) else rows
    if not len(video) or int(video[-1]) != len(positions) - 1:
        return _NOT_LAST
    t, y, _ = axes = positions[video].T
    frames = len(t.unique_consecutive())
    height = len(y[: len(video) // frames].unique_consecutive())
    width = len(video) // (frames * height)
    if frames * height * width != len(video):
        return _NOT_LAST
    by_t, by_y, by_x = axes.unflatten(1, (frames, height, width))
    lines = torch.equal(by_y, by_y[:1, :, :1].expand_as(by_y))
    columns = torch.equal(by_x, by_x[:1, :1].expand_as(by_x))
    if not (lines and columns and torch.equal(by_t, by_t[:, :1, :1].expand_as(by_t))):
        return _NOT_LAST
    text = len(positions) - len(video)
    return Layout(TokenGrid(frames, height, width, text, text_first=True))


def _plan(transformer: Any) -> Packed:
    return Packed(
        blocks=("transformer_blocks",),
        carried="hidden_states",
        every={"adaln_indices": 0, "rotary_emb": 0},
    )


ADAPTER: Final = Adapter(
    family=MINIMAX_H3,
    transformers=("transformer", "transformer_ref"),
    attention=re.compile(r"transformer_blocks\.\d+\.attn"),
    stock_processors=("MiniMaxH3AttnProcessor",),
    processor=MiniMaxH3SparseProcessor,
    layout=_layout,
    outputs=("proj_out", "audio_proj_out"),
    shares=Shares(plan=_plan),
)
