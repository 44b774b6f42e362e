"""HunyuanVideo: joint attention in the dual- and single-stream blocks, padded text at the end.

The stock attention masks the padding in every call, which keeps it off the fast kernels. Valid keys
are a prefix of the sequence, so here the padding is cut off instead. Padded text tokens are no
one's keys, and only video leaves the transformer, so what their rows hold is never seen.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from torch import Tensor

from vidsparse.pipelines.adapter import Adapter, Layout, latent_grid, valid_text
from vidsparse.pipelines.families import HUNYUAN_VIDEO
from vidsparse.pipelines.joint import JointSparseProcessor


class HunyuanVideoSparseProcessor(JointSparseProcessor):
    """Stands in for ``HunyuanVideoAttnProcessor2_0``, and 1.5's, beside video."""

    def pair_angles(self, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """From ``[S, D]``, every angle twice."""
        cos, sin = (x[:, None, 0::2] for x in rotary)
        return cos, sin


def _layout(transformer: Any, arguments: Mapping[str, Any]) -> Layout | None:
    config, mask = transformer.config, arguments["encoder_attention_mask"]
    patch = (config.patch_size_t, config.patch_size, config.patch_size)
    grid = latent_grid(arguments.get("hidden_states"), patch, mask.shape[1])
    return None if grid is None else Layout(grid, valid_text(mask))


ADAPTER: Final = Adapter(
    family=HUNYUAN_VIDEO,
    attention=re.compile(r"(?:single_)?transformer_blocks\.\d+\.attn"),
    stock_processors=("HunyuanVideoAttnProcessor2_0",),
    processor=HunyuanVideoSparseProcessor,
    layout=_layout,
    branches=("conditional", "unconditional"),
)
