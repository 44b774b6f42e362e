"""EasyAnimate: joint attention, text first; padded text takes part.

Guidance is batched. The first blocks project the text by weights of its own, the others do not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from vidsparse.pipelines.adapter import Adapter
from vidsparse.pipelines.families import EASYANIMATE
from vidsparse.pipelines.hunyuan_video import HunyuanVideoSparseProcessor
from vidsparse.pipelines.layout import Layout, latent_grid
from vidsparse.pipelines.parallel import Shares, gathered, split_input, split_outputs


class EasyAnimateSparseProcessor(HunyuanVideoSparseProcessor):
    """Stands in for ``EasyAnimateAttnProcessor2_0``; angles come as HunyuanVideo's."""

    text_first = True


def _layout(transformer: Any, arguments: Mapping[str, Any]) -> Layout | None:
    """Text of one or of two encoders stands before the video."""
    texts = (arguments.get(f"encoder_hidden_states{more}") for more in ("", "_t5"))
    text = sum(part.shape[1] for part in texts if part is not None)
    patch = transformer.config.patch_size
    grid = latent_grid(arguments.get("hidden_states"), (1, patch, patch), text, text_first=True)
    return None if grid is None else Layout(grid)


def _plan(transformer: Any) -> Mapping[str, Any]:
    """Split before the blocks, where the text is whole."""
    return {
        "rope_embedding": split_outputs(0, 2, 2),
        "transformer_blocks.0": {"hidden_states": split_input(1, 3)},
        "proj_out": gathered(),
    }


ADAPTER: Final = Adapter(
    family=EASYANIMATE,
    attention=re.compile(r"transformer_blocks\.\d+\.attn1"),
    stock_processors=("EasyAnimateAttnProcessor2_0",),
    processor=EasyAnimateSparseProcessor,
    layout=_layout,
    stacked=True,
    shares=Shares(plan=_plan),
)
