"""LTX-Video: video self-attention in ``transformer_blocks.N.attn1``, no text in the sequence.

Guidance is batched. Latents arrive as a sequence already, with their sizes or the coordinates of
every token beside them. Conditions (images, keyframes, references) are further frames.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from typing import Any, Final

from torch import Tensor

from vidsparse.grid import TokenGrid
from vidsparse.pipelines.adapter import Adapter, SparseProcessor
from vidsparse.pipelines.families import LTX
from vidsparse.pipelines.layout import Layout
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


def video_layout(transformer: Any, arguments: Mapping[str, Any]) -> Layout | None:
    """The grid by sizes, or where there are more tokens than that by the coordinates of each."""
    sizes: tuple[Any, ...] = tuple(arguments.get(n) for n in ("num_frames", "height", "width"))
    known, coordinates = None not in sizes, arguments.get("video_coords")
    if coordinates is None or (known and math.prod(sizes) == arguments["hidden_states"].shape[1]):
        return Layout(TokenGrid(*sizes)) if known else None
    # LTX-2 tells where a token begins and ends.
    return frames_layout(coordinates[0] if coordinates.ndim == 3 else coordinates[0, ..., 0])


def frames_layout(coordinates: Tensor) -> Layout:
    """The grid of a sequence of frames, by time, line and column of every token, ``[3, S]``.

    The longest run of frames of one size is the video, whatever times they stand at: conditions of
    its size are among its frames. Those of another size, before or after it, count as text.
    """
    _, y, x = coordinates.cpu()
    lines = y.diff()
    begins = (lines < 0) | ((lines == 0) & (x.diff() <= 0))
    frames = y.tensor_split((begins.nonzero()[:, 0] + 1).tolist())
    sizes = [(len(frame), int((frame == frame[0]).sum())) for frame in frames]
    runs, done = [], 0
    for (tokens, width), run in itertools.groupby(sizes):
        count = len(list(run))
        runs.append((count * tokens, done, (count, tokens // width, width)))
        done += count * tokens
    video, lead, grid = max(runs, key=lambda run: run[0])
    return Layout(TokenGrid(*grid, text=done - video, lead=lead))


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
    layout=video_layout,
    shares=Shares(plan=_plan),
)
