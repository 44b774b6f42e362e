"""Cosmos 3: one sequence of text, video, sound and actions in ``layers.N.self_attn``.

Text has weights of its own and attends causally, to itself alone. All that is generated attends to
everything: text stands in front of the video and sound and actions behind it, exact both ways. The
rows that text itself would have there are computed for nothing, since a plan is one of as many
queries as keys. Keys and values have fewer heads than queries, and are repeated for ours.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from vidsparse.grid import TokenGrid
from vidsparse.pipelines.adapter import Adapter, SparseProcessor
from vidsparse.pipelines.backends import stock_attention, swapped
from vidsparse.pipelines.families import COSMOS_3
from vidsparse.pipelines.layout import Layout
from vidsparse.pipelines.packed import Packed
from vidsparse.pipelines.parallel import Shares
from vidsparse.pipelines.projection import rotate


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of ``x`` ``[S, H, D]`` by ``[S, D]``: every angle stands in both halves."""
    cos, sin = (angles.chunk(2, -1)[0][:, None] for angles in (cos, sin))
    return rotate(x, cos, sin, halves=True)


class Cosmos3SparseProcessor(SparseProcessor):
    """Stands in for ``Cosmos3AttnProcessor``; same call signature."""

    def __call__(
        self, attn: Any, und_seq: Tensor, gen_seq: Tensor, rotary_emb: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor]:
        """Attention of text ``[T, C]`` and of what is generated behind it, ``[S, C]``."""
        text = und_seq.shape[0]
        of_text = attn.to_q, attn.to_k, attn.to_v
        of_video = attn.add_q_proj, attn.add_k_proj, attn.add_v_proj
        q_text, k_text, v_text = (_by_head(one(und_seq), attn) for one in of_text)
        q, k, v = (_by_head(one(gen_seq), attn) for one in of_video)
        q_text, k_text = attn.norm_q(q_text), attn.norm_k(k_text)
        own_norm = attn.k_norm_und_for_gen
        k_seen = k_text if own_norm is None else own_norm(k_text)
        q, k = attn.norm_added_q(q), attn.norm_added_k(k)
        q_text, k_text, k_seen = (_rotate(x, *rotary_emb[:2]) for x in (q_text, k_text, k_seen))
        q, k = (_rotate(x, *rotary_emb[2:]) for x in (q, k))
        causal = (swapped(x[None]) for x in (q_text, k_text, v_text))
        words = swapped(stock_attention(self.stock, *causal, causal=True))
        # the heads of a group stand beside each other.
        groups = attn.num_key_value_groups
        beside = ((q_text, q, 1), (k_seen, k, groups), (v_text, v, groups))
        whole = (torch.cat(pair)[None].repeat_interleave(n, 2) for *pair, n in beside)
        out = self.attend(*whole)[:, text:]
        words, out = (x.flatten(2, 3)[0] for x in (words, out))
        return attn.to_out(words), attn.to_add_out(out)


def _by_head(x: Tensor, attn: Any) -> Tensor:
    """From ``[S, C]`` to ``[S, H, D]``."""
    return x.view(x.shape[0], -1, attn.head_dim)


def _layout(transformer: Any, arguments: Mapping[str, Any]) -> Layout | str:
    """The grid of the one video, which follows the text."""
    shapes, text = arguments["vision_token_shapes"], arguments["und_len"]
    if len(shapes) != 1:
        return f"{len(shapes)} videos or images stand in one sequence"
    frames, height, width = shapes[0]
    beside = arguments["sequence_length"] - frames * height * width
    if beside == text:
        return Layout(TokenGrid(frames, height, width, text, text_first=True))
    return Layout(TokenGrid(frames, height, width, text=beside, lead=text))


def _plan(transformer: Any) -> Packed:
    """What is generated is apart from the text, and so are its angles."""
    return Packed(
        blocks=("layers",),
        carried="gen_seq",
        every={"rotary_emb": (None, None, 0, 0)},
        dim=0,
        output=1,
    )


ADAPTER: Final = Adapter(
    family=COSMOS_3,
    attention=re.compile(r"layers\.\d+\.self_attn"),
    stock_processors=("Cosmos3AttnProcessor",),
    processor=Cosmos3SparseProcessor,
    layout=_layout,
    branches=("conditional", "unconditional"),
    outputs=("proj_out", "audio_proj_out", "action_proj_out"),
    shares=Shares(plan=_plan),
)
